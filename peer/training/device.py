"""Device that this machine trains on: its choice, memory, precision and the batch that fits."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shoal.peer.machine_memory import free_machine_bytes, machine_bytes
from shoal.swarm.errors import DeviceError
from shoal.swarm.protocol.types import DeviceInfo

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def choose_device(asked: str) -> torch.device:
    """Choose the device of ``--device``; ``auto`` takes CUDA, else MPS, else the CPU. Raises ``DeviceError``."""
    if not _DEVICE.fullmatch(asked):
        raise DeviceError(f"--device {asked}: expected auto, cpu, cuda, cuda:N or mps")
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if asked == "auto":
        return torch.device("cuda" if has_cuda else "mps" if has_mps else "cpu")
    device = torch.device(asked)
    if device.type == "cuda" and not (has_cuda and (device.index or 0) < torch.cuda.device_count()):
        raise DeviceError(f"--device {asked}: there are {torch.cuda.device_count()} CUDA devices here; try auto")
    if device.type == "mps" and not has_mps:
        raise DeviceError("--device mps: this machine is no Mac with Metal; try auto")
    return device


def memory_bytes(device: torch.device) -> int:
    """Return the size of the device's memory; of the machine's for the CPU and MPS."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of the device's memory; for the CPU and MPS those of the machine or container."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_machine_bytes()


def has_all_state(device: torch.device) -> bool:
    """Return whether the device's memory is the machine's, which also holds the copies of averaging and checkpoints."""
    return device.type != "cuda"


def usable_bytes(device: torch.device, limit: int | None) -> int:
    """Return the bytes that a member may take: nine tenths of the free ones, at most ``limit`` (``--max-memory``)."""
    usable = int(0.9 * available_bytes(device))
    return usable if limit is None else min(usable, limit)


def describe_device(name: str) -> DeviceInfo:
    """Describe a device for other members."""
    device = torch.device(name)
    match device.type:
        case "cuda":
            label = torch.cuda.get_device_name(device)
        case "mps":
            label = f"Apple {platform.machine()} GPU"
        case _:
            label = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return DeviceInfo(kind=device.type[:16], name=label[:100], memory_bytes=memory_bytes(device))


def autocast(device: torch.device, precision: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a maker of contexts for the forward pass: bfloat16 if asked for, or if the device has it (``auto``)."""
    if precision == "bfloat16" or (precision == "auto" and _has_bfloat16(device)):
        return lambda: torch.autocast(device.type, torch.bfloat16)
    return nullcontext


def _has_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU has bfloat16 in hardware; older ones emulate it, slower than float32."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def kept_bytes(model: nn.Module, forward: Callable[[], Tensor], most: float = math.inf) -> int:
    """Measure the bytes that autograd keeps of ``forward`` for its backward pass, without the model's parameters.

    Raises ``DeviceError`` as soon as they are more than ``most``, before more memory is taken.
    """
    seen: dict[int, int] = {}
    total = 0
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            total += storage.nbytes() - seen.get(storage.data_ptr(), 0)
            seen[storage.data_ptr()] = storage.nbytes()
        if total > most:
            raise DeviceError(
                f"one sample needs more than the {most / 2**20:.0f} MiB that the model leaves: allow more --max-memory "
                "or join a run with a smaller model"
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = forward()
    del output
    return total


_BACKWARD = 1.5
"""Ratio of all memory of a sample to that which autograd keeps; the backward pass makes tensors of its own."""


def samples_that_fit(model: nn.Module, sample_loss: Callable[[], Tensor], batch: int, free_bytes: int) -> int:
    """Return how many of ``batch`` samples may run at once, at least one.

    It is computed from the bytes that autograd keeps of one sample's loss, ``sample_loss``. Raises ``DeviceError`` if
    not even one sample fits.
    """
    per_sample = max(1, int(_BACKWARD * kept_bytes(model, sample_loss, free_bytes / _BACKWARD)))
    fits = free_bytes // per_sample
    if fits < 1:
        raise DeviceError(
            f"one sample needs about {per_sample / 2**20:.0f} MiB beside the model, "
            f"which leaves {free_bytes / 2**20:.0f} MiB: allow more --max-memory or join a run with a smaller model"
        )
    return int(min(batch, fits))


def free_bytes(device: torch.device, model: nn.Module, limit: int | None, copies: float) -> int:
    """Return the bytes left for activations, with ``copies`` values for each parameter, itself among them."""
    static = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    total = available_bytes(device) + static
    allowed = min(total, limit) if limit else int(0.9 * total)
    return allowed - int(static * copies)
