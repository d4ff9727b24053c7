"""This peer's replica of the run's model, or of one stage: its state, the local work on it, and its rounds.

It lives on the training thread; its ``LocalMember`` does everything asynchronous on the network thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.compression.formats import CodecError
from shoal.peer.checkpoints.checkpoint import Checkpoint
from shoal.peer.checkpoints.checkpointer import Checkpointer, CheckpointSubject
from shoal.peer.checkpoints.local_state import OptimizerState, local_state_tree
from shoal.peer.checkpoints.manifest import StageAbout
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.history.catch_up import RoundApplier, RoundCatchUp, roll_forward
from shoal.peer.history.history_file import HISTORY_FILE
from shoal.peer.member.member import LocalMember
from shoal.peer.network_thread import Interrupted, NetworkThread
from shoal.peer.state_transfer.acquire import LocalCandidates
from shoal.peer.training.algorithms import LocalWork, OwnLoop, local_work
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.data import DataAbout, LeasedSamples
from shoal.peer.training.deferred_copy import DeferredCopy
from shoal.peer.training.divergence import Divergence
from shoal.peer.training.parameters import MasterWeights, ParameterVector, frozen_parameters
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.outcome import (
    Aborted,
    CarriedResidual,
    Committed,
    Resync,
    RoundOffer,
    RoundOutcome,
)
from shoal.swarm.errors import CorpusError, NotAdmitted, StateFileError
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import MAX_KEPT, KeptState

if TYPE_CHECKING:  # torch.distributed is slow to import
    from shoal.peer.island.ranks import IslandLead

log = logging.getLogger(__name__)


class LocalState:
    """State of this peer beside the run's, saved in its checkpoints: optimizer, buffers, random state, counters and
    the averager's residual. Used on the training thread."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerState | None, samples: LeasedSamples, member: LocalMember
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._samples = samples
        self._member = member
        self._hook: RemovableHandle | None = None

    def tree(self) -> dict[str, Any]:
        """Return all of it but the residual, by reference, see ``local_state_tree``."""
        return {**local_state_tree(self._optimizer, self._model), **self._samples.counters()}

    def carried(self) -> CarriedResidual:
        """Return the averager's residual by reference."""
        return self._member.averager.round_feedback.carried

    def complete_before_step(self, copying: DeferredCopy) -> None:
        """Have a copy of the tree's tensors completed before the next step of the optimizer, which changes them, unless
        nobody has a use for it any more by then. The tree of an island has copies already."""
        if self._hook is not None:
            self._hook.remove()
        if isinstance(self._optimizer, Optimizer):
            unfinished = ref(copying)

            def complete(*_: object) -> None:
                if (one := unfinished()) is not None:
                    one.complete()

            self._hook = self._optimizer.register_step_pre_hook(complete)

    def take_up(self, checkpoint: Checkpoint, state: AnchorState) -> bool:
        """Restore the local state of a checkpoint of this peer; returns whether the residual was restored, too.

        Optimizer, buffers and random state are restored even if the run's ``state`` is some rounds ahead of them. The
        residual is restored only with the checkpoint's own state, before a further round is planned: else a mean may
        contain it already.
        """
        own = checkpoint.own
        if own is None or checkpoint.manifest.peer != self._member.client.peer:
            return False
        try:
            self._samples.restore_counters(own.restore(self._optimizer, self._model))
            if state is not checkpoint.state or self._member.client.view.plan is not None:
                return False
            if self._member.averager.reveal_record.has_spent(state.digest):
                return False  # it has left masked since, in a round that came to nothing
            return self._member.averager.round_feedback.restore(own.restore_residual)
        except (StateFileError, CodecError) as error:
            log.warning("this peer goes on without what the checkpoint has of its own: %s", error)
            return False


Emit = Callable[..., None]


@dataclass(frozen=True)
class TrainingSetup:
    """Model, optimizer and data that a member brings to the run.

    ``inner_optimizer``: required by the algorithm ``diloco``; ``data``: may be given to ``TrainingReplica.describe``
    later; ``recipe_config``: None for a training loop of one's own, whose settings are ``own_loop``; ``make_work``:
    makes other local work than the algorithm's; ``on_committed``: called with the outcome of every committed round
    once the local work goes on from its anchor; ``stage``: the pipeline's stage that the model is; ``build``: builds
    the model as it is at the run's start; ``divergence``: shared by all stages of a peer; ``masters``: of the model's
    low-precision parameters, which ``inner_optimizer`` is over; ``island``: the ranks over which the model is spread.
    """

    model: nn.Module
    inner_optimizer: Optimizer | None = None
    data: DataAbout | None = None
    recipe_config: dict[str, Any] | None = None
    own_loop: OwnLoop = field(default_factory=OwnLoop)
    make_work: Callable[[ParameterVector], LocalWork] | None = None
    on_committed: Callable[[Committed], None] | None = None
    stage: StageAbout | None = None
    build: Callable[[], nn.Module] | None = None
    divergence: Divergence = field(default_factory=Divergence)
    masters: MasterWeights | None = None
    island: IslandLead | None = None


@dataclass(eq=False)
class _Exchange:
    """Contribution to ``round`` that is being averaged on the network thread, to which the state belongs meanwhile.

    After the verdict of a committed round a worker thread steps the state, under ``stepping``, unless the training
    thread has withdrawn (``is_withdrawn``) before; ``stepped``: the next state and the verdict that made it."""

    round: int
    stepping: threading.Lock = field(default_factory=threading.Lock)
    is_withdrawn: bool = False
    stepped: tuple[AnchorState, Verdict] | None = None
    outcome: futures.Future[RoundOutcome] = field(default_factory=futures.Future)


class TrainingReplica:
    """Replica of the run's model, or of one stage, on this peer; call ``register``, then ``sync_state``, first.

    ``round``: round that the local work is for; with ``averaging.overlap`` the one after that which is being averaged;
    ``clock``: what the training thread spends its time on.
    """

    def __init__(
        self,
        run: RunFile,
        setup: TrainingSetup,
        network: NetworkThread[Any],
        member: LocalMember,
        folder: Path,
        store: CheckpointStore | None,
        emit: Emit,
    ) -> None:
        """``member``: membership in the run or the stage, on ``network``; ``folder``: for records, history and an
        unfinished download; ``store``: checkpoints, None to keep none.

        Raises ``ModelMismatch`` or ``UserError`` for a model or an optimizer that no run can have.
        """
        self._island = setup.island
        optimizer: OptimizerState | None = setup.inner_optimizer
        if self._island is None:
            self.vector = ParameterVector(setup.model, setup.masters)
        else:
            self.vector = vector = self._island.vector(setup.model, setup.masters)
            if setup.inner_optimizer is not None:
                optimizer = self._island.optimizer(setup.inner_optimizer, vector)
        self._frozen = frozen_parameters(setup.model)
        self.tokens_per_sample = (setup.data.tokens_per_sample if setup.data else run.data.tokens_per_sample) or 1
        self.samples = LeasedSamples(self.tokens_per_sample)
        make_work, inner = setup.make_work, setup.inner_optimizer
        own_loop = setup.own_loop if setup.recipe_config is None else None
        self.own_work = make_work(self.vector) if make_work else local_work(run, self.vector, inner, own_loop)
        """This process's part of the local work, which ``work`` has all ranks of an island do."""
        self.work = self.own_work if self._island is None else self._island.work(self.own_work)
        self._on_committed = setup.on_committed
        self._build = setup.build
        self._divergence, self._stage = setup.divergence, setup.stage
        self.round = 0
        self.clock = member.clock
        self.recipe_config = setup.recipe_config
        self._run = run
        self._folder = folder
        self._applier = RoundApplier(run, self.vector.layout)
        self._network = network
        self._member = member
        self._missed: RoundCatchUp = self._member.missed_rounds(self._applier)
        self._start = member.start.state_of(self.vector.layout) if member.start is not None else None
        self._emit = emit
        self._exchange: _Exchange | None = None
        self._warned_of_first_state = False
        self._state: AnchorState
        self._verdict: Verdict | None = None
        """Verdict of the round that made the state, if known."""
        self._own = LocalState(setup.model, optimizer, self.samples, self._member)
        subject = self._subject(setup.stage)
        member.kept_states = self._kept_states
        self._checkpointer: Checkpointer | None = None
        if store is not None:
            own = self._own
            before_step = own.complete_before_step if run.averaging.overlap else None
            self._checkpointer = Checkpointer(store, network, subject, own.tree, own.carried, before_step=before_step)

    @property
    def state(self) -> AnchorState | None:
        """State held now; None before ``sync_state``."""
        return getattr(self, "_state", None)

    def register(self, data: DataAbout | None) -> None:
        """Agree with the run on model and data, keep its history from now on, and prepare averaging; once.

        Raises as ``describe``.
        """
        self.describe(data)
        self._network.post(lambda: self._member.keep_history(self._folder / HISTORY_FILE))
        self._member.prepare_averaging(self.vector.layout)

    def describe(self, data: DataAbout | None) -> None:
        """Agree with the run on the model and on ``data``.

        Raises ``ModelMismatch``, which names the first difference to the run's model, or ``CorpusError``, which also
        describes the data of this machine.
        """
        model = PeerToCoordinatorDescribeModel(
            layout=self.vector.layout,
            corpus_digest=data.digest if data else None,
            tokens_per_sample=self.tokens_per_sample,
            samples=data.samples if data else None,
            frozen=self._frozen,
        )
        if self._run.pins is not None and self._stage is None:  # do not rely on the coordinator's check
            self._run.pins.check_model(model)
        try:
            self._network.call(self._member.describe(model), interruptible=True)
        except CorpusError as error:
            raise CorpusError(f"{error}\n  here: {data.about if data else 'no data'}") from error

    def sync_state(self, *, afresh: bool = False) -> None:
        """Obtain the run's current state and restart the local work from it.

        It comes from this peer's own states, from those and the rounds that it missed, or from other peers. ``afresh``:
        the state held is not the run's, so no checkpoint's local state is restored. Raises ``Interrupted``.
        """
        self._member.progress.activity = "syncing"
        self.clock.train("waiting")
        if self._checkpointer is not None:  # it may be reading what is going to be replaced
            self._checkpointer.wait_for_writing()
        own = self._candidates(is_first=not afresh)
        shape, folder = (1 + self._run.outer.slots, self.vector.elements), self._folder / "incoming"
        rounds_before, before = self._missed.rounds, self.state
        self._state = self._network.call(
            self._member.agreed_state(own, shape, folder, self._emit, self._missed, self._start), interruptible=True
        )
        if before is not None and _is_undone(before, self._state):
            self._member.averager.round_feedback.forget()
        found = None if afresh else own.checkpoint
        view = self._member.client.view
        self._verdict = view.verdict if view.anchor_version == self._state.version else None
        if view.verdict is not None:
            self._note_verdict(view.verdict)
        carries = found is not None and self._own.take_up(found, self._state)
        self.work.restart_from(self._state.anchor)
        self._note_anchor()
        self._enter_round(view.round)
        self.clock.end_round()
        self._emit(
            "synced",
            anchor_version=self._state.version,
            digest=self._state.digest.hex(),
            residual=carries,
            checkpoint=found.manifest.round if found else None,
            caught_up=self._missed.rounds - rounds_before,
        )

    def resync(self, reason: str, bad: KeptState | None = None) -> None:
        """Drop the local work and begin again from the run's current state.

        A round that is being averaged is concluded first. ``reason``: for people; ``bad``: state whose local work
        diverges, which the coordinator is asked about, see ``recover_from_divergence``. Raises ``Interrupted``,
        ``Diverged``.
        """
        if self.exchanging and not self.conclude_round():
            return
        log.warning("dropping the local work and starting again from the anchor: %s", reason)
        self._emit("resync", reason=reason)
        self.samples.drop_all()
        if self._checkpointer is not None:
            self._checkpointer.wait_for_residual()
        self._network.call(self._member.rejoin_without_work(), interruptible=True)
        if bad is not None:
            self._await_rollback(bad)
        self.sync_state(afresh=True)

    def recover_from_divergence(self, reason: str) -> None:
        """Drop local work that is infinite or not a number, and ``resync``.

        After several times in a row ask the coordinator whether it is so for all: raises ``Diverged`` unless the run
        goes back to an earlier state, and ``Interrupted``.
        """
        number = self._stage.number if self._stage is not None else None
        bad = self._divergence.note_failure(number, self._state, reason)
        if bad is not None and self._stage is not None:  # a pipeline does not go back because of one stage
            raise self._divergence.as_error("")
        self.work.reset_optimizer()
        self.resync(reason, bad)

    def _await_rollback(self, bad: KeptState) -> None:
        """Wait until the run goes back to a state before ``bad``; raises ``Diverged`` if it does not."""
        log.warning(
            "the local work from anchor version %d diverges: asking the coordinator whether it does for all peers",
            bad.anchor_version,
        )
        self._emit("diverged", anchor_version=bad.anchor_version, digest=bad.digest.hex())
        self._member.progress.activity = "diverged"
        own = self._candidates(is_first=False)
        word = self._network.call(self._member.ask_about_divergence(bad, own.kept_states), interruptible=True)
        if word != "go on":
            raise self._divergence.as_error(word)
        self._divergence.clear()
        self._member.averager.round_feedback.forget()  # the residual of undone rounds may have diverged, too

    def step(self, samples: int, lr_factor: float) -> None:
        """Take a local step with the gradients at the model's parameters, those of a mean loss over ``samples``.

        Gradients of no samples, whose lease is lost, are dropped.
        """
        if samples:
            self.work.step(samples, lr_factor)
        else:
            if self._island is not None:
                self._island.drop_gradients()
            self.vector.drop_gradients()

    def count_trained(self, start: int, stop: int, loss: Tensor | None) -> None:
        """Count samples whose gradients are in ``work``, in a pipeline. ``loss``: their mean, () float32, if known."""
        self.samples.count_trained(start, stop, loss)

    # Rounds -------------------------------------------------------------------------------------------------

    @property
    def exchanging(self) -> bool:
        """Whether a round that was closed here is not concluded yet."""
        return self._exchange is not None

    @property
    def verdict_is_known(self) -> bool:
        """Whether ``conclude_round`` would return without waiting."""
        return self._exchange is not None and self._exchange.outcome.done()

    def close_round(self) -> None:
        """Contribute the local work to the round and conclude it. With ``averaging.overlap`` only the exchange begins;
        the caller concludes it later and trains for the next round meanwhile. Raises ``Interrupted``, ``Diverged``."""
        if self.begin_exchange() and not self._run.averaging.overlap:
            self.conclude_round()

    def begin_exchange(self) -> bool:
        """Offer the local work to the round; ``conclude_round`` comes next.

        Peers of a pipeline do this for all their stages before they conclude any, because rounds of stages end
        together. Returns False if the local work was dropped instead. Raises ``Interrupted``, ``Diverged``.
        """
        if self.exchanging and not self.conclude_round():
            return False
        with self.clock.training("packing"):
            self._begin_exchange()
        return True

    def _begin_exchange(self) -> None:
        self._member.progress.activity = "ready"
        contribution = self.work.contribution(self._state.anchor)
        tokens, samples, loss = self.samples.tokens_done, self.samples.done_ranges(), self.samples.mean_loss()
        state = self._state
        if self._checkpointer is not None:
            with self.clock.training("checkpoint"):
                self._checkpointer.wait_for_residual()
        version, digest, first = state.version, state.digest, self.samples.first_batch()
        offer = RoundOffer(self.round, version, digest, contribution, tokens, samples, loss, first)
        exchange = self._exchange = _Exchange(self.round)
        exchange.outcome = self._network.submit(self._member.average(offer, partial(self._step, exchange, state)))
        if self._checkpointer is not None:
            with self.clock.training("checkpoint"):
                self._checkpointer.begin(self.round)
        self.samples.offer_to_round()
        if self._run.averaging.overlap:
            self._enter_round(self.round + 1)

    def conclude_round(self) -> bool:
        """Wait for the verdict of the closed round and apply it; returns False if the local work was dropped.

        Raises ``Interrupted``, ``Diverged``, and ``NotAdmitted`` if the stage was given to another peer.
        """
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "begin_exchange() comes first"
        client = self._member.client
        try:
            # Only while the coordinator is away a peer may leave without the verdict, which may take long to come.
            with self.clock.training(None):
                outcome = self._network.wait_for(exchange.outcome, interruptible=lambda: client.coordinator_is_away)
        except BaseException as error:
            self._withdraw(exchange)
            if isinstance(error, Interrupted | NotAdmitted):
                self._discard_checkpoint()
                self._keep_work(exchange.round, Aborted("stopped"))
            raise
        if not isinstance(outcome, Committed):
            self._discard_checkpoint()
        match outcome:
            case Committed():
                self._withdraw(exchange)
                with self.clock.training("applying"):
                    self._go_on(outcome)
            case Aborted():
                self._keep_work(exchange.round, outcome)
            case Resync(is_unusable=True):
                self.recover_from_divergence(outcome.reason)
            case Resync():
                self.resync(outcome.reason)
        return not isinstance(outcome, Resync)

    def _keep_work(self, offered_round: int, outcome: Aborted) -> None:
        if outcome.is_spent:
            self.samples.drop_offered()
            self.work.restart_from(self._state.anchor)
            self._note_anchor()
        else:
            self.samples.take_back()
        if outcome.verdict is None:
            self._enter_round(offered_round)
        else:
            if self._run.pipeline is not None:  # every round has a batch of its own, which is driven again
                self.samples.drop_all()
                self.work.restart_from(self._state.anchor)
            self._note_verdict(outcome.verdict)
            self._enter_round(outcome.verdict.round + 1)
            self._emit("aborted", round=outcome.verdict.round, reason=outcome.reason)

    async def _step(self, exchange: _Exchange, state: AnchorState, outcome: Committed) -> AnchorState:
        """Overwrite the state by the one after a committed round, on the network thread's worker threads."""

        def apply() -> AnchorState:
            with exchange.stepping:
                if exchange.is_withdrawn:
                    raise Interrupted
                following = self._applier.apply(state, outcome.verdict, outcome.mean)
                exchange.stepped = following, outcome.verdict
                return following

        return await in_thread(apply)

    def _withdraw(self, exchange: _Exchange) -> None:
        """Take the state back from an exchange, as it is: stepped already, or not to be stepped any more."""
        with exchange.stepping:
            exchange.is_withdrawn = True
        if exchange.stepped is not None:
            self._state, self._verdict = exchange.stepped

    def _go_on(self, outcome: Committed) -> None:
        """Go on from the state after a committed round."""
        verdict = outcome.verdict
        assert self._state.version == verdict.anchor_version, "the exchange has stepped it"
        self.work.continue_from(self._state.anchor)
        if outcome.included:
            self.samples.drop_offered()
            self._divergence.clear()
        else:
            self.samples.take_back()
        self._note_anchor()
        if self._on_committed is not None:
            self._on_committed(outcome)
        self._enter_round(verdict.round + 1)
        self._network.post(self._member.request_heartbeat)
        self._note_verdict(verdict)
        with self.clock.training("checkpoint"):
            if self._divergence.is_doubtful:  # keep the older checkpoints, which the run may go back to
                self._discard_checkpoint()
            elif self._checkpointer is not None:
                self._checkpointer.commit(self._state, verdict)
        self._emit(
            "committed",
            round=verdict.round,
            anchor_version=verdict.anchor_version,
            loss=verdict.loss,
            tokens=verdict.tokens_total,
            members=len(verdict.plan.members) if verdict.plan else 0,
            included=outcome.included,
            digest=self._state.digest.hex(),
            bytes_sent=self._member.node.meter.sent_bytes,
            bytes_received=self._member.node.meter.received_bytes,
        )

    def _note_anchor(self) -> None:
        """Note that local work begins at the anchor, where that is known.

        With ``overlap`` it goes on from before; in an own loop a batch may have been computed before the step of the
        one before it; and gradients are computed again as a whole."""
        is_known = self.recipe_config is not None and not self._run.averaging.overlap
        if is_known and self._run.pipeline is None and self._run.algorithm != "virtual_batch":
            self.samples.restart_from_anchor()

    def _enter_round(self, number: int) -> None:
        self.round = number
        progress = self._member.progress
        progress.tokens_done = self.samples.tokens_done
        progress.round = number

    # Checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Cancel a round that is being averaged and write a checkpoint of the state, if there is a whole one."""
        if self._exchange is not None:
            self._exchange.outcome.cancel()
            self._withdraw(self._exchange)
        if self._checkpointer is not None and self.state is not None and self.state.is_current:
            self._network.call(self._member.averager.until_idle())  # within a round the residual is in use
            self._checkpointer.save_final(self._state, self._verdict)

    def _roll_forward(self, state: AnchorState, newest: int) -> AnchorState:
        """Bring a state up to version ``newest`` by the records of rounds on the disk, as far as they lead."""
        found = roll_forward(state, self._member.records, self._applier, newest)
        if found.version != state.version:
            log.info("applied the recorded rounds from version %d to %d", state.version, found.version)
        return found

    def _candidates(self, *, is_first: bool) -> LocalCandidates:
        start = self._start
        if start is not None:
            make, digest = (start.read if start.is_here else None), start.digest
        else:  # a model that has trained must be built anew for its initial values
            make, digest = (self._initial_state if is_first or self._build else None), None
        return LocalCandidates(self._checkpointer, make, self._roll_forward, is_first=is_first, initial_digest=digest)

    def _initial_state(self) -> AnchorState:
        vector = ParameterVector(self._build()) if self._build else self.vector
        state = AnchorState.first(vector, self._run.outer.slots)
        pins = self._run.pins
        if pins is not None and pins.state not in (None, state.digest.hex()) and not self._warned_of_first_state:
            self._warned_of_first_state = True
            log.warning(
                "this machine builds the model with another first state than the run file pins, as with another "
                "version of PyTorch or of the recipe; the pinned state has to come from another peer"
            )
        return state

    def _kept_states(self) -> tuple[KeptState, ...]:
        """Return the states of this peer's checkpoints, newest first, without reading the disk."""
        stored = self._checkpointer.store.kept() if self._checkpointer is not None else ()
        return tuple(KeptState(anchor_version=one.anchor_version, digest=one.digest) for one in stored[:MAX_KEPT])

    def _discard_checkpoint(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.discard()

    def _note_verdict(self, verdict: Verdict) -> None:
        if self._checkpointer is not None:
            self._checkpointer.add_verdict(verdict)

    def _subject(self, stage: StageAbout | None) -> CheckpointSubject:
        client = self._member.client
        layout, slots = self.vector.layout, self._run.outer.slots
        return CheckpointSubject(
            self._run, client.run_toml, self.recipe_config, layout, slots, client.coordinator_key, stage
        )


def _is_undone(before: AnchorState, now: AnchorState) -> bool:
    """Return whether the run has gone back, so that the residual is of rounds that are undone."""
    return now.version <= before.version and now.digest != before.digest
