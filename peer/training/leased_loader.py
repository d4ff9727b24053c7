"""Leased samples through torch's ``DataLoader``: workers load batches ahead, of samples that this peer has leased."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from shoal.peer.training.data import Dataset, LeasedBatch, LeasedSamples, Order
from shoal.swarm.errors import UserError

Collate = Callable[[list[Any]], Any]


def workers_context() -> BaseContext:
    """Return how worker processes are started: never by ``fork``, which copies locks that other threads hold."""
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    return multiprocessing.get_context("forkserver" if has_server else "spawn")


def check_is_no_worker() -> None:
    """Raise ``UserError`` in a worker process that imports a script which joins a run on import."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "a worker of a data loader has imported this script, which joins the run again: put what the script does "
            'into a function that it calls below `if __name__ == "__main__":`'
        )


class LeasedLoader:
    """Torch's ``DataLoader`` over the batches that a peer has leased; it loads ahead only what can be leased at once.

    Iterate again after it has ended, when there are new leases: the workers stay.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: Order,
        samples: LeasedSamples,
        lease_more: Callable[[int], None],
        *,
        batch_size: int,
        num_workers: int,
        collate_fn: Collate | None,
        pin_memory: bool,
    ) -> None:
        """Start the workers, and wait until they are up.

        ``lease_more``: leases about so many samples without waiting, if there are any. Raises ``UserError`` for wrong
        arguments, and for what cannot be sent to workers.
        """
        if batch_size < 1 or num_workers < 0:
            raise UserError(
                f"session.loader: expected batch_size >= 1 and num_workers >= 0, not {batch_size} and {num_workers}"
            )
        self._order = order
        self._samples = samples
        self._lease_more = lease_more
        self._batch_size = batch_size
        self._loading: deque[LeasedBatch] = deque()
        self._ahead = 1
        self._is_open = False
        more: dict[str, Any] = {}
        if num_workers:
            self._ahead += _PREFETCH * num_workers
            more = {"persistent_workers": True, "multiprocessing_context": workers_context()}
            more["prefetch_factor"] = _PREFETCH
        wrapped: TorchDataset[Any] = dataset  # type: ignore[assignment]
        self._loader = DataLoader(
            wrapped,
            batch_sampler=_Batches(self),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            **more,
        )
        if num_workers:
            self._start_workers()
        self._is_open = True

    def _start_workers(self) -> None:
        """Start the workers, which import what they need for seconds, before the round waits for their samples."""
        try:
            iter(self._loader)
        except (OSError, MemoryError):
            raise
        except Exception as error:  # which errors there are depends on what cannot be sent
            raise UserError(
                f"session.loader(num_workers={self._loader.num_workers}): the dataset or collate_fn cannot be sent to "
                f"worker processes ({error}): define both at the top level of a module, without lambdas, open files or "
                "locks, or use num_workers=0"
            ) from error
        iter(self._loader)  # waits until all workers answer

    def __iter__(self) -> Iterator[Any]:
        """Load and return batches until no more can be leased without waiting.

        Batches whose lease is lost meanwhile are left out.
        """
        self._loading.clear()
        for one in self._loader:
            batch = self._loading.popleft()
            if batch.leased:
                batch.given = True
                yield one
            else:
                self._samples.discard(batch)

    def next_indices(self) -> list[int] | None:
        """Take the next batch in hand and return its indices; None if no samples can be leased now."""
        if not self._is_open:
            return None
        if self._samples.left < self._batch_size:
            self._lease_more(self._ahead * self._batch_size)
        batch = self._samples.take(self._batch_size)
        if batch is None:
            return None
        self._loading.append(batch)
        return [int(index) for bounds in batch.ranges for index in self._order.indices(*bounds)]


_PREFETCH = 2
"""Batches that each worker loads ahead."""


class _Batches:
    """Batch sampler that leases what it gives out."""

    def __init__(self, loader: LeasedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        while (indices := self._loader.next_indices()) is not None:
            yield indices
