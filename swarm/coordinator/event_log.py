"""Log of what the scopes of a run decide, in order, until the journal takes it; with the clock of the decisions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from shoal.swarm.coordinator.events import (
    CoordinatorStarted,
    FigureTaken,
    InScope,
    JournalEvent,
    LeaseGranted,
    MemberJoined,
    MemberLost,
    MemberMoved,
    ModelEvaluated,
    SamplesClaimed,
    SamplesDriven,
    WorkScored,
)
from shoal.swarm.coordinator.membership import Membership


class EventTarget(Protocol):
    """Scope whose state events change; ``number``: 0 for the run's own, stage + 1 for a stage."""

    @property
    def number(self) -> int: ...
    @property
    def membership(self) -> Membership: ...
    def apply(self, event: JournalEvent) -> None: ...


class EventLog:
    """Events of all scopes of a run, and the moment at which the coordinator decides.

    ``now_s`` is on the coordinator's own clock; ``unix_offset_s`` added to it is Unix time. ``epoch``: of the lease
    on the journal; roster versions continue from it, as observers are not journaled. ``announcements`` counts the
    events that members have to be told of."""

    def __init__(self, now_s: float, epoch: int) -> None:
        self.now_s = now_s
        self.unix_offset_s = 0.0
        self.epoch = epoch
        self.announcements = 0
        self._ticked_s = now_s
        self._events: list[JournalEvent] = []

    @property
    def unix_s(self) -> float:
        return max(0.0, self.now_s + self.unix_offset_s)

    @property
    def is_written(self) -> bool:
        """Whether the journal has taken all events."""
        return not self._events

    def record(self, scope: EventTarget, event: JournalEvent) -> None:
        """Apply an event to its scope and keep it for the journal, unless it is about an observer."""
        if isinstance(event, MemberLost):
            event = event.model_copy(update={"at_s": self.unix_s})
        match event:
            case MemberJoined(entry=entry):
                is_kept = entry.role != "observer"
            case MemberLost(peer=peer) | MemberMoved(peer=peer):
                is_kept = not scope.membership.is_observer(peer)
            case _:
                is_kept = True
        scope.apply(event)
        if is_kept:
            self._events.append(InScope(scope=scope.number, event=event) if scope.number else event)
        if not isinstance(
            event, LeaseGranted | SamplesDriven | SamplesClaimed | WorkScored | ModelEvaluated | FigureTaken
        ):
            self.announcements += 1

    def take(self) -> list[JournalEvent]:
        """Return the events since the last call, for the journal."""
        taken, self._events = self._events, []
        return taken

    def replay(self, scope: EventTarget, journal: Iterable[JournalEvent], now_s: float) -> None:
        """Apply a journal to the run's own scope. Live members get the whole patience to be heard again."""
        self.now_s = now_s
        for event in journal:
            scope.apply(event)

    def start(self, scope: EventTarget) -> None:
        """Record in the run's own scope that this process has taken over the journal."""
        self.record(scope, CoordinatorStarted(epoch=self.epoch, at_s=self.unix_s))

    def tick(self, now_s: float, patience_s: float) -> float:
        """Set the clock. Returns for how long the coordinator stood still, if that was longer than ``patience_s``.

        A suspended machine or a slow disk is no fault of the members: nobody was late in that time."""
        stood_s, self._ticked_s, self.now_s = now_s - self._ticked_s, now_s, now_s
        return stood_s if stood_s > patience_s else 0.0
