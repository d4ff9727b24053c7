"""Block-wise int8 and int4 as numba kernels: each block is read once from memory and worked on in the cache.

Bit for bit as ``blockwise.py``: see ``blockwise_blocks.py``.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from shoal.compression.blockwise_blocks import (
    ABSOLUTE,
    LARGEST_FINITE,
    SMALLEST_NORMAL,
    ZERO,
    absmax_bits,
    key_of,
    quantize,
    read_codes,
    scale_of,
    write_codes,
)

ONE = np.float32(1.0)
STREAMED, PIECE = 16, 1024
"""float32 that are written at once past the caches, a line of them; and that are decoded before they are."""


@intrinsic
def floats_at(typing_context, address):  # type: ignore[no-untyped-def]
    """A pointer to float32: an array of arrays of any number is nothing that numba compiles once for all."""
    return types.CPointer(types.float32)(address), _as_pointer  # type: ignore[no-untyped-call]


@intrinsic
def bytes_at(typing_context, address):  # type: ignore[no-untyped-def]
    """A pointer to uint8."""
    return types.CPointer(types.uint8)(address), _as_pointer  # type: ignore[no-untyped-call]


def _as_pointer(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@intrinsic
def stream(typing_context, source, target):  # type: ignore[no-untyped-def]
    """Copy ``STREAMED`` float32 from an address to another, which is aligned to as many, not by way of the caches."""
    return types.void(types.int64, types.int64), _streamed


def _streamed(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
    vector = ir.VectorType(ir.FloatType(), STREAMED).as_pointer()
    value = builder.load(builder.inttoptr(arguments[0], vector))
    value.align = 4
    store = builder.store(value, builder.inttoptr(arguments[1], vector))
    store.align = 4 * STREAMED
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    return context.get_dummy_value()


@intrinsic
def finish_streaming(typing_context):  # type: ignore[no-untyped-def]
    """What was streamed is there before whatever this thread writes from now on."""

    def fence(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), fence


@njit(nogil=True, cache=True)
def encode(values, scales, codes, block, bits, seed):  # type: ignore[no-untyped-def]
    """Returns -1, or the first block with a value that is not finite."""
    largest = np.float32(127.0) if bits == 8 else np.float32(7.0)
    work = np.empty(min(block, values.size), np.float32)
    for b in range(scales.size):
        part = values[b * block : min((b + 1) * block, values.size)]
        top = absmax_bits(part.view(np.int32))
        if top > LARGEST_FINITE:
            return b
        scale, inverse = scale_of(top, largest)
        scales[b] = scale
        if bits == 8 and seed < 0:
            signed = codes[b * block : b * block + part.size].view(np.int8)
            for i in range(part.size):
                signed[i] = np.int8(np.int32(np.rint(np.float32(part[i] * inverse))))
            continue
        rounded = work[: part.size]
        quantize(part, inverse, largest, key_of(seed, top, b), rounded)
        write_codes(rounded, codes, b * block, bits)
    return -1


@njit(nogil=True, cache=True)
def first_bad_sum(values, residual, block):  # type: ignore[no-untyped-def]
    """-1, or the first block with a sum that is not finite."""
    corrected = np.empty(min(block, values.size), np.float32)
    for start in range(0, values.size, block):
        stop = min(start + block, values.size)
        if add(values[start:stop], residual[start:stop], corrected[: stop - start]) > LARGEST_FINITE:
            return start // block
    return -1


@njit(nogil=True, cache=True)
def encode_residual(values, residual, left, scales, codes, block, bits, seed):  # type: ignore[no-untyped-def]
    """Returns -1, or the first block with a sum that is not finite: only what comes before it is written then.

    ``left`` may be ``residual``: each block is read before it is written.
    """
    work = np.empty(min(block, values.size), np.float32)
    rounded = np.empty(min(block, values.size), np.float32)
    for b in range(scales.size):
        start, stop = b * block, min((b + 1) * block, values.size)
        corrected = work[: stop - start]
        top = add(values[start:stop], residual[start:stop], corrected)
        if top > LARGEST_FINITE:
            return b
        split(b, corrected, top, (left, ONE), scales, codes, rounded, (block, bits, seed))
    return -1


@njit(nogil=True, cache=True)
def split(b, corrected, top, lost, scales, codes, rounded_all, how):  # type: ignore[no-untyped-def]
    """Block ``b`` into its scale, its codes and ``lost``: where what they lose goes, and how many times over; ``top``:
    the bits of its absolute maximum."""
    block, bits, seed = how
    left, times = lost
    largest = np.float32(127.0) if bits == 8 else np.float32(7.0)
    start, stop = b * block, b * block + corrected.size
    scale, inverse = scale_of(top, largest)
    scales[b] = scale
    if bits == 8 and seed < 0:
        split_bytes(corrected, left[start:stop], times, codes[start:stop].view(np.int8), scale, inverse)
        return
    rounded = rounded_all[: corrected.size]
    quantize(corrected, inverse, largest, key_of(seed, top, b), rounded)
    write_codes(rounded, codes, start, bits)
    remains = left[start:stop]
    for i in range(remains.size):
        # Plus zero, as a code has no sign of zero.
        remains[i] = np.float32(corrected[i] - np.float32(np.float32(rounded[i] + ZERO) * scale)) * times


@njit(nogil=True, cache=True)
def encode_mean(addresses, weights, own, factors, left, scales, codes, how):  # type: ignore[no-untyped-def]
    """The sum of packed vectors at ``addresses``, times ``weights``, over the first of ``factors``; what it loses,
    times the second, is ``left``. Returns as ``encode_residual``.

    ``own``: the index of the one that is not packed but the sum of two, below 0 if none is, and those two.
    """
    block, bits, _ = how
    index, values, residual = own
    n, blocks = left.size, scales.size
    over, times = np.float32(factors[0]), np.float32(factors[1])
    mean_all, work = np.empty(min(block, n), np.float32), np.empty(min(block, n), np.float32)
    for b in range(blocks):
        start, stop = b * block, min((b + 1) * block, n)
        mean, k = mean_all[: stop - start], 0
        if index == 0:
            put_sum(values[start:stop], residual[start:stop], weights[0], mean)
            k = 1
        else:
            mean[:] = ZERO
        while k < addresses.size:
            if k == index:
                add_sum(values[start:stop], residual[start:stop], weights[k], mean)
                k += 1
                continue
            scale = carray(floats_at(addresses[k]), blocks)[b]  # type: ignore[call-arg]
            packed = carray(bytes_at(addresses[k] + 4 * blocks), codes.size)
            if bits == 8 and k + 1 < addresses.size and k + 1 != index:
                other_scale = carray(floats_at(addresses[k + 1]), blocks)[b]
                other = carray(bytes_at(addresses[k + 1] + 4 * blocks), codes.size)
                one, two = packed[start:stop].view(np.int8), other[start:stop].view(np.int8)
                add_two(one, scale, weights[k], two, other_scale, weights[k + 1], mean)
                k += 2
            else:
                add_block(packed, start, bits, scale, weights[k], mean, work)
                k += 1
        top = np.int32(0)
        for i in range(mean.size):
            mean[i] = value = np.float32(mean[i] / over) + ZERO
            top = max(top, np.float32(value).view(np.int32) & ABSOLUTE)
        if top > LARGEST_FINITE:
            return b
        split(b, mean, top, (left, times), scales, codes, work, how)
    return -1


@njit(nogil=True, cache=True)
def add_sum(first, second, factor, total):  # type: ignore[no-untyped-def]
    for i in range(total.size):
        total[i] = total[i] + np.float32(np.float32(first[i] + second[i]) * factor)


@njit(nogil=True, cache=True)
def put_sum(first, second, factor, total):  # type: ignore[no-untyped-def]
    """As ``add_sum`` to zeros, but for the sign of a zero."""
    for i in range(total.size):
        total[i] = np.float32(np.float32(first[i] + second[i]) * factor)


@njit(nogil=True, cache=True)
def add_two(one, one_scale, one_factor, two, two_scale, two_factor, total):  # type: ignore[no-untyped-def]
    """Add two blocks of int8 codes, ``(m,) int8``, in one go."""
    for i in range(total.size):
        sum_ = total[i] + np.float32(np.float32(np.float32(one[i]) * one_scale) * one_factor)
        total[i] = sum_ + np.float32(np.float32(np.float32(two[i]) * two_scale) * two_factor)


@njit(nogil=True, cache=True)
def add_block(codes, start, bits, scale, factor, total, work):  # type: ignore[no-untyped-def]
    """Add a block that begins at value ``start``."""
    if bits == 8:
        signed = codes[start : start + total.size].view(np.int8)
        for i in range(total.size):
            total[i] = total[i] + np.float32(np.float32(np.float32(signed[i]) * scale) * factor)
        return
    decoded = work[: total.size]
    read_codes(codes, start, bits, decoded)
    for i in range(total.size):
        total[i] = total[i] + np.float32(np.float32(decoded[i] * scale) * factor)


@njit(nogil=True, cache=True)
def split_bytes(corrected, left, times, codes, scale, inverse):  # type: ignore[no-untyped-def]
    """One block in one go: its codes, ``(m,) int8``, and what they lost, so many times over."""
    for i in range(corrected.size):
        rounded = np.rint(np.float32(corrected[i] * inverse))
        codes[i] = np.int8(np.int32(rounded))
        left[i] = np.float32(corrected[i] - np.float32(np.float32(rounded + ZERO) * scale)) * times


@njit(nogil=True, cache=True)
def add(first, second, out):  # type: ignore[no-untyped-def]
    """Returns the bits of the largest absolute sum: found in passing, as each pass costs as much as the other."""
    top = np.int32(0)
    for i in range(out.size):
        out[i] = value = np.float32(first[i] + second[i])
        top = max(top, np.float32(value).view(np.int32) & ABSOLUTE)
    return top


@njit(nogil=True, cache=True)
def are_plain(scales, safe_bits):  # type: ignore[no-untyped-def]
    """Whether each scale is 0, or normal and at most the one with ``safe_bits``: all but a few hostile ones."""
    bits = scales.view(np.int32)
    odd = np.int32(0)
    for i in range(bits.size):
        odd |= np.int32((bits[i] < 0) | (bits[i] > safe_bits) | ((bits[i] > 0) & (bits[i] < SMALLEST_NORMAL)))
    return odd == 0


@njit(nogil=True, cache=True)
def decode(scales, codes, out, block, bits):  # type: ignore[no-untyped-def]
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


@njit(nogil=True, cache=True)
def decode_all(sources, rooms, sizes, is_left, safe_bits, block, bits):  # type: ignore[no-untyped-def]
    """Decode packed vectors at addresses ``sources``, of ``sizes`` values, to addresses ``rooms``. ``is_left`` becomes
    whether one is left as it is, as its scales are not plain."""
    for k in range(sizes.size):
        n = sizes[k]
        blocks = (n + block - 1) // block
        scales = carray(floats_at(sources[k]), blocks)  # type: ignore[call-arg]
        is_left[k] = not are_plain(scales, safe_bits)
        if is_left[k]:
            continue
        codes = carray(bytes_at(sources[k] + 4 * blocks), n if bits == 8 else (n + 1) // 2)
        if bits == 8 and rooms[k] % (4 * STREAMED) == 0:
            decode_past_caches(scales, codes.view(np.int8), rooms[k], block)
        else:
            decode(scales, codes, carray(floats_at(rooms[k]), n), block, bits)
    finish_streaming()  # type: ignore[call-arg]


@njit(nogil=True, cache=True)
def decode_past_caches(scales, codes, address, block):  # type: ignore[no-untyped-def]
    """As ``decode``, of int8 codes ``(n,)``, to an aligned address. A mean is far larger than caches are: written past
    them, its memory need not be read before, a third of what moves."""
    out = carray(floats_at(address), codes.size)  # type: ignore[call-arg]
    work = np.empty(PIECE, np.float32)
    source = work.ctypes.data
    for b in range(scales.size):
        stop = min((b + 1) * block, codes.size)
        for start in range(b * block, stop, PIECE):
            part, scale = codes[start : min(start + PIECE, stop)], scales[b]
            for i in range(part.size):
                work[i] = np.float32(part[i]) * scale
            streamed = part.size // STREAMED * STREAMED if start % STREAMED == 0 else 0
            for i in range(0, streamed, STREAMED):
                stream(source + 4 * i, address + 4 * (start + i))
            for i in range(streamed, part.size):
                out[start + i] = work[i]


@njit(nogil=True, cache=True)
def accumulate(scales, codes, total, weight, block, bits):  # type: ignore[no-untyped-def]
    factor = np.float32(weight)
    work = np.empty(min(block, total.size), np.float32)
    for b in range(scales.size):
        part = total[b * block : min((b + 1) * block, total.size)]
        add_block(codes, b * block, bits, scales[b], factor, part, work)


def warm_up() -> None:
    """Compile for the types that the codec uses."""
    values, scales, codes = np.ones(4, np.float32), np.empty(1, np.float32), np.empty(4, np.uint8)
    for bits, seed in ((8, -1), (4, 7)):
        encode(values, scales, codes, 4, bits, seed)
        first_bad_sum(values, values, 4)
        encode_residual(values, np.zeros(4, np.float32), np.empty(4, np.float32), scales, codes, 4, bits, seed)
        packed = np.zeros(8, np.uint8)
        addresses, weights = np.array([packed.ctypes.data], np.int64), np.ones(1, np.float32)
        encode_mean(addresses, weights, (-1, values, values), (1.0, 1.0), values, scales, codes, (4, bits, seed))
        are_plain(scales, int(LARGEST_FINITE))
        decode(scales, codes, values, 4, bits)
        rooms, sizes = np.array([values.ctypes.data], np.int64), np.array([values.size])
        decode_all(addresses, rooms, sizes, np.zeros(1, np.bool_), int(LARGEST_FINITE), 4, bits)
        accumulate(scales, codes, values, 1.0, 4, bits)
