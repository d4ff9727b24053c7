"""The checkpoint that a run starts from, on this machine: found, checked against the run file, and read by
tensor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from shoal.peer.checkpoints.encryption import opened
from shoal.peer.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from shoal.peer.checkpoints.source import FolderSource, Source, refuse
from shoal.peer.checkpoints.store import checkpoints_in
from shoal.peer.checkpoints.tensor_reader import CheckpointTensors
from shoal.peer.training.anchor import bytes_of
from shoal.swarm.errors import SealedForOthers, StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.start_section import StartSection, tensor_hash

log = logging.getLogger(__name__)


class StartFiles:
    """The files of the checkpoint that ``start`` names. For any thread; its methods block."""

    def __init__(self, tensors: CheckpointTensors, start: StartSection) -> None:
        self._tensors = tensors
        self._start = start

    @classmethod
    def find(cls, folder: Path, start: StartSection, identity: Identity | None) -> StartFiles:
        """In this folder, or anywhere below it. Raises ``StateFileError`` where it is not, or has other tensors than
        the run file says."""
        others: list[str] = []
        for source, manifest in whole_checkpoints(folder, identity, others):
            if (manifest.round, manifest.state_digest) != (start.round, start.state):
                others.append(f"{source.place(MANIFEST)} is round {manifest.round} of {run_of(manifest)}")
                continue
            difference = start.difference(manifest.layout, whole=True)
            if difference:
                raise refuse(source.place(MANIFEST), "layout", f"that of the run's [start] ({difference})", "another")
            return cls(CheckpointTensors(source, manifest), start)
        found = f"; {others[0]}" if others else ""
        raise StateFileError(
            f"{folder}: the checkpoint that this run starts from, {start.source} with the state {start.state[:8]}, is "
            f"not here{found}"
        )

    def rows(self, name: str, count: int) -> Tensor:
        """The values of a tensor, ``(count, elements) float32``. Raises ``StateFileError`` naming tensor and file
        unless they are those of the run file."""
        rows, expected = self._tensors.rows(name, count), self._start.tensors[name]
        found = hash_of(expected.shape, rows)
        if found != expected.sha256:
            place = self._tensors.source.place(MANIFEST)
            raise refuse(place, f"SHA-256 of the tensor {name!r}", f"{expected.sha256}, as the run file says", found)
        return rows


def hash_of(shape: tuple[int, ...], rows: Tensor) -> str:
    """``rows``: ``(count, elements) float32``."""
    return tensor_hash(shape, len(rows), [bytes_of(row) for row in rows])


def run_of(manifest: Manifest) -> str:
    """As its folder is called."""
    return f"{manifest.run}-{manifest.run_hash[:8]}"


def whole_checkpoints(folder: Path, identity: Identity | None, refused: list[str]) -> Iterator[tuple[Source, Manifest]]:
    """Those in the folder and below, of whole models; ``refused`` gets why others are none."""
    for place in checkpoints_in(folder):
        try:
            source = opened(FolderSource(place), identity)
            manifest = read_manifest(source)
        except SealedForOthers:
            raise
        except StateFileError as error:
            log.warning("a checkpoint cannot be used: %s", error)
            refused.append(str(error))
            continue
        if manifest.stage is not None:
            refused.append(f"{place} is of one stage: put all together first, with `shoal checkpoint`")
            continue
        yield source, manifest
