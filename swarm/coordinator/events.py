"""Events of the coordinator's journal: what it has decided. Replaying them gives its state again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgpack
from pydantic import Field

from shoal.swarm.errors import StorageError
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.rounds import RoundPlan, Verdict
from shoal.swarm.protocol.types import (
    Capability,
    Count,
    DeviceInfo,
    Digest,
    Key,
    LayerSize,
    Loss,
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

Network = Annotated[str, Field(max_length=255)]


class JournalEvent(Record):
    """One decision. Events are only ever appended."""


class ModelDescribed(JournalEvent):
    """What the run's first peer built from the run file; everybody else's must be the same."""

    model: PeerToCoordinatorDescribeModel


class StateAgreed(JournalEvent):
    """The digest of anchor and outer state that this anchor version has."""

    anchor_version: Count
    digest: Digest


class MemberJoined(JournalEvent):
    """A member came, or came back. ``network``: that it was seen to come from (``addresses.network_of``)."""

    entry: RosterEntry
    device: DeviceInfo
    network: Network = ""


KEPT_SAMPLES = "kept samples from the others"
"""Reason for which a member is lost that was waited for in vain: as if its contribution had not come."""


class MemberLost(JournalEvent):
    """A member left or fell silent; what it held is for others. ``trouble``: what it said of why it could not go on."""

    peer: PeerId
    reason: Text
    trouble: Trouble = ""


class LeaseGranted(JournalEvent):
    """These samples are with this peer. ``round`` and ``tokens_done`` are of its request: the same again is a
    repetition by a peer that did not get the answer."""

    peer: PeerId
    round: Count
    tokens_done: Count
    ranges: tuple[SampleRange, ...]


class CoordinatorStarted(JournalEvent):
    """A process took over the journal. Every later one's ``epoch`` is larger, also where its clock is behind."""

    epoch: Count


class RoundClosing(JournalEvent):
    """The closing moment of this round has been announced."""

    round: Count


class RoundReopened(JournalEvent):
    """The round goes on: samples of its batch were lost with a member, or all its members were."""

    round: Count


class RoundPlanned(JournalEvent):
    """Who averages, and with which samples behind it (in the order of the plan's members). ``loss``: the mean of their
    losses; ``median_loss``: the median of those with a record, which few members do not move."""

    plan: RoundPlan
    ranges: tuple[tuple[SampleRange, ...], ...]
    loss: float | None
    median_loss: float | None = None


class WentBack(Record):
    """With this verdict the run goes back to an earlier anchor version: nobody holds ``from_version`` any more, or it
    has ``diverged``. ``digest``: of the state gone back to; ``vouched_round``: the committed round that was
    planned on it; ``keepers``: who said to have it; ``bad_version``: of a divergence, the version that was of no use;
    ``suspects``: who may have spoilt it; their work does not count for a while."""

    from_version: Count
    digest: Digest
    vouched_round: Count
    keepers: tuple[PeerId, ...]
    diverged: bool = False
    bad_version: Count = 0
    suspects: tuple[PeerId, ...] = ()


class Accusation(Record):
    """In that round the member ``by`` did not get from ``of`` what that one had to give it, as it says."""

    by: PeerId
    of: PeerId
    round: Count


class VerdictGiven(JournalEvent):
    """How a round ended. ``lost``: members whose samples the committed mean does without; they are leased again.
    ``failed``: those that others did not get from what they had to; they own nothing for a while. ``missing``: those
    whose contributions did not come; after two rounds in a row they are left out for a while. ``accusations``: all of
    the first kind, also those that are not enough for that. ``carrying``: members that are here still, and bring what
    the mean lacks of their contribution to the next round."""

    verdict: Verdict
    elapsed_s: Seconds
    lost: tuple[PeerId, ...]
    failed: tuple[PeerId, ...] = ()
    carrying: tuple[PeerId, ...] = ()
    missing: tuple[PeerId, ...] = ()
    accusations: tuple[Accusation, ...] = ()
    went_back: WentBack | None = None


class LossRose(JournalEvent):
    """This round was committed with a loss far above what had been usual."""

    round: Count
    loss: Loss
    usual: Loss


class EpochsCovered(JournalEvent):
    """All samples of the epochs ``first`` up to ``stop`` (without it) are committed, each once. Of them were trained on
    again: ``lost`` since their first contributor died in its round and ``undone`` since their round was."""

    first: Count
    stop: Count
    samples: Count
    lost: Count
    undone: Count


class MemberKept(Record):
    """What a journal has to bring back of one member."""

    entry: RosterEntry
    device: DeviceInfo
    alive: bool
    tokens_committed: Count
    rounds_committed: Count
    barred_rounds: Count
    failures: Count
    carried_tokens: Count
    last_tokens: Count
    clipped_rounds: Count
    worked_version: Count | None
    suspended_until: Count
    suspensions: Count
    pace_tps: Rate
    missed: Count
    absences: Count
    out_until: Count
    joined_version: Count
    seen_version: Count
    left: Text = ""
    trouble: Trouble = ""
    network: Network = ""


class RunSnapshot(JournalEvent):
    """All that the events before it have made of the run, as it was between two rounds: a journal that was compacted
    begins with it. ``members``: in the order in which they joined first; ``replaced``: CURVE keys of the last processes
    in whose place others of the same identity have come; ``fresh``, ``pool``, ``held``: the ledger of samples;
    ``answered``: everybody's last lease; ``history``: the committed rounds behind the anchor, packed
    (``rollback.History``): a record each would hold up the event loop for seconds in a long run; ``lost_again``,
    ``undone_again``: samples that are trained on once more; ``setback``: how often the run went back since it diverged
    (``divergence.Setback``); ``accusations``: who does without whom."""

    epoch: Count
    round: Count
    phase: Phase
    model: PeerToCoordinatorDescribeModel | None
    anchor_version: Count
    agreed_digest: Digest | None
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


# Of a pipeline ----------------------------------------------------------------------------------------------


class InScope(JournalEvent):
    """An event of the stage ``scope - 1``; all others are of the run's own scope."""

    scope: Count
    event: JournalEvent


class LayersDescribed(JournalEvent):
    """What each of the model's layers takes."""

    layers: tuple[LayerSize, ...]


class CapabilityShown(JournalEvent):
    """What a peer has measured of itself."""

    peer: PeerId
    capability: Capability


class StagesCut(JournalEvent):
    """Where the model is cut, for the whole run: the first layer of each stage, then the number of layers."""

    boundaries: tuple[Count, ...]


class SpanAssigned(JournalEvent):
    """This peer holds the stages ``first <= s <= last`` from now on, in place of those that it held."""

    peer: PeerId
    first: Count
    last: Count
    at_s: UnixTime = 0.0


class SpanTaken(JournalEvent):
    """This peer holds no stage any more. With a ``reason``, which is for people: it kept others waiting, and gets none
    before ``until_s`` if the run can do without it."""

    peer: PeerId
    at_s: UnixTime = 0.0
    reason: Text = ""
    until_s: UnixTime = 0.0


class Rest(Record):
    """Until when a peer is to hold no stage, and why; ``times``: how often that has been since its process joined."""

    until_s: UnixTime
    reason: Text
    times: Count


class SamplesDriven(JournalEvent):
    """``ranges``, one a micro-batch, are with this peer to be driven through the stages; ``done`` no longer."""

    peer: PeerId
    ranges: tuple[SampleRange, ...]
    done: tuple[SampleRange, ...]


class SamplesClaimed(JournalEvent):
    """In a stage: the gradient of these samples counts at this replica, and at no other."""

    peer: PeerId
    ranges: tuple[SampleRange, ...]


class SamplesReleased(JournalEvent):
    """In a stage: what this replica had claimed is for others again."""

    peer: PeerId
    ranges: tuple[SampleRange, ...]


class PipelineSnapshot(JournalEvent):
    """As ``RunSnapshot``, of a pipeline: its own scope and all its stages. ``former``: the last span of every peer;
    ``moved_s``: when somebody was last given another span than it had."""

    epoch: Count
    model: PeerToCoordinatorDescribeModel | None
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

    @property
    def round(self) -> int:
        return self.stages[0].round if self.stages else 0


def verdicts_in(events: Iterable[JournalEvent]) -> dict[int, VerdictGiven]:
    """Those among them, by scope."""
    found: dict[int, VerdictGiven] = {}
    for event in events:
        scope, event = (event.scope, event.event) if isinstance(event, InScope) else (0, event)
        if isinstance(event, VerdictGiven):
            assert scope not in found, "a round's verdict is told before the next round ends"
            found[scope] = event
    return found


EVENTS: dict[str, type[JournalEvent]] = {
    cls.__name__: cls for cls in JournalEvent.__subclasses__() if cls is not InScope
}


def pack_event(event: JournalEvent) -> bytes:
    """The journal's bytes of an event: its name and its fields, and its scope where that is a stage."""
    scope: list[int] = []
    if isinstance(event, InScope):
        scope, event = [event.scope], event.event
    data: bytes = msgpack.packb([type(event).__name__, event.model_dump(), *scope])
    return data


def unpack_event(data: bytes) -> JournalEvent:
    """Raises ``StorageError`` when the record is of a later release, or none of ours."""
    try:
        name, body, scope = _fields(msgpack.unpackb(data, use_list=False))
        event = EVENTS[name].model_validate(body)
        return InScope(scope=scope, event=event) if scope is not None else event
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise StorageError(f"the journal has a record that this release cannot read: {error}") from error


def _fields(value: Any) -> tuple[str, dict[str, Any], int | None]:
    name, body, *scope = value
    return name, body, *(scope or [None])
