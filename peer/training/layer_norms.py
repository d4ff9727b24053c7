"""Norms of the tensors of a model, bit-identical on every machine and in whatever pieces the values come.

A float32's square is exact in float64. The squares of a tensor are dealt to lanes in the order of their indices, so a
lane's sum has the same additions in the same order however the tensor is cut, and on any device: every addition is one
elementwise kernel. The lanes are added up exactly and rounded once (``math.fsum``)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.swarm.protocol.types import TensorSpec

_LANES = 2**13
"""Lanes of a tensor: their sums stay in the cache, and a pass over them is long enough for its kernels to pay."""


@dataclass(frozen=True)
class Layer:
    """Range of the run's vector that one tensor has. ``is_matrix``: it has two dimensions or more; biases and the gains
    of norms have fewer, which layer-wise optimizers step as any other does."""

    start: int
    stop: int
    is_matrix: bool


def layers_of(layout: Sequence[TensorSpec]) -> list[Layer]:
    """Return the tensors' ranges; a tensor without elements has none."""
    layers, at = [], 0
    for spec in layout:
        if spec.elements:
            layers.append(Layer(at, at + spec.elements, len(spec.shape) >= 2))
        at += spec.elements
    return layers


def layer_ranges(layers: Sequence[Layer], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and stop of the parts that layers have of a range of the vector."""
    for number in range(bisect_right(layers, start, key=lambda one: one.stop), len(layers)):
        layer = layers[number]
        if layer.start >= stop:
            return
        yield number, max(start, layer.start), min(stop, layer.stop)


class SquareSum:
    """Sum of the squares of a tensor's values, which are added in their order, in pieces of any size."""

    def __init__(self, elements: int, device: torch.device) -> None:
        """``elements``: of the whole tensor."""
        self._lanes = torch.zeros(min(elements, _LANES), dtype=torch.float64, device=device)
        self._at = 0

    def add(self, values: Tensor) -> None:
        """Add the next values, (k,) float32."""
        squares = values.double()
        squares.mul_(squares)
        lanes, done = self._lanes.numel(), 0
        while done < squares.numel():
            size = min(lanes - self._at, squares.numel() - done)
            self._lanes[self._at : self._at + size].add_(squares[done : done + size])
            self._at, done = (self._at + size) % lanes, done + size

    def norm(self) -> float:
        """Return the square root of the sum, NaN or infinity where a value was."""
        return math.sqrt(math.fsum(self._lanes.tolist()))
