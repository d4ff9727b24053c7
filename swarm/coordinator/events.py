"""Events of the coordinator's journal: its decisions, from which its state can be restored by replaying them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgpack
from pydantic import Field

from shoal.swarm.errors import DamagedRecords
from shoal.swarm.protocol.access_records import AccessRecord
from shoal.swarm.protocol.evaluations import HeldOutFigure, SignedEvaluation
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.rounds import RoundPlan, StateAgreement, Verdict
from shoal.swarm.protocol.types import (
    MAX_MEMBERS,
    Addresses,
    Amendments,
    Capability,
    Count,
    DeviceInfo,
    Digest,
    Energy,
    InviteId,
    InviteTerms,
    Key,
    LayerSize,
    Loss,
    Note,
    PeerId,
    Phase,
    Rate,
    Record,
    RosterEntry,
    SampleRange,
    Seconds,
    Text,
    Trouble,
    UnixTime,
)
from shoal.swarm.protocol.work_scores import SignedScore

Network = Annotated[str, Field(max_length=255)]


class JournalEvent(Record):
    """One decision of the coordinator. Events are never changed."""


class ModelDescribed(JournalEvent):
    """Model that the run's first peer built from the run file; every other peer's must be equal."""

    model: PeerToCoordinatorDescribeModel


class StateAgreed(JournalEvent):
    """Digest of the anchor and the outer state of one anchor version, signed by the host."""

    agreement: StateAgreement


class MemberJoined(JournalEvent):
    """A member joined, for the first time or again. ``network``: of its address (``addresses.network_of``); ``invite``:
    the id of the invite that let it in, empty where it needed none."""

    entry: RosterEntry
    device: DeviceInfo
    network: Network = ""
    invite: InviteId | Literal[""] = ""
    at_s: UnixTime = 0.0


KEPT_SAMPLES = "kept samples from the others"
"""Reason of the loss of a member that the others waited for in vain. It counts as a missing contribution."""


class MemberLost(JournalEvent):
    """A member left or fell silent; its leases are free again. ``trouble``: its own words on why it could not go on;
    ``at_s``: set when it is recorded."""

    peer: PeerId
    reason: Text
    trouble: Trouble = ""
    at_s: UnixTime = 0.0


class MemberMoved(JournalEvent):
    """A member is reached in other ways than before; ``reachable`` as in its entry of the roster."""

    peer: PeerId
    addresses: Addresses
    reachable: bool


class LeaseGranted(JournalEvent):
    """Samples were leased to a peer. ``round``, ``tokens_done`` and ``undone`` are those of its request: an equal
    request is a repetition by a peer that did not get the answer. ``undone``: as far as the peer held these samples."""

    peer: PeerId
    round: Count
    tokens_done: Count
    undone: tuple[SampleRange, ...] = ()
    ranges: tuple[SampleRange, ...]


class CoordinatorStarted(JournalEvent):
    """A process has the lease on the journal (``journal.Journal.lease``); ``epoch``: of that lease."""

    epoch: Count
    at_s: UnixTime = 0.0


class RoundClosing(JournalEvent):
    """The moment at which this round closes was announced."""

    round: Count


class RoundReopened(JournalEvent):
    """The round goes on, as samples of its batch were lost with a member, or all its members were lost."""

    round: Count


class RoundPlanned(JournalEvent):
    """Plan of a round. ``ranges``: the samples in each member's contribution, in the order of the plan's members;
    ``loss``: mean of the members' losses; ``median_loss``: median over those with credit, which a few members cannot
    move."""

    plan: RoundPlan
    ranges: tuple[tuple[SampleRange, ...], ...]
    loss: float | None
    median_loss: float | None = None


class WentBack(Record):
    """Rollback of the run to an earlier anchor version with a verdict: nobody holds ``from_version`` any more, or
    training has ``diverged``. ``digest``: of the restored state; ``vouched_round``: the committed round that was
    planned on it; ``keepers``: members that report to have it; ``bad_version``: after a divergence, the version from
    which no work succeeds; ``suspects``: members that may have spoilt it, whose work does not count for a while.
    ``evidence``: id of that on a wrong mean which this undoes, as it was beyond the bound (``MeanDisproved``)."""

    from_version: Count
    digest: Digest
    vouched_round: Count
    keepers: tuple[PeerId, ...]
    diverged: bool = False
    bad_version: Count = 0
    suspects: tuple[PeerId, ...] = ()
    evidence: Digest | None = None


class Accusation(Record):
    """Accusation: the member ``by`` reports that in this round ``of`` did not deliver what it owed to ``by``."""

    by: PeerId
    of: PeerId
    round: Count


class VerdictGiven(JournalEvent):
    """End of a round. ``lost``: members whose samples are not in the committed mean, and are leased again. ``failed``:
    members that did not deliver what they owed, and own nothing for a while. ``missing``: members whose contributions
    did not arrive; after two rounds in a row they are left out for a while. ``accusations``: all of this round, also
    where they are too few for ``failed``. ``carrying``: members that are still present, and carry over to the next
    round what the mean lacks of their contributions. ``energy_j``: what members' GPUs have taken in the round, by their
    own word."""

    verdict: Verdict
    elapsed_s: Seconds
    lost: tuple[PeerId, ...]
    failed: tuple[PeerId, ...] = ()
    carrying: tuple[PeerId, ...] = ()
    missing: tuple[PeerId, ...] = ()
    accusations: tuple[Accusation, ...] = ()
    went_back: WentBack | None = None
    energy_j: dict[PeerId, Energy] = Field(default_factory=dict)


class LossRose(JournalEvent):
    """A round was committed with a loss far above the usual one."""

    round: Count
    loss: Loss
    usual: Loss


class RunAmended(JournalEvent):
    """The host has changed settings of the run from later rounds on. ``round``: the open one."""

    amendments: Amendments
    round: Count
    at_s: UnixTime


class WorkScored(JournalEvent):
    """A validator scored a member's contribution to a committed round."""

    by: PeerId
    signed: SignedScore


class ModelEvaluated(JournalEvent):
    """A validator evaluated a version of the model. ``invite``: the one that made it a validator; ``round``: that made
    the version, ``tokens``: committed by then."""

    by: PeerId
    invite: InviteId | Literal[""] = ""
    round: Count
    tokens: Count
    at_s: UnixTime
    signed: SignedEvaluation


class FigureTaken(JournalEvent):
    """What validators say of a version by now, after a ``ModelEvaluated``. For people."""

    figure: HeldOutFigure


class StopDecided(JournalEvent):
    """The open ``round`` is the run's last one, because of its held-out figures (``run.stop_when``)."""

    round: Count
    reason: Text
    at_s: UnixTime


class TrendNoticed(JournalEvent):
    """The run's losses go wrong (``loss_trend.py``), or no longer do: then both are empty. For people."""

    round: Count
    kind: Annotated[str, Field(max_length=32)]
    text: Text


class EpochsCovered(JournalEvent):
    """All samples of the epochs ``first <= e < stop`` are committed, each once. Trained on again among them: ``lost``,
    because their first contributor died in its round, and ``undone``, because their round was undone."""

    first: Count
    stop: Count
    samples: Count
    lost: Count
    undone: Count


# Who may join -----------------------------------------------------------------------------------------------


class InviteMade(JournalEvent):
    """The host made an invite, or the first peer joined by one that the journal did not know."""

    terms: InviteTerms
    at_s: UnixTime


class InviteRevoked(JournalEvent):
    """Nobody new may join by this invite."""

    id: InviteId
    at_s: UnixTime


class MemberKicked(JournalEvent):
    """The host removed a member, whose process may not go on; another one may join again."""

    peer: PeerId
    curve_key: Key
    note: Note = ""
    at_s: UnixTime


class PeerBanned(JournalEvent):
    """This identity may not join, nor anybody from ``network``, if one is named. ``is_expelled``: because of
    evidence."""

    peer: PeerId
    network: Network = ""
    note: Note = ""
    is_expelled: bool = False
    at_s: UnixTime


class MemberExpelled(JournalEvent):
    """This identity may not join any more, as ``evidence`` (its id; the journal keeps it) proves that it signed a wrong
    mean in ``round``. ``accuser``: the member that showed it."""

    peer: PeerId
    evidence: Digest
    accuser: PeerId
    round: Count
    at_s: UnixTime


class MeanDisproved(JournalEvent):
    """``evidence`` (its id; the journal keeps it) proves that ``maker`` signed a mean in ``round`` that is wrong beyond
    the bound: off by ``excess`` times what its own contribution could have moved it. The run goes back to a state of
    ``version``, on which that round was planned, or before. ``accuser``: the member that showed it."""

    round: Count
    version: Count
    evidence: Digest
    maker: PeerId
    accuser: PeerId
    excess: Annotated[float, Field(gt=1, le=1e30)]
    at_s: UnixTime


class PeerAllowed(JournalEvent):
    """The ban of this identity, and of the network named with it, is lifted, and it is on the host's list. Evidence of
    what it did before ``round`` expels it no more."""

    peer: PeerId
    round: Count
    at_s: UnixTime


class ProcessBanned(JournalEvent):
    """The process with this CURVE key was a member's that the host has banned."""

    curve_key: Key


class AccessRecorded(JournalEvent):
    """Record for the run's trail of access, in the transaction of the event that it is of. Changes no state."""

    record: AccessRecord


AccessEvent = InviteMade | InviteRevoked | MemberKicked | PeerBanned | MemberExpelled | PeerAllowed | ProcessBanned


class RemovedKept(Record):
    """Process of a removed member in a snapshot."""

    curve_key: Key
    is_banned: bool


class InviteKept(Record):
    """State of an invite in a snapshot (``access_list.InviteUse``)."""

    terms: InviteTerms
    made_s: UnixTime
    is_revoked: bool
    joined: Count
    users: tuple[PeerId, ...]


class AllowedKept(Record):
    """Peer on the host's list in a snapshot, and the round in which it was put there."""

    peer: PeerId
    round: Count


class AccessKept(Record):
    """State of ``access_list.AccessList`` in a snapshot."""

    invites: tuple[InviteKept, ...] = ()
    bans: tuple[PeerBanned, ...] = ()
    allowed: tuple[AllowedKept, ...] = ()
    removed: tuple[RemovedKept, ...] = ()


class WorkStanding(Record):
    """What validators' scores say of a member's work, by the rules in ``trust.py``.

    ``sign``: moving average of the sign of its gains on random samples, from -1 to 1; ``bad``: bad scores since the
    last good one, of which ``shown`` are more than a contribution that could not be had; ``accusers``: the validators
    of those; ``is_doubted``: it has lost its credit, and earns none; ``scores``: all of them."""

    sign: float = 0.0
    bad: Count = 0
    shown: Count = 0
    accusers: Annotated[tuple[PeerId, ...], Field(max_length=MAX_MEMBERS)] = ()
    is_doubted: bool = False
    scores: Count = 0


# Snapshots --------------------------------------------------------------------------------------------------


class MemberKept(Record):
    """State of one member in a snapshot."""

    entry: RosterEntry
    device: DeviceInfo
    alive: bool
    tokens_committed: Count
    rounds_committed: Count
    credit: Count
    credit_rounds: Count
    has_credit: bool
    barred_rounds: Count
    failures: Count
    carried_tokens: Count
    last_tokens: Count
    unusual_rounds: Count
    worked_version: Count | None
    suspended_until: Count
    suspensions: Count
    pace_tps: Rate
    missed: Count
    absences: Count
    out_until: Count
    joined_version: Count
    seen_version: Count
    work: WorkStanding = WorkStanding()
    left: Text = ""
    trouble: Trouble = ""
    network: Network = ""
    invite: InviteId | Literal[""] = ""
    joined_s: UnixTime = 0.0
    present_s: Seconds = 0.0
    open_s: Seconds = 0.0
    round_s: Seconds = 0.0
    counted_to_s: UnixTime = 0.0
    energy_j: Energy = 0.0
    round_energy_j: Energy = 0.0


class RunSnapshot(JournalEvent):
    """State of the run between two rounds, which stands for all events before it: a compacted journal begins with it.

    ``members``: in the order in which they first joined; ``replaced``: CURVE keys of processes that were replaced by
    others of the same identity; ``fresh``, ``pool``, ``held``: the ledger of samples; ``answered``: the last lease of
    each member; ``history``: the committed rounds behind the anchor, packed (``rollback.History``), as one record for
    each would hold up the event loop for seconds in a long run; ``lost_again``, ``undone_again``: samples to be trained
    on again (``lease_ledger.RetrainedSamples``); ``setback``: rollbacks since the run diverged
    (``divergence.Setback``); ``accusations``: those in force; ``agreement``: on ``agreed_digest``; ``took_part``:
    members of the committed plan that made this version, who decide on its digest; ``disproved``: the mean behind
    which the run is about to go back; ``evaluations``: those that are kept (``evaluation_book.py``); ``stopping``: why
    the open round is, or was, the last one, beside the run file's limits; ``noticed``: kind of the trend that was
    noticed last (``loss_trend.py``)."""

    epoch: Count
    round: Count
    phase: Phase
    model: PeerToCoordinatorDescribeModel | None
    anchor_version: Count
    agreed_digest: Digest | None
    agreement: StateAgreement | None
    took_part: tuple[PeerId, ...]
    chain: Digest
    verdict: Verdict | None
    rounds_aborted: Count
    rounds_undone: Count
    tokens_committed: Count
    tokens_undone: Count
    loss: Loss | None
    elapsed_s: Seconds
    members: tuple[MemberKept, ...]
    replaced: tuple[Key, ...]
    fresh: Count
    pool: tuple[SampleRange, ...]
    held: dict[str, tuple[SampleRange, ...]]
    answered: tuple[LeaseGranted, ...]
    history: bytes
    lost_again: tuple[SampleRange, ...]
    undone_again: tuple[SampleRange, ...]
    accusations: tuple[Accusation, ...]
    setback: tuple[Count, Count, Count] = (0, 0, 0)
    disproved: MeanDisproved | None = None
    access: AccessKept = AccessKept()
    amendments: Amendments = ()
    evaluations: tuple[ModelEvaluated, ...] = ()
    stopping: Text = ""
    noticed: Text = ""


# Of a pipeline ----------------------------------------------------------------------------------------------


class InScope(JournalEvent):
    """Event of the stage ``scope - 1``. Events without this wrapper are of the run's own scope."""

    scope: Count
    event: JournalEvent


class LayersDescribed(JournalEvent):
    """Sizes of the model's layers."""

    layers: tuple[LayerSize, ...]


class CapabilityShown(JournalEvent):
    """Capability that a peer has measured and reported."""

    peer: PeerId
    capability: Capability


class StagesCut(JournalEvent):
    """Cut of the model into stages, for the whole run: the first layer of each stage, then the number of layers."""

    boundaries: tuple[Count, ...]


class SpanAssigned(JournalEvent):
    """A peer holds the stages ``first <= s <= last`` from now on, instead of those before."""

    peer: PeerId
    first: Count
    last: Count
    at_s: UnixTime = 0.0


class SpanTaken(JournalEvent):
    """A peer holds no stage any more. With a ``reason``, for people: it kept the others waiting, and gets no stage
    before ``until_s`` if the run can do without it."""

    peer: PeerId
    at_s: UnixTime = 0.0
    reason: Text = ""
    until_s: UnixTime = 0.0


class Rest(Record):
    """Pause in which a peer gets no stage; ``times``: number of such pauses since its process joined."""

    until_s: UnixTime
    reason: Text
    times: Count


class SamplesDriven(JournalEvent):
    """A peer was given ``ranges``, one a micro-batch, to drive through the stages; it has finished ``done``."""

    peer: PeerId
    ranges: tuple[SampleRange, ...]
    done: tuple[SampleRange, ...]


class SamplesClaimed(JournalEvent):
    """In a stage: the gradient of these samples counts at this replica only."""

    peer: PeerId
    ranges: tuple[SampleRange, ...]


class SamplesReleased(JournalEvent):
    """In a stage: other replicas may claim these samples again."""

    peer: PeerId
    ranges: tuple[SampleRange, ...]


class PipelineSnapshot(JournalEvent):
    """State of a pipeline run, as ``RunSnapshot``: of its own scope and of all stages. ``former``: the last span of
    every peer; ``moved_s``: when each peer was last given another span."""

    epoch: Count
    members: tuple[MemberKept, ...]
    replaced: tuple[Key, ...]
    layers: tuple[LayerSize, ...]
    capabilities: tuple[CapabilityShown, ...]
    boundaries: tuple[Count, ...]
    spans: tuple[SpanAssigned, ...]
    former: tuple[SpanAssigned, ...]
    moved_s: dict[str, UnixTime] = Field(default_factory=dict)
    rests: dict[str, Rest] = Field(default_factory=dict)
    version: Count
    driven: tuple[SampleRange, ...]
    in_flight: dict[str, tuple[SampleRange, ...]]
    finished: dict[str, Count] = Field(default_factory=dict)
    stages: tuple[RunSnapshot, ...]
    access: AccessKept = AccessKept()
    amendments: Amendments = ()

    @property
    def round(self) -> int:
        return self.stages[0].round if self.stages else 0


def verdicts_in(events: Iterable[JournalEvent]) -> dict[int, VerdictGiven]:
    """Return the verdicts among the events, by scope."""
    found: dict[int, VerdictGiven] = {}
    for event in events:
        scope, event = (event.scope, event.event) if isinstance(event, InScope) else (0, event)
        if isinstance(event, VerdictGiven):
            assert scope not in found, "a round's verdict is journaled before the next round ends"
            found[scope] = event
    return found


def models_in(events: Iterable[JournalEvent]) -> dict[int, PeerToCoordinatorDescribeModel]:
    """Return the models that the events describe, by scope."""
    found: dict[int, PeerToCoordinatorDescribeModel] = {}
    for event in events:
        match event:
            case ModelDescribed(model=model):
                found[0] = model
            case InScope(scope=scope, event=ModelDescribed(model=model)):
                found[scope] = model
            case RunSnapshot(model=kept) if kept is not None:
                found[0] = kept
            case PipelineSnapshot(stages=stages):
                found |= {scope: one.model for scope, one in enumerate(stages, 1) if one.model is not None}
    return found


EVENTS: dict[str, type[JournalEvent]] = {
    cls.__name__: cls for cls in JournalEvent.__subclasses__() if cls is not InScope
}


def pack_event(event: JournalEvent) -> bytes:
    """Pack an event for the journal: its name and fields, and its scope if that is a stage's."""
    scope: list[int] = []
    if isinstance(event, InScope):
        scope, event = [event.scope], event.event
    data: bytes = msgpack.packb([type(event).__name__, event.model_dump(), *scope])
    return data


def unpack_event(data: bytes) -> JournalEvent:
    """Unpack an event. Raises ``DamagedRecords`` if this release does not know it, or for damaged bytes."""
    try:
        name, body, scope = _fields(msgpack.unpackb(data, use_list=False))
        event = EVENTS[name].model_validate(body)
        return InScope(scope=scope, event=event) if scope is not None else event
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise DamagedRecords(
            f"the journal has an event that this release cannot read; go on with the release that wrote it: {error}"
        ) from error


def _fields(value: Any) -> tuple[str, dict[str, Any], int | None]:
    name, body, *scope = value
    return name, body, *(scope or [None])
