"""How kernels are compiled: without the interpreter's lock, kept on the disk, no fastmath. Imports numba."""

from __future__ import annotations

from typing import Any, TypeVar

import numba

_F = TypeVar("_F")


def njit(function: _F) -> _F:
    """``numba.njit``, typed as the function that it is given."""
    compiled: Any = numba.njit(nogil=True, cache=True)(function)
    return compiled  # type: ignore[no-any-return]
