"""What each layer of a model costs on this machine: seconds forward and backward, and bytes, measured one by one."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.peer.training.device import kept_bytes
from shoal.swarm.errors import DeviceError
from shoal.swarm.pipeline.planner.plan import LayerCost

_REPEATS, _ENOUGH_S = 5, 2.0
"""The median of five, but no sixth second for a layer that takes more than a few tenths."""


@dataclass(frozen=True)
class LayerMeasure:
    """``kind``: layers with the same one were measured once; ``seconds``: forward and backward of a micro-batch."""

    kind: str
    cost: LayerCost
    seconds: float


@dataclass(frozen=True)
class Bench:
    """Where and how layers are measured. ``sent_bytes``: of so many values, as the activations' codec packs them."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    sent_bytes: Callable[[int], int] = lambda values: 4 * values


def measure_layers(
    outlines: Sequence[Sequence[nn.Module]],
    build: Callable[[int], nn.Module],
    given: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    bench: Bench,
) -> tuple[LayerMeasure, ...]:
    """Every layer's cost at the run's shapes: ``given`` is the first one's input, one micro-batch, ``loss_of`` turns
    the last one's output into the loss, and counts as a part of it.

    ``outlines``: of each layer what it is made of, on any device, for its kind (modules, their settings, shapes of
    parameters and input); ``build(i)`` gives layer i. Of each kind one is built and measured, and only one is there at
    a time, so the model need not fit as a whole. Raises ``DeviceError`` when the device has no memory for a layer.
    """
    known: dict[str, tuple[LayerMeasure, Tensor]] = {}
    found: list[LayerMeasure] = []
    flowing = given.to(bench.device)
    last = len(outlines) - 1
    for number, outline in enumerate(outlines):
        kind = _kind(outline, flowing, is_first=number == 0, is_last=number == last)
        if kind not in known:
            end = loss_of if number == last else None
            # The first one's input needs no gradient.
            wanted = flowing.detach().requires_grad_(number > 0 and flowing.is_floating_point())
            with _room_on(bench.device):
                known[kind] = _measure(kind, build(number), wanted, end, bench)
        measured, flowing = known[kind]
        found.append(measured)
    return tuple(found)


def _kind(outline: Sequence[nn.Module], given: Tensor, *, is_first: bool, is_last: bool) -> str:
    """16 hexadecimal digits. Names of parameters are left out: they have the layer's number in them."""
    parts = [part for module in outline for part in module.modules()]
    tensors = [one for module in outline for one in (*module.parameters(), *module.buffers())]
    about = {
        "ends": [is_first, is_last],
        "given": [list(given.shape), str(given.dtype)],
        "modules": [[type(one).__module__, type(one).__qualname__, one.extra_repr(), _plain(one)] for one in parts],
        "tensors": [[list(one.shape), str(one.dtype)] for one in tensors],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _plain(part: nn.Module) -> dict[str, int | float | str]:
    """Settings such as a number of heads, which no shape shows."""
    return {name: value for name, value in vars(part).items() if isinstance(value, int | float | str)}


def _measure(
    kind: str, layer: nn.Module, given: Tensor, loss_of: Callable[[Tensor], Tensor] | None, bench: Bench
) -> tuple[LayerMeasure, Tensor]:
    layer = layer.to(bench.device)

    def forward() -> Tensor:
        with bench.autocast():
            output: Tensor = layer(given)
            return output if loss_of is None else loss_of(output)

    with bench.autocast(), torch.no_grad():
        output = layer(given)
    kept = kept_bytes(layer, forward)
    # Gradients of 1 everywhere: what they are changes nothing about how long it takes.
    seconds = _median_s(lambda: _backward(forward()), bench.device)
    cost = LayerCost(
        parameters_bytes=4 * sum(one.numel() for one in layer.parameters() if one.requires_grad),
        activation_bytes=bench.sent_bytes(output.numel()),
        kept_bytes=kept,
    )
    return LayerMeasure(kind, cost, seconds), output.detach()


@contextmanager
def _room_on(device: torch.device) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU it is an error like any other, but for its words.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise DeviceError(
            f"a micro-batch does not fit through one layer on {device}: end other programs that use it, or join a run "
            f"with smaller layers or micro-batches"
        ) from error


def _backward(output: Tensor) -> None:
    if output.requires_grad:
        torch.autograd.backward(output, torch.ones_like(output))


def _median_s(work: Callable[[], None], device: torch.device) -> float:
    """After a first time that does not count: it allocates, and on a GPU chooses and compiles kernels."""
    _timed_s(work, device)
    taken_s: list[float] = []
    while len(taken_s) < _REPEATS and sum(taken_s) < _ENOUGH_S:
        taken_s.append(_timed_s(work, device))
    return statistics.median(taken_s)


def _timed_s(work: Callable[[], None], device: torch.device) -> float:
    _finish(device)
    began_s = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - began_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
