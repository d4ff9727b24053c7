"""PowerSGD: every matrix of a contribution as two thin factors, each of which is averaged in a reduce of its own.

After Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727). Not a ``Codec``: what it gives are floats to be averaged, and any codec may pack those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.compression.codec import CodecError, checked_range, checked_values
from shoal.compression.reproducible import multiply_transposed, orthonormal

_MAX_VALUES = 2**40


@dataclass(frozen=True)
class _Matrix:
    """A tensor that is compressed: ``(rows, columns)`` at ``at`` in the values, its P and Q in the two vectors."""

    name: str
    rows: int
    columns: int
    rank: int
    at: int
    first_at: int
    second_at: int

    def values(self, vector: Tensor) -> Tensor:
        """A view of ``(n,)``: ``(rows, columns)``."""
        return vector[self.at : self.at + self.rows * self.columns].view(self.rows, self.columns)

    def p(self, first: Tensor) -> Tensor:
        """A view of ``(first_size,)``: ``(rows, rank)``."""
        return first[self.first_at : self.first_at + self.rows * self.rank].view(self.rows, self.rank)

    def q(self, second: Tensor) -> Tensor:
        """A view of ``(second_size,)``: ``(columns, rank)``."""
        return second[self.second_at : self.second_at + self.columns * self.rank].view(self.columns, self.rank)


@dataclass
class _Round:
    values: Tensor | None = None
    own_second: Tensor | None = None
    plain_mean: Tensor | None = None
    bases: list[Tensor] | None = None
    mean_second: Tensor | None = None


class PowerSGD:
    """The low-rank mean of all peers' values, ``(n,) float32``: the tensors of ``shapes``, flat, one after the other.

    With one matrix ``M``, ``(a, b)``, a peer, and ``Q``, ``(b, r)``, equal on all peers, a round is::

        first = power.first(corrected)        # P = M Q              averaged by the caller: mean_first
        second = power.second(mean_first)     # Q' = Mᵀ B            averaged by the caller: mean_second
        mean = power.finish(mean_second)      # B mean(Q')ᵀ          the same bits on every peer
        residual = power.residual()           # M - B Q'ᵀ            for error feedback
        power.commit()                        # the next round's Q; or discard(), and nothing has happened

    B is mean(P), orthonormalised. Both steps are linear, so B mean(Q')ᵀ = B Bᵀ mean(M), whatever the weights of the
    mean. A peer that contributes nothing, or that was late, calls ``follow(mean_first, mean_second)`` and ``commit``.

    A tensor is seen as the matrix (first dimension, all others). It is compressed when
    ``rank * (a + b) * min_compression_ratio <= a * b``, with the rank no more than a and b; the others (all that are
    one-dimensional) travel uncompressed in ``first``, and their mean is exact.

    **Every peer gets the same bits from the same mean bytes**, because all that follows from the means is made of
    float64 operations that round once each, in an order written down here: Gram-Schmidt with sums folded in halves,
    and B mean(Q')ᵀ column by column (products of two float32 are exact in float64, so a fused multiply-add gives the
    same). Subnormal float32 count as zero. Sending the basis instead would need one peer that holds a matrix's whole
    mean(P), while owners hold ranges of indices, and it would cost a third exchange. What a peer makes of its own
    values (P and Q') need not be reproducible, so that is plain matrix multiplication.

    **Warm start**: mean(Q'), orthonormalised, is the next round's Q (which spans what mean(Q') does, and keeps the
    factors at the values' own magnitude, whatever packs them). A column that vanished or depends on others is drawn
    anew. Draws come from ``seed`` and the number of committed rounds, so peers agree on them too.

    ``first_size`` and ``second_size`` tell the lengths of the two vectors. Layout of ``first``: P of every matrix in
    the order of ``shapes``, ``(a, r)`` row-major, then from ``plain_at`` on the uncompressed tensors in that order;
    of ``second``: Q' of every matrix, ``(b, r)``. One round at a time; methods may not overlap. On the CPU.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[str, Sequence[int]]],
        rank: int,
        min_compression_ratio: float = 2.0,
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise CodecError(f"a rank is at least 1, not {rank}")
        if not 0.0 < min_compression_ratio < math.inf:
            raise CodecError(f"a compression ratio is positive and finite, not {min_compression_ratio}")
        if not 0 <= seed < 2**64:
            raise CodecError("a seed has at most 64 bits and no sign")
        self._matrices: list[_Matrix] = []
        self._plain: list[tuple[int, int]] = []
        self.n = self.plain_at = self.second_size = plain_size = 0
        for name, shape in shapes:
            size = _checked_size(name, shape)
            a = shape[0] if len(shape) else 1
            b = size // max(a, 1)
            if (r := min(rank, a, b)) and r * (a + b) * min_compression_ratio <= size:
                self._matrices.append(_Matrix(name, a, b, r, self.n, self.plain_at, self.second_size))
                self.plain_at += a * r
                self.second_size += b * r
            else:
                self._plain.append((self.n, self.n + size))
                plain_size += size
            self.n += size
        if self.n > _MAX_VALUES:
            raise CodecError(f"{self.n} values are more than the {_MAX_VALUES} that PowerSGD takes")
        self.first_size = self.plain_at + plain_size
        if len({name for name, _ in shapes}) < len(shapes):
            raise CodecError("two tensors have the same name")
        self._seed, self._generation = seed, 0
        self._q = torch.zeros(self.second_size)
        self._redraw_lost()
        self._round: _Round | None = None

    def first(self, values: Tensor) -> Tensor:
        """Begin a round: ``(n,) float32`` to a new ``(first_size,) float32``, to be averaged.

        ``values`` is kept, not copied, and may not change until ``commit``. Raises CodecError for another length and
        when a value or a factor is NaN or infinite; no round has begun then.
        """
        assert self._round is None, "the round before was neither committed nor discarded"
        values = _checked_vector(values, self.n, "values")
        first = torch.empty(self.first_size)
        for matrix in self._matrices:
            torch.mm(matrix.values(values), matrix.q(self._q), out=matrix.p(first))
        first[self.plain_at :] = self._get_plain(values)
        checked_range(first)
        self._round = _Round(values=values)
        return first

    def second(self, mean_first: Tensor) -> Tensor:
        """From the mean of all ``first``, as decoded by everybody, to a new ``(second_size,) float32``.

        Raises CodecError for another length and for values that are NaN or infinite.
        """
        now = self._round
        assert now is not None, "no round has begun"
        assert now.values is not None, "a peer that follows has no factor of its own"
        self._set_mean_first(now, mean_first)
        assert now.bases is not None
        second = torch.empty(self.second_size)
        for matrix, basis in zip(self._matrices, now.bases, strict=True):
            torch.mm(matrix.values(now.values).t(), basis, out=matrix.q(second))
        checked_range(second)
        now.own_second = second.clone()
        return second

    def finish(self, mean_second: Tensor) -> Tensor:
        """From the mean of all ``second``, as decoded by everybody, to the mean's approximation.

        A new ``(n,) float32``, the same bits on every peer. Raises CodecError for another length and when a value is
        or becomes NaN or infinite.
        """
        assert self._round is not None, "no round has begun"
        return self._finish(self._round, mean_second)

    def follow(self, mean_first: Tensor, mean_second: Tensor) -> Tensor:
        """What ``finish`` gives the others, from the two means alone: for a peer that is not in them.

        Replaces a round that had begun. Raises CodecError as ``second`` and ``finish`` do, with nothing changed.
        """
        now = _Round()
        self._set_mean_first(now, mean_first)
        mean = self._finish(now, mean_second)
        self._round = now
        return mean

    def residual(self, sent_first: Tensor | None = None, sent_second: Tensor | None = None) -> Tensor:
        """What the mean lacks of this peer's values, a new ``(n,) float32``; after ``second``.

        ``sent_first``, ``sent_second``: what of the two vectors did reach the means, where that is not all: as
        decoded from the packed bytes, zero in chunks that are void or came too late. The means of what peers sent
        and their residuals then add up to the mean of their values, but for rounding.
        """
        now = self._round
        assert now is not None, "no round has begun"
        assert now.values is not None, "a peer that follows has no residual"
        second = now.own_second if sent_second is None else sent_second
        assert second is not None, "residual comes after second"
        assert now.bases is not None
        second = _checked_vector(second, self.second_size, "what was sent of second")
        residual = now.values.clone()
        plain = self._get_plain(residual)
        if sent_first is None:
            plain.zero_()
        else:
            plain -= _checked_vector(sent_first, self.first_size, "what was sent of first")[self.plain_at :]
        self._put_plain(plain, residual)
        for matrix, basis in zip(self._matrices, now.bases, strict=True):
            matrix.values(residual).addmm_(basis, matrix.q(second).t(), alpha=-1.0)
        return residual

    def commit(self) -> None:
        """The round is committed: the mean of second becomes the next round's Q, on every peer."""
        now = self._round
        assert now is not None, "no round has begun"
        assert now.mean_second is not None, "commit comes after finish"
        self._generation += 1
        for matrix in self._matrices:
            matrix.q(self._q).copy_(orthonormal(matrix.q(now.mean_second)))
        self._redraw_lost()
        self._round = None

    def discard(self) -> None:
        """The round is aborted: Q stays as it was. Without a round it does nothing."""
        self._round = None

    def state(self) -> dict[str, Tensor]:
        """Copies, for checkpoints and joiners: ``generation``, ``(1,) int64``, and ``q.NAME``, ``(b, r) float32``."""
        state = {f"q.{matrix.name}": matrix.q(self._q).clone() for matrix in self._matrices}
        return {"generation": torch.tensor([self._generation]), **state}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another's ``state``; not within a round. CodecError when it does not fit; nothing changes then."""
        assert self._round is None, "load comes between rounds"
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"generation": (torch.int64, (1,))}
        shapes |= {f"q.{matrix.name}": (torch.float32, (matrix.columns, matrix.rank)) for matrix in self._matrices}
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
        if found != shapes:
            wrong = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
            raise CodecError(f"{wrong[0]!r} in the state of PowerSGD is missing, unknown or of another shape")
        if (generation := int(state["generation"])) < 0:
            raise CodecError("the generation in the state of PowerSGD is negative")
        for tensor in state.values():
            checked_range(tensor.flatten())
        for matrix in self._matrices:
            matrix.q(self._q).copy_(state[f"q.{matrix.name}"])
        self._generation = generation

    def _set_mean_first(self, now: _Round, mean_first: Tensor) -> None:
        mean_first = _checked_vector(mean_first, self.first_size, "the mean of first")
        now.plain_mean = mean_first[self.plain_at :].clone()
        now.bases = [orthonormal(matrix.p(mean_first)) for matrix in self._matrices]

    def _finish(self, now: _Round, mean_second: Tensor) -> Tensor:
        assert now.bases is not None, "finish comes after second"
        assert now.plain_mean is not None
        mean_second = _checked_vector(mean_second, self.second_size, "the mean of second").clone()
        mean = torch.empty(self.n)
        for matrix, basis in zip(self._matrices, now.bases, strict=True):
            multiply_transposed(basis, matrix.q(mean_second), matrix.values(mean))
        self._put_plain(now.plain_mean, mean)
        checked_range(mean)
        now.mean_second = mean_second
        return mean

    def _get_plain(self, values: Tensor) -> Tensor:
        """The uncompressed tensors of ``(n,)``, as a new ``(first_size - plain_at,)``."""
        return torch.cat([torch.empty(0), *(values[start:stop] for start, stop in self._plain)])

    def _put_plain(self, plain: Tensor, values: Tensor) -> None:
        """Copy the uncompressed tensors from ``(first_size - plain_at,)`` to their places in ``(n,)``."""
        at = 0
        for start, stop in self._plain:
            values[start:stop] = plain[at : at + stop - start]
            at += stop - start

    def _redraw_lost(self) -> None:
        """Draw anew each column of Q that is zero: uniform within about 1 / sqrt(b), the same on every peer.

        Row i of column c of matrix m takes the top 24 bits of draw i of NumPy's Philox with the key (seed, m) and
        the counter (0, c, generation, 0). Odd integers times a power of two: exact in float32, and never zero.
        """
        for number, matrix in enumerate(self._matrices):
            q = matrix.q(self._q)
            for column in range(matrix.rank):
                if not bool(q[:, column].any()):
                    counter = np.array([0, column, self._generation, 0], dtype=np.uint64)
                    philox = np.random.Philox(key=np.array([self._seed, number], dtype=np.uint64), counter=counter)
                    draws = (philox.random_raw(matrix.columns) >> np.uint64(40)).astype(np.int64)
                    odd = torch.from_numpy((2 * draws - (2**24 - 1)).astype(np.float32))
                    q[:, column] = odd * 2.0 ** -(24 + matrix.columns.bit_length() // 2)


def _checked_size(name: str, shape: Sequence[int]) -> int:
    if not all(isinstance(length, int) and 0 <= length <= _MAX_VALUES for length in shape):
        raise CodecError(f"{name!r} cannot have the shape {tuple(shape)}")
    return math.prod(shape)


def _checked_vector(vector: Tensor, n: int, what: str) -> Tensor:
    vector = checked_values(vector)
    if vector.numel() != n:
        raise CodecError(f"{what}: {vector.numel()} values where there should be {n}")
    checked_range(vector)
    return vector
