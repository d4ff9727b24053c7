"""Transactions of a small run as a journal gets them, and what a journal makes of the run again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tests.swarm.coordinator.world import SIGNER, World, attributes, run_file

from shoal.swarm.coordinator.events import JournalEvent, RunSnapshot, VerdictGiven
from shoal.swarm.coordinator.run import PlainRun

RUN = run_file()


@functools.cache
def story(rounds: int = 4, members: int = 2) -> list[tuple[Sequence[JournalEvent], RunSnapshot | None]]:
    """Each transaction, and after a verdict the snapshot that could be compacted to."""
    world = World(RUN, members)
    written, told = 0, []
    while len(world.verdicts) < rounds:
        for worker in world.workers[:members]:
            world.behave(worker)
        world.tick(0.25)
        events, written = world.events[written:], len(world.events)
        if events:
            ended = any(isinstance(event, VerdictGiven) for event in events)
            told.append((events, world.scope.snapshot() if ended else None))
    return told


def events_in(transactions: int, rounds: int = 4) -> list[JournalEvent]:
    """Of the first so many."""
    return [event for events, _ in story(rounds)[:transactions] for event in events]


def state(events: Sequence[JournalEvent]) -> dict[str, Any]:
    """All that they make of the run."""
    machine = PlainRun(RUN, SIGNER.sign, 0.0, 0)
    machine.log.replay(machine.scope, list(events), 0.0)
    return attributes(machine)


@functools.cache
def state_after(transactions: int) -> dict[str, Any]:
    """What the first so many make of it."""
    return state(events_in(transactions))
