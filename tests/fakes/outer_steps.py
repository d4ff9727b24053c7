"""Steps of outer optimizers on copies, and means of rounds that are there as one tensor."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.peer.training.outer_optimizer import OuterOptimizer, OuterStep
from shoal.swarm.protocol.types import TensorSpec


def stepped(
    outer: OuterOptimizer,
    anchor: Tensor,
    state: Tensor,
    mean: Tensor,
    version: int,
    factor: float = 1.0,
    *,
    layout: Sequence[TensorSpec] | None = None,
    piece: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The next anchor, (n,), and state, (slots, n), both new. ``layout``: by default of one matrix; ``piece``: values
    that come at a time, by default all."""
    values, n = torch.cat([anchor.unsqueeze(0), state]), mean.numel()
    step = OuterStep(outer, layout or [TensorSpec(name="w", shape=(1, n))], version, factor)
    size = piece or max(1, n)

    def pieces() -> Iterator[tuple[int, int, Tensor]]:
        for start in range(0, n, size):
            stop = min(start + size, n)
            yield start, stop, mean[start:stop]

    step.measure(values, pieces)
    for start, stop, part in pieces():
        step.change(start, values[:, start:stop], part)
    return values[0], values[1:]


class TensorMean:
    """Mean of a round, in pieces of so many values (a ``RoundMean``)."""

    def __init__(self, values: Tensor, piece: int = 3) -> None:
        self.elements = values.numel()
        self._values = values
        self._piece = piece

    def pieces(self) -> Iterator[tuple[int, int, Tensor]]:
        for start in range(0, self.elements, self._piece):
            stop = min(start + self._piece, self.elements)
            yield start, stop, self._values[start:stop].clone()

    def whole(self) -> Tensor:
        return self._values.clone()
