"""1-bit and 2-bit codecs as numba kernels: each block is read once from memory and worked on in the cache.

The same arithmetic, operation for operation, as the torch path; no fastmath, so that LLVM neither reorders nor fuses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compression.kernels.jit import njit
from shoal.compression.kernels.simd import above_bits, leave, put, sign_bits

LARGEST_FINITE = np.float32(np.finfo(np.float32).max)
SMALLEST_NORMAL = np.float32(np.finfo(np.float32).tiny)
LARGEST_MAGNITUDE = np.int32(0x7F7F0000).view(np.float32)
LARGEST_BITS, SMALLEST_BITS = np.int32(0x7F7F), np.int32(0x0080)
DOWN, UP = np.float32(2.0**-16), np.float32(2.0**16)
OUTER = np.float32(1.4)
HALF, ONE, ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)


@njit
def fold_sizes(values: Any, sums: Any) -> Any:
    """Halve ``|values| * 2**-16`` three times in one pass: ``(8 * m,)`` to ``(m,)``."""
    m = sums.size
    a, b, c, d = values[:m], values[m : 2 * m], values[2 * m : 3 * m], values[3 * m : 4 * m]
    e, f, g, h = values[4 * m : 5 * m], values[5 * m : 6 * m], values[6 * m : 7 * m], values[7 * m : 8 * m]
    for i in range(m):
        ae = abs(a[i] * DOWN) + abs(e[i] * DOWN)
        bf = abs(b[i] * DOWN) + abs(f[i] * DOWN)
        cg = abs(c[i] * DOWN) + abs(g[i] * DOWN)
        dh = abs(d[i] * DOWN) + abs(h[i] * DOWN)
        sums[i] = (ae + cg) + (bf + dh)


@njit
def above_or_zero(value: Any, limit: Any) -> Any:
    size = abs(value * DOWN)
    return size if size > limit else ZERO


@njit
def is_above(value: Any, limit: Any) -> Any:
    return np.int32(abs(value * DOWN) > limit)


@njit
def fold_above(values: Any, limit: Any, sums: Any) -> Any:
    """Do ``fold_sizes`` with 0 in place of sizes up to ``limit``; returns how many are above."""
    m = sums.size
    a, b, c, d = values[:m], values[m : 2 * m], values[2 * m : 3 * m], values[3 * m : 4 * m]
    e, f, g, h = values[4 * m : 5 * m], values[5 * m : 6 * m], values[6 * m : 7 * m], values[7 * m : 8 * m]
    count = np.int32(0)
    for i in range(m):
        ae = above_or_zero(a[i], limit) + above_or_zero(e[i], limit)
        bf = above_or_zero(b[i], limit) + above_or_zero(f[i], limit)
        cg = above_or_zero(c[i], limit) + above_or_zero(g[i], limit)
        dh = above_or_zero(d[i], limit) + above_or_zero(h[i], limit)
        sums[i] = (ae + cg) + (bf + dh)
        count += is_above(a[i], limit) + is_above(b[i], limit) + is_above(c[i], limit) + is_above(d[i], limit)
        count += is_above(e[i], limit) + is_above(f[i], limit) + is_above(g[i], limit) + is_above(h[i], limit)
    return count


@njit
def rest_in_halves(sums: Any, m: Any) -> Any:
    """Do the remaining halvings of ``sums[:m]`` in place; returns their sum."""
    while m >= 8:
        m //= 8
        for i in range(m):
            first = (sums[i] + sums[4 * m + i]) + (sums[2 * m + i] + sums[6 * m + i])
            second = (sums[m + i] + sums[5 * m + i]) + (sums[3 * m + i] + sums[7 * m + i])
            sums[i] = first + second
    while m > 1:
        m //= 2
        for i in range(m):
            sums[i] = sums[i] + sums[m + i]
    return sums[0]


@njit
def magnitude(mean: Any) -> Any:
    """Convert a mean of ``|x| * 2**-16`` to the bits of a bfloat16, rounded to nearest, ties to even."""
    mean = min(np.float32(mean * UP), LARGEST_MAGNITUDE)
    if mean < SMALLEST_NORMAL:
        return np.int32(0)
    bits = np.float32(mean).view(np.int32)
    return np.int32((bits + np.int32(0x7FFF) + ((bits >> 16) & 1)) >> 16)


@njit
def measure(block: Any, count: Any, sums: Any, scales: Any, levels: Any) -> Any:
    """Store the magnitudes of a whole block, of which ``count`` values count; False when one is not finite."""
    m = block.size // 8
    fold_sizes(block, sums)
    total = rest_in_halves(sums, m)
    if not total <= LARGEST_FINITE:
        return False
    mean = np.float32(total / np.float32(count))
    if levels == 1:
        scales[0] = magnitude(mean)
        return True
    limit = np.float32(mean * OUTER)
    outers = fold_above(block, limit, sums)
    outer_total = rest_in_halves(sums, m)
    inner = np.float32(max(np.float32(total - outer_total), ZERO) / np.float32(max(count - outers, 1)))
    outer = inner if outers == 0 else np.float32(outer_total / np.float32(outers))
    scales[0] = magnitude(inner)
    scales[1] = magnitude(outer)
    return True


@njit
def pack(bits: Any, groups: Any, scales: Any, codes: Any, levels: Any) -> Any:
    """Write the codes of the first ``groups`` groups of a block, given by its bits."""
    if levels == 1:
        for g in range(groups):
            codes[g] = sign_bits(bits, 8 * g)
        return
    limit = limit_of(scales)
    for g in range(groups):
        codes[2 * g] = sign_bits(bits, 8 * g)
        codes[2 * g + 1] = above_bits(bits, 8 * g, limit)


@njit
def bits_of(scale: Any) -> Any:
    """The bits of a stored magnitude as a float32."""
    return np.int32(np.int32(scale) << 16)


@njit
def value_of(scale: Any) -> Any:
    return np.int32(bits_of(scale)).view(np.float32)


@njit
def limit_of(scales: Any) -> Any:
    """The bits of the middle between the inner and the outer magnitude."""
    return np.float32(value_of(scales[0]) * HALF + value_of(scales[1]) * HALF).view(np.int32)


@njit
def unpack(bits: Any, groups: Any, scales: Any, codes: Any, levels: Any, weight: Any) -> Any:
    """Decode the first ``groups`` groups of a block, multiplied by ``weight``, as bits into ``bits``."""
    inner = np.float32(value_of(scales[0]) * weight).view(np.int32)
    if levels == 1:
        for g in range(groups):
            put(bits, 8 * g, codes[g], np.uint8(0), inner, inner)
        return
    outer = np.float32(value_of(scales[1]) * weight).view(np.int32)
    for g in range(groups):
        put(bits, 8 * g, codes[2 * g], codes[2 * g + 1], inner, outer)


@njit
def encode(values: Any, scales: Any, codes: Any, block: Any, levels: Any) -> Any:
    """Encode a vector; False when a value is not finite. ``levels`` is 1 for ``sign``, 2 for ``int2``."""
    n, sums = values.size, np.empty(block // 8, np.float32)
    filled = np.zeros(block if n % block else 0, np.float32)
    for b in range(scales.size // levels):
        start, stop = b * block, min((b + 1) * block, n)
        part = values[start:stop]
        if part.size < block:
            filled[: part.size] = part
            part = filled
        stored = scales[b * levels : (b + 1) * levels]
        if not measure(part, stop - start, sums, stored, levels):
            return False
        pack(part.view(np.int32), (stop - start + 7) // 8, stored, codes[start // 8 * levels :], levels)
    return True


@njit
def measure_sums(values: Any, residual: Any, scales: Any, block: Any, levels: Any) -> Any:
    """Store the magnitudes of a sum; False when one is not finite."""
    n, sums = values.size, np.empty(block // 8, np.float32)
    corrected = np.zeros(block, np.float32)
    for b in range(scales.size // levels):
        start, stop = b * block, min((b + 1) * block, n)
        add(values[start:stop], residual[start:stop], corrected, block)
        if not measure(corrected, stop - start, sums, scales[b * levels : (b + 1) * levels], levels):
            return False
    return True


@njit
def pack_sums(values: Any, residual: Any, scales: Any, codes: Any, block: Any, levels: Any) -> Any:
    """Write the codes of a sum, whose magnitudes are stored, and its loss into ``residual``."""
    n, padded = values.size, np.zeros(16, np.float32)
    for b in range(scales.size // levels):
        start, stop = b * block, min((b + 1) * block, n)
        stored, packed = scales[b * levels : (b + 1) * levels], codes[start // 8 * levels :]
        whole = (stop - start) // 8
        leave_groups(values[start:stop], residual[start:stop], whole, stored, packed, levels)
        if (stop - start) % 8:
            left, first, second = residual[start + 8 * whole : stop], padded[:8], padded[8:]
            first[: left.size] = values[start + 8 * whole : stop]
            second[: left.size] = left
            leave_groups(first, second, 1, stored, packed[whole * levels :], levels)
            left[:] = second[: left.size]


@njit
def leave_groups(values: Any, residual: Any, groups: Any, scales: Any, codes: Any, levels: Any) -> Any:
    """Write the codes of the first ``groups`` groups of a block's sums, and their loss into ``residual``."""
    inner = bits_of(scales[0])
    if levels == 1:
        for g in range(groups):
            codes[g] = np.uint8(leave(values, residual, 8 * g, inner, inner, inner))
        return
    outer, limit = bits_of(scales[1]), limit_of(scales)
    for g in range(groups):
        both = leave(values, residual, 8 * g, inner, outer, limit)
        codes[2 * g] = np.uint8(both)
        codes[2 * g + 1] = np.uint8(both >> 8)


@njit
def add(first: Any, second: Any, out: Any, block: Any) -> Any:
    """Write the sums of a block, and zeros after those of a short one."""
    for i in range(first.size):
        out[i] = first[i] + second[i]
    for i in range(first.size, block):
        out[i] = ZERO


@njit
def are_plain(scales: Any) -> Any:
    """Return whether each of ``scales``, int16, has the bits of 0 or of a bfloat16 that is normal and positive."""
    odd = np.int32(0)
    for i in range(scales.size):
        bits = np.int32(scales[i])
        odd |= np.int32((bits < 0) | (bits > LARGEST_BITS) | ((bits > 0) & (bits < SMALLEST_BITS)))
    return odd == 0


@njit
def decode(scales: Any, codes: Any, out: Any, block: Any, levels: Any) -> Any:
    for b in range(scales.size // levels):
        start, stop = b * block, min((b + 1) * block, out.size)
        stored, packed = scales[b * levels : (b + 1) * levels], codes[start // 8 * levels :]
        part, whole = out[start:stop], (stop - start) // 8
        unpack(part.view(np.int32), whole, stored, packed, levels, ONE)
        if part.size % 8:
            last = np.empty(8, np.float32)
            unpack(last.view(np.int32), 1, stored, packed[whole * levels :], levels, ONE)
            part[8 * whole :] = last[: part.size - 8 * whole]


@njit
def accumulate(scales: Any, codes: Any, total: Any, weight: Any, block: Any, levels: Any) -> Any:
    """Add decoded values times ``weight``; each magnitude is multiplied once: signs do not change its rounding."""
    factor = np.float32(weight)
    work = np.empty(block, np.float32)
    for b in range(scales.size // levels):
        start, stop = b * block, min((b + 1) * block, total.size)
        stored, packed = scales[b * levels : (b + 1) * levels], codes[start // 8 * levels :]
        unpack(work.view(np.int32), (stop - start + 7) // 8, stored, packed, levels, factor)
        part = total[start:stop]
        for i in range(part.size):
            part[i] = part[i] + work[i]


def warm_up() -> None:
    """Compile every kernel for the types that the codecs use, or load it from the cache."""
    values, scales, codes = np.ones(8, np.float32), np.empty(2, np.int16), np.empty(2, np.uint8)
    for levels in (1, 2):
        encode(values, scales[:levels], codes[:levels], 8, levels)
        measure_sums(values, np.zeros(8, np.float32), scales[:levels], 8, levels)
        pack_sums(values, np.zeros(8, np.float32), scales[:levels], codes[:levels], 8, levels)
        are_plain(scales[:levels])
        decode(scales[:levels], codes[:levels], values, 8, levels)
        accumulate(scales[:levels], codes[:levels], values, 1.0, 8, levels)
