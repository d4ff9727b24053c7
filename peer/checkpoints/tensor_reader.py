"""Reader of single tensors of a checkpoint, for peers that hold or serve parts of a model."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict

import torch
from torch import Tensor

from shoal.peer.checkpoints.manifest import MANIFEST, Manifest, read_file
from shoal.peer.checkpoints.source import CheckpointSource, FolderSource, refusal
from shoal.peer.checkpoints.tensors import parse_file
from shoal.swarm.errors import StateFileError

_FILES_KEPT = 2
"""Files read last that stay in memory: tensors are requested in the order of the files."""

_MAX_HEADER_BYTES = 2**27


class CheckpointTensors:
    """Reads single tensors of the checkpoint with that ``manifest``. For any thread; methods block."""

    def __init__(self, source: CheckpointSource, manifest: Manifest) -> None:
        self.source = source
        self.manifest = manifest
        self._specs = {spec.name: spec for spec in manifest.layout}
        self._read: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        self._where: dict[str, str] = {}
        self._unseen = [*manifest.names("anchor"), *manifest.names("outer")]
        self._lock = threading.Lock()

    def rows(self, name: str, count: int) -> Tensor:
        """The anchor's tensor of that name and the outer optimizer's after it: ``(count, elements) float32``.

        Each file that is read is checked by the manifest's digest. Raises ``StateFileError`` naming tensor and file."""
        spec = self._specs.get(name)
        if spec is None:
            raise refusal(self.source.place(MANIFEST), "layout", f"also the tensor {name!r}", "none")
        if count > 1 + self.manifest.outer_vectors:
            outer = self.manifest.outer_vectors
            raise refusal(self.source.place(MANIFEST), "outer_vectors", f"at least {count - 1}", str(outer))
        rows = torch.empty(0)
        with self._lock:
            for at, key in enumerate([name, *(f"{number}.{name}" for number in range(count - 1))]):
                try:
                    row = self._tensor("outer" if at else "anchor", key, spec.shape).reshape(-1)
                except StateFileError as error:
                    raise StateFileError(f"tensor {key!r} cannot be read: {error}") from error
                if at == 0:  # there is a tensor of that size, whatever the manifest may claim
                    rows = torch.empty(count, spec.elements)
                rows[at] = row
        return rows

    def _tensor(self, kind: str, key: str, shape: tuple[int, ...]) -> Tensor:
        file = self._file_of(kind, key)
        if file not in self._read:
            place = self.source.place(file)
            self._read[file] = parse_file(read_file(self.source, file, self.manifest.files[file]), place)
            if len(self._read) > _FILES_KEPT:
                self._read.popitem(last=False)
        self._read.move_to_end(file)
        tensor = self._read[file].get(key)
        if tensor is None or tensor.shape != shape or tensor.dtype != torch.float32:
            found = "none" if tensor is None else f"{tensor.dtype} of {tuple(tensor.shape)}"
            raise refusal(self.source.place(file), f"tensor {key!r}", f"torch.float32 of shape {shape}", found)
        return tensor

    def _file_of(self, kind: str, key: str) -> str:
        """The file with that tensor; files whose names are not known yet are searched one after the other."""
        place = f"{kind} {key}"
        for file in [one for one in self._unseen if one.startswith(kind)]:
            if place in self._where:
                break
            self._where.update({f"{kind} {one}": file for one in self._names_in(file)})
            self._unseen.remove(file)
        if place not in self._where:
            raise refusal(self.source.place(MANIFEST), "files", f"one with the tensor {key!r}", "none")
        return self._where[place]

    def _names_in(self, file: str) -> list[str]:
        """Names of the tensors in a file, from its header where that can be read alone.

        An unchecked header only tells where to look."""
        if isinstance(self.source, FolderSource):
            size = int.from_bytes(self.source.read(file, 8)[:8], "little")
            header = self.source.read(file, 8 + min(size, _MAX_HEADER_BYTES))[8 : 8 + size]
            try:
                named = json.loads(header)
            except (ValueError, RecursionError):
                named = None
            if isinstance(named, dict):
                return [str(name) for name in named]
        return list(parse_file(read_file(self.source, file, self.manifest.files[file]), self.source.place(file)))
