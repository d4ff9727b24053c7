"""Models as transformers saves them, in a folder or at a URL: ``config.json`` and safetensors, in one file or several.

Nothing of them is trusted: sizes are bounded, and who starts from one checks each tensor by the run file's digests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.source import CheckpointSource, FileContent, FolderSource, refusal
from shoal.peer.checkpoints.tensor_file import TensorEntry, read_entries
from shoal.peer.checkpoints.tensors import PIECE_BYTES
from shoal.peer.training.anchor import bytes_of
from shoal.swarm.errors import RemoteStorageError, StateFileError

CONFIG = "config.json"
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_MAX_CONFIG_BYTES, _MAX_INDEX_BYTES, _MAX_FILES = 2**20, 2**25, 4096
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\.safetensors")
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_PIECE = PIECE_BYTES // 8


def is_url(place: Path | str) -> bool:
    """Return whether a place is a URL and no folder."""
    return "://" in str(place)


class PretrainedModel:
    """Tensors of a saved model, read one at a time. For any thread; methods block.

    ``tensors``: their files and places in them, by name."""

    def __init__(self, source: CheckpointSource, tensors: dict[str, tuple[str, TensorEntry]]) -> None:
        self._source = source
        self.tensors = tensors

    @classmethod
    def open(cls, where: Path | str) -> PretrainedModel | None:
        """Open a folder or a URL, and read where its tensors are; None for a folder without such a model.

        Raises ``StateFileError``."""
        source = _UrlSource(RemoteStore.open(str(where))) if is_url(where) else FolderSource(Path(where))
        if source.has(_INDEX):
            files = _files_of(source)
        elif source.has(_WHOLE):
            files = [_WHOLE]
        elif is_url(where):
            raise refusal(source.place(_WHOLE), "file", f"this one or {_INDEX}", "none")
        else:
            return None
        tensors = {}
        for name in files:
            source.size_bytes(name)  # refuses files that are mostly holes
            with source.open(name) as content:
                tensors.update({one.name: (name, one) for one in read_entries(content, source.place(name))})
        return cls(source, tensors)

    @property
    def place(self) -> str:
        """Name of the model in messages."""
        return self._source.place(CONFIG).removesuffix(CONFIG).rstrip("/\\")

    def config(self) -> dict[str, Any]:
        """Content of its ``config.json``. Raises ``StateFileError``."""
        return _json_of(self._source, CONFIG, _MAX_CONFIG_BYTES)

    def rows(self, name: str, count: int) -> Tensor:
        """The values of a tensor, ``(1, elements) float32``; ``count`` 1, as there is no state of an outer optimizer.

        Raises ``StateFileError`` naming tensor and file."""
        if name not in self.tensors:
            raise refusal(self.place, "tensors", f"also {name!r}", "none")
        if count != 1:
            raise refusal(self.place, "tensors", "an outer optimizer's state", "a model alone")
        file, entry = self.tensors[name]
        if entry.dtype not in _TYPES:
            raise refusal(self._source.place(file), f"tensor {name!r}", "floating-point numbers", str(entry.dtype))
        values = torch.empty(1, entry.elements)
        with self._source.open(file) as content:
            for start in range(0, entry.elements, _PIECE):
                part = values[0, start : start + _PIECE]
                read = torch.empty(part.numel(), dtype=entry.dtype)
                content.read_into(entry.start + start * entry.dtype.itemsize, bytes_of(read))
                part.copy_(read)
        return values


def _files_of(source: CheckpointSource) -> list[str]:
    """Names of the files that an index lists. Raises ``StateFileError``."""
    listed = _json_of(source, _INDEX, _MAX_INDEX_BYTES).get("weight_map")
    names = set(listed.values()) if isinstance(listed, dict) else set()
    if not 0 < len(names) <= _MAX_FILES or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in names):
        raise refusal(source.place(_INDEX), "weight_map", f"names of up to {_MAX_FILES} safetensors files", "another")
    return sorted(names)


def _json_of(source: CheckpointSource, name: str, limit_bytes: int) -> dict[str, Any]:
    text = source.read(name, limit_bytes)
    if len(text) > limit_bytes:
        raise refusal(source.place(name), "size", f"up to {limit_bytes} bytes", "more")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(source.place(name), "its content", "JSON", str(error)[:100]) from error
    if not isinstance(found, dict):
        raise refusal(source.place(name), "its content", "a table", type(found).__name__)
    return found


@dataclass(frozen=True)
class _UrlSource:
    """Files at a URL (a ``CheckpointSource``)."""

    store: RemoteStore

    def place(self, name: str) -> str:
        return self.store.shown(name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        try:
            return self.store.read(name, 0, limit_bytes + 1)
        except (OSError, RemoteStorageError) as error:
            raise StateFileError(f"{self.place(name)}: cannot be read: {error}") from error

    @contextmanager
    def open(self, name: str) -> Iterator[FileContent]:
        yield _UrlFile(self.store, name, self.size_bytes(name))

    def size_bytes(self, name: str) -> int:
        try:
            return self.store.size(name)
        except (OSError, RemoteStorageError) as error:
            raise StateFileError(f"{self.place(name)}: cannot be read: {error}") from error

    def has(self, name: str) -> bool:
        try:
            return self.store.size(name) > 0
        except FileNotFoundError:
            return False
        except RemoteStorageError as error:
            raise StateFileError(str(error)) from error


@dataclass(frozen=True)
class _UrlFile:
    """A file at a URL (a ``FileContent``)."""

    store: RemoteStore
    name: str
    size_bytes: int

    def read_into(self, at: int, out: memoryview) -> None:
        try:
            found = self.store.read(self.name, at, at + out.nbytes)
        except (OSError, RemoteStorageError) as error:
            raise StateFileError(f"{self.store.shown(self.name)}: cannot be read: {error}") from error
        if len(found) != out.nbytes:
            wanted = f"{out.nbytes} bytes from {at} on"
            raise refusal(self.store.shown(self.name), "content", wanted, f"{len(found)} bytes")
        out[:] = found
