"""Files of anchor and outer optimizer, written from a state that may be overwritten by the next one meanwhile.

The place of each value in the files is known before any is written, so a range that is about to be overwritten is
written at once, whichever comes next in order. The digest of a file is computed by reading it back when it is whole."""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from shoal.peer.checkpoints.manifest import FileEntry, shard_name
from shoal.peer.checkpoints.tensors import file_pieces, shards, state_shard
from shoal.peer.training.anchor import CHUNK_ELEMENTS, bytes_of, chunk_bounds, chunks_in
from shoal.swarm.durable import sync
from shoal.swarm.protocol.types import TensorSpec

WriteFile = Callable[[str, Iterable[bytes | memoryview]], FileEntry]
"""Writes a file of that name and content; returns size and digest of the content."""


class StateFiles(Protocol):
    """Files of one state that are being written (an ``OverwriteGuard`` of it)."""

    def write(self) -> dict[str, FileEntry]:
        """Write all files, in a worker thread; return size and digest of each. Raises ``OSError``."""

    def abandon(self) -> None:
        """Need nothing of the state any more, from any thread; after the writing this does nothing."""

    def before_overwrite(self, start: int, stop: int) -> None:
        """Return once nothing is needed any more of the elements [start, stop) of all rows, from any thread.

        A disk that refuses ends the writing, and not the overwriting."""


@dataclass(frozen=True)
class StateShard:
    """The elements [start, stop) of a state, in a file of the anchor and one of the outer optimizer's vectors, if there
    are any. ``names``: of the files, by kind."""

    specs: tuple[TensorSpec, ...]
    start: int
    stop: int
    names: Mapping[str, str]

    def files(self, values: Tensor) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield name and tensors of each file; ``values``: of the whole state, (1 + slots, n) float32."""
        for kind, tensors in state_shard(values[:, self.start : self.stop], self.specs).items():
            yield self.names[kind], tensors


def state_shards(layout: Sequence[TensorSpec], first: int = 0, count: int | None = None) -> list[StateShard]:
    """The shards of a state with that layout.

    ``first``, ``count``: where the layout is a part of a model's, number of its first shard, and of the model's
    shards."""
    cut, found, at = shards(layout), [], 0
    for number, specs in enumerate(cut, first):
        stop = at + sum(spec.elements for spec in specs)
        names = {kind: shard_name(kind, number, count or len(cut)) for kind in ("anchor", "outer")}
        found.append(StateShard(specs, at, stop, names))
        at = stop
    return found


class PlainStateFiles:
    """Files that are written range by range, in any order (``StateFiles``)."""

    def __init__(self, folder: Path, values: Tensor, layout: Sequence[TensorSpec]) -> None:
        """``values``: of the state, (1 + slots, n) float32; overwritten only after ``before_overwrite``."""
        self._folder = folder
        self._values = values
        self._elements = values.shape[1]
        self._shards = state_shards(layout)
        self._starts = [shard.start for shard in self._shards]
        self._headers: dict[str, bytes] = {}
        """Of the files that exist."""
        self._is_written = [False] * chunks_in(self._elements)
        self._is_needed = True
        self._error: OSError | None = None
        self._lock = threading.Lock()

    def write(self) -> dict[str, FileEntry]:
        entries: dict[str, FileEntry] = {}
        try:
            for shard in self._shards:
                for number in _ranges(shard.start, shard.stop):
                    with self._lock:
                        self._write_range(number)
                with self._lock:
                    names = self._create(shard)
                entries.update({name: self._finish(name) for name in names})
        finally:
            self.abandon()
        return entries

    def abandon(self) -> None:
        with self._lock:
            self._is_needed = False

    def before_overwrite(self, start: int, stop: int) -> None:
        with self._lock:
            try:
                for number in _ranges(start, stop) if self._is_needed else ():
                    self._write_range(number)
            except OSError as error:
                self._error, self._is_needed = error, False

    def _write_range(self, number: int) -> None:
        """Write a range to all files that have some of it, unless that was done; under the lock."""
        if self._error is not None:
            raise self._error
        if self._is_written[number]:
            return
        at, stop = chunk_bounds(number, self._elements)
        while at < stop:
            # Of several shards that begin here all but the last are empty.
            shard = self._shards[bisect_right(self._starts, at) - 1]
            upto = min(stop, shard.stop)
            anchor, *outer = self._create(shard)
            self._put(anchor, shard, self._values[:1], at, upto)
            for name in outer:
                self._put(name, shard, self._values[1:], at, upto)
            at = upto
        self._is_written[number] = True

    def _put(self, name: str, shard: StateShard, rows: Tensor, start: int, stop: int) -> None:
        """Write the elements [start, stop) of each row to their places in a file."""
        with (self._folder / name).open("r+b", buffering=0) as file:
            for number, row in enumerate(rows):
                file.seek(len(self._headers[name]) + 4 * (number * (shard.stop - shard.start) + start - shard.start))
                left = bytes_of(row[start:stop])
                while left.nbytes:
                    left = left[file.write(left) :]

    def _create(self, shard: StateShard) -> list[str]:
        """Return the names of a shard's files, the anchor's first, which exist afterwards; under the lock."""
        names = []
        for name, tensors in shard.files(self._values):
            names.append(name)
            if name not in self._headers:
                self._headers[name] = self._begin(name, bytes(next(file_pieces(tensors))))
        return names

    def _begin(self, name: str, header: bytes) -> bytes:
        (self._folder / name).write_bytes(header)
        return header

    def _finish(self, name: str) -> FileEntry:
        """Flush a file of which everything is written to the disk; return its size and digest."""
        with (self._folder / name).open("r+b") as file:
            sync(file)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest


class SealedStateFiles:
    """Files that are sealed from their beginning to their end, so that overwriting waits for them (``StateFiles``)."""

    def __init__(self, write_file: WriteFile, values: Tensor, layout: Sequence[TensorSpec]) -> None:
        """``write_file``: seals; ``values``: as for ``PlainStateFiles``."""
        self._write_file = write_file
        self._values = values
        self._shards = state_shards(layout)
        self._needed_from = 0
        self._changed = threading.Condition()

    def write(self) -> dict[str, FileEntry]:
        entries: dict[str, FileEntry] = {}
        try:
            for shard in self._shards:
                for name, tensors in shard.files(self._values):
                    entries[name] = self._write_file(name, file_pieces(tensors))
                self._need_from(shard.stop)
        finally:
            self.abandon()
        return entries

    def abandon(self) -> None:
        self._need_from(self._values.shape[1])

    def before_overwrite(self, start: int, stop: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: stop <= self._needed_from)

    def _need_from(self, start: int) -> None:
        with self._changed:
            self._needed_from = start
            self._changed.notify_all()


def _ranges(start: int, stop: int) -> range:
    """Numbers of the ranges that have some of the elements [start, stop)."""
    return range(start // CHUNK_ELEMENTS, chunks_in(stop)) if start < stop else range(0)
