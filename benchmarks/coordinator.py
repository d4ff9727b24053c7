"""Speed and memory of one real coordinator process with up to thousands of simulated peers.

The peers are light (``light_peer.py``): they speak the protocol over CURVE on loopback, but hold no model and average
no bytes. Planning: seconds from the closing moment until every peer has the plan. RSS: the coordinator's resident
memory at its largest; the goal is 80 MB with ten members and 400 MB with a thousand.

The peers run on the same cores as the coordinator. So all times are upper bounds, and rounds take longer than they
would: the CPU share, CPU seconds that the coordinator takes in a second over whole rounds, is that of a slowed-down
run. What a run on machines of its own needs follows from the CPU seconds of a round: ``cores`` divides them by the time
of work and exchange in a round; 1 is one core. As longer rounds have more heartbeats, that is an upper bound, too.
CPU ms/member-s has them for each member and second of the slowed-down run.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import zmq.asyncio
from common import await_invite, end_on_sigterm, parser, publish
from light_peer import LEASES_PER_ROUND, SAMPLES_PER_LEASE, TOKENS_PER_SAMPLE, Habits, LightPeer
from light_view import Record
from usage import cpu_s, rss_bytes

from shoal.peer.demo.processes import Child
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.invite import Invite

_MAX_SOCKETS = 60_000
PEERS_JOINING_AT_ONCE = 8
"""Peers of one process that join at the same time."""

RUN_FILE = """
[run]
name = "light"
rounds = {rounds}

[recipe]
name = "own"

[data]
source = "own"

[access]
joins_per_minute = 100_000
joins_per_minute_per_network = 100_000
members_per_network = 8192
members_without_credit = 8192

[round]
tokens = {tokens}
max_s = 600.0
patience_s = {patience_s}
"""


def run_peers(pipe: Connection, invite: str, habits: Habits, peers: int) -> None:
    """Run light peers in this process; send their records through ``pipe`` when the run has ended."""
    pipe.send(asyncio.run(_run_peers(pipe, Invite.parse(invite), habits, peers)))


async def _run_peers(pipe: Connection, invite: Invite, habits: Habits, peers: int) -> list[Record]:
    context = zmq.asyncio.Context()
    context.max_sockets = _MAX_SOCKETS
    joining, everybody = asyncio.Semaphore(PEERS_JOINING_AT_ONCE), asyncio.Event()
    here = asyncio.Semaphore(0)
    try:
        async with asyncio.TaskGroup() as tasks:
            members = [LightPeer(context, invite, habits) for _ in range(peers)]
            for member in members:
                tasks.create_task(member.live(joining, here, everybody))
            for _ in members:
                await here.acquire()
            pipe.send("here")
            await asyncio.to_thread(pipe.recv)
            everybody.set()
    finally:
        context.destroy(linger=0)
    return [member.record for member in members]


@dataclass(frozen=True)
class Sample:
    """CPU and memory of the coordinator's process at a moment of the monotonic clock."""

    at_s: float
    cpu_s: float
    rss_bytes: int


def sample(pid: int) -> Sample:
    return Sample(time.monotonic(), cpu_s(pid), rss_bytes(pid))


def limit_s(rounds: int, options: Any) -> float:
    """Time limit from the start of the first round on, for busy machines."""
    return float((1 + rounds) * (2 * options.work_s + options.exchange_s + 4 * options.patience_s))


def measure(peers: int, rounds: int, options: Any) -> dict[str, Any]:
    """Measure one row of the table: ``rounds`` rounds after one to warm up."""
    context = multiprocessing.get_context("spawn")
    deadlines = Deadlines(options.patience_s)
    habits = Habits(options.elements, options.work_s, options.exchange_s, deadlines.heartbeat_s, deadlines.request_s)
    share = LEASES_PER_ROUND * SAMPLES_PER_LEASE * TOKENS_PER_SAMPLE
    with tempfile.TemporaryDirectory() as name:
        run_file = Path(name) / "run.toml"
        run_file.write_text(RUN_FILE.format(rounds=rounds + 1, tokens=peers * share, patience_s=options.patience_s))
        host = Child(
            "host",
            Path(name) / "host",
            ["host", str(run_file), "--bind", "127.0.0.1:0", "--no-supervisor", "--no-keep-model"],
        )
        pipes, processes = [], []
        try:
            invite = await_invite(host, time.monotonic() + 60)
            pid = host.process.pid
            samples = [sample(pid)]
            say(f"{peers} peers: join, {PEERS_JOINING_AT_ONCE} of each process at once")
            for number in range(options.processes):
                here = len(range(number, peers, options.processes))
                ours, theirs = context.Pipe()
                process = context.Process(target=run_peers, args=(theirs, invite, habits, here), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            for pipe in pipes:
                assert pipe.recv() == "here"
            joined = sample(pid)
            joined_s, taken_s = joined.at_s - samples[0].at_s, (1 + rounds) * (options.work_s + options.exchange_s)
            say(f"{peers} peers: joined after {joined_s:.0f} s; {1 + rounds} rounds take {taken_s:.0f} s or more")
            for pipe in pipes:
                pipe.send("begin")
            deadline_s = time.monotonic() + limit_s(rounds, options)
            while host.is_running and not all(pipe.poll() for pipe in pipes):
                if time.monotonic() > deadline_s:
                    raise RuntimeError(
                        f"{peers} peers: the run did not end in time; see the coordinator's log, with --log FILE"
                    )
                samples.append(sample(pid))
                time.sleep(0.1)
            records = [record for pipe in pipes for record in pipe.recv()]
        finally:
            for process in processes:
                process.kill()
                process.join()
            host.ask_to_end()
            host.end()
            if options.log is not None:
                options.log.write_bytes(host.log.read_bytes())
    return summary(records, samples, joined, options.work_s + options.exchange_s)


def summary(records: list[Record], samples: list[Sample], joined: Sample, round_s: float) -> dict[str, Any]:
    """Make a row of the table from what the peers and the coordinator's process did. ``round_s``: of work and exchange
    in a round."""
    numbers = sorted(records[0].rounds)
    first, measured = numbers[0], [one for one in numbers[1:] if all(record.rounds[one].plan_s for record in records)]
    start_s = max(record.rounds[first].verdict_s for record in records)
    stop_s = max(record.rounds[measured[-1]].verdict_s for record in records)
    moments = [one.at_s for one in samples]
    begin, end = samples[bisect_left(moments, start_s)], samples[min(bisect_left(moments, stop_s), len(samples) - 1)]
    planning = [_last(records, one, "plan_s") - _closing_s(records, one) for one in measured]
    verdicts = [_last(records, one, "verdict_s") - _closing_s(records, one) for one in measured]
    moved = [record.bytes_between(begin.at_s, end.at_s) for record in records]
    took_s, cpu = end.at_s - begin.at_s, end.cpu_s - begin.cpu_s
    answers: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, seconds in record.answers_s.items():
            answers[name] += seconds
    beats = sorted(answers["Heartbeat"])
    return {
        "peers": len(records),
        "planning s": median(planning),
        "closing to verdict s": median(verdicts),
        "cores": cpu / len(measured) / round_s,
        "CPU s/round": cpu / len(measured),
        "CPU ms/member-s": 1e3 * cpu / took_s / len(records),
        "CPU share": cpu / took_s,
        "round s": took_s / len(measured),
        "MB/s in": sum(sent for sent, _ in moved) / took_s / 1e6,
        "MB/s out": sum(received for _, received in moved) / took_s / 1e6,
        "RSS MB": max(one.rss_bytes for one in samples) / 1e6,
        "heartbeat p50 ms": 1e3 * median(beats),
        "heartbeat p99 ms": 1e3 * quantiles(beats, n=100)[98],
        "lease p99 ms": 1e3 * quantiles(answers["RequestLease"], n=100)[98],
        "join CPU s": joined.cpu_s - samples[0].cpu_s,
        "join s": joined.at_s - samples[0].at_s,
        "kB a view": sum(one.view_bytes for one in records) / sum(one.views for one in records) / 1e3,
        "asked again": sum(one.repeats for one in records),
        "rounds": len(measured),
    }


def _closing_s(records: list[Record], number: int) -> float:
    return median(record.rounds[number].closes_s for record in records)


def _last(records: list[Record], number: int, moment: str) -> float:
    return max(float(getattr(record.rounds[number], moment)) for record in records)


def say(words: str) -> None:
    """Tell at once how far it is, apart from the results."""
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peers", type=int, nargs="+", default=[10, 100, 1000])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--elements", type=int, default=50_000_000, help="of the model that nobody has")
    arguments.add_argument("--work-s", type=float, default=15.0, help="of pretended training a round")
    arguments.add_argument("--exchange-s", type=float, default=1.0, help="of pretended averaging a round")
    arguments.add_argument("--patience-s", type=float, default=20.0, help="of the run file; heartbeats follow from it")
    arguments.add_argument("--processes", type=int, default=2, help="that the peers are spread over")
    arguments.add_argument("--log", type=Path, help="keep the coordinator's log here")
    options = arguments.parse_args()
    end_on_sigterm()
    rows = []
    for peers in options.peers:
        rows.append(measure(peers, options.rounds, options))
        say(f"{peers} peers: {rows[-1]['RSS MB']:.0f} MB, {rows[-1]['cores']:.3f} cores")
    fewest, most = rows[0], rows[-1]
    ratios: dict[str, float | None] = {"coordinator_1000_cores": None}  # where so many were not asked for
    ratios |= {
        f"coordinator_{row['peers']}_{name}": row[column]
        for row in rows
        for name, column in (("cores", "cores"), ("planning_s", "planning s"), ("rss_mb", "RSS MB"))
    }
    for name, column in (("cores", "cores"), ("planning", "planning s"), ("rss", "RSS MB")):
        ratios[f"coordinator_{name}_growth"] = most[column] / fewest[column] if fewest[column] else None
    title = f"A coordinator and its peers, {options.elements:,} elements, {multiprocessing.cpu_count()} cores"
    publish(title, rows, ratios, options.json)


if __name__ == "__main__":
    main()
