"""Single keys of the terminal, without Enter, for live views."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys_pressed(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_key`` on the running loop with each key that is pressed meanwhile. Ctrl-C stays a signal.

    Where standard input is no terminal, or the system has none of this kind (Windows), no key comes."""
    try:
        import termios
        import tty
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(descriptor, 64).decode(errors="replace"):
            on_key(key)

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
