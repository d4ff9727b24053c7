"""Outer optimizers: from the anchor and the round's mean to the next anchor, bit-identical on every machine.

They work in place and elementwise, so that any range can be stepped by itself, in float32 with one rounding an
operation: only separate kernels whose results IEEE 754 fixes, and scalars that are rounded to float32 beforehand.
LAMB and LARS step each tensor by a norm of its own: ``OuterStep`` finds the norms in a pass over the mean that changes
nothing, before the pass that steps. ``make_outer`` makes the one that a run file names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from shoal.compression.scratch import scratch
from shoal.peer.training.layer_norms import SquareSum, layer_ranges, layers_of
from shoal.swarm.protocol.run_file import OuterSection
from shoal.swarm.protocol.types import TensorSpec

_SLICE = 2**15
"""Elements of one pass, so that its operands and temporaries stay in the cache. Torch computes as many in one thread:
waiting for several after each short pass costs far more where the processor is busy with training."""

_MOST_TRUST = 2.0**80
"""Largest trust ratio: times a learning rate it is a finite float32."""


@dataclass(frozen=True)
class LayerStep:
    """What a layer-wise optimizer's step is for one tensor. ``trust``: factor on its learning rate, by its norms;
    ``decays``: whether weight decay is for it."""

    trust: float = 1.0
    decays: bool = True


_ANY_LAYER = LayerStep()


class OuterOptimizer(Protocol):
    """Outer optimizer: settings only; the state is passed in and returned."""

    @property
    def slots(self) -> int:
        """Number of state vectors."""
        ...

    def step_(
        self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0, layer: LayerStep = _ANY_LAYER
    ) -> None:
        """Overwrite a range of the anchor and of the state vectors by that of the next version.

        ``values``: (1 + slots, k), the anchor's range and those of the state vectors, zeros at first; ``mean``: (k,),
        mean pseudo-gradient (anchor - local) or gradient, so the step goes against it; both float32 on one device, with
        contiguous rows; ``version``: number of steps before this one; ``lr_factor``: the schedule's factor on the
        learning rate; ``layer``: of the tensor that the range is in, which elementwise optimizers do not need.
        """
        ...


@runtime_checkable
class LayerwiseOptimizer(OuterOptimizer, Protocol):
    """Outer optimizer that steps a matrix by its own norm and that of a second vector, which it measures."""

    def measured(self, values: Tensor, mean: Tensor, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the anchor and the second vector of a range, piece by piece; changes nothing.

        The second vector of a piece is overwritten when the next piece is asked for. Arguments: as of ``step_``."""
        ...

    def trust(self, anchor_norm: float, measured_norm: float) -> float:
        """Return the factor on the learning rate of a matrix of these norms."""
        ...


class OuterStep:
    """One step of an outer optimizer on a state that is overwritten range by range: ``measure``, then ``change``."""

    def __init__(self, outer: OuterOptimizer, layout: Sequence[TensorSpec], version: int, lr_factor: float) -> None:
        """``layout``: the tensors that the state has; the rest: as of ``OuterOptimizer.step_``."""
        self._outer = outer
        self._version = version
        self._lr_factor = lr_factor
        self._layers = layers_of(layout) if isinstance(outer, LayerwiseOptimizer) else []
        # Biases and the gains of norms are stepped without norms, and do not decay.
        self._steps = [LayerStep(decays=layer.is_matrix) for layer in self._layers]

    @torch.no_grad()
    def measure(self, values: Tensor, pieces: Callable[[], Iterable[tuple[int, int, Tensor]]]) -> None:
        """Find the norms that the step needs; asks for the pieces only if it needs some, and changes nothing.

        ``values``: (1 + slots, n); ``pieces``: start, stop and values of consecutive ranges of the mean that cover it.
        """
        outer = self._outer
        if not isinstance(outer, LayerwiseOptimizer) or not any(layer.is_matrix for layer in self._layers):
            return
        sums: tuple[SquareSum, ...] = ()
        for start, stop, mean in pieces():
            for number, first, last in layer_ranges(self._layers, start, stop):
                layer = self._layers[number]
                if not layer.is_matrix:
                    continue
                if first == layer.start:
                    sums = tuple(SquareSum(layer.stop - layer.start, values.device) for _ in range(2))
                for vectors in outer.measured(values[:, first:last], mean[first - start : last - start], self._version):
                    for one, vector in zip(sums, vectors, strict=True):
                        one.add(vector)
                if last == layer.stop:
                    self._steps[number] = LayerStep(outer.trust(*(one.norm() for one in sums)))

    def change(self, start: int, values: Tensor, mean: Tensor) -> None:
        """Take the step on the range from ``start`` on; see ``OuterOptimizer.step_``."""
        if not self._layers:
            self._outer.step_(values, mean, self._version, self._lr_factor)
        for number, first, last in layer_ranges(self._layers, start, start + mean.numel()):
            part = slice(first - start, last - start)
            self._outer.step_(values[:, part], mean[part], self._version, self._lr_factor, self._steps[number])


@dataclass(frozen=True)
class SGD:
    """Plain gradient descent; with a pseudo-gradient and ``lr`` 1 it is federated averaging."""

    slots: ClassVar[int] = 0
    lr: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)

    @torch.no_grad()
    def step_(
        self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0, layer: LayerStep = _ANY_LAYER
    ) -> None:
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
    def step_(
        self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0, layer: LayerStep = _ANY_LAYER
    ) -> None:
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
        _check_moments(self.betas, self.eps)
        _check_decay(self.weight_decay)

    @torch.no_grad()
    def step_(
        self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0, layer: LayerStep = _ANY_LAYER
    ) -> None:
        """Take a step; ``version`` 0 is the first. See ``OuterOptimizer.step_``."""
        lr, moments = self.lr * lr_factor, _Moments(self.betas, self.eps, version)
        decay, step_size = f32(1.0 - lr * self.weight_decay), f32(lr / moments.correction)
        for (anchor, first, second), gradient in _slices(self.slots, values, mean):
            moments.take_(first, second, gradient)
            change = torch.mul(first, step_size, out=_scratch("change", gradient)).div_(moments.denominator(second))
            anchor.mul_(decay).sub_(change)


@dataclass(frozen=True)
class LAMB:
    """LAMB (arXiv:1904.00962): AdamW whose step has, for each matrix, the length of lr times the matrix's norm.

    The state is as of ``AdamW``; without clipping of norms, as in the paper's experiments."""

    slots: ClassVar[int] = 2
    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_moments(self.betas, self.eps)
        _check_decay(self.weight_decay)

    def measured(self, values: Tensor, mean: Tensor, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield anchor and step before its scaling; see ``LayerwiseOptimizer.measured``."""
        moments = _Moments(self.betas, self.eps, version)
        for (anchor, first, second), gradient in _slices(self.slots, values, mean):
            next_first = _scratch("first", gradient).copy_(first)
            next_second = _scratch("second", gradient).copy_(second)
            moments.take_(next_first, next_second, gradient)
            yield anchor, self._direction(anchor, next_first, next_second, moments, decays=True)

    def trust(self, anchor_norm: float, measured_norm: float) -> float:
        """Return the ratio of the norms, 1 where one of them is zero."""
        return _ratio(anchor_norm, measured_norm)

    @torch.no_grad()
    def step_(
        self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0, layer: LayerStep = _ANY_LAYER
    ) -> None:
        """Take a step; ``version`` 0 is the first. See ``OuterOptimizer.step_``."""
        lr, moments = f32(self.lr * lr_factor * layer.trust), _Moments(self.betas, self.eps, version)
        for (anchor, first, second), gradient in _slices(self.slots, values, mean):
            moments.take_(first, second, gradient)
            anchor.sub_(self._direction(anchor, first, second, moments, decays=layer.decays).mul_(lr))

    def _direction(self, anchor: Tensor, first: Tensor, second: Tensor, moments: _Moments, *, decays: bool) -> Tensor:
        """Return, in scratch, the step before its scaling, from the moments after this round's gradient."""
        direction = torch.mul(first, f32(1.0 / moments.correction), out=_scratch("change", first))
        direction.div_(moments.denominator(second))
        if decays and self.weight_decay:
            direction.add_(torch.mul(anchor, f32(self.weight_decay), out=_scratch("decay", first)))
        return direction


@dataclass(frozen=True)
class LARS:
    """LARS (arXiv:1708.03888): SGD with momentum whose learning rate is, for each matrix, by its own and its gradient's
    norm.

    buffer = momentum * buffer + lr * trust * (mean + weight_decay * anchor); anchor = anchor - buffer. The state is the
    buffer."""

    slots: ClassVar[int] = 1
    lr: float
    momentum: float
    weight_decay: float
    trust_coefficient: float

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_fraction("momentum", self.momentum)
        _check_decay(self.weight_decay)
        if not (math.isfinite(self.trust_coefficient) and self.trust_coefficient > 0):
            raise ValueError(f"trust_coefficient must be above 0, not {self.trust_coefficient}")

    def measured(self, values: Tensor, mean: Tensor, version: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield anchor and gradient; see ``LayerwiseOptimizer.measured``."""
        for (anchor, _), gradient in _slices(self.slots, values, mean):
            yield anchor, gradient

    def trust(self, anchor_norm: float, measured_norm: float) -> float:
        """Return trust_coefficient * |anchor| / (|mean| + weight_decay * |anchor|), 1 where one norm is zero."""
        if anchor_norm == 0.0 or measured_norm == 0.0:
            return 1.0
        return _ratio(self.trust_coefficient * anchor_norm, measured_norm + self.weight_decay * anchor_norm)

    @torch.no_grad()
    def step_(
        self, values: Tensor, mean: Tensor, version: int, lr_factor: float = 1.0, layer: LayerStep = _ANY_LAYER
    ) -> None:
        """Take a step. See ``OuterOptimizer.step_``."""
        lr, momentum = f32(self.lr * lr_factor * layer.trust), f32(self.momentum)
        decay = f32(self.weight_decay) if layer.decays else 0.0
        for (anchor, buffer), gradient in _slices(self.slots, values, mean):
            change = _scratch("change", gradient)
            if decay:
                torch.mul(anchor, decay, out=change).add_(gradient).mul_(lr)
            else:
                torch.mul(gradient, lr, out=change)
            anchor.sub_(buffer.mul_(momentum).add_(change))


class _Moments:
    """Adam's moments at one step: scalars of it, and the operations on ranges."""

    def __init__(self, betas: Sequence[float], eps: float, version: int) -> None:
        (beta1, beta2), t = betas, version + 1
        self.correction = 1.0 - _power(beta1, t)
        # No division by a scalar: CUDA would multiply with its reciprocal where the CPU divides.
        self._root_factor = f32(1.0 / math.sqrt(1.0 - _power(beta2, t)))
        self._keep1, self._new1, self._keep2, self._new2 = f32(beta1), f32(1.0 - beta1), f32(beta2), f32(1.0 - beta2)
        self._eps = f32(eps)

    def take_(self, first: Tensor, second: Tensor, gradient: Tensor) -> None:
        """Overwrite a range of the moments by that after a further gradient."""
        change = _scratch("change", gradient)
        first.mul_(self._keep1).add_(torch.mul(gradient, self._new1, out=change))
        second.mul_(self._keep2).add_(torch.mul(gradient, gradient, out=change).mul_(self._new2))

    def denominator(self, second: Tensor) -> Tensor:
        """Return, in scratch, what the first moment's range is divided by."""
        return _sqrt(second, _scratch("root", second)).mul_(self._root_factor).add_(self._eps)


def _ratio(of: float, to: float) -> float:
    """Return ``of / to``, 1 where one of them is zero, and never so large that a product with it is infinite."""
    return min(of / to, _MOST_TRUST) if of and to else 1.0


def make_outer(outer: OuterSection) -> OuterOptimizer:
    """Make the outer optimizer that a run file names. Raises ``ValueError`` for a setting out of range."""
    match outer.optimizer:
        case "nesterov":
            return Nesterov(outer.lr, outer.momentum)
        case "sgd":
            return SGD(outer.lr)
        case "adamw":
            return AdamW(outer.lr, outer.betas, outer.eps, outer.weight_decay)
        case "lamb":
            return LAMB(outer.lr, outer.betas, outer.eps, outer.weight_decay)
        case "lars":
            return LARS(outer.lr, outer.momentum, outer.weight_decay, outer.trust_coefficient)


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


def _check_moments(betas: Sequence[float], eps: float) -> None:
    if len(betas) != 2:
        raise ValueError(f"betas are two numbers, not {len(betas)}")
    for beta in betas:
        _check_fraction("each of betas", beta)
    if not (math.isfinite(eps) and f32(eps) > 0):
        raise ValueError(f"eps must be above 0 in float32, not {eps}")


def _check_decay(weight_decay: float) -> None:
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise ValueError(f"weight_decay must be 0 or more, not {weight_decay}")


def _check_fraction(what: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{what} must be from 0 to below 1, not {value}")
