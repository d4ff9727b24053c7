"""Chunks of a past round that are kept for whoever checks it: in memory while they are few, else in a nameless file."""

from __future__ import annotations

import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from shoal.swarm.errors import BlobUnavailable

_MEMORY_BYTES = 2**24
"""Bytes of a round that are kept in memory; with more, all of them go to a file."""


class SpooledChunks:
    """Chunks by number, each written once. For worker threads."""

    def __init__(self, folder: Path | None) -> None:
        """``folder``: for the file, made when the first chunk comes; by default the machine's for temporary files."""
        self._folder = folder
        self._file = tempfile.SpooledTemporaryFile(_MEMORY_BYTES, dir=str(folder) if folder else None)  # noqa: SIM115
        self._places: dict[int, tuple[int, int]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def put(self, number: int, data: memoryview) -> None:
        """Keep a chunk, unless all are dropped. Raises ``OSError`` where the disk does not take it, and drops all."""
        with self._lock:
            if self._file.closed:
                return
            try:
                if self._folder is not None and not self._size:
                    self._folder.mkdir(parents=True, exist_ok=True)
                self._file.seek(self._size)
                self._file.write(data)
            except OSError:
                self._close()
                raise
            self._places[number] = self._size, data.nbytes
            self._size += data.nbytes

    def get(self, number: int) -> memoryview:
        """Return a chunk, empty if it was never put. Raises ``BlobUnavailable`` once all are dropped."""
        with self._lock:
            if self._file.closed:
                raise BlobUnavailable("the contributions to that round are not kept any more")
            start, size = self._places.get(number, (0, 0))
            try:
                self._file.seek(start)
                return memoryview(self._file.read(size))
            except OSError as error:
                raise BlobUnavailable("the contributions to that round cannot be read") from error

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        with suppress(OSError):  # of a full disk: what could not be written yet is written when the file is closed
            self._file.close()
