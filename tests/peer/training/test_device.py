"""Tests of training/device and machine_memory: choice, free memory, precision, and what autograd keeps."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.peer import machine_memory
from shoal.peer.training import device as capability
from shoal.peer.training.device import (
    MemoryBytes,
    MemoryLimits,
    allow_tf32,
    autocast,
    available_bytes,
    choose_device,
    demanded_memory,
    free_bytes,
    kept_bytes,
    memory_bytes,
    precision_of,
    usable_bytes,
    usable_memory,
)
from shoal.swarm.errors import DeviceError
from shoal.swarm.memory_account import MemoryDemand

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 9 MB free, and the folder in which a container's limit would be."""
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine_memory.psutil, "virtual_memory", lambda: SimpleNamespace(total=20, available=9_000_000))
    return tmp_path


@pytest.mark.parametrize(
    ("most", "current", "expected"),
    [
        ("2000000\n", "1500000\n", 500_000),
        ("4096\n", "5000\n", 0),
        ("20000000\n", "0\n", 9_000_000),
        ("max\n", "5000\n", 9_000_000),
        ("", "", 9_000_000),
    ],
)
def test_the_smaller_of_machine_and_container_counts(cgroup: Path, most: str, current: str, expected: int) -> None:
    (cgroup / "memory.max").write_text(most)
    (cgroup / "memory.current").write_text(current)
    assert available_bytes(CPU) == expected
    assert usable_bytes(CPU, None) == int(0.9 * expected)
    assert usable_bytes(CPU, 1000) == min(1000, int(0.9 * expected))
    assert usable_bytes(CPU, 2 * 9_000_000) == int(0.9 * expected)


def test_without_a_container_the_machine_counts(cgroup: Path) -> None:
    assert available_bytes(CPU) == 9_000_000


def test_this_machine_has_something_free() -> None:
    assert 0 < available_bytes(CPU) <= memory_bytes(CPU)


def test_activations_get_what_is_free_beside_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "available_bytes", lambda device: 100_000)
    model = nn.Linear(100, 10, bias=False)  # 4000 bytes, in memory already
    demand = MemoryDemand(device=2.5, host=3.0, shared=4.0)
    assert free_bytes(CPU, model, MemoryLimits(), demand) == int(0.9 * 104_000) - 16_000
    assert free_bytes(CPU, model, MemoryLimits(50_000), demand) == 50_000 - 16_000
    assert free_bytes(CUDA, model, MemoryLimits(50_000), demand) == int(0.9 * 104_000) - 10_000
    assert free_bytes(CUDA, model, MemoryLimits(1, 30_000), demand) == 30_000 - 10_000
    model.frozen = nn.Linear(10, 10, bias=False).requires_grad_(False)
    assert free_bytes(CUDA, model, MemoryLimits(1, 30_000), demand) == 30_000 - 10_000 - 400


def test_a_gpus_memory_and_the_machines_have_limits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "available_bytes", lambda device: 1000 if device.type == "cpu" else 100)
    assert usable_memory(CPU, MemoryLimits()) == MemoryBytes(900, None)
    assert usable_memory(CUDA, MemoryLimits()) == MemoryBytes(900, 90)
    assert usable_memory(CUDA, MemoryLimits(500, 50)) == MemoryBytes(500, 50)
    assert usable_memory(CUDA, MemoryLimits(500)) == MemoryBytes(500, 90)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_limit_without_effect_is_refused(device: str) -> None:
    with pytest.raises(DeviceError, match="--max-device-memory is for a GPU with a memory of its own, and"):
        usable_memory(torch.device(device), MemoryLimits(500, 50))


def test_what_fits_fits_in_both_memories() -> None:
    room = MemoryBytes(10, 5)
    assert (MemoryBytes(4, 2) + MemoryBytes(6, 3)).fit_into(room)
    assert not MemoryBytes(11, 5).fit_into(room)
    assert not MemoryBytes(10, 6).fit_into(room)
    assert MemoryBytes(10, None).fit_into(MemoryBytes(10, None))


def test_activations_count_where_the_device_computes() -> None:
    demand = MemoryDemand(device=2.0, host=3.0, shared=4.0)
    assert demanded_memory(CPU, demand, 10, 7) == MemoryBytes(167, None)
    assert demanded_memory(CUDA, demand, 10, 7) == MemoryBytes(120, 87)


def test_what_autograd_keeps_is_counted_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    given = torch.ones(4, 8)
    assert kept_bytes(model, lambda: model(given)) == 2 * 4 * 8 * 4, "the input, and what tanh gives"


@pytest.mark.parametrize("asked", ["xpu", "xpu:3", "cuda:7"])
def test_a_device_that_is_not_here_is_refused(asked: str) -> None:
    with pytest.raises(DeviceError, match=f"--device {asked}: there are [0-9]+ {asked[:3].upper()}"):
        choose_device(asked)


@pytest.mark.parametrize(
    ("here", "expected"),
    [({"cuda", "xpu", "mps"}, "cuda"), ({"xpu", "mps"}, "xpu"), ({"mps"}, "mps"), (set(), "cpu")],
)
def test_auto_takes_the_accelerator_that_is_here(
    monkeypatch: pytest.MonkeyPatch, here: set[str], expected: str
) -> None:
    for name, module in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.backends.mps)):
        monkeypatch.setattr(module, "is_available", lambda name=name: name in here)
    assert choose_device("auto") == torch.device(expected)
    if "mps" not in here:
        with pytest.raises(DeviceError, match="no Mac with Metal"):
            choose_device("mps")


@pytest.mark.parametrize(
    ("device", "has_bfloat16", "scales_loss", "expected"),
    [
        ("cuda", True, True, "bfloat16"),
        ("cuda", False, True, "float16"),
        ("cuda", False, False, "float32"),
        ("xpu", True, True, "bfloat16"),
        ("xpu", False, True, "float32"),
        ("cpu", False, True, "float32"),
        ("mps", False, True, "float32"),
    ],
)
def test_auto_takes_the_precision_that_a_device_is_fast_in(
    monkeypatch: pytest.MonkeyPatch, device: str, has_bfloat16: bool, scales_loss: bool, expected: str
) -> None:
    monkeypatch.setattr(capability, "_has_bfloat16", lambda device: has_bfloat16)
    one = torch.device(device)
    assert precision_of(one, "auto", scales_loss=scales_loss) == expected
    assert precision_of(one, "tf32", scales_loss=scales_loss) == "tf32"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("float32", None), ("tf32", None), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_autocast_is_that_of_the_precision(precision: str, dtype: torch.dtype | None) -> None:
    with autocast(CPU, precision)():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


def test_tf32_is_for_cuda_and_not_for_runs_in_float32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        allow_tf32(CPU, "auto")
        allow_tf32(CUDA, "float32")
        assert torch.get_float32_matmul_precision() == before
        allow_tf32(CUDA, "tf32")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
