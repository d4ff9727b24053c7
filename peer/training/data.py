"""Sample order and leased samples: from the coordinator's leases to batches of a dataset.

The order is an endless sequence, permuted anew in every epoch. Peers lease ranges of this sequence, so every machine
computes the same order at any position, without a permutation in memory: by a keyed permutation, which libraries'
random generators do not offer."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import FirstBatch, SampleRange
from shoal.swarm.sample_ranges import Ranges, count, merge, to_wire

_PROBES = 16
_MOST_AHEAD = 16_384
"""Most samples that are looked at ahead."""


class Dataset(Protocol):
    """Map-style dataset, the same on every peer."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Order(Protocol):
    """Order of the run's samples, the same on every peer."""

    def indices(self, start: int, stop: int, /) -> NDArray[np.int64]:
        """Return the data indices of the sample numbers [start, stop), (stop - start,) int64."""
        ...

    def random(self, rng: np.random.Generator, count: int, /) -> NDArray[np.int64]:
        """Draw data indices, (count,) int64, such that few reads get their samples."""
        ...


@runtime_checkable
class OrderedDataset(Protocol):
    """Dataset that is read in an order of its own, and can be told what will be read soon: data in blocks."""

    def sample_order(self, seed: int, first: int, /) -> Order:
        """Return the order of a run with this seed, from position ``first`` of the sequence on."""
        ...

    def prefetch(self, indices: NDArray[np.int64], /) -> None:
        """Have the samples at ``indices`` ready soon; returns at once."""
        ...


@dataclass(frozen=True)
class DataAbout:
    """Description of the data for the run.

    ``about``: a line for people; ``tokens_per_sample``: tokens that a sample counts as; ``samples``: length of the
    dataset, if known.
    """

    digest: bytes
    about: str
    tokens_per_sample: int
    samples: int | None = None


def fingerprint(dataset: Dataset) -> bytes:
    """Hash the length and 16 samples spread over the dataset (SHA-256), enough to recognise another dataset."""
    digest = hashlib.sha256(f"shoal data {len(dataset)}".encode())
    for index in np.linspace(0, len(dataset) - 1, min(_PROBES, len(dataset))).astype(int):
        _hash_value(digest, dataset[int(index)])
    return digest.digest()


def _hash_value(digest: Any, value: Any) -> None:
    match value:
        case Tensor():
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        case np.ndarray() | np.generic():  # NumPy's releases differ in the repr of a scalar
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
    """Return the samples at ``indices``, (b,), collated by the dataset's own ``batch``, if any, else by torch."""
    batch = getattr(dataset, "batch", None)
    if batch is not None:
        return batch(indices)
    return default_collate([dataset[int(index)] for index in indices])


@dataclass(frozen=True)
class BatchShare:
    """Share of a rank of an island in a batch.

    ``samples``: those that count; ``mean``: samples of a rank on average; ``most``: of any rank.
    A rank without samples computes the loss of one all the same, as all ranks take part in each pass through the model;
    it counts nothing."""

    samples: int
    mean: float
    most: int

    @property
    def weight(self) -> float:
        """Factor on this rank's mean loss, with which the mean of all ranks' gradients is that of the batch."""
        return self.samples / self.mean


def not_in_islands(call: str) -> UserError:
    """Return the error of a session's call that counts what only one rank would have."""
    return UserError(
        f"{call} is not for the ranks of an island, which take batches and steps together: take batches from "
        "session.batches(dataset), and call session.step(loss) after each"
    )


_MOST_LOSS = 1e30
"""Largest loss that is told, as messages allow no larger one."""


@dataclass
class _Done:
    """Samples that were trained on, and the sum of their losses, () float32 on the model's device."""

    ranges: Ranges = field(default_factory=list)
    loss_sum: Tensor | None = None

    def add(self, ranges: Ranges, loss_sum: Tensor | None) -> None:
        self.ranges = merge([*self.ranges, *ranges])
        if loss_sum is not None:
            self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum


@dataclass(eq=False)
class LeasedBatch:
    """Samples in hand, those of ``ranges`` in order.

    ``given``: the loop has them, and does not wait for them to be loaded; ``leased``: this peer still has their lease.
    """

    ranges: Ranges
    given: bool
    leased: bool = True

    @property
    def samples(self) -> int:
        return count(self.ranges)


class LeasedSamples:
    """Samples of this peer's leases in four states: left, in hand, done, and offered to a round.

    Several batches may be in hand, as data loaders fetch ahead; they are done in the order in which they were taken.
    ``steps`` and ``tokens_trained`` count on over restarts.
    """

    def __init__(self, tokens_per_sample: int) -> None:
        self._tokens_per_sample = tokens_per_sample
        self._left: Ranges = []
        self._done = _Done()
        self._offered = _Done()
        self._batches: deque[LeasedBatch] = deque()
        self._recent: float | None = None
        self._is_at_anchor = False
        self._first: tuple[SampleRange, Tensor] | None = None
        """First batch from the present anchor on, and its loss there."""
        self.steps = 0
        self.tokens_trained = 0

    def counters(self) -> dict[str, int]:
        """Return the counters that checkpoints keep."""
        return {"steps": self.steps, "tokens_trained": self.tokens_trained}

    def restore_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore the ``counters`` of an earlier process; invalid ones are ignored."""
        steps, tokens = counters.get("steps"), counters.get("tokens_trained")
        if isinstance(steps, int) and isinstance(tokens, int):
            self.steps, self.tokens_trained = steps, tokens

    @property
    def left(self) -> int:
        return count(self._left)

    @property
    def in_hand(self) -> int:
        """Number of samples in hand whose lease this peer still has."""
        return sum(one.samples for one in self._batches if one.leased)

    @property
    def batches_given(self) -> int:
        """Number of batches in hand that the loop has, leased or not."""
        return sum(one.given for one in self._batches)

    def samples_in(self, batches: int) -> int:
        """Return the number of samples in the ``batches`` oldest batches that the loop has, leased or not.

        Raises ``UserError`` if it has fewer.
        """
        given = [one.samples for one in self._batches if one.given]
        if len(given) < batches:
            raise UserError(
                f"the loop has stepped with {batches} batches and took {len(given)} of this session: it has to train "
                "on the leased batches and no others"
            )
        return sum(given[:batches])

    @property
    def in_round(self) -> int:
        """Number of samples done and not offered."""
        return count(self._done.ranges)

    @property
    def tokens_done(self) -> int:
        return self.in_round * self._tokens_per_sample

    def undone(self) -> Ranges:
        """Return the samples that are leased and not done, in hand or left."""
        return merge([*self._left, *self._ranges_in_hand()])

    def _ranges_in_hand(self) -> Ranges:
        return [bounds for one in self._batches if one.leased for bounds in one.ranges]

    def add_lease(self, start: int, stop: int) -> None:
        """Add a lease of the samples [start, stop)."""
        self._left.append((start, stop))

    def take(self, samples: int) -> LeasedBatch | None:
        """Take the next samples, at most ``samples``, in hand to load them; None if none are left."""
        ranges: Ranges = []
        while self._left and samples:
            start, stop = self._take_range(samples)
            ranges.append((start, stop))
            samples -= stop - start
        if not ranges:
            return None
        self._batches.append(LeasedBatch(ranges, given=False))
        return self._batches[-1]

    def next_batch(self, samples: int) -> tuple[int, int] | None:
        """Take the next samples of one lease, at most ``samples``, and return their bounds; None if none are left."""
        if not self._left:
            return None
        bounds = self._take_range(samples)
        self._batches.append(LeasedBatch([bounds], given=True))
        return bounds

    def _take_range(self, samples: int) -> tuple[int, int]:
        start, end = self._left.pop(0)
        stop = min(start + samples, end)
        if stop < end:
            self._left.insert(0, (stop, end))
        return start, stop

    def discard(self, batch: LeasedBatch) -> None:
        """Forget a batch whose lease is lost, before the loop gets it."""
        assert not batch.leased
        assert not batch.given
        self._batches.remove(batch)

    def put_back(self) -> None:
        """Put what is in hand back to what is left, because the loop that took it has ended."""
        self._left[:0] = self._ranges_in_hand()
        self._batches.clear()

    def finish_batch(self, loss: Tensor | float) -> int:
        """Count the oldest batch in hand as done and return its number of samples, 0 if its lease is lost.

        ``loss``: its mean, (). Raises ``UserError`` if none is in hand.
        """
        if not self._batches or not self._batches[0].given:
            raise UserError(
                "session.step(loss) was called without a batch in hand: take batches from session.batches(dataset) or "
                "session.loader(dataset), whose samples are leased to this peer, and call step once for each"
            )
        return self.finish(self._batches[0].samples, loss)

    def finish(self, samples: int, loss: Tensor | float) -> int:
        """Count the oldest samples in hand as done; returns how many of them this peer still has the lease of.

        ``loss``: their mean, (). Raises ``UserError`` if fewer are in hand.
        """
        given = sum(one.samples for one in self._batches if one.given)
        if not 0 < samples <= given:
            raise UserError(
                f"session.stepped({samples}, loss): the loop has {given} samples of this session that were not counted "
                "yet; give the number of samples whose gradients are in the step"
            )
        ranges: Ranges = []
        while samples:
            batch = self._batches[0]
            start, end = batch.ranges.pop(0)
            stop = min(end, start + samples)
            if stop < end:
                batch.ranges.insert(0, (stop, end))
            if batch.leased:
                ranges.append((start, stop))
            samples -= stop - start
            if not batch.ranges:
                self._batches.popleft()
        if ranges:
            self._count(ranges, loss)
        return count(ranges)

    def count_trained(self, start: int, stop: int, loss: Tensor | None) -> None:
        """Count the samples [start, stop) as done. ``loss``: their mean, (), if known."""
        self._count([(start, stop)], loss)

    def _count(self, ranges: Ranges, loss: Tensor | float | None) -> None:
        samples = count(ranges)
        if loss is not None and not isinstance(loss, Tensor):
            loss = torch.tensor(float(loss))
        self._done.add(ranges, None if loss is None else loss.detach().float() * samples)
        if self._is_at_anchor and loss is not None and len(ranges) == 1:
            self._first = to_wire(ranges)[0], loss.detach().float()
        self._is_at_anchor = False
        self.tokens_trained += samples * self._tokens_per_sample
        self.steps += 1
        if self.steps % 8 == 1 and loss is not None:  # reading a loss waits for the GPU
            self._recent = float(loss.detach())

    def recent_loss(self) -> float | None:
        """Return the loss of a recent step; None before the first step or if it is not finite."""
        return self._recent if self._recent is not None and np.isfinite(self._recent) else None

    def mean_loss(self) -> float | None:
        """Return the mean loss of all samples done; None if unknown or not finite."""
        if self._done.loss_sum is None:
            return None
        mean = float(self._done.loss_sum) / self.in_round
        return mean if np.isfinite(mean) else None

    def restart_from_anchor(self) -> None:
        """Note that the next batch is trained from the anchor itself: its loss is one that others can measure again."""
        self._is_at_anchor, self._first = True, None

    def first_batch(self) -> FirstBatch | None:
        """Return the first batch from the anchor on; None if none was trained from there, or its loss is not finite."""
        if self._first is None:
            return None
        loss = float(self._first[1])
        return FirstBatch(samples=self._first[0], loss=loss) if abs(loss) < _MOST_LOSS else None

    def done_ranges(self) -> tuple[SampleRange, ...]:
        return to_wire(self._done.ranges)

    def offer_to_round(self) -> None:
        """Move the samples done to the round that is averaged next; later ones are for the round after it."""
        assert not self._offered.ranges, "the round before has to be concluded first"
        self._offered, self._done = self._done, _Done()

    def drop_offered(self) -> None:
        """Drop the offered samples, which are in the anchor now."""
        self._offered = _Done()

    def take_back(self) -> None:
        """Return the offered samples to those done, because the round did not include them."""
        self._done.add(self._offered.ranges, self._offered.loss_sum)
        self._offered = _Done()

    def drop_all(self) -> None:
        """Drop all samples, because the leases have ended. Batches in hand will not count when their step comes."""
        self._left = []
        for batch in self._batches:
            batch.leased = False
        self._done, self._offered = _Done(), _Done()
        self._is_at_anchor, self._first = False, None


MAX_LENGTH = 2**62

_ROUNDS = 8
_UintArray = npt.NDArray[np.uint64]


class SampleOrder:
    """Order of the run's samples: number ``s`` is index ``permutation(seed, s // length)(s % length)`` of the data.

    Every epoch of ``length`` numbers visits every index once. The permutation is a Feistel network on the smallest
    power of two that holds ``length``, iterated until the result is below ``length`` (Black & Rogaway 2002, "Ciphers
    with Arbitrary Finite Domains"): fewer than two evaluations an index on average, O(1) memory. It looks random but is
    not cryptographically strong.
    """

    def __init__(self, length: int, seed: int, first: int = 0) -> None:
        """``length``: samples in the data, 1 to 2**62; ``seed``: the run's, 0 to 2**64 - 1; ``first``: position in the
        sequence of the run's sample number 0. Raises ``ValueError`` outside these ranges.
        """
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"length: expected 1 to 2**62 samples, not {length}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed: expected 0 to 2**64 - 1, not {seed}")
        self.length = length
        self._seed = seed
        self._first = first
        bits = (length - 1).bit_length()
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the data indices of the sample numbers [start, stop), (stop - start,) int64.

        Raises ``ValueError`` unless ``0 <= start <= stop``.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"sample range: expected 0 <= start <= stop, not {start} to {stop}")
        if self.length == 1:
            return np.zeros(stop - start, dtype=np.int64)
        out = np.empty(stop - start, dtype=np.int64)
        position = start
        while position < stop:
            epoch, offset = divmod(self._first + position, self.length)
            count = min(stop - position, self.length - offset)
            numbers = np.arange(offset, offset + count, dtype=np.uint64)
            out[position - start : position - start + count] = self._permute(numbers, self._round_keys(epoch))
            position += count
        return out

    def random(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Draw data indices, (count,) int64."""
        return rng.integers(0, self.length, count)

    def _round_keys(self, epoch: int) -> _UintArray:
        """Return the Feistel rounds' keys of an epoch, (_ROUNDS,) uint64, by a hash of seed and epoch."""
        text = f"shoal sample order {self._seed} {epoch}".encode()
        digest = hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def _permute(self, numbers: _UintArray, keys: _UintArray) -> _UintArray:
        """Apply the permutation of ``range(length)`` to ``numbers``, (n,), each below ``length``."""
        out = self._feistel(numbers, keys)
        outside = np.flatnonzero(out >= np.uint64(self.length))
        while outside.size:
            # This ends, because every cycle of the permutation leads back to a value below the length.
            walked = self._feistel(out[outside], keys)
            out[outside] = walked
            outside = outside[walked >= np.uint64(self.length)]
        return out

    def _feistel(self, numbers: _UintArray, keys: _UintArray) -> _UintArray:
        """Apply the permutation of the power of two to ``numbers``, (n,).

        The halves take turns instead of changing places, so they may differ in size. Each is changed by a function of
        the other alone, so every round can be undone and the network is a bijection for any keys.
        """
        low = numbers & self._low_mask
        high = numbers >> self._low_bits
        for round_number in range(0, _ROUNDS, 2):
            high ^= _scramble(low, keys[round_number]) & self._high_mask
            low ^= _scramble(high, keys[round_number + 1]) & self._low_mask
        return (high << self._low_bits) | low


def run_order(run: RunFile, data: Sized, tokens_per_sample: int) -> Order:
    """Return the run's order over the samples of ``data``. A run that starts from a checkpoint continues the order
    there."""
    first = run.start.tokens // tokens_per_sample if run.start else 0
    if isinstance(data, OrderedDataset):
        return data.sample_order(run.run.seed, first)
    return SampleOrder(len(data), run.run.seed, first)


def prefetch(data: Dataset, order: Order, ranges: Ranges) -> None:
    """Have leased samples ready soon, and as many that follow them, which are likely to be leased next."""
    if isinstance(data, OrderedDataset) and ranges:
        ahead = min(count(ranges), _MOST_AHEAD)
        wanted, left = [], _MOST_AHEAD
        for start, stop in [*ranges, (ranges[-1][1], ranges[-1][1] + ahead)]:
            wanted.append(order.indices(start, min(stop, start + left)))
            left -= len(wanted[-1])
        data.prefetch(np.concatenate(wanted))


def _scramble(values: _UintArray, key: np.uint64) -> _UintArray:
    """Return the upper 32 bits of splitmix64's finalizer (Steele et al. 2014) of ``values + key``, (n,)."""
    mixed = values + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)
