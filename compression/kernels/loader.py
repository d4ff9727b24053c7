"""Loader of the optional compiled kernels, which are compiled ahead in the background.

numba makes machine code out of a kernel module's functions on their first call, and keeps it in a cache on the disk.
That takes seconds, so it never happens inside a round: ``compile_ahead`` does it in a thread of its own, and until it
is done, or where numba is not installed or fails, ``kernels`` gives None and the codecs take their torch paths, which
give the very same bits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from types import ModuleType

_log = logging.getLogger(__name__)


def _blockwise() -> ModuleType:
    from shoal.compression.kernels import blockwise

    return blockwise


def _fixed_point() -> ModuleType:
    from shoal.compression.kernels import fixed_point

    return fixed_point


def _lanes() -> ModuleType:
    from shoal.compression.kernels import lanes

    return lanes


def _lowbit() -> ModuleType:
    from shoal.compression.kernels import lowbit

    return lowbit


def _topk() -> ModuleType:
    from shoal.compression.kernels import topk

    return topk


_IMPORTS: dict[str, Callable[[], ModuleType]] = {
    "blockwise": _blockwise,
    "fixed_point": _fixed_point,
    "lanes": _lanes,
    "lowbit": _lowbit,
    "topk": _topk,
}
_ready: dict[str, ModuleType] = {}
_begun: dict[str, threading.Thread] = {}
_lock = threading.Lock()


def import_kernels(name: str) -> ModuleType:
    """Import a kernel module, which compiles nothing yet. Raises ``ImportError`` without numba."""
    return _IMPORTS[name]()


def kernels(name: str) -> ModuleType | None:
    """Return the kernel module of this name once it is compiled; None before that and without numba."""
    return _ready.get(name)


def compile_ahead(names: Iterable[str]) -> list[threading.Thread]:
    """Start compiling these modules in the background, once a process; join the threads to wait for them."""
    threads = []
    with _lock:
        for name in names:
            if name not in _begun:
                _begun[name] = threading.Thread(
                    target=_compile, args=(name,), name=f"shoal-{name}-kernels", daemon=True
                )
                _begun[name].start()
            threads.append(_begun[name])
    return threads


def _compile(name: str) -> None:
    try:
        module = import_kernels(name)
        module.warm_up()
    except ImportError as error:
        _log.info("codecs run without compiled kernels (pip install 'shoal[fast]' brings them): %s", error)
    except Exception as error:  # noqa: BLE001 - what goes wrong in numba and LLVM has no common base
        _log.warning("codecs run without the kernels of %s, which did not compile: %s", name, error)
    else:
        _ready[name] = module
