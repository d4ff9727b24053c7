"""Training of a held span on the training thread: computations, replicas of the state, and rounds.

A replica averages each of its stages as if that were a run of its own; all of them close a round and conclude it
together.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.peer.member.memberships import Memberships
from shoal.peer.member.replica import TrainingReplica
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, StageCompute
from shoal.peer.pipeline.tasks import BackwardTask, ComputeResult, ForgetTask, ForwardTask
from shoal.peer.pipeline.tensor_io import ComputedTensor
from shoal.peer.training.data import Dataset, SampleOrder, take_batch
from shoal.peer.training.layers import LayeredRecipe
from shoal.swarm.errors import NotAdmitted
from shoal.swarm.pipeline.engine.effects import MicroBatch

log = logging.getLogger(__name__)

_WINDOW = 16
"""Micro-batches that the speed is measured on."""


@dataclass(frozen=True)
class _Key:
    """A job's micro-batch, as ``StageCompute`` knows it."""

    job: int
    round: int
    start: int
    stop: int

    @classmethod
    def of(cls, job: int, micro_batch: MicroBatch) -> _Key:
        return cls(job, micro_batch.round, micro_batch.start, micro_batch.stop)


@dataclass(frozen=True)
class TrainingSamples:
    """Samples that drivers read: the run's data in the run's order."""

    recipe: LayeredRecipe
    data: Dataset
    order: SampleOrder

    def read(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The model's input and the targets."""
        batch = take_batch(self.data, self.order.indices(micro_batch.start, micro_batch.stop))
        return self.recipe.input_of(batch), self.recipe.targets_of(batch)


class SpanTraining:
    """``held``: consecutive stages, with the ``replicas`` of each. ``is_last``: with the model's last."""

    def __init__(
        self,
        held: Sequence[HeldStage],
        replicas: Mapping[int, TrainingReplica],
        samples: TrainingSamples,
        settings: Mapping[int, ComputeSettings],
        took: Callable[[int, float], None],
        *,
        is_last: bool,
    ) -> None:
        """``settings``: by the stage at which a micro-batch comes in; ``took`` is told that and the seconds of each one
        that counted in all stages from there on, forward and backward."""
        self.replicas = dict(replicas)
        self._samples = samples
        self._is_last = is_last
        self._took = took
        self._forward_s: dict[int, float] = {}
        self._computes = {
            stage.number: StageCompute(held[at:], settings[stage.number], samples.recipe if is_last else None)
            for at, stage in enumerate(held)
        }
        self._keys: dict[int, tuple[StageCompute, _Key]] = {}
        self._targets: dict[int, Tensor] = {}
        self._finished: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self.forwards = self.backwards = 0
        """Micro-batches that were computed, also those of somebody else's claim."""

    # Computing ------------------------------------------------------------------------------------------------

    def execute(self, task: ForwardTask | BackwardTask | ForgetTask) -> ComputeResult | None:
        """One task; what came of it, None for what gives nothing."""
        match task:
            case ForwardTask():
                return self._forward(task)
            case BackwardTask():
                return self._backward(task)
            case ForgetTask():
                self._forget(task.job)
        return None

    def _forward(self, task: ForwardTask) -> ComputeResult:
        began_s = time.perf_counter()
        micro_batch, job = task.compute.micro_batch, task.compute.job
        given, targets = task.given, task.targets
        if given is None or targets is None:
            given, targets = self._samples.read(micro_batch)
        compute, key = self._computes[task.compute.from_stage], _Key.of(job, micro_batch)
        self._keys[job] = compute, key
        output = compute.forward(key, given)
        made = None if output is None else ComputedTensor.here(output)
        self.forwards += 1
        self._forward_s[job] = time.perf_counter() - began_s
        if self._is_last:
            self._targets[job] = targets
            return ComputeResult(task.compute)
        return ComputeResult(task.compute, made, targets)

    def _backward(self, task: BackwardTask) -> ComputeResult:
        began_s = time.perf_counter()
        micro_batch, job, from_stage = task.compute.micro_batch, task.compute.job, task.compute.from_stage
        compute, key = self._keys.pop(job)
        received = self._targets.pop(job) if self._is_last else task.gradient
        assert received is not None, "a gradient comes before its backward"
        back = compute.backward(key, received, task.compute.accumulate)
        made = None if back.input_gradient is None else ComputedTensor.here(back.input_gradient)
        self.backwards += 1
        for stage in sorted(task.compute.accumulate):
            self.replicas[stage].count_trained(micro_batch.start, micro_batch.stop, back.loss)
        forward_s = self._forward_s.pop(job)
        if len(task.compute.accumulate) == len(range(from_stage, max(self.replicas) + 1)):
            self._took(from_stage, forward_s + time.perf_counter() - began_s)
        self._finished.append((time.monotonic(), micro_batch.samples))
        return ComputeResult(task.compute, made)

    def _forget(self, job: int | None) -> None:
        for one in list(self._keys) if job is None else [job]:
            if one in self._keys:
                compute, key = self._keys.pop(one)
                compute.drop(key)
                self._forward_s.pop(one, None)
            self._targets.pop(one, None)

    # Rounds ---------------------------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """That the work is for. All stages are in the same, but for those that are still to catch up."""
        return min(replica.round for replica in self.replicas.values())

    def sync_state(self) -> None:
        """Get the state of every stage. Raises ``Interrupted``."""
        for replica in self.replicas.values():
            replica.sync_state()

    def close_round(self) -> bool:
        """Offer what every stage has, and conclude them all; returns whether the work for the round goes on, as it was
        reopened. Raises ``Interrupted``, ``NotAdmitted``, ``Diverged``."""
        number = self.round
        # A stage that was synced while a round ended is behind the others, and catches up.
        taking_part = [replica for replica in self.replicas.values() if replica.round == number]
        offered = [replica for replica in taking_part if replica.begin_exchange()]
        is_whole = len(offered) == len(taking_part)
        lost: NotAdmitted | None = None
        for replica in offered:
            try:
                is_whole = replica.conclude_round() and is_whole
            except NotAdmitted as error:  # the others may still be ours, and nobody else may have their new state
                lost = error
        if lost is not None:
            raise lost
        goes_on = [replica for replica in taking_part if replica.round == number]
        if goes_on and not is_whole:
            # A micro-batch counts in all our stages or is claimed anew in all.
            for replica in goes_on:
                replica.resync("the work on another stage was lost")
        self._finished.clear()
        return bool(goes_on) and is_whole

    def resync(self, reason: str) -> None:
        """Give back all that was claimed in any stage and begin again from the run's state."""
        for replica in self.replicas.values():
            replica.resync(reason)
        self._finished.clear()

    def recover_from_divergence(self, reason: str) -> None:
        """``resync``, as what was computed is of no use to anybody. Raises ``Diverged``."""
        for replica in self.replicas.values():
            replica.recover_from_divergence(reason)
        self._finished.clear()

    def save_checkpoints(self) -> None:
        """Have a checkpoint of every stage on disk."""
        for replica in self.replicas.values():
            replica.save_checkpoint()

    def report_progress(self, members: Memberships) -> None:
        """Let the next heartbeats tell what is done."""
        rate = self._samples_per_s()
        for stage, replica in self.replicas.items():
            progress = members.stages[stage].progress
            progress.activity = "training"
            progress.tokens_done = replica.samples.tokens_done
            progress.tokens_per_s = rate * replica.tokens_per_sample
            progress.loss = replica.samples.recent_loss()
        whole, last = members.run.progress, max(self.replicas)
        stage_progress = members.stages[last].progress
        whole.activity, whole.round, whole.loss = "training", self.round, stage_progress.loss
        whole.tokens_done, whole.tokens_per_s = stage_progress.tokens_done, stage_progress.tokens_per_s

    def _samples_per_s(self) -> float:
        if len(self._finished) < 2:
            return 0.0
        took_s = self._finished[-1][0] - self._finished[0][0]
        return sum(samples for _, samples in list(self._finished)[1:]) / took_s if took_s > 0 else 0.0
