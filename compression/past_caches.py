"""Memory as numba kernels see it: at addresses, and written past the caches, which what is far larger only clears.

A store by way of the caches reads each line before it changes all of it; past them, a third of what moves is spared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from shoal.compression.jit import njit

STREAMED = 16
"""float32 that are written at once past the caches: a line of them."""


@intrinsic
def floats_at(typing_context: Any, address: Any) -> Any:
    """A pointer to float32: an array of arrays of any number is nothing that numba compiles once for all."""
    return types.CPointer(types.float32)(address), _as_pointer  # type: ignore[no-untyped-call]


@intrinsic
def bytes_at(typing_context: Any, address: Any) -> Any:
    """A pointer to uint8."""
    return types.CPointer(types.uint8)(address), _as_pointer  # type: ignore[no-untyped-call]


def _as_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))


@intrinsic
def stream(typing_context: Any, source: Any, target: Any) -> Any:
    """Copy ``STREAMED`` float32 from an address to another, which is aligned to as many, not by way of the caches."""
    return types.void(types.int64, types.int64), _streamed


def _streamed(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    vector = ir.VectorType(ir.FloatType(), STREAMED).as_pointer()
    value = builder.load(builder.inttoptr(arguments[0], vector))
    value.align = 4
    store = builder.store(value, builder.inttoptr(arguments[1], vector))
    store.align = 4 * STREAMED
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    return context.get_dummy_value()


@intrinsic
def finish_streaming(typing_context: Any) -> Any:
    """What was streamed is there before whatever this thread writes from now on."""

    def fence(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), fence


@njit
def lines(n: Any) -> Any:
    """``(n,) float32``, uninitialised, that begins a line."""
    room = np.empty(n + STREAMED, np.float32)
    lead = -room.ctypes.data // 4 % STREAMED
    return room[lead : lead + n]


@njit
def put_past_caches(values: Any, target: Any) -> Any:
    """Copy ``(m,) float32``, past the caches as far as ``target`` has whole lines of them. ``finish_streaming`` has to
    follow in the end."""
    n, address = values.size, target.ctypes.data
    lead = min(n, -address // 4 % STREAMED)
    stop = lead + (n - lead) // STREAMED * STREAMED
    for i in range(lead):
        target[i] = values[i]
    for i in range(lead, stop, STREAMED):
        stream(values.ctypes.data + 4 * i, address + 4 * i)  # type: ignore[call-arg]
    for i in range(stop, n):
        target[i] = values[i]
