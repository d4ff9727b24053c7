"""Session: a member of a run for training loops of one's own. ``shoal join`` is built on it.

::

    with Session.join(invite, model=model, inner_optimizer=optimizer) as session:
        for batch in session.batches(dataset):
            loss = loss_fn(model, batch)
            loss.backward()
            session.step(loss)

``stepped`` is for loops that step their optimizer themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.peer.member.connection import RunConnection
from shoal.peer.member.member import LocalMember
from shoal.peer.member.replica import TrainingReplica, TrainingSetup
from shoal.peer.member.round_deadline import Attention, attention, is_due, least_s
from shoal.peer.network_thread import Interrupted, NetworkThread
from shoal.peer.options import SessionOptions
from shoal.peer.terminal.snapshot import Snapshot, take_snapshot
from shoal.peer.training.algorithms import OwnLoop
from shoal.peer.training.data import (
    BatchShare,
    DataAbout,
    Dataset,
    LeasedSamples,
    Order,
    fingerprint,
    not_in_islands,
    prefetch,
    run_order,
    take_batch,
)
from shoal.peer.training.device_streams import Pacer, streams_of
from shoal.peer.training.leased_loader import Collate, LeasedLoader, check_is_no_worker
from shoal.peer.training.lr_schedule import run_lr_factor
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile, ScheduleSection, unused_inner_settings

if TYPE_CHECKING:  # torch.distributed is slow to import
    from torch.distributed.device_mesh import DeviceMesh

    from shoal.peer.island.ranks import FollowingSession, IslandLead

log = logging.getLogger(__name__)

_SMOOTHING = 0.2

_MOST_IN_HAND = 256
"""Batches that a loop may take without a step. Loops fetch ahead and accumulate, and some forget to call ``step``."""


class Readiness(Enum):
    """Readiness of a training loop for local work."""

    READY = "ready"
    NOT_YET = "not yet"
    """A round or a resync went before local work: call ``Session.settle`` again."""
    OVER = "over"
    """The run has ended, or this peer stops."""


class Session:
    """Member of a run, made with ``join``; a context manager that leaves the run at its end.

    Train on ``batches`` and call ``step`` after each, or ``stepped`` after each step of your own. One thread trains;
    ``view``, ``snapshot`` and ``request_stop`` may be used from any thread. ``peer``: this peer's id; ``run_file``: the
    run's validated run file.
    """

    _island: IslandLead | None = None

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
        self._pacer: Pacer
        self._schedule_is_watched = False
        self._replica_or_none: TrainingReplica | None = None

    @classmethod
    def connect(cls, invite: str, options: SessionOptions | None = None, device: str = "cpu") -> Session:
        """Join the run without a model, to learn its run file; ``start`` comes next.

        ``device``: name of the torch device, for other members to read. Raises as ``join``.
        """
        check_is_no_worker()
        return cls(RunConnection(invite, options or SessionOptions(), device))

    @overload
    @classmethod
    def join(
        cls,
        invite: str,
        *,
        model: nn.Module,
        inner_optimizer: Optimizer | None = None,
        options: SessionOptions | None = None,
        clip_norm: float | None = None,
        island: None = None,
    ) -> Session: ...

    @overload
    @classmethod
    def join(
        cls,
        invite: str,
        *,
        model: nn.Module,
        inner_optimizer: Optimizer | None = None,
        options: SessionOptions | None = None,
        clip_norm: float | None = None,
        island: DeviceMesh,
    ) -> Session | FollowingSession: ...

    @classmethod
    def join(
        cls,
        invite: str,
        *,
        model: nn.Module,
        inner_optimizer: Optimizer | None = None,
        options: SessionOptions | None = None,
        clip_norm: float | None = None,
        island: DeviceMesh | None = None,
    ) -> Session | FollowingSession:
        """Join the run and load its anchor into the model.

        ``invite``: the URL that the host printed; ``model``: on its device; the order, names and shapes of its
        trainable parameters must be the run's; ``inner_optimizer``: over the model's parameters, required by the
        algorithm ``diloco``; its learning rates are yours to change, and the run's schedule is ``lr_factor``;
        ``clip_norm``: norm to which ``step`` clips the gradients, by default none; ``island``: mesh of all ranks of
        ``torch.distributed``, which call this together and are one member: see ``loss_weight``. Rank 0 has the session,
        and the others get one that follows it. Blocks until the state is here.

        Raises ``UserError`` for an invite, options or an optimizer that do not fit, ``Unreachable`` if no coordinator
        answers, ``NotAdmitted`` if it refuses this peer, ``ModelMismatch`` if the model is not the run's, ``RunEnded``.
        """
        device, lead = next(model.parameters()).device, None
        if island is not None:
            from shoal.peer.island.group import Island
            from shoal.peer.island.ranks import FollowingSession, IslandLead

            ranks = Island(island)
            if not ranks.leads:
                return FollowingSession(ranks, model, inner_optimizer, own_loop=OwnLoop(clip_norm))
            lead = IslandLead(ranks)
        session = cls.connect(invite, options, str(device))
        try:
            session.start_own_loop(model, inner_optimizer, clip_norm, lead)
        except BaseException:
            session.close()
            raise
        return session

    def start_own_loop(
        self,
        model: nn.Module,
        inner_optimizer: Optimizer | None = None,
        clip_norm: float | None = None,
        island: IslandLead | None = None,
    ) -> None:
        """Agree with the run on the model of an own loop, and load the anchor into it; after ``connect``.

        ``island``: ranks that rank 0, which calls this, leads; other arguments as of ``join``. Raises as ``start``.
        """
        self._warn_of_unused_settings(inner_optimizer)
        self.start(TrainingSetup(model, inner_optimizer, own_loop=OwnLoop(clip_norm), island=island))

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
        self._island = setup.island
        if self._island is not None:
            self._island.introduce(self._member.client.run_toml)
        self._replica_or_none = connection.replica(self._member, setup, connection.folder, self._emit)
        self._pacer = Pacer(streams_of(next(setup.model.parameters()).device))
        self._replica.register(setup.data)
        self._replica.sync_state()
        if self._island is not None:
            self._island.resume(self._lr_factor())

    @property
    def samples(self) -> LeasedSamples:
        """Samples that this peer has leased and done; after ``start``."""
        return self._replica.samples

    @property
    def anchor(self) -> tuple[int, Tensor]:
        """Version and values, (n,) float32, of the anchor that this peer holds; a round overwrites it."""
        state = self._replica.state
        assert state is not None
        return state.version, state.anchor

    @property
    def state_digest(self) -> bytes:
        """Digest of the state that this peer holds, of the anchor and the outer optimizer."""
        state = self._replica.state
        assert state is not None
        return state.digest

    @property
    def is_stopping(self) -> bool:
        """Whether ``request_stop`` was called."""
        return self._stopping

    @property
    def _replica(self) -> TrainingReplica:
        assert self._replica_or_none is not None, "start() comes first"
        return self._replica_or_none

    # The loop -----------------------------------------------------------------------------------------------

    def batches(self, dataset: Dataset) -> Iterator[Any]:
        """Iterate over batches of the samples leased to this peer, until the run ends or ``request_stop``.

        ``dataset``: map-style (``len`` and ``[i]``), the same on every peer. ``torch.utils.data.default_collate`` makes
        batches, or the dataset's own ``batch(indices)`` with (b,) int64 indices. A batch has ``inner.batch_samples``
        samples or fewer. Several may be taken before their step; a sample counts as trained when ``step`` or
        ``stepped`` says so, in the order of the batches. Raises ``CorpusError`` if the data is not the run's,
        ``UserError`` if the steps do not come, ``Diverged``, and the error that ended the connection.
        """
        if self._island is not None:
            self._island.take_over()
        samples, order = self.samples, self._order_of(dataset)
        samples.put_back()
        batch_samples = self.run_file.inner.batch_samples
        while self._next_range(batch_samples):
            prefetch(dataset, order, samples.undone())
            while (bounds := samples.next_batch(batch_samples)) is not None:
                self._member.clock.train("data")
                self._timer.start()
                indices = order.indices(*bounds)
                if self._island is not None:
                    indices = self._island.give_out(indices, self._lr_factor())
                batch = take_batch(dataset, indices)
                self._member.clock.train("compute")
                yield batch
                if self._island is not None:
                    self._island.take_over()
                self._check_steps_come()
                if self._stopping or self.view.phase == "ended":
                    break
        if self._island is not None:
            self._island.resume(self._lr_factor(), loop_ends=True)

    @property
    def loss_weight(self) -> float:
        """Factor on the mean loss of the batch in hand before ``backward()``: 1.0, but for a rank of an island.

        There a batch is this rank's share of one, and shares may differ by a sample, or have none that counts; with the
        factor the mean of all ranks' gradients is that of the whole batch. ``step`` is given the loss without it.
        """
        return 1.0 if self._island is None else self._island.share.weight

    @property
    def share(self) -> BatchShare | None:
        """Share of this rank of an island in the batch in hand; None for others."""
        return None if self._island is None else self._island.share

    def loader(
        self,
        dataset: Dataset,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
    ) -> Iterator[Any]:
        """Iterate as ``batches`` over what torch's ``DataLoader`` makes of the leased samples.

        Each worker loads two batches ahead. ``batch_size``: by default ``inner.batch_samples``; ``num_workers``:
        processes that load samples, started by ``forkserver`` or ``spawn``, so the script must do its work below
        ``if __name__ == "__main__":``, and dataset and ``collate_fn`` must be picklable; ``collate_fn``,
        ``pin_memory``: as of torch. Batches whose lease is lost before the loop gets them are left out. Raises as
        ``batches``, and ``UserError`` for arguments that do not fit.
        """
        self._refuse_in_island("session.loader")
        batch = batch_size if batch_size is not None else self.run_file.inner.batch_samples
        loader = LeasedLoader(
            dataset,
            self._order_of(dataset),
            self.samples,
            self._lease_at_once,
            batch_size=batch,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )
        return self._loaded(loader, batch)

    def _loaded(self, loader: LeasedLoader, batch: int) -> Iterator[Any]:
        self.samples.put_back()
        while self._next_range(batch):
            self._timer.start()
            for one in loader:
                self._member.clock.train("compute")
                yield one
                self._member.clock.train("data")
                self._check_steps_come()
                if self._stopping or self.view.phase == "ended":
                    break
                self._timer.start()

    def counted(self, batches: Iterable[Any], batch_samples: int) -> Iterator[Any]:
        """Iterate over a loop's own ``batches`` of ``batch_samples`` samples, which leases only count.

        For data that has no common order, such as streams: what is in a batch is the loop's business, and the run knows
        how many samples were trained. It ends with the run or with ``batches``. Raises as ``batches``.
        """
        self._refuse_in_island("session.counted")
        self.samples.put_back()
        for batch in batches:
            if not self._next_range(batch_samples):
                return
            self.samples.next_batch(batch_samples)
            self._timer.start()
            self._member.clock.train("compute")
            yield batch
            self._member.clock.train("data")
            self._check_steps_come()

    def _lease_at_once(self, samples: int) -> None:
        """Lease samples for a while, at least ``samples``; none if something goes before local work."""
        if self._stopping or self._can_conclude() or self._member.client.coordinator_is_away:
            return
        if self._attention() is Attention.NOTHING:
            try:
                self._lease(max(samples, self._samples_per_lease(samples)))
            except Interrupted:
                log.debug("no further lease, because this session stops")

    def _order_of(self, dataset: Dataset) -> Order:
        """Agree with the run on the data and return the order of its samples. Raises ``CorpusError``."""
        replica, length = self._replica, len(dataset)
        if replica.recipe_config is None:
            about = f"{length} samples"
            replica.describe(DataAbout(fingerprint(dataset), about, replica.tokens_per_sample, length))
        return run_order(self.run_file, dataset, replica.tokens_per_sample)

    def step(self, loss: Tensor) -> None:
        """Take the inner step after ``loss.backward()``, and close the round when it is due.

        It counts the oldest batch that was not counted yet. ``loss``: (), mean over that batch, on any device. Raises
        ``UserError`` without a batch, ``Diverged`` and the error that ended the connection.
        """
        if self._island is not None:
            self._island.take_over()
            loss = self._island.mean_loss(loss)
        samples = self._replica.samples.finish_batch(loss)
        self._replica.step(samples, self._lr_factor())
        self._note_samples(samples)
        if self._island is not None:
            self._island.resume(self._lr_factor())

    def stepped(self, samples: int, loss: Tensor | float) -> None:
        """Count samples after a step that the loop has taken itself, and close the round when it is due.

        For loops with a ``GradScaler``, with accumulation over several batches, or in frameworks. ``samples``: number
        of samples in the step, the oldest that were not counted yet; call it also for a step that was skipped.
        ``loss``: (), their mean. Raises as ``step``, and ``UserError`` for ``virtual_batch``.
        """
        self._refuse_in_island("session.stepped")
        if self.run_file.algorithm == "virtual_batch":
            raise UserError(
                "session.stepped(samples, loss) is for loops with an optimizer of their own, and the run's algorithm "
                "virtual_batch has none: leave out optimizer, GradScaler and accumulation, and call session.step(loss) "
                "after each loss.backward(), which adds up the gradients of the whole round"
            )
        counted = self._replica.samples.finish(samples, loss)
        self._note_samples(counted)

    def stepped_batches(self, batches: int, loss: Tensor | float) -> None:
        """Count the ``batches`` oldest batches after a step that the loop has taken itself; as ``stepped``.

        For loops that do not see how many samples are in a batch, as where a collator packs them.
        """
        self.stepped(self.samples.samples_in(batches), loss)

    def offer_if_due(self) -> None:
        """Offer the local work to a round that is due, and go on without waiting for the round's end.

        For loops that only read the model for long, as in an evaluation: call it often meanwhile, and ``conclude``
        afterwards. The model stays as it is until then.
        """
        self._refuse_in_island("session.offer_if_due")
        self._timer.pause()
        replica = self._replica
        if not replica.exchanging and self._attention() is Attention.ROUND:
            self._run_round(replica.begin_exchange)

    def conclude(self) -> None:
        """Wait for the end of a round that ``offer_if_due`` has offered work to, and go on from its anchor."""
        if self._replica.exchanging and not self.run_file.averaging.overlap:
            self._run_round(self._replica.conclude_round)

    def _refuse_in_island(self, call: str) -> None:
        if self._island is not None:
            raise not_in_islands(call)

    @property
    def lr_factor(self) -> float:
        """Factor of the run's ``[schedule]`` on the learning rate now, by the tokens of all peers.

        For own loops that follow it: set ``group["lr"] = base_lr * session.lr_factor`` before each step. All ranks of
        an island have the factor that rank 0 had at the last batch or step, as their optimizers take equal steps.
        """
        self._schedule_is_watched = True
        return self._lr_factor() if self._island is None else self._island.lr_factor

    def _lr_factor(self) -> float:
        view, now = self.view, self._member.client.run_now
        of_amended = now.inner.lr / self.run_file.inner.lr
        return run_lr_factor(now, view.tokens_committed + view.tokens_in_round) * of_amended

    def _note_samples(self, samples: int) -> None:
        """Report samples that were counted, and close the round when it is due."""
        replica = self._replica
        self._pacer.note_step()
        self._timer.stop(samples * replica.tokens_per_sample, goes_on=replica.samples.in_hand > 0)
        self.report_progress()
        if replica.verdict_is_known:
            self._run_round(replica.conclude_round)
        if self._is_due(self._timer.step_s):
            self._run_round(replica.close_round)
        if not self._schedule_is_watched:
            self._warn_of_unwatched_schedule(replica)

    def _warn_of_unused_settings(self, inner_optimizer: Optimizer | None) -> None:
        """Warn of settings of the run file that do nothing in an own loop."""
        run = self.run_file
        if unused := unused_inner_settings(run, own_loop=True):
            log.warning(
                "%s of the run file has no effect in a training loop of your own, which brings its optimizer, clipping "
                "and precision itself",
                ", ".join(unused),
            )
        if inner_optimizer is not None and run.algorithm == "virtual_batch":
            log.warning(
                "the inner_optimizer has no effect: the run's algorithm virtual_batch contributes gradients, and its "
                "outer optimizer steps"
            )

    def _warn_of_unwatched_schedule(self, replica: TrainingReplica) -> None:
        """Warn once if the run has a schedule that this own loop does not follow."""
        self._schedule_is_watched = True
        run = self.run_file
        if replica.recipe_config is None and run.algorithm != "virtual_batch" and run.schedule != ScheduleSection():
            log.warning(
                "the run file's [schedule] has no effect, as your loop sets its learning rate itself: to follow it, "
                'set group["lr"] = base_lr * session.lr_factor before each step'
            )

    def _check_steps_come(self) -> None:
        """Raise ``UserError`` for a loop that takes batches and never steps."""
        if self._replica.samples.batches_given > _MOST_IN_HAND:
            raise UserError(
                f"more than {_MOST_IN_HAND} batches of this session were taken without a step: call session.step(loss) "
                "after each batch, or session.stepped(samples, loss) after each step of your own"
            )

    @property
    def view(self) -> RunView:
        """Newest view of the run from the coordinator, immutable. Raises the error that ended the connection."""
        failure = self._network.failure
        if failure is not None:
            raise failure
        return self._member.client.view

    def snapshot(self) -> Snapshot:
        """Return plain values of this session's present state; from any thread."""
        taken = take_snapshot(self._member, self.view, self.peer, self.device)
        return replace(taken, leaving=self._stopping)

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
        can_save = self._island is None or self._island.may_end(error)
        try:
            if self._replica_or_none is not None and self._network.failure is None:
                if can_save:
                    self._replica.save_checkpoint()
                self._emit_left(self._replica)
            if self._island is not None and can_save:
                self._island.end()
        finally:
            self._connection.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._island is not None:
            self._island.take_over()
        if kind is None and self._replica_or_none is not None and self._replica.exchanging:
            self._run_round(self._replica.conclude_round)  # the other members wait for this peer's contribution
        self._close(error)

    # Work ---------------------------------------------------------------------------------------------------

    def _next_range(self, batch: int) -> bool:
        """Wait for leased samples, in batches of ``batch``, to train on; returns False at the run's end.

        Raises ``UserError`` if it would wait for ever, for samples that the loop has in hand.
        """
        self._timer.pause()
        self._member.clock.train("data")
        samples = self._replica.samples
        while (readiness := self.settle()) is not Readiness.OVER:
            if readiness is Readiness.NOT_YET:
                continue
            if samples.left:
                return True
            self.fetch_lease(self._samples_per_lease(batch))
            if not samples.left and samples.in_hand and self.run_file.algorithm == "virtual_batch":
                raise UserError(
                    f"the round waits for {samples.in_hand} samples that this loop has taken and not counted: with the "
                    "algorithm virtual_batch call session.step(loss) after each batch before the next one is taken; "
                    "loops that fetch batches ahead need a run with the algorithm diloco, or session.loader(dataset)"
                )
        return False

    def _samples_per_lease(self, batch: int) -> int:
        """Return the number of samples that this peer trains on during a lease, in batches of ``batch``."""
        per_lease = self._timer.tokens_per_s * self._member.client.deadlines.lease_s
        return max(1, round(per_lease / self._replica.tokens_per_sample / batch)) * batch

    def settle(self) -> Readiness:
        """Do one thing that goes before local work, if any: conclude a round, close one that is due, or resync.

        Raises ``Diverged`` and the error that ended the connection.
        """
        replica = self._replica
        if self._can_conclude():
            return self._run_round(replica.conclude_round)
        self._connection.look_at_amendments()
        match self._attention():
            case Attention.ENDED:
                # Other peers may still fetch the round's results from this one.
                self._network.call(self._member.wait_for_change(self._member.client.deadlines.heartbeat_s))
                with suppress(Interrupted):
                    self._network.call(self._member.serve_after_end(), interruptible=True)
                return Readiness.OVER
            case Attention.RESYNC:
                rejoined = self._member.rejoined
                reason = "the coordinator had removed this peer" if rejoined else "its state is not the run's"
                return self._run_round(lambda: replica.resync(reason))
            case Attention.ROUND:
                return self._run_round(replica.close_round)
        return Readiness.OVER if self._stopping else Readiness.READY

    def _can_conclude(self) -> bool:
        """Return whether a round that was closed here is concluded before anything else."""
        replica = self._replica
        is_over = self._stopping or self.view.phase == "ended"
        return replica.verdict_is_known or (replica.exchanging and is_over)

    def _attention(self) -> Attention:
        rejoined = self._member.rejoined
        return attention(
            [self.view], lambda _: self._is_due(self._least_s()), rejoined=rejoined, stopping=self._stopping
        )

    def fetch_lease(self, samples: int) -> None:
        """Lease about so many samples; if there are none now, wait a little."""
        try:
            if not self._lease(samples):
                self._member.progress.activity = "following" if self._follows else "waiting"
                self.wait_for_change()
        except Interrupted:
            log.debug("no further lease, because this session stops")

    def follow(self) -> None:
        """Wait as ``wait_for_change``, as a member without samples."""
        self._member.progress.activity = "following"
        with suppress(Interrupted):
            self.wait_for_change()

    def _lease(self, samples: int) -> bool:
        """Lease about so many samples; returns whether there were any. Raises ``Interrupted``."""
        if self._follows:
            return False
        mine = self._replica.samples
        leased = self._network.call(self._member.lease(samples, mine.undone()), interruptible=True)
        for one in leased:
            mine.add_lease(one.start, one.stop)
        return bool(leased)

    @property
    def _follows(self) -> bool:
        return self.options.role in ("validator", "follower")

    def wait_for_change(self) -> None:
        """Wait until the round or its phase changes, at most half a second and not beyond the round's closing.

        Raises ``Interrupted`` after ``request_stop``.
        """
        closes_at_s, clock = self._member.client.closes_at_s, self._member.clock
        left_s = 0.5 if closes_at_s is None else closes_at_s - time.monotonic()
        with clock.training("waiting"):
            self._network.call(self._member.wait_for_change(min(0.5, max(0.02, left_s))), interruptible=True)

    def report_progress(self) -> None:
        """Update the progress that the next heartbeats report."""
        progress = self._member.progress
        progress.activity = "training"
        progress.tokens_done = self._replica.samples.tokens_done
        progress.tokens_trained = self._replica.samples.tokens_trained
        progress.tokens_per_s = self._timer.tokens_per_s
        progress.step_s = self._timer.step_s
        progress.loss = self._replica.samples.recent_loss()

    def report_now(self) -> None:
        """Report the progress by a heartbeat at once."""
        self.report_progress()
        self._network.post(self._member.request_heartbeat)

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
        asks = not self._follows and self.run_file.algorithm != "virtual_batch"
        unknown_s = self._member.client.deadlines.first_step_s
        return least_s(self._replica.samples.left, self._timer.step_s, unknown_s, may_ask=asks)

    def _run_round(self, on_round: Callable[[], object]) -> Readiness:
        """Close or conclude a round, or resync; OVER if this peer stops without waiting for the end."""
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

    Call ``start`` when a batch is handed out, ``pause`` when the loop waits for other peers, and ``stop`` when the step
    is done.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step_s = 0.0
        self.tokens_per_s = 0.0
        self._clock = clock
        self._started_s: float | None = None
        self._before_s = 0.0

    def start(self) -> None:
        """Begin a step, or go on with one that was paused."""
        if self._started_s is None:
            self._started_s = self._clock()

    def pause(self) -> None:
        """Stop the clock until the next ``start``."""
        if self._started_s is not None:
            self._before_s += self._clock() - self._started_s
            self._started_s = None

    def stop(self, tokens: int, *, goes_on: bool = False) -> None:
        """End a step of ``tokens`` tokens. ``goes_on``: the next one begins at once, on batches that are in hand."""
        if self._started_s is None:
            return
        self.pause()
        seconds = max(self._before_s, 1e-6)
        self.reset()
        share = 1.0 if self.step_s == 0.0 else _SMOOTHING
        self.step_s += share * (seconds - self.step_s)
        self.tokens_per_s += share * (tokens / seconds - self.tokens_per_s)
        if goes_on:
            self.start()

    def reset(self) -> None:
        """Drop a step that was begun; the averages stay."""
        self._started_s, self._before_s = None, 0.0
