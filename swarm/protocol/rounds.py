"""A round as its members see it: its plan, its verdict, and the view of the run."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shoal.swarm.protocol.secure import (
    MAX_SCALES,
    MOST_MEMBERS,
    SecurePlan,
    SignedSets,
    excess_weights,
    fewest_members,
)
from shoal.swarm.protocol.types import (
    MAX_CHUNK_ELEMENTS,
    MAX_DETOURS,
    MAX_MADE_RANGES,
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_STAND_INS,
    Amendments,
    Changes,
    Column,
    Count,
    Digest,
    DivergenceWord,
    Index,
    Key,
    Loss,
    NormClaim,
    PeerId,
    Phase,
    PipelineView,
    Record,
    RosterDelta,
    RosterEntry,
    Seconds,
    Signature,
    Stage,
    Text,
    UnixTime,
)

MIN_CHUNK_ELEMENTS = 2**12
"""Leaves, and chunks of them, are multiples of this many elements, so that no block of a codec lies in two of them."""

_USUAL_LEAVES, _MOST_LEAF_ELEMENTS = 2**8, 2**18


def leaf_elements(elements: int) -> int:
    """Return the elements of a leaf, the unit in which contributions and means of so many elements are encoded.

    It follows from the model's size alone, so that a contribution's bytes do not depend on the plan; chunks are whole
    leaves. About 256 leaves, more where one would be larger than chunks for slow links should be."""
    leaf = -(-elements // _USUAL_LEAVES)
    return min(-(-leaf // MIN_CHUNK_ELEMENTS) * MIN_CHUNK_ELEMENTS, _MOST_LEAF_ELEMENTS)


def scale_block(elements: int) -> int:
    """Return the elements that share a scale in a secure round: the fewest of which a plan has room for all scales and
    that divide a leaf. Models beyond 2**32 elements have too many."""
    parts = leaf_elements(elements) // MIN_CHUNK_ELEMENTS
    blocks = [MIN_CHUNK_ELEMENTS * one for one in range(1, parts + 1) if parts % one == 0]
    return next((one for one in blocks if -(-elements // one) <= MAX_SCALES), blocks[-1])


class PlanMember(Record):
    """One contributor of a round.

    ``weight_tokens``: the tokens of its work, which are its weight in the mean without those ``uncounted``: members
    that are not established have a small share together. ``row``: 0 in a flat group. ``norms``: claimed norms of its
    contribution (``averaging/norm_claims.py``); chunks above their claim are left out of the mean. ``root``: of the
    tree over the encoded leaves of its contribution (``averaging/merkle.py``); chunks that do not lead to it are left
    out, too.
    ``identity_key``: the one that ``peer`` is derived from; ``signature``: by it, of all that the member has said of
    its contribution (``statements.ContributionStatement``).
    ``factor``: multiplies its contribution, so that it moves the mean no further than the run's bound.
    ``usual_norm``: relative to that of other members, for centered clipping. ``carried_tokens``: weight of its work
    that earlier rounds were planned with but left out, as far as that raises its bound (``coordinator/influence.py``).
    ``last_tokens``: the weight of its last committed contribution, for the same bound. ``detours``: members that did
    not deliver to it; it asks others for their results first."""

    peer: PeerId
    weight_tokens: Annotated[int, Field(ge=1, le=2**62)]
    uncounted: Count = 0
    row: Index = 0
    norms: NormClaim = b""
    root: Digest = bytes(32)
    identity_key: Key = bytes(32)
    signature: Signature = bytes(64)
    factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    usual_norm: Annotated[float, Field(ge=1e-100, le=1e100)] = 1.0
    carried_tokens: Count = 0
    last_tokens: Count = 0
    detours: Annotated[tuple[Index, ...], Field(max_length=MAX_DETOURS)] = ()

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        if self.uncounted >= self.weight_tokens:
            raise ValueError("a member's weight must be at least one token")
        return self

    @property
    def weight(self) -> int:
        """Weight in the mean, in tokens."""
        return self.weight_tokens - self.uncounted


class Part(Record):
    """Elements ``start <= i < stop`` of the contribution, reduced by ``members[owner]`` or, if it fails, a stand-in.

    The first of ``stand_ins`` that can takes its place. ``column``: whose row reducers collect for the owner, in a
    grid."""

    owner: Index
    stand_ins: Annotated[tuple[Index, ...], Field(max_length=MAX_STAND_INS)] = ()
    column: Index = 0
    start: Count
    stop: Count


class RoundPlan(Record):
    """Plan of a round: its members and the parts that they reduce.

    Members are ordered by peer id and parts by start; parts tile all elements, on the grid of chunks. ``rho``: the
    usual norm of a contribution of one token, by which all contributions are bounded; 0 while no member has claimed a
    norm. ``columns``: none in a flat group; in a grid, of each column its row reducer in every row: the member of that
    row that sums its row's contributions to the column's parts, and passes their means on to it. Many parts share a
    column. ``mean``: how contributions, in a grid the rows, and in a secure round the masking groups are combined
    (``averaging.robust``); ``gather``: a flat group's contributions are not averaged but put one after the other
    (``[collective]``). ``secure``: how contributions are masked, in a flat group without stand-ins; the members' roots
    then commit to random numbers (``swarm/secure``)."""

    round: Count
    anchor_version: Count
    state_digest: Digest
    chunk_elements: Annotated[int, Field(ge=1, le=MAX_CHUNK_ELEMENTS)]
    members: Annotated[tuple[PlanMember, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=MAX_PARTS)]
    columns: Annotated[tuple[Column, ...], Field(max_length=MAX_MEMBERS)] = ()
    rho: Annotated[float, Field(ge=0)] = 0.0
    mean: Literal["weighted", "clip", "trimmed", "gather"] = "weighted"
    secure: SecurePlan | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RoundPlan:
        if any(one.peer >= two.peer for one, two in pairwise(self.members)):
            raise ValueError("members: expected in order of peer ids, each once")
        starts = [0, *(part.stop for part in self.parts[:-1])]
        for part, start in zip(self.parts, starts, strict=True):
            if part.start != start or part.start >= part.stop or part.start % self.chunk_elements:
                raise ValueError("parts: expected to tile the elements from 0 on, each beginning at a chunk")
        row_of = [member.row for member in self.members]
        if self.mean == "gather" and self.columns:
            raise ValueError("contributions are gathered in a flat group")
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
        if self.secure is not None:
            self._check_secure(self.secure)
        return self

    def _check_secure(self, secure: SecurePlan) -> None:
        fewest = fewest_members(secure.group, is_trimmed=self.mean == "trimmed")
        if not fewest <= len(self.members) <= MOST_MEMBERS or self.columns:
            raise ValueError(f"such a secure round is one of a flat group of {fewest} to {MOST_MEMBERS} members")
        if self.mean not in ("weighted", "trimmed"):
            raise ValueError("the groups of a secure round have a weighted or a trimmed mean")
        if any(part.stand_ins for part in self.parts) or any(one.norms or one.factor != 1 for one in self.members):
            raise ValueError("a secure round has no stand-ins, claims and factors")
        weights = excess_weights([one.weight_tokens for one in self.members])
        if [one.uncounted for one in self.members] != weights:
            raise ValueError("the weights of a secure round are tokens, up to so many times the fewest")
        if secure.block != scale_block(self.parts[-1].stop):
            raise ValueError("the blocks of a secure round follow from the size of the model")
        if self.chunk_elements % secure.block or len(secure.scales) != -(-self.parts[-1].stop // secure.block):
            raise ValueError("a secure round has a scale for each block, and whole blocks in a chunk")

    @property
    def copies(self) -> int:
        """Number of values that a result has for each element: one, or one for each member where they are gathered."""
        return len(self.members) if self.mean == "gather" else 1

    def row_reducers(self, part: Part) -> tuple[int, ...]:
        """Row reducers of a part, one for each row, the owner for its own row; empty in a flat group."""
        return self.columns[part.column] if self.columns else ()


MadeChunks = Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1, max_length=MAX_MADE_RANGES)]


class PartMaker(Record):
    """Signature of the member that has reduced a part, or those chunks of it (``statements.PartStatement``).

    ``member``: an index of the plan; ``chunks``: start and stop of each range."""

    member: Index
    chunks: MadeChunks
    signature: Signature


class Verdict(Record):
    """The end of a round, signed by the coordinator and journaled before it is announced.

    ``chain``: SHA-256 over the previous chain and this verdict's content (``verdict_chain.chain_hash``). ``digests``:
    of the parts' results, in the plan's order; None for a void part, where no mean is applied and contributions are
    offered again; empty when aborted. ``makers``: of the parts, in the same order; None where nobody has signed for the
    committed bytes. ``run_hash``: the run, as a host may have several. ``tokens``: of this round;
    ``tokens_total``: all committed ones up to this round. ``ended_s``: on the coordinator's clock. ``sent_bytes``: as
    members have reported them since the previous verdict. ``anchor_version``: the run's version from now on, one higher
    when committed, the same when aborted, and lower where an aborted round ends with a rollback, which also lowers
    ``tokens_total``. ``spent``: an aborted secure round in which masked contributions may have left their members: the
    work of its plan is lost, and never offered again. ``signed_sets``, of a secure round: whose masked contributions
    its means are of, once that was fixed. ``stage``, of a pipeline: the stage whose round it is;
    ``together``: hash over the verdicts of all stages on this round (``verdict_chain.tied_together``). ``amended``:
    settings of this round that differ from the run file (``amendments.py``). ``epoch``: fencing epoch of the
    coordinator that gave it; it never falls along a chain."""

    round: Count
    committed: bool
    reason: Text
    anchor_version: Count
    plan: RoundPlan | None
    digests: Annotated[tuple[Digest | None, ...], Field(max_length=MAX_PARTS)]
    makers: Annotated[tuple[PartMaker | None, ...], Field(max_length=MAX_PARTS)] = ()
    tokens: Count
    tokens_total: Count
    spent: bool = False
    signed_sets: SignedSets | None = None
    loss: Loss | None
    ended_s: UnixTime
    sent_bytes: Count
    run_hash: Digest = bytes(32)
    stage: Stage | None = None
    previous_chain: Digest
    together: Digest | None = None
    amended: Changes = ()
    epoch: Count = 0
    chain: Digest
    signature: Annotated[bytes, Field(max_length=64)]

    @model_validator(mode="after")
    def _names_makers_of_the_plan(self) -> Verdict:
        members = len(self.plan.members) if self.plan is not None else 0
        if len(self.makers) > len(self.digests) or any(
            one is not None and one.member >= members for one in self.makers
        ):
            raise ValueError("makers: expected members of the plan, for its parts")
        if self.signed_sets is not None and self.plan is not None:
            named = [*self.signed_sets.senders, *(one.member for one in self.signed_sets.consents)]
            if self.plan.secure is None or len(self.signed_sets.nonces) != members or max(named, default=0) >= members:
                raise ValueError("signed_sets: expected those of the plan's members, in a secure round")
        return self


class VerdictOnPlan(Record):
    """A verdict for members that have its plan, which is nearly all of it. ``plan_digest``: of the plan
    (``statements.plan_digest``); ``bare``: the verdict without plan and ``makers``."""

    plan_digest: Digest
    bare: Verdict
    makers: Annotated[tuple[PartMaker | None, ...], Field(max_length=MAX_PARTS)]

    @classmethod
    def of(cls, verdict: Verdict, plan_digest: bytes) -> VerdictOnPlan:
        """Leave the plan out of a verdict that has one. ``plan_digest``: its digest."""
        bare = verdict.model_copy(update={"plan": None, "makers": ()})
        return cls(plan_digest=plan_digest, bare=bare, makers=verdict.makers)

    def on(self, plan: RoundPlan) -> Verdict:
        """Return the whole verdict, to be checked like any other. Raises ``ValueError`` for makers that are not in the
        plan."""
        fields = dict(self.bare) | {"plan": plan, "makers": self.makers}
        return Verdict(**fields)


class StateAgreement(Record):
    """Agreed digest of one version's state. ``chain``: of the newest verdict of its scope then, which covers the run
    and the stage; ``signature``: the host's (``verdict_chain.check_agreement``)."""

    anchor_version: Count
    digest: Digest
    chain: Digest
    signature: Annotated[bytes, Field(max_length=64)]


class RunView(Record):
    """All that a member has to know of the run at the moment; sent on changes and in answer to heartbeats.

    A view is a state, not an event: a member that missed ten views and receives the eleventh knows all it needs.
    ``epoch`` (the coordinator's start) and ``sequence`` order views; older ones are ignored. ``verdict``: left out if
    the member's heartbeat has named this ``verdict_chain``, as it is nearly all of a large swarm's view;
    ``verdict_chain`` is None before the first verdict. ``roster``: left out if the heartbeat has named this
    ``roster_version``, or if ``roster_delta`` leads to it from the version that the heartbeat has named. ``expected``:
    while the round closes, the plan that results if all working members become ready, except for the weights; work that
    does not depend on those may begin. ``plan_digest``: of the open round's plan (``statements.plan_digest``); the plan
    itself is left out for a member that has named this digest, which then also gets a verdict as ``verdict_on_plan``.
    ``plan_signature``: the host's, of ``plan`` (``statements.PlanStatement``); empty without one. ``as_expected``:
    ``plan`` is the expected one, and none of its members has left since. ``state_digest``: of this version, once it is
    agreed; ``agreement``: the same with the host's signature, None for a beginning that the run file determines;
    ``is_disputed``: the state is disputed, so everybody replays it. ``secure_stage``: of a secure round, what its
    members are asked for (``secure.SecureStage``). ``wants_kept``: the run is about to go back behind a wrong mean, so
    members that hold a state also report those that they keep. ``divergence``: the decision on a member that has
    reported divergence, otherwise empty. ``wall``: why this member cannot take part, as it can meet none of those that
    it would have to; otherwise empty. ``pipeline``: in the run's own scope, once stages are planned. ``amendments``:
    those in force, and those to come. ``waits_for``: what the whole run waits for, in a sentence, otherwise empty.
    ``stays``: the run has ended, and the host still fetches its last state, so members stay for a moment."""

    epoch: Count
    sequence: Count
    round: Count
    anchor_version: Count
    phase: Phase
    closes_in_s: Seconds | None
    plan: RoundPlan | None
    plan_digest: Digest | None = None
    plan_signature: Annotated[bytes, Field(max_length=64)] = b""
    verdict: Verdict | None
    verdict_on_plan: VerdictOnPlan | None = None
    verdict_chain: Digest | None
    state_digest: Digest | None
    agreement: StateAgreement | None = None
    is_disputed: bool = False
    wants_kept: bool = False
    tokens_committed: Count
    tokens_in_round: Count
    members: Count
    must_resync: bool
    roster_version: Count
    roster: Annotated[tuple[RosterEntry, ...], Field(max_length=MAX_MEMBERS * 2)] | None
    roster_delta: RosterDelta | None = None
    expected: RoundPlan | None = None
    as_expected: bool = False
    secure_stage: Annotated[int, Field(ge=0, le=5)] = 0
    divergence: DivergenceWord = ""
    wall: Text = ""
    pipeline: PipelineView | None = None
    amendments: Amendments = ()
    waits_for: Text = ""
    stays: bool = False
