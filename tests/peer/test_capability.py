"""How much memory is free, from what each system says, and what autograd keeps."""

import pytest
import torch
from torch import nn

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

MEMINFO = """\
MemTotal:       16000000 kB
MemFree:          500000 kB
MemAvailable:    9000000 kB
SwapFree:       99000000 kB
"""

VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            500000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages wired down:                        100000.
"""


def test_linux_tells_what_programs_can_have() -> None:
    assert capability._meminfo_bytes(MEMINFO) == 9_000_000 * 1024
    assert capability._meminfo_bytes("") is None


def test_a_container_has_its_limit_less_what_it_uses() -> None:
    assert capability._cgroup_bytes("4096\n", "1096\n") == 3000
    assert capability._cgroup_bytes("4096\n", "5000\n") == 0
    assert capability._cgroup_bytes("max\n", "5000\n") is None
    assert capability._cgroup_bytes("", "") is None


def test_a_mac_counts_pages() -> None:
    assert capability._vm_stat_bytes(VM_STAT) == 16384 * 33000
    assert capability._vm_stat_bytes("?") is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/proc/meminfo": MEMINFO}, 9_000_000 * 1024),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/sys/fs/cgroup/memory.max": "2000000",
                "/sys/fs/cgroup/memory.current": "1500000",
            },
            500_000,
        ),
    ],
)
def test_the_smaller_of_what_is_told_counts(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(capability, "_read", lambda path: files.get(path, ""))
    assert available_bytes(CPU) == expected
    assert usable_bytes(CPU, None) == int(0.9 * expected)
    assert usable_bytes(CPU, 1000) == 1000
    assert usable_bytes(CPU, 2 * expected) == int(0.9 * expected)


def test_where_nothing_is_told_all_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_read", lambda path: "")
    monkeypatch.setattr(capability, "_vm_stat", lambda: "")
    assert available_bytes(CPU) == memory_bytes(CPU)


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
