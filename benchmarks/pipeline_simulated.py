"""The pipelines of ``pipeline.py`` in the simulator: the same run file, machines, links and layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline_run import LAYERS, MICRO_BATCH, Case

from shoal.swarm.coordinator.placement import Planner
from shoal.swarm.pipeline.planner.model import Infeasible
from shoal.swarm.simulation.pipeline import SimulatedPipeline
from shoal.swarm.simulation.result import LayerShape, Model
from shoal.swarm.simulation.traces import Machine, Trace

LOOPBACK_MBIT, LOOPBACK_MS = 10_000.0, 0.05


def _patient(planner: Planner, peers: int) -> Callable[..., Any]:
    """Make no plan before so many peers are there, as the real host of the benchmark does."""

    def plan(previous: Any, layers: Any, present: Any, *others: Any) -> Any:
        if previous is None and len(present) < peers:
            return Infeasible("some are still to come")
        return planner(previous, layers, present, *others)

    return plan


def simulated_rate(case: Case, mbit: float = LOOPBACK_MBIT, one_way_ms: float = LOOPBACK_MS) -> float:
    """Return the micro-batches a second of whole rounds, the first one left out as in the real run."""
    elements, values = case.ballast + case.width * (case.width + 1), case.tokens * case.width
    model = Model(LAYERS * elements, 1, (LayerShape(elements, values, 0),) * LAYERS)
    machines = [
        Machine(
            name=f"peer{number}",
            network=f"network{number}",
            tokens_per_s=MICRO_BATCH / (LAYERS * case.layer_ms / 1000 * slowness),
            host_bytes=case.memory_bytes,
            up_bps=1e6 * mbit,
            down_bps=1e6 * mbit,
            latency_s=one_way_ms / 1000,
        )
        for number, slowness in enumerate(case.slowness)
    ]
    trace = Trace("pipeline.py", lambda number, draw: machines[number], host_bps=1e6 * mbit)
    simulation = SimulatedPipeline(case.run_file, model, trace, len(machines), 0)
    simulation.planner = _patient(simulation.planner, len(machines))
    done = simulation.simulate(3600.0, case.rounds).committed
    return (len(done) - 1) * case.batch / (done[-1].ended_s - done[0].ended_s)
