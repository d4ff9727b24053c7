"""Evaluator of a trial: follows its run as a member that trains nothing, and computes the held-out loss of its anchor.

All trials are judged on the same samples by this machine, so nothing that a volunteer says counts."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.compression.scratch import zeros
from shoal.peer.exports.model_file import read_model
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.replica import TrainingSetup
from shoal.peer.network_thread import Interrupted
from shoal.peer.offline.export import export_model
from shoal.peer.options import SessionOptions
from shoal.peer.recipes import Recipe, load_recipe
from shoal.peer.session import Readiness, Session
from shoal.peer.training.data import DataAbout
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import RunFile

log = logging.getLogger(__name__)

OnLoss = Callable[[int, float], None]
"""Called with the number of an evaluation and the held-out loss."""


class _FollowedModel:
    """Local work of an evaluator: none. The model has the newest anchor."""

    def __init__(self, vector: ParameterVector) -> None:
        self._vector = vector

    def step(self, samples: int, lr_factor: float) -> None:
        """Do nothing: an evaluator has no samples."""

    def contribution(self, anchor: Tensor) -> RangeReader:
        """Return zeros, which are offered with no weight."""
        return TensorReader(zeros(self._vector.elements))

    def reset_optimizer(self) -> None:
        """Do nothing: there is no inner optimizer."""

    def restart_from(self, anchor: Tensor) -> None:
        self._vector.write(anchor)

    def continue_from(self, anchor: Tensor) -> None:
        self._vector.write(anchor)


class Evaluator:
    """Follows one run until it ends; ``run`` blocks its thread, ``request_stop`` is for any other."""

    def __init__(self, run: RunFile, options: SessionOptions, device: torch.device, samples: int, every: int) -> None:
        """``samples``: of an evaluation; ``every``: committed rounds between two."""
        self._recipe: Recipe = load_recipe(run, options.data)
        self._run, self._options, self._device = run, options, device
        self._samples, self._every = samples, every
        self._session: Session | None = None
        self._is_stopped = False
        self._version = self._evaluations = 0

    def request_stop(self) -> None:
        self._is_stopped = True
        if self._session is not None:
            self._session.request_stop()

    def run(self, invite: Invite, on_loss: OnLoss) -> bool:
        """Evaluate until the run ends; returns False where it was stopped before. Raises as ``Session``."""
        recipe, model = self._recipe, self._recipe.build_model(self._run.run.seed).to(self._device)
        session = self._session = Session(RunConnection(str(invite), self._options, str(self._device)))
        about = DataAbout(
            recipe.corpus_digest, recipe.corpus_about, recipe.tokens_per_sample, len(recipe.training_data())
        )
        setup = TrainingSetup(
            model, None, about, recipe.config(), make_work=_FollowedModel, on_committed=self._note_version
        )
        with session:
            try:
                if self._is_stopped:
                    session.request_stop()
                session.start(setup)
                self._version = session.view.anchor_version
                while (readiness := session.settle()) is not Readiness.OVER:
                    # In short rounds the next one is due at once, and there is never nothing to do.
                    if self._version // self._every > self._evaluations:
                        self._evaluate(model, on_loss, self._version // self._every)
                    if readiness is Readiness.READY:
                        session.follow()
            except Interrupted:
                log.debug("stopped before the run had a state to give")
        if self._is_stopped:
            return False
        self._evaluate_end(model, on_loss)
        return True

    def _note_version(self, outcome: Committed) -> None:
        self._version = outcome.verdict.anchor_version

    def _evaluate_end(self, model: torch.nn.Module, on_loss: OnLoss) -> None:
        number = -(-self._version // self._every)
        if number > self._evaluations:
            self._evaluate(model, on_loss, number)

    def _evaluate(self, model: torch.nn.Module, on_loss: OnLoss, number: int) -> None:
        """Evaluate as number ``number``, which was due at this version or a little before."""
        self._evaluations = number
        on_loss(number, self._loss_of(model))

    def _loss_of(self, model: torch.nn.Module) -> float:
        return self._recipe.held_out_loss(model, self._device, self._samples)

    def run_ended(self, on_loss: OnLoss) -> None:
        """Evaluate the newest checkpoint of a run that had ended already, if there is one."""
        peer = Identity.load_or_create(self._options.identity).peer_id
        folder = self._options.folder(self._run, peer)
        with tempfile.TemporaryDirectory(prefix="shoal-trial-") as place:
            try:
                version = export_model(folder, Path(place) / "model.safetensors").version
                model = read_model(Path(place) / "model.safetensors").to(self._device)
            except StateFileError as error:
                log.warning("no state of the trial is left here: %s", error)
                return
            self._version = version
            self._evaluate_end(model, on_loss)
