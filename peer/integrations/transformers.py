"""Hugging Face's ``Trainer`` and its subclasses, TRL's too, inside of a run; needs the extra ``hf``.

::

    from shoal.integrations.transformers import join

    with join(trainer, "shoal://…"):
        trainer.train()

Leases give the samples and the run's schedule the learning rates, as factors of those in the trainer's arguments; the
training ends when the run does, or after the arguments' ``max_steps``. Optimizer, clipping, accumulation, precision,
evaluation, logging and saving are the trainer's. With PEFT only the adapters are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from shoal.peer.integrations.loop_member import LoopMember, MemberBatches
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import UserError

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(f"shoal.integrations.transformers needs a package: pip install 'shoal[hf]' ({error})") from error

_EPOCHS = 10**6
"""Epochs of the arguments while the run says when the training ends."""


@contextmanager
def join(
    trainer: Trainer, invite: str, options: SessionOptions | None = None, *, own_data: bool = False
) -> Iterator[Session]:
    """Join the run with a trainer; within the context ``trainer.train()`` trains in the run, once.

    ``invite``: the URL that the host printed; ``own_data``: train on the trainer's own data in its own order, where
    leases only count samples: for streams, and for trainers whose sampler has a meaning, such as GRPO's.

    Raises ``UserError`` for a trainer that cannot train in a run, and as ``Session.join``; ``train`` raises as
    ``Session.start`` and ``Session.batches``.
    """
    check(trainer, own_data=own_data)
    member = LoopMember(invite, options, str(trainer.args.device))
    with member.session, ExitStack() as undo:
        callback = _RunCallback(trainer, member)
        own_loader, own_step = trainer.get_train_dataloader, trainer.training_step

        def loader() -> MemberBatches:
            return MemberBatches(own_loader(), lambda: member, stop, own_data=own_data)

        def stop() -> None:
            trainer.control.should_training_stop = True

        def step(*args: Any, **kwargs: Any) -> Any:
            loss = own_step(*args, **kwargs)
            member.note_batch(loss)
            return loss

        _replace(undo, trainer, get_train_dataloader=loader, training_step=step, lr_scheduler=trainer.lr_scheduler)
        _replace(undo, trainer.args, ignore_data_skip=True)
        if trainer.args.max_steps <= 0:
            _replace(undo, trainer.args, num_train_epochs=_EPOCHS)
        trainer.add_callback(callback)
        undo.callback(trainer.remove_callback, callback)
        yield member.session


def check(trainer: Trainer, *, own_data: bool = False) -> None:
    """Raise ``UserError`` for what a trainer is set to and cannot do in a run. ``own_data``: as of ``join``."""
    args = trainer.args
    ends_by_itself = args.max_steps > 0
    refused = {
        "load_best_model_at_end = True would replace the run's model by one that this machine had on the way: turn it "
        "off; checkpoints of the run have its rounds": args.load_best_model_at_end,
        f"{args.n_gpu} GPUs are visible to one process, over which the Trainer would spread batches by DataParallel: "
        "set CUDA_VISIBLE_DEVICES to one of them, and start one process a GPU": args.n_gpu > 1,
        "torch.distributed has several ranks, and a member with a Trainer is one process: start each by itself, with "
        "an identity of its own": args.world_size > 1,
        "DeepSpeed and FSDP keep parts of the parameters, and a member needs whole ones: leave them out": bool(
            getattr(args, "deepspeed", None) or getattr(args, "fsdp", None)
        ),
        "auto_find_batch_size = True begins the training anew when memory runs out, and a run goes on: give a "
        "per_device_train_batch_size that fits": args.auto_find_batch_size,
        "the data is a stream and the arguments have no max_steps, without which a Trainer does not train on streams: "
        "set max_steps, the most that this machine does": own_data
        and not ends_by_itself
        and not hasattr(trainer.train_dataset, "__len__"),
    }
    for name in ("eval_steps", "save_steps", "logging_steps"):
        share = getattr(args, name)
        refused[
            f"{name} = {share} is a share of a training whose length only the run knows: give a number of steps"
        ] = share is not None and 0 < share < 1 and not ends_by_itself
    for sentence, applies in refused.items():
        if applies:
            raise UserError(f"this trainer cannot train in a run: {sentence}")


class _RunCallback(TrainerCallback):
    """Tells the member what the trainer does."""

    def __init__(self, trainer: Trainer, member: LoopMember) -> None:
        self._trainer = trainer
        self._member = member

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join once the optimizer is made and a checkpoint of the trainer loaded, so that the run's state wins."""
        self._trainer.lr_scheduler = self._member.start(self._trainer.model, _raw(self._trainer.optimizer))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step, whether or not a loss scaler has skipped it."""
        self._member.note_step()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._member.note_evaluation()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._member.end_evaluation()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._member.end_evaluation()


def _raw(optimizer: Any) -> Optimizer:
    """Return the optimizer below accelerate's wrapper."""
    found = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(found, Optimizer)
    return found


def _replace(undo: ExitStack, target: Any, **values: Any) -> None:
    """Set attributes of an object until ``undo`` ends."""
    for name, value in values.items():
        before = vars(target).get(name, _MISSING)
        if before is _MISSING:
            undo.callback(delattr, target, name)
        else:
            undo.callback(setattr, target, name, before)
        setattr(target, name, value)


_MISSING = object()
