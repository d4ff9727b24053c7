"""A checkpoint's files, written into a folder one by one, each flushed to the disk, the signed manifest last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from shoal.peer.checkpoints.manifest import MANIFEST, About, FileEntry, Manifest
from shoal.peer.checkpoints.sealed_folder import ENVELOPE, Sealing
from shoal.swarm.durable import sync_folder
from shoal.swarm.identity import Identity

WRITING = ".new-"
"""What the names of folders begin with that are not whole yet."""

Files = Iterable[tuple[str, Iterable[bytes | memoryview]]]
"""Name and content in pieces of each file but the manifest."""


class CheckpointWriter:
    """Signs as ``identity``. Its methods block: call them in worker threads."""

    def __init__(self, identity: Identity, sealed_for: Iterable[bytes] | None = None) -> None:
        """``sealed_for``: checkpoints are written sealed, for the identity and these raw Ed25519 public keys."""
        self._identity = identity
        self._readers = None if sealed_for is None else {identity.public_key, *sealed_for}

    def fill(self, folder: Path, files: Files, about: Callable[[], About]) -> Manifest:
        """Write all into an empty folder; ``about`` is asked once the files are there. Raises ``OSError``."""
        sealing = None if self._readers is None else Sealing(self._readers)
        entries = {name: self._write_content(folder, name, pieces, sealing) for name, pieces in files}
        manifest = Manifest.sign(about(), entries, self._identity)
        self._write_manifest(folder, manifest, sealing)
        return manifest

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
