"""Strips of 32 float32, which a numba kernel holds as one value each: what it does with them are vector operations.

Where several arrays come from memory at once, what LLVM makes of a loop over elements by itself takes about twice as
long. Each operation rounds once, as a single number's: no bit depends on how wide a processor's registers are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from shoal.compression.kernels.jit import intrinsic

STRIP = 32
"""float32 in one: two of the widest registers, so that one waits less often for the other."""

LINE_BYTES = 64

ROOM = 4096
"""As many fit into the first cache, with what is read."""

_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_FLOATS, _INTS, _BYTES = (ir.VectorType(one, STRIP) for one in (ir.FloatType(), _INT, _BYTE))


class StripType(types.Type):
    """numba's type of a strip."""

    def __init__(self) -> None:
        super().__init__(name="Strip")


@register_model(StripType)
class StripModel(models.PrimitiveModel):
    """A strip is one vector to LLVM."""

    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, _FLOATS)  # type: ignore[no-untyped-call]


_STRIP = StripType()


def _define(operation: Any, instruction: str) -> None:
    """An operator between two strips."""

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
    """A function of kernels, of what makes its instructions from an IR builder and one or two arguments."""

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
    """Of an array's first element; ``array.ctypes.data`` takes as long as several strips. To be asked once, before all
    loops, of arguments only: an array of the kernel's own is gone after its last use, whoever has its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(array)(context, builder, value=arguments[0])
        return builder.ptrtoint(made.data, ir.IntType(64))

    return types.int64(array), generate


@intrinsic
def room(typing_context: Any) -> Any:
    """The address of ``ROOM`` float32, uninitialised, that begins a line: the kernel's own until it returns."""

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
    """As many int8 at an address, as float32."""
    value = builder.load(_at(builder, address, _BYTES))
    value.align = 1
    return builder.sitofp(value, _FLOATS)


@_function(types.void, _STRIP, types.int64)
def store(builder: Any, strip: Any, address: Any) -> None:
    """Write a strip to an address, of any alignment."""
    builder.store(strip, _at(builder, address, _FLOATS)).align = 4


@_function(types.void, _STRIP, types.int64)
def stream(builder: Any, strip: Any, address: Any) -> None:
    """Write a strip to an address that begins a line, past the caches: see ``past_caches.finish_streaming``."""
    written = builder.store(strip, _at(builder, address, _FLOATS))
    written.align = LINE_BYTES
    written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_INT, 1)]))


@_function(types.void, _STRIP, types.int64)
def store_codes(builder: Any, strip: Any, address: Any) -> None:
    """Write whole numbers from -128 to 127 to an address, as int8."""
    codes = builder.trunc(builder.fptosi(strip, _INTS), _BYTES)
    builder.store(codes, _at(builder, address, _BYTES)).align = 1


@_function(_STRIP, types.float32)
def filled(builder: Any, value: Any) -> Any:
    """A strip of one number."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_INTS, None))


@_function(_STRIP, _STRIP)
def rounded(builder: Any, strip: Any) -> Any:
    """To the nearest whole numbers, ties to even."""
    return _llvm(builder, f"llvm.rint.v{STRIP}f32", _FLOATS, strip)


@_function(_STRIP, _STRIP, _STRIP)
def larger(builder: Any, strip: Any, tops: Any) -> Any:
    """The larger of the absolute values of ``strip`` and those of ``tops``, as their bits order them: NaN above all."""
    bits, before = (builder.bitcast(one, _INTS) for one in (strip, tops))
    bits = builder.and_(bits, ir.Constant(_INTS, [0x7FFFFFFF] * STRIP))
    return builder.bitcast(builder.select(builder.icmp_signed(">", bits, before), bits, before), _FLOATS)


@_function(types.int32, _STRIP)
def largest_bits(builder: Any, tops: Any) -> Any:
    """The bits of the largest of what ``larger`` has made."""
    return _llvm(builder, f"llvm.vector.reduce.smax.v{STRIP}i32", _INT, builder.bitcast(tops, _INTS))


def _llvm(builder: Any, name: str, returns: Any, vector: Any) -> Any:
    """What an intrinsic of LLVM's makes of a vector."""
    kind = ir.FunctionType(returns, [vector.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [vector])  # type: ignore[no-untyped-call]
