"""Partially downloaded state: its verified chunks in memory, and on disk to resume from after a kill."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from shoal.peer.regular_file import open_regular
from shoal.peer.training.anchor import CHUNK_BYTES, DIGEST_BYTES, State, bytes_of, chunk_digest, chunks_in, state_digest

log = logging.getLogger(__name__)

_FORMAT = "shoal-incoming-1"
_SUFFIX = ".part"
_MAX_HEADER_BYTES = 1000


@dataclass(frozen=True)
class Wanted:
    """The state of a version with the digest that the run agreed on. ``shape``: (1 + slots, n)."""

    version: int
    digest: bytes
    shape: tuple[int, int]

    @property
    def size_bytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]

    @property
    def chunks(self) -> int:
        return chunks_in(self.size_bytes)

    @property
    def anchor_chunks(self) -> int:
        """The first so many chunks hold the anchor, and some of what comes after it."""
        return chunks_in(4 * self.shape[1])


class PartialState:
    """``missing``: the chunks that are not here. ``unwritten``: those that came and are not in the file yet.
    ``resumed``: how many came from the file that an earlier process left. ``refused``: the donors that sent anything
    wrong; whoever did is not asked again for this state while there is anybody else. ``folder``: where the file is to
    be, or None."""

    def __init__(self, wanted: Wanted, folder: Path | None = None, *, only_anchor: bool = False) -> None:
        self.wanted = wanted
        self.folder = folder
        self.values = torch.empty(wanted.shape)
        self.chunk_digests = b""
        self.missing = set(range(wanted.anchor_chunks if only_anchor else wanted.chunks))
        self.unwritten: deque[int] = deque()
        self.resumed = 0
        self.refused: set[str] = set()
        self._data = bytes_of(self.values)
        self._file: IncomingFile | None = None

    @classmethod
    def resume(cls, wanted: Wanted, folder: Path | None) -> PartialState:
        """With what an earlier process had, if it was this state. For threads: reads and hashes all of it."""
        partial = cls(wanted, folder)
        if folder is not None:
            partial._file = IncomingFile.resume(folder, partial)
        return partial

    def learn_digests(self, digests: bytes) -> bool:
        """Take this list of chunk digests if it is that of the wanted state."""
        wanted = self.wanted
        if len(digests) != DIGEST_BYTES * wanted.chunks:
            return False
        if state_digest(wanted.version, wanted.shape, digests) != wanted.digest:
            return False
        self.chunk_digests = digests
        return True

    def chunk(self, index: int) -> memoryview:
        """Memory in which a chunk belongs."""
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]

    def put(self, index: int, data: memoryview) -> bool:
        """Keep a chunk if it is the right one; hashes it. The caller notes that it is not missing."""
        expected = self.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if data.nbytes != self.chunk(index).nbytes or chunk_digest(data) != expected:
            return False
        self.chunk(index)[:] = data
        return True

    def write_next(self) -> None:
        """Write one of the chunks that have come. Raises ``OSError`` when the disk refuses, and goes without then."""
        assert self.folder is not None
        try:
            self._file = self._file or IncomingFile.create(self.folder, self)
            self._file.write(self, self.unwritten[0])
            self.unwritten.popleft()
        except OSError:
            self.folder = None
            self.close(remove=True)
            raise

    def close(self, *, remove: bool = False) -> None:
        """``remove``: no process is to go on from here."""
        if self._file is not None:
            self._file.close(remove=remove)
            self._file = None

    def whole(self) -> State:
        """The state, once nothing is missing: every chunk has been checked, and the list of their digests."""
        assert not self.missing
        return State(self.values, self.wanted.version, self.wanted.digest, self.chunk_digests)


class IncomingFile:
    """The chunks of one partial state on disk: the list of digests, and what has come. All methods are for threads.

    Nothing in it is trusted: the list has to fit the state's digest, and the chunks fit the list."""

    def __init__(self, path: Path, file: BinaryIO, data_offset: int) -> None:
        self._path = path
        self._file = file
        self._data_offset = data_offset

    @classmethod
    def create(cls, folder: Path, partial: PartialState) -> IncomingFile:
        """An empty one; any other is removed, one state is enough. Raises ``OSError``."""
        remove_incoming(folder)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = partial.wanted
        path = folder / f"{wanted.version}-{wanted.digest.hex()[:16]}{_SUFFIX}"
        about = {"format": _FORMAT, "version": wanted.version, "digest": wanted.digest.hex(), "shape": wanted.shape}
        header = json.dumps(about).encode() + b"\n" + partial.chunk_digests
        file = path.open("xb", buffering=0)
        incoming = cls(path, file, len(header))
        try:
            incoming._write_at(0, memoryview(header))
        except OSError:
            incoming.close(remove=True)
            raise
        return incoming

    @classmethod
    def resume(cls, folder: Path, partial: PartialState) -> IncomingFile | None:
        """Take over what an earlier process left of this state; None when there is nothing of it."""
        for path in _files(folder):
            with suppress(OSError, ValueError):
                incoming = cls(path, open_regular(path, "r+b", buffering=0), 0)
                try:
                    if incoming._read_header() == partial.wanted and incoming._read_digests(partial):
                        incoming._read_chunks(partial)
                        return incoming
                except BaseException:
                    incoming.close()
                    raise
                incoming.close()
        return None

    def write(self, partial: PartialState, index: int) -> None:
        """Raises ``OSError``, as when the disk is full."""
        self._write_at(self._data_offset + index * CHUNK_BYTES, partial.chunk(index))

    def close(self, *, remove: bool = False) -> None:
        with suppress(OSError):
            self._file.close()
            if remove:
                self._path.unlink(missing_ok=True)

    def _read_header(self) -> Wanted | None:
        """Raises ``ValueError``."""
        line, newline, _ = (self._file.read(_MAX_HEADER_BYTES) or b"").partition(b"\n")
        about = json.loads(line)
        if not newline or not isinstance(about, dict) or about.get("format") != _FORMAT:
            return None
        self._data_offset = len(line) + 1
        self._file.seek(self._data_offset)
        version, digest, shape = about.get("version"), about.get("digest"), about.get("shape")
        if not isinstance(version, int) or version < 0 or not isinstance(digest, str):
            return None
        if not isinstance(shape, list) or [type(size) for size in shape] != [int, int] or min(shape) < 1:
            return None
        return Wanted(version, bytes.fromhex(digest), (shape[0], shape[1]))

    def _read_digests(self, partial: PartialState) -> bool:
        """Whether they are those of the wanted state."""
        digests = bytearray(DIGEST_BYTES * partial.wanted.chunks)
        if not _read_into(self._file, memoryview(digests)) or not partial.learn_digests(bytes(digests)):
            return False
        self._data_offset += len(digests)
        return True

    def _read_chunks(self, partial: PartialState) -> None:
        place = memoryview(bytearray(CHUNK_BYTES))
        for index in range(partial.wanted.chunks):
            data = place[: partial.chunk(index).nbytes]
            if _read_into(self._file, data) and index in partial.missing and partial.put(index, data):
                partial.missing.discard(index)
                partial.resumed += 1

    def _write_at(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        while data.nbytes:
            data = data[self._file.write(data) :]


def begun_state(folder: Path) -> Wanted | None:
    """Return the state that an earlier process was fetching when it ended."""
    for path in _files(folder):
        with suppress(OSError, ValueError), open_regular(path, buffering=0) as file:
            if wanted := IncomingFile(path, file, 0)._read_header():
                return wanted
    return None


def remove_incoming(folder: Path) -> None:
    """Whatever is there. Raises ``OSError``."""
    for path in _files(folder):
        path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.glob(f"*{_SUFFIX}")) if os.path.isdir(folder) else [])


def _read_into(file: BinaryIO, place: memoryview) -> bool:
    """Fill ``place`` from the file; returns whether the file had so many bytes more."""
    while place.nbytes:
        size = file.readinto(place)  # type: ignore[attr-defined]
        if not size:
            return False
        place = place[size:]
    return True
