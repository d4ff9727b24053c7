"""Comparison of two replicas' results for one micro-batch: sketches, tolerance, and who is wrong.

A replica that computes again names only a sketch of its result, by a seed that it learns with the request: nothing of
the compared result is known to it, and the sketch is small. Results of two devices are not equal to the bit, so they
are compared by relative distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Values: TypeAlias = NDArray[np.float32]

SKETCH_VALUES = 1024
"""Size of a sketch: distances are known to about sqrt(2 / 1024), 4 % of themselves."""

SKETCH_BYTES = 4 * SKETCH_VALUES
SEED_BYTES = 16

_EXACT, _AUTOCAST = 0.02, 0.1
"""Relative distance allowed for rounding in the computation: between machines in float32, whose GPUs may multiply with
10 bits of mantissa (TF32, 2**-11 a product), and between any two where GPUs compute in bfloat16 (2**-9 an operation).
Layers one after the other make more of it: bfloat16 autocast against float32 on one CPU, 12 blocks of ``gpt`` of width
256: 0.9 % of the output, 1.3 % of the input's gradient; packed with ``int8`` 1.3 % and 1.8 %, with ``int4`` 5 % and
7 %."""

_FLIPS = 4.0
"""Multiples of the codec's own error: values near the border of two levels round to either of them, and blocks of
activations have larger outliers than the normal distribution on which that error is measured."""

_MOST = 0.5
"""Largest distance that is ever allowed; unrelated tensors of the same norm are sqrt(2) apart, opposite ones 2."""


def sketch(values: Values, seed: bytes) -> bytes:
    """Count sketch of ``(n,)`` values: each is added, with a sign, to one of the sums, chosen by ``seed``.

    Distances between sketches of one seed are those of the vectors, on average (Charikar et al. 2002).
    """
    raw = np.random.Philox(key=int.from_bytes(seed[:SEED_BYTES])).random_raw(values.size)
    signs = 1.0 - 2.0 * ((raw >> np.uint64(32)) & np.uint64(1)).astype(np.float64)
    sums = np.bincount((raw % SKETCH_VALUES).astype(np.int64), weights=signs * values, minlength=SKETCH_VALUES)
    return sums.astype("<f4").tobytes()


def distance(one: bytes, other: bytes) -> float:
    """Distance of two sketched vectors, relative to the longer one; 0 for two zeros, infinite for no numbers."""
    a, b = (np.frombuffer(each, "<f4").astype(np.float64) for each in (one, other))
    longest = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    found = float(np.linalg.norm(a - b)) / longest if longest else 0.0
    return found if np.isfinite(found) else np.inf


def tolerance(precision: str, codec_error: float) -> float:
    """Return the largest distance of two honest replicas' results.

    ``precision``: the run's; ``codec_error``: relative error of packing normally distributed values."""
    return min(_MOST, (_EXACT if precision == "float32" else _AUTOCAST) + _FLIPS * codec_error)


@dataclass(frozen=True)
class Result:
    """Sketches of what a replica made of one micro-batch; empty where there is nothing to compare.

    ``targets``: digest of the targets that it passes on, or empty."""

    output: bytes = b""
    gradient: bytes = b""
    targets: bytes = b""

    def agrees(self, other: Result, within: float) -> bool:
        pairs = ((self.output, other.output), (self.gradient, other.gradient))
        if any(len(one) != len(two) for one, two in pairs) or self.targets != other.targets:
            return False
        return all(distance(one, two) <= within for one, two in pairs)


Ruling = Literal["agree", "suspect", "witness", "undecided"]
"""The results agree; the checked replica is wrong; the first that computed again is; or nobody can say who is."""


def rule(claimed: Result, repeated: Sequence[Result], within: float) -> Ruling:
    """Compare a claimed result with those of one or two replicas that computed it again.

    With one that disagrees, or three results that all differ, nobody can say who is wrong."""
    first, *more = repeated
    if claimed.agrees(first, within):
        return "agree"
    if not more:
        return "undecided"
    against, with_claim = first.agrees(more[0], within), claimed.agrees(more[0], within)
    if against == with_claim:
        return "undecided"
    return "suspect" if against else "witness"
