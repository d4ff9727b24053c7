"""Rounds between peers that live in network namespaces of their own behind shaped links, the coordinator in one more.

As ``allreduce.py``: from "ready" to the decoded mean; the first rounds, which open the links and find their pace, do
not count. Ideal:
what the sealed bytes of the busiest peer alone take at its link's rate. The link share of the round is ideal / round,
that of the exchange ideal / exchange (plan in hand to all results held); headers of IP and TCP cost some 3.5 % that
nobody can have, and plan and verdict take two round trips. Plain TCP: what bare sockets need for the same bytes between
the same peers, unsealed, all at once (``plain_tcp.py``). Predicted: what the closed form says for these rates
(``partition.owner_shares``); where ideal is more, parts were not shared like that. With a slow member the coordinator
is told the rates, and the exchange is held against the prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from common import comma, elements_of, end_on_sigterm, parser, publish, size_of
from pacing import Lap, RoundFailed, costs, seconds, stages
from plain_tcp import plain_tcp_s
from round_case import Case
from shaped_links import NoShapedLinks, check_machine, shaped_links
from shoal_round import Measured, measure

from shoal.swarm.coordinator.round_plan import owner_shares

_PATIENCE_S = 60.0
_GOAL_ROUND_TRIP_MS = 50.0
_GOAL_RATE_MBIT = 100.0
_SETTLING_ROUNDS = 4
"""After the one that opens the links: until members pace what they send as their uplinks carry it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """The links of one row: ``rates_mbit`` by peer, up and down alike."""

    rates_mbit: tuple[float, ...]
    round_trip_ms: float

    @property
    def is_even(self) -> bool:
        return len(set(self.rates_mbit)) == 1

    @property
    def words(self) -> str:
        return f"{self.rates_mbit[0]:g}" if self.is_even else "/".join(f"{rate:g}" for rate in self.rates_mbit)


def ideal_s(laps: Sequence[Lap], rates_mbit: Sequence[float]) -> float:
    """Return the seconds that the bytes of the busiest peer and direction take at its rate."""
    return max(
        8 * max(lap.sent_bytes, lap.received_bytes) / (1e6 * rate) for lap, rate in zip(laps, rates_mbit, strict=True)
    )


def predicted_s(rates_mbit: Sequence[float], vector_bytes: float) -> float:
    """Return when the slowest member is done, by the closed form: (1 + (n - 2) w) V / b."""
    rates = [1e6 * rate for rate in rates_mbit]
    shares = owner_shares(rates, [True] * len(rates))
    return max(
        8 * vector_bytes * (1 + (len(rates) - 2) * share) / rate for share, rate in zip(shares, rates, strict=True)
    )


def as_row(case: Case, link: Link, measured: Measured, plain_s: float | None) -> Row:
    laps = measured.laps[_SETTLING_ROUNDS:]
    round_s, exchange_seconds = seconds(laps), stages(laps)["exchange s"]
    assert exchange_seconds is not None
    ideal_seconds = median(ideal_s(one, link.rates_mbit) for one in laps)
    vector_bytes = median(sum(lap.sent_bytes for lap in one) for one in laps) / (2 * (case.peers - 1))
    return {
        "codec": case.codec,
        "elements": size_of(case.elements),
        "Mbit/s": link.words,
        "round trip ms": link.round_trip_ms,
        "s a round": round_s,
        "exchange s": exchange_seconds,
        "ideal s": ideal_seconds,
        "link share": ideal_seconds / round_s,
        "exchange's share": ideal_seconds / exchange_seconds,
        "plain TCP s": plain_s,
        "predicted s": predicted_s(link.rates_mbit, vector_bytes),
        "first round s": max(lap.end_s for lap in measured.first),
        "CPU s": costs(laps, case.elements)["CPU s"],
    }


def measure_row(case: Case, link: Link, limit_s: float) -> Row:
    """Raises ``RoundFailed``, ``NoShapedLinks``."""
    # The coordinator's messages are small: its link is as fast as the fastest.
    with shaped_links([*link.rates_mbit, max(link.rates_mbit)], link.round_trip_ms / 2) as sites:
        measured, plain_s = measure(case, limit_s, sites), None
        if link.is_even:  # else pairs differ in what they have to send
            pair_bytes = round(mean(lap.sent_bytes for one in measured.laps for lap in one) / (case.peers - 1))
            plain_s = plain_tcp_s(sites[:-1], pair_bytes, case.rounds - _SETTLING_ROUNDS, limit_s)
        return as_row(case, link, measured, plain_s)


def cases(options: Any) -> list[tuple[Case, Link]]:
    """All sizes and codecs at all rates and delays, and beside each a member at a tenth of the others' rate."""
    made = []
    for elements in options.sizes:
        for codec in options.codecs:
            rounds = _SETTLING_ROUNDS + options.rounds
            case = Case(codec, elements, options.peers, rounds, _PATIENCE_S)
            for rate in options.rates:
                for delay in options.delays:
                    made.append((case, Link((rate,) * options.peers, delay)))
            if options.slow_of:
                rates = (options.slow_of,) * (options.peers - 1) + (options.slow_of / 10,)
                told = Case(codec, elements, options.peers, rounds, _PATIENCE_S, 0, bits_of(rates))
                made.append((told, Link(rates, _GOAL_ROUND_TRIP_MS)))
    return made


def bits_of(rates_mbit: Sequence[float]) -> tuple[float, ...]:
    return tuple(1e6 * rate for rate in rates_mbit)


def ratios_of(rows: Sequence[Row]) -> dict[str, float | None]:
    """The goals' figures; None of what was not measured. The slow member's: of the largest size."""
    ratios: dict[str, float | None] = {
        "wan_100mbit_25ms_50M_link_share": None,
        "wan_100mbit_25ms_10M_link_share": None,
        "slow_member_vs_predicted": None,
    }
    goals = [row for row in rows if row["codec"] == "int8" and row["round trip ms"] == _GOAL_ROUND_TRIP_MS]
    for row in sorted(goals, key=lambda row: elements_of(row["elements"])):
        if "/" in row["Mbit/s"]:
            ratios["slow_member_vs_predicted"] = row["exchange s"] / row["predicted s"]
        elif float(row["Mbit/s"]) == _GOAL_RATE_MBIT:
            ratios[f"wan_100mbit_25ms_{row['elements']}_link_share"] = row["link share"]
            ratios[f"wan_100mbit_25ms_{row['elements']}_exchange_share"] = row["exchange's share"]
            ratios[f"wan_100mbit_25ms_{row['elements']}_vs_plain_tcp"] = row["s a round"] / row["plain TCP s"]
    return ratios


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", type=comma(elements_of), default=[10_000_000], help="as in 1M,10M,50M")
    arguments.add_argument("--codecs", type=comma(str), default=["int8"], help="as in int8,float32")
    arguments.add_argument("--rates", type=comma(float), default=[20.0, 100.0, 500.0], help="Mbit/s, up and down")
    arguments.add_argument("--delays", type=comma(float), default=[10.0, 50.0, 150.0], help="round trips in ms")
    arguments.add_argument("--slow-of", type=float, default=100.0, help="rate beside a member at a tenth; 0: none")
    arguments.add_argument("--peers", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=3, help="that count; some before them do not")
    arguments.add_argument("--limit-s", type=float, default=1800.0, help="for one row; then its peers are killed")
    options = arguments.parse_args()
    end_on_sigterm()
    rows: list[Row] = []
    try:
        check_machine()
        for case, link in cases(options):
            rows.append(measure_row(case, link, options.limit_s))
            print(rows[-1], flush=True)
    except NoShapedLinks as error:
        print(f"benchmarks/wan.py: {error}", file=sys.stderr)
        sys.exit(2)
    except RoundFailed as error:
        sys.exit(f"benchmarks/wan.py: {error}")
    publish(f"{options.peers} peers behind shaped links", rows, ratios_of(rows), options.json)


if __name__ == "__main__":
    main()
