"""Where the time of a real run's rounds goes: told by its members, traced, and of whom the others waited for."""

from __future__ import annotations

import json
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.integration.harness import SHOAL, Swarm, eventually, run_toml

from shoal.swarm.client.observer import get_status
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.types import WORK_PHASES
from shoal.swarm.system import run_loop

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.matrix]


def check_trace(trace: dict[str, Any], labels: list[str]) -> None:
    """Check the rules of the trace event format, and that each member's training is told without gaps."""
    events = trace["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert sorted(name.split(" ")[0] for name in names.values()) == sorted(["coordinator", *labels])
    threads = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    spans = [one for one in events if one["ph"] == "X"]
    assert {one["ph"] for one in events} == {"M", "X"}
    assert all(one["ts"] >= 0 and one["dur"] >= 0 and (one["pid"], one["tid"]) in threads for one in spans)
    whole_us = sum(one["dur"] for one in spans if one["pid"] == 0)
    for process in names.keys() - {0}:
        training = sorted((one for one in spans if (one["pid"], one["tid"]) == (process, 0)), key=lambda one: one["ts"])
        assert {one["name"] for one in training} <= set(WORK_PHASES)
        assert all(abs(one["ts"] + one["dur"] - two["ts"]) < 10 for one, two in pairwise(training))
        assert sum(one["dur"] for one in training) == pytest.approx(whole_us, rel=0.05, abs=3e5)


def test_times_add_up_a_trace_shows_them_and_a_stopped_process_is_named(swarm: Swarm, tmp_path: Path) -> None:
    host = swarm.host(run_toml(rounds=None, max_s=5.0, patience_s=6.0))
    _, bob, _ = swarm.members(host.invite, "ada", "bob", "eve")
    invite = Invite.parse(host.invite)

    def status() -> CoordinatorToPeerStatus:
        time.sleep(1.2)  # each is a join, of which a network may make 60 a minute
        return run_loop(get_status(invite))

    def all_three() -> CoordinatorToPeerStatus | None:
        found = status()
        timing = found.timing
        return found if timing is not None and timing.committed and timing.members == 3 and timing.round >= 2 else None

    told = eventually("a round of all three", all_three, 90.0, swarm.tails)
    timing = told.timing
    assert timing is not None
    assert timing.mean is not None
    assert timing.mean.total_s == pytest.approx(timing.wall_s, rel=0.05, abs=0.3)
    assert timing.work_s + timing.gather_s + timing.exchange_s == pytest.approx(timing.wall_s, rel=0.01)
    assert all(one.times is not None and one.times.compute > 0 for one in told.members if one.alive)
    assert 0 < (told.utilisation or 0) <= 1
    assert told.goodput == 1.0

    out = tmp_path / "t.json"
    tracing = swarm.command("trace", *SHOAL, "trace", host.invite, "--round", str(timing.round), "--out", str(out))
    assert tracing.exit_code(60) == 0, tracing.text()
    check_trace(json.loads(out.read_text()), ["ada", "bob", "eve"])

    bob.send(signal.SIGSTOP)

    def named() -> CoordinatorToPeerStatus | None:
        found = status()
        return found if found.timing and found.timing.path and found.timing.path.peer == bob.peer else None

    path = (eventually("that bob is named", named, 60.0, swarm.tails).timing or timing).path
    bob.send(signal.SIGCONT)
    assert path is not None
    assert path.cause == "stopped"
    assert "bob" in path.text
    assert "did not answer" in path.text
    unknown = swarm.command("unknown", *SHOAL, "trace", host.invite, "--round", "9999")
    assert unknown.exit_code(60) == 1, unknown.text()
    assert "does not know where the time of round 9999 went" in " ".join(unknown.text().split())
