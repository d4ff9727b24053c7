"""Shared memory of a link between two processes of one machine; only positions of frames go over the connection.

Over loopback TCP the system copies every byte twice, splits it into packets and acknowledges them: a third of what a
round on loopback costs. The memory is anonymous (Linux' ``memfd``), so it is freed with the last process that has it,
even a killed one. Its size is sealed, as a process that shrinks it would crash the other one. It holds ciphertext, and
its content is not trusted: frames are authenticated like any others.
"""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shoal.swarm.errors import LinkError, WireError
from shoal.swarm.system import fcntl, flags

RING_BYTES = 12 * 2**20
"""For each direction: room for the two largest frames, or for more small ones, while the receiver waits for a CPU."""

_LINE = 64
_PAGE = 4096
_COUNTER_BYTES = 8
_END_OF_PLACES = 2**62
_NAME = "shoal-link"
_TOKEN_BYTES = 32

_ADD_SEALS, _GET_SEALS, _FIXED_SIZE = 1033, 1034, 1 | 2 | 4
"""F_ADD_SEALS, F_GET_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW, which a Python built on an old system lacks."""

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"


class Place(NamedTuple):
    """A place in a ring. ``start`` counts all bytes since the ring's creation; ``memory`` is the place itself."""

    start: int
    memory: memoryview


class RingWriter:
    """Writer's end of a ring: reserves places for frames. The reader's counter says up to where places are free."""

    def __init__(self, memory: memoryview) -> None:
        """``memory``: a page with the counter, then the ring."""
        self._counter, self._ring = _counter(memory), memory[_PAGE:]
        self._end = self._beginning = 0

    def reserve(self, size: int) -> Place | None:
        """Reserve contiguous memory; None while there is no room."""
        ring_bytes = self._ring.nbytes
        read = self._counter[0]
        if read == self._end:
            # Everything was read: start over, as reused memory is cached, and small frames then touch few pages.
            self._end = self._beginning = _up_to(self._end, ring_bytes)
        start = self._end
        if start % ring_bytes + size > ring_bytes:
            start = _up_to(start, ring_bytes)
        if start + size - max(read, self._beginning) > ring_bytes:
            return None
        self._end = _up_to(start + size, _LINE)
        return Place(start, self._ring[start % ring_bytes :][:size])


class RingReader:
    """Reader's end of a ring: finds frames and frees their places."""

    def __init__(self, memory: memoryview) -> None:
        self._counter, self._ring = _counter(memory), memory[_PAGE:]
        self._end = 0

    def find(self, start: int, size: int) -> memoryview:
        """The frame at a position, valid until ``free``. Raises ``WireError`` for an impossible position."""
        at = start % self._ring.nbytes
        if not self._end <= start < _END_OF_PLACES or at + size > self._ring.nbytes:
            raise WireError(f"a bulk frame of {size} bytes at {start} of shared memory")
        self._end = _up_to(start + size, _LINE)
        return self._ring[at : at + size]

    def free(self) -> None:
        """Give the places of all frames found so far back to the writer."""
        self._counter[0] = self._end


class SharedMemory:
    """One end of a link's two rings."""

    def __init__(self, mapped: memoryview, *, is_ours: bool) -> None:
        """``mapped``: a page with the token, the ring that the memory's creator writes, and the ring that it reads."""
        rings = mapped[_PAGE:]
        first, second = rings[: rings.nbytes // 2], rings[rings.nbytes // 2 :]
        self.writer = RingWriter(first if is_ours else second)
        self.reader = RingReader(second if is_ours else first)
        self.is_shared = not is_ours
        """Whether the other end has opened the memory and will find frames in it."""


class OfferedMemory:
    """Memory created by this process, for the other end of a link to open."""

    def __init__(self) -> None:
        """Raises ``OSError`` where such memory is not available."""
        if not hasattr(os, "memfd_create") or fcntl is None:
            raise OSError("this system, or this Python, has no anonymous memory (memfd)")
        if _is_commitment_limited():
            raise OSError("this system does not overcommit memory: the first access to a page could end the process")
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
        """Close the descriptor: nobody can open the memory by it any more, but an open mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def open_shared(process: int, descriptor: int, token: bytes) -> SharedMemory:
    """Open the memory that another process of this machine offers. Raises ``LinkError`` if it cannot be used.

    ``process`` and ``descriptor`` are not trusted: only memory of links is opened, and only if it holds ``token``,
    which shows that the offering process has written to it."""
    path = f"/proc/{process}/fd/{descriptor}"
    if fcntl is None:
        raise LinkError("this system has no anonymous memory (memfd)")
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            raise LinkError(f"{path} is not the memory of a link")
        opened = os.open(path, os.O_RDWR | flags("O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK"))
        try:
            if fcntl.fcntl(opened, _GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
                raise LinkError(f"{path} is not sealed: its size could change")
            if os.fstat(opened).st_size != _all_bytes():
                raise LinkError(f"{path} has the wrong size")
            mapped = memoryview(mmap.mmap(opened, _all_bytes()))
        finally:
            os.close(opened)
    except OSError as error:
        raise LinkError(f"cannot open {path}: {error}") from error
    if not secrets.compare_digest(mapped[:_TOKEN_BYTES], token):
        raise LinkError(f"{path} belongs to another link")
    return SharedMemory(mapped, is_ours=False)


def _is_commitment_limited() -> bool:
    """Whether this system does not overcommit: access to shared memory may then fail at the first touch of a page."""
    with suppress(OSError):
        return _OVERCOMMIT.read_text().strip() == _NEVER
    return False


def _counter(memory: memoryview) -> memoryview:
    """The reader's position in its ring. A writer that sees an old value only finds less room."""
    return memory[:_COUNTER_BYTES].cast("Q")


def _all_bytes() -> int:
    return _PAGE + 2 * (_PAGE + RING_BYTES)


def _up_to(position: int, unit: int) -> int:
    """Round up to a multiple of ``unit``."""
    return position + -position % unit
