"""Keys of the terminal for live views: single ones, without Enter, and no echo that would damage the view."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def without_echoed_signals() -> Iterator[None]:
    """Keep the terminal from showing Ctrl-C as ^C meanwhile, which would shift a live view by a line."""
    was_on = _echo_signals(False)
    try:
        yield
    finally:
        if was_on:
            _echo_signals(True)


def restore_terminal() -> None:
    """Undo what a live view has changed, where the process ends at once. Allowed in a signal's handler."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), _SHOW_CURSOR)
        _echo_signals(True)


def _echo_signals(wanted: bool) -> bool:
    """Switch it and return whether it was on; nothing is done without a terminal of this kind, or one to read now."""
    try:
        import termios
    except ImportError:
        return False
    try:
        descriptor = sys.stdin.fileno()
        if os.tcgetpgrp(descriptor) != os.getpgrp():  # a process in the background would be stopped
            return False
        attributes = termios.tcgetattr(descriptor)
        was_on = bool(attributes[3] & termios.ECHOCTL)
        attributes[3] = attributes[3] | termios.ECHOCTL if wanted else attributes[3] & ~termios.ECHOCTL
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
    except (OSError, ValueError, termios.error):
        return False
    return was_on


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
