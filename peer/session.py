"""Session: a member of a run for training loops of one's own. ``shoal join`` is built on it.

::

    with Session.join(invite, model=model, inner_optimizer=optimizer) as session:
        for batch in session.batches(dataset):
            loss = loss_fn(model, batch)
            loss.backward()
            session.step(loss)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from enum import Enum
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.peer.member.connection import RunConnection
from shoal.peer.member.member import LocalMember
from shoal.peer.member.replica import TrainingReplica, TrainingSetup
from shoal.peer.member.round_deadline import Attention, attention, is_due, least_s
from shoal.peer.network_thread import Interrupted, NetworkThread
from shoal.peer.options import SessionOptions
from shoal.peer.terminal.snapshot import Snapshot, take_snapshot
from shoal.peer.training.data import DataAbout, Dataset, LeasedSamples, fingerprint, run_order, take_batch
from shoal.peer.training.lr_schedule import run_lr_factor
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile

log = logging.getLogger(__name__)

_SMOOTHING = 0.2


class Readiness(Enum):
    """Readiness of a training loop for local work."""

    READY = "ready"
    NOT_YET = "not yet"
    """A round or a resync went before local work: call ``Session.settle`` again."""
    OVER = "over"
    """The run has ended, or this peer stops."""


class Session:
    """Member of a run, made with ``join``; a context manager that leaves the run at its end.

    Train on ``batches`` and call ``step`` after each. One thread trains; ``view``, ``snapshot`` and ``request_stop``
    may be used from any thread. ``peer``: this peer's id; ``run_file``: the run's validated run file.
    """

    def __init__(self, connection: RunConnection) -> None:
        self._connection = connection
        self.invite = connection.invite
        self.peer = connection.peer
        self.device = connection.device
        self.options = connection.options
        self._network: NetworkThread[Any] = connection.network
        self._member: LocalMember = connection.members.run
        self.run_file: RunFile = connection.run_file
        self._emit = connection.emit
        self._stopping = False
        self._timer = StepTimer()
        self._replica_or_none: TrainingReplica | None = None

    @classmethod
    def connect(cls, invite: str, options: SessionOptions | None = None, device: str = "cpu") -> Session:
        """Join the run without a model, to learn its run file; ``start`` comes next.

        ``device``: name of the torch device, for other members to read. Raises as ``join``.
        """
        return cls(RunConnection(invite, options or SessionOptions(), device))

    @classmethod
    def join(
        cls,
        invite: str,
        *,
        model: nn.Module,
        inner_optimizer: Optimizer | None = None,
        options: SessionOptions | None = None,
    ) -> Session:
        """Join the run and load its anchor into the model.

        ``invite``: the URL that the host printed; ``model``: on its device, with float32 parameters; the order, names
        and shapes of its trainable ones must be the run's; ``inner_optimizer``: over the model's parameters, required
        by the algorithm ``diloco``. Blocks until the state is here.

        Raises ``UserError`` for an invite, options or an optimizer that do not fit, ``Unreachable`` if no coordinator
        answers, ``NotAdmitted`` if it refuses this peer, ``ModelMismatch`` if the model is not the run's, ``RunEnded``.
        """
        device = next(model.parameters()).device
        session = cls.connect(invite, options, str(device))
        try:
            session.start(TrainingSetup(model, inner_optimizer))
        except BaseException:
            session.close()
            raise
        return session

    def start(self, setup: TrainingSetup) -> None:
        """Agree with the run on model and data, and load the anchor into the model.

        Raises ``ModelMismatch``, ``CorpusError`` if the data is not the run's, ``Interrupted``, and ``UserError`` for
        the run of a pipeline.
        """
        if self.run_file.pipeline is not None:
            raise UserError(
                f"the run {self.invite.run!r} has a [pipeline], whose members each hold a part of the model: join it "
                f"with `shoal join` instead of a training loop of your own"
            )
        connection = self._connection
        self._replica_or_none = connection.replica(self._member, setup, connection.folder, self._emit)
        self._replica.register(setup.data)
        self._replica.sync_state()

    @property
    def samples(self) -> LeasedSamples:
        """Samples that this peer has leased and done; after ``start``."""
        return self._replica.samples

    @property
    def _replica(self) -> TrainingReplica:
        assert self._replica_or_none is not None, "start() comes first"
        return self._replica_or_none

    # The loop -----------------------------------------------------------------------------------------------

    def batches(self, dataset: Dataset) -> Iterator[Any]:
        """Iterate over batches of the samples leased to this peer, until the run ends or ``request_stop``.

        ``dataset``: map-style (``len`` and ``[i]``), the same on every peer. ``torch.utils.data.default_collate`` makes
        batches, or the dataset's own ``batch(indices)`` with (b,) int64 indices. A batch has ``inner.batch_samples``
        samples or fewer. Raises ``CorpusError`` if the data is not the run's, ``UserError`` if ``step`` was not called
        after a batch, ``Diverged``, and the error that ended the connection.
        """
        replica, samples, length = self._replica, self._replica.samples, len(dataset)
        if replica.recipe_config is None:
            about = f"{length} samples"
            replica.describe(DataAbout(fingerprint(dataset), about, replica.tokens_per_sample, length))
        order = run_order(self.run_file, length, replica.tokens_per_sample)
        while self._next_range():
            while (bounds := samples.next_batch(self.run_file.inner.batch_samples)) is not None:
                self._timer.start()
                yield take_batch(dataset, order.indices(*bounds))
                if samples.in_hand:
                    raise UserError("session.step(loss) was not called after a batch of session.batches(): call it")
                if self._stopping or self.view.phase == "ended":
                    break

    def step(self, loss: Tensor) -> None:
        """Take the inner step after ``loss.backward()``, and close the round when it is due.

        ``loss``: (), mean over the batch, on any device. Raises ``Diverged`` and the error that ended the connection.
        """
        replica = self._replica
        samples = replica.samples.finish_batch(loss)
        view = self.view
        factor = run_lr_factor(self.run_file, view.tokens_committed + view.tokens_in_round)
        replica.step(samples, factor)
        self._timer.stop(samples * replica.tokens_per_sample)
        self.report_progress()
        if replica.verdict_is_known:
            self._run_round(replica.conclude_round)
        if self._is_due(self._timer.step_s):
            self._run_round(replica.close_round)

    @property
    def view(self) -> RunView:
        """Newest view of the run from the coordinator, immutable. Raises the error that ended the connection."""
        failure = self._network.failure
        if failure is not None:
            raise failure
        return self._member.client.view

    def snapshot(self) -> Snapshot:
        """Return plain values of this session's present state; from any thread."""
        return take_snapshot(self._member, self.view, self.peer, self.device)

    def request_stop(self) -> None:
        """Make ``batches`` end soon. A closing round is finished first; otherwise unfinished samples go to other peers.

        Safe in signal handlers and from any thread.
        """
        self._stopping = True
        self._network.interrupt()

    def close(self) -> None:
        """Write a checkpoint, leave the run and end the network thread."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        try:
            if self._replica_or_none is not None and self._network.failure is None:
                self._replica.save_checkpoint()
                self._emit_left(self._replica)
        finally:
            self._connection.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._replica_or_none is not None and self._replica.exchanging:
            self._run_round(self._replica.conclude_round)  # the other members wait for this peer's contribution
        self._close(error)

    # Work ---------------------------------------------------------------------------------------------------

    def _next_range(self) -> bool:
        """Wait for leased samples to train on; returns False at the run's end."""
        batch = self.run_file.inner.batch_samples
        while (readiness := self.settle()) is not Readiness.OVER:
            if readiness is Readiness.NOT_YET:
                continue
            if self._replica.samples.left:
                return True
            per_lease = self._timer.tokens_per_s * self._member.client.deadlines.lease_s
            self.fetch_lease(max(1, round(per_lease / self._replica.tokens_per_sample / batch)) * batch)
        return False

    def settle(self) -> Readiness:
        """Do one thing that goes before local work, if any: conclude a round, close one that is due, or resync.

        Raises ``Diverged``, ``Interrupted``, and the error that ended the connection.
        """
        view, replica = self.view, self._replica
        if replica.verdict_is_known or (replica.exchanging and (self._stopping or view.phase == "ended")):
            return self._run_round(replica.conclude_round)
        rejoined = self._member.rejoined
        match attention([view], lambda _: self._is_due(self._least_s()), rejoined=rejoined, stopping=self._stopping):
            case Attention.ENDED:
                # Other peers may still fetch the round's results from this one.
                self._network.call(self._member.wait_for_change(self._member.client.deadlines.heartbeat_s))
                return Readiness.OVER
            case Attention.RESYNC:
                replica.resync("the coordinator had removed this peer" if rejoined else "its state is not the run's")
                return Readiness.NOT_YET
            case Attention.ROUND:
                return self._run_round(replica.close_round)
        return Readiness.OVER if self._stopping else Readiness.READY

    def fetch_lease(self, samples: int) -> None:
        """Lease about so many samples; if there are none now, wait a little."""
        try:
            follows = self.options.role == "validator"
            leased = () if follows else self._network.call(self._member.lease(samples), interruptible=True)
            for one in leased:
                self._replica.samples.add_lease(one.start, one.stop)
            if not leased:
                self._member.progress.activity = "following" if follows else "waiting"
                self.wait_for_change()
        except Interrupted:
            log.debug("no further lease, because this session stops")

    def wait_for_change(self) -> None:
        """Wait until the round or its phase changes, at most half a second and not beyond the round's closing.

        Raises ``Interrupted`` after ``request_stop``.
        """
        closes_at_s = self._member.client.closes_at_s
        left_s = 0.5 if closes_at_s is None else closes_at_s - time.monotonic()
        self._network.call(self._member.wait_for_change(min(0.5, max(0.02, left_s))), interruptible=True)

    def report_progress(self) -> None:
        """Update the progress that the next heartbeats report."""
        progress = self._member.progress
        progress.activity = "training"
        progress.tokens_done = self._replica.samples.tokens_done
        progress.tokens_per_s = self._timer.tokens_per_s
        progress.step_s = self._timer.step_s
        progress.loss = self._replica.samples.recent_loss()

    def _is_due(self, step_s: float) -> bool:
        """Return whether the round has to be closed here, because a step of ``step_s`` does not fit any more."""
        replica = self._replica
        return is_due(
            self.view,
            self._member.client.closes_at_s,
            time.monotonic(),
            step_s,
            round_number=replica.round,
            exchanging=replica.exchanging,
        )

    def _least_s(self) -> float:
        asks = self.options.role != "validator" and self.run_file.algorithm != "virtual_batch"
        unknown_s = self._member.client.deadlines.first_step_s
        return least_s(self._replica.samples.left, self._timer.step_s, unknown_s, may_ask=asks)

    def _run_round(self, on_round: Callable[[], object]) -> Readiness:
        """Close or conclude a round; OVER if this peer stops without waiting for its end."""
        try:
            on_round()
        except Interrupted:
            return Readiness.OVER
        finally:
            self._timer.reset()
        return Readiness.NOT_YET

    def _emit_left(self, replica: TrainingReplica) -> None:
        meter, state = self._member.node.meter, replica.state
        self._emit(
            "left",
            bytes_sent=meter.sent_bytes,
            bytes_received=meter.received_bytes,
            anchor_version=state.version if state else None,
            digest=state.digest.hex() if state else None,
            tokens_trained=replica.samples.tokens_trained,
        )


class StepTimer:
    """Speed of this peer's steps, smoothed over recent ones, without the time between steps.

    Call ``start`` when a batch is handed out and ``stop`` when its step is done.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step_s = 0.0
        self.tokens_per_s = 0.0
        self._clock = clock
        self._started_s: float | None = None

    def start(self) -> None:
        self._started_s = self._clock()

    def stop(self, tokens: int) -> None:
        """End a step of ``tokens`` tokens."""
        if self._started_s is None:
            return
        seconds = max(self._clock() - self._started_s, 1e-6)
        self._started_s = None
        share = 1.0 if self.step_s == 0.0 else _SMOOTHING
        self.step_s += share * (seconds - self.step_s)
        self.tokens_per_s += share * (tokens / seconds - self.tokens_per_s)

    def reset(self) -> None:
        """Drop a step that was begun; the averages stay."""
        self._started_s = None
