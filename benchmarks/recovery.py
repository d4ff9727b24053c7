"""Cost of coming back: joining, joiners beside rounds, checkpoints, a killed coordinator, a killed peer.

Host and members are processes on loopback, with models that cost hardly any computing (``recovery_peer.py``). A
joiner's seconds are those from the start of its process, imports among them, to its first step's gradient; beside them
those that the state's bytes alone take as one sealed stream between two other processes. A checkpoint's stall is what
the training thread waits for; beside it one copy of as many bytes as are saved, in the same thread. Of the coordinator
and of a peer it is the time from its SIGKILL to the others' next verdict.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import comma, elements_of, end_on_sigterm, over, parser, publish, size_of
from recovery_run import PATIENCE_S, STEPS_A_ROUND, Event, NotRecovered, Running, Site, collected
from transport import CHUNK, measure, shoal_end
from usage import available_bytes

from shoal.swarm.deadlines import Deadlines

Row = dict[str, Any]
Span = tuple[float, float]

_STATE_VECTORS = 2
"""Anchor and the outer optimizer's momentum."""

_MEMBER_VECTORS = 13
"""Model, three states, residual twice, contribution, mean, checkpoint, and what is encoded: of float32."""

_FEWEST_CHUNKS = 64


# Figures -----------------------------------------------------------------------------------------------------


def join_row(elements: int, joins: Sequence[Sequence[Event]], started_s: Sequence[float], wire_s: float) -> Row:
    """Of several joiners' events and the moments of their starts; medians."""
    names = ("joined", "state_chunk", "step", "committed")
    moments = {name: [first(events, name)["time"] for events in joins] for name in names}
    admitted = median(joined - start for joined, start in zip(moments["joined"], started_s, strict=True))
    from_start = median(step - start for step, start in zip(moments["step"], started_s, strict=True))
    from_byte = median(step - byte for step, byte in zip(moments["step"], moments["state_chunk"], strict=True))
    in_round = median(end - start for end, start in zip(moments["committed"], started_s, strict=True))
    return {
        "what": "join",
        "elements": size_of(elements),
        "s": from_start,
        "s until admitted": admitted,
        "s from first byte": from_byte,
        "s until committed": in_round,
        "beside": "its bytes alone",
        "beside s": wire_s,
        "times": len(joins),
    }


def first(events: Sequence[Event], name: str) -> Event:
    """The first event of that name; of commits the first with this member's work."""
    return next(one for one in events if one["event"] == name and one.get("included", True))


def rounds_of(verdicts: Sequence[Event]) -> list[tuple[Span, int]]:
    """Each committed round but the first: when it began and ended, and its tokens. One after an aborted one counts its
    time too."""
    ended = [one for one in verdicts if one["committed"]]
    return [((before["time"], one["time"]), one["tokens"]) for before, one in pairwise(ended)]


def visits_of(events: Sequence[Event]) -> list[Span]:
    """Return the moments when each visitor came and left."""
    come = [one["time"] for one in events if one["event"] == "visit_begins"]
    gone = [one["time"] for one in events if one["event"] == "visit_ends"]
    return list(zip(come, gone, strict=False))


def token_s(rounds: Sequence[tuple[Span, int]], visits: Sequence[Span]) -> tuple[list[float], list[float]]:
    """Seconds a token in rounds without a visit, and in rounds with one."""
    without: list[float] = []
    beside: list[float] = []
    for (start, end), tokens in rounds:
        visited = any(come < end and start < gone for come, gone in visits)
        (beside if visited else without).append((end - start) / tokens)
    return without, beside


def stall_row(elements: int, stalls: Sequence[Event], saved_bytes: int) -> Row:
    """Of the checkpoints that were written; the copy is scaled to all bytes that each has on disk."""
    copies = [one["copy_s"] * saved_bytes / one["copy_bytes"] for one in stalls]
    return {
        "what": "checkpoint",
        "elements": size_of(elements),
        "s": median(one["stall_s"] for one in stalls),
        "beside": f"one copy of its {saved_bytes / 1e6:.0f} MB",
        "beside s": median(copies),
        "times": len(stalls),
    }


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """Figures for the goals; None without a row."""

    def of(what: str, elements: str | None = None, column: str = "s") -> tuple[float | None, float | None]:
        for row in rows:
            if row["what"] == what and elements in (None, row["elements"]) and row.get(column) is not None:
                return row[column], row.get("beside s")
        return None, None

    ratios = {f"join_vs_wire_time_{size}": over(*of("join", size)) for size in ("10M", "100M")}
    return ratios | {
        "round_with_joiner_vs_without": over(*of("round with a joiner")),
        "checkpoint_stall_vs_memcpy": over(*of("checkpoint")),
        "coordinator_restart_to_commit_s": of("coordinator killed")[0],
        "peer_kill_to_verdict_s": of("peer killed")[0],
    }


# Measuring ---------------------------------------------------------------------------------------------------


@contextmanager
def training(elements: int, options: Any) -> Iterator[tuple[Site, list[Running]]]:
    """A run whose members have committed two rounds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Site(Path(folder), elements, options.members, options.limit_s) as site,
    ):
        members = [site.peer("train") for _ in range(options.members)]
        for member in members:
            member.wait_for("its first round", is_in)
        site.verdict(site.verdict(0.0)["time"])
        yield site, members


def is_in(event: Event) -> bool:
    return bool(event["event"] == "committed" and event["included"])


def measure_joins(site: Site, elements: int, options: Any) -> Row:
    joins, started_s = [], []
    for _ in range(options.repeats):
        joiner = site.peer("train")
        joiner.wait_for("its first round", is_in)
        joins.append(joiner.look())
        started_s.append(joiner.started_s)
        site.verdict(site.verdict(joiner.kill())["time"])  # the second one is without it
    wire_s = median(bytes_alone_s(4 * _STATE_VECTORS * elements) for _ in range(options.repeats))
    return join_row(elements, joins, started_s, wire_s)


def bytes_alone_s(state_bytes: int) -> float:
    """Measure the time of that many bytes as one sealed stream; few bytes are scaled from more."""
    chunks = max(_FEWEST_CHUNKS, math.ceil(state_bytes / CHUNK))
    return measure(shoal_end, chunks)[0] * state_bytes / (chunks * CHUNK)


def measure_visits(site: Site, elements: int, options: Any) -> Row:
    """Of the rounds since the first visitor came: one after the other joins, gets the state and leaves, with whole
    rounds between them."""
    visitor = site.peer("visit")
    began_s = moment_s = site.verdict(visitor.started_s)["time"]
    for _ in range(options.visits):
        visitor.tell()

        def over_at(event: Event, after_s: float = moment_s) -> bool:
            return bool(event["event"] == "visit_ends" and event["time"] > after_s)

        moment_s = visitor.wait_for("a visit's end", over_at)["time"]
        for _ in range(3):
            moment_s = site.verdict(moment_s)["time"]
    verdicts = [one for one in site.host.look() if one["event"] == "verdict" and one["time"] >= began_s]
    without, beside = token_s(rounds_of(verdicts), visits_of(visitor.look()))
    visitor.kill()
    if not without or not beside:
        raise NotRecovered(f"{len(without)} rounds without a joiner, {len(beside)} with one: too few to compare")
    tokens = options.members * STEPS_A_ROUND
    return {
        "what": "round with a joiner",
        "elements": size_of(elements),
        "s": median(beside) * tokens,
        "beside": "as many tokens without one",
        "beside s": median(without) * tokens,
        "times": len(beside),
    }


def measure_stalls(members: Sequence[Running], elements: int) -> Row:
    """Of the checkpoints that the members have kept."""
    stalls, saved_bytes = [], []
    for member in members:
        noted = {one["round"]: one for one in member.look() if one["event"] == "stall"}
        for manifest in (member.folder / "state").glob("*/*/checkpoints/round-*/manifest.json"):
            number = json.loads(manifest.read_text())["round"]
            if number in noted:
                stalls.append(noted[number])
                saved_bytes.append(sum(file.stat().st_size for file in manifest.parent.iterdir()))
    if not stalls:
        raise NotRecovered("no member has kept a checkpoint")
    return stall_row(elements, stalls, int(median(saved_bytes)))


def measure_coordinator(site: Site, elements: int, options: Any) -> Row:
    """Killed when a round has just been planned, started again at once."""
    to_commit, to_invite = [], []
    for _ in range(options.repeats):
        seen_s = site.host.look()[-1]["time"]

        def planned(event: Event, seen_s: float = seen_s) -> bool:
            return bool(event["event"] == "round_planned" and event["time"] > seen_s)

        site.host.wait_for("a plan", planned)
        killed_s = site.host.kill()
        site.host.again()
        to_invite.append(site.await_invite())
        to_commit.append(site.verdict(killed_s)["time"] - killed_s)
    return {
        "what": "coordinator killed",
        "elements": size_of(elements),
        "s": median(to_commit),
        "beside": "its start and a heartbeat",
        "beside s": median(to_invite) + Deadlines(PATIENCE_S).heartbeat_s,
        "times": len(to_commit),
    }


def measure_peer(site: Site, elements: int, options: Any) -> Row:
    """Measure a peer that is killed when the others begin to fetch its contribution."""
    to_verdict = []
    for _ in range(options.repeats):
        victim = site.peer("die")
        moment_s = victim.wait_for("its end", lambda event: event["event"] == "dying", may_end=True)["time"]
        to_verdict.append(site.verdict(moment_s, committed=False)["time"] - moment_s)
        site.verdict(moment_s + to_verdict[-1])
    return {
        "what": "peer killed",
        "elements": size_of(elements),
        "s": median(to_verdict),
        "beside": "patience_s",
        "beside s": PATIENCE_S,
        "times": len(to_verdict),
    }


# The script --------------------------------------------------------------------------------------------------


def measure_all(options: Any) -> Iterator[Row]:
    """Joining at each size; the rest at the first."""
    for elements in options.sizes:
        needed_bytes = 4 * _MEMBER_VECTORS * elements * (options.members + 1)
        if needed_bytes > available_bytes():
            note = f"needs {needed_bytes / 1e9:.0f} GB of memory, or fewer --members"
            yield {"what": "join", "elements": size_of(elements), "note": note}
            continue
        with training(elements, options) as (site, members):
            yield measure_joins(site, elements, options)
            if elements == options.sizes[0]:
                yield measure_visits(site, elements, options)
                yield measure_stalls(members, elements)
                yield measure_peer(site, elements, options)
                yield measure_coordinator(site, elements, options)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", type=comma(elements_of), default=comma(elements_of)("10M,100M"), help="10M,100M")
    arguments.add_argument("--members", type=int, default=2, help="beside those that join and are killed")
    arguments.add_argument("--repeats", type=int, default=3, help="of each join and each kill")
    arguments.add_argument("--visits", type=int, default=6, help="of somebody who joins, gets the state and leaves")
    arguments.add_argument("--limit-s", type=float, default=900.0, help="for all of one size; then it is given up")
    options = arguments.parse_args()
    end_on_sigterm()
    rows = collected(measure_all(options))
    publish(f"{options.members} members on loopback, medians", rows, ratios_of(rows), options.json)


if __name__ == "__main__":
    main()
