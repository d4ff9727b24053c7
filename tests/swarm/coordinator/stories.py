"""Transactions of a small run as a journal gets them, and what a journal makes of the run again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tests.swarm.coordinator.world import SIGNER, World, attributes, run_file

from shoal.swarm.coordinator.events import Fact, RunSnapshot, VerdictGiven
from shoal.swarm.coordinator.run import PlainRun

RUN = run_file()


@functools.cache
def story(rounds: int = 4, members: int = 2) -> list[tuple[Sequence[Fact], RunSnapshot | None]]:
    """Each transaction, and after a verdict the snapshot that could be compacted to."""
    world = World(RUN, members)
    written, told = 0, []
    while len(world.verdicts) < rounds:
        for worker in world.workers[:members]:
            world.behave(worker)
        world.tick(0.25)
        facts, written = world.facts[written:], len(world.facts)
        if facts:
            ended = any(isinstance(fact, VerdictGiven) for fact in facts)
            told.append((facts, world.machine.snapshot() if ended else None))
    return told


def facts_in(transactions: int, rounds: int = 4) -> list[Fact]:
    """Of the first so many."""
    return [fact for facts, _ in story(rounds)[:transactions] for fact in facts]


def state(facts: Sequence[Fact]) -> dict[str, Any]:
    """All that they make of the run."""
    machine = PlainRun(RUN, SIGNER.sign, 0.0, 0)
    machine.replay(list(facts), 0.0)
    return attributes(machine)


@functools.cache
def state_after(transactions: int) -> dict[str, Any]:
    """What the first so many make of it."""
    return state(facts_in(transactions))
