"""Tests of training/device and machine_memory: free memory, what autograd keeps, and the batch that fits."""

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
    available_bytes,
    demanded_memory,
    free_bytes,
    kept_bytes,
    memory_bytes,
    samples_that_fit,
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


def test_a_sample_that_needs_too_much_is_given_up_before_it_has_taken_it() -> None:
    """A small model with a long context: nobody may be ended by measuring that it does not fit."""
    layers = nn.Sequential(*[nn.Tanh() for _ in range(64)])
    given, made = torch.zeros(2**18, requires_grad=True), []
    for layer in layers:
        layer.register_forward_hook(lambda *_: made.append(1))
    with pytest.raises(DeviceError, match="--max-memory"):
        samples_that_fit(layers, lambda _: layers(given).sum(), batch=4, free_bytes=6 * 2**20)
    assert len(made) < 8


def test_samples_that_fit_are_counted_by_what_one_keeps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def loss_of(samples: int) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(samples, 8)).sum()
        return loss

    assert samples_that_fit(model, loss_of, batch=8, free_bytes=3 * 96) == 3  # 64 bytes, and half as much again
    assert samples_that_fit(model, loss_of, batch=8, free_bytes=2 * 96 - 1) == 1
    assert samples_that_fit(model, loss_of, batch=1, free_bytes=96) == 1
    assert samples_that_fit(model, loss_of, batch=8, free_bytes=10**6) == 8
    with pytest.raises(DeviceError, match="--max-memory"):
        samples_that_fit(model, loss_of, batch=8, free_bytes=95)


def test_autocasts_copies_of_the_weights_are_no_samples_memory() -> None:
    """They are kept once, and would be many times a sample's activations."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])

    def loss_of(samples: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(torch.ones(samples, 256)).float().sum()
            return loss

    weights, sample = 3 * 2 * 256 * 256, kept_bytes(model, lambda: loss_of(5)) - kept_bytes(model, lambda: loss_of(4))
    assert weights > 100 * sample
    assert kept_bytes(model, lambda: loss_of(1)) >= weights
    room = int(1.5 * (kept_bytes(model, lambda: loss_of(1)) + 63 * sample))
    assert samples_that_fit(model, loss_of, batch=128, free_bytes=room) == 64
