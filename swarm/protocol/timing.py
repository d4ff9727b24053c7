"""Timing of rounds: phases of each member, and for whom the others waited."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.protocol.types import (
    MAX_MEMBERS,
    Cost,
    Count,
    Energy,
    PeerId,
    PhaseTimes,
    Rate,
    Record,
    Seconds,
    Stage,
    Text,
    WorkPhase,
)

SlowCause = Literal[
    "slow upload",
    "slow download",
    "relay",
    "slow device",
    "slow data",
    "slow packing",
    "slow applying",
    "slow checkpoint",
    "late join",
    "stopped",
    "unreachable",
    "unknown",
]
"""Why the others waited for a member. ``relay``: its bytes go over one, and that is slow; ``stopped``: it sends no
heartbeats; ``unreachable``: it does, and its bytes do not come."""

MAX_SPANS = 512
"""Most spans of a member in a round; of more, short ones are merged."""

MAX_TIMINGS = 128
"""Most rounds in an answer, and of which a coordinator remembers this much."""


class MemberTimes(Record):
    """A member's own account of a round, from the end of the round before to its report: a claim that decides nothing.

    ``training``: what its training thread did; the phases add up to the whole time. While that thread waits for a
    round, it does what the exchange does. ``exchange``: what the exchange did meanwhile; with ``averaging.overlap``
    beside the training, else the same seconds as in ``training``."""

    training: PhaseTimes
    exchange: PhaseTimes


class PhaseSpan(Record):
    """Time that a member spent in one phase, from ``start_s`` on its clock."""

    track: Literal["training", "exchange"]
    phase: WorkPhase
    start_s: Seconds
    seconds: Seconds


class CriticalPath(Record):
    """The member for which the others waited longest in a round.

    ``phase``: what they waited for; ``extra_s``: how much longer than for the usual one of them, as the coordinator saw
    it; ``bps``: the rate of a slow link, else 0; ``stage``: of a pipeline; ``is_claimed``: whether the cause is the
    member's own word. ``text``: all that in a sentence."""

    peer: PeerId
    phase: WorkPhase
    extra_s: Seconds
    cause: SlowCause
    bps: Rate = 0.0
    stage: Stage | None = None
    is_claimed: bool = False
    text: Text


class RoundTiming(Record):
    """Where the time of a round went, as the coordinator saw it.

    ``work_s``: from its beginning to its closing; ``gather_s``: from there to the plan; ``exchange_s``: from there to
    the verdict. ``utilisation``: share of the members' time in compute, by their own words; None if none has said.
    ``mean``: the members' mean times, likewise. ``path``: who was waited for; None in a quiet round. ``ended_s``: its
    end on the coordinator's clock. ``cost`` in the run's currency and ``energy_j``: of members whose time counts, by
    their own word (``costs.py``); None while nobody has a price, or measures it."""

    round: Count
    committed: bool
    wall_s: Seconds
    work_s: Seconds
    gather_s: Seconds
    exchange_s: Seconds
    members: Annotated[int, Field(ge=0, le=MAX_MEMBERS)]
    utilisation: Annotated[float, Field(ge=0, le=1)] | None = None
    mean: PhaseTimes | None = None
    path: CriticalPath | None = None
    ended_s: Seconds = 0.0
    cost: Cost | None = None
    energy_j: Energy | None = None
