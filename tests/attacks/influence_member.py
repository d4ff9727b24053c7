"""``shoal``, but what it brings to rounds, or makes of others' work, is a lie: ``influence_member.py LIE join …``.

``huge``, ``random``: contributions of 1e30, or of random bytes, under the claims of its real work. ``huge claimed``,
``random claimed``: the same under the largest claims that there are. ``mean``: its part's means are a million times too
large. It takes long for each step, so that its weight is small.
"""

import os
import sys
from typing import Any

import torch
from tests.integration.slow_member import slow_down
from torch import Tensor

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.peer.cli.main import main
from shoal.swarm.averaging import round_feedback
from shoal.swarm.averaging.norm_claims import pack
from shoal.swarm.averaging.reduction import PartReducer, ReducedChunk

STEP_S = 0.5
ENLARGED = 1e6


def send_huge() -> None:
    """Send contributions of 1e30; their norms have been measured before."""
    real = ErrorFeedback.begin

    def begin(self: ErrorFeedback, contribution: RangeReader, largest: float | None = None) -> None:
        real(self, TensorReader(torch.full((contribution.elements,), 1e30)), 1e30)

    ErrorFeedback.begin = begin  # type: ignore[method-assign]


def send_random() -> None:
    """Send random bytes as packed contributions, with scales that are large numbers."""
    real = ErrorFeedback.encode_chunks

    def randomized(packed: Tensor, codec: Any, start: int, stop: int) -> Tensor:
        packed = packed.clone()
        packed.numpy()[:] = bytearray(os.urandom(packed.numel()))
        scales = packed[: 4 * -(-(stop - start) // codec.block)].view(-1, 4)
        scales[:, 3] = 0x47  # random scales are mostly no numbers: these are from 2**15 to 2**17
        return packed

    def encode_chunks(self: ErrorFeedback, codec: Any, chunks: Any, packed: Tensor) -> list[Tensor]:
        encoded = real(self, codec, chunks, packed)
        return [randomized(one, *chunk) for one, chunk in zip(encoded, chunks, strict=True)]

    ErrorFeedback.encode_chunks = encode_chunks  # type: ignore[method-assign]


def claim_everything() -> None:
    def claim_of(contribution: list[float], residual: list[float]) -> bytes:
        return pack([3e38] * len(contribution))

    round_feedback.claim_of = claim_of  # type: ignore[assignment]


def enlarge_means() -> None:
    real = PartReducer._encode

    def encode(self: PartReducer, mean: Any, header: Any, bounds: tuple[int, int]) -> ReducedChunk:
        made, size = real(self, mean, header, bounds), bounds[1] - bounds[0]
        codec, packed = self._codec_map.result(*bounds, len(self.group.members)), made.result[self.group.header_bytes :]
        if made.included:
            packed[:] = codec.encode(codec.decode(packed, size) * ENLARGED).numpy()
        return made

    PartReducer._encode = encode  # type: ignore[method-assign]


if __name__ == "__main__":
    _, lie, *arguments = sys.argv
    slow_down(STEP_S)
    kind, *claimed = lie.split()
    {"huge": send_huge, "random": send_random, "mean": enlarge_means}[kind]()
    if claimed:
        claim_everything()
    sys.argv = ["shoal", *arguments]
    main()
