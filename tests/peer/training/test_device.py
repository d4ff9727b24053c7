"""Tests of training/device and machine_memory: free memory, what autograd keeps, and the batch that fits."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.peer import machine_memory
from shoal.peer.training import device as capability
from shoal.peer.training.device import (
    available_bytes,
    free_bytes,
    kept_bytes,
    memory_bytes,
    samples_that_fit,
    usable_bytes,
)
from shoal.swarm.errors import DeviceError

CPU = torch.device("cpu")


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
    assert free_bytes(CPU, model, None, copies=4) == int(0.9 * 104_000) - 16_000
    assert free_bytes(CPU, model, 50_000, copies=2.5) == 50_000 - 10_000


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
        samples_that_fit(layers, lambda: layers(given).sum(), batch=4, free_bytes=6 * 2**20)
    assert len(made) < 8


def test_samples_that_fit_are_counted_by_what_one_keeps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def one() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 8)).sum()
        return loss

    assert samples_that_fit(model, one, batch=8, free_bytes=3 * 96) == 3  # 64 bytes, and half as much again
    assert samples_that_fit(model, one, batch=8, free_bytes=10**6) == 8
    with pytest.raises(DeviceError, match="--max-memory"):
        samples_that_fit(model, one, batch=8, free_bytes=95)
