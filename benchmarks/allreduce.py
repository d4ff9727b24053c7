"""Rounds between peers as processes on loopback, encrypted as always, beside gloo and Hivemind in the same run.

A round of Shoal: from the moment when everybody is about to say "ready" until everybody holds the decoded mean: plan
and verdict of a real coordinator in a process of its own, exchange, digests, decoding. The announcement of the closing,
which lies ahead by design, is over when the clock starts. Exchange: from the first peer that has the plan to the last
that holds every result. CPU: user and system, all peers together. Peak memory: of a peer, above what it had at the
start, its contribution among that; also over the contribution's bytes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import account
from common import comma, elements_of, end_on_sigterm, over, parser, publish, size_of
from pacing import Lap, Pack, RoundFailed, costs, notes, seconds, stages
from peer_systems import gloo_peer, has_hivemind, hivemind_peer
from round_case import Case
from shoal_round import Measured, measure

from shoal.compression.registry import get_coding
from shoal.swarm.averaging.partition import chunk_elements

_GRID_SIDE = 4
_HIVEMIND_CODECS = ("int8", "float16")
_SETTLING_ROUNDS = 2
"""After the first, which opens the links: memory is touched for the first time, and links become known."""

Row = dict[str, Any]


def shoal_row(case: Case, limit_s: float) -> Row:
    return as_row(case, measure(case, limit_s))


def as_row(case: Case, measured: Measured) -> Row:
    what = f"Shoal {case.codec}" + (f", groups of {case.group_size}" if case.group_size else "")
    laps = measured.laps[_SETTLING_ROUNDS:]
    row = _row(what, case.peers, case.elements, laps)
    partners = [lap.partners for one in laps for lap in one if lap.partners is not None]
    return row | {"coordinator CPU s": measured.coordinator_cpu_s, "partners a peer": max(partners)}


def gloo_row(case: Case, limit_s: float) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        one = [(f"{folder}/store", number, case.peers, case.elements, case.rounds) for number in range(case.peers)]
        with Pack.started(gloo_peer, one, limit_s) as pack:
            pack.introduce()
            laps = [pack.lap() for _ in range(1 + case.rounds)][1 + _SETTLING_ROUNDS :]
    return _row("gloo float32, in the clear", case.peers, case.elements, laps) | {"exchange s": seconds(laps)}


def hivemind_row(case: Case, limit_s: float) -> Row:
    """Its round has the matchmaking in it, its exchange has not."""
    one = [(case.codec, number, case.peers, case.elements, case.rounds) for number in range(case.peers)]
    with Pack.started(hivemind_peer, one, limit_s) as pack:
        pack.introduce()
        laps = [pack.lap() for _ in range(2 * (1 + case.rounds))]
    half = 1 + case.rounds
    whole, exchanges = (laps[start + 1 + _SETTLING_ROUNDS : start + half] for start in (0, half))
    row = _row(f"Hivemind {case.codec}", case.peers, case.elements, whole)
    return row | {"exchange s": seconds(exchanges), "MB sent a peer": None, "note": notes(laps)}


def _row(what: str, peers: int, elements: int, laps: Sequence[Sequence[Lap]]) -> Row:
    return {
        "what": what,
        "peers": peers,
        "elements": size_of(elements),
        "s a round": seconds(laps),
        **stages(laps),
        **costs(laps, elements),
        "coordinator CPU s": None,
        "partners a peer": None,
        "note": notes(laps),
    }


def or_failure(measure_row: Callable[[Case, float], Row], what: str, case: Case, limit_s: float) -> Row:
    """The row, or one that says why there is none: another system's trouble is not to end this benchmark."""
    try:
        return measure_row(case, limit_s)
    except RoundFailed as error:
        return {"what": what, "peers": case.peers, "elements": size_of(case.elements), "note": str(error)}


# The grid ----------------------------------------------------------------------------------------------------


def flat_bytes(codec: str, elements: int, peers: int) -> float:
    """What a peer of one flat group sends: 2 (N - 1) / N times the encoded vector, chunk by chunk."""
    coding, chunk = get_coding(codec), chunk_elements(elements, peers)
    whole = sum(
        coding.contribution(start, min(start + chunk, elements)).packed_bytes(min(chunk, elements - start))
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
    """What of the 1M int8 round its bytes do not need: group forming plus all overhead.

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
    }


def grid_ratio(rows: Sequence[Row]) -> float | None:
    """Bytes that a peer of the grid sent, over what the formula says for one flat group of as many."""
    for row in rows:
        if row["what"] == f"Shoal int8, groups of {_GRID_SIDE}":
            flat = flat_bytes("int8", elements_of(row["elements"]), row["peers"])
            return float(row["MB sent a peer"]) * 1e6 / flat
    return None


# The script --------------------------------------------------------------------------------------------------


def measure_all(options: Any) -> list[Row]:
    rows: list[Row] = []
    rounds = _SETTLING_ROUNDS + options.rounds

    def add(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)

    for elements in options.sizes:
        size = Case("float32", elements, options.peers, rounds)
        for codec in options.codecs:
            add(shoal_row(Case(codec, elements, options.peers, rounds), options.limit_s))
        if "gloo" in options.beside:
            add(or_failure(gloo_row, "gloo float32, in the clear", size, options.limit_s))
        if "hivemind" in options.beside and has_hivemind():
            for codec in _HIVEMIND_CODECS:
                case = Case(codec, elements, options.peers, rounds)
                add(or_failure(hivemind_row, f"Hivemind {codec}", case, options.limit_s))
    if options.grid:
        case = Case("int8", options.grid, _GRID_SIDE**2, rounds, patience_s=30.0, group_size=_GRID_SIDE)
        add(shoal_row(case, options.limit_s))
    if "hivemind" in options.beside and not has_hivemind():
        print("Hivemind is left out: it is not installed here (benchmarks/README.md)")
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", type=comma(elements_of), default=comma(elements_of)("1M,10M,50M"), help="1M,10M")
    arguments.add_argument("--codecs", type=comma(str), default=["float32", "float16", "int8"])
    arguments.add_argument("--peers", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=5, help="that count; three before them do not")
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
        row = shoal_row(case, options.limit_s)
        account.publish_account(case.codec, case.elements, case.peers, row["CPU s"], options.json)
        return
    try:
        rows = measure_all(options)
    except RoundFailed as error:
        sys.exit(f"benchmarks/allreduce.py: {error}")
    publish(
        f"{options.peers} peers on loopback, median of {options.rounds} rounds", rows, ratios_of(rows), options.json
    )


if __name__ == "__main__":
    main()
