"""A round as its members see it: its plan, its verdict, and the view of the run."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from shoal.swarm.protocol.types import (
    MAX_CHUNK_ELEMENTS,
    MAX_DETOURS,
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_STAND_INS,
    Column,
    Count,
    Digest,
    DivergenceWord,
    Index,
    Loss,
    NormClaim,
    PeerId,
    Phase,
    PipelineView,
    Record,
    RosterDelta,
    RosterEntry,
    Seconds,
    Text,
    UnixTime,
)

MIN_CHUNK_ELEMENTS = 2**12
"""Chunks are multiples of this many elements, so that no block of a codec lies in two of them."""


class PlanMember(Record):
    """One contributor of a round. ``weight_tokens`` is its share in the weighted mean; a flat group is all row 0.

    ``norms``: what it claims of its contribution (``averaging/norm_claims.py``); chunks above their claim are left out.
    ``factor``: what its contribution is multiplied with, so that it moves the mean no further than the run's bound.
    ``carried_tokens``: of its work that earlier rounds were planned with and left out, as far as that raises its bound
    (``coordinator/influence.py``); ``last_tokens``: the weight of its last committed contribution, for the same.
    ``detours``: members that it did not get from what they had to; it asks others for their results first."""

    peer: PeerId
    weight_tokens: Annotated[int, Field(ge=1, le=2**62)]
    row: Index = 0
    norms: NormClaim = b""
    factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    carried_tokens: Count = 0
    last_tokens: Count = 0
    detours: Annotated[tuple[Index, ...], Field(max_length=MAX_DETOURS)] = ()


class Part(Record):
    """Elements ``start <= i < stop`` of the contribution, reduced by ``members[owner]``; when that fails, by the
    first of ``stand_ins`` that can. ``column``: whose row reducers collect for the owner, in a grid."""

    owner: Index
    stand_ins: Annotated[tuple[Index, ...], Field(max_length=MAX_STAND_INS)] = ()
    column: Index = 0
    start: Count
    stop: Count


class RoundPlan(Record):
    """Who reduces what in a round. Members are ordered by peer id, parts by start; parts tile all elements, on the grid
    of chunks.

    ``rho``: the usual norm of a contribution of one token, by which all are bounded; 0 while nobody has claimed any.
    ``columns``: none in a flat group; in a grid, of each column its row reducer in every row: the member of that row
    that sums its row's contributions to the column's parts, and passes their means on to it. Many parts share a
    column."""

    round: Count
    anchor_version: Count
    state_digest: Digest
    chunk_elements: Annotated[int, Field(ge=1, le=MAX_CHUNK_ELEMENTS)]
    members: Annotated[tuple[PlanMember, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=MAX_PARTS)]
    columns: Annotated[tuple[Column, ...], Field(max_length=MAX_MEMBERS)] = ()
    rho: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> RoundPlan:
        if any(one.peer >= two.peer for one, two in pairwise(self.members)):
            raise ValueError("members: expected in order of peer ids, each once")
        starts = [0, *(part.stop for part in self.parts[:-1])]
        for part, start in zip(self.parts, starts, strict=True):
            if part.start != start or part.start >= part.stop or part.start % self.chunk_elements:
                raise ValueError("parts: expected to tile the elements from 0 on, each beginning at a chunk")
        row_of = [member.row for member in self.members]
        rows = list(range(1 + max(row_of)))
        if set(row_of) != set(rows) or bool(self.columns) != (len(rows) > 1):
            raise ValueError("a plan of several rows has members in each of them, and columns")
        if any([row_of[one] if one < len(row_of) else None for one in column] != rows for column in self.columns):
            raise ValueError("a column has one row reducer in every row, in their order")
        owners = [set(column) for column in self.columns] or [set(range(len(row_of)))]
        for part in self.parts:
            if part.column >= len(owners) or not {part.owner, *part.stand_ins} <= owners[part.column]:
                raise ValueError(
                    "owners and stand-ins are row reducers of the part's column, or members of the flat group"
                )
        return self

    def row_reducers(self, part: Part) -> tuple[int, ...]:
        """Of each row, who collects it for this part; the owner for its own row. None in a flat group."""
        return self.columns[part.column] if self.columns else ()


class Verdict(Record):
    """The one end of a round, journaled before it is announced and signed by the coordinator.

    ``chain`` is SHA-256 over the previous chain and this verdict's content (``verdicts.chain_hash``);
    ``digests`` are those of the parts' result bytes, in the plan's order, None for a void part: nobody's mean is
    applied there, and what was offered is offered again. Empty when aborted;
    ``run_hash`` says of which run it is, as a host may have several;
    ``tokens`` are this round's, ``tokens_total`` all committed ones up to and with it; ``ended_s`` is the coordinator's
    word for when that was; ``sent_bytes`` are what members said that they sent since the verdict before.
    ``anchor_version`` is the run's from now on: one more when committed, the same when aborted, and lower where an
    aborted round ends with the run going back; ``tokens_total`` goes back with it.
    ``together``, of a pipeline's stage: the hash of what the verdicts of all stages say on this round
    (``verdicts.tied_together``).
    """

    round: Count
    committed: bool
    reason: Text
    anchor_version: Count
    plan: RoundPlan | None
    digests: Annotated[tuple[Digest | None, ...], Field(max_length=MAX_PARTS)]
    tokens: Count
    tokens_total: Count
    loss: Loss | None
    ended_s: UnixTime
    sent_bytes: Count
    run_hash: Digest = bytes(32)
    previous_chain: Digest
    together: Digest | None = None
    chain: Digest
    signature: Annotated[bytes, Field(max_length=64)]


class RunView(Record):
    """What one member has to know of the run right now; sent on change and with every heartbeat.

    It is a state, not an event: a member that missed ten of them and reads the eleventh knows all it needs.
    ``epoch`` (the coordinator's start) and ``sequence`` order the views: an older one is ignored.
    ``verdict`` is left out when the member has said that it knows the one with this ``verdict_chain``, None before the
    first: of a large swarm it is nearly all of a view.
    ``roster`` is left out when the member has said that it knows the one with this ``roster_version``, and where
    ``roster_delta`` makes it of the one that it knows.
    ``expected``: while the round closes, the plan as it will be if everybody who works for it is ready, but for the
    weights: what does not depend on those may begin. ``as_expected``: ``plan`` is that one, and nobody in it has left
    since.
    ``divergence``: the answer to a member that says that its work has diverged; empty while there is none.
    ``pipeline``: of the run's own scope, once its stages are planned; None without a pipeline.
    """

    epoch: Count
    sequence: Count
    round: Count
    anchor_version: Count
    phase: Phase
    closes_in_s: Seconds | None
    plan: RoundPlan | None
    verdict: Verdict | None
    verdict_chain: Digest | None
    state_digest: Digest | None
    tokens_committed: Count
    tokens_in_round: Count
    members: Count
    must_resync: bool
    roster_version: Count
    roster: Annotated[tuple[RosterEntry, ...], Field(max_length=MAX_MEMBERS * 2)] | None
    roster_delta: RosterDelta | None = None
    expected: RoundPlan | None = None
    as_expected: bool = False
    divergence: DivergenceWord = ""
    pipeline: PipelineView | None = None
