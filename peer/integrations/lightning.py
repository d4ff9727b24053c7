"""Lightning's ``Trainer`` inside of a run, by a callback and a leased loader; needs the extra ``lightning``.

::

    from shoal.integrations.lightning import RunCallback

    run = RunCallback("shoal://…")
    trainer = Trainer(callbacks=[run])
    trainer.fit(module, run.leased(loader))

Leases give the samples and the run's schedule the learning rates, as factors of the optimizer's; the training ends when
the run does, or by the trainer's own limits. Optimizer, clipping, accumulation, precision, validation, logging and
saving are Lightning's. A loop with Fabric is an own one: see ``examples/digits_lightning.py``.
"""

from __future__ import annotations

import logging
from typing import Any

from shoal.peer.integrations.loop_member import LoopMember, MemberBatches
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import UserError

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.types import LRSchedulerConfig
except ImportError as error:
    raise ImportError(
        f"shoal.integrations.lightning needs a package: pip install 'shoal[lightning]' ({error})"
    ) from error

log = logging.getLogger(__name__)


class RunCallback(Callback):
    """Membership in a run for one ``fit``, with ``leased`` around the training data loader."""

    def __init__(self, invite: str, options: SessionOptions | None = None) -> None:
        """``invite``: the URL that the host printed."""
        self._invite = invite
        self._options = options
        self._member_or_none: LoopMember | None = None
        self._loaders: list[MemberBatches] = []
        self._trainer: Any = None
        self._steps_before = 0

    @property
    def session(self) -> Session:
        """The session, during ``fit``."""
        return self._member.session

    @property
    def _member(self) -> LoopMember:
        assert self._member_or_none is not None, "fit has not begun"
        return self._member_or_none

    def leased(self, loader: Any, *, own_data: bool = False) -> MemberBatches:
        """Return what ``fit`` gets for a training ``DataLoader``: batches of leased samples, made as its own are.

        ``own_data``: its own batches in their order, where leases only count samples. Raises ``UserError`` for a loader
        whose samples cannot be leased.
        """
        self._loaders.append(MemberBatches(loader, lambda: self._member, self._stop, own_data=own_data))
        return self._loaders[-1]

    def _stop(self) -> None:
        self._trainer.should_stop = True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        check(trainer)
        self._trainer = trainer
        self._member_or_none = LoopMember(self._invite, self._options, str(pl_module.device))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join once a checkpoint is loaded, so that the run's state wins."""
        if trainer.train_dataloader not in self._loaders:
            raise UserError(
                "fit has not got its training data by RunCallback.leased, so that its samples are not leased: call "
                "trainer.fit(module, run.leased(loader)), or return run.leased(loader) from train_dataloader()"
            )
        if trainer.lr_scheduler_configs:
            log.warning("the schedulers of configure_optimizers have no effect, as the run's [schedule] sets the rates")
        schedule = self._member.start(pl_module, trainer.optimizers[0])
        trainer.strategy.lr_scheduler_configs = [LRSchedulerConfig(schedule, interval="step")]
        self._steps_before = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss is None:
            raise UserError(
                "training_step has returned no loss for a batch, which the run counts as trained: return one"
            )
        self._member.note_batch(loss)
        if trainer.global_step > self._steps_before:
            self._steps_before = trainer.global_step
            self._member.note_step()

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._member_or_none is not None:
            self._member.note_evaluation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._member_or_none is not None:
            self._member.end_evaluation()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._member.end_evaluation()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        member, self._member_or_none = self._member_or_none, None
        if member is not None:
            member.session.__exit__(type(error) if error else None, error, None)


def check(trainer: Any) -> None:
    """Raise ``UserError`` for what a trainer is set to and cannot do in a run."""
    refused = {
        f"it trains with {trainer.world_size} processes, and a member is one: set devices=1 and num_nodes=1, and start "
        "each by itself, with an identity of its own": trainer.world_size > 1,
        f"it has {len(trainer.optimizers)} optimizers, and a member has one: return one from configure_optimizers": len(
            trainer.optimizers
        )
        != 1,
    }
    for sentence, applies in refused.items():
        if applies:
            raise UserError(f"this trainer cannot train in a run: {sentence}")
