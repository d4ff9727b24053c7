"""Judge of one result chunk: reduces it again from the contributions that it says it includes, and compares the bytes.

Owners reduce the same way (``reduction.PartReducer``), and the same contributions give the same bytes on every machine,
so a difference proves that whoever signed the part did not make the mean that it claims. How far that moved the mean is
compared with how far its maker's own contribution could have moved it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import CodecError
from shoal.compression.norms import RELATIVE_ERROR
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.merkle import MerkleTree, is_of
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.reduction import PartReducer, ReducedChunk
from shoal.swarm.averaging.results import ResultStore, chunk_digest
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.evidence import Evidence, ShownContribution, pack_evidence, unpack_evidence
from shoal.swarm.protocol.rounds import Part, RoundPlan, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.statements import PartStatement, has_signed
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.protocol.verdict_chain import check_verdict

_LEEWAY = 1.0 + 4.0 * RELATIVE_ERROR
"""Factor on claimed squares. Machines measure a square with an error of up to ``RELATIVE_ERROR`` each, up or down, so a
chunk at the edge of its claim may have been within it for its owner; so little above it does no harm."""

_MOST_EXCESS = 1e9
"""Largest excess that is told: of a maker whose own contribution could move nothing there, for one."""


@dataclass(frozen=True)
class RunFacts:
    """What a judge knows of a run from its run file, the model's layout and the host's key.

    ``stage``: the one whose model this is, None without stages. Stages of one size may have other codecs."""

    run_hash: bytes
    host_key: bytes
    elements: int
    codec_map: CodecMap
    stage: int | None = None

    @classmethod
    def of(cls, run: RunFile, host_key: bytes, layout: Sequence[TensorSpec], stage: int | None = None) -> RunFacts:
        codec_map = CodecMap(run.format_map([(spec.name, spec.shape) for spec in layout]))
        return cls(run.hash, host_key, sum(spec.elements for spec in layout), codec_map, stage)


@dataclass(frozen=True)
class Judgement:
    """What evidence shows. ``guilty``: ``maker`` signed another mean than that of what it says it includes;
    ``innocent``: its mean is right; ``void``: nothing, as the evidence is incomplete or not signed as it should be.
    ``excess``: how far the wrong mean is from the right one, relative to how far the maker's own contribution could
    have moved it (``NormBounds.influence``); above 1 it is beyond the bound."""

    word: Literal["guilty", "innocent", "void"]
    reason: str
    maker: str = ""
    round: int = 0
    excess: float = 0.0


def judge(data: bytes, facts: RunFacts) -> Judgement:
    """Judge packed evidence, whoever it is from. For a worker thread."""
    try:
        evidence = unpack_evidence(data)
        plan, part = _committed(evidence, facts)
        maker = _maker(evidence, plan)
        peer = plan.members[maker].peer
        store = ResultStore(plan, facts.codec_map)
        included = _included(evidence, store, part)
        packed = {
            one.member: checked_contribution(store, evidence.chunk, one.member, memoryview(one.data))
            for one in evidence.contributions
        }
    except WireError as error:
        return Judgement("void", str(error))
    again = reduce_again(store, evidence.chunk, included, packed)
    if same_bytes(again, memoryview(evidence.result)):
        return Judgement("innocent", f"chunk {evidence.chunk} is the mean of what it includes", peer, plan.round)
    excess = _excess(store, evidence, maker, included, again)
    reason = (
        f"chunk {evidence.chunk} is not the mean of what it says it includes: it is off by {excess:.3g} times what its "
        "maker's own contribution could have moved it"
    )
    return Judgement("guilty", reason, peer, plan.round, excess)


def _excess(store: ResultStore, evidence: Evidence, maker: int, included: Sequence[int], again: memoryview) -> float:
    """Return how far the wrong mean is from the right one, relative to the maker's influence there."""
    result = memoryview(evidence.result)
    moved = float((_values(store, evidence.chunk, result) - _values(store, evidence.chunk, again)).double().norm())
    allowed = store.norm_bounds.influence(maker, included, *store.bounds(evidence.chunk))
    return min(moved / allowed, _MOST_EXCESS) if allowed else _MOST_EXCESS


def _values(store: ResultStore, chunk: int, result: memoryview) -> torch.Tensor:
    """Return what members make of a result chunk, (n,) float32: zeros where it is void or does not decode."""
    start, stop = store.bounds(chunk)
    try:
        return store.codec(chunk).decode(result[store.group.header_bytes :], stop - start)
    except CodecError:
        return torch.zeros(stop - start)


def _committed(evidence: Evidence, facts: RunFacts) -> tuple[RoundPlan, Part]:
    """Return plan and part of a committed chunk. Raises ``WireError`` where the host did not sign it for this run."""
    verdict = evidence.verdict
    check_verdict(verdict, facts.host_key)
    plan = verdict.plan
    if (verdict.run_hash, verdict.stage) != (facts.run_hash, facts.stage) or plan is None or not verdict.committed:
        raise WireError("the verdict is not of a committed round of this run and stage")
    if plan.parts[-1].stop != facts.elements or len(verdict.digests) != len(plan.parts):
        raise WireError("the plan is not of the run's model")
    if evidence.part >= len(plan.parts) or verdict.digests[evidence.part] is None:
        raise WireError("the verdict has not committed that part")
    return plan, plan.parts[evidence.part]


def _maker(evidence: Evidence, plan: RoundPlan) -> int:
    """Return the index of the member that has signed for this chunk under this plan.

    Raises ``WireError`` if nobody has."""
    statement, chunk = PartStatement.of(evidence.verdict, evidence.part), evidence.chunk
    made = evidence.verdict.makers[evidence.part] if statement is not None else None
    if statement is None or made is None or made.member >= len(plan.members):
        raise WireError("nobody has signed for that part")
    maker = plan.members[made.member]
    if not any(start <= chunk < stop for start, stop in made.chunks):
        raise WireError("its maker has not signed for that chunk")
    if not has_signed(maker.identity_key, maker.peer, made.signature, statement.bytes_to_sign()):
        raise WireError("the part is not signed by its maker")
    return made.member


def _included(evidence: Evidence, store: ResultStore, part: Part) -> list[int]:
    """Return the members that the chunk says it includes, if all of them are shown. Raises ``WireError``."""
    chunks, digest = store.chunks_of(part), evidence.verdict.digests[evidence.part]
    assert digest is not None
    if evidence.chunk not in chunks:
        raise WireError("the chunk is not of that part")
    place, own = evidence.chunk - chunks.start, chunk_digest(memoryview(evidence.result))
    if not is_of(digest, len(chunks), place, [own], evidence.path):
        raise WireError("the result chunk is not the committed one")
    if len(evidence.result) < store.group.header_bytes:
        raise WireError("the result chunk has no header")
    header = store.group.header(memoryview(evidence.result))
    if not header.included or header.reduced_rows:
        raise WireError("nobody, or whole rows, are in that mean: it cannot be made again")
    if [one.member for one in evidence.contributions] != sorted(header.included):
        raise WireError("not all the contributions are shown that the chunk includes, or others")
    return header.included


def checked_contribution(store: ResultStore, chunk: int, member: int, data: memoryview) -> memoryview:
    """Return the leaves of a contribution's chunk. Raises ``WireError`` if the member has not committed to them."""
    start, stop = store.bounds(chunk)
    if data.nbytes != store.leaf_grid.chunk_bytes(start, stop):
        raise WireError(f"the contribution of member {member} has {data.nbytes} bytes, which does not fit")
    return store.leaf_grid.checked(store.plan.members[member].root, start, stop, data)


def reduce_again(
    store: ResultStore, chunk: int, included: Sequence[int], contributions: Mapping[int, memoryview]
) -> memoryview:
    """Return the result chunk that these members' contributions give, each (leaves) packed. For a worker thread."""
    bounds = NormBounds(store.plan, store.codec_map, leeway=_LEEWAY)
    reducer = PartReducer(store.codec_map, bounds, store.group, {chunk: store.bounds(chunk)}, (), store.buffers)
    for member in store.group.members:
        if member in included:
            reducer.offer(chunk, member, contributions[member])
        else:
            reducer.give_up(member)
    made = reducer.reduce(chunk)
    assert isinstance(made, ReducedChunk), "no rows came as partial sums"
    return made.result


def make_evidence(
    verdict: Verdict, part: int, chunk: int, results: Sequence[memoryview], contributions: Mapping[int, memoryview]
) -> bytes:
    """Pack the evidence on a chunk. ``results``: all chunks of the part, in order; ``contributions``: chunks with their
    paths, of all included members. For a worker thread. Raises ``WireError`` if it is too large."""
    plan = verdict.plan
    assert plan is not None
    place = chunk - plan.parts[part].start // plan.chunk_elements
    tree = MerkleTree([chunk_digest(one) for one in results])
    shown = [ShownContribution(member=one, data=bytes(contributions[one])) for one in sorted(contributions)]
    return pack_evidence(
        Evidence(
            verdict=verdict,
            part=part,
            chunk=chunk,
            result=bytes(results[place]),
            path=tree.path(place, place + 1),
            contributions=tuple(shown),
        )
    )
