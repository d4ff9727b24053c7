"""What the planner is asked, taken from the run's state at one moment: answering it takes seconds in a large swarm, and
is done beside everything else (``service.py``). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.swarm.pipeline.planner.replanning import Rebalancing
from shoal.swarm.pipeline.planner.stage_plan import Infeasible, LayerCost, PeerCapability, StagePlan


class Planner(Protocol):
    """The first plan for ``previous`` None; else one with the same boundaries, in which few peers move: without
    ``rebalancing`` only for the sake of a stage that is empty."""

    def __call__(
        self,
        previous: StagePlan | None,
        layers: Sequence[LayerCost],
        peers: Sequence[PeerCapability],
        rebalancing: Rebalancing | None,
    ) -> StagePlan | Infeasible: ...


@dataclass(frozen=True)
class Question:
    """``resting``: peers that are to have a place only if there is no plan without them."""

    previous: StagePlan | None
    layers: tuple[LayerCost, ...]
    peers: tuple[PeerCapability, ...]
    resting: tuple[PeerCapability, ...]
    rebalancing: Rebalancing | None

    def answer(self, planner: Planner) -> StagePlan | Infeasible:
        plan = planner(self.previous, self.layers, self.peers, self.rebalancing)
        if isinstance(plan, Infeasible) and self.resting:
            everybody = sorted((*self.peers, *self.resting), key=lambda one: one.peer)
            with_them = planner(self.previous, self.layers, everybody, None)
            return plan if isinstance(with_them, Infeasible) else with_them
        return plan

    def unchanged(self, now: Question) -> set[str]:
        """Those who have the same figures and the same span as when it was asked."""
        asked, there = self._by_peer(), now._by_peer()
        return {peer for peer, one in asked.items() if there.get(peer) == one}

    def _by_peer(self) -> dict[str, tuple[PeerCapability, tuple[int, int] | None]]:
        spans = self.previous.spans if self.previous else {}
        return {one.peer: (one, spans.get(one.peer)) for one in (*self.peers, *self.resting)}
