"""Membership in a run for a framework that owns the training loop, whichever framework it is.

A framework fetches batches, adds up gradients over some of them, steps its optimizer and evaluates. Its integration
passes these four on; learning rate, leases, rounds and the end of the training are decided here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, cuda, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.swarm.errors import UserError


class LoopMember:
    """Member of a run inside of a framework's loop.

    ``session``: connected; started by ``start``, once the framework has made its optimizer; ``is_over``: whether the
    run has given its last batch.
    """

    def __init__(self, invite: str, options: SessionOptions | None, device: str) -> None:
        """Raises ``UserError`` for a run whose algorithm takes the steps itself, and as ``Session.connect``."""
        self.session = Session.connect(invite, options, device)
        self.is_over = False
        self.has_started = False
        self._batches = 0
        self._loss: Tensor | float = 0.0
        if self.session.run_file.algorithm == "virtual_batch":
            self.session.close()
            raise UserError(
                "the run's algorithm is virtual_batch, in which no member steps an optimizer of its own, and a "
                "framework's loop does: host a run with the algorithm diloco or sparseloco"
            )

    def start(self, model: nn.Module, optimizer: Optimizer) -> LambdaLR:
        """Agree with the run on the model, and load its anchor; when everything else has been restored.

        ``optimizer``: the one that steps, without a framework's wrapper. Returns the run's schedule, a factor of the
        learning rates that the optimizer began with, to be stepped after each step in place of any other scheduler:
        those count local steps, by which a late joiner would warm up again. Raises as ``Session.start``.
        """
        if self.has_started:
            raise UserError("this membership has trained already: join again for further training")
        self.session.start_own_loop(model, optimizer)
        self.has_started = True
        return LambdaLR(optimizer, lambda _: self.session.lr_factor)

    def note_batch(self, loss: Tensor) -> None:
        """Note that a batch's gradients were added. ``loss``: (), its share of the step's mean loss."""
        self._batches += 1
        self._loss = self._loss + loss.detach()

    def note_step(self) -> None:
        """Note that the optimizer has stepped with the batches noted, or has skipped the step; closes a due round."""
        batches, loss = self._batches, self._loss
        self._batches, self._loss = 0, 0.0
        if batches:
            self.session.stepped_batches(batches, loss)

    def note_evaluation(self) -> None:
        """Take part in a round that is due in the midst of an evaluation; the model stays as it is."""
        if self.has_started and not self._batches:
            self.session.offer_if_due()

    def end_evaluation(self) -> None:
        """Go on from the round that was due in the evaluation, if any; before the next step."""
        if self.has_started:
            self.session.conclude()


class MemberBatches:
    """Batches for a framework, as long as an epoch of its own loader; they end with the run, whatever the epoch.

    Each iteration goes on where the one before has stopped, and from the start in another membership.
    """

    def __init__(
        self,
        loader: Any,
        member: Callable[[], LoopMember],
        on_end: Callable[[], None],
        *,
        own_data: bool = False,
    ) -> None:
        """``loader``: the framework's, whose data, collator and workers are used; ``member``: asked at the first batch;
        ``on_end``: called when the run has ended.

        ``own_data``: take the loader's batches as they come, and let leases only count their samples. Raises
        ``UserError`` for a loader whose samples cannot be leased.
        """
        self.dataset = loader.dataset
        self.batch_size = batch_size_of(loader)
        self._loader = loader
        self._member = member
        self._on_end = on_end
        self._own_data = own_data
        self._iterator: Iterator[Any] = iter(())
        self._iterated: LoopMember | None = None
        """The membership whose batches the iterator gives."""
        if not own_data:
            check_can_be_leased(loader)

    def __len__(self) -> int:
        """Raises ``TypeError`` for data of unknown length, as ``len`` does."""
        if self._own_data:
            return len(self._loader)
        return math.ceil(len(self.dataset) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        try:
            left: float = len(self)
        except TypeError:
            left = math.inf
        member = self._member()
        if self._iterated is not member:
            self._iterator, self._iterated = self._batches(), member
        while left > 0 and not member.is_over:
            member.end_evaluation()  # of one whose end no callback has told, as predictions and broken ones
            try:
                batch = next(self._iterator)
            except StopIteration:
                member.is_over = True
                self._on_end()
                return
            yield batch
            left -= 1

    def _batches(self) -> Iterator[Any]:
        session = self._member().session
        if self._own_data:
            return session.counted(_again(self._loader), self.batch_size)
        return session.loader(
            self.dataset,
            batch_size=self.batch_size,
            num_workers=self._loader.num_workers,
            collate_fn=self._loader.collate_fn,
            pin_memory=self._loader.pin_memory and cuda.is_available(),
        )


def _again(loader: Any) -> Iterator[Any]:
    """Iterate over a loader epoch after epoch, until one is empty."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch


def batch_size_of(loader: Any) -> int:
    """Return the most samples in a batch of a loader. Raises ``UserError`` if it does not say."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise UserError(
            f"the training data loader's batch sampler, a {type(loader.batch_sampler).__name__}, does not say how many "
            "samples a batch has: give the loader a batch_size"
        )
    return size


def check_can_be_leased(loader: Any) -> None:
    """Raise ``UserError`` if the loader's samples cannot be leased: without numbers, or in an order with a meaning."""
    own = "join(…, own_data=True) trains on them as they come, and you see to it that members' samples differ"
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise UserError(
            "the training data is a stream, whose samples have no numbers that peers could share out among them: give "
            f"a map-style dataset; {own}"
        )
    sampler = loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if not isinstance(sampler, RandomSampler | SequentialSampler) or getattr(sampler, "replacement", False):
        raise UserError(
            f"the training data loader has a {type(sampler).__name__}, whose order would be lost, as the order of a "
            f"run's samples is the run's: shuffle, or do not; {own}"
        )
