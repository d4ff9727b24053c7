"""Cache of downloaded blocks on disk: named by their digests, shared by all runs and processes of this machine.

A block appears under its name in one step, so a killed process leaves nothing that is taken for a block. The least
recently used ones go when the limit is reached, and earlier when the disk gets full."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

log = logging.getLogger(__name__)

_SUFFIX, _PART = ".block", ".part"
_SPARE_BYTES = 2**30
"""What the cache leaves free on the disk."""

_ABANDONED_S = 3600.0
_LOOK_EVERY = 64
"""Blocks that this process adds before it looks at what others have added."""


class BlockCache:
    """Cache below a folder, of at most ``limit_bytes`` (or one block); from any thread."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._lock = threading.Lock()
        self._known_bytes: int | None = None
        self._added = 0
        self._failed = False

    def path(self, digest: bytes) -> Path:
        return self.folder / digest.hex()[:2] / (digest.hex() + _SUFFIX)

    def find(self, digest: bytes, size_bytes: int) -> Path | None:
        """The file of a block, marked as used now; None if it is not here whole. Its bytes are not checked."""
        path = self.path(digest)
        try:
            if path.stat().st_size != size_bytes:
                path.unlink()
                return None
            os.utime(path)
        except OSError:
            return None
        return path

    def discard(self, digest: bytes) -> None:
        """Remove a block whose bytes are wrong."""
        with contextlib.suppress(OSError):
            self.path(digest).unlink()

    def add(self, digest: bytes, data: bytes) -> Path | None:
        """Keep a block; None, said once, where the disk does not take it."""
        path = self.path(digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            descriptor, part = tempfile.mkstemp(suffix=_PART, dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                # Not flushed to the disk: after a power cut the digest tells, and the block is fetched again.
                os.replace(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning(
                    "%s: blocks of the data cannot be kept (%s), so they will be downloaded again: free some space, or "
                    "name another disk by SHOAL_HOME",
                    self.folder,
                    error.strerror or error,
                )
            return None
        return path

    @contextlib.contextmanager
    def fetching(self, digest: bytes) -> Iterator[None]:
        """Have one process of this machine at a time fetch a block."""
        lock = FileLock(self.folder / f"fetching-{digest.hex()[:2]}", thread_local=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError:
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def _make_room(self, size_bytes: int) -> None:
        with self._lock:
            self._added += 1
            if self._known_bytes is None or self._added % _LOOK_EVERY == 0:
                self._known_bytes = sum(size for _, size, _ in self._blocks())
            free = shutil.disk_usage(self.folder).free
            if self._known_bytes + size_bytes > self.limit_bytes or free < _SPARE_BYTES + size_bytes:
                self._evict(size_bytes, free)
            self._known_bytes += size_bytes

    def _evict(self, size_bytes: int, free: int) -> None:
        """Remove the least recently used blocks, a tenth more than needed."""
        blocks = sorted(self._blocks(), key=lambda one: one[0])
        total = sum(size for _, size, _ in blocks)
        most = min(self.limit_bytes, total + free - _SPARE_BYTES) - size_bytes
        goal = most if total <= most else most - self.limit_bytes // 10
        for _, size, path in blocks:
            if total <= goal:
                break
            with contextlib.suppress(OSError):  # open in another process, on Windows
                path.unlink(missing_ok=True)
                total -= size
        self._known_bytes = max(0, total)

    def _blocks(self) -> Iterator[tuple[float, int, Path]]:
        """Yield each block's time of last use, size and file; remove parts that killed processes have left."""
        with contextlib.suppress(OSError):
            for folder in os.scandir(self.folder):
                if len(folder.name) != 2 or not folder.is_dir():
                    continue
                for one in os.scandir(folder.path):
                    with contextlib.suppress(OSError):
                        about = one.stat()
                        if one.name.endswith(_SUFFIX):
                            yield about.st_mtime, about.st_size, Path(one.path)
                        elif one.name.endswith(_PART) and about.st_mtime < time.time() - _ABANDONED_S:
                            os.unlink(one.path)
