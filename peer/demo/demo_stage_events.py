"""What a pipeline's processes logged, read for the demo: who holds which stage, and whom to kill next. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.peer.terminal.events import Event

Anchor = tuple[int, str]
"""Version and digest."""


@dataclass(frozen=True)
class Death:
    """``replicas``: of its stage at that moment, with this one. Moments are those of ``time.time()``."""

    peer: str
    stage: int
    replicas: int
    killed_at: float
    back_at: float | None = None


def whole_run(event: Event, stages: int) -> Event | None:
    """What an event of the coordinator says of the run as a whole: rounds end in all stages alike, and the last one
    knows the loss. None for what is of one stage only."""
    if "stage" not in event:
        return event
    if event["event"] in ("verdict", "went_back") and event["stage"] == stages - 1:
        return {key: value for key, value in event.items() if key != "stage"}
    return None


def held_now(events: Sequence[Event]) -> tuple[int, ...]:
    """The stages that a peer works on, by what it has logged since it started: those whose state it has."""
    return tuple(sorted(held_anchors(events)))


def choose_victim(holders: Mapping[str, int], stages: int, before: Sequence[Death]) -> tuple[str, int, int] | None:
    """Whom to kill next, its stage, and how many replicas that has: first a replica of the middlemost stage that has
    several, then the only one of a stage, another one if possible. None while there is nobody like that.

    ``holders``: by name the stage of whoever is there and has its state."""
    count = Counter(holders.values())
    if before:
        wanted = [stage for stage in range(stages) if count[stage] == 1]
        wanted.sort(key=lambda stage: stage in {death.stage for death in before})
    else:
        wanted = [stage for stage in range(stages) if count[stage] > 1]
        wanted.sort(key=lambda stage: abs(stage - (stages - 1) / 2))
    if not wanted or min(count[stage] for stage in range(stages)) == 0:
        return None
    name = max(name for name, stage in holders.items() if stage == wanted[0])
    return name, wanted[0], count[wanted[0]]


def held_anchors(events: Sequence[Event]) -> dict[int, Anchor]:
    """The newest of every stage that it holds now."""
    anchors: dict[int, Anchor] = {}
    for event in events:
        if event["event"] in ("joined", "span"):
            anchors = {}
        elif event["event"] in ("synced", "committed") and "stage" in event:
            anchors[event["stage"]] = event["anchor_version"], event["digest"]
    return anchors


def usual_round_s(moments: Sequence[float], deaths: Sequence[float]) -> float:
    """The median time between the ``moments`` at which rounds ended, without those in which somebody died; 0 where
    there is none."""
    gaps = [
        after - before for before, after in pairwise(moments) if not any(before <= death <= after for death in deaths)
    ]
    return statistics.median(gaps) if gaps else 0.0
