"""Memory that the two ends of a link share when they are processes of one machine: sealed frames lie there, and only
where they lie goes over the connection.

Between them the system copies every byte twice, and packs it and acknowledges it; that is a third of what a round on
loopback costs. The memory has no name (Linux' ``memfd``): it ends with its last process, killed or not. Its size is
fixed, or a process that makes it smaller would end the other one. It holds ciphertext, and nothing that is found in it
is believed: frames are opened as any others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.swarm.errors import LinkError, WireError

RING_BYTES = 12 * 2**20
"""Of each direction: the two largest frames, or more of others, as the other end may have to wait for a processor."""

_LINE = 64
_PAGE = 4096
_COUNTER_BYTES = 8
_END_OF_PLACES = 2**62
_NAME = "shoal-link"
_TOKEN_BYTES = 32

_ADD_SEALS, _GET_SEALS, _FIXED_SIZE = 1033, 1034, 1 | 2 | 4
"""F_ADD_SEALS, F_GET_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW: a Python that was built on an old system does
not name them."""

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"


class Place(NamedTuple):
    """``start`` counts all bytes that a ring has had since its beginning; ``memory``: where in it they are."""

    start: int
    memory: memoryview


class RingWriter:
    """Finds places for frames; the other end's counter says up to where all are free again."""

    def __init__(self, memory: memoryview) -> None:
        """``memory``: a page for the counter, then the ring."""
        self._counter, self._ring = _counter(memory), memory[_PAGE:]
        self._end = self._beginning = 0

    def reserve(self, size: int) -> Place | None:
        """A place of that many bytes, in one piece; None when there is no room at the moment."""
        ring_bytes = self._ring.nbytes
        read = self._counter[0]
        if read == self._end:
            # All has been read. What is used again is in the caches, and a link of small frames takes little memory.
            self._end = self._beginning = _up_to(self._end, ring_bytes)
        start = self._end
        if start % ring_bytes + size > ring_bytes:
            start = _up_to(start, ring_bytes)
        if start + size - max(read, self._beginning) > ring_bytes:
            return None
        self._end = _up_to(start + size, _LINE)
        return Place(start, self._ring[start % ring_bytes :][:size])


class RingReader:
    """Finds what the other end has written, and lets it have the room back."""

    def __init__(self, memory: memoryview) -> None:
        self._counter, self._ring = _counter(memory), memory[_PAGE:]
        self._end = 0

    def find(self, start: int, size: int) -> memoryview:
        """What lies there, good until ``free``. Raises ``WireError`` for a place that cannot be."""
        at = start % self._ring.nbytes
        if not self._end <= start < _END_OF_PLACES or at + size > self._ring.nbytes:
            raise WireError(f"a bulk frame of {size} bytes at {start} of shared memory")
        self._end = _up_to(start + size, _LINE)
        return self._ring[at : at + size]

    def free(self) -> None:
        """All that was found so far may be written to."""
        self._counter[0] = self._end


class SharedMemory:
    """One end's view of a link's two rings."""

    def __init__(self, mapped: memoryview, *, is_ours: bool) -> None:
        """``mapped``: a page with the token, then the ring that its maker writes, then the other one."""
        rings = mapped[_PAGE:]
        first, second = rings[: rings.nbytes // 2], rings[rings.nbytes // 2 :]
        self.writer = RingWriter(first if is_ours else second)
        self.reader = RingReader(second if is_ours else first)
        self.is_shared = not is_ours
        """Whether the other end has it as well, and finds what we write."""


class Offered:
    """Memory that was made here, for the other end to open."""

    def __init__(self) -> None:
        """Raises ``OSError`` where there is none to be had."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system, or this Python, has no memory without a name")
        if _is_commitment_limited():
            raise OSError("a page of it that is touched for the first time might end the process")
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.process = os.getpid()
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, _all_bytes())
            fcntl.fcntl(self.descriptor, _ADD_SEALS, _FIXED_SIZE)
            mapped = memoryview(mmap.mmap(self.descriptor, _all_bytes()))
        except BaseException:
            self.close()
            raise
        mapped[:_TOKEN_BYTES] = self.token
        self.memory = SharedMemory(mapped, is_ours=True)

    def close(self) -> None:
        """It cannot be opened by that number any more; who has it keeps it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def open_shared(process: int, descriptor: int, token: bytes) -> SharedMemory:
    """What another process of ours on this machine offers. Raises ``LinkError`` if there is no such memory.

    The numbers are the other end's word: nothing but memory of links is opened by them, and only that which whoever
    named it has written to."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise LinkError(f"{path} is no memory of a link")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            if fcntl.fcntl(opened, _GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
                raise LinkError(f"{path} can be made smaller")
            if os.fstat(opened).st_size != _all_bytes():
                raise LinkError(f"{path} has another size")
            mapped = memoryview(mmap.mmap(opened, _all_bytes()))
        finally:
            os.close(opened)
    except OSError as error:
        raise LinkError(f"cannot open {path}: {error}") from error
    if not secrets.compare_digest(mapped[:_TOKEN_BYTES], token):
        raise LinkError(f"{path} is another link's")
    return SharedMemory(mapped, is_ours=False)


def _is_commitment_limited() -> bool:
    """Whether this system refuses what it might not have, of such memory as late as at its first touch."""
    with suppress(OSError):
        return _OVERCOMMIT.read_text().strip() == _NEVER
    return False


def _counter(memory: memoryview) -> memoryview:
    """Up to where its reader has read. Whoever sees too little of it finds less room."""
    return memory[:_COUNTER_BYTES].cast("Q")


def _all_bytes() -> int:
    return _PAGE + 2 * (_PAGE + RING_BYTES)


def _up_to(position: int, unit: int) -> int:
    """The next multiple of it."""
    return position + -position % unit
