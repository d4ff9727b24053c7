"""Error feedback: a residual of what no committed mean has included yet, carried from round to round.

After Seide et al. 2014, "1-Bit Stochastic Gradient Descent", and Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes" (arXiv:1901.09847); the decay as in Sarfi et al. 2025,
"Communication Efficient LLM Pre-training with SparseLoCo" (arXiv:2508.15706).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import Codec, checked_range, largest_of
from shoal.compression.formats import CodecError
from shoal.compression.norms import norms_of, norms_of_reader
from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.compression.scratch import empty_aligned, scratch
from shoal.compression.weighted_mean import EncodingLoss

T = TypeVar("T")
_CPU = torch.device("cpu")
_TILE = 1 << 18
_FAR_FROM_INFINITY = 1e38
_ROUNDED = 1.0 + 2.0**-22
"""Bound on how much a norm grows when each value is rounded to float32."""


class _EncodedChunk(NamedTuple):
    codec: Codec
    packed: Tensor


class ErrorFeedback:
    """One peer's residual, ``(n,) float32`` or ``bfloat16``, which a round replaces in place.

    A round::

        feedback.begin(contribution)                         # from now on: corrected = contribution + residual
        packed = feedback.encode_chunk(codec, start, stop)   # each chunk that somebody asks for
        feedback.include_chunk(start, stop)                  # chunks that the mean includes as encoded
        feedback.keep_chunk(start, stop)                     # chunks that the mean did not include after all
        feedback.withdraw_chunk(start, stop)                 # chunks that we do not offer again either
        feedback.add_mean_loss(start, loss)                  # what encoding a mean lost
        feedback.commit()                                    # or discard()

    Encoding a chunk replaces its residual by what encoding lost, and keeps the bytes until the round's end. They are
    the undo log: what was lost and the decoded bytes add up to the corrected chunk again, and that minus the
    contribution is the residual of before, to within the rounding of float32. The contribution is read by range, so
    nothing of its size is copied.

    Whatever is neither encoded nor settled counts as not included: all of it is carried over. What encoding lost, here
    or at the owner, is carried over times ``decay``; what a mean went without, whole. Calls for disjoint ranges may run
    in several threads at once; ``begin``, ``commit``, ``discard``, ``scale`` and ``load`` may not overlap any other
    call. Ranges are chunks, of up to 2**20 values, the same ones throughout a round.

    In bfloat16, values are rounded stochastically: rounded to nearest, a residual would stop growing where a
    contribution is below half of its last bit, and that contribution would never reach a mean.
    """

    def __init__(self, n: int, decay: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        if not 0.0 <= decay <= 1.0:
            raise CodecError(f"the decay of a residual is from 0 to 1, not {decay}")
        assert dtype in (torch.float32, torch.bfloat16)
        self._residual = empty_aligned(n).zero_() if dtype == torch.float32 else torch.zeros(n, dtype=dtype)
        # No value of the residual is larger: what spares a look at all of them in every round.
        self._bound = 0.0
        self._decay = float(np.float32(decay))
        self._norms: tuple[int, list[float]] | None = None  # after how many changes
        self._contribution: RangeReader | None = None
        self._encoded: dict[tuple[int, int], _EncodedChunk] = {}
        self._settled: set[tuple[int, int]] = set()
        self._changes = 0
        self._turns = 0  # rounds begun and scalings: each rounds stochastically with draws of its own

    @property
    def residual(self) -> Tensor:
        """The residual, ``(n,)``, as of the last commit: not within a round, and not to be changed."""
        return self._residual

    @property
    def in_round(self) -> bool:
        """Whether a round has begun that is neither committed nor discarded."""
        return self._contribution is not None

    def residual_norms(self, ranges: Sequence[tuple[int, int]]) -> list[float]:
        """The norms of the residual in ``ranges``, the same in every call; cached until the residual changes.

        For any thread; not while ``scale`` or ``commit`` runs, nor from a round's first ``encode_chunk`` to its end."""
        measured, changes = self._norms, self._changes
        if measured is None or measured[0] != changes:
            is_exact = self._residual.dtype == torch.float32
            whole = TensorReader(self._residual)
            norms = norms_of(self._residual, ranges) if is_exact else norms_of_reader(whole, ranges)
            self._norms = measured = changes, norms
        return measured[1]

    def load(self, fill: Callable[[Tensor], T]) -> T:
        """Start from a residual that was saved earlier, which ``fill`` writes into the memory of this one, ``(n,)``;
        return what it returns. Not within a round.

        Raises CodecError when it holds NaN or infinity, and what ``fill`` raises; the residual is zeros then."""
        assert not self.in_round
        try:
            result = fill(self._residual)
            low, high = checked_range(self._residual)
        except BaseException:
            self.reset()
            raise
        self._bound = max(-low, high)
        self._changes += 1
        return result

    def reset(self) -> None:
        """Drop the residual, and the round if there is one."""
        self._end()
        self._residual.zero_()
        self._bound = 0.0
        self._changes += 1

    def scale(self, factor: float) -> None:
        """Multiply the residual by ``factor``, not within a round, when its loss counts with another weight now.

        Raises CodecError when a value would not be finite any more; nothing has changed then."""
        assert not self.in_round
        if not self._bound * abs(factor) < _FAR_FROM_INFINITY:
            self._bound = largest_of(self._residual)
            checked_range(torch.tensor([self._bound * abs(factor)], dtype=torch.float32))
        self._bound *= abs(factor)
        self._turns += 1
        for start, stop in _tiles(0, self._residual.numel()):
            self._store(start, stop, self._loaded(start, stop).mul_(factor))
        before, norms = self._norms or (None, [])
        if before == self._changes and self._residual.dtype == torch.float32:
            self._norms = self._changes + 1, [norm * abs(factor) * _ROUNDED for norm in norms]
        self._changes += 1

    def begin(self, contribution: RangeReader, largest: float | None = None) -> None:
        """Begin a round with ``contribution``, (n,), whose values stay the same until the round's end.

        ``largest``: a bound on its absolute values, NaN if it holds one; None to measure it.

        Raises CodecError when contribution + residual holds NaN or infinity, naming the first; no round has begun
        then, and the residual is as it was.
        """
        assert not self.in_round, "the round before was neither committed nor discarded"
        assert contribution.elements == self._residual.numel(), "the residual has another length"
        if largest is None or not largest + self._bound < _FAR_FROM_INFINITY:  # NaN is not either
            largest = self._checked_sum(contribution)
            self._bound = largest_of(self._residual)
        # Whatever a codec makes of the sum, it loses no more than twice its largest value.
        self._bound = 2.0 * (largest + self._bound)
        self._contribution = contribution
        self._turns += 1

    def _checked_sum(self, contribution: RangeReader) -> float:
        """Return the largest absolute value of the contribution; checks every value.

        Raises CodecError when contribution + residual holds NaN or infinity."""
        largest = 0.0
        for start, stop in _tiles(0, contribution.elements):
            brought = _read(contribution, start, stop)
            largest = max(largest, largest_of(brought))
            corrected = brought.add_(self._residual[start:stop])
            low, high = torch.aminmax(corrected)
            if not (math.isfinite(float(low)) and math.isfinite(float(high))):
                at = int(torch.isfinite(corrected).logical_not_().to(torch.uint8).argmax())
                value = float(corrected[at])
                raise CodecError(f"contribution and residual add up to NaN or infinity: {value} at {start + at}")
        return largest

    def encode_chunk(self, codec: Codec, start: int, stop: int, room: Callable[[int], Tensor] | None = None) -> Tensor:
        """Return corrected[start:stop] encoded, ``(packed_bytes(stop - start),) uint8``; not to be changed.

        Encoded once and kept: another call returns the same bytes. ``room``: returns memory for so many bytes. Raises
        CodecError, and drops the chunk's residual, when the contribution has changed and is not finite any more."""
        kept = self._encoded.get((start, stop))
        if kept is None:
            size = codec.packed_bytes(stop - start)
            packed = torch.empty(size, dtype=torch.uint8) if room is None else room(size)
            self.encode_chunks(codec, [(codec, start, stop)], packed)
            kept = self._encoded[start, stop]
        return kept.packed

    def encode_chunks(self, codec: Codec, chunks: Sequence[tuple[Codec, int, int]], packed: Tensor) -> list[Tensor]:
        """Encode adjacent chunks in one call into ``packed``, not to be changed: with short ones, calls cost more than
        values. Returns each chunk's packed bytes.

        ``codec``: that of all of them together, whose bytes are those of the chunks' own, one after the other. Raises
        CodecError as ``encode_chunk``, and drops the residual of all chunks then."""
        (_, start, _), (_, _, stop) = chunks[0], chunks[-1]
        residual = self._loaded(start, stop)
        try:
            # Into the residual's own memory, without a look at all sums before: ``begin`` knows that they are finite.
            codec.encode_residual(_read(self._begun, start, stop), residual, residual.view(-1), packed)
        except CodecError:  # the contribution has changed
            self._store(start, stop, residual.zero_())
            raise
        self._store(start, stop, residual)
        rooms, at = [], 0
        for one, its_start, its_stop in chunks:
            size = one.packed_bytes(its_stop - its_start)
            rooms.append(packed[at : at + size])
            self._encoded[its_start, its_stop] = _EncodedChunk(one, rooms[-1])
            at += size
        assert at == packed.numel(), "the chunks' codecs pack other bytes than that of all"
        return rooms

    def include_chunk(self, start: int, stop: int, factor: float = 1.0) -> None:
        """Record that the mean includes corrected[start:stop] as ``encode_chunk`` packed it, times ``factor``.

        The loss of encoding, times ``factor``, stays then. Does nothing where no chunk was encoded."""
        if (start, stop) in self._encoded:
            self._settled.add((start, stop))
            if (factor := factor * self._decay) != 1.0:
                self._store(start, stop, self._loaded(start, stop).mul_(factor))

    def keep_chunk(self, start: int, stop: int) -> None:
        """Record that the mean does not include corrected[start:stop], or is void there: all of it is carried over."""
        self._settled.add((start, stop))
        residual = self._loaded(start, stop)
        if (encoded := self._encoded.get((start, stop))) is not None:
            encoded.codec.accumulate(encoded.packed, residual, 1.0)
        else:
            residual.add_(_read(self._begun, start, stop))
        self._store(start, stop, residual)

    def withdraw_chunk(self, start: int, stop: int) -> None:
        """Withdraw the contribution in [start, stop): the residual from before stays, whole."""
        self._settled.add((start, stop))
        if (encoded := self._encoded.get((start, stop))) is not None:
            residual = self._loaded(start, stop)
            encoded.codec.accumulate(encoded.packed, residual, 1.0)
            self._store(start, stop, residual.sub_(_read(self._begun, start, stop)))

    def add_mean_loss(self, start: int, loss: EncodingLoss, times: float = 1.0) -> None:
        """Add ``times * loss`` to the residual from ``start`` on, within one chunk.

        Who made a mean passes (mean - decoded mean), and as ``times`` the total weight of the mean over its own weight,
        which is the unit of its contribution. Its next contribution then makes up for the loss. To be called once a
        mean, after the chunk was settled. Raises CodecError, and adds nothing, when the sum holds NaN or infinity.
        """
        times *= self._decay
        stop = start + loss.values.numel()
        residual, largest = self._loaded(start, stop), loss.largest * abs(times)
        if not largest + self._bound < _FAR_FROM_INFINITY:
            low, high = checked_range(residual + loss.values * times)
            self._bound, largest = 0.0, max(self._bound, -low, high)
        self._bound += largest
        self._store(start, stop, residual.add_(loss.values, alpha=times))

    def commit(self) -> None:
        """End a committed round: what encoding lost and what was not included is carried over."""
        for start, stop in list(self._encoded.keys() - self._settled):
            self.include_chunk(start, stop)
        for gap in list(self._unsettled()):
            for start, stop in _tiles(*gap):
                self.keep_chunk(start, stop)
        self._end()
        self._changes += 1

    def discard(self) -> None:
        """End an aborted round: the residual is as before ``begin``, to within rounding; the contribution is offered
        again.

        Without a round it does nothing. Chunks that were settled stay so: only a verdict settles them.
        """
        for start, stop in list(self._encoded.keys() - self._settled):
            self.withdraw_chunk(start, stop)
        self._end()
        self._changes += 1

    def _end(self) -> None:
        self._contribution = None
        self._encoded.clear()
        self._settled.clear()

    def _unsettled(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of which nothing was recorded."""
        at = 0
        for start, stop in sorted(self._settled):
            if start > at:
                yield at, start
            at = max(at, stop)
        if at < self._residual.numel():
            yield at, self._residual.numel()

    @property
    def _begun(self) -> RangeReader:
        assert self._contribution is not None, "no round has begun"
        return self._contribution

    def _loaded(self, start: int, stop: int) -> Tensor:
        """Return the residual in [start, stop), ``(stop - start,) float32``, to be changed and given to ``_store``."""
        assert 0 <= start <= stop <= self._residual.numel(), (start, stop, self._residual.numel())
        kept = self._residual[start:stop]
        return kept if kept.dtype == torch.float32 else scratch("residual", stop - start, _CPU).copy_(kept)

    def _store(self, start: int, stop: int, values: Tensor) -> None:
        """Store what was changed of ``_loaded``."""
        if self._residual.dtype == torch.float32:
            return  # it is the memory itself
        draws = np.random.Generator(np.random.SFC64([self._turns, start])).bytes(2 * (stop - start))
        # Added to the bits that are cut off, they carry over with the probability of the fraction, whatever the sign.
        values.view(torch.int32).add_(torch.from_numpy(np.frombuffer(draws, np.uint16).astype(np.int32)))
        self._residual[start:stop].view(torch.int16).copy_(values.view(torch.int16)[1::2])


def _read(reader: RangeReader, start: int, stop: int) -> Tensor:
    values = scratch("brought", stop - start, _CPU)
    reader.read(start, stop, values)
    return values


def _tiles(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, _TILE):
        yield at, min(at + _TILE, stop)
