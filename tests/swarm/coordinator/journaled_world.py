"""A coordinator on a virtual clock with its journal, whole and compacted: killed and started again from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.errors import NotAdmitted, StaleWork, WireError
from shoal.swarm.protocol.run_file import RunFile

MachineT = TypeVar("MachineT", bound=PlainRun | PipelineRun)


def attributes_of(machine: Any, left_out: set[str]) -> dict[str, Any]:
    """Every attribute, so that none is forgotten in a snapshot; rosters have other versions after each start."""
    found = {name: value for name, value in vars(machine).items() if name not in left_out}
    caches = ("roster_version", "_changes", "_states", "_credits", "_meetings", "_remembered", "_quiet_until_s")
    found["membership"] = {name: value for name, value in vars(machine.membership).items() if name not in caches}
    found["access_list"] = machine.admission.access_list
    current = found.get("round")
    if current is not None and current.phase == "training":
        found["round"] = replace(current, phase="waiting")  # which of the two it is, heartbeats say anew
    # A dict is equal to one in another order, but the first to join decides between equals.
    return found | {"order": list(machine.membership.members)}


class JournaledWorld(Generic[MachineT]):
    """``settle`` after every event, which takes its events with ``written`` and checks what must always hold."""

    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.now_s, self.epoch = 1000.0, 10**6
        self.journal: list[list[bytes]] = []
        """Its transactions."""
        self.short: list[list[bytes]] = []
        """The same, compacted at every verdict."""
        self.events: list[ev.JournalEvent] = []
        self.machine = self.made()
        self.machine.log.start(self.run_scope(self.machine))

    def made(self) -> MachineT:
        raise NotImplementedError

    @staticmethod
    def run_scope(machine: PlainRun | PipelineRun) -> RoundScope | PipelineRun:
        return machine.scope if isinstance(machine, PlainRun) else machine

    def journaled(self, machine: MachineT) -> dict[str, Any]:
        """All that a journal has to bring back."""
        raise NotImplementedError

    def attributes(self, machine: MachineT) -> dict[str, Any]:
        raise NotImplementedError

    def settle(self) -> None:
        raise NotImplementedError

    def written(self) -> Sequence[ev.JournalEvent]:
        """The events since the last time, written."""
        events = self.machine.log.take()
        packed = [ev.pack_event(event) for event in events]
        assert [ev.unpack_event(one) for one in packed] == events
        if packed:
            self.journal.append(packed)
            self.short.append(packed)
            self.events += events
        if ev.verdicts_in(events) and (snapshot := self.run_scope(self.machine).snapshot()) is not None:
            self.short = [[ev.pack_event(snapshot)]]
            assert ev.unpack_event(self.short[0][0]) == snapshot
        return events

    # Time and the coordinator -----------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.machine.tick(self.now_s)
        self.settle()

    def restart(self, *, compact: bool = True) -> None:
        """Kill the coordinator and start it from its journal."""
        before = self.journaled(self.machine)
        short, whole = self.attributes(self.replayed(self.short)), self.attributes(self.replayed(self.journal))
        assert [name for name in whole if short[name] != whole[name]] == []
        self.revive(compact=compact)
        assert self.journaled(self.machine) == before

    def crash_unwritten(self, seconds: float) -> None:
        """Kill it between a decision and the journal."""
        self.now_s += seconds
        self.machine.tick(self.now_s)
        self.revive()

    def revive(self, *, compact: bool = True) -> None:
        self.epoch += 10**6
        self.machine = self.replayed(self.short if compact else self.journal)
        assert self.machine.log.take() == []
        self.machine.log.start(self.run_scope(self.machine))
        self.settle()

    def replayed(self, journal: Sequence[Sequence[bytes]]) -> MachineT:
        machine = self.made()
        events = [ev.unpack_event(one) for transaction in journal for one in transaction]
        machine.log.replay(self.run_scope(machine), events, self.now_s)
        return machine

    def refused(self, event: Any, *arguments: Any, **keywords: Any) -> bool:
        try:
            event(*arguments, **keywords)
        except (StaleWork, WireError, NotAdmitted):
            return True
        finally:
            self.settle()
        return False
