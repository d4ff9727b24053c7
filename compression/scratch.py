"""Scratch memory that each thread keeps, and aligned memory for whole models.

A new tensor of a mebibyte costs more in page faults than most passes over it.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

_LARGEST_VALUES = 1 << 20
_LINE_BYTES = 64
_kept = threading.local()
_zeros = torch.empty(0)


def scratch(purpose: str, n: int, device: torch.device) -> Tensor:
    """Return an uninitialised ``(n,) float32`` on ``device``, the thread's own until its next call for ``purpose``.

    Of a chunk's size at most (2**20) and on the CPU it is kept; else it is a new tensor, as good and slower.
    """
    if device.type != "cpu" or n > _LARGEST_VALUES:
        return torch.empty(n, dtype=torch.float32, device=device)
    kept: Tensor | None = getattr(_kept, purpose, None)
    if kept is None or kept.numel() < n:
        kept = torch.empty(n, dtype=torch.float32)
        setattr(_kept, purpose, kept)
    return kept[:n]


def zeros(n: int) -> Tensor:
    """Return ``(n,) float32`` of zeros, read-only: NumPy's take no memory until they are written to."""
    global _zeros
    if _zeros.numel() < n:
        _zeros = torch.from_numpy(np.zeros(n, np.float32))
    return _zeros[:n]


def empty_aligned(n: int) -> Tensor:
    """Return an uninitialised ``(n,) float32`` on the CPU, aligned to a cache line, for whole models.

    Kernels write whole lines. NumPy asks Linux for huge pages, torch does not: of 50 M values the first touch costs
    11 ms so, and 57 ms in pages of 4 KiB (measured on one EPYC core).
    """
    room = np.empty(4 * n + _LINE_BYTES, np.uint8)
    lead = -room.ctypes.data % _LINE_BYTES
    return torch.from_numpy(room[lead : lead + 4 * n].view(np.float32))
