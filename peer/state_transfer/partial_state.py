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

from shoal.compression.scratch import empty_aligned
from shoal.peer.regular_file import open_regular
from shoal.peer.training.anchor import (
    DIGEST_BYTES,
    AnchorState,
    chunk_bounds,
    chunk_digest,
    chunks_in,
    row_bytes,
    state_digest,
)

log = logging.getLogger(__name__)

_FORMAT = "shoal-incoming-2"
_SUFFIX = ".part"
_MAX_HEADER_BYTES = 1000


@dataclass(frozen=True)
class WantedState:
    """Identity of a state that is to be fetched: version, agreed digest, and shape (1 + slots, n)."""

    version: int
    digest: bytes
    shape: tuple[int, int]

    @property
    def chunks(self) -> int:
        return chunks_in(self.shape[1])

    def chunk_bytes(self, index: int) -> int:
        """Bytes of the values of a chunk: of all rows of its range."""
        start, stop = chunk_bounds(index, self.shape[1])
        return 4 * self.shape[0] * (stop - start)


class PartialState:
    """A state that is being fetched: the chunks that are here, in memory and in a file.

    ``values``: (1 + slots, n), or with ``only_anchor`` the anchor alone, (1, n): chunks have all rows, of which the
    others are checked and dropped. ``missing``: the chunks that have not arrived; ``unwritten``: chunks that have
    arrived and are not in the file yet; ``resumed``: the number of chunks that an earlier process left; ``folder``:
    where the file is written, or None, as with ``only_anchor``."""

    def __init__(self, wanted: WantedState, folder: Path | None = None, *, only_anchor: bool = False) -> None:
        assert folder is None or not only_anchor
        self.wanted = wanted
        self.folder = folder
        rows, elements = wanted.shape
        self.values = empty_aligned((1 if only_anchor else rows) * elements).view(-1, elements)
        self.chunk_digests = b""
        self.missing = set(range(wanted.chunks))
        self.unwritten: deque[int] = deque()
        self.resumed = 0
        self._file: IncomingFile | None = None

    @classmethod
    def resume(cls, wanted: WantedState, folder: Path | None) -> PartialState:
        """The partial state with the chunks of it that an earlier process left in ``folder``. Reads and hashes them:
        call it in a worker thread."""
        partial = cls(wanted, folder)
        if folder is not None:
            partial._file = IncomingFile.resume(folder, partial)
        return partial

    def learn_digests(self, digests: bytes) -> bool:
        """Accept this list of chunk digests if it is that of the wanted state; return whether it is."""
        wanted = self.wanted
        is_right = len(digests) == DIGEST_BYTES * wanted.chunks and (
            state_digest(wanted.version, wanted.shape, digests) == wanted.digest
        )
        if is_right:
            self.chunk_digests = digests
        return is_right

    def rows(self, index: int) -> Iterator[memoryview]:
        """Yield the memory of each row of a chunk."""
        return row_bytes(self.values, *chunk_bounds(index, self.wanted.shape[1]))

    def mark_arrived(self, index: int) -> None:
        """Record a chunk that ``put`` has kept, and queue it for the file; on the event loop."""
        self.missing.discard(index)
        self.unwritten.append(index)

    def put(self, index: int, data: memoryview) -> bool:
        """Copy a chunk to its place if its digest is right; return whether it is. For worker threads."""
        expected = self.chunk_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if data.nbytes != self.wanted.chunk_bytes(index) or chunk_digest(data) != expected:
            return False
        at = 0
        for row in self.rows(index):
            row[:] = data[at : at + row.nbytes]
            at += row.nbytes
        return True

    def write_next(self) -> None:
        """Write one arrived chunk to the file. Raises ``OSError`` when the disk refuses; the file is removed then."""
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
        """Close the file. With ``remove`` no later process can resume from it."""
        if self._file is not None:
            self._file.close(remove=remove)
            self._file = None

    def whole(self) -> AnchorState:
        """The complete state; its chunks and their digests have been checked."""
        assert not self.missing
        assert self.values.shape == self.wanted.shape, "not only the anchor"
        return AnchorState(self.values, self.wanted.version, self.wanted.digest, self.chunk_digests)


class IncomingFile:
    """File with the chunks of one partial state: a header, the chunks' digests, the chunks in their places.

    Nothing in it is trusted: the digests have to match the state's, and the chunks their digests. Methods are for
    worker threads."""

    def __init__(self, path: Path, file: BinaryIO, data_offset: int) -> None:
        self._path = path
        self._file = file
        self._data_offset = data_offset

    @classmethod
    def create(cls, folder: Path, partial: PartialState) -> IncomingFile:
        """Create an empty file in place of any other in the folder. Raises ``OSError``."""
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
        """Open the file that an earlier process left of this state, and read its chunks; None when there is none."""
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
        """Write a chunk. Raises ``OSError``, as when the disk is full."""
        offset = self._data_offset + index * partial.wanted.chunk_bytes(0)
        for row in partial.rows(index):
            self._write_at(offset, row)
            offset += row.nbytes

    def close(self, *, remove: bool = False) -> None:
        with suppress(OSError):
            self._file.close()
            if remove:
                self._path.unlink(missing_ok=True)

    def _read_header(self) -> WantedState | None:
        """The state that the file belongs to; None for another format. Raises ``ValueError`` for what is not JSON."""
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
        return WantedState(version, bytes.fromhex(digest), (shape[0], shape[1]))

    def _read_digests(self, partial: PartialState) -> bool:
        """Read the chunks' digests; return whether they are those of the wanted state."""
        digests = bytearray(DIGEST_BYTES * partial.wanted.chunks)
        if not _read_into(self._file, memoryview(digests)) or not partial.learn_digests(bytes(digests)):
            return False
        self._data_offset += len(digests)
        return True

    def _read_chunks(self, partial: PartialState) -> None:
        place = memoryview(bytearray(partial.wanted.chunk_bytes(0)))
        for index in range(partial.wanted.chunks):
            data = place[: partial.wanted.chunk_bytes(index)]
            if _read_into(self._file, data) and index in partial.missing and partial.put(index, data):
                partial.missing.discard(index)
                partial.resumed += 1

    def _write_at(self, offset: int, data: memoryview) -> None:
        self._file.seek(offset)
        while data.nbytes:
            data = data[self._file.write(data) :]


def state_on_disk(folder: Path) -> WantedState | None:
    """The state that an earlier process had not finished fetching; None where there is none."""
    for path in _files(folder):
        with suppress(OSError, ValueError), open_regular(path, buffering=0) as file:
            if wanted := IncomingFile(path, file, 0)._read_header():
                return wanted
    return None


def remove_incoming(folder: Path) -> None:
    """Remove all files of partial states. Raises ``OSError``."""
    for path in _files(folder):
        path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[Path]:
    return iter(sorted(folder.glob(f"*{_SUFFIX}")) if os.path.isdir(folder) else [])


def _read_into(file: BinaryIO, place: memoryview) -> bool:
    """Fill ``place`` from the file; return whether the file had enough bytes left."""
    while place.nbytes:
        size = file.readinto(place)  # type: ignore[attr-defined]
        if not size:
            return False
        place = place[size:]
    return True
