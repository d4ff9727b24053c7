"""Samples of token shards: windows within blocks, in the order of ``BlockOrder``; opened from a run file.

A sample lies within one block, so that a block is all that it takes; what a block has left over, less than a sample, is
not used. Some whole blocks are held out, which ones everybody computes alike."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.data import Dataset

from shoal.peer.data.block_cache import BlockCache
from shoal.peer.data.block_order import BlockOrder
from shoal.peer.data.block_store import BlockSource, BlockStore, DownloadSource, FolderSource
from shoal.peer.data.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, parse_manifest
from shoal.peer.data.mirrors import Mirror, Mirrors
from shoal.peer.data_places import DataPlaces
from shoal.peer.options import SHOAL_HOME
from shoal.peer.training.data import SampleOrder
from shoal.peer.training.data_files import DataFile, find_files
from shoal.swarm import durable
from shoal.swarm.errors import CorpusError
from shoal.swarm.protocol.run_file import DataSection
from shoal.swarm.protocol.run_sources import shards_url

log = logging.getLogger(__name__)

_MOST_HELD_OUT = 8
"""Most blocks that are held out: a measurement of the loss has to read them."""


class ShardSamples(Dataset[Tensor]):
    """Windows of ``context + 1`` tokens in some blocks; they start every ``context`` tokens of a block."""

    def __init__(self, store: BlockStore, blocks: npt.NDArray[np.int64], context: int) -> None:
        """``blocks``: numbers of the blocks in the manifest, each with at least one sample."""
        self._store = store
        self._blocks = blocks
        self._context = context
        self._samples = samples_of(store.manifest, context)[blocks]
        self._starts = np.concatenate([[0], np.cumsum(self._samples)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Tensor:
        """``(context + 1,) int64``. Raises ``IndexError`` outside ``range(len(self))``, and ``CorpusError``."""
        return self.batch([index])[0]

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
        """``(len(indices), context + 1) int64``; waits for blocks that are not here. Errors as above."""
        chosen = np.asarray(indices, dtype=np.int64)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < len(self):
            raise IndexError(f"sample index: expected 0 to {len(self) - 1}, not {chosen.min()} to {chosen.max()}")
        out = np.empty((len(chosen), self._context + 1), dtype=np.int64)
        slots = np.searchsorted(self._starts, chosen, side="right") - 1
        begins = (chosen - self._starts[slots]) * self._context
        blocks = self._blocks[slots]
        for row, block, begin in zip(out, blocks.tolist(), begins.tolist(), strict=True):
            row[:] = self._store.tokens(block)[begin : begin + self._context + 1]
        return torch.from_numpy(out)

    def sample_order(self, seed: int, first: int) -> BlockOrder:
        """The order in which a run with this seed goes through the samples, from position ``first`` on."""
        return BlockOrder(self._samples, seed, first)

    def prefetch(self, indices: npt.NDArray[np.int64]) -> None:
        """Fetch the blocks of samples that will be needed soon, in this order; returns at once."""
        slots = np.searchsorted(self._starts, indices, side="right") - 1
        self._store.prefetch(self._blocks[slots].tolist())


@dataclass(frozen=True, eq=False)
class ShardCorpus:
    """Training and held-out samples of the shards of a run; ``digest``: of both, SHA-256; ``about``: for people."""

    train: ShardSamples
    held_out: ShardSamples
    digest: bytes
    about: str


def samples_of(manifest: Manifest, context: int) -> npt.NDArray[np.int64]:
    """Samples in each block, ``(blocks,)``."""
    return np.maximum((manifest.block_tokens - 1) // context, 0)


def split_blocks(manifest: Manifest, fraction: float, context: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Blocks to train on and blocks held out, both with at least one sample. Raises ``CorpusError``."""
    usable = np.flatnonzero(samples_of(manifest, context))
    if len(usable) < 2:
        raise CorpusError(
            f"the run's shards have {len(usable)} blocks that hold a sample of {context + 1} tokens, and two are "
            "needed, as one is held out: build them from more text, or in smaller blocks (larger ones for a long "
            "context) with `shoal data build --block`"
        )
    count = min(max(1, round(fraction * len(usable))), _MOST_HELD_OUT, len(usable) - 1)
    chosen = usable[SampleOrder(len(usable), 0).indices(0, count)]
    return np.setdiff1d(usable, chosen), np.sort(chosen)


def open_shards(data: DataSection, vocab: int, context: int, places: DataPlaces) -> ShardCorpus:
    """Open the shards that ``[data]`` names; only the manifest is read.

    ``vocab`` and ``context``: the model's. Raises ``CorpusError``."""
    assert data.manifest is not None, "the run file is checked"
    digest = bytes.fromhex(data.manifest)
    manifest, make_source, shown = _find(data, digest, places)
    tokenizer = manifest.tokenizer
    if tokenizer.vocab > vocab:
        raise CorpusError(
            f"the tokenizer of the run's shards ({tokenizer.name}) has {tokenizer.vocab} tokens, and the model's "
            f"vocabulary {vocab}: set recipe.settings.vocab to {tokenizer.vocab} or more, or build the shards with the "
            "model's tokenizer"
        )
    train, held_out = split_blocks(manifest, data.held_out, context)
    store = BlockStore(manifest, make_source)
    training, testing = ShardSamples(store, train, context), ShardSamples(store, held_out, context)
    about = (
        f"shards of {manifest.tokens:,} tokens ({tokenizer.name}, {tokenizer.vocab} tokens) in {manifest.blocks:,} "
        f"blocks, {len(held_out)} held out, from {shown}"
    )
    split = hashlib.sha256(b"shoal shards 1\0" + digest + held_out.astype("<i8").tobytes())
    return ShardCorpus(training, testing, split.digest(), about)


def cache_of(places: DataPlaces) -> BlockCache:
    """The cache of downloaded blocks."""
    return BlockCache(places.cache or SHOAL_HOME / "data", places.cache_bytes)


def mirrors_of(data: DataSection, places: DataPlaces) -> Mirrors:
    """The mirrors to ask: those of this machine's owner, if there are any, else those of the run file."""
    url = shards_url(data.source)
    assert url is not None, "other sources are opened elsewhere"
    named = [Mirror(one, by_owner=True) for one in places.mirrors] or [Mirror(one) for one in (url, *data.mirrors)]
    return Mirrors(named, places.traffic)


def local_shards(digest: bytes, folders: Sequence[Path]) -> DataFile | None:
    """The manifest with this digest in one of the owner's folders, if any. Opens files of that name only."""
    for folder in folders:
        try:
            (found,) = find_files("tokens", MANIFEST, [folder])
            _read_manifest(found, digest)
        except CorpusError as error:
            log.debug("%s: not the run's shards: %s", folder, error)
            continue
        return found
    return None


def _read_manifest(file: DataFile, digest: bytes) -> Manifest:
    with file.open() as opened:
        return parse_manifest(opened.read(MAX_MANIFEST_BYTES + 1) or b"", str(file.path), digest)


def _find(data: DataSection, digest: bytes, places: DataPlaces) -> tuple[Manifest, Callable[[], BlockSource], str]:
    if places.folders:
        found = local_shards(digest, places.folders)
        if found is not None:
            manifest = _read_manifest(found, digest)
            files = tuple(find_files("tokens", one.name, [found.folder])[0] for one in manifest.files)
            for one, file in zip(manifest.files, files, strict=True):
                if file.size_bytes != one.size_bytes:
                    raise CorpusError(
                        f"{file.path}: {file.size_bytes:,} bytes, but its manifest says {one.size_bytes:,}: the file "
                        "was cut off, or is another: copy it again"
                    )
            return manifest, functools.partial(FolderSource, manifest, files), str(found.folder)
        if not places.mirrors:
            where = ", ".join(map(str, places.folders))
            raise CorpusError(
                f"--data {where}: has no {MANIFEST} with the digest {digest.hex()[:16]}… of the run file: name the "
                "folder with the run's shards, or leave out --data to download them"
            )
    mirrors, cache = mirrors_of(data, places), cache_of(places)
    kept = cache.folder / "manifests" / digest.hex()
    manifest = _kept_manifest(kept, digest) or _download_manifest(mirrors, digest, kept)
    return manifest, functools.partial(_download_source, manifest, data, places), mirrors.shown


def _download_source(manifest: Manifest, data: DataSection, places: DataPlaces) -> BlockSource:
    return DownloadSource(manifest, mirrors_of(data, places), cache_of(places))


def _kept_manifest(path: Path, digest: bytes) -> Manifest | None:
    try:
        with path.open("rb") as file:
            return parse_manifest(file.read(MAX_MANIFEST_BYTES + 1), str(path), digest)
    except (OSError, CorpusError):
        return None


def _download_manifest(mirrors: Mirrors, digest: bytes, kept: Path) -> Manifest:
    def is_right(data: bytes) -> bool:
        return len(data) <= MAX_MANIFEST_BYTES and blake3(data).digest() == digest

    data = mirrors.manifest(is_right)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        durable.put(kept, data)
    except OSError as error:
        log.debug("%s: cannot be kept: %s", kept, error)
    return parse_manifest(data, f"{MANIFEST} at {mirrors.shown}", digest)
