"""Devices of an island, as ``--devices`` names them: one for each of its ranks."""

from __future__ import annotations

import logging
import re
import sys

import torch

from shoal.swarm.errors import DeviceError
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Role

log = logging.getLogger(__name__)

_MOST_RANKS = 256


def choose_devices(text: str) -> tuple[torch.device, ...]:
    """Return the devices that ``--devices`` names: ``all`` GPUs, some by number, or ``cpu:N`` for N processes.

    Raises ``DeviceError``."""
    if sys.platform == "win32":
        raise DeviceError("--devices: islands need Linux or macOS; on Windows join with --device, once for each device")
    found = torch.cuda.device_count()
    if text == "all":
        if not found:
            raise DeviceError("--devices all: there are no CUDA devices here; --devices cpu:N starts N processes on it")
        return tuple(torch.device("cuda", number) for number in range(found))
    if (match := re.fullmatch(r"cpu:(\d{1,3})", text)) and 1 <= int(match[1]) <= _MOST_RANKS:
        return (torch.device("cpu"),) * int(match[1])
    if re.fullmatch(r"\d{1,3}(,\d{1,3})*", text):
        numbers = [int(number) for number in text.split(",")]
        if len(set(numbers)) < len(numbers):
            raise DeviceError(f"--devices {text}: a GPU is named twice")
        if max(numbers) >= found:
            raise DeviceError(f"--devices {text}: there are {found} CUDA devices here, counted from 0; try all")
        return tuple(torch.device("cuda", number) for number in numbers)
    raise DeviceError(f"--devices {text}: expected all, numbers of GPUs such as 0,1, or cpu:N for N processes")


def check_island_can_train(run: RunFile, role: Role) -> None:
    """Raise ``DeviceError`` for a run or a role that islands do not take part in."""
    if run.inner.compile:
        log.warning("inner.compile of the run file has no effect here: the model of several devices is not compiled")
    if run.inner.state == "int8":
        raise DeviceError(
            "--devices: the run keeps AdamW's moments in int8 (inner.state), which cannot be divided among devices: "
            "join with --device, or a run that keeps them in float32"
        )
    if run.inner.optimizer == "adafactor":
        raise DeviceError(
            "--devices: the run's inner optimizer is Adafactor, which PyTorch cannot divide among devices: join with "
            '--device, or a run with inner.optimizer = "adamw", "muon" or "sgd"'
        )
    if run.inner.precision == "float16":
        raise DeviceError(
            "--devices: the run computes in float16, whose losses are scaled by each device for itself: join with "
            '--device, or a run with inner.precision = "auto", "bfloat16" or "float32"'
        )
    if role not in ("trainer", "contributor"):
        raise DeviceError("--devices is for members that train: leave it out for validators and those that only follow")
