"""Blocks of token shards as arrays: opened once they are needed or expected, each checked before its first use.

Files are mapped into memory, not read into it, and only the blocks used last stay open: whatever the size of the
corpus, a process holds little of it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shoal.peer.data.block_cache import BlockCache
from shoal.peer.data.manifest import DTYPES, Manifest
from shoal.peer.data.mirrors import Mirrors
from shoal.peer.training.data_files import DataFile
from shoal.swarm.errors import CorpusError

log = logging.getLogger(__name__)

Tokens = npt.NDArray[Any]

OPEN_BLOCKS = 64
"""Blocks that stay open: some windows of the order."""

_AHEAD_BLOCKS = 24
"""Most blocks that are fetched ahead."""

_FETCHERS = 2
_IDLE_S = 5.0
_STRIPES = 64


class BlockSource(Protocol):
    """Where blocks come from."""

    def open(self, block: int, *, is_checked: bool) -> Tokens:
        """The tokens of a block, ``(n,)``; unless ``is_checked``, their digest is compared. Raises ``CorpusError``."""
        ...

    @property
    def shown(self) -> str: ...


@dataclass(frozen=True)
class FolderSource:
    """Shards in a folder that this machine's owner has named. ``files``: of the manifest, in order."""

    manifest: Manifest
    files: tuple[DataFile, ...]

    @property
    def shown(self) -> str:
        return str(self.files[0].folder)

    def open(self, block: int, *, is_checked: bool) -> Tokens:
        manifest = self.manifest
        _, start, stop = manifest.place(block)
        found = self.files[manifest.file_of(block)]
        dtype = np.dtype(DTYPES[manifest.dtype])
        try:
            with found.open() as opened:
                tokens: Tokens = np.memmap(
                    opened, dtype=dtype, mode="r", offset=start, shape=((stop - start) // dtype.itemsize,)
                )
        except (OSError, ValueError) as error:
            raise CorpusError(f"{found.path}: cannot be read ({error}); copy it again") from error
        if not is_checked and _digest(tokens) != manifest.block_digest(block):
            raise CorpusError(
                f"{found.path}: bytes {start:,} to {stop:,} are not those of the run's shards: copy the file again, or "
                "leave out --data to download them"
            )
        return tokens


class DownloadSource:
    """Shards at mirrors, kept in a cache on disk."""

    def __init__(self, manifest: Manifest, mirrors: Mirrors, cache: BlockCache) -> None:
        self._manifest, self._mirrors, self._cache = manifest, mirrors, cache

    @property
    def shown(self) -> str:
        return self._mirrors.shown

    def open(self, block: int, *, is_checked: bool) -> Tokens:
        digest = self._manifest.block_digest(block)
        found = self._cached(block, digest, is_checked=is_checked)
        if found is not None:
            return found
        file, start, stop = self._manifest.place(block)
        with self._cache.fetching(digest):
            found = self._cached(block, digest, is_checked=is_checked)
            if found is not None:
                return found
            data = self._mirrors.block(file.name, start, stop, lambda data: blake3(data).digest() == digest)
            path = self._cache.add(digest, data)
        dtype = np.dtype(DTYPES[self._manifest.dtype])
        return np.frombuffer(data, dtype) if path is None else self._map(path, dtype)

    def _cached(self, block: int, digest: bytes, *, is_checked: bool) -> Tokens | None:
        _, start, stop = self._manifest.place(block)
        path = self._cache.find(digest, stop - start)
        if path is None:
            return None
        try:
            tokens = self._map(path, np.dtype(DTYPES[self._manifest.dtype]))
        except (OSError, ValueError):  # another process has removed it
            return None
        if is_checked or _digest(tokens) == digest:
            return tokens
        log.warning("%s: is damaged, and is downloaded again", path)
        self._cache.discard(digest)
        return None

    @staticmethod
    def _map(path: Path, dtype: np.dtype[Any]) -> Tokens:
        return np.memmap(path, dtype=dtype, mode="r")


def _digest(tokens: Tokens) -> bytes:
    return blake3(tokens.view(np.uint8).data).digest()


class BlockStore:
    """Blocks of one corpus, from any thread. ``make_source``: called once in each process; picklable."""

    def __init__(self, manifest: Manifest, make_source: Callable[[], BlockSource]) -> None:
        self.manifest = manifest
        self._make_source = make_source
        self._source: BlockSource | None = None
        self._opened: OrderedDict[int, Tokens] = OrderedDict()
        self._checked = bytearray(manifest.blocks)
        self._lock = threading.Lock()
        self._stripes = [threading.Lock() for _ in range(_STRIPES)]
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._awake = threading.Condition(self._lock)
        self._fetchers = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockStore, (self.manifest, self._make_source)

    @property
    def source(self) -> BlockSource:
        with self._lock:
            if self._source is None:
                self._source = self._make_source()
            return self._source

    def tokens(self, block: int) -> Tokens:
        """The tokens of a block, ``(n,)``; waits until they are here. Raises ``CorpusError``."""
        opened = self._opened.get(block)
        if opened is not None:
            return opened
        with self._stripes[block % _STRIPES]:
            opened = self._opened.get(block)
            if opened is not None:
                return opened
            tokens = self._open(block)
        with self._lock:
            self._opened[block] = tokens
            while len(self._opened) > OPEN_BLOCKS:
                self._opened.popitem(last=False)
        return tokens

    def _open(self, block: int) -> Tokens:
        tokens = self.source.open(block, is_checked=bool(self._checked[block]))
        if not self._checked[block]:
            vocab = self.manifest.tokenizer.vocab
            if int(tokens.max()) >= vocab:
                raise CorpusError(
                    f"{self.manifest.place(block)[0].name}: has token {int(tokens.max())}, and the tokenizer of the "
                    f"shards has {vocab} tokens: ask the host, the shards were built wrongly"
                )
            self._checked[block] = 1
        # A plain array: a memmap's own slicing is many times slower.
        return np.asarray(tokens).view(np.ndarray)

    def prefetch(self, blocks: Iterable[int]) -> None:
        """Open these blocks soon, in this order, in worker threads, instead of those that were asked for before."""
        with self._lock:
            self._wanted = OrderedDict.fromkeys(
                [block for block in dict.fromkeys(blocks) if block not in self._opened][:_AHEAD_BLOCKS]
            )
            for _ in range(min(_FETCHERS - self._fetchers, len(self._wanted))):
                self._fetchers += 1
                threading.Thread(target=self._fetch, name="shoal-data", daemon=True).start()
            self._awake.notify_all()

    def _fetch(self) -> None:
        while True:
            with self._lock:
                if not self._wanted and not self._awake.wait_for(lambda: bool(self._wanted), _IDLE_S):
                    self._fetchers -= 1
                    return
                block = self._wanted.popitem(last=False)[0]
            try:
                self.tokens(block)
            except Exception as error:  # noqa: BLE001 - who needs the block gets the error
                log.debug("block %d cannot be fetched ahead: %s", block, error)
