"""A checkpoint's files, written into a folder one by one, each flushed to the disk, the signed manifest last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from shoal.peer.checkpoints.manifest import MANIFEST, About, FileEntry, Manifest
from shoal.peer.checkpoints.sealed_folder import ENVELOPE, Sealing
from shoal.swarm.durable import sync_folder
from shoal.swarm.protocol.identity import Identity

WRITING = ".new-"
"""What the names of folders begin with that are not whole yet."""

Files = Iterable[tuple[str, Iterable[bytes | memoryview]]]
"""Name and content in pieces of each file but the manifest."""


class CheckpointWriter:
    """Signs as ``identity``. Its methods block: call them in worker threads."""

    def __init__(self, identity: Identity, sealed_for: Iterable[bytes] | None = None) -> None:
        """``sealed_for``: checkpoints are written sealed, for the identity and these raw Ed25519 public keys."""
        self.identity = identity
        self._readers = None if sealed_for is None else {identity.public_key, *sealed_for}

    def fill(self, folder: Path, files: Files, about: About) -> Manifest:
        """Write all into an empty folder. Raises ``OSError``."""
        begun = self.begin(folder)
        begun.add(files)
        return begun.finish(about)

    def begin(self, folder: Path) -> BegunCheckpoint:
        """In an empty folder."""
        return BegunCheckpoint(self, folder, None if self._readers is None else Sealing(self._readers))

    def _write_content(
        self, folder: Path, name: str, pieces: Iterable[bytes | memoryview], sealing: Sealing | None
    ) -> FileEntry:
        def write(file_name: str, its_pieces: Iterable[bytes | memoryview]) -> FileEntry:
            return self._write_file(folder / file_name, its_pieces)

        return write(name, pieces) if sealing is None else sealing.write(name, pieces, write)

    def _write_manifest(self, folder: Path, manifest: Manifest, sealing: Sealing | None) -> None:
        self._write_content(folder, MANIFEST, [manifest.file_bytes], sealing)
        if sealing is not None:
            self._write_file(folder / ENVELOPE, [sealing.envelope()])
        sync_folder(folder)

    def _write_file(self, path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
        digest, size_bytes = hashlib.sha256(), 0
        with path.open("xb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size_bytes += len(piece)
            file.flush()
            os.fsync(file.fileno())
        return size_bytes, digest.hexdigest()


class BegunCheckpoint:
    """One that is written piece by piece. Raises ``OSError``."""

    def __init__(self, writer: CheckpointWriter, folder: Path, sealing: Sealing | None) -> None:
        self._writer = writer
        self._folder = folder
        self._sealing = sealing
        self._entries: dict[str, FileEntry] = {}

    def add(self, files: Files) -> None:
        for name, pieces in files:
            self._entries[name] = self._writer._write_content(self._folder, name, pieces, self._sealing)

    def finish(self, about: About) -> Manifest:
        """Sign what was added; the checkpoint is whole then."""
        manifest = Manifest.sign(about, self._entries, self._writer.identity)
        self._writer._write_manifest(self._folder, manifest, self._sealing)
        return manifest
