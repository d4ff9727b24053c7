"""Block-wise int8 and int4 as numba kernels: each block is read once from memory and worked on in the cache.

Packed vectors come as all their bytes and ``how``, ``(leaf, block, bits, seed)``: how many values have scales and codes
of their own (at most all), values a block, bits a code, and the seed of stochastic rounding, -1 for none.

The same arithmetic, operation for operation, as ``Blockwise`` has by torch; no fastmath, so that LLVM neither reorders
nor fuses. The absolute maximum is taken on the floats' bits as integers, which orders them, NaN and infinity above all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, uint32  # type: ignore[attr-defined]

from shoal.compression.kernels.jit import njit
from shoal.compression.kernels.simd import (
    LINE_BYTES,
    ROOM,
    STRIP,
    address_of,
    bytes_at,
    filled,
    finish_streaming,
    floats_at,
    larger,
    largest_bits,
    lines,
    load,
    load_codes,
    put_past_caches,
    room,
    rounded,
    store,
    store_codes,
    stream,
)

ABSOLUTE = np.int32(0x7FFFFFFF)
LARGEST_FINITE = np.int32(0x7F7FFFFF)
SMALLEST_NORMAL = np.int32(0x00800000)
HALF = np.float32(0.5)
DRAW = np.float32(2.0**-24)
ZERO = np.float32(0.0)
LARGEST_8 = np.float32(127.0)
PIECE = 4096
"""float32 that are computed within the first cache before they are streamed past all caches: each turn between
reading and streaming takes time."""

FEW = 2**16
"""Number of codes whose squares an int32 can sum; even."""


# One block -----------------------------------------------------------------------------------------------------


def _limits(largest: int) -> tuple[np.int32, np.float32]:
    """Bits of the smallest block maximum that counts, and the largest scale, for this largest code."""
    info = np.finfo(np.float32)
    smallest = np.float32(largest * float(info.tiny)).view(np.int32)
    return smallest, np.nextafter(np.float32(float(info.max) / largest), np.float32(0.0))


SMALLEST_8, LARGEST_SCALE_8 = _limits(127)
SMALLEST_4, LARGEST_SCALE_4 = _limits(7)


@njit
def mix(x: Any) -> Any:
    """Hash of 32 bits to 32 well-mixed bits."""
    x = uint32(x)
    x = uint32(x ^ (x >> uint32(16)))
    x = uint32(x * uint32(0x7FEB352D))
    x = uint32(x ^ (x >> uint32(15)))
    x = uint32(x * uint32(0x846CA68B))
    return uint32(x ^ (x >> uint32(16)))


@njit
def absmax_bits(bits: Any) -> Any:
    """The largest of ``bits``, ``(m,) int32``, without their signs."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i] & ABSOLUTE)
    return largest


@njit
def scale_of(bits: Any, largest: Any) -> Any:
    """A block's scale and the factor of its values, from the bits of its absolute maximum."""
    if largest == np.float32(127.0):
        smallest, highest = SMALLEST_8, LARGEST_SCALE_8
    else:
        smallest, highest = SMALLEST_4, LARGEST_SCALE_4
    if bits < smallest:
        return ZERO, ZERO
    absmax = np.int32(bits).view(np.float32)
    return min(np.float32(absmax / largest), highest), np.float32(largest / absmax)


@njit
def quantize(values: Any, inverse: Any, largest: Any, key: Any, rounded: Any) -> Any:
    """Write the codes of one block, as floats, to ``rounded``; to nearest for ``key`` below 0, else stochastically."""
    if key < 0:
        for i in range(values.size):
            rounded[i] = np.rint(np.float32(values[i] * inverse))
    else:
        start = uint32(key)
        for i in range(values.size):
            drawn = mix(uint32(start + uint32(i)))
            dither = np.float32(np.float32(np.float32(drawn >> uint32(8)) * DRAW) - HALF)
            scaled = np.float32(np.float32(values[i] * inverse) + dither)
            rounded[i] = np.rint(min(max(scaled, -largest), largest))


@njit
def key_of(seed: Any, bits: Any, block: Any) -> Any:
    if seed < 0:
        return np.int64(-1)
    return np.int64(mix(uint32(mix(uint32(uint32(bits) ^ uint32(seed))) ^ uint32(block))))


@njit
def write_codes(rounded: Any, codes: Any, start: Any, bits: Any) -> Any:
    """Write the codes of a block that begins at value ``start``."""
    m = rounded.size
    if bits == 8:
        signed = codes[start : start + m].view(np.int8)
        for i in range(m):
            signed[i] = np.int8(np.int32(rounded[i]))
        return
    target = codes[start // 2 : start // 2 + (m + 1) // 2]
    for i in range(m // 2):
        low = np.uint8(np.int32(rounded[2 * i]) + 8)
        high = np.uint8(np.int32(rounded[2 * i + 1]) + 8)
        target[i] = low | (high << 4)
    if m % 2:
        target[m // 2] = np.uint8(np.int32(rounded[m - 1]) + 8) | np.uint8(0x80)


@njit
def read_codes(codes: Any, start: Any, bits: Any, values: Any) -> Any:
    """Read the codes of a block that begins at value ``start`` into ``values``."""
    m = values.size
    if bits == 8:
        signed = codes[start : start + m].view(np.int8)
        for i in range(m):
            values[i] = np.float32(signed[i])
        return
    source = codes[start // 2 : start // 2 + (m + 1) // 2]
    for i in range(m // 2):
        values[2 * i] = np.float32(np.int32(source[i] & 15) - 8)
        values[2 * i + 1] = np.float32(np.int32(source[i] >> 4) - 8)
    if m % 2:
        values[m - 1] = np.float32(np.int32(source[m // 2] & 15) - 8)


# int8 to the nearest code, in strips: whole blocks of a size that strips fill -----------------------------------


@njit
def blocks_in_strips(n: Any, block: Any, bits: Any, seed: Any) -> Any:
    """Number of blocks of ``n`` values, from the first on, that the kernels in strips do."""
    return n // block if bits == 8 and seed < 0 and block % STRIP == 0 and block <= ROOM else 0


@njit
def encode_strips(values: Any, scales: Any, codes: Any, block: Any) -> Any:
    """Encode as many blocks as ``scales``. Returns -1, or the first block with a value that is not finite."""
    source, target = address_of(values), address_of(codes)
    for b in range(scales.size):
        tops = filled(ZERO)
        for i in range(b * block, (b + 1) * block, STRIP):
            tops = larger(load(source + 4 * i), tops)
        top = largest_bits(tops)
        if top > LARGEST_FINITE:
            return b
        scales[b], inverse = scale_of(top, LARGEST_8)
        inverses = filled(inverse)
        for i in range(b * block, (b + 1) * block, STRIP):
            store_codes(rounded(load(source + 4 * i) * inverses), target + i)
    return -1


@njit
def encode_residual_strips(values: Any, residual: Any, left: Any, scales: Any, codes: Any, block: Any) -> Any:
    """Encode the sum of two vectors; ``left``, which may be ``residual``, is the loss. Returns as ``encode_strips``."""
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
        scales[b], inverse = scale_of(top, LARGEST_8)
        split_strips(sums, block, scales[b], inverse, target + at, rest + 4 * at, past_caches)
    finish_streaming()
    return -1


@njit
def split_strips(source: Any, n: Any, scale: Any, inverse: Any, codes: Any, left: Any, past_caches: Any) -> Any:
    """Encode the ``n`` values of a block at one address into codes at another; their loss goes to a third."""
    scales, inverses, zeros = filled(scale), filled(inverse), filled(ZERO)
    for i in range(0, n, STRIP):
        value = load(source + 4 * i)
        code = rounded(value * inverses)
        store_codes(code, codes + i)
        # Plus zero, as a code has no sign of zero.
        lost = value - (code + zeros) * scales
        if past_caches:
            stream(lost, left + 4 * i)
        else:
            store(lost, left + 4 * i)


@njit
def encode_mean_strips(
    addresses: Any, weights: Any, over: Any, left: Any, scales: Any, codes: Any, block: Any, blocks: Any
) -> Any:
    """Do ``encode_mean`` for this many blocks, the first ones."""
    rest, target, means = address_of(left), address_of(codes), room()
    past_caches = rest % LINE_BYTES == 0
    packed_scales, packed_codes = np.empty(addresses.size, np.float32), addresses + 4 * scales.size
    for b in range(blocks):
        at = b * block
        for k in range(addresses.size):
            packed_scales[k] = carray(floats_at(addresses[k]), scales.size)[b]
        top = sum_strips(means, at, block, packed_codes, packed_scales, weights, over)
        if top > LARGEST_FINITE:
            return b
        scales[b], inverse = scale_of(top, LARGEST_8)
        split_strips(means, block, scales[b], inverse, target + at, rest + 4 * at, past_caches)
    finish_streaming()
    return -1


@njit
def sum_strips(means: Any, start: Any, n: Any, codes: Any, scales: Any, weights: Any, over: Any) -> Any:
    """Write the mean of the ``n`` values from ``start`` on, the sum divided by ``over``, to the address ``means``.

    The summands have ``codes`` at these addresses, times ``scales`` and ``weights``. Returns the bits of the largest
    absolute mean."""
    tops, zeros, divisors = filled(ZERO), filled(ZERO), filled(over)
    for i in range(0, n, STRIP):
        at, total = start + i, zeros
        for k in range(codes.size):
            total = total + load_codes(codes[k] + at) * filled(scales[k]) * filled(weights[k])
        mean = total / divisors + zeros
        store(mean, means + 4 * i)
        tops = larger(mean, tops)
    return largest_bits(tops)


@njit
def decode_strips(scales: Any, codes: Any, out: Any, block: Any) -> Any:
    """Decode as many blocks as ``scales``, past the caches: a mean is far larger than they are.

    The caller ends with ``finish_streaming``."""
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


# One leaf ------------------------------------------------------------------------------------------------------


@njit
def encode_leaf(values: Any, scales: Any, codes: Any, block: Any, bits: Any, seed: Any) -> Any:
    """Encode a leaf. Returns -1, or the first block with a value that is not finite."""
    largest = np.float32(127.0) if bits == 8 else np.float32(7.0)
    done = blocks_in_strips(values.size, block, bits, seed)
    bad = encode_strips(values, scales[:done], codes, block)
    if bad >= 0:
        return bad
    work = np.empty(min(block, values.size), np.float32)
    for b in range(done, scales.size):
        part = values[b * block : min((b + 1) * block, values.size)]
        top = absmax_bits(part.view(np.int32))
        if top > LARGEST_FINITE:
            return b
        scale, inverse = scale_of(top, largest)
        scales[b] = scale
        rounded = work[: part.size]
        quantize(part, inverse, largest, key_of(seed, top, b), rounded)
        write_codes(rounded, codes, b * block, bits)
    return -1


@njit
def encode_residual_leaf(
    values: Any, residual: Any, left: Any, scales: Any, codes: Any, block: Any, bits: Any, seed: Any
) -> Any:
    """Encode the sum of two leaves; ``left`` becomes the loss.

    Returns -1, or the first block with a sum that is not finite: nothing of it and after it is written then.

    ``left`` may be ``residual``: what is written has been read before.
    """
    done = blocks_in_strips(values.size, block, bits, seed)
    bad = encode_residual_strips(values, residual, left, scales[:done], codes, block)
    if bad >= 0:
        return bad
    n, several, how = values.size, max(1, PIECE // block) * block, (block, bits, seed)
    work, rounded = lines(min(several, n)), np.empty(min(block, n), np.float32)
    is_apart = left.ctypes.data != residual.ctypes.data
    for first in range(done * block, n, several):
        end = min(first + several, n)
        for start in range(first, end, block):
            stop, b = min(start + block, n), start // block
            corrected = work[start - first : stop - first]
            top = add(values[start:stop], residual[start:stop], corrected)
            if top > LARGEST_FINITE:
                return b
            split(b, corrected, top, scales, codes, rounded, how)
        if is_apart:
            put_past_caches(work[: end - first], left[first:end])
        else:
            put(work[: end - first], left[first:end])
    finish_streaming()
    return -1


@njit
def put(values: Any, target: Any) -> Any:
    """Copy ``values`` to ``target``; an assignment of slices takes twice as long, as they might overlap."""
    for i in range(values.size):
        target[i] = values[i]


@njit
def split(b: Any, corrected: Any, top: Any, scales: Any, codes: Any, rounded_all: Any, how: Any) -> Any:
    """Encode block ``b`` into its scale and its codes; ``corrected`` becomes the loss.

    ``top``: the bits of the block's absolute maximum."""
    block, bits, seed = how
    largest = np.float32(127.0) if bits == 8 else np.float32(7.0)
    start = b * block
    scale, inverse = scale_of(top, largest)
    scales[b] = scale
    rounded = rounded_all[: corrected.size]
    quantize(corrected, inverse, largest, key_of(seed, top, b), rounded)
    write_codes(rounded, codes, start, bits)
    for i in range(corrected.size):
        # Plus zero, as a code has no sign of zero.
        corrected[i] = np.float32(corrected[i] - np.float32(np.float32(rounded[i] + ZERO) * scale))


@njit
def encode_mean_leaf(addresses: Any, weights: Any, divisor: Any, left: Any, scales: Any, codes: Any, how: Any) -> Any:
    """Encode a mean: the sum of packed leaves at ``addresses``, times ``weights``, over ``divisor``.

    ``left`` becomes the loss. Returns as ``encode_residual_leaf``.
    """
    (block, bits, seed), n, several = how, left.size, max(1, PIECE // how[0]) * how[0]
    over = np.float32(divisor)
    done = blocks_in_strips(n, block, bits, seed)
    bad = encode_mean_strips(addresses, weights, over, left, scales, codes, block, done)
    if bad >= 0:
        return bad
    means, work = lines(min(several, n)), np.empty(min(block, n), np.float32)
    for first in range(done * block, n, several):
        end = min(first + several, n)
        for start in range(first, end, block):
            mean, b = means[start - first : min(start + block, n) - first], start // block
            sum_up(b, mean, addresses, weights, (scales.size, codes.size), work, how)
            top = np.int32(0)
            for i in range(mean.size):
                mean[i] = value = np.float32(mean[i] / over) + ZERO
                top = max(top, np.float32(value).view(np.int32) & ABSOLUTE)
            if top > LARGEST_FINITE:
                return b
            split(b, mean, top, scales, codes, work, how)
        put_past_caches(means[: end - first], left[first:end])
    finish_streaming()
    return -1


@njit
def sum_up(b: Any, mean: Any, addresses: Any, weights: Any, sizes: Any, work: Any, how: Any) -> Any:
    """Sum block ``b`` of all summands into ``mean``; ``sizes``: the numbers of their scales and code bytes."""
    (block, bits, _), (blocks, code_bytes) = how, sizes
    start = b * block
    mean[:] = ZERO
    for k in range(addresses.size):
        scale = carray(floats_at(addresses[k]), blocks)[b]
        packed = carray(bytes_at(addresses[k] + 4 * blocks), code_bytes)
        add_block(packed, start, bits, scale, weights[k], mean, work)


@njit
def add_block(codes: Any, start: Any, bits: Any, scale: Any, factor: Any, total: Any, work: Any) -> Any:
    """Decode a block that begins at value ``start``, and add it to ``total`` times ``factor``."""
    if bits == 8:
        signed = codes[start : start + total.size].view(np.int8)
        for i in range(total.size):
            total[i] = total[i] + np.float32(np.float32(np.float32(signed[i]) * scale) * factor)
        return
    decoded = work[: total.size]
    read_codes(codes, start, bits, decoded)
    for i in range(total.size):
        total[i] = total[i] + np.float32(np.float32(decoded[i] * scale) * factor)


@njit
def add(first: Any, second: Any, out: Any) -> Any:
    """Write the sums to ``out``. Returns the bits of the largest absolute sum, found in the same pass."""
    top = np.int32(0)
    for i in range(out.size):
        out[i] = value = np.float32(first[i] + second[i])
        top = max(top, np.float32(value).view(np.int32) & ABSOLUTE)
    return top


@njit
def decode_leaf(scales: Any, codes: Any, out: Any, block: Any, bits: Any) -> Any:
    for b in range(scales.size):
        part = out[b * block : min((b + 1) * block, out.size)]
        if bits == 8:
            signed, scale = codes[b * block : b * block + part.size].view(np.int8), scales[b]
            for i in range(part.size):
                part[i] = np.float32(signed[i]) * scale
            continue
        read_codes(codes, b * block, bits, part)
        scale = scales[b]
        for i in range(part.size):
            part[i] = part[i] * scale


@njit
def squares_8(codes: Any, start: Any, stop: Any) -> Any:
    total = 0.0
    for first in range(start, stop, FEW):
        signed, part = codes[first : min(first + FEW, stop)].view(np.int8), np.int32(0)
        for i in range(signed.size):
            code = np.int32(signed[i])
            part = np.int32(part + np.int32(code * code))
        total += np.float64(part)
    return total


@njit
def squares_4(codes: Any, start: Any, stop: Any) -> Any:
    total = 0.0
    for first in range(start, stop, FEW):
        end, part = min(first + FEW, stop), np.int32(0)
        pairs = codes[first // 2 : end // 2]
        for i in range(pairs.size):
            low, high = np.int32(np.int32(pairs[i] & 15) - 8), np.int32(np.int32(pairs[i] >> 4) - 8)
            part = np.int32(part + np.int32(np.int32(low * low) + np.int32(high * high)))
        total += np.float64(part)
        if end % 2:
            last = np.float64(np.int32(codes[end // 2] & 15) - 8)
            total += last * last
    return total


# Whole vectors, leaf by leaf ------------------------------------------------------------------------------------


@njit
def packed_bytes(n: Any, how: Any) -> Any:
    """Size of ``n`` packed values of one leaf."""
    return 4 * ((n + how[1] - 1) // how[1]) + (n if how[2] == 8 else (n + 1) // 2)


@njit
def leaf_of(packed: Any, start: Any, n: Any, how: Any) -> Any:
    """Return views of the scales and codes of the leaf that begins at value ``start`` of ``n``."""
    leaf, block, _, _ = how
    first, count = start // leaf * packed_bytes(leaf, how), min(leaf, n - start)
    codes = first + 4 * ((count + block - 1) // block)
    return packed[first:codes].view(np.float32), packed[codes : first + packed_bytes(count, how)]


@njit
def encode(values: Any, packed: Any, how: Any) -> Any:
    """Encode a vector. False when a value is not finite."""
    leaf, block, bits, seed = how
    for start in range(0, values.size, leaf):
        scales, codes = leaf_of(packed, start, values.size, how)
        if encode_leaf(values[start : start + leaf], scales, codes, block, bits, seed) >= 0:
            return False
    return True


@njit
def are_sums_finite(values: Any, residual: Any) -> Any:
    corrected = np.empty(min(PIECE, values.size), np.float32)
    for start in range(0, values.size, PIECE):
        stop = min(start + PIECE, values.size)
        if add(values[start:stop], residual[start:stop], corrected[: stop - start]) > LARGEST_FINITE:
            return False
    return True


@njit
def encode_residual(values: Any, residual: Any, left: Any, packed: Any, how: Any) -> Any:
    """Encode the sum of two vectors; ``left`` becomes the loss. False when a sum is not finite.

    ``left`` may be ``residual``: what is written has been read before."""
    leaf, block, bits, seed = how
    for start in range(0, values.size, leaf):
        stop = start + leaf
        scales, codes = leaf_of(packed, start, values.size, how)
        one, two, rest = values[start:stop], residual[start:stop], left[start:stop]
        if encode_residual_leaf(one, two, rest, scales, codes, block, bits, seed) >= 0:
            return False
    return True


@njit
def encode_mean(addresses: Any, weights: Any, divisor: Any, left: Any, packed: Any, how: Any) -> Any:
    """Encode a mean: the sum of packed vectors at ``addresses``, times ``weights``, over ``divisor``.

    ``left`` becomes the loss. Returns the largest scale, or -1 when the mean is not finite."""
    leaf, block, bits, seed = how
    largest = ZERO
    for start in range(0, left.size, leaf):
        scales, codes = leaf_of(packed, start, left.size, how)
        sources, rest = addresses + start // leaf * packed_bytes(leaf, how), left[start : start + leaf]
        if encode_mean_leaf(sources, weights, divisor, rest, scales, codes, (block, bits, seed)) >= 0:
            return np.float32(-1.0)
        for b in range(scales.size):
            largest = max(largest, scales[b])
    return largest


@njit
def are_plain(packed: Any, n: Any, safe_bits: Any, how: Any) -> Any:
    """Return whether each scale is 0, or normal and at most the one with ``safe_bits``: all but a few hostile ones."""
    odd = np.int32(0)
    for start in range(0, n, how[0]):
        bits = leaf_of(packed, start, n, how)[0].view(np.int32)
        for i in range(bits.size):
            odd |= np.int32((bits[i] < 0) | (bits[i] > safe_bits) | ((bits[i] > 0) & (bits[i] < SMALLEST_NORMAL)))
    return odd == 0


@njit
def decode(packed: Any, out: Any, how: Any) -> Any:
    leaf, block, bits, _ = how
    for start in range(0, out.size, leaf):
        scales, codes = leaf_of(packed, start, out.size, how)
        decode_leaf(scales, codes, out[start : start + leaf], block, bits)


@njit
def decode_all(sources: Any, rooms: Any, sizes: Any, is_left: Any, safe_bits: Any, how: Any) -> Any:
    """Decode packed vectors at addresses ``sources``, of ``sizes`` values, to addresses ``rooms``, past the caches.

    ``is_left`` becomes True for those that are not decoded, as their scales are not plain."""
    leaf, block, bits, _ = how
    for k in range(sizes.size):
        n = sizes[k]
        whole, rest = n // leaf, n % leaf
        packed = carray(bytes_at(sources[k]), whole * packed_bytes(leaf, how) + packed_bytes(rest, how))
        is_left[k] = not are_plain(packed, n, safe_bits, how)
        if is_left[k]:
            continue
        values = carray(floats_at(rooms[k]), n)
        for start in range(0, n, leaf):
            scales, codes = leaf_of(packed, start, n, how)
            out = values[start : start + leaf]
            done = blocks_in_strips(out.size, block, bits, -1)
            decode_strips(scales[:done], codes, out, block)
            at = done * block
            decode_leaf(scales[done:], codes[at if bits == 8 else 0 :], out[at:], block, bits)
    finish_streaming()


@njit
def squared_norm(packed: Any, n: Any, how: Any) -> Any:
    """Return the squared norm of ``n`` values; the sum over a block's codes is exact."""
    leaf, block, bits, _ = how
    total = 0.0
    for first in range(0, n, leaf):
        scales, codes = leaf_of(packed, first, n, how)
        for b in range(scales.size):
            scale = np.float64(scales[b])
            start, stop = b * block, min((b + 1) * block, n - first, leaf)
            total += scale * scale * (squares_8(codes, start, stop) if bits == 8 else squares_4(codes, start, stop))
    return total


@njit
def accumulate(packed: Any, total: Any, weight: Any, how: Any) -> Any:
    leaf, block, bits, _ = how
    factor = np.float32(weight)
    work = np.empty(min(block, total.size), np.float32)
    for start in range(0, total.size, leaf):
        scales, codes = leaf_of(packed, start, total.size, how)
        part = total[start : start + leaf]
        for b in range(scales.size):
            add_block(codes, b * block, bits, scales[b], factor, part[b * block : (b + 1) * block], work)


def warm_up() -> None:
    """Compile every kernel for the types that the codec uses, or load it from the cache."""
    values, packed = np.ones(4, np.float32), np.zeros(8, np.uint8)
    addresses, weights = np.array([packed.ctypes.data], np.int64), np.ones(1, np.float32)
    rooms, sizes = np.array([values.ctypes.data], np.int64), np.array([values.size])
    for bits, seed in ((8, -1), (4, 7)):
        how = (4, 4, bits, seed)
        encode(values, packed, how)
        are_sums_finite(values, values)
        encode_residual(values, np.zeros(4, np.float32), np.empty(4, np.float32), packed, how)
        encode_mean(addresses, weights, 1.0, values, packed, how)
        are_plain(packed, 4, int(LARGEST_FINITE), how)
        decode(packed, values, how)
        decode_all(addresses, rooms, sizes, np.zeros(1, np.bool_), int(LARGEST_FINITE), how)
        accumulate(packed, values, 1.0, how)
        squared_norm(packed, 4, how)
