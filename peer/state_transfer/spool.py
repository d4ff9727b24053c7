"""Copy of a state on disk, for joiners whose download takes longer than the donor's rounds.

What joiners may still want of a state is written to a file at the latest when the next step is about to overwrite it,
so a donor serves one version to its end without a second copy in memory."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from shoal.peer.training.anchor import AnchorState, bytes_of, chunk_bounds, chunks_in

log = logging.getLogger(__name__)

MAX_STALL_S = 2.0
"""Time that a step waits for the disk at most. Then the copy is given up, and joiners go on with the next version."""


class StateSpool:
    """Chunks of one state in a file without a name, which is gone with the process; for worker threads.

    It is an ``OverwriteGuard``, added to the state by whoever makes it. ``is_wanted`` says, at the beginning of the
    next step, whether anybody still downloads the state; from any thread."""

    def __init__(self, state: AnchorState, folder: Path, is_wanted: Callable[[], bool]) -> None:
        self._state = state
        self._folder = folder
        self._is_wanted = is_wanted
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._unwritten = set(range(chunks_in(state.elements)))
        self._stalled_s = 0.0
        self._is_overwritten = False
        self._is_open = True

    @property
    def is_whole(self) -> bool:
        """Whether all chunks are in the file."""
        return self._is_open and not self._unwritten

    def before_overwrite(self, start: int, stop: int) -> None:
        """Write the chunks of this range that are not in the file yet; see ``OverwriteGuard``."""
        if not self._is_overwritten:
            self._is_overwritten = True
            if not self.is_whole and not self._is_wanted():
                self.close()
        began_s = time.monotonic()
        size = chunk_bounds(0, self._state.elements)[1]
        for chunk in range(start // size, -(-stop // size)):
            if self._stalled_s + time.monotonic() - began_s > MAX_STALL_S and self._unwritten:
                log.warning(
                    "%s: the disk is too slow to keep version %d of the state for joiners", self._folder, self.version
                )
                self.close()
            self._write(chunk)
        self._stalled_s += time.monotonic() - began_s

    def write_next(self) -> bool:
        """Write a chunk ahead of the next step; returns whether there may be more to write."""
        with self._lock:
            chunk = min(self._unwritten, default=None)
        if chunk is None or not self._is_open:
            return False
        self._write(chunk)
        return True

    def read(self, chunk: int) -> memoryview | None:
        """Return a chunk's values, all rows one after the other; None where it has not been written."""
        start, stop = chunk_bounds(chunk, self._state.elements)
        data = bytearray(4 * self._state.shape[0] * (stop - start))
        with self._lock:
            file = self._file
            if file is None or chunk in self._unwritten:
                return None
            try:
                os.lseek(file.fileno(), self._offset(chunk), os.SEEK_SET)
                is_whole = file.readinto(data) == len(data)  # type: ignore[attr-defined]
            except OSError as error:
                log.warning("%s: a state kept for joiners cannot be read: %s", self._folder, error)
                return None
        return memoryview(data) if is_whole else None

    def close(self) -> None:
        """Remove the file; what is not in memory any more is gone."""
        self._state.remove_guard(self)
        with self._lock:
            self._is_open = False
            if self._file is not None:
                self._file.close()
                self._file = None

    @property
    def version(self) -> int:
        return self._state.version

    def _write(self, chunk: int) -> None:
        with self._lock:
            if not self._is_open or chunk not in self._unwritten:
                return
            values = self._state.read(*chunk_bounds(chunk, self._state.elements))
            assert values is not None, "a guard is called before"
            try:
                if self._file is None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
                self._write_at(self._offset(chunk), bytes_of(values))
            except OSError as error:
                log.warning("%s: the state cannot be kept for joiners: %s", self._folder, error)
            else:
                self._unwritten.discard(chunk)
                return
        self.close()

    def _write_at(self, offset: int, data: memoryview) -> None:
        assert self._file is not None
        self._file.seek(offset)
        while data.nbytes:
            data = data[self._file.write(data) :]

    def _offset(self, chunk: int) -> int:
        return 4 * self._state.shape[0] * chunk_bounds(chunk, self._state.elements)[0]
