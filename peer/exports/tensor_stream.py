"""A safetensors file that is written while the values come in: one piece has to be in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from shoal.peer.checkpoints.tensors import file_header
from shoal.peer.exports.about import rounded_to
from shoal.peer.training.anchor import bytes_of

NamedShape = tuple[str, tuple[int, ...]]


class TensorStream:
    """Writer of ``named`` tensors of ``dtype``, whose values are appended in order, and of ``extras``, which are at
    hand. Methods raise ``OSError``."""

    def __init__(
        self,
        file: BinaryIO,
        named: Sequence[NamedShape],
        dtype: torch.dtype,
        extras: Mapping[str, Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        self._file = file
        self._dtype = dtype
        self._left = sum(math.prod(shape) for _, shape in named)
        # Wide elements first, so that each tensor begins at a multiple of its element's size.
        by_width = sorted(extras.items(), key=lambda item: -item[1].element_size())
        before = [(name, one) for name, one in by_width if one.element_size() > dtype.itemsize]
        self._after = [(name, one) for name, one in by_width if one.element_size() <= dtype.itemsize]
        tensors = [
            *((name, one.dtype, tuple(one.shape)) for name, one in before),
            *((name, dtype, shape) for name, shape in named),
            *((name, one.dtype, tuple(one.shape)) for name, one in self._after),
        ]
        file.write(file_header(tensors, metadata))
        self._write(one for _, one in before)

    def append(self, vector: Tensor) -> None:
        """Write the next values, (k,)."""
        self._left -= vector.numel()
        self._file.write(bytes_of(rounded_to(self._dtype, vector).contiguous()))

    def finish(self) -> None:
        """Write the rest, once all values have been appended."""
        assert self._left == 0, "all parameters"
        self._write(one for _, one in self._after)

    def _write(self, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            self._file.write(bytes_of(one.detach().cpu().contiguous().view(-1)))
