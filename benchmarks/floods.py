"""A run of a host and two volunteers while strangers flood the host: the time of its rounds beside quiet ones, how the
host's memory grows, and how long a newcomer is about joining.

Kinds of floods (``tests/attacks/flooding_stranger.py``): eight strangers that send the largest messages, 2,000
connections that are opened again when they are closed, and joins under ever new identities. Quiet rounds and floods
take turns. The floods use processor time of this machine as well, at the lowest priority; "made a second" says how much
they could do: connections, answered joins, messages that the stranger's libzmq took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import await_invite, comma, end_on_sigterm, over, parser, publish
from usage import rss_bytes

from shoal.peer.demo.processes import Child
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import ShoalError
from shoal.swarm.protocol.invite import Invite

STRANGER = Path(__file__).parent.parent / "tests" / "attacks" / "flooding_stranger.py"
KINDS = {"messages": 8, "connections": 2000, "joins": 32}
"""By kind, how many at a time."""

JUDGED = ("messages", "connections")
"""Those that the goals are for; the others are measured beside them."""

QUIET = "quiet"
LIMIT_S = 90.0
"""For a turn, and for a newcomer."""

RUN = """
algorithm = "diloco"
[run]
name = "flooded"
seed = 1
[recipe]
name = "gpt"
settings = {{ layers = 1, width = 32, heads = 2, context = 32 }}
[inner]
batch_samples = 4
[averaging]
codec = "int8"
[round]
tokens = 1_000_000_000_000
max_s = {round_s}
patience_s = 4
"""


class Growth:
    """Growth of a process's memory: its peak above what it had at the beginning."""

    def __init__(self, pid: int) -> None:
        self._pid, self._before_bytes, self.most_bytes = pid, rss_bytes(pid), 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.most_bytes = max(self.most_bytes, rss_bytes(self._pid) - self._before_bytes)

    def end(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.most_bytes


def verdict_times(host: Child) -> list[float]:
    """Of all committed rounds so far."""
    host.take_events()
    return [one["time"] for one in host.events if one["event"] == "verdict" and one["committed"]]


def rounds_s(host: Child, count: int) -> list[float]:
    """Time the next whole rounds, in seconds each. Fewer than ``count`` when time is up."""
    before, deadline_s = len(verdict_times(host)), time.monotonic() + LIMIT_S
    while len(verdict_times(host)) < before + 1 + count and time.monotonic() < deadline_s and host.is_running:
        time.sleep(0.05)
    times = verdict_times(host)[before:]
    return [later - earlier for earlier, later in pairwise(times)]


def newcomer_s(invite: str, folder: Path) -> float:
    """From the first call until somebody new is a member; infinite when that fails."""
    began_s = time.monotonic()
    options = SessionOptions(identity=folder / f"newcomer-{began_s}", state=folder / "new", bind=("127.0.0.1", 0))
    try:
        session = Session.connect(invite, options)
    except ShoalError as error:
        print(f"a newcomer was not admitted: {error}", file=sys.stderr)
        return LIMIT_S
    took_s = time.monotonic() - began_s
    session.close()
    return took_s


def turn(kind: str, host: Child, invite: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Some rounds and a newcomer while that flood lasts."""
    growth, flood = Growth(host.process.pid), None
    said = folder / f"{kind}.txt"
    began_s = time.monotonic()
    if kind != QUIET:
        parts = Invite.parse(invite)
        at = parts.addresses[0]
        # Strangers have machines of their own: here they get what the run leaves them.
        victim = [at.host, str(at.control_port), parts.key.hex()]
        command = ["nice", "-n", "19", sys.executable, str(STRANGER), kind, *victim]
        with said.open("wb") as file:
            flood = subprocess.Popen([*command, str(KINDS[kind]), str(2 * LIMIT_S), invite], stdout=file)
        while "begins" not in said.read_text() and time.monotonic() < began_s + LIMIT_S:
            time.sleep(0.05)
        began_s = time.monotonic()
    try:
        time.sleep(1.0)
        found = rounds_s(host, rounds)
        admitted_s = newcomer_s(invite, folder)
    finally:
        if flood is not None:
            flood.kill()
            flood.wait()
    lasted_s = time.monotonic() - began_s
    made = [json.loads(line)["made"] for line in said.read_text().splitlines()[1:]] if flood is not None else []
    time.sleep(2.0)
    return {
        "rounds_s": found,
        "admitted_s": admitted_s,
        "growth_bytes": growth.end(),
        "made_per_s": made[-1] / lasted_s if made else None,
    }


def measure(options: Any) -> dict[str, list[dict[str, Any]]]:
    """By kind, what each of its turns gave."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file = folder / "run.toml"
        run_file.write_text(RUN.format(round_s=options.round_s))
        children = [Child("host", folder / "host", ["host", str(run_file), "--bind", "127.0.0.1:0", "--no-keep-model"])]
        host = children[0]
        try:
            invite = await_invite(host, time.monotonic() + 60)
            for number in range(2):
                arguments = ["join", invite, "--name", f"volunteer-{number}", "--bind", "127.0.0.1", "--threads", "1"]
                children.append(Child(f"volunteer-{number}", folder / f"v{number}", [*arguments, "--device", "cpu"]))
            rounds_s(host, 3)  # to warm up
            for number in range(options.turns):
                for kind in options.kinds:
                    for one in (QUIET, kind):
                        found[one].append(turn(one, host, invite, folder, options.rounds))
                        print(f"turn {number}: {one}: {found[one][-1]}", file=sys.stderr, flush=True)
            if not all(child.is_running for child in children):
                raise RuntimeError(
                    "a process has ended:\n" + "\n".join(one.log.read_text()[-2000:] for one in children)
                )
        finally:
            for child in reversed(children):
                child.ask_to_end()
                child.end()
    return found


def row_of(kind: str, turns: list[dict[str, Any]], quiet_s: float) -> dict[str, Any]:
    every = [seconds for one in turns for seconds in one["rounds_s"]]
    return {
        "flood": kind,
        "round s": median(every) if every else None,
        "made a second": turns[-1]["made_per_s"],
        "vs quiet": over(median(every), quiet_s) if every else None,
        "longest round s": max(every, default=None),
        "host grew MB": max(one["growth_bytes"] for one in turns) / 1e6,
        "newcomer s": max(one["admitted_s"] for one in turns),
        "rounds": len(every),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--kinds", type=comma(str), default=list(KINDS), help=", ".join(KINDS))
    arguments.add_argument("--rounds", type=int, default=5, help="of each turn")
    arguments.add_argument("--turns", type=int, default=2)
    arguments.add_argument("--round-s", type=float, default=1.0, help="of local work")
    options = arguments.parse_args()
    end_on_sigterm()
    found = measure(options)
    quiet_s = median(seconds for one in found[QUIET] for seconds in one["rounds_s"])
    rows = [row_of(kind, turns, quiet_s) for kind, turns in found.items()]
    judged = [row for row in rows if row["flood"] in JUDGED]

    def worst(column: str) -> float | None:
        values = [row[column] for row in judged if row[column] is not None]
        return max(values) if values else None

    ratios: dict[str, float | None] = {
        "round_time_flood_vs_quiet": worst("vs quiet"),
        "host_rss_growth_mb": worst("host grew MB"),
        "newcomer_admitted_s": worst("newcomer s"),
    }
    for row in rows:
        if row["flood"] not in (QUIET, *JUDGED):
            ratios |= {
                f"{row['flood']}_round_time_vs_quiet": row["vs quiet"],
                f"{row['flood']}_host_rss_growth_mb": row["host grew MB"],
                f"{row['flood']}_newcomer_admitted_s": row["newcomer s"],
            }
    publish("Floods by strangers, a host and two volunteers", rows, ratios, options.json)


if __name__ == "__main__":
    main()
