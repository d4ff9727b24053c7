"""This peer's copy of the run, or of one stage: its state, the local work on it, and how a round changes both.

Runs on the training thread; ``member.py`` does everything asynchronous on the network thread."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.compression.codec_map import CodecMap
from shoal.compression.formats import CodecError
from shoal.compression.norms import norms_of
from shoal.peer.checkpoints.checkpoint import Checkpoint
from shoal.peer.checkpoints.checkpointer import Checkpointer, CheckpointSubject
from shoal.peer.checkpoints.local_state import carried_residual, local_state_tree, restore_local_state
from shoal.peer.checkpoints.manifest import StageAbout
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.history.catch_up import RoundApplier, RoundCatchUp, roll_forward
from shoal.peer.history.history_file import HISTORY_FILE
from shoal.peer.member.member import LocalMember
from shoal.peer.network_thread import Interrupted, NetworkThread
from shoal.peer.state_transfer.acquire import LocalCandidates
from shoal.peer.training.algorithms import LocalWork, local_work
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.data import DataAbout, LeasedSamples
from shoal.peer.training.divergence import Divergence
from shoal.peer.training.outer_optimizer import outer_of
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.norm_claims import ranges
from shoal.swarm.averaging.outcome import Aborted, Committed, Outcome, Resync, RoundOffer
from shoal.swarm.errors import CorpusError, NotAdmitted
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import KeptState

log = logging.getLogger(__name__)


class LocalState:
    """State of a training peer that is its own, beside the run's: saved in its checkpoints and restored from them.

    Optimizer, buffers, random state, counters and the averager's residual. Used on the training thread.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, samples: LeasedSamples, member: LocalMember
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._samples = samples
        self._member = member

    def tree(self) -> dict[str, Any]:
        """All of it, by reference: see ``local_state_tree``."""
        carried = self._member.averager.carried
        return {**local_state_tree(self._optimizer, self._model, carried), **self._samples.counters()}

    def take_up(self, checkpoint: Checkpoint, state: AnchorState) -> bool:
        """Go on from it with ``state``, the run's; returns whether the residual came back, too.

        Optimizer, buffers and random state of some rounds ago are better than none. The residual belongs to its state,
        and only where none of it may be in a mean by now."""
        own = checkpoint.own
        if own is None or checkpoint.manifest.peer != self._member.client.peer:
            return False
        restore_local_state(own, self._optimizer, self._model)
        self._samples.restore_counters(own)
        carried = carried_residual(own, state.anchor.numel())
        if carried is None or state is not checkpoint.state or self._member.client.view.plan is not None:
            return False
        try:
            self._member.averager.restore(carried)
        except CodecError as error:
            log.warning("going on without the residual of the checkpoint: %s", error)
            return False
        return True


Emit = Callable[..., None]


@dataclass(frozen=True)
class TrainingSetup:
    """Model, optimizer and data that a member brings to the run.

    ``inner_optimizer``: needed by ``diloco``; ``data``: may come later; ``recipe_config``: None for training loops of
    one's own; ``make_work``: makes local work of another kind than the algorithm's; ``on_mean``: called with every
    committed mean, (n,) float32, and whether our contribution is in it; ``stage``: which stage of a pipeline the model
    is; ``build``: builds the model anew, as it is at the run's start; ``divergence``: this peer's.
    """

    model: nn.Module
    inner_optimizer: Optimizer | None = None
    data: DataAbout | None = None
    recipe_config: dict[str, Any] | None = None
    make_work: Callable[[ParameterVector], LocalWork] | None = None
    on_mean: Callable[[Tensor, bool], None] | None = None
    stage: StageAbout | None = None
    build: Callable[[], nn.Module] | None = None
    divergence: Divergence = field(default_factory=Divergence)


@dataclass(frozen=True)
class _Exchange:
    """Contribution to ``round`` that is being averaged; ``outcome`` is awaited on the network thread."""

    round: int
    outcome: futures.Future[Outcome]


class TrainingReplica:
    """``register`` before anything else. ``round`` is the round that the local work is for: with ``overlap`` the one
    after the round that is being averaged."""

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
        """``member``: of the run, or of the stage whose layers the model is, living on ``network``; ``folder``: of this
        peer in that; ``store``: None to keep no checkpoints.

        Raises ``ModelMismatch`` and ``UserError`` for a model or optimizer that cannot take part."""
        self.vector = ParameterVector(setup.model)
        self.tokens_per_sample = (setup.data.tokens_per_sample if setup.data else run.data.tokens_per_sample) or 1
        self.samples = LeasedSamples(self.tokens_per_sample)
        make_work, inner = setup.make_work, setup.inner_optimizer
        self.work = make_work(self.vector) if make_work else local_work(run, self.vector, inner)
        self._on_mean = setup.on_mean
        self._build = setup.build
        self._divergence, self._stage = setup.divergence, setup.stage
        self.round = 0
        self.recipe_config = setup.recipe_config
        self._run = run
        self._outer = outer_of(run.outer)
        self._folder = folder
        codec_map = CodecMap(run.format_map([(spec.name, spec.shape) for spec in self.vector.layout]))
        self._applier = RoundApplier(run, codec_map, self._outer)
        self._network = network
        self._member = member
        self._missed: RoundCatchUp = self._member.missed_rounds(self._applier)
        self._start = member.start.state_of(self.vector.layout) if member.start is not None else None
        self._emit = emit
        self._exchange: _Exchange | None = None
        self._is_other_start_said = False
        self._state: AnchorState
        self._verdict: Verdict | None = None
        """Verdict that made the state, where it is known."""
        self._own = LocalState(setup.model, setup.inner_optimizer, self.samples, self._member)
        subject = self._subject(setup.stage)
        self._checkpointer = Checkpointer(store, network, subject, self._own.tree) if store else None

    @property
    def state(self) -> AnchorState | None:
        """The state held now; None before ``sync_state``."""
        return getattr(self, "_state", None)

    def register(self, data: DataAbout | None) -> None:
        """Agree with the run on the model, and begin to keep its history; once, ``sync_state`` comes next.

        Raises as ``describe``."""
        self.describe(data)
        self._network.post(lambda: self._member.keep_history(self._folder / HISTORY_FILE))
        self._member.prepare_averaging(self.vector.layout)

    def describe(self, data: DataAbout | None) -> None:
        """Raises ``ModelMismatch`` naming the first difference to the run's, or ``CorpusError``, which says here, and
        nowhere else, what the data is."""
        model = PeerToCoordinatorDescribeModel(
            layout=self.vector.layout,
            corpus_digest=data.digest if data else None,
            tokens_per_sample=self.tokens_per_sample,
            samples=data.samples if data else None,
        )
        if self._run.pins is not None and self._stage is None:  # whatever the coordinator says
            self._run.pins.check_model(model)
        try:
            self._network.call(self._member.describe(model), interruptible=True)
        except CorpusError as error:
            raise CorpusError(f"{error}\n  here: {data.about if data else 'no data'}") from error

    def sync_state(self, *, afresh: bool = False) -> None:
        """Get the run's current state: what we hold if it is that, else by the rounds that we missed, else from others.
        Raises ``Interrupted``."""
        self._member.progress.activity = "syncing"
        own = self._candidates(is_first=not afresh)
        shape, folder = (1 + self._outer.slots, self.vector.elements), self._folder / "incoming"
        rounds_before, before = self._missed.rounds, self.state
        self._state = self._network.call(
            self._member.agreed_state(own, shape, folder, self._emit, self._missed, self._start), interruptible=True
        )
        if before is not None and _is_undone(before, self._state):
            self._member.averager.forget_residual()
        found = None if afresh else own.checkpoint
        view = self._member.client.view
        self._verdict = view.verdict if view.anchor_version == self._state.version else None
        if view.verdict is not None:
            self._heard(view.verdict)
        carries = found is not None and self._own.take_up(found, self._state)
        self.work.restart_from(self._state.anchor)
        self._enter_round(view.round)
        self._emit(
            "synced",
            anchor_version=self._state.version,
            digest=self._state.digest.hex(),
            residual=carries,
            checkpoint=found.manifest.round if found else None,
            caught_up=self._missed.rounds - rounds_before,
        )

    def resync(self, reason: str, bad: KeptState | None = None) -> None:
        """Drop the local work and begin again from the run's current state, once a round under way has ended. ``bad``:
        a state that nothing comes of; the others are asked first, see ``recover_from_divergence``."""
        if self.exchanging and not self.conclude_round():
            return
        log.warning("starting again from the anchor: %s", reason)
        self._emit("resync", reason=reason)
        self.samples.drop_all()
        self._network.call(self._member.start_afresh(), interruptible=True)
        if bad is not None:
            self._await_word(bad)
        self.sync_state(afresh=True)

    def recover_from_divergence(self, reason: str) -> None:
        """``resync``, as the local work is of no use to anybody. When that was so several times in a row, the
        others are asked first: raises ``Diverged`` unless the run goes back, and ``Interrupted``."""
        number = self._stage.number if self._stage is not None else None
        bad = self._divergence.note_failure(number, self._state, reason)
        if bad is not None and self._stage is not None:  # stages go back together, and no one of them has a say in that
            raise self._divergence.as_error("")
        self.work.reset_optimizer()
        self.resync(reason, bad)

    def _await_word(self, bad: KeptState) -> None:
        """Returns when the run has gone back behind that state; raises ``Diverged`` where it does not."""
        log.warning(
            "nothing comes of the work from version %d: asking whether it is the same for all", bad.anchor_version
        )
        self._emit("diverged", anchor_version=bad.anchor_version, digest=bad.digest.hex())
        self._member.progress.activity = "diverged"
        own = self._candidates(is_first=False)
        word = self._network.call(self._member.await_word(bad, own.kept_states), interruptible=True)
        if word != "go on":
            raise self._divergence.as_error(word)
        self._divergence.clear()
        self._member.averager.forget_residual()  # what it has of the rounds that are undone may be as bad as those

    def step(self, samples: int, lr_factor: float) -> None:
        """The gradients of so many samples are there: the local step."""
        self.work.step(samples, lr_factor)
        if self._checkpointer is not None:
            self._checkpointer.prepare()

    def count_trained(self, start: int, stop: int, loss: Tensor | None) -> None:
        """In a pipeline: the gradients of these samples are in ``work``."""
        self.samples.count_trained(start, stop, loss)
        if self._checkpointer is not None:
            self._checkpointer.prepare()

    # Rounds -------------------------------------------------------------------------------------------------

    @property
    def exchanging(self) -> bool:
        """Whether a round that was closed here has not been concluded."""
        return self._exchange is not None

    @property
    def verdict_is_known(self) -> bool:
        """Whether ``conclude_round`` would not wait."""
        return self._exchange is not None and self._exchange.outcome.done()

    def close_round(self) -> None:
        """Contribute the local work to the round and conclude it. With ``averaging.overlap`` only the exchange begins;
        the caller concludes it later and trains for the next round meanwhile. Raises ``Interrupted``, ``Diverged``."""
        if self.begin_exchange() and not self._run.averaging.overlap:
            self.conclude_round()

    def begin_exchange(self) -> bool:
        """The first half of ``close_round``: who holds several stages offers them all before it concludes any, as their
        rounds end together. False when the local work was lost instead, and there is nothing to conclude."""
        if self.exchanging and not self.conclude_round():
            return False
        self._member.progress.activity = "ready"
        contribution = self.work.contribution(self._state.anchor)
        norms = norms_of(contribution, ranges(contribution.numel()))
        if not math.isfinite(math.fsum(norms)):
            self.recover_from_divergence("the local work had become infinite or not a number")
            return False
        tokens, samples, loss = self.samples.tokens_done, self.samples.done_ranges(), self.samples.mean_loss()
        state = self._state
        offer = RoundOffer(self.round, state.version, state.digest, contribution, norms, tokens, samples, loss)
        self._exchange = _Exchange(self.round, self._network.submit(self._member.average(offer)))
        self.samples.offer_to_round()
        if self._run.averaging.overlap:
            self._enter_round(self.round + 1)
        return True

    def conclude_round(self) -> bool:
        """Await the verdict of the closed round and act on it; False when that cost the local work. Raises
        ``Interrupted``, and ``NotAdmitted`` for a stage that is not this peer's any more."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "close_round() comes first"
        try:
            # Without a coordinator there may be no verdict for a long time: who wants to go, need not wait for it.
            outcome = self._network.wait_for(exchange.outcome, interruptible=self._coordinator_is_away)
        except (Interrupted, NotAdmitted):
            self._carry_on(exchange.round, Aborted("stopped"))
            raise
        match outcome:
            case Committed():
                self._apply(outcome)
            case Aborted():
                self._carry_on(exchange.round, outcome)
            case Resync(is_unusable=True):
                self.recover_from_divergence(outcome.reason)
            case Resync():
                self.resync(outcome.reason)
        return not isinstance(outcome, Resync)

    def _carry_on(self, offered_round: int, outcome: Aborted) -> None:
        self.samples.take_back()
        if outcome.verdict is None:
            self._enter_round(offered_round)
        else:
            if self._run.pipeline is not None:  # every round has a batch of its own, which is given out anew
                self.samples.drop_all()
                self.work.restart_from(self._state.anchor)
            self._heard(outcome.verdict)
            self._enter_round(outcome.verdict.round + 1)
            self._emit("aborted", round=outcome.verdict.round, reason=outcome.reason)

    def _apply(self, outcome: Committed) -> None:
        verdict = outcome.verdict
        self._state = self._applier.apply(self._state, verdict, outcome.mean)
        self.work.continue_from(self._state.anchor)
        if outcome.included:
            self.samples.drop_offered()
            self._divergence.clear()
        else:
            self.samples.take_back()
        if self._on_mean is not None:
            self._on_mean(outcome.mean, outcome.included)
        self._enter_round(verdict.round + 1)
        self._network.post(lambda: self._member.hold_state(self._state))
        self._verdict = verdict
        self._heard(verdict)
        if (
            self._checkpointer is not None and not self._divergence.is_doubtful
        ):  # older ones may be what the run goes back to
            self._checkpointer.save_if_due(self._state, verdict)
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

    def _coordinator_is_away(self) -> bool:
        return self._member.client.coordinator_is_away

    def _enter_round(self, number: int) -> None:
        self.round = number
        progress = self._member.progress
        progress.tokens_done = self.samples.tokens_done
        progress.round = number

    # Checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Have a checkpoint of the state on disk, and drop what is on its way."""
        if self._exchange is not None:
            self._exchange.outcome.cancel()
        if self._checkpointer is not None and self.state is not None:
            self._checkpointer.save_final(self._state, self._verdict)

    def _roll_forward(self, state: AnchorState, newest: int) -> AnchorState:
        """That state, and the rounds since that are kept here, up to that version."""
        found = roll_forward(state, self._member.records, self._applier, newest)
        if found is not state:
            log.info("rolled forward from version %d to %d by rounds that were kept here", state.version, found.version)
        return found

    def _candidates(self, *, is_first: bool) -> LocalCandidates:
        start = self._start
        if start is not None:
            make, digest = (start.read if start.is_here else None), start.digest
        else:  # what the model was made with is gone once it has trained
            make, digest = (self._initial_state if is_first or self._build else None), None
        return LocalCandidates(self._checkpointer, make, self._roll_forward, is_first=is_first, initial_digest=digest)

    def _initial_state(self) -> AnchorState:
        vector = ParameterVector(self._build()) if self._build else self.vector
        state = AnchorState.make(vector.read(), torch.zeros(self._outer.slots, self.vector.elements), 0)
        pins = self._run.pins
        if pins is not None and pins.state not in (None, state.digest.hex()) and not self._is_other_start_said:
            self._is_other_start_said = True
            log.warning(
                "this machine makes another first state of the model than the run file pins, as another version of "
                "PyTorch or of the recipe may; the pinned one has to come from a peer that makes it"
            )
        return state

    def _heard(self, verdict: Verdict) -> None:
        if self._checkpointer is not None:
            self._checkpointer.add_verdict(verdict)

    def _subject(self, stage: StageAbout | None) -> CheckpointSubject:
        client = self._member.client
        layout, slots = self.vector.layout, self._outer.slots
        return CheckpointSubject(
            self._run, client.run_toml, self.recipe_config, layout, slots, client.coordinator_key, stage
        )


def _is_undone(before: AnchorState, now: AnchorState) -> bool:
    """Return whether the run has gone back, so that the work behind the residual is to be done again by others."""
    return now.version <= before.version and now.digest != before.digest
