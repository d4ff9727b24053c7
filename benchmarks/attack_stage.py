"""A lying stage in real processes: loss beside a run of honest members alone, and rounds until it has lost its stages.

The runs are those of ``tests/attacks/test_stages.py``: two stages of three replicas, of which one sends random
activations of the usual size and gradients of the opposite sign, or huge ones. On no virtual clock: micro-batches go
through threads, sockets and the queues of a training thread, which are what is checked. So runs differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.attacks.test_stages import MEMBER, MEMORY, ROUNDS, RUN, losses, taken
from tests.integration.harness import ROUNDS_S, START_S, Host, Swarm

from shoal.swarm.coordinator.events import SpanTaken, VerdictGiven

_LAST = 4
"""Rounds at the end whose mean loss is compared."""


def run_stages(lie: str) -> tuple[float, int | None, int]:
    """Run until all rounds are over; ``lie``: of ``lying_stage.py``, "honest" for none.

    Returns the mean loss of the last rounds, the committed rounds until the liar lost its stages, None if it never did,
    and how many honest members lost theirs for what they sent."""
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            host = swarm.host(RUN)
            kinds = [*["honest"] * 5, lie]
            members = [
                swarm.member(host.invite, label, (sys.executable, str(MEMBER), kind), extra=("--max-memory", MEMORY))
                for label, kind in zip("abcdef", kinds, strict=True)
            ]
            for member in members[:-1]:
                if member.exit_code(START_S + 3 * ROUNDS_S) != 0:
                    raise RuntimeError(f"an honest member failed: {member.tail()}")
            host.stop()
            liar, found = members[-1].peer, losses(host)
            if len(found) != ROUNDS:
                raise RuntimeError(f"{len(found)} of {ROUNDS} rounds were committed")
            honest = sum(one.peer != liar or lie == "honest" for one in taken(host))
            return sum(found[-_LAST:]) / _LAST, rounds_before(host, liar), honest
        finally:
            swarm.close()


def rounds_before(host: Host, liar: str) -> int | None:
    """Return the rounds that were committed before the liar lost its stages."""
    committed = 0
    for one in host.journal_events():
        event = getattr(one, "event", one)
        if isinstance(event, VerdictGiven) and getattr(one, "scope", None) == 2:
            committed += event.verdict.committed
        if isinstance(event, SpanTaken) and event.peer == liar and event.reason.startswith("sent wrong values"):
            return committed
    return None


def lying_stages(lies: tuple[str, ...] = ("wrong", "huge")) -> dict[str, float | None]:
    """Measure each lie once, beside one honest run."""
    clean, _, expelled = run_stages("honest")
    ratios: dict[str, float | None] = {}
    for lie in lies:
        loss, rounds, others = run_stages(lie)
        expelled += others
        ratios |= {f"lying_stage_loss_vs_clean ({lie})": loss / clean, f"lying_stage_rounds ({lie})": rounds}
    return ratios | {"honest_stages_taken": expelled}
