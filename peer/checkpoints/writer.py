"""Writer of one checkpoint into a folder: files, each flushed to the disk, and the signed manifest last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from shoal.peer.checkpoints.encryption import ENVELOPE, Sealing
from shoal.peer.checkpoints.manifest import MANIFEST, CheckpointAbout, FileEntry, Manifest
from shoal.peer.checkpoints.state_files import PlainStateFiles, SealedStateFiles, StateFiles
from shoal.swarm.durable import sync, sync_folder
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.types import TensorSpec

Files = Iterable[tuple[str, Iterable[bytes | memoryview]]]
"""Name and content, in pieces, of each file but the manifest."""


class CheckpointWriter:
    """Writer of one checkpoint into an empty folder. Methods block, and raise ``OSError``."""

    def __init__(self, folder: Path, identity: Identity, sealed_for: Iterable[bytes] | None = None) -> None:
        """``identity`` signs. ``sealed_for``: None writes plain files; otherwise they are sealed for the identity and
        for these raw Ed25519 public keys."""
        self._folder = folder
        self._identity = identity
        self._sealing = None if sealed_for is None else Sealing({identity.public_key, *sealed_for})
        self._entries: dict[str, FileEntry] = {}

    def add(self, files: Files) -> None:
        for name, pieces in files:
            self._entries[name] = self._write(name, pieces)

    def state_files(self, values: Tensor, layout: Sequence[TensorSpec]) -> StateFiles:
        """The files of a state, (1 + slots, n) float32, for ``add_state``."""
        if self._sealing is None:
            return PlainStateFiles(self._folder, values, layout)
        return SealedStateFiles(self._write, values, layout)

    def add_state(self, files: StateFiles) -> None:
        self._entries.update(files.write())

    def finish(self, about: CheckpointAbout) -> Manifest:
        """Sign the files that were added and write the manifest, which completes the checkpoint."""
        manifest = Manifest.sign(about, self._entries, self._identity)
        self._write(MANIFEST, [manifest.file_bytes])
        if self._sealing is not None:
            self._write_file(ENVELOPE, [self._sealing.envelope()])
        sync_folder(self._folder)
        return manifest

    def _write(self, name: str, pieces: Iterable[bytes | memoryview]) -> FileEntry:
        if self._sealing is None:
            return self._write_file(name, pieces)
        return self._sealing.write(name, pieces, self._write_file)

    def _write_file(self, name: str, pieces: Iterable[bytes | memoryview]) -> FileEntry:
        digest, size_bytes = hashlib.sha256(), 0
        with (self._folder / name).open("xb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size_bytes += len(piece)
            sync(file)
        return size_bytes, digest.hexdigest()
