"""Memory of a local step, measured: the micro-batch that fits, and activations that are computed again."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shoal.peer.machine_memory import memory_text
from shoal.peer.training.device import has_own_memory
from shoal.peer.training.rng import random_preserved
from shoal.swarm.errors import DeviceError

log = logging.getLogger(__name__)

LossOf = Callable[[int], Tensor]
"""Computes the loss of so many samples, ()."""

_HELP = "allow more (--max-memory, on a GPU --max-device-memory) or join a run with a smaller model"


@dataclass(frozen=True)
class StepMemory:
    """Bytes that forward and backward take beside parameters and gradients.

    ``once``: whatever the number of samples, such as copies of the weights in autocast's type; ``sample``: of each."""

    once: int
    sample: int

    @classmethod
    def of(cls, one: int, two: int) -> StepMemory:
        """Tell them apart by the peaks of a step of one sample and of two."""
        sample = max(1, two - one)
        return cls(max(0, one - sample), sample)

    def samples_in(self, room: int) -> int:
        """Return how many samples ``room`` bytes hold."""
        return max(0, room - self.once) // self.sample


def plan_micro_batch(model: nn.Module, loss_of: LossOf, batch: int, room: int) -> int:
    """Return how many of ``batch`` samples may run at once in ``room`` bytes, at least one.

    Where not even one fits, the model's blocks are made to compute their activations again in the backward pass, which
    takes a third more time. Nothing else of the measurement is left. Raises ``DeviceError`` if one sample needs more
    all the same.
    """
    with without_trace(model):
        try:
            return _samples_that_fit(model, loss_of, batch, room)
        except DeviceError as error:
            blocks = recompute_activations(model)
            if not blocks:
                raise
            log.warning("%s; so the activations of %d blocks are computed again in the backward pass", error, blocks)
            return _samples_that_fit(model, loss_of, batch, room)


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and all random state at the end, and leave no gradients: a trial of the model is no
    training, and members that measure more or less have to begin alike."""
    buffers = [(part, name, one) for part in model.modules() for name, one in part._buffers.items() if one is not None]
    copies = [one.detach().clone() for _, _, one in buffers]
    with random_preserved(next(model.parameters()).device):
        try:
            yield
        finally:
            with torch.no_grad():
                for (part, name, one), copy in zip(buffers, copies, strict=True):
                    part._buffers[name] = one.copy_(copy)
            for parameter in model.parameters():
                parameter.grad = None


def _samples_that_fit(model: nn.Module, loss_of: LossOf, batch: int, room: int) -> int:
    device = next(model.parameters()).device
    one = step_peak(model, loss_of, 1, room)
    try:
        two = step_peak(model, loss_of, 2, room) if batch > 1 else math.inf
    except DeviceError:
        two = math.inf
    if two > room:
        return 1
    samples = min(batch, max(1, StepMemory.of(one, int(two)).samples_in(room)))
    while has_own_memory(device) and samples > 2:  # an allocator needs some more for many samples than for two
        try:
            step_peak(model, loss_of, samples, room)
            break
        except DeviceError:
            samples = samples * 3 // 4
    return samples


def step_peak(model: nn.Module, loss_of: LossOf, samples: int, most: int) -> int:
    """Return the peak of a step with gradients in place; leaves none behind. Raises ``DeviceError``."""
    trained = [one for one in model.parameters() if one.requires_grad]
    for one in trained:
        one.grad = torch.zeros_like(one)
    try:
        return peak_bytes(trained[0].device, lambda: loss_of(samples).backward(), most)  # type: ignore[no-untyped-call]
    finally:
        for one in trained:
            one.grad = None


def peak_bytes(device: torch.device, work: Callable[[], object], most: int) -> int:
    """Measure the most bytes of tensors that ``work`` has in use at a time, beyond those that there are before.

    On a GPU its allocator counts; elsewhere, on the meta device too, the tensors of each operation, without what the
    operations have in use inside. Raises ``DeviceError`` as soon as it is more than ``most``."""
    if device.type in ("cuda", "xpu"):
        peak = _allocated_peak(torch.get_device_module(device), device, work, most)
    else:
        with _LiveBytes(most) as live:
            work()
        peak = live.peak
    if peak > most:
        raise too_much(peak, most)
    return peak


def too_much(needed: int, room: int) -> DeviceError:
    takes, leaves = memory_text(needed), memory_text(max(0, room))
    return DeviceError(f"one sample needs at least {takes} beside the model, which leaves {leaves}: {_HELP}")


def _allocated_peak(module: Any, device: torch.device, work: Callable[[], object], most: int) -> int:
    module.empty_cache()
    module.reset_peak_memory_stats(device)
    before = int(module.memory_allocated(device))
    try:
        work()
    except torch.OutOfMemoryError as error:
        raise too_much(int(module.max_memory_allocated(device)) - before, most) from error
    finally:
        module.synchronize(device)
        module.empty_cache()
    return int(module.max_memory_allocated(device)) - before


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts the bytes of the tensors that operations make, for as long as there are references to them."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._most = most
        self._now = 0
        self._seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tree_map_only(Tensor, partial(self._note, is_new=False), (tuple(args), given))
        made = func(*args, **given)
        tree_map_only(Tensor, partial(self._note, is_new=True), made)
        return made

    def _note(self, tensor: Tensor, *, is_new: bool) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes() if is_new else 0
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._forget(key, size))
            self._now += size
            self.peak = max(self.peak, self._now)
            if self._now > self._most:
                raise too_much(self._now, self._most)
        return tensor

    def _forget(self, key: int, size: int) -> None:
        del self._seen[key]
        self._now -= size


# Activations that are computed again ------------------------------------------------------------------------


def recompute_activations(model: nn.Module) -> int:
    """Have the model keep only the inputs of its blocks and compute them again in the backward pass (Chen et al. 2016,
    arXiv:1604.06174); names and values stay as they are.

    Blocks are the parts of its outermost lists and sequences. Returns how many there are that did not do so before."""
    blocks = [one for one in _blocks(model) if "forward" not in vars(one)]
    for block in blocks:
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


def _blocks(part: nn.Module) -> Iterator[nn.Module]:
    for child in part.children() if not isinstance(part, nn.ModuleList | nn.Sequential) else (part,):
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1:
            yield from (one for one in child if next(one.parameters(), None) is not None)
        else:
            yield from _blocks(child) if child is not part else ()
