"""Means of a secure round, from the opened sums of its masking groups: as owners make them, and auditors again.

The same sums give the same bytes on every machine: sums of codes are exact, and all else is as in any mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.compression.fixed_point import mean_of
from shoal.compression.formats import CodecError
from shoal.compression.robust_mean import mean_of_groups
from shoal.compression.weighted_mean import EncodingLoss
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.masked_chunks import LaneLayout
from shoal.swarm.averaging.reduction import ReducedChunk
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.secure.groups import MaskingGroup
from shoal.swarm.secure.masks import Lanes

_AT_ONCE = 2**16
"""Elements whose sums, in float64, stay in a processor's cache."""

OpenedSums = Mapping[MaskingGroup, tuple[Sequence[int], Lanes]]
"""By group, in the order of the draw: the members in its sum, and the sum without masks."""


def mean_of_sums(store: ResultStore, layout: LaneLayout, chunk: int, opened: OpenedSums) -> torch.Tensor:
    """Return the mean of a chunk, (n,) float32. ``opened``: of that chunk, as many sums as the plan's kind of mean
    needs. For a worker thread."""
    block, (start, stop) = layout.secure.block, store.bounds(chunk)
    scales = layout.scales[layout.blocks(start, stop)]
    weight = store.group.weight(member for members, _ in opened.values() for member in members)
    mean, is_trimmed = torch.empty(stop - start), store.plan.mean == "trimmed"
    # Groups are compared by their norms in the whole chunk.
    step = stop - start if is_trimmed else max(1, _AT_ONCE // block) * block
    for at in range(0, stop - start, step):
        upto = min(at + step, stop - start)
        means, total = [], np.zeros(upto - at)
        exponents = scales[at // block : -(-upto // block)]
        for masked, (members, lanes) in opened.items():
            one = _weighted(store.plan, layout, masked, lanes[at:upto])
            if is_trimmed:
                means.append(mean_of(one, block, exponents, 1 / store.group.weight(members)))
            else:
                total += one
        mean[at:upto] = mean_of_groups(means) if means else mean_of(total, block, exponents, 1 / weight)
    return mean


def heaviest(plan: RoundPlan, group: MaskingGroup) -> int:
    """Return the largest weight in a masking group, relative to which its members multiply their values."""
    return max(plan.members[one].weight for one in group.members)


def _weighted(plan: RoundPlan, layout: LaneLayout, group: MaskingGroup, lanes: Lanes) -> NDArray[np.float64]:
    """Return the sums of a group's codes, times weights."""
    shift = 16 - layout.bits(len(group.members))
    signed = (lanes << np.uint16(shift)).view("<i2") >> np.int16(shift)
    sums: NDArray[np.float64] = signed * np.float64(heaviest(plan, group))
    return sums


def encoded_mean(store: ResultStore, chunk: int, mean: torch.Tensor, header: ChunkHeader) -> ReducedChunk:
    """Encode the mean of a chunk with its header. For a worker thread."""
    group, codec = store.group, store.codec(chunk)
    result = store.buffers.results.take(store.result_bytes(chunk), group.header_bytes)
    result[: group.header_bytes] = group.pack_header(header)
    packed = torch.frombuffer(result[group.header_bytes :], dtype=torch.uint8)
    left = torch.zeros_like(mean)
    try:
        codec.encode_residual(mean, left, left.view(-1), packed)
    except CodecError:  # a sum that does not fit into float32
        return ReducedChunk(memoryview(group.pack_header(ChunkHeader())), [], None)
    # Of groups that are compared, what is lost would come back in one group, and be trimmed.
    loss = EncodingLoss.of(left) if store.plan.mean != "trimmed" else None
    return ReducedChunk(result, header.included, loss)
