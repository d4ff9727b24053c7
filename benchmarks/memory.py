"""Memory of peers as real processes, at rest and at its peak, beside what the account of memory predicts.

Every case is a run on loopback with some members from the start and one that joins later and fetches the state from
them. It is measured at two sizes: the slope between them is what each parameter takes, and the rest is the constant.
Pipelines are measured likewise, by the sizes of their stages. The time that the training thread stands still for a
round is measured apart, beside one copy of the parameters.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import comma, console, elements_of, end_on_sigterm, parser, publish, size_of, table_of
from memory_stages import STAGES_TOML, StagePeer, measure_stages
from recovery_run import Event, NotRecovered, Running, run_toml
from usage import status_bytes

from shoal.swarm.memory_account import MemoryAccount, account_of
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

_PEER = Path(__file__).parent / "memory_peer.py"
STEPS_A_ROUND = 50
"""Steps of each member in a round: some seconds, so that there is rest in between."""
_ROUNDS_BEFORE, _ROUNDS_AFTER = 2, 3
"""Committed rounds before the joiner comes, and those that it is in before the run ends."""


@dataclass(frozen=True)
class Case:
    """Run to measure. ``trains``: float32 values for each parameter that the training itself has all the time;
    ``flags``: of ``memory_peer.py``."""

    name: str
    settings: str
    trains: float
    flags: tuple[str, ...] = ()

    def run_toml(self, members: int) -> str:
        return run_toml("memory", self.settings, members * STEPS_A_ROUND, 20.0)


_INT8 = 'averaging.codec = "int8"\n'
CASES = {
    "diloco": Case("diloco", _INT8, 3.0),
    "overlap": Case("diloco, overlap", _INT8 + "averaging.overlap = true", 3.0),
    "virtual_batch": Case(
        "virtual_batch", _INT8 + 'algorithm = "virtual_batch"\nouter.optimizer = "adamw"', 2.0, ("accumulates",)
    ),
}
STALLS = {
    "round_stall_vs_copy": Case("stall", _INT8, 4.0, ("copies",)),
    "round_stall_vs_copy_overlap": Case("stall, overlap", _INT8 + "averaging.overlap = true", 4.0, ("copies",)),
}


# One run ----------------------------------------------------------------------------------------------------


class Swarm:
    """Host and peers of a case in a folder; all of them are killed at the end."""

    def __init__(self, folder: Path, case: Case, elements: int, members: int, limit_s: float) -> None:
        self._folder, self._case, self._elements = folder, case, elements
        self._deadline_s = time.monotonic() + limit_s
        self._all: list[Running] = []
        place = self._place("host")
        (place / "run.toml").write_text(case.run_toml(members))
        where = ["--bind", "127.0.0.1:0", "--state", str(place / "state"), "--identity", str(place / "identity")]
        log = ["--log-json", str(place / "events.jsonl")]
        host = ["-m", "shoal.peer", "host", str(place / "run.toml"), "--no-supervisor", "--no-keep-model", *where, *log]
        self.host = self._start("host", host, place)
        self.host.until("the invite", lambda: "shoal join" in self.host.text())
        self.invite = next((place / "state").glob("*/invite.txt")).read_text().strip()

    def peer(self) -> Running:
        place = self._place(f"peer-{len(self._all)}")
        arguments = [str(_PEER), self.invite, str(self._elements), str(place), *self._case.flags]
        return self._start(place.name, arguments, place)

    def wait(self, reached: Callable[[], bool]) -> None:
        """Raises ``NotRecovered`` when a process has ended, or it took too long."""
        while not reached():
            for one in self._all:
                if one.process.poll() is not None:
                    raise NotRecovered(f"{one.name} ended with {one.process.returncode}:\n{one.text()[-2000:]}")
            if time.monotonic() > self._deadline_s:
                raise NotRecovered(f"{self._case.name} took too long:\n{self._all[-1].text()[-2000:]}")
            time.sleep(0.2)

    def _place(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir(parents=True)
        return place

    def _start(self, name: str, arguments: list[str], place: Path) -> Running:
        self._all.append(Running(name, [sys.executable, *arguments], place, self._deadline_s))
        return self._all[-1]

    def close(self) -> None:
        for one in self._all:
            one.kill()


@dataclass(frozen=True)
class Peer:
    """Memory of one peer, in bytes above those of its process before it had a model, and its stalls."""

    rest_bytes: int
    peak_bytes: int
    stalls_s: tuple[float, ...] = ()
    copies_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measured:
    """One size of a case: the members' figures and the joiner's, if there was one."""

    elements: int
    members: tuple[Peer, ...]
    joiner: Peer | None


def measure(case: Case, elements: int, members: int, folder: Path, limit_s: float, *, joins: bool) -> Measured:
    """Raises ``NotRecovered`` where the run does not do as it should."""
    swarm = Swarm(folder, case, elements, members, limit_s)
    try:
        peers = [swarm.peer() for _ in range(members)]
        swarm.wait(lambda: min(map(_committed, peers)) >= _ROUNDS_BEFORE)
        joiners = [swarm.peer()] if joins else []
        goal = _ROUNDS_BEFORE + _ROUNDS_AFTER
        swarm.wait(
            lambda: min(map(_committed, peers)) >= goal and all(_committed(one) >= _ROUNDS_AFTER for one in joiners)
        )
        found = [_figures(one) for one in (*peers, *joiners)]
    finally:
        swarm.close()
    return Measured(elements, tuple(found[:members]), found[members] if joins else None)


def _committed(peer: Running) -> int:
    """Number of rounds with this peer's work in them."""
    return sum(event["event"] == "committed" and event["included"] for event in peer.look())


def _figures(peer: Running) -> Peer:
    peak = status_bytes(Path(f"/proc/{peer.process.pid}/status").read_text(), "VmHWM")
    events = peer.look()
    before = next(event["rss_bytes"] for event in events if event["event"] == "began")
    rests = [event for event in events if event["event"] == "rest"]
    first = min((event["round"] for event in rests), default=0)  # of which memory for later rounds is not there yet
    return Peer(
        min((event["rss_bytes"] for event in rests if event["round"] > first + 1), default=before) - before,
        peak - before,
        tuple(stalls_of(events)),
        tuple(event["seconds"] for event in events if event["event"] == "copy"),
    )


def stalls_of(events: Sequence[Event]) -> Iterator[float]:
    """Seconds that the training thread stood still for each round, but for what the others and the network take.

    A thread that waits for the whole round is not charged from "ready" to the verdict."""
    begun: float | None = None
    for event in events:
        if event["event"] != "blocked":
            continue
        since, until = event["since"], event["time"]
        inside = [one for one in events if since <= one["time"] <= until]
        ready = next((one["time"] for one in inside if one["event"] == "ready"), None)
        verdict = next((one["time"] for one in reversed(inside) if one["event"] == "verdict_here"), None)
        if event["by"] == "close_round" and ready is not None and verdict is not None:
            yield until - since - (verdict - ready)
        elif event["by"] == "close_round":
            begun = until - since
        elif begun is not None:
            yield begun + until - since
            begun = None


# Tables -----------------------------------------------------------------------------------------------------

MB = 1e6


@dataclass(frozen=True)
class Line:
    """Least-squares line through two sizes: ``slope`` in float32 values for each parameter, ``constant`` in bytes."""

    slope: float
    constant: float

    @classmethod
    def through(cls, sizes: Sequence[Measured], amount: Callable[[Measured], float]) -> Line:
        first, last = sizes[0], sizes[-1]
        slope = (amount(last) - amount(first)) / (4 * (last.elements - first.elements))
        return cls(slope, amount(first) - 4 * slope * first.elements)


AMOUNTS: dict[str, Callable[[Measured], float]] = {
    "rest": lambda size: max(one.rest_bytes for one in size.members),
    "peak": lambda size: max(one.peak_bytes for one in size.members),
    "joiner's peak": lambda size: size.joiner.peak_bytes if size.joiner else math.nan,
}


def predicted(case: Case, members: int) -> dict[str, float]:
    """Float32 values for each parameter that the account counts beside the local work's own."""
    account = account_of(parse_run_file(case.run_toml(members)), peers=members)
    rest, peak = account.values("work", "host"), account.values("exchange", "host")
    peak += max(0.0, account.values("exchange", "device") - account.values("work", "device"))
    return {"rest": rest, "peak": peak, "joiner's peak": max(peak, account.values("join", "host"))}


def case_rows(case: Case, sizes: Sequence[Measured], members: int) -> list[dict[str, Any]]:
    """Each size in MB, then the slopes without the training, beside the account, and the constants."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        figures = {name: f"{amount(size) / MB:,.0f} MB" for name, amount in AMOUNTS.items()}
        rows.append({"case": case.name, "what": f"{size_of(size.elements)} parameters", **figures})
    if len(sizes) > 1:
        lines = {name: Line.through(sizes, amount) for name, amount in AMOUNTS.items()}
        about = predicted(case, members)
        slopes = {name: f"{line.slope - case.trains:.2f} n" for name, line in lines.items()}
        rows.append({"case": case.name, "what": "a parameter, beside the training", **slopes})
        rows.append({"case": case.name, "what": "by the account", **{k: f"{v:.2f} n" for k, v in about.items()}})
        constants = {name: f"{line.constant / MB:,.0f} MB" for name, line in lines.items()}
        rows.append({"case": case.name, "what": "constant", **constants})
    return rows


def ratios_of(found: dict[str, list[Measured]], stages: Sequence[StagePeer], members: int) -> dict[str, float | None]:
    """The goals' ratios, None where they were not measured."""
    ratios: dict[str, float | None] = dict.fromkeys(
        [
            *("diloco_rest_n", "diloco_peak_n", "joiner_peak_n", "virtual_batch_host_peak_n", "stage_peak_n"),
            "account_vs_measured_worst",
        ]
    )
    apart: list[float] = []
    names = {
        ("diloco", "rest"): "diloco_rest_n",
        ("diloco", "peak"): "diloco_peak_n",
        ("diloco", "joiner's peak"): "joiner_peak_n",
        ("virtual_batch", "peak"): "virtual_batch_host_peak_n",
    }
    for name, sizes in found.items():
        case = CASES[name]
        if len(sizes) < 2:
            continue
        for what, values in predicted(case, members).items():
            slope = Line.through(sizes, AMOUNTS[what]).slope
            if math.isnan(slope):
                continue
            apart.append(_apart(values + case.trains, slope))
            if (name, what) in names:
                ratios[names[name, what]] = slope - case.trains
    if len({one.parameters_bytes for one in stages}) > 1:
        slope, account = stage_slope(stages), account_of(parse_run_file(STAGES_TOML.format(width=64)))
        ratios["stage_peak_n"] = slope - account.values("exchange", "device")
        apart.append(_apart(account.demand().shared, slope))
    ratios["account_vs_measured_worst"] = max(apart, default=None)
    return ratios


def _apart(one: float, other: float) -> float:
    return max(one / other, other / one)


def stage_slope(stages: Sequence[StagePeer]) -> float:
    """Peak bytes for each byte of a stage's parameters, between the smallest and the largest stages that take most."""
    by_size: dict[int, int] = {}
    for one in stages:
        by_size[one.parameters_bytes] = max(by_size.get(one.parameters_bytes, 0), one.peak_bytes)
    first, last = min(by_size), max(by_size)
    return (by_size[last] - by_size[first]) / (last - first)


def stall_row(case: Case, size: Measured) -> dict[str, Any]:
    stalls = [one for peer in size.members for one in peer.stalls_s]
    copies = [one for peer in size.members for one in peer.copies_s]
    stall, copy = statistics.median(stalls), statistics.median(copies)
    return {"case": case.name, "parameters": size_of(size.elements), "stall s": stall, "copy s": copy}


# What fits where --------------------------------------------------------------------------------------------

MODELS = {"1B": 1e9, "3B": 3e9, "7B": 7e9, "13B": 13e9}
GPUS_GB = (8, 16, 24, 80)
HOSTS_GB = (16, 32, 64, 128)
_USABLE = 0.9
_WHOLE = '[run]\nname = "x"\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n'


def fits_rows(whole: RunFile | None = None, staged: RunFile | None = None) -> list[dict[str, Any]]:
    """By the account, without activations: whether a model fits as a whole, or the least number of stages."""
    whole, staged = whole or parse_run_file(_WHOLE), staged or parse_run_file(STAGES_TOML.format(width=64))
    rows = []
    for name, parameters in MODELS.items():
        for gpu in GPUS_GB:
            row: dict[str, Any] = {"model": name, "GPU": f"{gpu} GB"}
            for host in HOSTS_GB:
                if _shares(account_of(whole), parameters, gpu, host) <= 1:
                    row[f"{host} GB host"] = "whole"
                else:
                    stages = math.ceil(_shares(account_of(staged), parameters, gpu, host))
                    row[f"{host} GB host"] = "whole, virtual_batch" if stages == 1 else f"{stages} stages"
            rows.append(row)
    return rows


def _shares(account: MemoryAccount, parameters: float, gpu: float, host: float) -> float:
    """The memory that a model needs as a multiple of what there is, of the GPU or of the host, the scarcer one."""
    demand = account.demand()
    return max(
        4 * parameters * copies / (_USABLE * size * 1e9) for copies, size in ((demand.device, gpu), (demand.host, host))
    )


def main() -> None:
    end_on_sigterm()
    options = parser(__doc__)
    options.add_argument("--cases", type=comma(str), default=list(CASES), help=f"of {', '.join(CASES)}")
    options.add_argument("--sizes", type=comma(elements_of), default=[20_000_000, 100_000_000])
    options.add_argument("--members", type=int, default=4)
    options.add_argument("--widths", type=comma(int), default=[384, 768], help="of the pipelines' models")
    options.add_argument("--stall-size", type=elements_of, default=20_000_000, help="0.1k: leave the stalls out")
    options.add_argument("--limit-s", type=float, default=900.0)
    given = options.parse_args()
    found: dict[str, list[Measured]] = {}
    rows: list[dict[str, Any]] = []
    stalls: dict[str, float | None] = dict.fromkeys(STALLS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for case in given.cases:
            for size in given.sizes:
                place = folder / f"{case}-{size}"
                found.setdefault(case, []).append(
                    measure(CASES[case], size, given.members, place, given.limit_s, joins=True)
                )
                print(json.dumps({"case": case} | asdict(found[case][-1])), flush=True)
            rows += case_rows(CASES[case], found[case], given.members)
        stages = [one for width in given.widths for one in measure_stages(width, folder / f"stages-{width}")]
        rows += [one.row() for one in stages]
        if given.stall_size > 1000:
            for ratio, case_of in STALLS.items():
                size = measure(case_of, given.stall_size, given.members, folder / ratio, given.limit_s, joins=False)
                row = stall_row(case_of, size)
                rows.append(row)
                stalls[ratio] = row["stall s"] / row["copy s"]
    fits = fits_rows()
    console.print(table_of("what fits where, by the account, without activations", fits))
    publish("memory", rows, ratios_of(found, stages, given.members + 1) | stalls, given.json)


if __name__ == "__main__":
    main()
