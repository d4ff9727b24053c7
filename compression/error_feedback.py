"""The residual: what a peer has offered and no committed mean has held yet, carried from round to round.

After Seide et al. 2014, "1-Bit Stochastic Gradient Descent", and Karimireddy et al. 2019, "Error Feedback
Fixes SignSGD and other Gradient Compression Schemes" (arXiv:1901.09847).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.compression.codec import Codec, checked_range, checked_values


class ErrorFeedback:
    """One peer's residual, ``(n,) float32``, and the one it will have if the round commits (the pending one).

    A round::

        corrected = feedback.begin(contribution)             # contribution + residual
        packed = feedback.encode_chunk(codec, start, stop)   # each chunk that somebody asks for
        feedback.include_exactly(start, stop)                # chunks that go into the mean as float32
        feedback.keep_chunk(start, stop)                     # chunks that the mean did not include after all
        feedback.add_owner_error(start, error)               # what the owner lost in encoding the mean
        feedback.commit()                                    # or discard()

    Whatever is neither encoded nor included counts as not included: all of it is carried over. Calls for
    disjoint ranges may run in several threads at once; ``begin``, ``commit``, ``discard`` and ``load`` may
    not overlap any other call. At rest it holds n floats, within a round 3 n (the corrected ones among them).
    """

    def __init__(self, n: int) -> None:
        self._residual = torch.zeros(n, dtype=torch.float32)
        self._corrected: Tensor | None = None
        self._pending: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """``(n,) float32``, as of the last commit. To be read only."""
        return self._residual

    @property
    def in_round(self) -> bool:
        """Whether a round has begun that is neither committed nor discarded."""
        return self._corrected is not None

    def load(self, residual: Tensor) -> None:
        """Start from a copy of ``residual``, ``(n,) float32``, as saved earlier; not within a round."""
        assert not self.in_round
        self._residual = self._checked(residual).clone()

    def begin(self, contribution: Tensor, *, take: bool = False) -> Tensor:
        """Begin a round with ``contribution``, ``(n,) float32``; returns contribution + residual, read only.

        With ``take`` the sum is made in ``contribution`` itself, which then belongs to this object: no copy.
        Raises CodecError when the sum holds NaN or infinity; no round has begun then, and the residual is as
        it was.
        """
        assert not self.in_round, "the round before was neither committed nor discarded"
        contribution = self._checked(contribution)
        corrected = contribution.add_(self._residual) if take else contribution + self._residual
        checked_range(corrected)
        self._pending = corrected.clone()
        self._corrected = corrected
        return corrected

    def encode_chunk(self, codec: Codec, start: int, stop: int) -> Tensor:
        """Encode corrected[start:stop] into ``(packed_bytes(stop - start),) uint8``; the loss is pending.

        Encoding the same range again gives the same bytes.
        """
        corrected, pending = self._chunk(start, stop)
        return codec.encode_residual(corrected, pending.zero_())

    def include_exactly(self, start: int, stop: int) -> None:
        """corrected[start:stop] goes into the mean as it is, as an owner's own may: nothing is pending."""
        _, pending = self._chunk(start, stop)
        pending.zero_()

    def keep_chunk(self, start: int, stop: int) -> None:
        """The mean does not include corrected[start:stop] (or is void there): all of it is pending again."""
        corrected, pending = self._chunk(start, stop)
        pending.copy_(corrected)

    def add_owner_error(self, start: int, error: Tensor) -> None:
        """Add ``error``, ``(m,) float32``, to what is pending from ``start`` on.

        An owner calls it with (mean - decoded mean), in the units of its own contribution: times the total
        weight of the mean over the owner's weight. The owner's next contribution then makes up for the loss.
        To be called once, after the range's encode_chunk, include_exactly or keep_chunk, each of which
        overwrites it. Raises CodecError, and adds nothing, when the sum holds NaN or infinity.
        """
        _, pending = self._chunk(start, start + error.numel())
        total = pending + checked_values(error)
        checked_range(total)
        pending.copy_(total)

    def commit(self) -> None:
        """The round is committed: what is pending becomes the residual."""
        assert self._pending is not None, "no round has begun"
        self._residual = self._pending
        self._corrected = self._pending = None

    def discard(self) -> None:
        """The round is aborted: the residual stays as before ``begin``; the contribution is offered again.

        Without a round it does nothing.
        """
        self._corrected = self._pending = None

    def _checked(self, vector: Tensor) -> Tensor:
        assert vector.numel() == self._residual.numel(), "the residual has another length"
        return checked_values(vector)

    def _chunk(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the corrected values and of what is pending in [start, stop)."""
        corrected, pending = self._corrected, self._pending
        assert corrected is not None, "no round has begun"
        assert pending is not None
        assert 0 <= start <= stop <= corrected.numel(), (start, stop, corrected.numel())
        return corrected[start:stop], pending[start:stop]
