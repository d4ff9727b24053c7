"""Error feedback: a residual of what no committed mean has included yet, carried from round to round.

After Seide et al. 2014, "1-Bit Stochastic Gradient Descent", and Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes" (arXiv:1901.09847); the decay as in Sarfi et al. 2025,
"Communication Efficient LLM Pre-training with SparseLoCo" (arXiv:2508.15706).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import Codec, checked_range, checked_values, largest_of
from shoal.compression.formats import CodecError
from shoal.compression.norms import norms_of
from shoal.compression.scratch import empty_aligned, scratch
from shoal.compression.weighted_mean import EncodingLoss

_CPU = torch.device("cpu")
_TILE = 1 << 18
_FAR_FROM_INFINITY = 1e38
_ROUNDED = 1.0 + 2.0**-22
"""Bound on how much a norm grows when each value is rounded to float32."""


class ErrorFeedback:
    """One peer's residual, ``(n,) float32``, and its pending residual: the one that it has if the round commits.

    A round::

        feedback.begin(contribution)                         # from now on: corrected = contribution + residual
        packed = feedback.encode_chunk(codec, start, stop)   # each chunk that somebody asks for
        values, residual = feedback.summands(start, stop)    # chunks that go into the mean as float32 ...
        feedback.include_exactly(start, stop, error)         # ... as a row reducer's own do, and what encoding it lost
        feedback.keep_chunk(start, stop)                     # chunks that the mean did not include after all
        feedback.withdraw_chunk(start, stop)                 # chunks that we do not offer again either
        feedback.add_owner_error(start, error)               # what a mean lost that has our chunk in it as encoded
        feedback.reserve(start, stop)                        # where an owner ...
        left, times = feedback.error_buffer(start, stop)     # ... writes at once what its mean loses, times that,
        feedback.include_with_written_error(start, stop, largest)  # and it was that mean that was committed,
        feedback.include_encoded(start, stop)                # or one with our chunk in it as encoded
        feedback.commit()                                    # or discard()

    Whatever is neither encoded nor included counts as not included: all of it is carried over. What encoding lost,
    here or at the owner, is carried over times ``decay``; what a mean went without, whole. Calls for disjoint ranges
    may run in several threads at once; ``begin``, ``commit``, ``discard`` and ``load`` may not overlap any other
    call. At rest it holds 2 n floats, the memory of the last residual but one among them, within a round the
    contribution, too.
    """

    def __init__(self, n: int, decay: float = 1.0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise CodecError(f"the decay of a residual is from 0 to 1, not {decay}")
        self._residual = empty_aligned(n).zero_()
        self._spare: Tensor | None = None
        # No value of the residual is larger: what spares a look at all of them in every round.
        self._bound = 0.0
        self._decay = float(np.float32(decay))
        self._norms: tuple[Tensor, list[float]] | None = None  # of which residual
        self._contribution: Tensor | None = None
        self._pending: Tensor | None = None
        self._settled: set[tuple[int, int]] = set()
        self._reserved: list[tuple[int, int]] = []
        self._codecs: dict[tuple[int, int], Codec] = {}  # of what was encoded: what is reserved is encoded again

    @property
    def residual(self) -> Tensor:
        """The residual, ``(n,) float32``, as of the last commit: to be copied before the next ``begin``, ``scale`` or
        ``load``, and not to be changed."""
        return self._residual

    @property
    def in_round(self) -> bool:
        """Whether a round has begun that is neither committed nor discarded."""
        return self._contribution is not None

    def residual_norms(self, ranges: Sequence[tuple[int, int]]) -> list[float]:
        """The norms of the residual in ``ranges``, the same in every call; cached until the residual changes.

        For any thread; not while ``scale`` or ``commit`` runs."""
        measured, residual = self._norms, self._residual
        if measured is None or measured[0] is not residual:
            self._norms = measured = residual, norms_of(residual, ranges)
        return measured[1]

    def load(self, residual: Tensor) -> None:
        """Start from a copy of ``residual``, ``(n,) float32``, as saved earlier; not within a round.

        Raises CodecError when it holds NaN or infinity.
        """
        assert not self.in_round
        low, high = checked_range(residual)
        self._bound = max(-low, high)
        self._residual = self._checked(residual).clone()

    def scale(self, factor: float) -> None:
        """Multiply the residual by ``factor``, not within a round, when its loss counts with another weight now.

        Raises CodecError when a value would not be finite any more; nothing has changed then."""
        assert not self.in_round
        if not self._bound * abs(factor) < _FAR_FROM_INFINITY:
            self._bound = largest_of(self._residual)
            checked_range(torch.tensor([self._bound * abs(factor)], dtype=torch.float32))
        self._bound *= abs(factor)
        self._residual.mul_(factor)
        if self._norms is not None:
            self._norms = self._norms[0], [norm * abs(factor) * _ROUNDED for norm in self._norms[1]]

    def begin(self, contribution: Tensor, largest: float | None = None) -> None:
        """Begin a round with ``contribution``, ``(n,) float32``, which nobody may change before the round's end.

        ``largest``: a bound on its absolute values, NaN if it holds one; None to measure it.

        Raises CodecError when contribution + residual holds NaN or infinity, naming the first; no round has begun
        then, and the residual is as it was.
        """
        assert not self.in_round, "the round before was neither committed nor discarded"
        contribution = self._checked(contribution)
        largest = largest_of(contribution) if largest is None else largest
        if not largest + self._bound < _FAR_FROM_INFINITY:  # NaN is not either
            self._check_sum(contribution)
            self._bound = largest_of(self._residual)
        # Whatever a codec makes of the sum, it loses no more than twice its largest value.
        self._bound = 2.0 * (largest + self._bound)
        self._pending = empty_aligned(contribution.numel()) if self._spare is None else self._spare
        self._spare = None
        self._contribution = contribution
        self._settled.clear()
        self._reserved.clear()
        self._codecs.clear()

    def reserve(self, start: int, stop: int) -> None:
        """Reserve the pending residual of [start, stop) for writes through ``error_buffer``, from any thread.

        ``encode_chunk`` does not touch it from then on, and what it wrote there before does not count."""
        self._reserved.append((start, stop))
        self._settled = {one for one in self._settled if not start <= one[0] < stop}

    def _check_sum(self, contribution: Tensor) -> None:
        """Raise CodecError when contribution + residual holds NaN or infinity; checks every value."""
        for start in range(0, contribution.numel(), _TILE):
            corrected = contribution[start : start + _TILE] + self._residual[start : start + _TILE]
            low, high = torch.aminmax(corrected)
            if not (math.isfinite(float(low)) and math.isfinite(float(high))):
                at = int(torch.isfinite(corrected).logical_not_().to(torch.uint8).argmax())
                value = float(corrected[at])
                raise CodecError(f"contribution and residual add up to NaN or infinity: {value} at {start + at}")

    def summands(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Contribution and residual in [start, stop), ``(stop - start,) float32`` each: read-only, to be added up."""
        contribution, residual, _ = self._chunk(start, stop)
        return contribution, residual

    def encode_chunk(self, codec: Codec, start: int, stop: int, packed: Tensor | None = None) -> Tensor:
        """Encode corrected[start:stop] into ``packed``, ``(packed_bytes(stop - start),) uint8``, or a new tensor.

        The loss becomes pending, except in reserved ranges.

        Encoding the same range again gives the same bytes.
        """
        self._codecs[start, stop] = codec
        if any(first <= start < last for first, last in self._reserved):
            contribution, residual, _ = self._chunk(start, stop)
            return codec.encode_residual(contribution, residual, scratch("aside", stop - start, _CPU), packed)
        return self._encode(codec, start, stop, packed)

    def _encode(self, codec: Codec, start: int, stop: int, packed: Tensor | None = None) -> Tensor:
        contribution, residual, pending = self._chunk(start, stop)
        packed = codec.encode_residual(contribution, residual, pending, packed)
        if self._decay != 1.0:
            pending.mul_(self._decay)
        self._settled.add((start, stop))
        return packed

    def include_encoded(self, start: int, stop: int, factor: float = 1.0) -> None:
        """Record that the mean includes corrected[start:stop] as ``encode_chunk`` packed it, times ``factor``.

        The loss of encoding, times ``factor``, is pending then. Does nothing where no chunk was encoded."""
        codec = self._codecs.get((start, stop))
        if codec is not None and (start, stop) not in self._settled:
            self._encode(codec, start, stop)
        if factor != 1.0 and (start, stop) in self._settled:
            self._chunk(start, stop)[2].mul_(factor)

    def error_buffer(self, start: int, stop: int) -> tuple[Tensor, float]:
        """The buffer for the loss of a mean in a reserved range, ``(stop - start,) float32``, and a factor.

        The owner writes its loss there, times that factor and ``times`` as in ``add_owner_error``."""
        return self._chunk(start, stop)[2], self._decay

    def include_with_written_error(self, start: int, stop: int, largest: float) -> None:
        """Record that the mean includes corrected[start:stop] exactly; its loss is in ``error_buffer`` already.

        ``largest`` bounds the absolute values of the loss. Raises CodecError, and leaves zeros, if it is not finite."""
        _, _, pending = self._chunk(start, stop)
        self._settled.add((start, stop))
        if not largest + self._bound < _FAR_FROM_INFINITY:
            try:
                low, high = checked_range(pending)
            except CodecError:
                pending.zero_()
                raise
            largest = max(-low, high)
        self._bound += largest

    def include_exactly(self, start: int, stop: int, error: EncodingLoss | None = None, times: float = 1.0) -> None:
        """Record that the mean includes corrected[start:stop] exactly, as an owner's own chunk: nothing is pending.

        ``error``: the loss of the mean, if we encoded it, ``times`` over: see ``add_owner_error``. Raises CodecError,
        and leaves zeros, when that is not finite."""
        _, _, pending = self._chunk(start, stop)
        self._settled.add((start, stop))
        if error is None:
            pending.zero_()
            return
        try:
            torch.mul(error.values, self._admitted(error, times), out=pending)
        except CodecError:
            pending.zero_()
            raise

    def keep_chunk(self, start: int, stop: int) -> None:
        """Record that the mean does not include corrected[start:stop], or is void there: all of it is pending."""
        contribution, residual, pending = self._chunk(start, stop)
        torch.add(contribution, residual, out=pending)
        self._settled.add((start, stop))

    def withdraw_chunk(self, start: int, stop: int) -> None:
        """Withdraw the contribution in [start, stop): the residual from before is pending, whole."""
        _, residual, pending = self._chunk(start, stop)
        pending.copy_(residual)
        self._settled.add((start, stop))

    def add_owner_error(self, start: int, error: EncodingLoss, times: float = 1.0) -> None:
        """Add ``times * error`` to the pending residual from ``start`` on.

        The owner of a mean passes (mean - decoded mean), and as ``times`` the total weight of the mean over its own
        weight, which is the unit of its contribution. Its next contribution then makes up for the loss.
        To be called once a mean, after the range's encode_chunk, include_exactly or keep_chunk, each of which
        overwrites it. Raises CodecError, and adds nothing, when the sum holds NaN or infinity.
        """
        _, _, pending = self._chunk(start, start + error.values.numel())
        pending.add_(error.values, alpha=self._admitted(error, times, pending))

    def _admitted(self, error: EncodingLoss, times: float, pending: Tensor | None = None) -> float:
        """Return the factor of ``error`` when it is added to ``pending``, or to nothing.

        Raises CodecError when the sum would not be finite."""
        times *= self._decay
        largest = error.largest * abs(times)
        if not largest + self._bound < _FAR_FROM_INFINITY:
            product = checked_values(error.values) * times
            low, high = checked_range(product if pending is None else pending + product)
            largest = max(-low, high)
        self._bound += largest
        return times

    def commit(self) -> None:
        """End a committed round: the pending residual becomes the residual."""
        assert self._pending is not None, "no round has begun"
        for start, stop in list(self._unsettled(self._pending.numel())):
            self.keep_chunk(start, stop)
        self._spare, self._residual = self._residual, self._pending
        self._contribution = self._pending = self._norms = None

    def discard(self) -> None:
        """End an aborted round: the residual stays as before ``begin``; the contribution is offered again.

        Without a round it does nothing.
        """
        if self._pending is not None:
            self._spare = self._pending
        self._contribution = self._pending = None

    def _unsettled(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of which nothing was recorded."""
        at = 0
        for start, stop in sorted(self._settled):
            if start > at:
                yield at, start
            at = max(at, stop)
        if at < n:
            yield at, n

    def _checked(self, vector: Tensor) -> Tensor:
        assert vector.numel() == self._residual.numel(), "the residual has another length"
        return checked_values(vector)

    def _chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of contribution, residual and pending residual in [start, stop)."""
        contribution, pending = self._contribution, self._pending
        assert contribution is not None, "no round has begun"
        assert pending is not None
        assert 0 <= start <= stop <= contribution.numel(), (start, stop, contribution.numel())
        return contribution[start:stop], self._residual[start:stop], pending[start:stop]
