"""Reference means of contributions, and how near to them a codec comes."""

from collections.abc import Sequence

from torch import Tensor

MEAN_ATOL = {
    "float32": 1e-6,
    "bfloat16": 4e-2,
    "float16": 4e-3,
    "float8_e4m3": 0.6,
    "int8": 4.5 / 127,
    "int4": 4.5 / 7,
}
"""Largest error of a mean of normal values, after two encodings (the contributions, and their mean). Codecs that are
not here lose most of a value: of them it is told what the residuals must hold."""


def weighted(contributions: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
    """Return the weighted mean of ``(n,) float32`` contributions as float64."""
    total = sum(one.double() * weight for one, weight in zip(contributions, weights, strict=True))
    assert isinstance(total, Tensor)
    return total / sum(weights)
