"""Rounds between peers as processes on loopback, encrypted as always, beside gloo and Hivemind in the same run.

A round of Shoal: from the moment when everybody is about to say "ready" until everybody holds the decoded mean: plan
and verdict of a real coordinator in a process of its own, exchange, digests, decoding. The announcement of the closing,
which lies ahead by design, is over when the clock starts. Exchange: from the first peer that has the plan to the last
that holds every result. CPU: user and system, all peers together. Peak memory: of a peer, above what it had at the
start, its contribution among that; also over the contribution's bytes. With ``--turns`` all systems of one size are run
again and again, one after the other, so that what else the machine does is not in one system's figures alone. Peers of
one machine hand each other sealed chunks in shared memory; ``--apart`` also measures them with an address each, over
TCP as between machines.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import account
from common import comma, elements_of, end_on_sigterm, over, parser, publish, size_of
from pacing import Lap, Pack, RoundFailed, costs, notes, seconds, stages
from peer_systems import gloo_peer, has_hivemind, hivemind_peer
from round_case import Case
from shoal_round import Measured, measure

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import named_format_map
from shoal.swarm.coordinator.round_plan import chunk_elements

_GRID_SIDE = 4
_HIVEMIND_CODECS = ("int8", "float16")
_SETTLING_ROUNDS = 2
"""After the first, which opens the links: memory is touched for the first time, and links become known."""

_TURNS = "so many times all systems of one size, one after the other"

Row = dict[str, Any]
Laps = Sequence[Sequence[Lap]]
"""By round and peer."""


@dataclass(frozen=True)
class System:
    """A measured system: ``run`` takes so many seconds once, or raises ``RoundFailed``; ``row`` is of all runs."""

    what: str
    case: Case
    run: Callable[[float], Any]
    row: Callable[[list[Any]], Row]
    is_ours: bool = False


def shoal(case: Case) -> System:
    what = f"Shoal {case.codec}" + (f", groups of {case.group_size}" if case.group_size else "")
    what += ", secure" if case.secure else ""
    what += ", apart" if case.apart else ""
    what += ", uncommitted" if case.uncommitted else ""

    def row(runs: list[Measured]) -> Row:
        turns = [one.laps[_SETTLING_ROUNDS:] for one in runs]
        partners = [lap.partners for laps in turns for one in laps for lap in one if lap.partners is not None]
        coordinator_cpu_s = median(one.coordinator_cpu_s for one in runs)
        return _row(what, case, turns) | {"coordinator CPU s": coordinator_cpu_s, "partners a peer": max(partners)}

    return System(what, case, partial(measure, case), row, is_ours=True)


def gloo(case: Case) -> System:
    what = "gloo float32, in the clear"

    def run(limit_s: float) -> Laps:
        with tempfile.TemporaryDirectory() as folder:
            one = [(f"{folder}/store", number, case.peers, case.elements, case.rounds) for number in range(case.peers)]
            with Pack.started(gloo_peer, one, limit_s) as pack:
                pack.introduce()
                return [pack.lap() for _ in range(1 + case.rounds)][1 + _SETTLING_ROUNDS :]

    def row(runs: list[Laps]) -> Row:
        made = _row(what, case, runs)
        return made | {"exchange s": made["s a round"]}

    return System(what, case, run, row)


def hivemind(case: Case) -> System:
    """Its round has the matchmaking in it, its exchange has not."""
    what = f"Hivemind {case.codec}"

    def run(limit_s: float) -> tuple[Laps, Laps]:
        one = [(case.codec, number, case.peers, case.elements, case.rounds) for number in range(case.peers)]
        with Pack.started(hivemind_peer, one, limit_s) as pack:
            pack.introduce()
            laps = [pack.lap() for _ in range(2 * (1 + case.rounds))]
        half = 1 + case.rounds
        return laps[1 + _SETTLING_ROUNDS : half], laps[half + 1 + _SETTLING_ROUNDS :]

    def row(runs: list[tuple[Laps, Laps]]) -> Row:
        exchanges = [lap for _, laps in runs for lap in laps]
        made = _row(what, case, [whole for whole, _ in runs])
        remarks = notes([*(lap for whole, _ in runs for lap in whole), *exchanges])
        return made | {"exchange s": seconds(exchanges), "MB sent a peer": None, "note": remarks}

    return System(what, case, run, row)


def _row(what: str, case: Case, turns: Sequence[Laps]) -> Row:
    laps = [one for turn in turns for one in turn]
    return {
        "what": what,
        "peers": case.peers,
        "elements": size_of(case.elements),
        "s a round": seconds(laps),
        "by turn": " ".join(f"{seconds(turn):.3g}" for turn in turns),
        **stages(laps),
        **costs(laps, case.elements),
        "coordinator CPU s": None,
        "partners a peer": None,
        "note": notes(laps),
    }


def in_turns(systems: Sequence[System], turns: int, limit_s: float) -> Iterator[Row]:
    """A row of each. They run one after the other, so many times over, in the opposite order every other time: what
    else the machine does meanwhile is in all their figures. Another system's trouble is in its row's note and does not
    end this benchmark; raises ``RoundFailed`` for ours."""
    runs: dict[System, list[Any]] = {system: [] for system in systems}
    failures: dict[System, str] = {}
    for turn in range(turns):
        for system in systems if turn % 2 == 0 else reversed(systems):
            if system in failures:
                continue
            try:
                runs[system].append(system.run(limit_s))
            except RoundFailed as error:
                if system.is_ours:
                    raise
                failures[system] = str(error)
    for system, made in runs.items():
        if system in failures:
            peers, elements = system.case.peers, size_of(system.case.elements)
            yield {"what": system.what, "peers": peers, "elements": elements, "note": failures[system]}
        else:
            yield system.row(made)


# The grid ----------------------------------------------------------------------------------------------------


def flat_bytes(codec: str, elements: int, peers: int) -> float:
    """Return the bytes that a peer of one flat group sends: 2 (N - 1) / N times the encoded vector, chunk by chunk."""
    codec_map, chunk = CodecMap(named_format_map(codec)), chunk_elements(elements, peers)
    whole = sum(
        codec_map.contribution(start, min(start + chunk, elements)).packed_bytes(min(chunk, elements - start))
        for start in range(0, elements, chunk)
    )
    return 2 * (peers - 1) / peers * whole


# Ratios ------------------------------------------------------------------------------------------------------


def find(rows: Sequence[Row], what: str, elements: str, column: str) -> float | None:
    """A figure of the row for that system and size; None where it was not measured."""
    for row in rows:
        if row["what"] == what and row["elements"] == elements and row.get(column) is not None:
            return float(row[column])
    return None


def overhead_s(rows: Sequence[Row]) -> float | None:
    """Return the share of the 1M int8 round that its bytes do not need: group forming plus all overhead.

    They need the time that so many take in the largest int8 exchange of this run, where the rest hardly counts. None
    where no larger one was measured."""
    round_s = find(rows, "Shoal int8", "1M", "s a round")
    larger = [
        (elements_of(row["elements"]), float(row["exchange s"]))
        for row in rows
        if row["what"] == "Shoal int8" and row.get("exchange s") is not None and elements_of(row["elements"]) > 10**6
    ]
    if round_s is None or not larger:
        return None
    elements, exchange_seconds = max(larger)
    return round_s - exchange_seconds * 10**6 / elements


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """The goals' figures: times over times, so below 1 Shoal is the faster one."""
    return {
        "int8_50M_vs_gloo": over(
            find(rows, "Shoal int8", "50M", "s a round"),
            find(rows, "gloo float32, in the clear", "50M", "s a round"),
        ),
        "int8_10M_vs_hivemind": over(
            find(rows, "Shoal int8", "10M", "s a round"), find(rows, "Hivemind int8", "10M", "s a round")
        ),
        "overhead_1M_s": overhead_s(rows),
        "grid16_bytes_vs_flat": grid_ratio(rows),
        "commitment_time_vs_none": over(
            find(rows, "Shoal int8", "10M", "s a round"), find(rows, "Shoal int8, uncommitted", "10M", "s a round")
        ),
    }


def grid_ratio(rows: Sequence[Row]) -> float | None:
    """Ratio of the bytes that a peer of the grid sent to the formula's bytes for one flat group."""
    for row in rows:
        if row["what"] == f"Shoal int8, groups of {_GRID_SIDE}":
            flat = flat_bytes("int8", elements_of(row["elements"]), row["peers"])
            return float(row["MB sent a peer"]) * 1e6 / flat
    return None


# The script --------------------------------------------------------------------------------------------------


def systems_of(options: Any) -> list[list[System]]:
    """Return the measured systems in groups whose figures are compared."""
    rounds = _SETTLING_ROUNDS + options.rounds
    groups = []
    for elements in options.sizes:
        cases = [Case(codec, elements, options.peers, rounds) for codec in options.codecs]
        group = [shoal(case) for case in cases]
        if options.apart:
            group += [shoal(replace(case, apart=True)) for case in cases]
        if options.uncommitted:
            group += [shoal(replace(case, uncommitted=True)) for case in cases]
        if "gloo" in options.beside:
            group.append(gloo(Case("float32", elements, options.peers, rounds)))
        if "hivemind" in options.beside and has_hivemind():
            group += [hivemind(Case(codec, elements, options.peers, rounds)) for codec in _HIVEMIND_CODECS]
        groups.append(group)
    if options.grid:
        case = Case("int8", options.grid, _GRID_SIDE**2, rounds, patience_s=30.0, group_size=_GRID_SIDE)
        groups.append([shoal(case)])
    return groups


def measure_all(options: Any) -> list[Row]:
    rows: list[Row] = []
    for group in systems_of(options):
        for row in in_turns(group, options.turns, options.limit_s):
            rows.append(row)
            print(row, flush=True)
    if "hivemind" in options.beside and not has_hivemind():
        print("Hivemind is left out: it is not installed here (benchmarks/README.md)")
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", type=comma(elements_of), default=comma(elements_of)("1M,10M,50M"), help="1M,10M")
    arguments.add_argument("--codecs", type=comma(str), default=["float32", "float16", "int8"])
    arguments.add_argument("--peers", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5, help="of a turn that count; three before them do not")
    arguments.add_argument("--turns", type=int, choices=range(1, 100), default=1, metavar="N", help=_TURNS)
    arguments.add_argument("--apart", action="store_true", help="Shoal also with an address a peer, over TCP")
    arguments.add_argument("--uncommitted", action="store_true", help="Shoal also without roots, paths and signatures")
    arguments.add_argument("--beside", type=comma(str), default=["gloo", "hivemind"], help="other systems to measure")
    arguments.add_argument("--grid", type=elements_of, default=elements_of("4M"), help="of 16 peers' vectors")
    arguments.add_argument("--no-grid", dest="grid", action="store_const", const=0)
    arguments.add_argument("--limit-s", type=float, default=300.0, help="for one row; then its peers are killed")
    arguments.add_argument(
        "--account", action="store_true", help="only CPU seconds by step, of the last size and codec"
    )
    options = arguments.parse_args()
    end_on_sigterm()
    if options.account:
        case = Case(options.codecs[-1], options.sizes[-1], options.peers, _SETTLING_ROUNDS + options.rounds)
        (row,) = in_turns([shoal(case)], options.turns, options.limit_s)
        account.publish_account(case.codec, case.elements, case.peers, row["CPU s"], options.json)
        return
    try:
        rows = measure_all(options)
    except RoundFailed as error:
        sys.exit(f"benchmarks/allreduce.py: {error}")
    rounds = options.turns * options.rounds
    publish(f"{options.peers} peers on loopback, median of {rounds} rounds", rows, ratios_of(rows), options.json)


if __name__ == "__main__":
    main()
