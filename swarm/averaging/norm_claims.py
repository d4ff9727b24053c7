"""Claimed norms of contributions: one for each of up to 64 ranges of the vector, two bytes each.

A member claims them in ``ready``, and they stand in the round's plan; no byte of its contribution counts before that.
The ranges do not depend on the plan, so a claim can be made before there is one. The coordinator reads claims, too, so
this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.swarm.protocol.rounds import MIN_CHUNK_ELEMENTS
from shoal.swarm.protocol.types import MAX_CLAIM_BYTES

MAX_RANGES = MAX_CLAIM_BYTES // 2
"""Most ranges that a vector is cut into: 128 bytes for each member in every plan."""

_STEPS, _ZERO_AT = 256, 2**15
"""A claim is a whole number of 1/256 octaves, at most 0.3 % above the norm; 0 means a norm of 0."""

_ROUNDED = 1.0 + 2.0**-22
"""Bound on the growth of a norm when each value is rounded to float32."""


def range_elements(elements: int) -> int:
    """Return the size of each claimed range but the last: a multiple of the smallest chunk."""
    return math.ceil(elements / MAX_RANGES / MIN_CHUNK_ELEMENTS) * MIN_CHUNK_ELEMENTS


def ranges(elements: int) -> list[tuple[int, int]]:
    """Return start and stop of each claimed range of a vector."""
    step = range_elements(elements)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def claim_of(contribution: Sequence[float], residual: Sequence[float]) -> bytes:
    """Return the claim for the sum of two vectors with these norms, (ranges,) each.

    The triangle inequality bounds the sum, so that the vectors need not be read again when a round ends."""
    return pack([(one + other) * _ROUNDED for one, other in zip(contribution, residual, strict=True)])


def claim_bytes(elements: int) -> int:
    """Return the size of a claim that is not empty."""
    return 2 * -(-elements // range_elements(elements))


def pack(norms: Sequence[float]) -> bytes:
    """Return norms, (ranges,), each finite and not negative, rounded up and packed, two bytes each."""
    values = np.asarray(norms, dtype=np.float64)
    assert np.isfinite(values).all()
    assert (values >= 0).all()
    with np.errstate(divide="ignore"):
        steps = np.ceil(np.log2(values) * _STEPS)
    claims = np.where(values > 0, np.clip(steps + _ZERO_AT, 1, 2**16 - 1), 0)
    return claims.astype("<u2").tobytes()


def unpack(claim: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the claimed norms, (ranges,) float64; an empty claim, whose norm is 0 everywhere, has none.

    Raises ValueError when the size is odd."""
    steps = np.frombuffer(claim, dtype="<u2").astype(np.float64)
    return np.where(steps > 0, np.exp2((steps - _ZERO_AT) / _STEPS), 0.0)


def total_norm(claim: bytes) -> float:
    """Return the claimed norm of the whole contribution."""
    return float(np.sqrt(np.square(unpack(claim)).sum()))


def claimed_squares(claim: bytes, elements: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the squared claimed norm of each range of a vector, (ranges,) float64; zeros if the claim is for another
    number of ranges."""
    count = len(ranges(elements))
    return np.square(unpack(claim)) if len(claim) == 2 * count else np.zeros(count)
