"""What belongs to a checkpoint's folder, plain or sealed: the file that is written last, and those that it lists."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.peer.checkpoints.manifest import MANIFEST, OWN_FILE, FileEntry, read_manifest
from shoal.peer.checkpoints.sealed_folder import ENVELOPE, SUFFIX, read_envelope
from shoal.peer.checkpoints.source import Source
from shoal.peer.regular_file import open_regular

LAST_FILES = (MANIFEST, ENVELOPE)
_PIECE_BYTES = 2**22
_ROUND = re.compile(r"round-([0-9]{8,19})")


def round_in(folder_name: str) -> int | None:
    """The round in the name of a checkpoint's folder; None for other names."""
    match = _ROUND.fullmatch(folder_name)
    return int(match.group(1)) if match else None


@dataclass(frozen=True)
class Listing:
    """``last``: the file that is written last and lists the others; ``files``: bytes and SHA-256 by name, of ``last``
    too; ``private``: the file of the peer's own."""

    last: str
    files: Mapping[str, FileEntry]
    private: str

    @property
    def is_sealed(self) -> bool:
        return self.last == ENVELOPE

    def to_copy(self) -> list[str]:
        """The files that a copy for elsewhere has, in the order of sending: what is the peer's own only sealed."""
        listed = [name for name in sorted(self.files) if name != self.last]
        return [name for name in listed if self.is_sealed or name != self.private] + [self.last]


def read_listing(source: Source) -> Listing:
    """Of a folder that has one of ``LAST_FILES``. Raises ``StateFileError`` where it is damaged."""
    files: dict[str, FileEntry]
    if source.has(ENVELOPE):
        last, private = ENVELOPE, OWN_FILE + SUFFIX
        envelope = read_envelope(source)
        files, data = dict(envelope.files), envelope.file_bytes
    else:
        last, private = MANIFEST, OWN_FILE
        manifest = read_manifest(source)
        files, data = dict(manifest.files), manifest.file_bytes
    return Listing(last, {**files, last: (len(data), hashlib.sha256(data).hexdigest())}, private)


def entry_of(path: Path) -> FileEntry:
    """Bytes and SHA-256 of a file here. Raises ``OSError``."""
    digest, size_bytes = hashlib.sha256(), 0
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
    return size_bytes, digest.hexdigest()
