"""Tensors of all kinds for PowerSGD, and a round of it among peers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.compression.lowrank import PowerSGD

SHAPES = [("w", (48, 80)), ("bias", (80,)), ("wide", (12, 300)), ("conv", (16, 8, 3, 3))]
SHAPES += [("scalar", ()), ("small", (4, 5)), ("none", (0, 7)), ("tall", (301, 9))]
N = 48 * 80 + 80 + 12 * 300 + 16 * 72 + 1 + 20 + 301 * 9
PLAIN = [(3840, 3920), (8672, 8693)]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_of(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = sum((v.double() * w for v, w in zip(vectors, weights, strict=True)), torch.zeros((), dtype=torch.float64))
    return (total / sum(weights)).float()


def one_round(peers: Sequence[PowerSGD], values: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
    first = mean_of([p.first(v) for p, v in zip(peers, values, strict=True)], weights)
    second = mean_of([p.second(first) for p in peers], weights)
    return [p.finish(second) for p in peers]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
