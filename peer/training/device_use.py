"""Use of this machine: the GPU's as NVML tells it, the processor's and the memory's."""

from __future__ import annotations

import logging
from contextlib import suppress
from types import ModuleType
from typing import Any

import psutil
import torch

from shoal.swarm.protocol.types import MAX_DEVICE_W, DeviceUse

log = logging.getLogger(__name__)

_MOST_BYTES = 2**62


class DeviceUseMeter:
    """Reads the use of the machine and of one GPU. Without NVML, or another device, the GPU's is unknown."""

    def __init__(self, device: str) -> None:
        """``device``: name of the torch device. NVML comes with the extra ``metrics``, and with NVIDIA's driver."""
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        self._energy_mj: int | None = None
        psutil.cpu_percent(None)  # the first reading has nothing to compare with
        if torch.device(device).type == "cuda":
            self._open(torch.device(device))

    def _open(self, device: torch.device) -> None:
        try:
            import pynvml  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            log.info("the GPU's use is not measured: install shoal[metrics] for it")
            return
        try:
            pynvml.nvmlInit()
            # By its UUID, as CUDA_VISIBLE_DEVICES numbers the devices anew.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except (pynvml.NVMLError, AttributeError, RuntimeError) as error:
            log.info("the GPU's use is not measured: %s", error)

    def read(self) -> DeviceUse:
        """Read all that can be read; for a worker thread."""
        cpu = min(1.0, max(0.0, psutil.cpu_percent(None) / 100))
        used = {"cpu": cpu, "memory_used_bytes": min(int(psutil.virtual_memory().used), _MOST_BYTES)}
        return DeviceUse(**used, **self._read_gpu())

    def _read_gpu(self) -> dict[str, Any]:
        """Read the GPU's figures; each may be missing, as on cards for consumers."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return {}
        found: dict[str, Any] = {}
        with suppress(nvml.NVMLError):
            found["gpu"] = min(1.0, max(0.0, nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100))
        with suppress(nvml.NVMLError):
            found["gpu_used_bytes"] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        with suppress(nvml.NVMLError):
            found["power_w"] = min(MAX_DEVICE_W, max(0.0, nvml.nvmlDeviceGetPowerUsage(handle) / 1000))
        with suppress(nvml.NVMLError):
            energy_mj = int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            self._energy_mj = energy_mj if self._energy_mj is None else self._energy_mj
            found["energy_j"] = max(0.0, (energy_mj - self._energy_mj) / 1000)
        return found
