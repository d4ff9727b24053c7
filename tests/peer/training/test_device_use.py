"""Use of the machine, and of a GPU whose driver answers as a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shoal.peer.training.device_use import DeviceUseMeter


class NVMLError(Exception):
    pass


def driver(**answers: Any) -> Any:
    """The part of NVML that is used; what it does not answer raises."""

    def ask(name: str) -> Any:
        def answer(handle: object) -> Any:
            if name not in answers:
                raise NVMLError
            return answers[name]

        return answer

    names = ("UtilizationRates", "MemoryInfo", "PowerUsage", "TotalEnergyConsumption")
    return SimpleNamespace(NVMLError=NVMLError, **{f"nvmlDeviceGet{name}": ask(name) for name in names})


def test_without_a_gpu_the_machine_alone_is_told() -> None:
    use = DeviceUseMeter("cpu").read()
    assert use.memory_used_bytes > 0
    assert 0 <= use.cpu <= 1
    assert (use.gpu, use.gpu_used_bytes, use.power_w, use.energy_j) == (None, None, None, None)


def test_what_the_driver_tells_is_read_and_energy_counts_from_the_first_look() -> None:
    meter = DeviceUseMeter("cpu")
    rates, memory = SimpleNamespace(gpu=87), SimpleNamespace(used=5 * 2**30)
    meter._nvml = driver(UtilizationRates=rates, MemoryInfo=memory, PowerUsage=250_500, TotalEnergyConsumption=9_000)
    first = meter.read()
    assert (first.gpu, first.gpu_used_bytes, first.power_w, first.energy_j) == (0.87, 5 * 2**30, 250.5, 0.0)
    meter._nvml = driver(TotalEnergyConsumption=12_500)
    second = meter.read()
    assert (second.gpu, second.gpu_used_bytes, second.power_w, second.energy_j) == (None, None, None, 3.5)
