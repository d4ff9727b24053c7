"""Memory as numba kernels see it: at addresses, and written past the caches, which what is far larger only clears.

A store by way of the caches reads each line before it changes all of it; past them, a third of what moves is spared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from shoal.compression.kernels.jit import intrinsic, njit
from shoal.compression.kernels.strips import LINE_BYTES, STRIP, address_of, load, stream


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
def finish_streaming(typing_context: Any) -> Any:
    """What was streamed is there before whatever this thread writes from now on."""

    def fence(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), fence


@njit
def lines(n: Any) -> Any:
    """``(n,) float32``, uninitialised, that begins a line."""
    room = np.empty(n + LINE_BYTES // 4, np.float32)
    lead = -address_of(room) % LINE_BYTES // 4
    return room[lead : lead + n]


@njit
def put_past_caches(values: Any, target: Any) -> Any:
    """Copy ``(m,) float32``, past the caches but for what is left of the lines at both ends. ``finish_streaming`` has
    to follow in the end."""
    n, source, address = values.size, address_of(values), address_of(target)
    lead = min(n, -address % LINE_BYTES // 4)
    stop = lead + (n - lead) // STRIP * STRIP
    for i in range(lead):
        target[i] = values[i]
    for i in range(lead, stop, STRIP):
        stream(load(source + 4 * i), address + 4 * i)
    for i in range(stop, n):
        target[i] = values[i]
