"""Training of a held span on the training thread: its tasks, their results, and the rounds of all its stages.

Each stage is averaged like a run of its own; the stages held here close and conclude every round together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass

from torch import Tensor

from shoal.peer.member.memberships import Memberships
from shoal.peer.member.replica import TrainingReplica
from shoal.peer.member.round_deadline import Attention
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, MicroBatchKey, StageCompute
from shoal.peer.pipeline.tensor_io import ComputedTensor
from shoal.peer.training.data import Dataset, Order, prefetch, take_batch
from shoal.peer.training.device_streams import Mark, streams_of
from shoal.peer.training.layers import LayeredRecipe
from shoal.swarm.errors import Busy, NotAdmitted, StaleWork, WireError
from shoal.swarm.pipeline.engine.effects import ComputeBackward, ComputeForward, MicroBatch
from shoal.swarm.protocol.types import WorkPhase

MakeCompute = Callable[[Sequence[HeldStage], ComputeSettings, LayeredRecipe | None], StageCompute]

_Pass = tuple[Mark, Mark]
"""Beginning and end of a forward or backward pass on the device."""

_WINDOW = 16
"""Number of recent micro-batches that the speed is measured on."""


@dataclass(frozen=True)
class ForwardTask:
    """Forward pass of one micro-batch.

    ``given``: input of ``compute.from_stage``, (b, …), and ``targets``, both received from the previous stage; None
    if this peer drives the micro-batch and reads its samples.
    """

    compute: ComputeForward
    given: Tensor | None = None
    targets: Tensor | None = None


@dataclass(frozen=True)
class BackwardTask:
    """Backward pass of one micro-batch.

    ``gradient``: gradient of the forward pass's output; None at the last stage, which has the targets.
    """

    compute: ComputeBackward
    gradient: Tensor | None = None


@dataclass(frozen=True)
class ForgetTask:
    """Drop of one job's tensors; of all jobs' for None."""

    job: int | None


@dataclass(frozen=True)
class RepeatTask:
    """Computation of a micro-batch that another replica has computed, for comparison; it counts nowhere.

    ``given``, ``targets``: input of the stage ``first``, None for samples read here; ``gradient``: of the output of the
    stage ``last``, None for a forward pass only. ``done``: its result."""

    micro_batch: MicroBatch
    first: int
    last: int
    given: Tensor | None
    targets: Tensor | None
    gradient: Tensor | None
    done: futures.Future[RepeatedTensors]


@dataclass(frozen=True)
class RepeatedTensors:
    """Result of a ``RepeatTask``. ``output``: None at the model's last stage; ``targets``: if they were read here."""

    output: ComputedTensor | None
    gradient: ComputedTensor | None
    targets: Tensor | None


Task = ForwardTask | BackwardTask | RepeatTask | ForgetTask | Attention
"""Next step of the training thread; an ``Attention`` goes before any computation."""


@dataclass(frozen=True)
class ComputeResult:
    """Result of a computation: an activation with its targets, or a gradient. ``tensor``: None if no peer needs it."""

    compute: ComputeForward | ComputeBackward
    tensor: ComputedTensor | None = None
    targets: Tensor | None = None


@dataclass(frozen=True)
class TrainingSamples:
    """The run's data in the run's order, for the micro-batches that this peer drives."""

    recipe: LayeredRecipe
    data: Dataset
    order: Order

    def read(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the model's input and the targets, each (b, …)."""
        batch = take_batch(self.data, self.order.indices(micro_batch.start, micro_batch.stop))
        prefetch(self.data, self.order, [(micro_batch.start, micro_batch.stop)])
        return self.recipe.input_of(batch), self.recipe.targets_of(batch)


class SpanTraining:
    """Computations and rounds of the stages of one span, on the training thread."""

    def __init__(
        self,
        held: Sequence[HeldStage],
        replicas: Mapping[int, TrainingReplica],
        samples: TrainingSamples,
        settings: Mapping[int, ComputeSettings],
        took: Callable[[int, float], None],
        *,
        is_last: bool,
        make_compute: MakeCompute = StageCompute,
    ) -> None:
        """``held``: the span's stages in order; ``replicas`` and ``settings``: by stage, the latter by the one at which
        a micro-batch enters; ``took``: called with that stage and the seconds of the device, forward and backward, of
        every micro-batch whose gradient counted in all stages from there on, once the device is done; ``is_last``: the
        model's last stage is held; ``make_compute``: of the ranks of an island.
        """
        self.replicas = dict(replicas)
        self._samples = samples
        self._is_last = is_last
        self._took = took
        self._streams = streams_of(next(iter(settings.values())).device)
        self._forwards: dict[int, _Pass] = {}
        self._timed: deque[tuple[int, _Pass, _Pass]] = deque()
        self._held, self._settings = tuple(held), settings
        self._make_compute = make_compute
        self._computes = {
            stage.number: make_compute(held[at:], settings[stage.number], samples.recipe if is_last else None)
            for at, stage in enumerate(held)
        }
        self._keys: dict[int, tuple[StageCompute, MicroBatchKey]] = {}
        self._targets: dict[int, Tensor] = {}
        self._finished: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self.forwards = self.backwards = 0
        """Number of micro-batches computed, also those whose gradients count at other replicas."""

    # Computing ------------------------------------------------------------------------------------------------

    def execute(self, task: ForwardTask | BackwardTask | RepeatTask | ForgetTask) -> ComputeResult | None:
        """Do a task and return its result; None for a drop, and for a repetition, whose result is its own."""
        self.note_phase("compute")
        match task:
            case ForwardTask():
                return self._forward(task)
            case BackwardTask():
                return self._backward(task)
            case RepeatTask():
                self._repeat(task)
            case ForgetTask():
                self._forget(task.job)
        return None

    def _forward(self, task: ForwardTask) -> ComputeResult:
        began = self._streams.mark()
        micro_batch, job = task.compute.micro_batch, task.compute.job
        given, targets = task.given, task.targets
        if given is None or targets is None:
            self.note_phase("data")
            given, targets = self._samples.read(micro_batch)
            self.note_phase("compute")
        compute = self._computes[task.compute.from_stage]
        key = MicroBatchKey(micro_batch.round, micro_batch.start, micro_batch.stop, job)
        self._keys[job] = compute, key
        output = compute.forward(key, given)
        made = None if output is None else ComputedTensor.on_current_stream(output)
        self.forwards += 1
        self._forwards[job] = began, self._streams.mark()
        if self._is_last:
            self._targets[job] = targets
            return ComputeResult(task.compute)
        return ComputeResult(task.compute, made, targets)

    def _backward(self, task: BackwardTask) -> ComputeResult:
        began = self._streams.mark()
        micro_batch, job, from_stage = task.compute.micro_batch, task.compute.job, task.compute.from_stage
        compute, key = self._keys.pop(job)
        received = self._targets.pop(job) if self._is_last else task.gradient
        assert received is not None, "the gradient has arrived before its backward pass is queued"
        back = compute.backward(key, received, task.compute.accumulate)
        made = None if back.input_gradient is None else ComputedTensor.on_current_stream(back.input_gradient)
        self.backwards += 1
        for stage in sorted(task.compute.accumulate):
            self.replicas[stage].count_trained(micro_batch.start, micro_batch.stop, back.loss)
        forward = self._forwards.pop(job)
        if len(task.compute.accumulate) == len(range(from_stage, max(self.replicas) + 1)):
            self._timed.append((from_stage, forward, (began, self._streams.mark())))
        self._report_times()
        self._finished.append((time.monotonic(), micro_batch.samples))
        return ComputeResult(task.compute, made)

    def _report_times(self) -> None:
        """Report the micro-batches that the device has finished, without waiting for others."""
        while self._timed and self._timed[0][2][1].is_reached():
            from_stage, *passes = self._timed.popleft()
            self._took(from_stage, sum(ended.seconds_since(began) for began, ended in passes))

    def _repeat(self, task: RepeatTask) -> None:
        if not task.done.set_running_or_notify_cancel():
            return
        try:
            task.done.set_result(self._repeated(task))
        except (Busy, StaleWork, WireError) as error:
            task.done.set_exception(error)

    def _repeated(self, task: RepeatTask) -> RepeatedTensors:
        micro_batch = task.micro_batch
        if micro_batch.round != self.round:
            raise StaleWork(f"this peer is in round {self.round}")
        settings = self._settings[task.first]
        is_full = sum(one.in_flight for one in self._computes.values()) >= settings.max_in_flight
        if task.gradient is not None and is_full and not settings.recompute:
            raise Busy("no memory is planned for another micro-batch's graph now")
        given, targets, read = task.given, task.targets, None
        if given is None:
            given, read = self._samples.read(micro_batch)
        is_end = self._is_last and task.last == self._held[-1].number
        held = [stage for stage in self._held if task.first <= stage.number <= task.last]
        compute = self._make_compute(held, settings, self._samples.recipe if is_end else None)
        key = MicroBatchKey(micro_batch.round, micro_batch.start, micro_batch.stop, -1)
        output, back = compute.repeat(key, given, targets if is_end else task.gradient)
        return RepeatedTensors(
            None if is_end else ComputedTensor.on_current_stream(output),
            None if back is None else ComputedTensor.on_current_stream(back),
            read,
        )

    def _forget(self, job: int | None) -> None:
        for one in list(self._keys) if job is None else [job]:
            if one in self._keys:
                compute, key = self._keys.pop(one)
                compute.drop(key)
                self._forwards.pop(one, None)
            self._targets.pop(one, None)

    # Rounds ---------------------------------------------------------------------------------------------------

    def note_phase(self, phase: WorkPhase | None) -> None:
        """Note in the clocks of all stages what the training thread does now, as ``PhaseClock.train``."""
        for replica in self.replicas.values():
            replica.clock.train(phase)

    @property
    def round(self) -> int:
        """Round that the work is for: that of the stage furthest behind, if some have yet to catch up."""
        return min(replica.round for replica in self.replicas.values())

    def sync_state(self) -> None:
        """Obtain the current state of every stage. Raises ``Interrupted``."""
        for replica in self.replicas.values():
            replica.sync_state()

    def close_round(self) -> bool:
        """Contribute the work of every stage and conclude the round in all of them.

        Returns whether the work goes on, because the round was reopened. Raises ``Interrupted``, ``NotAdmitted`` if a
        stage was given to others, ``Diverged``.
        """
        number = self.round
        self.note_phase(None)
        # A stage that was synced while a round ended is behind the others and catches up.
        taking_part = [replica for replica in self.replicas.values() if replica.round == number]
        offered = [replica for replica in taking_part if replica.begin_exchange()]
        is_whole = len(offered) == len(taking_part)
        lost: NotAdmitted | None = None
        for replica in offered:
            try:
                is_whole = replica.conclude_round() and is_whole
            except NotAdmitted as error:  # conclude the others all the same: no other peer may have their new state
                lost = error
        if lost is not None:
            raise lost
        goes_on = [replica for replica in taking_part if replica.round == number]
        if goes_on and not is_whole:
            # A micro-batch counts in all stages held here, or is claimed anew in all of them.
            for replica in goes_on:
                replica.resync("the work on another stage was lost")
        self._finished.clear()
        return bool(goes_on) and is_whole

    def resync(self, reason: str) -> None:
        """Drop the work and the claims of all stages and begin again from the run's state."""
        for replica in self.replicas.values():
            replica.resync(reason)
        self._finished.clear()

    def recover_from_divergence(self, reason: str) -> None:
        """Drop work that has become infinite or not a number, and ``resync``. Raises ``Diverged`` after some tries."""
        for replica in self.replicas.values():
            replica.recover_from_divergence(reason)
        self._finished.clear()

    def save_checkpoints(self) -> None:
        """Write a checkpoint of every stage."""
        for replica in self.replicas.values():
            replica.save_checkpoint()

    def report_progress(self, members: Memberships) -> None:
        """Update the progress that the next heartbeats of the run and of the stages report."""
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
        whole.tokens_trained = max(one.samples.tokens_trained for one in self.replicas.values())
        whole.tokens_done, whole.tokens_per_s = stage_progress.tokens_done, stage_progress.tokens_per_s

    def _samples_per_s(self) -> float:
        if len(self._finished) < 2:
            return 0.0
        took_s = self._finished[-1][0] - self._finished[0][0]
        return sum(samples for _, samples in list(self._finished)[1:]) / took_s if took_s > 0 else 0.0
