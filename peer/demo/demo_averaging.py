"""The demo of a run in which everybody holds the whole model: one peer is killed, one comes late."""

from __future__ import annotations

import time

from shoal.peer.demo.demo_figures import Figures, Plan, make_figures, report
from shoal.peer.demo.demo_report import BACK, KILLED, Curve, Ending, Mark, loss_curve
from shoal.peer.demo.demo_swarm import DemoFailed, DemoSwarm
from shoal.peer.demo.run_files import BATCH, CONTEXT
from shoal.peer.offline.export import export_model, read_model
from shoal.peer.recipes.gpt import Gpt, GptRecipe
from shoal.peer.terminal.events import count_text
from shoal.swarm.errors import StateFileError


class AveragingDemo:
    """``peers`` at the start; the last of them is killed after a third of the time, one more comes half way."""

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._victim = f"peer-{peers}"
        self._newcomer = f"peer-{peers + 1}"
        self._killed_at: float | None = None
        self._joined_at: float | None = None

    def begin(self, swarm: DemoSwarm) -> None:
        """See ``Act``."""
        for number in range(1, self._peers + 1):
            swarm.start_peer(f"peer-{number}")

    def act(self, swarm: DemoSwarm, passed_s: float) -> None:
        """See ``Act``."""
        if self._killed_at is None and passed_s >= swarm.run_s / 3 and _all_train(swarm):
            self._killed_at = time.time()
            swarm.kill(self._victim)
        if self._joined_at is None and passed_s >= swarm.run_s / 2 and self._killed_at is not None:
            self._joined_at = time.time()
            swarm.start_peer(self._newcomer, "joined half way")

    def end(self, swarm: DemoSwarm, recipe: GptRecipe, seed: int) -> Ending:
        """Measure everything. Raises ``DemoFailed``."""
        model_path = swarm.folder / "model.safetensors"
        try:
            export_model(swarm.folder / "peer-1" / "state", model_path)
            model = read_model(model_path)
        except StateFileError as error:
            raise DemoFailed(f"peer-1 saved no model: {error}", swarm.peers["peer-1"]) from error
        assert isinstance(model, Gpt)
        start = recipe.build_model(seed)
        losses = recipe.held_out_loss(start, "cpu"), recipe.held_out_loss(model, "cpu")
        plan = self._plan(swarm, sum(parameter.numel() for parameter in start.parameters()))
        peers = {name: child.events for name, child in swarm.peers.items()}
        figures = make_figures(plan, swarm.host.events, peers, losses)
        moments_s, trained = loss_curve(swarm.host.events, plan.started)
        curve = Curve(_title(plan, figures), moments_s, trained, losses, figures.seconds, _marks(plan))
        return Ending(model, model_path, report(figures), curve, figures.as_json(), troubles_of(figures))

    def _plan(self, swarm: DemoSwarm, parameters: int) -> Plan:
        return Plan(
            peers=self._peers,
            parameters=parameters,
            tokens_per_step=BATCH * CONTEXT,
            killed=self._victim if self._killed_at else "",
            joined=self._newcomer if self._joined_at else "",
            started=swarm.started,
            killed_at=self._killed_at,
            joined_at=self._joined_at,
        )


def _all_train(swarm: DemoSwarm) -> bool:
    return all(any(event["event"] == "synced" for event in child.events) for child in swarm.peers.values())


def _title(plan: Plan, figures: Figures) -> str:
    return (
        f"{plan.peers} peers, {figures.rounds_committed} rounds, {count_text(figures.tokens)} tokens; "
        f"{figures.ratio:.0f}× fewer bytes than float32 data-parallel"
    )


def _marks(plan: Plan) -> list[Mark]:
    found = ((plan.killed_at, f"{plan.killed} killed", KILLED), (plan.joined_at, f"{plan.joined} joins", BACK))
    return [Mark(moment - plan.started, words, color) for moment, words, color in found if moment is not None]


def troubles_of(figures: Figures) -> tuple[str, ...]:
    troubles = []
    if not figures.rounds_committed:
        troubles.append("no round was committed")
    late = [peer.name for peer in figures.peers if peer.is_live and peer.digest is None]
    if late:
        troubles.append(f"the run was over before {', '.join(late)} held a state: give it more --minutes")
    elif not figures.parity:
        troubles.append("the live peers do not hold the same anchor")
    return tuple(troubles)
