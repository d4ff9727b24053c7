"""The compiled kernels: optional, compiled ahead in the background, the slower paths until then.

numba makes machine code out of a kernel module's functions on their first call. That takes seconds, so it never
happens inside a round: ``compile_ahead`` does it in a thread of its own, and until it is done, or where numba is not
installed or fails, ``kernels`` gives None and the codecs take their torch paths, which give the very same bits.
"""

from __future__ import annotations

import importlib
import logging
import threading
from types import ModuleType

_log = logging.getLogger(__name__)
_MODULES = ("blockwise_kernels", "sparse_kernels")
_ready: dict[str, ModuleType] = {}
_lock = threading.Lock()
_compiling: threading.Thread | None = None


def kernels(name: str) -> ModuleType | None:
    """The kernel module ``shoal.compression.<name>``, once it is compiled; None before that and without numba."""
    return _ready.get(name)


def compile_ahead() -> threading.Thread:
    """Begin, once a process, to compile all kernels in the background; join the thread to wait for them."""
    global _compiling
    with _lock:
        if _compiling is None:
            _compiling = threading.Thread(target=_compile, name="shoal-compile", daemon=True)
            _compiling.start()
        return _compiling


def _compile() -> None:
    for name in _MODULES:
        try:
            module = importlib.import_module(f"shoal.compression.{name}")
            module.warm_up()
        except ImportError as error:
            _log.info("codecs run without compiled kernels (pip install 'shoal[fast]' brings them): %s", error)
            return
        except Exception as error:  # numba has no common base for what goes wrong in a compilation
            _log.warning("codecs run without the kernels of %s, which did not compile: %s", name, error)
        else:
            _ready[name] = module
