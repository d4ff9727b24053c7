"""Held-out loss of runs under attack, at as many honest tokens, beside that of the honest members alone; and what the
means against attacks cost.

The runs are those of ``attack_scene.py``. A setting is what a host can choose: ``default`` is a run file that says
nothing about it, without validators; ``open`` is what ``docs/security.md`` recommends for open runs. After each row the
JSON holds all rows so far.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from attack_scene import KINDS, MANY, SAMPLES, Case, Watch, calm_collector, ratio_of, rounds_until_out, run_case
from attack_stage import lying_stages
from common import comma, console, elements_of, machine, parser, publish
from robust_means import times
from round_case import Case as RoundCase
from shoal_round import measure
from tests.fakes.exchanges import make_sides
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.virtual_clock import run_virtual

from shoal.compression.codec_map import CodecMap
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import named_format_map
from shoal.compression.kernels import loader
from shoal.compression.range_reader import TensorReader
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.chunk_judge import checked_contribution, reduce_again
from shoal.swarm.averaging.contribution import encode_leaves
from shoal.swarm.averaging.inclusions import audits_a_round
from shoal.swarm.coordinator.round_plan import chunk_elements, split
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan

PEERS = 8
SYBILS = 20
STAGE = "stage"
"""The kind that runs real processes of a pipeline, once, whatever the setting."""
CHUNKS = 8
"""Of the small model: one a part. A model of a million parameters or more has 256 and more."""
WORST_RATIO = 1000.0
"""Stands for every larger ratio and for losses that are no number."""
UNEVEN = (1, 1, 1, 2, 2, 3, 4, 6)
"""Steps of the members of the run without attackers."""
_TIMES = 20


@dataclass(frozen=True)
class Setting:
    robust: str
    validators: int
    share: float = 0.02
    work_share: float = 0.02


SETTINGS = {
    "default": Setting("norm", 0),
    "open": Setting("trimmed", 1),
    "norm, validator": Setting("norm", 1),
    "trimmed": Setting("trimmed", 0),
    "clip, validator": Setting("clip", 1),
    "as 256 chunks": Setting("norm", 0, 0.02 * 256 / CHUNKS),
}
"""The last one audits as many chunks of a part as 2 % do in a model of 256 chunks."""


class Matrix:
    """Rows of attacks and settings. Runs without attackers are made once for each setting and seed."""

    def __init__(self, rounds: int, seeds: int) -> None:
        self.marks = sorted({max(1, round(0.3 * rounds)), rounds})
        self.seeds = seeds
        self._clean: dict[tuple[int, str, int], Watch] = {}

    def clean(self, case: Case) -> Watch:
        """The run of the honest members alone; without validators and audits, which change nothing in it."""
        known = case.honest, case.robust, case.seed
        if known not in self._clean:
            alone = Case("", case.honest, 0, case.seed, case.robust, share=0.0)
            self._clean[known] = run_case(alone, self.marks)
        return self._clean[known]

    def row(self, kind: str, attackers: int, name: str) -> dict[str, Any]:
        """All seeds of one attack in one setting."""
        made, honest = SETTINGS[name], PEERS if kind in MANY else PEERS - attackers
        like = Case(kind, honest, attackers, 0, made.robust, made.share, made.validators, made.work_share)
        watched = [run_case(replace(like, seed=seed), self.marks) for seed in range(1, self.seeds + 1)]
        besides = [self.clean(replace(like, seed=seed)) for seed in range(1, self.seeds + 1)]
        row: dict[str, Any] = {"attack": kind, "attackers": attackers, "setting": name, "seeds": self.seeds}
        for mark in self.marks:
            tokens = mark * honest * SAMPLES
            ratios = [
                ratio_of(one.losses.get(tokens), other.losses.get(tokens), WORST_RATIO)
                for one, other in zip(watched, besides, strict=True)
            ]
            row |= {f"loss at {mark}": median(ratios), f"worst at {mark}": max(ratios)}
        outs = [last for one in watched for last in rounds_until_out(one, kind)]
        gone = sorted(last for last in outs if last is not None)
        banned = sum(len(set(one.banned).intersection(one.attackers)) for one in watched)
        row |= {"out": f"{len(gone)} of {len(outs)}", "expelled": banned}
        row |= {"rounds until out": ", ".join(map(str, gone)) or "-", "chance a round": chance_of(kind, made)}
        for count in ("expelled", "barred", "doubted"):
            row[f"honest {count}"] = sum(getattr(one, count) for one in watched)
        row["aborted"] = sum(one.aborted for one in watched)
        audited, carried = sum(one.audit_bytes for one in watched), sum(one.round_bytes for one in watched)
        row |= {"audit_bytes_share": audited / carried if carried else 0.0}
        return row | {"trouble": "; ".join(sorted({one.trouble for one in (*watched, *besides)} - {""})) or "-"}


# What audits cost and find ----------------------------------------------------------------------------------


def chance_of(kind: str, made: Setting) -> float | None:
    """Probability that a round of one attacker is looked at, by the setting's knobs; None where nobody looks."""
    if kind == "owner":
        return chance(made.share, PEERS, CHUNKS // PEERS)
    return made.work_share if made.validators else None


def chance(share: float, members: int, lies: int) -> float:
    """Probability that a round in which ``lies`` chunks are wrong is found out: each of the others audits each of them
    with probability ``2 * share / members``."""
    return 1.0 - (1.0 - 2.0 * share / members) ** (lies * (members - 1))


def drawn_chance(share: float, members: int, chunks: int, lies: int, rounds: int = 20_000) -> float:
    """The same, drawn as auditors draw: so many of the chunks that others made."""
    rng, found, own = Random(1), 0, chunks // members
    wanted = audits_a_round(share, members, chunks)
    for _ in range(rounds):
        for _ in range(members - 1):
            count = math.floor(wanted) + (rng.random() < wanted % 1.0)
            if any(one < lies for one in rng.sample(range(chunks - own), count)):
                found += 1
                break
    return found / rounds


def audit_cost(share: float, members: int, elements: int) -> float:
    """CPU time of a member's audits over that of its round: encoding its contribution, reducing its part with all
    checks, decoding the mean. One thread, int8."""
    audit_s, round_s, chunks = run_virtual(_costs(members, elements))
    return audits_a_round(share, members, chunks) * audit_s / round_s


async def _costs(members: int, elements: int) -> tuple[float, float, int]:
    """Return the CPU time of an audit of one chunk and of a member's round, and the number of chunks."""
    chunk = chunk_elements(elements, members)
    peers = [letter * 16 for letter in "abcdefgh"[:members]]
    plan = RoundPlan(
        round=0,
        anchor_version=0,
        state_digest=bytes(32),
        chunk_elements=chunk,
        members=tuple(PlanMember(peer=peer, weight_tokens=1) for peer in peers),
        parts=tuple(
            Part(owner=owner, start=start, stop=stop)
            for owner, start, stop in split(elements, [1 / members] * members, chunk)
        ),
    )
    sides = make_sides(MemoryNetwork(), plan, "int8")
    store = sides[0].store
    grid, contributions = store.leaf_grid, [side.exchange._source._contribution for side in sides]
    feedback = ErrorFeedback(elements)
    feedback.begin(TensorReader(torch.randn(elements)))

    def shown(index: int) -> dict[int, memoryview]:
        bounds = store.bounds(index)
        return {at: one.chunk(*bounds, BufferPool()) for at, one in enumerate(contributions) if one is not None}

    def made(index: int, data: dict[int, memoryview]) -> memoryview:
        packed = {at: checked_contribution(store, index, at, one) for at, one in data.items()}
        result = reduce_again(store, store.group, index, ChunkHeader(sorted(packed)), packed, {})
        assert result is not None
        return result

    own, data = store.chunks_of(store.plan.parts[0]), shown(0)
    made(0, data)  # compiles
    began_s = time.process_time()
    for _ in range(_TIMES):
        result = made(0, data)
    audit_s = (time.process_time() - began_s) / _TIMES
    began_s = time.process_time()
    encode_leaves(feedback, grid, range(grid.leaves), BufferPool())
    for index in range(store.chunks):
        store.codec(index).decode(result[store.group.header_bytes :], store.bounds(0)[1])
    return audit_s, time.process_time() - began_s + len(own) * audit_s, store.chunks


def commitment_cpu(elements: int, turns: int) -> float:
    """CPU time of a round of four real processes, all together, with roots, paths and signatures over that without: the
    best round of each, in turns. Not its duration: other programs on the machine would be in that."""
    case = RoundCase("int8", elements, 4, 4, patience_s=120.0)
    best_s = {False: math.inf, True: math.inf}
    for turn in range(turns):
        for uncommitted in (False, True) if turn % 2 == 0 else (True, False):
            laps = measure(replace(case, uncommitted=uncommitted), 1200.0).laps
            spent_s = [sum(lap.cpu_s for lap in one) for one in laps]
            best_s[uncommitted] = min(best_s[uncommitted], *spent_s)
            console.print(f"uncommitted: {uncommitted}, CPU s a round: {spent_s}", highlight=False)
    return best_s[False] / best_s[True]


def costs(options: Any) -> dict[str, float | None]:
    """Measure what the defences cost, as shares of a round or relative to a round without them."""
    for thread in loader.compile_ahead(CodecMap(named_format_map("int8")).kernels):
        thread.join()
    ratios: dict[str, float | None] = {"audit_cpu_share": audit_cost(0.02, PEERS, 10**7)}
    took = times("int8", PEERS, 15)
    ratios["robust_norm_time_vs_none"] = took["norm"] / took["none"]
    for lies in (1, 8, 32):
        formula, drawn = chance(0.02, PEERS, lies), drawn_chance(0.02, PEERS, 256, lies)
        console.print(f"{lies} of 256 chunks wrong: found in a round with {formula:.3f}, drawn {drawn:.3f}")
        ratios[f"found_{lies}_of_256"] = drawn
    if options.commitment:
        ratios["commitment_time_vs_none"] = commitment_cpu(options.commitment, options.turns)
    return ratios


def clean_rounds(rounds: int) -> dict[str, float | None]:
    """Honest members that lose their place, or their credit by scores, in a run of uneven machines. The validator looks
    at five times as much work as by default, and auditors at as many chunks a part as in a model of 256."""
    case = Case("", PEERS, 0, 1, share=SETTINGS["as 256 chunks"].share, validators=1, work_share=0.1, steps=UNEVEN)
    watch = run_case(case, [rounds])
    console.print(
        f"{len(watch.plans)} clean rounds, {watch.aborted} aborted, {watch.scored} scores, {watch.bad_scores} bad, "
        f"{watch.barred} honest members gone, {watch.doubted} doubted {watch.trouble}",
        highlight=False,
    )
    found = watch.expelled if not watch.trouble or watch.expelled else None
    return {"honest_expelled": found, "clean_rounds": len(watch.plans), "honest_bad_scores": watch.bad_scores}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="two kinds and ten rounds: about two minutes")
    arguments.add_argument("--full", action="store_true", help="1 to 3 attackers, 5 seeds, all settings: many hours")
    arguments.add_argument("--rounds", type=int, default=100, help="measured at 0.3 of them and at their end")
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--attackers", type=comma(int), default=[2], help="of 8; sybils are 20 beside 8")
    arguments.add_argument("--kinds", type=comma(str), default=[*KINDS, STAGE], help=", ".join([*KINDS, STAGE]))
    arguments.add_argument("--settings", type=comma(str), default=["default", "open"], help="; ".join(SETTINGS))
    arguments.add_argument("--more-rows", type=Path, nargs="*", default=[], help="JSON of earlier parts, not run again")
    arguments.add_argument("--clean-rounds", type=int, default=1000, help="without attackers, to count exclusions")
    arguments.add_argument("--no-costs", dest="costs", action="store_false", help="only the runs")
    arguments.add_argument("--commitment", type=elements_of, default=0, help="elements, such as 50M, of real rounds")
    arguments.add_argument("--turns", type=int, default=5, help="of those")
    options = arguments.parse_args()
    if options.quick:
        options.rounds, options.kinds, options.clean_rounds = 10, ["flip", "owner"], 20
    if options.full:
        options.seeds, options.attackers, options.settings = 5, [1, 2, 3], [*SETTINGS]
        options.commitment = options.commitment or 50 * 10**6
    torch.set_num_threads(1)
    calm_collector()
    matrix, ratios = Matrix(options.rounds, options.seeds), dict[str, float | None]()
    done = rows_of(options.more_rows, matrix)
    rows = [*done.values()]

    def save() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps({"machine": machine(), "rows": rows, "ratios": ratios}, indent=2) + "\n")

    for kind in [kind for kind in options.kinds if kind != STAGE]:
        for attackers in [SYBILS] if kind in MANY else options.attackers:
            for name in options.settings:
                if (kind, attackers, name) in done:
                    continue
                began_s = time.process_time()
                rows.append(matrix.row(kind, attackers, name) | {"CPU s": time.process_time() - began_s})
                console.print("  ".join(f"{key}: {value}" for key, value in rows[-1].items()), highlight=False)
                save()
    ratios |= summary(rows, matrix.marks)
    if STAGE in options.kinds:
        ratios |= lying_stages()
        save()
    if options.clean_rounds:
        ratios |= clean_rounds(options.clean_rounds)
        save()
    if options.costs:
        ratios |= costs(options)
    publish(f"held-out loss / that of the honest alone, {options.seeds} seeds", rows, ratios, options.json)


def rows_of(files: Sequence[Path], matrix: Matrix) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Rows of earlier parts with as many rounds and seeds as this matrix, by attack, attackers and setting."""
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    marks = [f"loss at {mark}" for mark in matrix.marks]
    return {
        (row["attack"], row["attackers"], row["setting"]): row
        for row in rows
        if row.get("seeds") == matrix.seeds and all(mark in row for mark in marks)
    }


def summary(rows: Sequence[dict[str, Any]], marks: Sequence[int]) -> dict[str, float | None]:
    """The goals' figures of all rows: the worst loss with two attackers, of the recommended setting and of others."""
    found: dict[str, float | None] = {}
    two = [row for row in rows if row["attackers"] == 2]
    for name in dict.fromkeys(row["setting"] for row in two):
        worst = max(row[f"worst at {mark}"] for row in two if row["setting"] == name for mark in marks)
        found["worst_loss_2_of_8_vs_clean" + ("" if name == "open" else f" ({name})")] = worst
    shares = [row["audit_bytes_share"] for row in rows if SETTINGS[row["setting"]].share == 0.02]
    return found | {"audit_bytes_share": sum(shares) / len(shares) if shares else None}


if __name__ == "__main__":
    main()
