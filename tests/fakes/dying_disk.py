"""A machine that dies at the n-th thing it does to the disk: before it, in its middle, or just after it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.swarm import durable

STEPS = ("append", "cut", "replace")
MOMENTS = ("before", "amid", "after")


class MachineDied(BaseException):
    """The machine has died. Nothing catches this: whoever runs next is another process."""


class Disk:
    """``steps``: what was done, and to which file, as far as that is known."""

    def __init__(self, die_at: int | None, moment: str) -> None:
        self.steps: list[str] = []
        self._die_at, self._moment = die_at, moment

    def do(self, step: str, real: Callable[..., None], *arguments: Any) -> None:
        number = len(self.steps)
        self.steps.append(f"{step} {arguments[-1].name}" if isinstance(arguments[-1], Path) else step)
        if number != self._die_at:
            real(*arguments)
            return
        if self._moment == "amid" and step == "append":
            descriptor, data = arguments
            real(descriptor, data[: len(data) // 2])
        if self._moment == "after":
            real(*arguments)
        raise MachineDied


@contextmanager
def disk(die_at: int | None = None, moment: str = "before") -> Iterator[Disk]:
    """Have the machine die at that step, if it comes to it."""
    reals = {step: getattr(durable, step) for step in STEPS}
    made = Disk(die_at, moment)

    def watched(step: str) -> Callable[..., None]:
        return lambda *arguments: made.do(step, reals[step], *arguments)

    try:
        for step in STEPS:
            setattr(durable, step, watched(step))
        yield made
    finally:
        for step in STEPS:
            setattr(durable, step, reals[step])


@contextmanager
def full_disk(in_folder: Path, written_bytes: int = 0) -> Iterator[None]:
    """Have the disk be full: files in this folder do not grow, but for so many bytes of the first attempt."""
    real = durable.append

    def append(descriptor: int, data: bytes) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_relative_to(in_folder.resolve()):
            real(descriptor, data[:written_bytes])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, data)

    durable.append = append
    try:
        yield
    finally:
        durable.append = real
