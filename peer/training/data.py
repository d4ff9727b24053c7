"""From leased sample ranges to batches: what is left, what is in hand, what is done; and whose data it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from shoal.swarm.protocol.messages import SampleRange
from shoal.swarm.sample_ranges import Ranges, count, merge, to_wire

_PROBES = 16


class Dataset(Protocol):
    """Map-style: the same on every peer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class DataAbout:
    """What the run must know of the data: its digest, a line for people, how many tokens a sample counts, and how many
    samples there are."""

    digest: bytes
    about: str
    tokens_per_sample: int
    samples: int | None = None


def fingerprint(dataset: Dataset) -> bytes:
    """SHA-256 over the length and 16 samples spread over the dataset: enough to notice another one."""
    digest = hashlib.sha256(f"shoal data {len(dataset)}".encode())
    for index in np.linspace(0, len(dataset) - 1, min(_PROBES, len(dataset))).astype(int):
        _hash_value(digest, dataset[int(index)])
    return digest.digest()


def _hash_value(digest: Any, value: Any) -> None:
    match value:
        case Tensor():
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        case np.ndarray() | np.generic():  # the text of a NumPy scalar is not the same in all its releases
            digest.update(np.ascontiguousarray(value).tobytes())
        case dict():
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                _hash_value(digest, value[key])
        case list() | tuple():
            for one in value:
                _hash_value(digest, one)
        case _:
            digest.update(repr(value).encode())


def take_batch(dataset: Dataset, indices: NDArray[np.int64]) -> Any:
    """The samples at ``indices`` (b,), collated."""
    batch = getattr(dataset, "batch", None)
    if batch is not None:
        return batch(indices)
    return default_collate([dataset[int(index)] for index in indices])


@dataclass
class _Done:
    """Samples that were trained on, and the sum of their losses: () float32 on the model's device."""

    ranges: Ranges = field(default_factory=list)
    loss_sum: Tensor | None = None

    def add(self, ranges: Ranges, loss_sum: Tensor | None) -> None:
        self.ranges = merge([*self.ranges, *ranges])
        if loss_sum is not None:
            self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum


class LeasedSamples:
    """Samples of this peer's leases, in four states: left to do, in hand (one batch), done, offered to a round.
    ``steps`` and ``tokens_trained`` count on over restarts."""

    def __init__(self, tokens_per_sample: int) -> None:
        self._tokens_per_sample = tokens_per_sample
        self._left: Ranges = []
        self._done = _Done()
        self._offered = _Done()
        self._in_hand: tuple[int, int] | None = None
        self._recent: float | None = None
        self.steps = 0
        self.tokens_trained = 0

    def counters(self) -> dict[str, int]:
        """What counts on over restarts."""
        return {"steps": self.steps, "tokens_trained": self.tokens_trained}

    def count_on(self, counters: Mapping[str, Any]) -> None:
        """From the ``counters`` of a process before."""
        steps, tokens = counters.get("steps"), counters.get("tokens_trained")
        if isinstance(steps, int) and isinstance(tokens, int):
            self.steps, self.tokens_trained = steps, tokens

    @property
    def left(self) -> int:
        return count(self._left)

    @property
    def in_hand(self) -> bool:
        return self._in_hand is not None

    @property
    def in_round(self) -> int:
        """How many are done and not offered: all since the last committed round, but while one is averaged."""
        return count(self._done.ranges)

    @property
    def tokens_done(self) -> int:
        return self.in_round * self._tokens_per_sample

    def add(self, start: int, stop: int) -> None:
        """A new lease."""
        self._left.append((start, stop))

    def next_batch(self, samples: int) -> tuple[int, int] | None:
        """Bounds of the next at most ``samples`` samples, now in hand; None when there are none."""
        if self._in_hand is not None:  # the loop over batches was left before its step
            self._left.insert(0, self._in_hand)
            self._in_hand = None
        if not self._left:
            return None
        start, end = self._left.pop(0)
        stop = min(start + samples, end)
        if stop < end:
            self._left.insert(0, (stop, end))
        self._in_hand = (start, stop)
        return self._in_hand

    def finish(self, loss: Tensor) -> int:
        """The batch in hand is done, with that mean loss; returns its samples."""
        assert self._in_hand is not None, "step() without a batch of batches()"
        start, stop = self._in_hand
        self._in_hand = None
        self.trained(start, stop, loss)
        return stop - start

    def trained(self, start: int, stop: int, loss: Tensor | None) -> None:
        """These samples are done, leased or claimed; with that mean loss, where it is known."""
        self._done.add([(start, stop)], None if loss is None else loss.detach().float() * (stop - start))
        self.tokens_trained += (stop - start) * self._tokens_per_sample
        self.steps += 1
        if self.steps % 8 == 1 and loss is not None:  # reading a loss waits for the GPU
            self._recent = float(loss.detach())

    def recent_loss(self) -> float | None:
        """The loss of a step not long ago; None before the first or when it is not finite."""
        return self._recent if self._recent is not None and np.isfinite(self._recent) else None

    def mean_loss(self) -> float | None:
        """Over all done samples."""
        if self._done.loss_sum is None:
            return None
        mean = float(self._done.loss_sum) / self.in_round
        return mean if np.isfinite(mean) else None

    def done_ranges(self) -> tuple[SampleRange, ...]:
        return to_wire(self._done.ranges)

    def offer(self) -> None:
        """What is done goes into a round; what is done from now on is for the next one."""
        assert not self._offered.ranges, "one round after the other"
        self._offered, self._done = self._done, _Done()

    def committed(self) -> None:
        """What was offered is part of the anchor; what is done since, and what is left, stays ours."""
        self._offered = _Done()

    def take_back(self) -> None:
        """The round did without what was offered: it goes into the next one, with what is done since."""
        self._done.add(self._offered.ranges, self._offered.loss_sum)
        self._offered = _Done()

    def forget(self) -> None:
        """None of it is ours any more."""
        self._left, self._in_hand = [], None
        self._done, self._offered = _Done(), _Done()
