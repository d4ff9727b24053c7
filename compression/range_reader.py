"""Vectors that are read range by range, wherever their values are, so that no copy of a whole vector is needed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shoal.compression.scratch import empty_aligned


class RangeReader(Protocol):
    """Vector of float32 values, computed or copied to the CPU range by range.

    The values stay the same for as long as the owner of the reader has promised. Calls for disjoint ranges may run in
    several threads at once.
    """

    @property
    def elements(self) -> int:
        """Length of the vector."""
        ...

    def read(self, start: int, stop: int, out: Tensor) -> None:
        """Write the values [start, stop) into ``out``, ``(stop - start,) float32`` on the CPU."""
        ...


class TensorReader:
    """Reader of a tensor, ``(n,) float32``, which nobody may change meanwhile."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @property
    def elements(self) -> int:
        return self._values.numel()

    def read(self, start: int, stop: int, out: Tensor) -> None:
        out.copy_(self._values[start:stop])


def whole_vector(reader: RangeReader) -> Tensor:
    """Return all values, a new ``(n,) float32`` on the CPU."""
    values = empty_aligned(reader.elements)
    reader.read(0, reader.elements, values)
    return values
