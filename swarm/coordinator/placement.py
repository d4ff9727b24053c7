"""Requests to the pipeline's planner, from what its peers report, and the view of a plan for members."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.swarm.memory_account import account_of
from shoal.swarm.pipeline.planner.meeting import plan_acquainted, rearrange
from shoal.swarm.pipeline.planner.model import Infeasible, LayerCost, PeerCapability, PlanningProblem, StagePlan
from shoal.swarm.pipeline.planner.planner import Rebalancing, plan_stages, predict_rates, replan
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import AssignedSpan, Capability, LayerSize, PipelineView

# The members' view ------------------------------------------------------------------------------------------

_FASTEST = 64.0
"""Largest believed speed at a layer, as a multiple of the median one."""
_FASTEST_BPS = 1e11
_MOST_BYTES = 2**48
"""Largest believed memory: no machine has so much, and sums of it stay exact."""


class PipelineViews:
    """View of the placement; the same object until something changes, so that it is packed once for all members."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self._demand = account_of(run).demand()
        self._made: PipelineView | None = None
        self._capabilities: dict[str, Capability] = {}

    def of(
        self, plan: StagePlan, version: int, layers: Sequence[LayerSize], capabilities: Mapping[str, Capability]
    ) -> PipelineView:
        """Return the view of a plan. ``version``: of its spans; every peer with a span has a capability."""
        made = self._made
        if made is None or made.version != version or self._capabilities != capabilities:
            self._capabilities = dict(capabilities)
            made = self._made = self._make(plan, version, layers)
        return made

    def _make(self, plan: StagePlan, version: int, layers: Sequence[LayerSize]) -> PipelineView:
        assert self._run.pipeline is not None
        costs = [cost_of(one) for one in layers]
        peers, in_flight = believed(self._capabilities), self._run.pipeline.in_flight
        expected = predict_rates(PlanningProblem(costs, peers, in_flight, self._demand), plan)
        return PipelineView(
            boundaries=plan.boundaries,
            spans=tuple(
                AssignedSpan(
                    peer=peer,
                    first=first,
                    last=last,
                    rate=expected[peer].rate,
                    recomputes=expected[peer].recomputes,
                )
                for peer, (first, last) in sorted(plan.spans.items())
            ),
            version=version,
        )


def cost_of(layer: LayerSize) -> LayerCost:
    """Convert a layer's description into the planner's form."""
    return LayerCost(layer.parameters_bytes, layer.activation_bytes, layer.kept_bytes)


def believed(shown: Mapping[str, Capability]) -> list[PeerCapability]:
    """Convert the peers' own figures into the planner's form, within limits: no peer is believed to be faster than the
    others by more than a factor, or to have more memory than machines have."""
    layers = zip(*(one.layer_s for one in shown.values()), strict=True)
    least_s = [statistics.median(seconds) / _FASTEST for seconds in layers]
    return [
        PeerCapability(
            peer,
            min(one.host_bytes, _MOST_BYTES),
            tuple(map(max, one.layer_s, least_s)),
            min(max(one.bandwidth_bps, 1.0), _FASTEST_BPS),
            one.rtt_s,
            None if one.device_bytes is None else min(one.device_bytes, _MOST_BYTES),
        )
        for peer, one in sorted(shown.items())
    ]


# Requests ---------------------------------------------------------------------------------------------------


class Planner(Protocol):
    """Make the first plan if ``previous`` is None; else one with the same boundaries in which few peers move: without
    ``rebalancing`` only to fill a stage that is empty."""

    def __call__(
        self,
        previous: StagePlan | None,
        layers: Sequence[LayerCost],
        peers: Sequence[PeerCapability],
        rebalancing: Rebalancing | None,
    ) -> StagePlan | Infeasible: ...


@dataclass(frozen=True)
class PlacementRequest:
    """Request to the planner. ``resting``: peers that get stages only if there is no plan without them."""

    previous: StagePlan | None
    layers: tuple[LayerCost, ...]
    peers: tuple[PeerCapability, ...]
    resting: tuple[PeerCapability, ...]
    rebalancing: Rebalancing | None

    def plan(self, planner: Planner) -> StagePlan | Infeasible:
        plan = self._plan_with(planner, self.peers, self.rebalancing)
        if isinstance(plan, Infeasible) and self.resting:
            everybody = sorted((*self.peers, *self.resting), key=lambda one: one.peer)
            with_them = self._plan_with(planner, everybody, None)
            return plan if isinstance(with_them, Infeasible) else with_them
        return plan

    def _plan_with(
        self, planner: Planner, peers: Sequence[PeerCapability], rebalancing: Rebalancing | None
    ) -> StagePlan | Infeasible:
        def make(some: Sequence[PeerCapability]) -> StagePlan | Infeasible:
            return planner(self.previous, self.layers, some, rebalancing)

        return plan_acquainted(make, peers, self.previous)

    def unchanged(self, now: PlacementRequest) -> set[str]:
        """Return the peers that have the same figures and the same span in a later request."""
        later = now._by_peer()
        return {peer for peer, one in self._by_peer().items() if later.get(peer) == one}

    def _by_peer(self) -> dict[str, tuple[PeerCapability, tuple[int, int] | None]]:
        spans = self.previous.spans if self.previous else {}
        return {one.peer: (one, spans.get(one.peer)) for one in (*self.peers, *self.resting)}


# The planner ------------------------------------------------------------------------------------------------


def planner_of(run: RunFile) -> Planner:
    """Return the planner with the settings of a pipeline run. An open one asks for two replicas of each stage."""
    assert run.pipeline is not None
    stages = None if run.pipeline.stages == "auto" else run.pipeline.stages
    max_in_flight, demand = run.pipeline.in_flight, account_of(run).demand()
    twice = run.access.admission == "open"

    def plan(
        previous: StagePlan | None,
        layers: Sequence[LayerCost],
        peers: Sequence[PeerCapability],
        rebalancing: Rebalancing | None,
    ) -> StagePlan | Infeasible:
        if previous is not None:
            return replan(
                previous,
                layers,
                peers,
                max_in_flight=max_in_flight,
                demand=demand,
                rebalancing=rebalancing,
                twice=twice,
            )
        if stages is not None and stages > len(layers):
            return Infeasible(f"the run file asks for {stages} stages, and the model has {len(layers)} layers")
        first = plan_stages(layers, peers, stages=stages, max_in_flight=max_in_flight, demand=demand, twice=twice)
        if isinstance(first, Infeasible):
            return first
        return rearrange(PlanningProblem(layers, peers, max_in_flight, demand), first)

    return plan
