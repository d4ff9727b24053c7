"""Reader of single tensors of a checkpoint, for peers that hold or serve parts of a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from shoal.peer.checkpoints.manifest import MANIFEST, Manifest
from shoal.peer.checkpoints.source import CheckpointSource, FileContent, refusal
from shoal.peer.checkpoints.tensor_file import TensorEntry, check_size, checked_stream, read_entries
from shoal.peer.checkpoints.tensors import PIECE_BYTES
from shoal.peer.training.anchor import bytes_of
from shoal.swarm.errors import StateFileError

_PIECE = PIECE_BYTES // 4


TensorPlaces = dict[tuple[str, str], tuple[str, TensorEntry]]
"""File and place of each tensor, by kind (``anchor`` or ``outer``) and by name in the file."""


class CheckpointTensors:
    """Reads single tensors of the checkpoint with that ``manifest``. For any thread; methods block.

    Each file is read through and checked by the manifest's digest before the first tensor is read from it; none of it
    is kept."""

    def __init__(self, source: CheckpointSource, manifest: Manifest, places: TensorPlaces | None = None) -> None:
        """``places``: of all tensors, where the files have been checked already."""
        self.source = source
        self.manifest = manifest
        self._specs = {spec.name: spec for spec in manifest.layout}
        self._where: dict[tuple[str, str], str] = {}
        self._unseen = [*manifest.names("anchor"), *manifest.names("outer")]
        self._checked: dict[str, dict[str, TensorEntry]] = {}
        for (kind, key), (file, entry) in (places or {}).items():
            self._where[kind, key] = file
            self._checked.setdefault(file, {})[key] = entry
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        """Name of the checkpoint in messages."""
        return self.source.place(MANIFEST)

    def rows(self, name: str, count: int) -> Tensor:
        """The anchor's tensor of that name and the outer optimizer's after it: ``(count, elements) float32``.

        Raises ``StateFileError`` naming tensor and file."""
        if name not in self._specs:
            raise refusal(self.source.place(MANIFEST), "layout", f"also the tensor {name!r}", "none")
        if count > 1 + self.manifest.outer_vectors:
            outer = self.manifest.outer_vectors
            raise refusal(self.source.place(MANIFEST), "outer_vectors", f"at least {count - 1}", str(outer))
        with ExitStack() as files:
            rows = self._open_rows(name, count, files)
            values = torch.empty(count, self._specs[name].elements)  # there are so many, whatever the manifest claims
            for start in range(0, values.shape[1], _PIECE):
                for (content, entry), row in zip(rows, values[:, start : start + _PIECE], strict=True):
                    content.read_into(entry.start + 4 * start, bytes_of(row))
        return values

    def pieces(self, count: int) -> Iterator[Tensor]:
        """Yield the values of the anchor, and of the outer optimizer's vectors after it, in the order of the layout.

        In pieces, ``(count, k) float32``, each to be used before the next one is requested. Raises
        ``StateFileError``."""
        buffer = torch.empty(count, _PIECE)
        for spec in self.manifest.layout:
            with ExitStack() as files:
                rows = self._open_rows(spec.name, count, files)
                for start in range(0, spec.elements, _PIECE):
                    piece = buffer[:, : spec.elements - start]
                    for (content, entry), row in zip(rows, piece, strict=True):
                        content.read_into(entry.start + 4 * start, bytes_of(row))
                    yield piece

    def _open_rows(self, name: str, count: int, files: ExitStack) -> list[tuple[FileContent, TensorEntry]]:
        """Open the files with a tensor of the anchor and of the outer optimizer's vectors, until ``files`` ends."""
        keys = [("anchor", name), *(("outer", f"{number}.{name}") for number in range(count - 1))]
        found = [self._find(kind, key, name) for kind, key in keys]
        return [(files.enter_context(self.source.open(file)), entry) for file, entry in found]

    def _find(self, kind: str, key: str, name: str) -> tuple[str, TensorEntry]:
        """The file of a tensor, which has been checked, and the tensor's place in it."""
        try:
            with self._lock:
                file = self._file_of(kind, key)
                if file not in self._checked:
                    with checked_stream(self.source, file, self.manifest.files[file]) as stream:
                        entries = read_entries(stream, stream.place)
                    self._checked[file] = {one.name: one for one in entries}
                entry = self._checked[file].get(key)
            shape, expected = self._specs[name].shape, f"torch.float32 of shape {self._specs[name].shape}"
            if entry is None or (entry.dtype, entry.shape) != (torch.float32, shape):
                found = "none" if entry is None else f"{entry.dtype} of {entry.shape}"
                raise refusal(self.source.place(file), f"tensor {key!r}", expected, found)
        except StateFileError as error:
            raise StateFileError(f"tensor {key!r} cannot be read: {error}") from error
        return file, entry

    def _file_of(self, kind: str, key: str) -> str:
        """The file with that tensor, by the files' headers, which are not checked yet and only tell where to look."""
        for file in [one for one in self._unseen if one.startswith(kind)]:
            if (kind, key) in self._where:
                break
            with self.source.open(file) as content:
                check_size(self.source.place(file), self.manifest.files[file][0], content.size_bytes)
                entries = read_entries(content, self.source.place(file))
            self._where.update({(kind, one.name): file for one in entries})
            self._unseen.remove(file)
        if (kind, key) not in self._where:
            raise refusal(self.source.place(MANIFEST), "files", f"one with the tensor {key!r}", "none")
        return self._where[kind, key]
