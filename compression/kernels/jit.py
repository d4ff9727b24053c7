"""Compilation settings of kernels: without the interpreter's lock, cached on the disk, no fastmath."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numba.extending

_F = TypeVar("_F")


def intrinsic(function: Callable[..., Any]) -> Any:
    """Untyped ``numba.extending.intrinsic``: its result is called without the typing context of ``function``."""
    return numba.extending.intrinsic(function)


def sources_digest(folder: Path) -> str:
    """Digest of all modules below ``folder``, by their names and contents: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


_SOURCES = sources_digest(Path(__file__).parent.parent)
"""numba keeps a kernel's machine code, with all that was compiled into it, for as long as the kernel's own module does
not change: after an update of a helper's module alone, peers would go on with the old one. So the name under which it
is kept changes with each module of ``compression``."""


def njit(function: _F) -> _F:
    """``numba.njit``, typed as the function that it is given."""
    named: Any = function
    named.__qualname__ += f"_{_SOURCES}"
    return cast(_F, numba.njit(nogil=True, cache=True)(named))
