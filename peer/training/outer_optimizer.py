"""Outer optimizers: from the anchor and the round's mean to the next anchor, bit-identical on every machine.

They work in place and elementwise, so that any range can be stepped by itself, in float32 with one rounding an
operation: only separate kernels whose results IEEE 754 fixes, and scalars that are rounded to float32 beforehand.
``make_outer`` knows all by name, and ``OuterSection`` of the run file has their settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.compression.scratch import scratch
from shoal.swarm.protocol.run_file import OuterSection

_SLICE = 2**15
"""Elements of one pass, so that its operands and temporaries stay in the cache. Torch computes as many in one thread:
waiting for several after each short pass costs far more where the processor is busy with training."""


class OuterOptimizer(Protocol):
    """Outer optimizer: settings only; the state is passed in and returned."""

    @property
    def slots(self) -> int:
        """Number of state vectors."""
        ...

    def step_(self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0) -> None:
        """Overwrite a range of the anchor and of the state vectors by that of the next version.

        ``values``: (1 + slots, k), the anchor's range and those of the state vectors, zeros at first; ``mean``: (k,),
        mean pseudo-gradient (anchor - local) or gradient, so the step goes against it; both float32 on one device, with
        contiguous rows; ``version``: number of steps before this one; ``lr_factor``: the schedule's factor on the
        learning rate.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Plain gradient descent; with a pseudo-gradient and ``lr`` 1 it is federated averaging."""

    slots: ClassVar[int] = 0
    lr: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)

    @torch.no_grad()
    def step_(self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0) -> None:
        """Take the step anchor = anchor - lr * mean; see ``OuterOptimizer.step_``."""
        lr = f32(self.lr * lr_factor)
        for (anchor,), gradient in _slices(self.slots, values, mean):
            anchor.sub_(torch.mul(gradient, lr, out=_scratch("change", gradient)))


@dataclass(frozen=True)
class Nesterov:
    """Nesterov momentum as in DiLoCo (arXiv:2311.08105), by the formula of ``torch.optim.SGD``.

    buffer = momentum * buffer + mean; anchor = anchor - lr * (mean + momentum * buffer).
    """

    slots: ClassVar[int] = 1
    lr: float
    momentum: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_fraction("momentum", self.momentum)

    @torch.no_grad()
    def step_(self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0) -> None:
        """Take a step; the state is the momentum buffer. See ``OuterOptimizer.step_``."""
        lr, momentum = f32(self.lr * lr_factor), f32(self.momentum)
        for (anchor, buffer), gradient in _slices(self.slots, values, mean):
            buffer.mul_(momentum).add_(gradient)
            direction = torch.mul(buffer, momentum, out=_scratch("change", gradient)).add_(gradient)
            anchor.sub_(direction.mul_(lr))


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv:1711.05101), with the formula of ``torch.optim.AdamW``.

    The state is the first and the second moment. Bias corrections are computed in float64.
    """

    slots: ClassVar[int] = 2
    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        if len(self.betas) != 2:
            raise ValueError(f"betas are two numbers, not {len(self.betas)}")
        for beta in self.betas:
            _check_fraction("each of betas", beta)
        if not (math.isfinite(self.eps) and f32(self.eps) > 0):
            raise ValueError(f"eps must be above 0 in float32, not {self.eps}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay must be 0 or more, not {self.weight_decay}")

    @torch.no_grad()
    def step_(self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0) -> None:
        """Take a step; ``version`` 0 is the first. See ``OuterOptimizer.step_``."""
        lr, (beta1, beta2), t = self.lr * lr_factor, self.betas, version + 1
        decay = f32(1.0 - lr * self.weight_decay)
        step_size = f32(lr / (1.0 - _power(beta1, t)))
        # No division by a scalar: CUDA would multiply with its reciprocal where the CPU divides.
        root_factor = f32(1.0 / math.sqrt(1.0 - _power(beta2, t)))
        keep1, new1, keep2, new2 = f32(beta1), f32(1.0 - beta1), f32(beta2), f32(1.0 - beta2)
        eps = f32(self.eps)
        for (anchor, first, second), gradient in _slices(self.slots, values, mean):
            change, root = _scratch("change", gradient), _scratch("root", gradient)
            first.mul_(keep1).add_(torch.mul(gradient, new1, out=change))
            second.mul_(keep2).add_(torch.mul(gradient, gradient, out=change).mul_(new2))
            denominator = _sqrt(second, root).mul_(root_factor).add_(eps)
            torch.mul(first, step_size, out=change).div_(denominator)
            anchor.mul_(decay).sub_(change)


def make_outer(
    name: str, *, lr: float, momentum: float, betas: Sequence[float], eps: float, weight_decay: float
) -> OuterOptimizer:
    """The outer optimizer called ``name``: "nesterov", "sgd" or "adamw". It ignores settings it does not use.

    Raises ValueError for another name, or for a setting out of range.
    """
    match name:
        case "nesterov":
            return Nesterov(lr, momentum)
        case "sgd":
            return SGD(lr)
        case "adamw":
            return AdamW(lr, tuple(betas), eps, weight_decay)
    raise ValueError(f"no outer optimizer is called {name!r}; there are nesterov, sgd, adamw")


def outer_of(outer: OuterSection) -> OuterOptimizer:
    """The outer optimizer that a run file names."""
    return make_outer(
        outer.optimizer,
        lr=outer.lr,
        momentum=outer.momentum,
        betas=outer.betas,
        eps=outer.eps,
        weight_decay=outer.weight_decay,
    )


def f32(x: float) -> float:
    """Round ``x`` to float32, as a float32 kernel does on any device."""
    return float(np.float32(x))


def _power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` by squaring, because C libraries differ in the last bit of ``pow``."""
    power = 1.0
    while exponent:
        if exponent & 1:
            power *= base
        base *= base
        exponent >>= 1
    return power


def _sqrt(x: Tensor, out: Tensor) -> Tensor:
    """Write the correctly rounded float32 square root of ``x``, (n,), to ``out`` and return that.

    On the CPU ``torch.sqrt`` is one bit off for about every sixth value, through MKL, while NumPy uses the processor's
    exact instruction. On other devices a float64 root is rounded: its error is below one bit of float64, and no root of
    a float32 comes that near to the middle of two float32.
    """
    if x.device.type == "cpu":
        np.sqrt(x.numpy(), out=out.numpy())
        return out
    return out.copy_(x.double().sqrt_())


def _slices(slots: int, values: Tensor, mean: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """Yield the rows and the mean in slices, after checking the preconditions of ``step_``."""
    n = mean.numel()
    assert values.shape == (1 + slots, n), (tuple(values.shape), slots, n)
    for tensor in (*values, mean):
        assert tensor.dtype == torch.float32
        assert tensor.device == mean.device
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
    for start in range(0, n, _SLICE):
        part = slice(start, min(start + _SLICE, n))
        yield tuple(row[part] for row in values), mean[part]


def _scratch(purpose: str, like: Tensor) -> Tensor:
    return scratch(f"outer_{purpose}", like.numel(), like.device)


def _check_lr(lr: float) -> None:
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr must be 0 or more, not {lr}")


def _check_fraction(what: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{what} must be from 0 to below 1, not {value}")
