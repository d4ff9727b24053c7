"""Top-k as numba kernels: selection and packing of chunks, and unpacking, whatever the bytes are.

No fastmath: each floating-point operation is rounded once, as in ``compression/topk.py``, which gives the same bits.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from shoal.compression.formats import (
    LARGEST_SCALE_BITS,
    MAX_BFLOAT16_BITS,
    SPLIT_STEPS,
    TOO_LARGE_BITS,
    ChunkFormat,
    ChunkShape,
)
from shoal.compression.kernels.jit import njit

_ROWS = 8
_SPAN = 4096
_LARGEST_SCALE = np.array([LARGEST_SCALE_BITS], np.int32).view(np.float32)[0]
_TINY = np.float32(2.0**-126)
# One sixteenth of a binade: the guess for the next chunk lies that far below this one's threshold.
_GUESS_MARGIN = 1 << 19

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]
Shorts = NDArray[np.uint16]


# Packing -------------------------------------------------------------------------------------------------------


@njit
def _count(bits: Ints, n: int, threshold: int) -> int:
    """Count the first ``n`` that are at least ``threshold``. 32-bit throughout, so that 16 go in one vector."""
    limit = np.int32(threshold)
    count = np.int32(0)
    for i in range(n):
        count = np.int32(count + np.int32(bits[i] >= limit))
    return int(count)


@njit
def _bracket(bits: Ints, n: int, keep: int, largest: int, guess: int) -> int:
    """A threshold that at least ``keep`` of ``bits`` reach, and, where no ties are in the way, at most ``4 keep``."""
    low, high = 0, largest + 1  # keep or more reach low, fewer reach high
    step = 1 << 20
    probe = guess
    while high - low > 1:
        if not low < probe < high:
            probe = (low + high) >> 1
        count = _count(bits, n, probe)
        if count < keep:
            high = probe
        else:
            low = probe
            if count <= 4 * keep:
                break
        if low > 0 and high <= largest:
            probe = (low + high) >> 1
        elif count < keep:  # not enclosed yet: away from the guess, in growing steps
            probe = high - step
        else:
            probe = low + step
        step *= 2
    return low


@njit
def _select(bits: Ints, keep: int, guess: int, scratch: tuple[Ints, Ints, Ints], chosen: Ints) -> int:
    """Fill ``chosen`` with the indices of the ``keep`` largest of ``bits``, ascending; returns the smallest of them.

    ``bits`` is padded with -1 to ``_ROWS`` rows; ``scratch`` holds the largest of each column (given), and room
    for columns and candidates. Candidates are looked for only in columns whose largest reaches the threshold.
    """
    largest_of, columns, candidates = scratch
    width = largest_of.size
    most = np.int32(0)
    for j in range(width):
        most = max(most, largest_of[j])
    largest = int(most)
    threshold = _bracket(bits, bits.size, keep, largest, guess)
    # Unsigned 32-bit numbers, for numba tests each signed index for being negative: half the time of this function.
    limit = np.int32(threshold)
    hits = np.uint32(0)
    for j in range(width):
        columns[hits] = j
        hits = np.uint32(hits + np.uint32(largest_of[j] >= limit))
    found = np.uint32(0)
    for row in range(_ROWS):  # row by row, so that the candidates come in the order of their indices
        start = np.uint32(row * width)
        for h in range(hits):
            i = np.uint32(start + np.uint32(columns[h]))
            candidates[found] = i
            found = np.uint32(found + np.uint32(bits[i] >= limit))
    high = largest + 1
    values = columns  # the columns have served: their room takes the candidates' bits, gathered to be counted fast
    for c in range(found):
        values[c] = bits[candidates[c]]
    while high - threshold > 1:
        middle = (threshold + high) >> 1
        if _count(values, int(found), middle) >= keep:
            threshold = middle
        else:
            high = middle
    ties = keep - _count(values, int(found), threshold + 1)
    taken = 0
    for c in range(found):
        tie = values[c] == threshold
        take = (values[c] > threshold) | (tie & (ties > 0))
        ties -= int(tie)
        if taken < keep:
            chosen[taken] = candidates[c]
        taken += int(take)
    return threshold


@njit
def _bfloat16(value: float, room: Floats) -> int:
    """The bits of ``value``, not negative, as bfloat16: to nearest even, saturated, 0 where it would be subnormal."""
    room[0] = np.float32(value)
    bits = int(room.view(np.int32)[0])
    rounded = min((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, MAX_BFLOAT16_BITS)
    return rounded if rounded >= 0x80 else 0


@njit
def _pack_two_bits(signed: Ints, chosen: Ints, out: Bytes, code_at: int, sent: Floats) -> None:
    """Write the scales of 2-bit values, and the codes, 4 to a byte, into ``out``, zeroed before.

    ``sent`` becomes the decoded values.
    """
    keep = chosen.size
    exponent = 1
    for j in range(keep):
        exponent = max(exponent, (signed[chosen[j]] & 0x7FFFFFFF) >> 23)
    fixed = np.empty(keep, np.int32)
    total = 0
    for j in range(keep):
        bits = signed[chosen[j]] & 0x7FFFFFFF
        own = bits >> 23
        mantissa = (bits & 0x7FFFFF) | (0x800000 if own > 0 else 0)
        fixed[j] = mantissa >> min(exponent - max(own, 1), 31)
        total += fixed[j]
    split = total // keep
    count = 0
    upper = 0
    for _ in range(SPLIT_STEPS):
        count = 0
        upper = 0
        for j in range(keep):
            over = int(fixed[j] > split)
            count += over
            upper += over * fixed[j]
        if count == 0:
            break
        rest = keep - count
        split = ((total - upper) * count + upper * rest) // (2 * rest * count)
    unit = exponent - 150
    small = _bfloat16(math.ldexp((total - upper) / (keep - count), unit), sent)
    large = _bfloat16(math.ldexp(upper / count, unit), sent) if count else small
    for at, scale in ((0, small), (2, large)):
        out[at] = scale & 0xFF
        out[at + 1] = scale >> 8
    sent_bits = sent.view(np.int32)
    for j in range(keep):
        negative, over = (signed[chosen[j]] >> 31) & 1, fixed[j] > split
        out[code_at + (j >> 2)] |= np.uint8((negative | int(over) << 1) << (2 * (j & 3)))
        sent_bits[j] = np.int32((large if over else small) << 16 | negative << 31)


@njit
def _pack_bytes(signed: Ints, chosen: Ints, out: Bytes, code_at: int, sent: Floats) -> None:
    """Write the scale and the int8 codes into ``out``; ``sent`` becomes the decoded values."""
    values, largest = signed.view(np.float32), np.float32(0)
    for j in range(chosen.size):
        largest = max(largest, abs(values[chosen[j]]))
    scale = min(largest / np.float32(127), _LARGEST_SCALE)
    sent[0] = scale if scale >= _TINY else np.float32(0)
    scale = sent[0]
    out[:4] = sent[:1].view(np.uint8)
    divisor = scale if scale > 0 else np.float32(1)
    for j in range(chosen.size):
        code = np.int64(np.rint(values[chosen[j]] / divisor))
        out[code_at + j] = np.uint8(code & 0xFF)
        sent[j] = np.float32(code) * scale


@njit
def finite_sums(values: Floats, residual: Floats) -> bool:
    """Return whether each of ``values + residual`` is finite."""
    sums = np.zeros(_SPAN, np.float32)
    bits = sums.view(np.int32)
    for start in range(0, values.size, _SPAN):
        span = values[start : start + _SPAN]
        kept = residual[start : start + _SPAN]
        for i in range(span.size):
            sums[i] = span[i] + kept[i]
        largest = np.int32(0)
        for i in range(_SPAN):  # what is left of the span before is finite
            largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
        if largest >= TOO_LARGE_BITS:
            return False
    return True


@njit
def encode(values: Floats, residual: Floats, packed: Bytes, shape: ChunkShape) -> bool:
    """Pack whole chunks of ``values + residual`` into ``packed``; what is lost stays in ``residual``.

    An empty ``residual`` is none. False when a sum is not finite; only chunks before it have changed then.
    """
    size, keep, low_bits, _, value_bits, low_at, code_at, record = shape
    width = (size + _ROWS - 1) // _ROWS
    bits = np.full(_ROWS * width, -1, np.int32)
    largest_of = np.empty(width, np.int32)
    scratch = (largest_of, np.empty(_ROWS * width + 1, np.int32), np.empty(_ROWS * width + 1, np.int32))
    corrected = np.empty(size, np.float32)
    signed = corrected.view(np.int32)
    chosen = np.empty(keep, np.int32)
    sent = np.empty(keep, np.float32)
    guess = 0
    for chunk in range(values.size // size):
        start = chunk * size
        own = values[start : start + size]
        kept = residual[start : start + size]
        if residual.size:
            for i in range(size):
                corrected[i] = own[i] + kept[i]
        else:
            for i in range(size):  # a slice assignment is slower
                corrected[i] = own[i]
        for j in range(width):
            largest_of[j] = -1
        for i in range(size):
            bits[i] = signed[i] & 0x7FFFFFFF
        for row in range(_ROWS):
            part = bits[row * width : (row + 1) * width]
            for j in range(width):
                largest_of[j] = max(largest_of[j], part[j])
        if _count(largest_of, width, TOO_LARGE_BITS):
            return False
        guess = _select(bits, keep, guess, scratch, chosen) - _GUESS_MARGIN
        out = packed[chunk * record : (chunk + 1) * record]
        out[:] = 0
        held = 0
        waiting = 0
        at = low_at
        for j in range(keep):
            index = chosen[j]
            place = (index >> low_bits) + j
            out[4 + (place >> 3)] |= np.uint8(1 << (place & 7))
            waiting |= (index & ((1 << low_bits) - 1)) << held
            held += low_bits
            while held >= 8:
                out[at] = waiting & 0xFF
                waiting >>= 8
                held -= 8
                at += 1
        if held:
            out[at] = waiting
        if value_bits == 2:
            _pack_two_bits(signed, chosen, out, code_at, sent)
        else:
            _pack_bytes(signed, chosen, out, code_at, sent)
        if residual.size:
            for i in range(size):
                kept[i] = corrected[i]
            for j in range(keep):
                kept[chosen[j]] = corrected[chosen[j]] - sent[j]
    return True


# Unpacking -----------------------------------------------------------------------------------------------------


@njit
def _rooms(shape: ChunkShape) -> tuple[Ints, Floats]:
    """Allocate a chunk's indices and values for ``_unpack``; no upper bits can make it write past the indices."""
    keep, upper_bits = shape[1], shape[3]
    return np.empty(upper_bits + 9, np.int32), np.empty(keep, np.float32)


@njit
def _unpack(record: Bytes, shape: ChunkShape, indices: Ints, values: Floats) -> int:
    """Unpack one chunk's indices and values; returns 0, or an index of ``_REASONS`` in ``compression/topk.py``."""
    size, keep, low_bits, _, value_bits, low_at, code_at, _ = shape
    found = 0
    for place in range(8 * (low_at - 4)):
        indices[found] = place - found
        found += (record[4 + (place >> 3)] >> (place & 7)) & 1
    if found != keep:  # a one in the padding makes the last index too large
        return 1
    held = 0
    waiting = 0
    at = low_at
    last = -1
    increasing = True
    for j in range(keep):
        while held < low_bits:
            waiting |= int(record[at]) << held
            held += 8
            at += 1
        index = (int(indices[j]) << low_bits) | (waiting & ((1 << low_bits) - 1))
        waiting >>= low_bits
        held -= low_bits
        increasing = increasing and index > last
        last = index
        indices[j] = index
    if not increasing or last >= size:
        return 1
    if waiting:
        return 3
    bits = values.view(np.int32)
    if value_bits == 2:
        small = np.int64(record[0]) | np.int64(record[1]) << 8
        large = np.int64(record[2]) | np.int64(record[3]) << 8
        for scale in (small, large):
            if scale > MAX_BFLOAT16_BITS or 0 < scale < 0x80:
                return 2
        for j in range(keep):
            code = record[code_at + (j >> 2)] >> (2 * (j & 3))
            bits[j] = np.int32((large if code & 2 else small) << 16 | np.int64(code & 1) << 31)
        if keep & 3 and record[code_at + (keep >> 2)] >> (2 * (keep & 3)):
            return 3
        return 0
    bits[0] = np.int32(
        np.int64(record[0]) | np.int64(record[1]) << 8 | np.int64(record[2]) << 16 | np.int64(record[3]) << 24
    )
    if bits[0] < 0 or bits[0] > LARGEST_SCALE_BITS or 0 < bits[0] < 0x00800000:
        return 2
    scale32 = values[0]
    for j in range(keep):
        code8 = np.int8(record[code_at + j])
        if code8 == -128:
            return 3
        values[j] = np.float32(code8) * scale32
    return 0


@njit
def decode(packed: Bytes, out: Floats, shape: ChunkShape) -> int:
    """Unpack whole chunks into ``out``; returns 0, or an index of ``_REASONS`` in ``compression/topk.py``."""
    size, record = shape[0], shape[7]
    indices, values = _rooms(shape)
    for chunk in range(out.size // size):
        wrong = _unpack(packed[chunk * record : (chunk + 1) * record], shape, indices, values)
        if wrong:
            return wrong
        part = out[chunk * size : (chunk + 1) * size]
        part[:] = 0
        for j in range(values.size):
            part[indices[j]] = values[j]
    return 0


@njit
def unpack(packed: Bytes, indices: Shorts, values: Floats, shape: ChunkShape) -> int:
    """Unpack ``keep`` indices, each within its chunk, and values of every chunk; returns as ``decode``."""
    keep, record = shape[1], shape[7]
    own, own_values = _rooms(shape)
    for chunk in range(values.size // keep):
        wrong = _unpack(packed[chunk * record : (chunk + 1) * record], shape, own, own_values)
        if wrong:
            return wrong
        at = chunk * keep
        for j in range(keep):
            indices[at + j] = own[j]
            values[at + j] = own_values[j]
    return 0


@njit
def add(indices: Shorts, values: Floats, total: Floats, weight: np.float32, shape: ChunkShape) -> None:
    """Add ``weight`` times the result of a successful ``unpack`` to ``total``."""
    size, keep = shape[0], shape[1]
    for chunk in range(total.size // size):
        part = total[chunk * size : (chunk + 1) * size]
        for j in range(chunk * keep, (chunk + 1) * keep):
            part[indices[j]] = part[indices[j]] + weight * values[j]


def warm_up() -> None:
    """Compile every kernel, or load it from the cache."""
    values, none = np.arange(24, dtype=np.float32), np.empty(0, np.float32)
    for value_bits in (2, 8):
        form = ChunkFormat(8, 2, value_bits)
        packed = np.zeros(3 * form.packed_bytes, np.uint8)
        assert finite_sums(values, values)
        assert encode(values, none, packed, form.shape)
        indices, sent = np.empty(6, np.uint16), np.empty(6, np.float32)
        assert unpack(packed, indices, sent, form.shape) == 0
        add(indices, sent, values.copy(), np.float32(1.0), form.shape)
        assert decode(packed, values.copy(), form.shape) == 0
