"""What nearest rounding is shaken with, to round stochastically, by torch: draws from a hash, alike on all devices."""

from __future__ import annotations

import torch
from torch import Tensor


def dither(largest: Tensor, seed: int, first_block: int, width: int) -> Tensor:
    """Uniform in [-1/2, 1/2), ``(rows, width) float32``, multiples of 2**-24: what nearest rounding is shaken with."""
    blocks = torch.arange(first_block, first_block + len(largest), device=largest.device).unsqueeze(1)
    keys = mix(mix(largest.to(torch.int64) ^ seed) ^ (blocks & 0xFFFFFFFF))
    drawn = mix((keys + torch.arange(width, device=largest.device)) & 0xFFFFFFFF)
    return (drawn >> 8).to(torch.float32).mul_(2.0**-24).sub_(0.5)


def mix(x: Tensor) -> Tensor:
    """32 bits, in int64, to 32 well-mixed bits; multiplied in halves, as int64 must not overflow."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ (x >> shift)
        x = ((x & 0xFFFF) * factor + (((x >> 16) * (factor & 0xFFFF)) << 16)) & 0xFFFFFFFF
    return x ^ (x >> 16)
