"""Vector operations and memory access that numba's own loops do not compile to, as LLVM intrinsics.

Strips of 32 float32: a kernel holds one as one value. Where several arrays come from memory at once, what LLVM makes of
a loop over elements by itself takes about twice as long. Streaming stores: they write past the caches, for what is far
larger than these; a store by way of the caches reads each line before it changes all of it, so a third of what moves is
spared. Bit lanes: eight values to a byte of bits and back, two or three instructions where the processor has vector
masks; the loop vectoriser does not find them.

Each operation rounds once, as a single number's: no bit depends on how wide a processor's registers are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from shoal.compression.kernels.jit import intrinsic, njit

# Strips of 32 float32 ------------------------------------------------------------------------------------------

STRIP = 32
"""float32 in one strip: two of the widest registers, so that one waits less often for the other."""

LINE_BYTES = 64

ROOM = 4096
"""float32 of a kernel's own memory (``room``): they fit into the first cache beside what is read."""

_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_FLOATS, _INTS, _BYTES = (ir.VectorType(one, STRIP) for one in (ir.FloatType(), _INT, _BYTE))


class StripType(types.Type):
    """Numba type of a strip."""

    def __init__(self) -> None:
        super().__init__(name="Strip")


@register_model(StripType)
class StripModel(models.PrimitiveModel):
    """Data model of a strip: one LLVM vector."""

    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, _FLOATS)  # type: ignore[no-untyped-call]


_STRIP = StripType()


def _define(operation: Any, instruction: str) -> None:
    """Define an operator between two strips."""

    class Template(ConcreteTemplate):
        cases = (signature(_STRIP, _STRIP, _STRIP),)  # type: ignore[no-untyped-call]

    def lower(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)

    infer_global(operation)(Template)  # type: ignore[no-untyped-call]
    lower_builtin(operation, _STRIP, _STRIP)(lower)  # type: ignore[no-untyped-call]


for _operation, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define(_operation, _instruction)


def _function(returns: Any, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator that makes a kernel function from one that emits its instructions, given one or two arguments."""

    def define(build: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = build(builder, *arguments)
            return context.get_dummy_value() if made is None else made

        def of_one(typing_context: Any, one: Any) -> Any:
            return returns(*takes), generate

        def of_two(typing_context: Any, one: Any, two: Any) -> Any:
            return returns(*takes), generate

        typed = of_one if len(takes) == 1 else of_two
        typed.__name__, typed.__doc__ = build.__name__, build.__doc__
        return intrinsic(typed)

    return define


def _at(builder: Any, address: Any, vector: Any) -> Any:
    return builder.inttoptr(address, vector.as_pointer())


@intrinsic
def address_of(typing_context: Any, array: Any) -> Any:
    """Address of an array's first element; ``array.ctypes.data`` takes as long as several strips.

    To be called once, before all loops, and of arguments only: an array of the kernel's own is freed after its last
    use, even while its address is used."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(array)(context, builder, value=arguments[0])
        return builder.ptrtoint(made.data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def room(typing_context: Any) -> Any:
    """Address of ``ROOM`` uninitialised float32, aligned to a line: the kernel's own until it returns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = cgutils.alloca_once(builder, ir.ArrayType(_FLOATS, ROOM // STRIP))  # type: ignore[no-untyped-call]
        made.align = LINE_BYTES
        return builder.ptrtoint(made, ir.IntType(64))

    return types.int64(), generate


@_function(_STRIP, types.int64)
def load(builder: Any, address: Any) -> Any:
    """The strip at an address, of any alignment."""
    value = builder.load(_at(builder, address, _FLOATS))
    value.align = 4
    return value


@_function(_STRIP, types.int64)
def load_codes(builder: Any, address: Any) -> Any:
    """A strip of float32 from int8 codes at an address."""
    value = builder.load(_at(builder, address, _BYTES))
    value.align = 1
    return builder.sitofp(value, _FLOATS)


@_function(types.void, _STRIP, types.int64)
def store(builder: Any, strip: Any, address: Any) -> None:
    """Write a strip to an address, of any alignment."""
    builder.store(strip, _at(builder, address, _FLOATS)).align = 4


@_function(types.void, _STRIP, types.int64)
def stream(builder: Any, strip: Any, address: Any) -> None:
    """Write a strip to an address that begins a line, past the caches: see ``finish_streaming``."""
    written = builder.store(strip, _at(builder, address, _FLOATS))
    written.align = LINE_BYTES
    written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))


@_function(types.void, _STRIP, types.int64)
def store_codes(builder: Any, strip: Any, address: Any) -> None:
    """Write whole numbers from -128 to 127 to an address, as int8."""
    codes = builder.trunc(builder.fptosi(strip, _INTS), _BYTES)
    builder.store(codes, _at(builder, address, _BYTES)).align = 1


@_function(types.uint64, types.int64)
def load_word(builder: Any, address: Any) -> Any:
    """Eight bytes at an address of any alignment, as an integer."""
    word = builder.load(_at(builder, address, ir.IntType(64)))
    word.align = 1
    return word


@_function(types.void, types.uint64, types.int64)
def store_word(builder: Any, word: Any, address: Any) -> None:
    """Write an integer as eight bytes to an address of any alignment."""
    builder.store(word, _at(builder, address, ir.IntType(64))).align = 1


@_function(_STRIP, types.float32)
def filled(builder: Any, value: Any) -> Any:
    """A strip of one number."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_INTS, None))


@_function(_STRIP, _STRIP)
def rounded(builder: Any, strip: Any) -> Any:
    """Round to the nearest whole numbers, ties to even."""
    return _llvm(builder, f"llvm.rint.v{STRIP}f32", _FLOATS, strip)


@_function(_STRIP, _STRIP, _STRIP)
def larger(builder: Any, strip: Any, tops: Any) -> Any:
    """The larger of the absolute values of ``strip`` and those of ``tops``, as their bits order them: NaN above all."""
    bits, before = (builder.bitcast(one, _INTS) for one in (strip, tops))
    bits = builder.and_(bits, ir.Constant(_INTS, [0x7FFFFFFF] * STRIP))
    return builder.bitcast(builder.select(builder.icmp_signed(">", bits, before), bits, before), _FLOATS)


@_function(types.int32, _STRIP)
def largest_bits(builder: Any, tops: Any) -> Any:
    """Bits of the largest element of a result of ``larger``."""
    return _llvm(builder, f"llvm.vector.reduce.smax.v{STRIP}i32", _INT, builder.bitcast(tops, _INTS))


def _llvm(builder: Any, name: str, returns: Any, vector: Any) -> Any:
    """Call an LLVM intrinsic on a vector."""
    kind = ir.FunctionType(returns, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])  # type: ignore[no-untyped-call]


# Memory at addresses and past the caches -----------------------------------------------------------------------


@intrinsic
def floats_at(typing_context: Any, address: Any) -> Any:
    """Pointer to float32 at an address: numba cannot compile once for tuples of arrays of any length."""
    return types.CPointer(types.float32)(address), _as_pointer  # type: ignore[no-untyped-call]


@intrinsic
def bytes_at(typing_context: Any, address: Any) -> Any:
    """Pointer to uint8 at an address."""
    return types.CPointer(types.uint8)(address), _as_pointer  # type: ignore[no-untyped-call]


def _as_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@intrinsic
def finish_streaming(typing_context: Any) -> Any:
    """Fence: streamed values become visible before whatever this thread writes from now on."""

    def fence(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), fence


@njit
def lines(n: Any) -> Any:
    """Allocate an uninitialised ``(n,) float32`` that is aligned to a line."""
    room = np.empty(n + LINE_BYTES // 4, np.float32)
    lead = -address_of(room) % LINE_BYTES // 4
    return room[lead : lead + n]


@njit
def put_past_caches(values: Any, target: Any) -> Any:
    """Copy ``(m,) float32`` past the caches, but for the partial lines at both ends.

    The caller ends with ``finish_streaming``."""
    n, source, address = values.size, address_of(values), address_of(target)
    lead = min(n, -address % LINE_BYTES // 4)
    stop = lead + (n - lead) // STRIP * STRIP
    for i in range(lead):
        target[i] = values[i]
    for i in range(lead, stop, STRIP):
        stream(load(source + 4 * i), address + 4 * i)
    for i in range(stop, n):
        target[i] = values[i]


# Eight values to a byte of bits and back -----------------------------------------------------------------------

_LANES = ir.VectorType(ir.IntType(32), 8)
_FLAGS = ir.VectorType(ir.IntType(1), 8)
_ABSOLUTE = ir.Constant(_LANES, [0x7FFFFFFF] * 8)
_ZEROS = ir.Constant(_LANES, [0] * 8)
_SIGN_PLACE = ir.Constant(_LANES, [31] * 8)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """Pointer to the eight lanes from element ``at`` of a contiguous array of int32."""
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
