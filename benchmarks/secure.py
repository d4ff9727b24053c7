"""Secure rounds beside plain ones: bytes, time on loopback and behind links of 100 Mbit/s, and loss at equal tokens.

Rounds as in ``allreduce.py``, of one masking group. All systems of a size run one after the other, several times over
and in the opposite order every other time, so that what else the machine does is in the figures of all. A secure round
has its keys, shares, sets and signatures in it. Its values are drawn so that the units of a run's first rounds suit
them. Behind links: as in ``wan.py``, a namespace for each peer.

``--loss``: members train a small model together in one process, on a virtual clock (``attack_scene.py``): the same
samples, tokens and rounds, and the same coordinator, clients, masks and means as everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from allreduce import Row, System, find, in_turns, shoal
from common import comma, elements_of, end_on_sigterm, over, parser, publish, size_of
from pacing import RoundFailed, fork_with
from round_case import Case
from shaped_links import NoShapedLinks, shaped_links
from shoal_round import measure

from shoal.compression.fixed_point import KERNELS
from shoal.compression.kernels.loader import compile_ahead

PLAIN, INT8, INT4 = "Shoal int8", "Shoal int8, secure", "Shoal int4, secure"
_PATIENCE_S = 12.0
_SETTLING_ROUNDS = 2
"""As ``allreduce.py`` leaves out."""

_PACING_ROUNDS = 4
"""More of them behind links: until members pace what they send as their uplinks carry it."""

_LOSS_ROUNDS = (10, 30, 60, 100)


def cases(elements: int, peers: int, rounds: int) -> list[Case]:
    """A plain round and the two secure ones."""
    plain = Case("int8", elements, peers, rounds, _PATIENCE_S)
    return [plain, replace(plain, secure=True), replace(plain, codec="int4", secure=True)]


def on_loopback(options: Any) -> list[Row]:
    """Raises ``RoundFailed``."""
    rows: list[Row] = []
    for elements in options.sizes:
        made = cases(elements, options.peers, _SETTLING_ROUNDS + options.rounds)
        for row in in_turns([shoal(case) for case in made], options.turns, options.limit_s):
            rows.append({"links": "loopback", **row})
            print(rows[-1], flush=True)
    return rows


def behind_links(options: Any) -> list[Row]:
    """Raises ``RoundFailed``, ``NoShapedLinks``."""
    rows: list[Row] = []
    links = f"{options.rate_mbit:g} Mbit/s, {options.round_trip_ms:g} ms"
    for elements in options.wan:
        made = cases(elements, options.peers, _PACING_ROUNDS + _SETTLING_ROUNDS + options.rounds)
        with shaped_links([options.rate_mbit] * (options.peers + 1), options.round_trip_ms / 2) as sites:

            def system(case: Case) -> System:
                return replace(shoal(case), run=partial(_late_laps, case, sites=sites))

            for row in in_turns([system(case) for case in made], options.turns, options.limit_s):
                rows.append({"links": links, **row})
                print(rows[-1], flush=True)
    return rows


def _late_laps(case: Case, limit_s: float, sites: Any) -> Any:
    measured = measure(case, limit_s, sites)
    return replace(measured, laps=measured.laps[_PACING_ROUNDS:])


def losses(options: Any) -> list[Row]:
    """Held-out losses of members that train with each kind of averaging. Raises ``RoundFailed``."""
    import attack_scene  # not in the peers' processes, which import this script

    torch.set_num_threads(1)
    attack_scene.calm_collector()
    rows: list[Row] = []
    for what, codec, secure in ((PLAIN, "int8", False), (INT8, "int8", True), (INT4, "int4", True)):
        runs: list[list[float]] = []
        for seed in range(1, options.seeds + 1):
            case = attack_scene.Case(
                "", options.peers, 0, seed, robust="none", share=0.0, work_share=0.0, codec=codec, secure=secure
            )
            watch = attack_scene.run_case(case, _LOSS_ROUNDS)
            if watch.trouble:
                raise RoundFailed(f"{what}, seed {seed}: {watch.trouble}")
            runs.append([loss for _, loss in sorted(watch.losses.items())])
        means = [fmean(run[at] for run in runs) for at in range(len(_LOSS_ROUNDS))]
        columns = {f"loss after {rounds} rounds": loss for rounds, loss in zip(_LOSS_ROUNDS, means, strict=True)}
        rows.append({"what": what, "seeds": options.seeds, **columns})
        print(rows[-1], flush=True)
    return rows


def ratios_of(rows: Sequence[Row], rounds: Sequence[Row], wan: Sequence[Row]) -> dict[str, float | None]:
    """The goals' figures, secure over plain: of the largest size on loopback, and of the largest behind links.
    ``rows``: losses, ``rounds``: on loopback. None of what was not measured."""
    size = _largest(rounds)
    far = _largest(wan)
    last = f"loss after {_LOSS_ROUNDS[-1]} rounds"
    loss = {row["what"]: row[last] for row in rows}
    return {
        "secure_int4_bytes_vs_plain_int8": over(
            find(rounds, INT4, size, "MB sent a peer"), find(rounds, PLAIN, size, "MB sent a peer")
        ),
        "secure_round_time_vs_plain": over(
            find(rounds, INT8, size, "s a round"), find(rounds, PLAIN, size, "s a round")
        ),
        "secure_int4_round_time_vs_plain_int8_100mbit": over(
            find(wan, INT4, far, "s a round"), find(wan, PLAIN, far, "s a round")
        ),
        "secure_int8_loss_vs_plain_int8": over(loss.get(INT8), loss.get(PLAIN)),
        "secure_int4_loss_vs_plain_int8": over(loss.get(INT4), loss.get(PLAIN)),
    }


def _largest(rows: Sequence[Row]) -> str:
    """Return the largest size that was measured; empty where none was."""
    return size_of(max(elements_of(row["elements"]) for row in rows)) if rows else ""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", type=comma(elements_of), default=[10**7, 5 * 10**7], help="on loopback")
    arguments.add_argument("--wan", type=comma(elements_of), default=[10**7], help="behind links, where this is root")
    arguments.add_argument("--no-wan", dest="wan", action="store_const", const=[])
    arguments.add_argument("--loss", action="store_true", help="train, too: some minutes")
    arguments.add_argument("--seeds", type=int, default=1, help="of the training")
    arguments.add_argument("--peers", type=int, default=8, help="4 to 16")
    arguments.add_argument("--rounds", type=int, default=3, help="of a turn that count; those before them do not")
    arguments.add_argument("--turns", type=int, default=2, help="so many times all systems of one size")
    arguments.add_argument("--rate-mbit", type=float, default=100.0, help="up and down")
    arguments.add_argument("--round-trip-ms", type=float, default=50.0)
    arguments.add_argument("--limit-s", type=float, default=900.0, help="for one run; then its peers are killed")
    options = arguments.parse_args()
    end_on_sigterm()
    fork_with("round_peer", "shoal_round", "shoal.compression.kernels.blockwise", "shoal.compression.kernels.lowbit")
    for thread in compile_ahead(("blockwise", *KERNELS)):  # once, or each of the peers does it, all at the same time
        thread.join()
    try:
        rounds = on_loopback(options)
        try:
            wan = behind_links(options)
        except NoShapedLinks as error:
            print(f"benchmarks/secure.py: {error}", file=sys.stderr)
            wan = []
        trained = losses(options) if options.loss else []
    except RoundFailed as error:
        sys.exit(f"benchmarks/secure.py: {error}")
    rows = [*rounds, *wan, *trained]
    publish(f"groups of {options.peers}", rows, ratios_of(trained, rounds, wan), options.json)


if __name__ == "__main__":
    main()
