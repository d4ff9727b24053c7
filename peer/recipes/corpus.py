"""Corpora of tokens: the standard library's sources, text files, a file of tokens, or token shards at a URL.

They are split into training and held-out tokens by content that every peer shares (names, positions), never by chance.
A digest covers both, so that peers can tell whether they hold the same corpus."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shoal.peer.data.shard_samples import ShardSamples, open_shards
from shoal.peer.data_places import DataPlaces
from shoal.peer.training.data_files import DataFile, find_files
from shoal.peer.training.device import usable_bytes
from shoal.swarm.errors import CorpusError
from shoal.swarm.protocol.run_file import DataSection
from shoal.swarm.protocol.run_sources import file_pattern, shards_url

BYTE_VOCAB = 256
SEPARATOR = 0
"""The byte after every file: no text contains it, so a model learns it as the end of a document."""

_BLOCK_BYTES = 64 * 1024
_MIN_BLOCKS = 64
_CHECK_TOKENS = 1 << 22
_TOKEN_TYPES: dict[str, npt.DTypeLike] = {".u16": "<u2", ".u32": "<u4"}

# Distributions package these apart from the interpreter, or generate them per machine. Without them, installations
# of one Python version mostly agree.
_SKIPPED_FOLDERS = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__", "lib-dynload", "test", "tests", "idlelib"),
        *("idle_test", "lib2to3", "distutils", "ensurepip", "tkinter", "turtledemo"),
    )
)
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize.py", "usercustomize.py")

Tokens = npt.NDArray[Any]


class _Readable(Protocol):
    """A ``DataFile``, or a file of our own Python."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def size_bytes(self) -> int: ...

    def open(self) -> FileIO: ...


@dataclass(frozen=True)
class _LibraryFile:
    name: str
    path: Path
    size_bytes: int

    def open(self) -> FileIO:
        return self.path.open("rb", buffering=0)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens to test on: ``(n,)`` uint8, uint16 or uint32, perhaps memory-mapped."""

    train: Tokens
    held_out: Tokens
    digest: bytes
    """SHA-256 over the tokens, and for text over the position of the split, too."""
    about: str
    files: tuple[tuple[str, int], ...] = ()
    """Name of each file of the held-out text, and where it ends there; empty where the text is not split by files."""


class WindowDataset(Dataset[Tensor]):
    """Windows of ``context + 1`` tokens that start every ``context`` tokens: each token is predicted once."""

    def __init__(self, tokens: Tokens, context: int) -> None:
        """``tokens``: ``(n,)`` unsigned, n > ``context``."""
        assert len(tokens) > context > 0, "load_corpus checks the size"
        self._tokens = tokens
        self._context = context
        self._span = np.arange(context + 1, dtype=np.int64)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        """``(context + 1,) int64``. Raises ``IndexError`` outside ``range(len(self))``."""
        return self.batch([index])[0]

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Tensor:
        """``(len(indices), context + 1) int64``. Raises ``IndexError`` outside ``range(len(self))``."""
        starts = np.asarray(indices, dtype=np.int64)
        if starts.size and not 0 <= starts.min() <= starts.max() < len(self):
            raise IndexError(f"sample index: expected 0 to {len(self) - 1}, not {starts.min()} to {starts.max()}")
        windows = self._tokens[starts[:, None] * self._context + self._span]
        return torch.from_numpy(windows.astype(np.int64))


@dataclass(frozen=True, eq=False)
class CorpusSamples:
    """Samples to train on and samples to test on. ``digest``: SHA-256 of both; ``about``: a line for people."""

    train: WindowDataset | ShardSamples
    held_out: WindowDataset | ShardSamples
    digest: bytes
    about: str
    is_bytes: bool = False
    """Whether tokens are the bytes of text."""
    sources: tuple[tuple[str, int], ...] = ()
    """Source of the held-out samples, and the number of the first one after it; of files, samples at their borders are
    of the one that they begin in."""


def open_samples(data: DataSection, vocab: int, context: int, places: DataPlaces) -> CorpusSamples:
    """Open the samples of any source that ``[data]`` can name. Arguments and errors as of ``load_corpus``."""
    if shards_url(data.source) is not None:
        shards = open_shards(data, vocab, context, places)
        return CorpusSamples(shards.train, shards.held_out, shards.digest, shards.about)
    corpus = load_corpus(data, vocab, context, places.folders)
    train, held_out = WindowDataset(corpus.train, context), WindowDataset(corpus.held_out, context)
    named = file_pattern(data.source)
    is_bytes = named is None or named[0] == "text"
    ends = [(name, -(-end // context)) for name, end in corpus.files]
    return CorpusSamples(train, held_out, corpus.digest, corpus.about, is_bytes, tuple(ends))


def load_corpus(data: DataSection, vocab: int, context: int, folders: Sequence[Path] = ()) -> Corpus:
    """Open the corpus that ``[data]`` names, as arrays of all its tokens; its files may be in ``folders`` only.

    ``vocab`` and ``context`` (tokens) are the model's. Raises ``CorpusError`` for a corpus that is missing, damaged,
    too small for one sample on either side of the split, or that has tokens outside the vocabulary."""
    named = file_pattern(data.source)
    if data.source != "stdlib" and named is None:
        raise CorpusError(f"data.source: expected stdlib, text:GLOB, tokens:FILE or shards:URL, not {data.source!r}")
    if named is not None and named[0] == "tokens":
        (file,) = find_files(*named, folders)
        corpus = _load_tokens(file, vocab, data.held_out)
    elif vocab < BYTE_VOCAB:
        raise CorpusError(f"data.source {data.source!r} is bytes: set recipe.settings.vocab to 256, not {vocab}")
    elif named is not None:
        corpus = _load_text(data.source, find_files(*named, folders), data.held_out)
    else:
        corpus = _load_stdlib(data.held_out)
    for name, tokens in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(tokens) <= context:
            raise CorpusError(
                f"data.source {data.source!r}: {len(tokens)} {name} tokens, but a sample has {context + 1}; "
                f"add data, shorten recipe.settings.context or change data.held_out ({data.held_out})"
            )
    return corpus


def _load_stdlib(fraction: float) -> Corpus:
    """The running Python's own library, which every volunteer has."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        paths += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(_SKIPPED_FILES)]
    if not paths:
        raise CorpusError(f"{root}: no .py files of the standard library here; use text:GLOB instead")
    found = [_LibraryFile(path.relative_to(root).as_posix(), path, _size(path)) for path in paths]
    corpus = _split_files(sorted(found, key=lambda file: file.name), fraction)
    return _described(corpus, f"standard library of Python {platform.python_version()}, {len(paths)} files")


def _load_text(source: str, files: Sequence[DataFile], fraction: float) -> Corpus:
    """The files that match a glob, in the order of their names."""
    total, usable = sum(file.size_bytes for file in files), usable_bytes(torch.device("cpu"), None)
    if total > usable:
        raise CorpusError(
            f"data.source {source!r}: {total / 1e9:,.1f} GB of text here, and {usable / 1e9:,.1f} GB of memory are "
            "free; a tokens:FILE stays on the disk"
        )
    if len(files) == 1:
        return _described(_split_blocks(_read(files), fraction), str(files[0].path))
    return _described(_split_files(files, fraction), f"{source}, {len(files)} files")


def _described(corpus: Corpus, what: str) -> Corpus:
    sizes = f"{len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out"
    return replace(corpus, about=f"{what}: {sizes}")


def _hash_fraction(key: str) -> float:
    """A number in [0, 1) that depends on ``key`` alone, on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[:8], "big") / 2**64


def _split_files(files: Sequence[_Readable], fraction: float) -> Corpus:
    """Split by whole files, so that no held-out text has its other half in the training data; ``files``: by name."""
    is_held_out = [file.size_bytes > 0 and _hash_fraction(file.name) < fraction for file in files]
    held_out = [file for file, is_out in zip(files, is_held_out, strict=True) if is_out]
    if not 0 < sum(file.size_bytes for file in held_out) < sum(file.size_bytes for file in files) / 2:
        # Too few files, or sizes too different, to hold out a fair share of whole files.
        return _split_blocks(_read(files), fraction)
    train = [file for file, is_out in zip(files, is_held_out, strict=True) if not is_out]
    ends = np.cumsum([file.size_bytes + 1 for file in held_out])
    named = tuple(zip((file.name for file in held_out), ends.tolist(), strict=True))
    return replace(_text_corpus(_read(train), _read(held_out)), files=named)


def _split_blocks(text: npt.NDArray[np.uint8], fraction: float) -> Corpus:
    """Hold out blocks of 64 KiB, at least one; in a small text smaller blocks, so that there are enough to choose
    from."""
    size = max(1024, min(_BLOCK_BYTES, len(text) // _MIN_BLOCKS // 1024 * 1024))
    draws = np.array([_hash_fraction(f"block {number}") for number in range(-(-len(text) // size))])
    chosen = (draws < fraction) | (draws == draws.min(initial=1.0))
    mask = np.repeat(chosen, size)[: len(text)]
    return _text_corpus(text[~mask], text[mask])


def _text_corpus(train: npt.NDArray[np.uint8], held_out: npt.NDArray[np.uint8]) -> Corpus:
    digest = hashlib.sha256(f"{len(train)} {len(held_out)} ".encode())
    digest.update(train.data)
    digest.update(held_out.data)
    return Corpus(train, held_out, digest.digest(), "")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror}); fix it or leave it out") from error


def _read(files: Sequence[_Readable]) -> npt.NDArray[np.uint8]:
    """The files end to end, a separator after each, in one array without a second copy."""
    text = np.full(sum(file.size_bytes + 1 for file in files), SEPARATOR, dtype=np.uint8)
    position = 0
    for one in files:
        size, got = one.size_bytes, 0
        try:
            with one.open() as file:
                view = text[position : position + size].data
                while got < size and (count := file.readinto(view[got:])):
                    got += count
        except OSError as error:
            raise CorpusError(f"{one.path}: cannot be read ({error.strerror}); fix it or leave it out") from error
        if got != size:
            raise CorpusError(f"{one.path}: {got} bytes, just now {size}; stop what writes to it and try again")
        position += size + 1
    return text


def _load_tokens(file: DataFile, vocab: int, fraction: float) -> Corpus:
    """A memory-mapped file of little-endian token ids, read through once to check and hash it."""
    path, tokens = file.path, _map_tokens(file)
    digest = hashlib.sha256()
    for start in range(0, len(tokens), _CHECK_TOKENS):
        piece = np.ascontiguousarray(tokens[start : start + _CHECK_TOKENS])
        digest.update(piece.data)
        if int(piece.max()) >= vocab:
            where = start + int(np.argmax(piece >= vocab))
            raise CorpusError(
                f"{path}: token {where} is {int(tokens[where])}, but recipe.settings.vocab is {vocab}; "
                f"set it to the tokenizer's size or tokenize again"
            )
    train = len(tokens) - int(np.ceil(len(tokens) * fraction))
    about = f"{path}: {train:,} tokens to train on, {len(tokens) - train:,} held out, {tokens.nbytes:,} bytes"
    return Corpus(tokens[:train], tokens[train:], digest.digest(), about)


def _map_tokens(file: DataFile) -> Tokens:
    """``(n,)`` uint16 or uint32 on disk, n > 0. Raises ``CorpusError``."""
    wanted = "expected .u16, .u32 (little-endian token ids, nothing else) or .npy (1-D uint16 or uint32)"
    path, size = file.path, file.size_bytes
    if path.suffix not in (*_TOKEN_TYPES, ".npy"):
        raise CorpusError(f"{path}: {wanted}, not {path.suffix or 'a file without suffix'}")
    if size == 0:
        raise CorpusError(f"{path}: empty; tokenize again, or copy the file again")
    try:
        with file.open() as opened:
            if path.suffix == ".npy":
                shape, dtype = _array_header(opened)
                if len(shape) != 1 or dtype.str not in _TOKEN_TYPES.values() or not shape[0]:
                    raise CorpusError(f"{path}: {wanted}, not {dtype.str} of shape {shape}")
                return np.memmap(opened, dtype=dtype, mode="r", offset=opened.tell(), shape=shape)
            dtype = np.dtype(_TOKEN_TYPES[path.suffix])
            if size % dtype.itemsize:
                raise CorpusError(
                    f"{path}: {size} bytes do not divide into tokens of {dtype.itemsize}; the file was cut off "
                    f"or is of another type: copy it again or rename it"
                )
            return np.memmap(opened, dtype=dtype, mode="r")
    except CorpusError:
        raise
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be opened ({error}); {wanted}") from error


def _array_header(file: FileIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the array in a ``.npy`` file; its values follow. Raises ``ValueError``."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"version {version} of the format is not for plain arrays")
    shape, _, dtype = read(file)
    return shape, dtype
