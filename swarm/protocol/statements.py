"""Statements of members and host about a round, in the bytes that they sign.

A contributor signs what it brings, before the round has a plan; the host signs the plan, which has these signatures in
it; who reduces a part signs its result under that plan, and a row reducer each of its partial sums. Each statement is
rebuilt from the plan or the verdict that its signature stands in, or that of a partial sum from the partial sum, so
everybody who has one of these can check it, whoever keeps it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgpack

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import peer_id, verify_signature
from shoal.swarm.protocol.messages import MadePart, PeerToCoordinatorRoundReady, PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.types import Certificate

_CONTRIBUTION = b"shoal contribution, version 1\0"
_PLAN = b"shoal round plan, version 1\0"
_PART = b"shoal reduced part, version 1\0"
_PARTIAL_SUM = b"shoal reduced row, version 1\0"

ChunkRanges = tuple[tuple[int, int], ...]
"""Ranges of chunks, each as start and stop, of the round's chunks by index."""


class Statement(Protocol):
    """What somebody signs."""

    def bytes_to_sign(self) -> bytes: ...


@dataclass(frozen=True)
class RoundName:
    """Name of a round among all runs: the run's hash, the stage of a pipeline, None without stages, and the number."""

    run_hash: bytes
    stage: int | None
    round: int

    @property
    def fields(self) -> list[object]:
        return [self.run_hash, self.stage, self.round]


@dataclass(frozen=True)
class ContributionStatement:
    """A contributor's statement of what it brings to a round, and from which state.

    ``norms`` and ``root`` as in ``PlanMember``. Signed before the plan is made, so the plan's own decisions, such as
    factor and row, are not in it."""

    name: RoundName
    anchor_version: int
    state_digest: bytes
    weight_tokens: int
    norms: bytes
    root: bytes

    def bytes_to_sign(self) -> bytes:
        state = [self.anchor_version, self.state_digest]
        return _packed(_CONTRIBUTION, *self.name.fields, *state, self.weight_tokens, self.norms, self.root)

    @classmethod
    def of_ready(cls, name: RoundName, ready: PeerToCoordinatorRoundReady) -> ContributionStatement:
        """Return the statement that goes with ``ready``."""
        return cls(name, ready.anchor_version, ready.state_digest, ready.weight_tokens, ready.norms, ready.root)

    @classmethod
    def of(cls, name: RoundName, plan: RoundPlan, member: PlanMember) -> ContributionStatement:
        """Return the statement that a member of a plan must have signed."""
        return cls(name, plan.anchor_version, plan.state_digest, member.weight_tokens, member.norms, member.root)


@dataclass(frozen=True)
class PlanStatement:
    """The host's statement of a round's plan. ``plan``: its ``plan_digest``."""

    name: RoundName
    plan: bytes

    def bytes_to_sign(self) -> bytes:
        return _packed(_PLAN, *self.name.fields, self.plan)


@dataclass(frozen=True)
class PartStatement:
    """A maker's statement that it has reduced these chunks of a part by this plan.

    ``plan``: the plan's ``plan_digest``, which fixes weights, factors and roots; ``part``: its index there; ``digest``:
    of the whole result, whose chunks name the members that are in them; ``chunks``: those that the maker has made
    itself. A stand-in adopts the others from a failed owner, and does not answer for them."""

    name: RoundName
    plan: bytes
    part: int
    digest: bytes
    chunks: ChunkRanges

    def bytes_to_sign(self) -> bytes:
        return _packed(_PART, *self.name.fields, self.plan, self.part, self.digest, self.chunks)

    @classmethod
    def of_report(cls, plan: PlanStatement, report: PeerToCoordinatorRoundReport, made: MadePart) -> PartStatement:
        """Return the statement that goes with a part of a report on this plan."""
        digest = report.digests[made.part]
        assert digest is not None, "only parts that are here are signed"
        return cls(plan.name, plan.plan, made.part, digest, made.chunks)

    @classmethod
    def of(cls, verdict: Verdict, part: int) -> PartStatement | None:
        """Return the statement that the maker of a committed part must have signed; None where nobody has signed."""
        maker = verdict.makers[part] if part < len(verdict.makers) else None
        if maker is None or verdict.plan is None or (digest := verdict.digests[part]) is None:
            return None
        return cls(name_of(verdict), plan_digest(verdict.plan), part, digest, maker.chunks)


@dataclass(frozen=True)
class PartialSumStatement:
    """A row reducer's statement that it has reduced its row's contributions to a chunk by this plan.

    ``plan``: as in ``PartStatement``; ``chunk``: index in the round; ``digest``: of the partial sum, which names the
    members that are in it (``averaging/partial_sums.py``)."""

    name: RoundName
    plan: bytes
    row: int
    chunk: int
    digest: bytes

    def bytes_to_sign(self) -> bytes:
        return _packed(_PARTIAL_SUM, *self.name.fields, self.plan, self.row, self.chunk, self.digest)


@dataclass(frozen=True)
class PlanSigner:
    """Signatures of a member under one plan. ``plan``: the host's statement of it; ``sign``: by the member's identity
    key."""

    peer: str
    plan: PlanStatement
    sign: Callable[[Statement], bytes]


def plan_digest(plan: RoundPlan) -> bytes:
    """Return the SHA-256 of all fields of a plan. For plans of hundreds of members, for a worker thread."""
    return hashlib.sha256(_packed(_PLAN, plan.model_dump())).digest()


def name_of(verdict: Verdict) -> RoundName:
    """Return the name of a verdict's round."""
    return RoundName(verdict.run_hash, verdict.stage, verdict.round)


def has_signed(identity_key: bytes, peer: str, signature: bytes, data: bytes) -> bool:
    """Whether the identity with this peer id and key has signed ``data``."""
    return peer_id(identity_key) == peer and verify_signature(identity_key, signature, data)


def check_ready(name: RoundName, ready: PeerToCoordinatorRoundReady, certificate: Certificate) -> None:
    """Check that a member has signed what it brings, if that is anything. Raises ``WireError``."""
    data = ContributionStatement.of_ready(name, ready).bytes_to_sign()
    if ready.weight_tokens and not verify_signature(certificate.identity_key, ready.signature, data):
        raise WireError("a contribution must be signed by its member's identity")


def check_report(
    statement: PlanStatement, plan: RoundPlan, report: PeerToCoordinatorRoundReport, certificate: Certificate
) -> None:
    """Check that a member has signed, and by the plan could have made, what its report says that it made.

    ``statement``: of that plan. Raises ``WireError``."""
    peer, parts = peer_id(certificate.identity_key), [made.part for made in report.made]
    if parts != sorted(set(parts)):
        raise WireError("a report names the parts that were made in their order, each once")
    for made in report.made:
        part = plan.parts[made.part] if made.part < len(plan.parts) else None
        if part is None or len(report.digests) != len(plan.parts) or report.digests[made.part] is None:
            raise WireError("a report names the maker of a part that it does not have")
        if peer not in [plan.members[one].peer for one in (part.owner, *part.stand_ins)]:
            raise WireError("a report says that a member made a part that is neither its own nor a stand-in's")
        first, last = part.start // plan.chunk_elements, -(-part.stop // plan.chunk_elements)
        edges = [first, *(edge for chunks in made.chunks for edge in chunks), last]
        if edges != sorted(edges) or any(start == stop for start, stop in made.chunks):
            raise WireError("a report names chunks that are not the part's")
        data = PartStatement.of_report(statement, report, made).bytes_to_sign()
        if not verify_signature(certificate.identity_key, made.signature, data):
            raise WireError("a reduced part must be signed by its maker's identity")


def check_plan(name: RoundName, plan: RoundPlan, signature: bytes, coordinator_key: bytes) -> bytes:
    """Check that the coordinator has signed a plan, and return its digest. Raises ``WireError`` if it has not."""
    statement = PlanStatement(name, plan_digest(plan))
    if not verify_signature(coordinator_key, signature, statement.bytes_to_sign()):
        raise WireError(f"the plan of round {plan.round} is not signed by the coordinator")
    return statement.plan


def unsigned_contributions(name: RoundName, plan: RoundPlan) -> Iterator[int]:
    """Yield the members of a plan, as indices, whose contribution they have not signed. For a worker thread."""
    for index, member in enumerate(plan.members):
        data = ContributionStatement.of(name, plan, member).bytes_to_sign()
        if not has_signed(member.identity_key, member.peer, member.signature, data):
            yield index


def ranges_of(chunks: Sequence[int]) -> ChunkRanges:
    """Return ascending indices of chunks as ranges."""
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return tuple(ranges)


def _packed(context: bytes, *fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return context + packed
