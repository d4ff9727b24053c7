"""Scenarios of the demo as data: the run file, and the steps taken on peers: started, killed, started again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.peer.demo.run_files import ROUNDS_PER_MINUTE, STAGE_MEMORY, averaging_toml, pipeline_toml
from shoal.peer.demo.run_log import RunLog
from shoal.swarm.errors import UserError

_BACK_S = 20.0
"""After this long the only replica of a stage comes back, also if the run has not said that it waits for one."""

_PEERS, _PIPELINE_PEERS = 4, 5
_SPARE_PEERS = 2
"""More peers than stages: after the first death some stage still has two replicas, one of which can be moved."""


@dataclass(frozen=True)
class Target:
    """The peer of a step. To be killed in a pipeline: its stage, and how many replicas that has."""

    peer: str
    stage: int | None = None
    replicas: int = 0


@dataclass(frozen=True)
class Step:
    """Once the share ``after`` of the run is done, ``act`` on the peer that ``choose`` names; it names none while the
    run is not as it should be for that. ``goal``: in words, what has happened then."""

    act: Literal["start", "kill", "restart"]
    goal: str
    choose: Callable[[RunLog], Target | None]
    after: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """``steps``: taken one after the other; ``join_options``: of every peer."""

    toml: str
    steps: tuple[Step, ...]
    join_options: tuple[str, ...] = ()


def make_scenario(peers: int | None, minutes: float, preset: str | None, *, pipeline: bool) -> Scenario:
    """The scenario of the demo's options; ``peers``: None for as many as it takes. Raises ``UserError``."""
    fewest = _PIPELINE_PEERS if pipeline else 2
    peers = peers or (_PIPELINE_PEERS if pipeline else _PEERS)
    if pipeline and preset is not None:
        raise UserError("--pipeline: a model in stages is trained by virtual_batch; leave out --preset")
    if peers < fewest:
        why = f"with --pipeline: three stages, and {_SPARE_PEERS} to lose" if pipeline else "one of them is killed"
        raise UserError(f"--peers: expected {fewest} or more: {why}")
    if pipeline and minutes < 1.0:
        raise UserError("--minutes: expected 1 or more with --pipeline: two peers are killed, and there are few rounds")
    starts = [
        Step("start", f"{name} started", _named(name)) for name in (f"peer-{number}" for number in range(1, peers + 1))
    ]
    if pipeline:
        steps = (*starts, *_PIPELINE_STEPS)
        toml = pipeline_toml(peers - _SPARE_PEERS, round(ROUNDS_PER_MINUTE * minutes))
        return Scenario(toml, steps, ("--max-memory", STAGE_MEMORY))
    victim, newcomer = f"peer-{peers}", f"peer-{peers + 1}"
    steps = (
        *starts,
        Step("kill", f"{victim} was killed", lambda log: Target(victim) if _all_train(log) else None, 1 / 3),
        Step("start", f"{newcomer} joined", _named(newcomer), 1 / 2),
    )
    return Scenario(averaging_toml(preset or "diloco", peers, minutes), steps)


def _named(name: str) -> Callable[[RunLog], Target]:
    return lambda log: Target(name)


def _all_train(log: RunLog) -> bool:
    return all(peer.anchors for peer in log.peers.values() if peer.is_live)


def _replica(log: RunLog, *, alone: bool) -> Target | None:
    """A replica to kill in the middle of a round, when its work is under way; none before the run has recovered from
    the last death."""
    if not (log.commits and _all_train(log) and log.is_recovered):
        return None
    if not log.round_s / 3 <= log.now - log.commits[-1]["time"] <= 2 * log.round_s / 3:
        return None
    holders = {name: min(peer.anchors) for name, peer in log.peers.items() if peer.is_live}
    return choose_victim(holders, log.stages, alone=alone, avoid={death.stage for death in log.deaths})


def choose_victim(
    holders: Mapping[str, int], stages: int, *, alone: bool, avoid: Collection[int | None] = ()
) -> Target | None:
    """The only replica of a stage, or one of a stage that has several: of a stage that is not to be avoided, if
    possible, and of the middlemost of them. None while there is none, or while a stage has no replica at all.

    ``holders``: the stage of each live peer, by name."""
    count = Counter(holders.values())
    wanted = [stage for stage in range(stages) if (count[stage] == 1 if alone else count[stage] > 1)]
    if not wanted or not all(count[stage] for stage in range(stages)):
        return None
    stage = min(wanted, key=lambda stage: (stage in avoid, abs(stage - (stages - 1) / 2)))
    return Target(max(name for name, held in holders.items() if held == stage), stage, count[stage])


def _last_victim(log: RunLog) -> Target | None:
    """The peer that was killed last, once the run waits for it."""
    last = log.deaths[-1]
    return Target(last.peer) if log.outlook or log.now - last.killed_at > _BACK_S else None


_PIPELINE_STEPS = (
    Step("kill", "a replica of a stage was killed", lambda log: _replica(log, alone=False), 0.2),
    Step("kill", "the only replica of a stage was killed", lambda log: _replica(log, alone=True), 0.4),
    Step("restart", "it came back", _last_victim),
)
