"""Block-wise int8 to the nearest code, in strips: whole blocks of a size that strips fill.

Bit for bit as the blocks in ``blockwise_kernels.py``, which does all others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from shoal.compression.kernels.blockwise_blocks import LARGEST_FINITE, ZERO, scale_of
from shoal.compression.kernels.jit import njit
from shoal.compression.kernels.past_caches import finish_streaming, floats_at
from shoal.compression.kernels.strips import (
    LINE_BYTES,
    ROOM,
    STRIP,
    address_of,
    filled,
    larger,
    largest_bits,
    load,
    load_codes,
    room,
    rounded,
    store,
    store_codes,
    stream,
)

ONE = np.float32(1.0)
LARGEST = np.float32(127.0)


@njit
def blocks_in_strips(n: Any, block: Any, bits: Any, seed: Any) -> Any:
    """How many blocks of ``n`` values, from the first on, are done here."""
    return n // block if bits == 8 and seed < 0 and block % STRIP == 0 and block <= ROOM else 0


@njit
def encode(values: Any, scales: Any, codes: Any, block: Any) -> Any:
    """As many blocks as ``scales``. Returns -1, or the first block with a value that is not finite."""
    source, target = address_of(values), address_of(codes)
    for b in range(scales.size):
        tops = filled(ZERO)
        for i in range(b * block, (b + 1) * block, STRIP):
            tops = larger(load(source + 4 * i), tops)
        top = largest_bits(tops)
        if top > LARGEST_FINITE:
            return b
        scales[b], inverse = scale_of(top, LARGEST)
        inverses = filled(inverse)
        for i in range(b * block, (b + 1) * block, STRIP):
            store_codes(rounded(load(source + 4 * i) * inverses), target + i)
    return -1


@njit
def encode_residual(values: Any, residual: Any, left: Any, scales: Any, codes: Any, block: Any) -> Any:
    """As ``encode``, the sum of two; ``left``, which may be ``residual``, becomes what that loses."""
    one, two, rest, target, sums = address_of(values), address_of(residual), address_of(left), address_of(codes), room()
    past_caches = rest != two and rest % LINE_BYTES == 0
    for b in range(scales.size):
        at, tops = b * block, filled(ZERO)
        for i in range(0, block, STRIP):
            total = load(one + 4 * (at + i)) + load(two + 4 * (at + i))
            store(total, sums + 4 * i)
            tops = larger(total, tops)
        top = largest_bits(tops)
        if top > LARGEST_FINITE:
            return b
        scales[b], inverse = scale_of(top, LARGEST)
        split(sums, block, (scales[b], inverse, ONE), target + at, rest + 4 * at, past_caches)
    finish_streaming()
    return -1


@njit
def split(source: Any, n: Any, factors: Any, codes: Any, left: Any, past_caches: Any) -> Any:
    """The ``n`` values of a block at one address into their codes at another, and what those lose at a third.

    ``factors``: the block's scale, its inverse, and what the loss is multiplied with."""
    scales, inverses, times, zeros = filled(factors[0]), filled(factors[1]), filled(factors[2]), filled(ZERO)
    for i in range(0, n, STRIP):
        value = load(source + 4 * i)
        code = rounded(value * inverses)
        store_codes(code, codes + i)
        # Plus zero, as a code has no sign of zero.
        lost = (value - (code + zeros) * scales) * times
        if past_caches:
            stream(lost, left + 4 * i)
        else:
            store(lost, left + 4 * i)


@njit
def encode_mean(
    addresses: Any, weights: Any, own: Any, factors: Any, left: Any, scales: Any, codes: Any, how: Any
) -> Any:
    """As ``blockwise_kernels.encode_mean``; ``how``: the size of blocks, and how many of them."""
    (block, blocks), (index, values, residual) = how, own
    ours = index, address_of(values), address_of(residual)
    over, times = np.float32(factors[0]), np.float32(factors[1])
    rest, target, means = address_of(left), address_of(codes), room()
    past_caches = rest % LINE_BYTES == 0
    packed_scales, packed_codes = np.empty(addresses.size, np.float32), addresses + 4 * scales.size
    for b in range(blocks):
        at = b * block
        for k in range(addresses.size):
            if k != index:
                packed_scales[k] = carray(floats_at(addresses[k]), scales.size)[b]
        top = sum_up(means, (at, block), packed_codes, packed_scales, weights, ours, over)
        if top > LARGEST_FINITE:
            return b
        scales[b], inverse = scale_of(top, LARGEST)
        split(means, block, (scales[b], inverse, times), target + at, rest + 4 * at, past_caches)
    finish_streaming()
    return -1


@njit
def sum_up(means: Any, which: Any, codes: Any, scales: Any, weights: Any, own: Any, over: Any) -> Any:
    """At the address ``means``: the sum over ``over`` of a block, ``which``: its first value, and how many. Of those
    with ``codes`` at these addresses, times ``scales`` and ``weights``, and in its turn of our own. Returns the bits of
    the largest absolute mean."""
    (start, n), (index, one, two) = which, own
    before, ours = codes.size if index < 0 else index, filled(weights[max(index, 0)])
    tops, zeros, divisors = filled(ZERO), filled(ZERO), filled(over)
    for i in range(0, n, STRIP):
        at, total = start + i, zeros
        for k in range(before):
            total = total + load_codes(codes[k] + at) * filled(scales[k]) * filled(weights[k])
        if index >= 0:
            total = total + (load(one + 4 * at) + load(two + 4 * at)) * ours
        for k in range(before + 1, codes.size):
            total = total + load_codes(codes[k] + at) * filled(scales[k]) * filled(weights[k])
        mean = total / divisors + zeros
        store(mean, means + 4 * i)
        tops = larger(mean, tops)
    return largest_bits(tops)


@njit
def decode(scales: Any, codes: Any, out: Any, block: Any) -> Any:
    """As many blocks as ``scales``, past the caches: a mean is far larger than they are. ``finish_streaming`` has to
    follow in the end."""
    source, target = address_of(codes), address_of(out)
    past_caches = target % LINE_BYTES == 0
    for b in range(scales.size):
        factors = filled(scales[b])
        for i in range(b * block, (b + 1) * block, STRIP):
            value = load_codes(source + i) * factors
            if past_caches:
                stream(value, target + 4 * i)
            else:
                store(value, target + 4 * i)
