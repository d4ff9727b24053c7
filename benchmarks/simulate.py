"""Predictions of ``shoal simulate`` beside real runs of a few members behind shaped links.

Each row is one run: a host and members in network namespaces of their own (``shaped_links.py``), members whose model is
of that size and whose steps take a fixed time, as if a GPU took it. The simulator gets the same run file, rates and
delays, and what the members' own devices took: seconds of a step, of packing and of applying. Times and bytes are those
between two verdicts, the first of which comes after some rounds, as members learn how fast their uplinks are; bytes are
those of the namespaces' interfaces, so that headers, acknowledgements and messages count.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from cheap_loop import CheapModel, line_data
from common import comma, elements_of, end_on_sigterm, over, parser, publish
from shaped_links import NoShapedLinks, Site, enter, shaped_links
from torch import nn

from shoal.peer.cli.host import HostOptions, host
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.simulation.result import Model
from shoal.swarm.simulation.run import simulate
from shoal.swarm.simulation.traces import Machine, Trace

STEP_S = 0.25
"""Of a step with all that comes with it: what it computes is less, also where cores are shared."""

_LONGEST_STEP = 4
RUN = """
[run]
name = "simulated"
rounds = {rounds}
seed = 1
[recipe]
name = "own"
[data]
source = "own"
[inner]
batch_samples = 1
[access]
admission = "open"
members_without_credit = 64
members_per_network = 64
joins_per_minute = 1000
joins_per_minute_per_network = 1000
[round]
tokens = {tokens}
max_s = 600
patience_s = 20
"""


@dataclass(frozen=True)
class Case:
    """One run. ``rates_mbit``: of the members' links, up and down alike; ``work_s``: of training a round; ``skipped``:
    rounds that do not count."""

    elements: int
    rates_mbit: tuple[float, ...]
    one_way_ms: float
    rounds: int
    work_s: float
    skipped: int = 1

    @property
    def run_toml(self) -> str:
        tokens = round(len(self.rates_mbit) * self.work_s / STEP_S)
        return RUN.format(rounds=self.rounds, tokens=tokens)


def run_host(pipe: Connection, toml: str, folder: Path, site: Site) -> None:
    """Send the invite, then the moments of plans and verdicts."""
    enter(site.namespace)
    (folder / "run.toml").write_text(toml)
    options = HostOptions(folder / "identity", folder / "state", bind=(site.address, 0))

    def heard(event: Any) -> None:
        if event["event"] in ("round_planned", "verdict"):
            pipe.send((event["event"], time.monotonic(), event.get("committed", False)))

    asyncio.run(host([folder / "run.toml"], options, lambda hosting: pipe.send(str(hosting.invite)), heard))


def note_own_times(path: Path) -> None:
    """Have each round's seconds of packing and of applying written there, as a line each."""
    ended = PhaseClock.end_round

    def noted(self: PhaseClock, number: int | None = None) -> Any:
        times = ended(self, number)
        with path.open("a") as file:
            file.write(f"{times.training.packing} {times.training.applying}\n")
        return times

    PhaseClock.end_round = noted  # type: ignore[method-assign]


def run_member(invite: str, case: Case, folder: Path, site: Site) -> None:
    """Take part in the run until it ends."""
    enter(site.namespace)
    note_own_times(folder / "own_times")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset, model = line_data(10_000), CheapModel(case.elements, case.elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = SessionOptions(folder / "identity", folder / "state", bind=(site.address, 0), maps_ports=False)
    with Session.join(invite, model=model, inner_optimizer=optimizer, options=options) as session:
        due_s = began_s = time.monotonic()
        took_s: list[float] = []
        for inputs, targets in session.batches(dataset):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            # What the last step took beside counts, but no wait between rounds.
            now_s = time.monotonic()
            due_s = due_s + STEP_S if now_s < due_s + 2 * STEP_S else now_s + STEP_S
            time.sleep(max(0.0, due_s - now_s))
            session.step(loss)
            now_s = time.monotonic()
            if now_s - began_s < _LONGEST_STEP * STEP_S:  # else it is a wait between rounds
                took_s.append(now_s - began_s)
                (folder / "step_s").write_text(str(mean(took_s)))
            began_s = now_s


def sent_bytes(pid: int) -> int:
    """Return what the interfaces of a process's network namespace have sent, without loopback."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":", 1)[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


@dataclass(frozen=True)
class Verdict:
    """Moments of a round's plan and verdict, and what members and host had sent by then."""

    planned_s: float
    ended_s: float
    members_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class Outcome:
    """Means of a run's rounds. ``work_s``: from a verdict to the next plan, ``exchange_s``: from there to the verdict;
    ``member_mb``: what a member sends in a round; ``host_kbit``: what the host sends a second."""

    rounds_per_hour: float
    work_s: float
    exchange_s: float
    member_mb: float
    host_kbit: float

    @classmethod
    def of(cls, verdicts: Sequence[Verdict], members: int, skipped: int = 1) -> Outcome:
        """Return the means over the rounds after those that are skipped; the first one begins with joins."""
        verdicts = verdicts[skipped - 1 :]
        first, last, rounds = verdicts[0], verdicts[-1], len(verdicts) - 1
        took_s = last.ended_s - first.ended_s
        return cls(
            3600 * rounds / took_s,
            mean(one.planned_s - before.ended_s for before, one in itertools.pairwise(verdicts)),
            mean(one.ended_s - one.planned_s for one in verdicts[1:]),
            (last.members_bytes - first.members_bytes) / members / rounds / 1e6,
            8e-3 * (last.host_bytes - first.host_bytes) / took_s,
        )


@dataclass(frozen=True)
class OwnTimes:
    """Mean seconds that a member's device took for a step, more than asked for where cores are scarce, and in a round
    for packing and for applying."""

    step_s: float
    pack_s: float
    apply_s: float

    @classmethod
    def read(cls, folder: Path, skipped: int) -> OwnTimes:
        lines = (folder / "own_times").read_text().splitlines()[skipped:]
        own = [tuple(map(float, line.split())) for line in lines]
        return cls(float((folder / "step_s").read_text()), mean(one for one, _ in own), mean(one for _, one in own))


def measured(case: Case, limit_s: float) -> tuple[Outcome, list[OwnTimes]]:
    """Run it. Returns what the members' devices took, too.

    Raises ``NoShapedLinks``, ``RuntimeError``."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as name,
        shaped_links([*case.rates_mbit, max(case.rates_mbit)], case.one_way_ms) as sites,
    ):
        ours, theirs = context.Pipe()
        folders = [Path(name) / str(number) for number in range(len(sites))]
        for folder in folders:
            folder.mkdir()
        hosting = context.Process(target=run_host, args=(theirs, case.run_toml, folders[-1], sites[-1]), daemon=True)
        members: list[Any] = []
        try:
            hosting.start()
            if not ours.poll(60):
                raise RuntimeError("the host gave no invite")
            invite = ours.recv()
            for folder, site in zip(folders, sites[:-1], strict=False):
                members.append(context.Process(target=run_member, args=(invite, case, folder, site), daemon=True))
                members[-1].start()
            seen: list[Verdict] = []
            deadline_s, planned_s = time.monotonic() + limit_s, 0.0
            while len(seen) < case.rounds:
                if not ours.poll(max(0.0, deadline_s - time.monotonic())):
                    raise RuntimeError(f"{len(seen)} rounds in {limit_s:.0f} s")
                what, moment_s, committed = ours.recv()
                if what == "round_planned":
                    planned_s = moment_s
                elif committed:
                    of_members = sum(sent_bytes(one.pid) for one in members)
                    seen.append(Verdict(planned_s, moment_s, of_members, sent_bytes(hosting.pid or 0)))
                    print(f"{len(members)} members: {seen[-1]}", file=sys.stderr, flush=True)
            own = [OwnTimes.read(folder, case.skipped) for folder in folders[:-1]]
        finally:
            for process in [*members, hosting]:
                if process.pid is not None:
                    process.kill()
                    process.join()
    return Outcome.of(seen, len(members), case.skipped), own


def predicted(case: Case, own: Sequence[OwnTimes]) -> Outcome:
    """Simulate it, with members whose devices take so long."""
    machines = [
        Machine(
            name=f"member{number}",
            tokens_per_s=1 / times.step_s,
            pack_s=times.pack_s,
            apply_s=times.apply_s,
            up_bps=1e6 * rate,
            down_bps=1e6 * rate,
            latency_s=case.one_way_ms / 1e3,
            network=f"network {number}",
        )
        for number, (rate, times) in enumerate(zip(case.rates_mbit, own, strict=True))
    ]
    trace = Trace("shaped", lambda number, draw: machines[number], host_bps=1e6 * max(case.rates_mbit))
    run = parse_run_file(case.run_toml)
    result = simulate(run, Model(case.elements, 1), trace, len(machines), 0, 3600.0, case.rounds)
    verdicts = [
        Verdict(one.planned_s, one.ended_s, one.members_sent_bytes, one.host_sent_bytes) for one in result.committed
    ]
    return Outcome.of(verdicts, len(machines), case.skipped)


def row_of(case: Case, limit_s: float) -> dict[str, Any]:
    """Measure and predict one run."""
    real, own = measured(case, limit_s)
    print(f"own times: {own}", file=sys.stderr, flush=True)
    told = predicted(case, own)
    return {
        "members": len(case.rates_mbit),
        "Mbit/s": "/".join(f"{rate:g}" for rate in dict.fromkeys(case.rates_mbit)),
        "step s": mean(one.step_s for one in own),
        "packing s": mean(one.pack_s for one in own),
        "applying s": mean(one.apply_s for one in own),
        "rounds/h": real.rounds_per_hour,
        "predicted": told.rounds_per_hour,
        "work s": real.work_s,
        "predicted work s": told.work_s,
        "exchange s": real.exchange_s,
        "predicted exchange s": told.exchange_s,
        "MB a round": real.member_mb,
        "predicted MB": told.member_mb,
        "host kbit/s": real.host_kbit,
        "predicted kbit/s": told.host_kbit,
        "rounds ratio": over(told.rounds_per_hour, real.rounds_per_hour),
        "bytes ratio": over(told.member_mb, real.member_mb),
        "host ratio": over(told.host_kbit, real.host_kbit),
    }


def cases(options: Any) -> Sequence[Case]:
    """Even links at each rate for each number of members, and one member at a quarter of the others' rate."""
    made = []
    for members in options.members:
        for rate in options.rates:
            rates = (float(rate),) * members
            for one in (rates, (*rates[1:], rate / 4)) if options.uneven else (rates,):
                made.append(Case(options.size, one, options.one_way_ms, options.rounds, options.work_s, options.skip))
    return made


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--members", type=comma(int), default=[4, 8])
    arguments.add_argument("--rates", type=comma(float), default=[10.0], help="Mbit/s")
    arguments.add_argument("--uneven", action="store_true", help="also one member at a quarter of the rate")
    arguments.add_argument("--size", type=elements_of, default=5_000_000, help="elements of the model")
    arguments.add_argument("--one-way-ms", type=float, default=15.0)
    arguments.add_argument("--rounds", type=int, default=8)
    arguments.add_argument("--skip", type=int, default=3, help="rounds that do not count")
    arguments.add_argument("--work-s", type=float, default=15.0)
    arguments.add_argument("--limit-s", type=float, default=400.0)
    options = arguments.parse_args()
    end_on_sigterm()
    rows = []
    try:
        for case in cases(options):
            rows.append(row_of(case, options.limit_s))
            print(rows[-1], file=sys.stderr, flush=True)
    except (NoShapedLinks, RuntimeError) as error:
        sys.exit(f"simulate.py: {error}")
    ratios = {
        f"simulate_{row['members']}_at_{row['Mbit/s'].replace('/', '_')}_{what}": row[f"{what} ratio"]
        for row in rows
        for what in ("rounds", "bytes", "host")
    }
    publish("Predicted and real runs", rows, ratios, options.json)


if __name__ == "__main__":
    main()
