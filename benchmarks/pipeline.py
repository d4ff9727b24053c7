"""Pipelines of a host and peers as processes on loopback: throughput beside the plan's own prediction and the upper
bound, activations in int8 beside float32, throughput through a kill and a refill, and the planner.

Layers compute little and take a given time, mostly asleep (``pipeline_recipe.py``), so that peers do not contend for
this machine's cores; that time a peer's ``slowness`` multiplies.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pipeline_plan
import torch
from common import end_on_sigterm, over, parser, publish
from pipeline_figures import (
    Row,
    bound_of,
    completions,
    rate_in,
    rates_over_time,
    ratios_of,
    recovered_s,
    while_training,
    whole_rounds,
)
from pipeline_loss import MICRO_BATCH, MICRO_BATCHES, SETTINGS, held_out_losses
from pipeline_run import PATIENCE_S, Case, Peer, Pipeline
from pipeline_simulated import simulated_rate
from recovery_run import Event, collected
from shaped_links import NoShapedLinks, check_machine, shaped_links

from shoal.swarm.memory_account import account_of
from shoal.swarm.pipeline.planner.model import LayerCost, PeerCapability, StagePlan
from shoal.swarm.pipeline.planner.planner import plan_rate

FAST, SLOW = 1.0, 4.0
LINK_MBIT, ONE_WAY_MS = 100.0, 10.0
SMALL_SEEDS, LARGE_PEERS = 2, (30,)
"""Of the planner's cases, beside the pipelines; ``pipeline_plan.py`` has them all."""

CASES = (
    Case("equal", 2, (FAST,) * 4, 30.0, 96, 3),
    Case("equal", 3, (FAST,) * 6, 45.0, 96, 3),
    Case("equal", 4, (FAST,) * 4, 30.0, 96, 3),
    Case("unequal", 2, (FAST, FAST, SLOW, SLOW), 20.0, 96, 3),
    Case("unequal", 3, (FAST, FAST, FAST, SLOW, SLOW, SLOW), 30.0, 96, 3),
    Case("unequal", 4, (FAST, FAST, FAST, SLOW, SLOW), 30.0, 96, 3),
)
LINK_CASE = Case(
    "slow link", 2, (FAST, FAST), 14.0, 32, 2, tokens=4096, width=32, max_in_flight=4, ballast=3_000_000, room=1.9
)
REFILL_CASE = Case("refill", 2, (FAST,) * 5, 40.0, 36, 0)
REFILL_ROUNDS_BEFORE = 3
REFILL_WITHIN = 6
"""Patiences; then it has not recovered."""


# Measuring ---------------------------------------------------------------------------------------------------


def measured(case: Case, limit_s: float) -> Row:
    """Measure the throughput of one pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        with Pipeline(Path(folder), case, limit_s) as pipeline:
            verdicts = pipeline.wait_for_rounds(case.rounds)[: case.rounds]
        row = row_of(pipeline, verdicts)
    simulated = simulated_rate(case)
    return row | {"simulated mb/s": simulated, "simulated ratio": over(simulated, row["mb/s"])}


def row_of(pipeline: Pipeline, verdicts: Sequence[Event]) -> Row:
    """Of a pipeline that is over: rates in micro-batches a second."""
    case, peers = pipeline.case, pipeline.peers
    notes = [peer.read() for peer in peers]
    rate, rounds = whole_rounds(verdicts, case.batch)
    bound = bound_now(pipeline, peers)
    return {
        "what": case.name,
        "stages": case.stages,
        "peers": " ".join(f"{one.slowness:g}:{one.span[0]}" for one in peers if one.span),
        "activations": case.activations,
        "mb/s": rate,
        "training mb/s": while_training(notes, verdicts, case.batch),
        "plan mb/s": predicted(pipeline),
        "bound mb/s": bound,
        "all peers mb/s": sum(1 / (12 * case.layer_ms / 1000 * one.slowness) for one in peers),
        "vs plan": over(rate, predicted(pipeline)),
        "vs bound": over(rate, bound),
        "rounds": rounds,
    }


def boundaries_of(pipeline: Pipeline) -> tuple[int, ...]:
    cut = next(one for one in pipeline.host.look() if one["event"] == "stages_cut")
    return tuple(cut["boundaries"])


def bound_now(pipeline: Pipeline, peers: Sequence[Peer]) -> float:
    """With the spans that they hold."""
    placed = [(peer.span, peer.slowness * pipeline.case.layer_ms / 1000) for peer in peers if peer.span]
    return bound_of(boundaries_of(pipeline), [span for span, _ in placed], [layer_s for _, layer_s in placed])


def bound_refilled(pipeline: Pipeline, others: Sequence[Peer], victim: Peer) -> float:
    """Return the moment when the best one of ``others`` has taken the place of ``victim``."""
    layer_s = [peer.slowness * pipeline.case.layer_ms / 1000 for peer in others]
    cut, held = boundaries_of(pipeline), [peer.span or (0, 0) for peer in others]
    placed = (
        [victim.span or (0, 0) if at == moved else span for at, span in enumerate(held)] for moved in range(len(held))
    )
    return max(bound_of(cut, spans, layer_s) for spans in placed)


def predicted(pipeline: Pipeline) -> float:
    """Throughput that the planner predicts from the peers' measurements."""
    told = [next(one for one in peer.read() if one["event"] == "capability") for peer in pipeline.peers]
    fields = ("peer", "host_bytes", "layer_s", "bandwidth_bps", "rtt_s", "device_bytes")
    peers = [PeerCapability(**{name: one[name] for name in fields}) for one in told]
    layers = [LayerCost(*costs) for costs in told[0]["layers"]]
    spans = {one["peer"]: peer.span for one, peer in zip(told, pipeline.peers, strict=True) if peer.span}
    plan = StagePlan(boundaries_of(pipeline), spans)
    run = pipeline.case.run_file
    assert run.pipeline is not None
    return plan_rate(plan, layers, peers, max_in_flight=run.pipeline.in_flight, demand=account_of(run).demand())


def measure_links(case: Case, limit_s: float) -> Iterator[Row]:
    """Behind shaped links, in int8 and in float32."""
    for activations in ("int8", "float32"):
        one = replace(case, activations=activations)
        try:
            check_machine()
            with (
                shaped_links([LINK_MBIT] * (len(case.slowness) + 1), ONE_WAY_MS) as places,
                tempfile.TemporaryDirectory() as folder,
            ):
                with Pipeline(Path(folder), one, limit_s, places) as pipeline:
                    verdicts = pipeline.wait_for_rounds(case.rounds)[: case.rounds]
                row = row_of(pipeline, verdicts)
            simulated = simulated_rate(one, LINK_MBIT, ONE_WAY_MS)
            yield row | {"simulated mb/s": simulated, "simulated ratio": over(simulated, row["mb/s"])}
        except NoShapedLinks as error:
            yield {"what": case.name, "stages": case.stages, "activations": activations, "note": str(error)}


def measure_refill(case: Case, limit_s: float) -> Iterator[Row]:
    """One of the two replicas of a stage is killed, beside three of the other one: one of these takes its place."""
    with tempfile.TemporaryDirectory() as folder, Pipeline(Path(folder), case, limit_s) as pipeline:
        verdicts = pipeline.wait_for_rounds(REFILL_ROUNDS_BEFORE)
        before, _ = whole_rounds(verdicts, case.batch)
        spans = [peer.span for peer in pipeline.peers]
        fewest = min(set(spans), key=spans.count)
        victim = pipeline.peers[spans.index(fewest)]
        others = [peer for peer in pipeline.peers if peer is not victim]
        bound = bound_refilled(pipeline, others, victim)
        possible = before * bound / bound_now(pipeline, pipeline.peers)
        killed_s = victim.kill()
        until_s = killed_s + REFILL_WITHIN * PATIENCE_S
        moments: list[float] = []
        took_s = None
        while took_s is None and time.time() < until_s:
            time.sleep(1.0)
            pipeline.committed()
            moments = completions([peer.read() for peer in pipeline.peers], case.stages - 1)
            took_s = recovered_s(moments, killed_s, possible, PATIENCE_S)
        start_s = killed_s - PATIENCE_S
        yield {
            "what": case.name,
            "stages": case.stages,
            "mb/s": rate_in(moments, moments[-1] - PATIENCE_S, PATIENCE_S),
            "before mb/s": before,
            "possible mb/s": possible,
            "bound mb/s": bound,
            "s": took_s,
            "vs patience": over(took_s, PATIENCE_S),
        }
        for second, rate in enumerate(rates_over_time(moments, start_s, moments[-1], PATIENCE_S / 3)):
            yield {"what": "over time", "s": start_s - killed_s + second * PATIENCE_S / 3, "mb/s": rate}


def measure_losses(steps: int, seeds: int) -> Iterator[Row]:
    """On one thread, as all that is measured beside it."""
    torch.set_num_threads(1)
    for activations in ("float32", "int8"):
        losses = held_out_losses(activations, range(1, seeds + 1), steps)
        tokens = steps * MICRO_BATCH * MICRO_BATCHES * SETTINGS["context"]
        yield {"what": "loss", "activations": activations, "loss": mean(losses), "tokens": tokens, "seeds": seeds}


# The script --------------------------------------------------------------------------------------------------


def measure_all(options: Any) -> Iterator[Row]:
    for case in CASES:
        if case.name in options.rows and (not options.quick or case.stages == 2):
            yield measured(shortened(case) if options.quick else case, options.limit_s)
    if "slow link" in options.rows:
        yield from measure_links(LINK_CASE, options.limit_s)
    if "refill" in options.rows:
        yield from measure_refill(REFILL_CASE, options.limit_s)
    if "loss" in options.rows:
        yield from measure_losses(*((4, 1) if options.quick else (100, 2)))


def shortened(case: Case) -> Case:
    return replace(case, batch=16, rounds=2)


def main() -> None:
    arguments = parser(__doc__)
    rows_of = ["equal", "unequal", "slow link", "refill", "loss", "plan"]
    arguments.add_argument("--rows", nargs="*", choices=rows_of, default=rows_of, help="only these")
    arguments.add_argument("--quick", action="store_true", help="a smoke run: short rounds, few rows")
    arguments.add_argument("--limit-s", type=float, default=180.0, help="for one pipeline; then all is given up")
    options = arguments.parse_args()
    end_on_sigterm()
    rows = collected(measure_all(options))
    ratios = ratios_of(rows)
    planned: list[Row] = []
    if "plan" in options.rows:
        peers, seeds = ((), 1) if options.quick else (LARGE_PEERS, SMALL_SEEDS)
        planned = [pipeline_plan.measured(*one) for one in pipeline_plan.cases(peers, seeds)]
    by_plan = pipeline_plan.ratios_of(planned)
    ratios |= {name: by_plan[name] for name in ("plan_vs_optimal", "plan_vs_greedy")}
    publish(f"pipelines on loopback, patience {PATIENCE_S:g} s, micro-batches/s", rows, ratios, options.json)


if __name__ == "__main__":
    main()
