"""Device that this machine trains on: its choice, memory and precision."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.peer.machine_memory import free_machine_bytes, machine_bytes
from shoal.swarm.errors import DeviceError
from shoal.swarm.memory_account import MemoryDemand
from shoal.swarm.protocol.types import DeviceInfo

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")


def choose_device(asked: str) -> torch.device:
    """Choose the device of ``--device``; ``auto`` takes CUDA, else XPU, else MPS, else the CPU. Raises
    ``DeviceError``."""
    if not _DEVICE.fullmatch(asked):
        raise DeviceError(f"--device {asked}: expected auto, cpu, cuda, cuda:N, xpu, xpu:N or mps")
    here = {
        "cuda": torch.cuda.is_available(),
        "xpu": torch.xpu.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if asked == "auto":
        return torch.device(next((name for name, is_here in here.items() if is_here), "cpu"))
    device = torch.device(asked)
    if device.type in ("cuda", "xpu"):
        count = torch.get_device_module(device).device_count() if here[device.type] else 0
        if (device.index or 0) >= count:
            raise DeviceError(f"--device {asked}: there are {count} {device.type.upper()} devices here; try auto")
    if device.type == "mps" and not here["mps"]:
        raise DeviceError("--device mps: this machine is no Mac with Metal; try auto")
    return device


def memory_bytes(device: torch.device) -> int:
    """Return the size of the device's memory; of the machine's for the CPU and MPS."""
    if has_own_memory(device):
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    return machine_bytes()


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of the device's memory; for the CPU and MPS those of the machine or container."""
    if has_own_memory(device):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return free_machine_bytes()


def has_own_memory(device: torch.device) -> bool:
    """Return whether the device has a memory of its own, beside the machine's, in which anchor and averaging are."""
    return device.type in ("cuda", "xpu")


def usable_bytes(device: torch.device, limit: int | None) -> int:
    """Return the bytes that a member may take: nine tenths of the free ones, at most ``limit``."""
    usable = int(0.9 * available_bytes(device))
    return usable if limit is None else min(usable, limit)


@dataclass(frozen=True)
class MemoryLimits:
    """Limits that the machine's owner has set: ``host_bytes`` (``--max-memory``) of the machine's memory,
    ``device_bytes`` (``--max-device-memory``) of a GPU's own. None: nine tenths of what is free."""

    host_bytes: int | None = None
    device_bytes: int | None = None

    def check(self, device: torch.device) -> None:
        """Raise ``DeviceError`` for a limit that would have no effect."""
        if self.device_bytes is not None and not has_own_memory(device):
            raise DeviceError(
                f"--max-device-memory is for a GPU with a memory of its own, and {device} computes in the machine's: "
                f"limit that with --max-memory"
            )


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes in the machine's memory and in a GPU's own, None for a device that computes in the machine's memory."""

    host: int
    device: int | None

    @property
    def computing(self) -> int:
        """Bytes of the memory in which the device computes."""
        return self.host if self.device is None else self.device

    def fit_into(self, room: MemoryBytes) -> bool:
        """Return whether there is ``room`` for these, on the same device."""
        return self.host <= room.host and (self.device or 0) <= (room.device or 0)

    def __add__(self, other: MemoryBytes) -> MemoryBytes:
        device = None if self.device is None or other.device is None else self.device + other.device
        return MemoryBytes(self.host + other.host, device)


_CPU = torch.device("cpu")


def usable_memory(device: torch.device, limits: MemoryLimits) -> MemoryBytes:
    """Return the bytes that a member may take. Raises ``DeviceError`` for a limit that would have no effect."""
    limits.check(device)
    if not has_own_memory(device):
        return MemoryBytes(usable_bytes(device, limits.host_bytes), None)
    return MemoryBytes(usable_bytes(_CPU, limits.host_bytes), usable_bytes(device, limits.device_bytes))


def demanded_memory(
    device: torch.device, demand: MemoryDemand, parameters: int, activation_bytes: int = 0
) -> MemoryBytes:
    """Return the bytes that so many trained parameters take, and ``activation_bytes`` where the device computes."""
    if not has_own_memory(device):
        return MemoryBytes(int(4 * demand.shared * parameters) + activation_bytes, None)
    return MemoryBytes(int(4 * demand.host * parameters), int(4 * demand.device * parameters) + activation_bytes)


def describe_device(name: str, devices: int = 1) -> DeviceInfo:
    """Describe a device for other members. ``devices``: how many such an island has; on CPUs, processes."""
    device = torch.device(name)
    match device.type:
        case "cuda" | "xpu":
            label = torch.get_device_module(device).get_device_name(device)
        case "mps":
            label = f"Apple {platform.machine()} GPU"
        case _:
            label = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    size_bytes = memory_bytes(device) * (devices if has_own_memory(device) else 1)
    label = label if devices == 1 else f"{devices} x {label}"
    count = devices if has_own_memory(device) else 1  # processes on a CPU share one
    return DeviceInfo(kind=device.type[:16], name=label[:100], memory_bytes=size_bytes, count=count)


_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def precision_of(device: torch.device, asked: str, *, scales_loss: bool) -> str:
    """Return the precision of ``[inner] precision`` on a device: for ``auto`` bfloat16 on GPUs that have it.

    ``scales_loss``: whether small gradients survive float16, which older GPUs of NVIDIA have instead of bfloat16."""
    if asked != "auto":
        return asked
    if _has_bfloat16(device):
        return "bfloat16"
    return "float16" if device.type == "cuda" and scales_loss else "float32"


def autocast(device: torch.device, precision: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a maker of contexts for the forward pass: autocast to bfloat16 or float16, or none.

    ``precision``: of ``precision_of``; ``auto`` is that of a caller that does not scale its loss."""
    dtype = _AUTOCAST.get(precision_of(device, precision, scales_loss=False))
    return nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype)


def allow_tf32(device: torch.device, precision: str) -> None:
    """Have CUDA multiply float32 matrices with the mantissas of TF32, unless the run asks for float32."""
    if device.type == "cuda" and precision != "float32":
        torch.set_float32_matmul_precision("high")


def _has_bfloat16(device: torch.device) -> bool:
    """Return whether a GPU has bfloat16 in hardware; older ones emulate it, slower than float32."""
    if device.type == "xpu":
        return bool(torch.xpu.is_bf16_supported(including_emulation=False))
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def kept_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Measure the bytes that autograd keeps of ``forward`` for its backward pass, without the model's parameters."""
    seen: dict[int, int] = {}
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = forward()
    del output
    return sum(seen.values())


def free_bytes(device: torch.device, model: nn.Module, limits: MemoryLimits, demand: MemoryDemand) -> int:
    """Return the bytes left for activations beside a model that is on the device and all that its training takes."""
    static = sum(one.nbytes for one in model.parameters())
    trained = [one for one in model.parameters() if one.requires_grad]
    frozen = static - sum(one.nbytes for one in trained)
    total = available_bytes(device) + static
    limit = limits.device_bytes if has_own_memory(device) else limits.host_bytes
    allowed = int(0.9 * total) if limit is None else min(total, limit)
    return allowed - demanded_memory(device, demand, sum(one.numel() for one in trained), frozen).computing
