"""Eight values to a byte of bits and back, as LLVM vectors: what numba's loops cannot say and processors can do.

LLVM turns each of these into two or three instructions where the processor has vector masks, and into a few more
elsewhere; its loop vectoriser does not find them by itself. numba's cache on the disk sees only changes of the module
that calls: whoever changes these changes a line of ``lowbit_kernels.py`` too.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

_LANES = ir.VectorType(ir.IntType(32), 8)
_FLAGS = ir.VectorType(ir.IntType(1), 8)
_BYTE = ir.IntType(8)
_ABSOLUTE = ir.Constant(_LANES, [0x7FFFFFFF] * 8)
_ZEROS = ir.Constant(_LANES, [0] * 8)
_SIGN_PLACE = ir.Constant(_LANES, [31] * 8)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Where the eight lanes from element ``at`` of a contiguous array of int32 are."""
    start = builder.gep(context.make_array(kind)(context, builder, array).data, [at])
    return builder.bitcast(start, _LANES.as_pointer())


def _filled(builder: Any, value: Any) -> Any:
    """Eight lanes with the same int32."""
    one = builder.insert_element(_ZEROS, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, _ZEROS)


def _sign_bits(typing: Any, bits: Any, at: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start = arguments
        lanes = builder.load(_pointer(context, builder, signature.args[0], array, start), align=4)
        return builder.bitcast(builder.icmp_signed("<", lanes, _ZEROS), _BYTE)

    return types.uint8(bits, types.intp), build


def _above_bits(typing: Any, bits: Any, at: Any, limit: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, bound = arguments
        lanes = builder.load(_pointer(context, builder, signature.args[0], array, start), align=4)
        sizes = builder.and_(lanes, _ABSOLUTE)
        return builder.bitcast(builder.icmp_signed(">", sizes, _filled(builder, bound)), _BYTE)

    return types.uint8(bits, types.intp, types.int32), build


def _put(typing: Any, bits: Any, at: Any, signs: Any, above: Any, inner: Any, outer: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, start, negative, chosen, low, high = arguments
        sizes = builder.select(builder.bitcast(chosen, _FLAGS), _filled(builder, high), _filled(builder, low))
        flips = builder.shl(builder.zext(builder.bitcast(negative, _FLAGS), _LANES), _SIGN_PLACE)
        where = _pointer(context, builder, signature.args[0], array, start)
        builder.store(builder.xor(sizes, flips), where, align=4)
        return context.get_dummy_value()

    return types.void(bits, types.intp, types.uint8, types.uint8, types.int32, types.int32), build


def _leave(typing: Any, values: Any, residual: Any, at: Any, inner: Any, outer: Any, limit: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, array_of_residual, start, low, high, bound = arguments
        floats = ir.VectorType(ir.FloatType(), 8)
        where = _pointer(context, builder, signature.args[1], array_of_residual, start)
        first = builder.load(_pointer(context, builder, signature.args[0], array, start), align=4)
        second = builder.bitcast(builder.load(where, align=4), floats)
        corrected = builder.fadd(builder.bitcast(first, floats), second)
        lanes = builder.bitcast(corrected, _LANES)
        above = builder.icmp_signed(">", builder.and_(lanes, _ABSOLUTE), _filled(builder, bound))
        signs = builder.and_(lanes, ir.Constant(_LANES, [-0x80000000] * 8))
        sizes = builder.select(above, _filled(builder, high), _filled(builder, low))
        decoded = builder.bitcast(builder.or_(sizes, signs), floats)
        builder.store(builder.bitcast(builder.fsub(corrected, decoded), _LANES), where, align=4)
        signs_byte = builder.bitcast(builder.icmp_signed("<", lanes, _ZEROS), _BYTE)
        wide = ir.IntType(16)
        above_byte = builder.shl(builder.zext(builder.bitcast(above, _BYTE), wide), ir.Constant(wide, 8))
        return builder.or_(builder.zext(signs_byte, wide), above_byte)

    return types.uint16(values, residual, types.intp, types.int32, types.int32, types.int32), build


# None of these looks at the array's size: whoever calls them holds ``at + 8 <= bits.size``.

sign_bits: Any = intrinsic(_sign_bits)
"""``sign_bits(bits, at)``: ``uint8``, of which bit i is the sign of ``bits[at + i]``, int32."""

above_bits: Any = intrinsic(_above_bits)
"""``above_bits(bits, at, limit)``: bit i is whether ``bits[at + i]``, int32, exceeds ``limit`` without its sign."""

put: Any = intrinsic(_put)
"""``put(bits, at, signs, above, inner, outer)``: ``bits[at + i]``, int32, becomes ``outer`` where bit i of ``above``
is 1, else ``inner``, with the sign turned where bit i of ``signs`` is 1."""

leave: Any = intrinsic(_leave)
"""``leave(values, residual, at, inner, outer, limit)``: ``uint16``, the signs of eight sums and, eight bits higher,
whether they exceed ``limit`` without their sign; in ``residual[at + i]`` is left the sum less ``outer`` or ``inner``
with its sign. ``values`` and ``residual`` are float32, the others int32, the bits of such."""
