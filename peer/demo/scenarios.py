"""The two demos: whole models with a peer killed and one that comes late, and a pipeline whose stages lose peers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from shoal.peer.demo.board import Death, choose_victim, held_now, usual_round_s, whole_run
from shoal.peer.demo.figures import (
    BACK,
    KILLED,
    Curve,
    Ending,
    Figures,
    Mark,
    Plan,
    Setting,
    assemble_model,
    loss_curve,
    make_figures,
    make_pipeline_figures,
    pipeline_troubles,
    report,
    stages_marks,
    stages_report,
    stages_title,
)
from shoal.peer.demo.processes import DemoFailed, DemoSwarm
from shoal.peer.demo.run_files import BATCH, CONTEXT, STAGE_MEMORY
from shoal.peer.event_schema import Event
from shoal.peer.machine_memory import parse_memory
from shoal.peer.offline.export import export_model, read_model
from shoal.peer.pipeline.profile import profile_model
from shoal.peer.recipes.gpt import Gpt, GptRecipe
from shoal.peer.terminal.events import count_text
from shoal.swarm.client.observer import get_status
from shoal.swarm.errors import LinkError, StateFileError
from shoal.swarm.pipeline.planner.model import PeerCapability, PlanningProblem
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import RunFile, load_run_file


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


SPARE_PEERS = 2
"""More peers than stages: some stage has another replica also after the first death, whom the plan can move."""

_BEFORE_DEATH = (0.2, 0.4)
"""After which share of the run's rounds somebody is killed."""
_BACK_S = 20.0
"""After this long the second victim comes back, also if the run has not said that it waits for anything."""
_ASK_EVERY_S = 1.0
_HELD_OUT_SAMPLES = 128


class PipelineDemo:
    """``peers`` peers for ``stages`` stages, some of which they hold twice, and for ``rounds`` rounds."""

    def __init__(self, peers: int, stages: int, rounds: int) -> None:
        self._peers = peers
        self._stages = stages
        self._rounds = rounds
        self._deaths: list[Death] = []
        self._said = ""
        self._asked_s = 0.0

    def begin(self, swarm: DemoSwarm) -> None:
        """See ``Act``."""
        for number in range(1, self._peers + 1):
            swarm.start_peer(f"peer-{number}", extra=("--max-memory", STAGE_MEMORY))

    # While it runs ------------------------------------------------------------------------------------------

    def act(self, swarm: DemoSwarm, passed_s: float) -> None:
        """See ``Act``."""
        moments = self._commits(swarm)
        if self._deaths and (not moments or moments[-1] <= self._deaths[-1].killed_at):
            self._help(swarm)
        elif len(self._deaths) < len(_BEFORE_DEATH):
            is_due = len(moments) >= max(2, self._rounds * _BEFORE_DEATH[len(self._deaths)])
            victim = self._victim(swarm) if is_due and self._is_mid_round(moments) else None
            if victim is not None:
                self._kill(swarm, *victim)

    def _victim(self, swarm: DemoSwarm) -> tuple[str, int, int] | None:
        """The next victim, its stage, and how many replicas that has; None while the stages are not as they should
        be for it."""
        holders = {
            name: held_now(child.events)[0]
            for name, child in swarm.peers.items()
            if not child.killed and held_now(child.events)
        }
        if len(holders) < self._peers - len(self._deaths):
            return None
        return choose_victim(holders, self._stages, self._deaths)

    def _is_mid_round(self, moments: Sequence[float]) -> bool:
        """Between a third and two thirds of what a round takes have passed since the last one's end."""
        round_s = usual_round_s(moments, [death.killed_at for death in self._deaths])
        return round_s / 3 <= time.time() - moments[-1] <= 2 * round_s / 3

    def _kill(self, swarm: DemoSwarm, name: str, stage: int, replicas: int) -> None:
        who = "the only replica" if replicas == 1 else f"one of {replicas} replicas"
        swarm.kill(name, f"{who} of stage {stage}")
        self._deaths.append(Death(name, stage, replicas, time.time()))

    def _help(self, swarm: DemoSwarm) -> None:
        """Say what the run waits for; the only replica of a stage comes back for that."""
        last = self._deaths[-1]
        outlook = self._outlook(swarm)
        since_s = time.time() - last.killed_at
        if last.replicas == 1 and last.back_at is None and (outlook or since_s > _BACK_S):
            swarm.start_again(last.peer)
            self._deaths[-1] = replace(last, back_at=time.time())

    def _outlook(self, swarm: DemoSwarm) -> str:
        """The reason that ``shoal status`` gives for waiting; also on the board, when it is something new."""
        if time.monotonic() - self._asked_s < _ASK_EVERY_S:
            return ""
        self._asked_s = time.monotonic()
        try:
            outlook = asyncio.run(get_status(Invite.parse(swarm.invite))).outlook
        except LinkError:
            return ""
        # Not again when only seconds have passed.
        new = re.sub(r"\d+", "", outlook)
        if new and new != self._said:
            swarm.say(f"shoal status: {outlook}")
        self._said = new
        return outlook

    def _commits(self, swarm: DemoSwarm) -> list[float]:
        run = (whole_run(event, self._stages) for event in swarm.host.events)
        return [event["time"] for event in run if event and event["event"] == "verdict" and event["committed"]]

    # Afterwards ---------------------------------------------------------------------------------------------

    def end(self, swarm: DemoSwarm, recipe: GptRecipe, seed: int) -> Ending:
        """Measure everything. Raises ``DemoFailed``."""
        model_path = swarm.folder / "model.safetensors"
        try:
            saved = assemble_model(swarm.folder, model_path)
            model = read_model(model_path)
        except StateFileError as error:
            raise DemoFailed(f"there is no whole model: {error}", swarm.host) from error
        assert isinstance(model, Gpt)
        start = recipe.build_model(seed)
        losses = (
            recipe.held_out_loss(start, "cpu", _HELD_OUT_SAMPLES),
            recipe.held_out_loss(model, "cpu", _HELD_OUT_SAMPLES),
        )
        setting = self._setting(swarm, recipe, sum(parameter.numel() for parameter in start.parameters()))
        host = swarm.host.events
        peers: Mapping[str, list[Event]] = {name: child.events for name, child in swarm.peers.items()}
        figures = make_pipeline_figures(setting, host, peers, self._deaths, losses)
        run = [event for one in host if (event := whole_run(one, self._stages)) is not None]
        moments_s, trained = loss_curve(run, swarm.started)
        title, marks = stages_title(figures), stages_marks(figures)
        curve = Curve(title, moments_s, trained, losses, figures.seconds, marks)
        report = stages_report(figures)
        return Ending(
            model, model_path, report, curve, figures.as_json(), pipeline_troubles(figures, len(_BEFORE_DEATH), saved)
        )

    def _setting(self, swarm: DemoSwarm, recipe: GptRecipe, parameters: int) -> Setting:
        cut = next((event["boundaries"] for event in swarm.host.events if event["event"] == "stages_cut"), None)
        if cut is None:
            raise DemoFailed("the model was never cut into stages", swarm.host)
        _, run = load_run_file(swarm.folder / "run.toml")
        stage_bytes, model_bytes = memory_needs(run, recipe, cut, swarm.folder / "measured.json")
        return Setting(
            stages=self._stages,
            memory_bytes=parse_memory(STAGE_MEMORY),
            stage_bytes=stage_bytes,
            model_bytes=model_bytes,
            parameters=parameters,
            started=swarm.started,
        )


def memory_needs(
    run: RunFile, recipe: GptRecipe, boundaries: Sequence[int], cache: Path
) -> tuple[tuple[int, ...], int]:
    """What each stage of this cut takes at least of a peer, and what the model takes as a whole, in bytes: as the plan
    counts them. ``cache``: for what is measured."""
    assert run.pipeline is not None
    model = profile_model(run, recipe, torch.device("cpu"), time.time(), cache)
    costs = [layer.cost for layer in model.layers]
    peer = PeerCapability("peer", 0, (0.0,) * len(costs), 1.0, holds_all=True)
    swarm = PlanningProblem(costs, [peer], run.pipeline.in_flight, run.outer.slots)
    cut = np.array(boundaries)
    stages = swarm.least_bytes(cut[:-1], cut[1:])
    whole = swarm.least_bytes(cut[:1], cut[-1:])
    return tuple(int(one) for one in stages), int(whole[0])
