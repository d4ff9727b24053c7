"""Cost of hosts that take over: a leader's SIGKILL to the next verdict, and a verdict's way through each journal.

All is real: an etcd cluster of three, a Postgres server, hosts and members as processes on loopback, and a disk that
flushes. *Takeover*: of two hosts on one journal the leader is killed at a random moment of a round; the time from there
to the other one's next verdict, over the lease's time. *Commit*: light peers (``light_peer.py``) report a round; the
time from the last one's report to the moment when the last one has the verdict, journals in turns. *Append*: the
journal's write alone, of the same transaction of 4 kB, in turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import zmq.asyncio
from common import await_invite, comma, end_on_sigterm, over, parser, publish
from light_peer import LEASES_PER_ROUND, SAMPLES_PER_LEASE, TOKENS_PER_SAMPLE, Habits, LightPeer
from recovery_run import Event, NotRecovered, Running, run_toml
from tests.fakes.engines import etcd_cluster, postgres_server

from shoal.peer.demo.processes import Child
from shoal.swarm.coordinator.events import MemberLost
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.shared_journal import SharedJournal, SharedRun
from shoal.swarm.coordinator.stores.place import open_store
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.protocol.identity import Identity, key_text
from shoal.swarm.protocol.invite import Invite

PATIENCE_S = 6.0
_STEPS_A_ROUND = 20
_MEMBERS = 2
_LIMIT_S = 900.0
_APPENDS = 25
_TRANSACTION = [MemberLost(peer="a" * 16, reason="x" * 480)] * 8
"""About as large as the verdict of a few members."""

_PEER = Path(__file__).parent / "recovery_peer.py"

Row = dict[str, Any]

COMMIT_RUN = """
[run]
name = "{name}"
rounds = {rounds}
[recipe]
name = "own"
[data]
source = "own"
[access]
joins_per_minute = 10_000
joins_per_minute_per_network = 10_000
[round]
tokens = {tokens}
max_s = 600.0
patience_s = {patience_s}
"""


@contextlib.contextmanager
def engines(folder: Path) -> Iterator[dict[str, str]]:
    """URLs of real engines, as their packages set them up; the local journal's is empty."""
    # Timings of elections as etcd has them by default: with those of tests it answers no faster.
    extra = ("--heartbeat-interval", "100", "--election-timeout", "1000")
    with etcd_cluster(folder / "etcd", extra=extra) as etcd, postgres_server(folder / "postgres") as postgres:
        yield {"local": "", "etcd": etcd.url(), "postgres": postgres.url()}


# Takeover ----------------------------------------------------------------------------------------------------


class Hosts:
    """Two hosts on one journal, and members of their run."""

    def __init__(self, folder: Path, name: str, url: str, lease_s: float) -> None:
        self.deadline_s = time.monotonic() + _LIMIT_S
        self.folder = folder
        self.toml = run_toml(name, "", _MEMBERS * _STEPS_A_ROUND, PATIENCE_S)
        homes = [folder / label / "home" for label in ("one", "two")]
        key = key_text(Identity.load_or_create(homes[1] / "identity").public_key)
        self.running: list[Running] = []
        common = ["--journal", url, "--lease", str(lease_s)]
        self.leading = self._host(homes[0], [*common, "--standby-key", key])
        self.leading.wait_for("the lease", lambda one: one["event"] == "leading")
        self.standby = self._host(homes[1], common)
        self.standby.wait_for("a leader", lambda one: one["event"] == "standing_by")
        invite = self.leading.until("an invite with two addresses", lambda: self._invite(homes[0].parent))
        for number in range(_MEMBERS):
            place = folder / f"member-{number}"
            place.mkdir()
            command = [sys.executable, str(_PEER), "train", invite, "10000", str(place)]
            self.running.append(Running(place.name, command, place, self.deadline_s))

    def _host(self, home: Path, options: list[str]) -> Running:
        place = home.parent
        place.mkdir(parents=True, exist_ok=True)
        (place / "run.toml").write_text(self.toml)
        where = ["--bind", "127.0.0.1:0", "--state", str(place / "state"), "--log-json", str(place / "events.jsonl")]
        command = [*("env", f"SHOAL_HOME={home}", sys.executable, "-m", "shoal.peer", "host", str(place / "run.toml"))]
        host = Running(
            place.name,
            [*command, "--no-supervisor", "--no-pins", "--no-relay", *where, *options],
            place,
            self.deadline_s,
        )
        self.running.append(host)
        return host

    def _invite(self, place: Path) -> str:
        texts = [path.read_text().strip() for path in (place / "state").glob("*/invite.txt")]
        return next((text for text in texts if "," in text.partition("?")[0]), "")

    def committed(self, after_s: float) -> Event:
        return self.leading.wait_for(
            "a committed round", lambda one: one["event"] == "verdict" and one["time"] > after_s and one["committed"]
        )

    def take_over(self, chance: random.Random) -> Row:
        """Kill the leader in a round; the seconds until the other one leads, and until its first verdicts."""
        ended = self.committed(self.committed(time.time())["time"])
        time.sleep(chance.uniform(0.0, 1.0))
        killed_s = self.leading.kill()
        before, self.leading, self.standby = self.leading, self.standby, self.leading
        leads = self.leading.wait_for("the lease", lambda one: one["event"] == "leading" and one["time"] > killed_s)
        verdict = self.leading.wait_for("a verdict", lambda one: one["event"] == "verdict" and one["time"] > killed_s)
        committed = self.committed(killed_s)
        assert verdict["round"] > ended["round"]
        began_s = time.time()
        before.again()
        before.wait_for("a leader", lambda one: one["event"] == "standing_by" and one["time"] > began_s)
        return {
            "leads s": leads["time"] - killed_s,
            "verdict s": verdict["time"] - killed_s,
            "committed s": committed["time"] - killed_s,
        }

    def close(self) -> None:
        for one in self.running:
            one.kill()


def measure_takeovers(engine: str, url: str, folder: Path, options: Any) -> Row:
    hosts = Hosts(folder, f"takeover-{engine}", url, options.lease)
    chance = random.Random(options.seed)
    try:
        samples = []
        for _ in range(options.kills):
            samples.append(hosts.take_over(chance))
            say(f"{engine}: {samples[-1]}")
    finally:
        hosts.close()
    row: Row = {"journal": engine, "lease s": options.lease, "kills": len(samples)}
    for name in samples[0]:
        values = [one[name] for one in samples]
        row |= {name: median(values), f"{name}, worst": max(values)}
    return row | {"verdict over lease": row["verdict s"] / options.lease}


# Commit ------------------------------------------------------------------------------------------------------


class Reporting(LightPeer):
    """A light peer that notes when it has reported."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reported_s: dict[int, float] = {}

    async def _request(self, message: Any) -> bytes:
        if type(message).__name__ == "PeerToCoordinatorRoundReport":
            self.reported_s.setdefault(message.round, time.monotonic())
        return await super()._request(message)


async def _rounds(invite: Invite, habits: Habits, peers: int) -> list[float]:
    """Train with light peers until the run ends; seconds of each round from the last report to the last verdict."""
    context = zmq.asyncio.Context()
    joining, everybody, here = asyncio.Semaphore(4), asyncio.Event(), asyncio.Semaphore(0)
    try:
        async with asyncio.TaskGroup() as tasks:
            members = [Reporting(context, invite, habits) for _ in range(peers)]
            for member in members:
                tasks.create_task(member.live(joining, here, everybody))
            for _ in members:
                await here.acquire()
            everybody.set()
    finally:
        context.destroy(linger=0)
    seconds = []
    for number in sorted(members[0].reported_s)[1:-1]:  # the first one opens links, the last one ends the run
        if all(number in one.reported_s and one.record.rounds[number].verdict_s for one in members):
            reported_s = max(one.reported_s[number] for one in members)
            seconds.append(max(one.record.rounds[number].verdict_s for one in members) - reported_s)
    return seconds


def commit_turn(url: str, folder: Path, options: Any) -> list[float]:
    name = folder.name
    folder.mkdir()
    share = LEASES_PER_ROUND * SAMPLES_PER_LEASE * TOKENS_PER_SAMPLE
    run_file = folder / "run.toml"
    run_file.write_text(
        COMMIT_RUN.format(name=name, rounds=options.rounds + 2, tokens=options.peers * share, patience_s=PATIENCE_S)
    )
    shared = ["--journal", url] if url else []
    host = Child(
        "host",
        folder / "host",
        ["host", str(run_file), "--bind", "127.0.0.1:0", "--no-supervisor", "--no-pins", "--no-relay", *shared],
    )
    try:
        invite = Invite.parse(await_invite(host, time.monotonic() + 60))
        deadlines = Deadlines(PATIENCE_S)
        habits = Habits(1_000_000, options.work_s, 0.0, deadlines.heartbeat_s, deadlines.request_s)
        return asyncio.run(_rounds(invite, habits, options.peers))
    finally:
        host.ask_to_end()
        host.end()


def measure_commits(urls: dict[str, str], folder: Path, options: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.turns):
        for engine, url in list(urls.items())[:: -1 if turn % 2 else 1]:
            found[engine] += commit_turn(url, folder / f"commit-{engine}-{turn}", options)
            say(f"{engine}: {len(found[engine])} rounds, median {1e3 * median(found[engine]):.1f} ms")
    return found


def measure_appends(urls: dict[str, str], folder: Path, options: Any) -> dict[str, list[float]]:
    """Seconds of each journal's writes of the same transactions, one of each journal after the other."""
    found: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.turns):
        journals: dict[str, Journal] = {}
        try:
            for engine, url in urls.items():
                place = folder / f"append-{engine}-{turn}"
                place.mkdir()
                if not url:
                    journals[engine] = local = LocalJournal(place, bytes(32), "toml")
                    local.lease()
                    continue
                journals[engine] = shared = SharedJournal(open_store(url, place.name), "bench", 60.0, place)
                shared.open()
                shared.begin(SharedRun(bytes(32), "toml", bytes(32)))
            for _ in range(_APPENDS):
                for engine, journal in journals.items():
                    began_s = time.perf_counter()
                    journal.append(journal.next_index, _TRANSACTION)
                    found[engine].append(time.perf_counter() - began_s)
        finally:
            for journal in journals.values():
                journal.close()
    return found


def latency_rows(what: str, found: dict[str, list[float]]) -> list[Row]:
    return [
        {
            "what": what,
            "journal": engine,
            "median ms": 1e3 * median(seconds),
            "slowest tenth ms": 1e3 * sorted(seconds)[-(len(seconds) // 10 or 1)],
            "times": len(seconds),
        }
        for engine, seconds in found.items()
    ]


def ratios_of(rows: list[Row]) -> dict[str, float | None]:
    """Figures for the goals; None without a row."""
    commits = {(row["what"], row["journal"]): row["median ms"] for row in rows if "what" in row}
    takeovers = {row["journal"]: row for row in rows if "what" not in row}
    ratios: dict[str, float | None] = {}
    for engine in ("etcd", "postgres"):
        row, name = takeovers.get(engine, {}), "leader_kill_to_verdict_vs_lease" + f"_{engine}" * (engine != "etcd")
        ratios[name] = over(row.get("verdict s"), row.get("lease s"))
        ratios[f"{name}_worst"] = over(row.get("verdict s, worst"), row.get("lease s"))
        for what in ("commit", "append"):
            ratio = over(commits.get((what, engine)), commits.get((what, "local")))
            ratios[f"{what}_latency_{engine}_vs_local"] = ratio
    return ratios


def say(words: str) -> None:
    """Tell at once how far it is, apart from the results."""
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--journals", type=comma(str), default=["etcd", "postgres"])
    arguments.add_argument("--kills", type=int, default=6, help="of leaders, on each journal")
    arguments.add_argument("--lease", type=float, default=5.0, help="seconds")
    arguments.add_argument("--peers", type=int, default=8, help="light ones, of which commits are measured")
    arguments.add_argument("--rounds", type=int, default=12, help="of a turn")
    arguments.add_argument("--turns", type=int, default=4, help="of each journal; 0 measures no commits")
    arguments.add_argument("--work-s", type=float, default=0.6, help="of pretended training a round")
    arguments.add_argument("--seed", type=int, default=1, help="of the moments of kills")
    options = arguments.parse_args()
    end_on_sigterm()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, engines(Path(name)) as urls:
        folder = Path(name)
        urls = {engine: url for engine, url in urls.items() if engine in ("local", *options.journals)}
        if options.turns:
            rows += latency_rows("append", measure_appends(urls, folder, options))
            rows += latency_rows("commit", measure_commits(urls, folder, options))
        try:
            if options.kills:
                for engine in options.journals:
                    rows.append(measure_takeovers(engine, urls[engine], folder / f"takeover-{engine}", options))
        except NotRecovered as error:
            sys.exit(f"{sys.argv[0]}: {error}")
    publish("Journals, and hosts that take over", rows, ratios_of(rows), options.json)


if __name__ == "__main__":
    main()
