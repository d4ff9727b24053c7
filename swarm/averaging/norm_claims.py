"""Claimed norms of contributions, one for each of up to 64 ranges of the vector, packed small.

A claim travels in ``ready``, before any byte of the contribution may count, and stands in the round's plan. The ranges
do not depend on the plan, so a claim can be made before there is one. The coordinator reads claims, too: no torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.swarm.protocol.rounds import MIN_CHUNK_ELEMENTS
from shoal.swarm.protocol.types import MAX_CLAIM_BYTES

MAX_RANGES = MAX_CLAIM_BYTES // 2
"""Ranges that a vector is cut into, at most: 128 bytes a member in every plan."""

_STEPS, _ZERO_AT = 256, 2**15
"""A claim is a whole number of 256ths of an octave, so at most 0.3 % above the norm; 0 stands for nothing at all."""

_ROUNDED = 1.0 + 2.0**-22
"""Bound on how much longer a vector can get when each value is rounded to float32."""


def range_elements(elements: int) -> int:
    """Elements in each claimed range of a vector of so many, but the last: a multiple of the smallest chunk."""
    return math.ceil(elements / MAX_RANGES / MIN_CHUNK_ELEMENTS) * MIN_CHUNK_ELEMENTS


def ranges(elements: int) -> list[tuple[int, int]]:
    """Start and stop of each claimed range of a vector of so many elements."""
    step = range_elements(elements)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def claim_of(contribution: Sequence[float], residual: Sequence[float]) -> bytes:
    """The claim for the sum of two vectors by their norms, (ranges,) each: bounds by the triangle inequality, for which
    nobody has to read the vectors when a round is to end."""
    return pack([(one + other) * _ROUNDED for one, other in zip(contribution, residual, strict=True)])


def claim_bytes(elements: int) -> int:
    """The size of a claim for a vector of so many elements, unless it is empty."""
    return 2 * -(-elements // range_elements(elements))


def pack(norms: Sequence[float]) -> bytes:
    """Norms, (ranges,), each finite and not negative, rounded up to claims: two bytes each."""
    values = np.asarray(norms, dtype=np.float64)
    assert np.isfinite(values).all()
    assert (values >= 0).all()
    with np.errstate(divide="ignore"):
        steps = np.ceil(np.log2(values) * _STEPS)
    claims = np.where(values > 0, np.clip(steps + _ZERO_AT, 1, 2**16 - 1), 0)
    return claims.astype("<u2").tobytes()


def unpack(claim: bytes) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The claimed norms, (ranges,) float64; none of an empty claim, which stands for nothing anywhere.

    Raises ValueError when it is no whole number of claims."""
    steps = np.frombuffer(claim, dtype="<u2").astype(np.float64)
    return np.where(steps > 0, np.exp2((steps - _ZERO_AT) / _STEPS), 0.0)


def total_norm(claim: bytes) -> float:
    """The norm of the whole contribution, as claimed."""
    return float(np.sqrt(np.square(unpack(claim)).sum()))


def claimed_squares(claim: bytes, elements: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of each range of a vector of so many elements the square of the claimed norm, (ranges,) float64: zeros of a claim
    that is not for so many."""
    count = len(ranges(elements))
    return np.square(unpack(claim)) if len(claim) == 2 * count else np.zeros(count)
