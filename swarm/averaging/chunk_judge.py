"""Judge of one chunk of a mean or partial sum: reduces it again from what it says it includes, and compares the bytes.

Owners and row reducers reduce the same way (``reduction.PartReducer``), and the same contributions and partial sums
give the same bytes on every machine, so a difference proves that whoever signed the chunk did not make what it claims.
A mean that includes a wrong partial sum is right; the partial sum itself shows that it is wrong. How far that moved the
mean is compared with how far its maker's own contribution could have moved it. Means of secure rounds are made again
from masked contributions (``masked_round.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import CodecError
from shoal.compression.norms import RELATIVE_ERROR
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_header import ChunkHeader, Group
from shoal.swarm.averaging.masked_round import MaskedRound
from shoal.swarm.averaging.merkle import MerkleTree, is_of
from shoal.swarm.averaging.norm_bounds import NormBounds, secure_influence
from shoal.swarm.averaging.partial_sums import is_signed, name_of_sums
from shoal.swarm.averaging.reduction import PartReducer, ReducedChunk
from shoal.swarm.averaging.results import ResultStore, chunk_digest
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.evidence import (
    Evidence,
    ShownContribution,
    ShownPartialSum,
    pack_evidence,
    unpack_evidence,
)
from shoal.swarm.protocol.rounds import Part, RoundPlan, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.statements import PartStatement, PlanStatement, has_signed, name_of, plan_digest
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.protocol.verdict_chain import check_verdict

_LEEWAY = 1.0 + 4.0 * RELATIVE_ERROR
"""Factor on claimed squares. Machines measure a square with an error of up to ``RELATIVE_ERROR`` each, up or down, so a
chunk at the edge of its claim may have been within it for its owner; so little above it does no harm."""


_MOST_EXCESS = 1e9
"""Largest excess that is told: of a maker whose own contribution could move nothing there, for one."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that a judgement depends on: from its run file, the model's layout and the host's key.

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
class Subject:
    """Subject of a judgement: a chunk of a mean, or with ``row`` that row's partial sum of it.

    ``part``: its index in the plan; ``chunk``: index in the round; ``data``: header and packed values."""

    part: int
    chunk: int
    row: int | None
    data: memoryview

    def group(self, store: ResultStore) -> Group:
        """Return the members that can be in it. Raises ``WireError`` for a row that the plan does not have."""
        if self.row is None:
            return store.group
        if not store.plan.columns or self.row >= len(store.group.rows):
            raise WireError("the plan has no such row")
        return store.group.row(self.row)

    def header(self, store: ResultStore) -> ChunkHeader:
        """Return its header. Raises ``WireError`` without one, or where nobody is in it."""
        group = self.group(store)
        if self.data.nbytes < group.header_bytes or not (header := group.header(self.data)).included:
            raise WireError("it has no header, or nobody is in it")
        return header


@dataclass(frozen=True)
class Shown:
    """Inputs of a subject, as its maker shows them: by member chunks of contributions with their paths; by row
    partial sums with their signatures; of a secure round what has opened the part."""

    contributions: Mapping[int, memoryview]
    partial_sums: Mapping[int, memoryview] = field(default_factory=dict)
    opening: memoryview = field(default_factory=lambda: memoryview(b""))


@dataclass(frozen=True)
class Judgement:
    """Result of judging evidence. ``guilty``: ``maker`` signed another mean than that of what it says it includes;
    ``innocent``: its mean is right; ``void``: nothing, as the evidence is incomplete or not signed as it should be.
    ``excess``: as in ``Fault``; above 1 it is beyond the bound."""

    word: Literal["guilty", "innocent", "void"]
    reason: str
    maker: str = ""
    round: int = 0
    excess: float = 0.0


@dataclass(frozen=True)
class Fault:
    """Fault of a subject. ``excess``: how far it is from the right one, relative to how far its maker's own
    contribution could have moved that (``NormBounds.influence``)."""

    reason: str
    excess: float


def judge(data: bytes, facts: RunFacts) -> Judgement:
    """Judge packed evidence, whoever it is from. For a worker thread."""
    try:
        evidence = unpack_evidence(data)
        plan, part = _committed(evidence, facts)
        store = ResultStore(plan, facts.codec_map)
        subject = Subject(evidence.part, evidence.chunk, evidence.row, memoryview(evidence.result))
        if subject.chunk not in store.chunks_of(part):
            raise WireError("the chunk is not of that part")
        about = PlanStatement(name_of(evidence.verdict), plan_digest(plan))
        maker = _maker(evidence, store) if subject.row is None else _row_reducer(evidence, store, subject, about)
        fault = fault_of(store, about, subject, maker, _shown(evidence), masked_round(store, about, evidence.verdict))
    except WireError as error:
        return Judgement("void", str(error))
    peer = plan.members[maker].peer
    if fault is None:
        return Judgement("innocent", f"chunk {evidence.chunk} is the mean of what it includes", peer, plan.round)
    return Judgement("guilty", fault.reason, peer, plan.round, fault.excess)


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


def _maker(evidence: Evidence, store: ResultStore) -> int:
    """Return the index of the member that has signed for this result chunk under this plan.

    Raises ``WireError`` if nobody has."""
    plan, verdict, chunk = store.plan, evidence.verdict, evidence.chunk
    chunks, digest = store.chunks_of(plan.parts[evidence.part]), verdict.digests[evidence.part]
    assert digest is not None
    own = chunk_digest(memoryview(evidence.result))
    if not is_of(digest, len(chunks), chunk - chunks.start, [own], evidence.path):
        raise WireError("the result chunk is not the committed one")
    statement = PartStatement.of(verdict, evidence.part)
    made = verdict.makers[evidence.part] if statement is not None else None
    if statement is None or made is None or made.member >= len(plan.members):
        raise WireError("nobody has signed for that part")
    maker = plan.members[made.member]
    if not any(start <= chunk < stop for start, stop in made.chunks):
        raise WireError("its maker has not signed for that chunk")
    if not has_signed(maker.identity_key, maker.peer, made.signature, statement.bytes_to_sign()):
        raise WireError("the part is not signed by its maker")
    return made.member


def _row_reducer(evidence: Evidence, store: ResultStore, subject: Subject, about: PlanStatement) -> int:
    """Return the index of the row reducer that has signed this partial sum under this plan.

    Raises ``WireError`` if it has not."""
    group, row, plan = subject.group(store), subject.row, store.plan
    assert row is not None
    maker = plan.row_reducers(plan.parts[subject.part])[row]
    if evidence.path or not is_signed(about, plan.members[maker], group, subject.chunk, subject.data):
        raise WireError("the partial sum is not signed by its row reducer")
    return maker


def _shown(evidence: Evidence) -> Shown:
    """Return what the evidence shows. Raises ``WireError`` if that is not in order, or something twice."""
    members, rows = [one.member for one in evidence.contributions], [one.row for one in evidence.partial_sums]
    if members != sorted(set(members)) or rows != sorted(set(rows)):
        raise WireError("what the evidence shows is not in order")
    return Shown(
        {one.member: memoryview(one.data) for one in evidence.contributions},
        {one.row: memoryview(one.data) for one in evidence.partial_sums},
        memoryview(evidence.opening),
    )


def masked_round(store: ResultStore, about: PlanStatement, verdict: Verdict) -> MaskedRound | None:
    """Return what a judge has to know of a secure round, None of any other one. For a worker thread.

    Raises ``WireError`` where the verdict names no sets."""
    if store.plan.secure is None:
        return None
    if verdict.signed_sets is None:
        raise WireError("the verdict of a secure round names no sets")
    return MaskedRound(store, about, verdict.signed_sets)


def fault_of(
    store: ResultStore,
    about: PlanStatement,
    subject: Subject,
    maker: int,
    shown: Shown,
    masked: MaskedRound | None = None,
) -> Fault | None:
    """Return what is wrong with a subject, None if it is right. ``maker``: index of the plan; ``masked``: of a secure
    round. For a worker thread.

    Raises ``WireError`` where not exactly that is shown which it says it includes: that proves nothing."""
    plan, chunk, group, header = store.plan, subject.chunk, subject.group(store), subject.header(store)
    if masked is not None:
        right = masked.mean_again(subject.part, chunk, header, shown.contributions, shown.opening)
        return None if same_bytes(right, subject.data) else _wrong_mean(store, group, subject, maker, right)
    if sorted(shown.contributions) != group.summed_directly(header):
        raise WireError("not all the contributions are shown that the chunk includes, or others")
    sums = [shown.partial_sums[row] for row in header.reduced_rows if row in shown.partial_sums]
    if sorted(shown.partial_sums) != header.reduced_rows or (sums and name_of_sums(sums) != header.seal):
        raise WireError("not all the partial sums are shown that the chunk includes, or others")
    packed = {one: checked_contribution(store, chunk, one, data) for one, data in shown.contributions.items()}
    # From here on: the maker has named these very partial sums, so it answers for having included them.
    row_reducers = plan.row_reducers(plan.parts[subject.part])
    for row, data in shown.partial_sums.items():
        if not is_signed(about, plan.members[row_reducers[row]], group.row(row), chunk, data):
            return Fault(f"chunk {chunk} includes a partial sum that its row reducer has not signed", _MOST_EXCESS)
    again = reduce_again(store, group, chunk, header, packed, shown.partial_sums)
    if again is None:
        return Fault(f"chunk {chunk} includes a partial sum that no mean may include", _MOST_EXCESS)
    start = group.bits_bytes if subject.row is None else group.header_bytes  # a signature is none of the sum
    is_same = same_bytes(again[: group.bits_bytes], subject.data[: group.bits_bytes]) and same_bytes(
        again[start:], subject.data[start:]
    )
    return None if is_same else _wrong_mean(store, group, subject, maker, again)


def _wrong_mean(store: ResultStore, group: Group, subject: Subject, maker: int, again: memoryview) -> Fault:
    chunk, excess = subject.chunk, _excess(store, group, subject, maker, again)
    reason = f"chunk {chunk} is not the mean of what it says it includes"
    return Fault(
        f"{reason}: it is off by {excess:.3g} times what its maker's own contribution could have moved it", excess
    )


def _excess(store: ResultStore, group: Group, subject: Subject, maker: int, again: memoryview) -> float:
    """Return how far a wrong chunk is from the right one, relative to the maker's influence there."""
    chunk, included = subject.chunk, subject.header(store).included
    wrong, right = _values(store, group, chunk, subject.data), _values(store, group, chunk, again)
    moved = float((wrong - right).double().norm())
    if store.plan.secure is None:
        allowed = store.norm_bounds.influence(maker, included, *store.bounds(chunk))
    else:
        allowed = secure_influence(store.plan, store.plan.secure, maker, included, store.bounds(chunk))
    return min(moved / allowed, _MOST_EXCESS) if allowed else _MOST_EXCESS


def _values(store: ResultStore, group: Group, chunk: int, result: memoryview) -> torch.Tensor:
    """Return what members make of a result chunk, (n,) float32: zeros where it is void or does not decode."""
    values = store.values(chunk)
    codec = store.codec_map.result(*store.bounds(chunk), len(group.members))
    try:
        return codec.decode(result[group.header_bytes :], values)
    except CodecError:
        return torch.zeros(values)


def checked_contribution(store: ResultStore, chunk: int, member: int, data: memoryview) -> memoryview:
    """Return the leaves of a contribution's chunk. Raises ``WireError`` if the member has not committed to them."""
    start, stop = store.bounds(chunk)
    if data.nbytes != store.leaf_grid.chunk_bytes(start, stop):
        raise WireError(f"the contribution of member {member} has {data.nbytes} bytes, which does not fit")
    return store.leaf_grid.checked(store.plan.members[member].root, start, stop, data)


def reduce_again(
    store: ResultStore,
    group: Group,
    chunk: int,
    header: ChunkHeader,
    contributions: Mapping[int, memoryview],
    partial_sums: Mapping[int, memoryview],
) -> memoryview | None:
    """Return the chunk that these contributions, each (leaves) packed, and partial sums give; None for sums that no
    owner would include."""
    bounds = NormBounds(store.plan, store.codec_map, leeway=_LEEWAY)
    chunks = {chunk: store.bounds(chunk)}
    reducer = PartReducer(store.codec_map, bounds, group, chunks, header.reduced_rows, store.buffers)
    for member in group.members:
        if member in contributions:
            reducer.offer(chunk, member, contributions[member])
        else:
            reducer.give_up(member)
    for row, data in partial_sums.items():
        reducer.offer_partial_sum(chunk, row, data)
    made = reducer.reduce(chunk)
    return made.result if isinstance(made, ReducedChunk) else None


def make_evidence(verdict: Verdict, subject: Subject, results: Sequence[memoryview], shown: Shown) -> bytes:
    """Pack the evidence on a subject. ``results``: all chunks of its part, in order. For a worker thread.

    Raises ``WireError`` if it is too large."""
    plan, path = verdict.plan, b""
    assert plan is not None
    if subject.row is None:
        place = subject.chunk - plan.parts[subject.part].start // plan.chunk_elements
        path = MerkleTree([chunk_digest(one) for one in results]).path(place, place + 1)
    contributions, sums = sorted(shown.contributions.items()), sorted(shown.partial_sums.items())
    return pack_evidence(
        Evidence(
            verdict=verdict,
            part=subject.part,
            chunk=subject.chunk,
            row=subject.row,
            result=bytes(subject.data),
            path=path,
            contributions=tuple(ShownContribution(member=one, data=bytes(data)) for one, data in contributions),
            partial_sums=tuple(ShownPartialSum(row=one, data=bytes(data)) for one, data in sums),
            opening=bytes(shown.opening),
        )
    )
