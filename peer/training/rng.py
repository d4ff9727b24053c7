"""Random numbers as a function of their purpose, the same on every peer and at any time."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derived_seed(*numbers: int) -> int:
    """Hash ``numbers``, each of -2**63 to 2**63 - 1, to a seed of 63 bits."""
    packed = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the global generators of the CPU and of ``device``, and restore their states at the end.

    The generators are the process's, so other threads draw from the same sequence meanwhile.
    """
    state, device_state = _states(device)
    torch.default_generator.manual_seed(seed)
    if device_state is not None:
        _set_on_device(device, device_state=None, seed=seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if device_state is not None:
            _set_on_device(device, device_state, seed)


@contextmanager
def random_preserved(device: torch.device) -> Iterator[None]:
    """Restore the states of all global generators at the end: torch's for the CPU and ``device``, NumPy's, Python's."""
    (state, device_state), of_numpy, of_python = _states(device), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if device_state is not None:
            _set_on_device(device, device_state, seed=0)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def random_states(device: torch.device) -> tuple[bytes, bytes]:
    """Return the states of the global generators of the CPU and of the device (empty for the CPU), for comparison."""
    state, device_state = _states(device)
    return state.numpy().tobytes(), b"" if device_state is None else device_state.cpu().numpy().tobytes()


def _states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    match device.type:
        case "cuda" | "xpu":
            return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)
        case "mps":
            return torch.get_rng_state(), torch.mps.get_rng_state()
        case _:
            return torch.get_rng_state(), None


def _set_on_device(device: torch.device, device_state: torch.Tensor | None, seed: int) -> None:
    """Set the device's generator to a state, or to ``seed`` if the state is None."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        with module.device(device):
            if device_state is None:
                module.manual_seed(seed)
            else:
                module.set_rng_state(device_state, device)
    elif device_state is None:
        torch.mps.manual_seed(seed)
    else:
        torch.mps.set_rng_state(device_state)
