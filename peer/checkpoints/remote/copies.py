"""Copies of checkpoints at a URL: their files, search, and the rounds and stages of which there are copies.

A copy is a checkpoint's folder, plain or sealed: the file that is uploaded last, and those that it lists."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.peer.checkpoints.encryption import ENVELOPE, SUFFIX, read_envelope
from shoal.peer.checkpoints.manifest import MANIFEST, OWN_FILES, FileEntry, read_manifest
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.source import CheckpointSource
from shoal.peer.checkpoints.store import round_in
from shoal.peer.regular_file import open_regular

LAST_FILES = (MANIFEST, ENVELOPE)
"""The file that is uploaded last and lists the others: of a plain checkpoint, of a sealed one."""

_DEEPEST = 4  # URL / run / peer / stage / round

_SAID = 4
"""Rounds that a message names of each stage."""

_STAGE = re.compile(r"stage-([0-9]{5})")


@dataclass(frozen=True)
class CopyListing:
    """Files of a checkpoint's folder: bytes and SHA-256 by name.

    ``last``: the file that lists the others, itself in ``files``; ``private``: the files of the peer's own state."""

    last: str
    files: Mapping[str, FileEntry]
    private: tuple[str, ...]

    @property
    def is_sealed(self) -> bool:
        return self.last == ENVELOPE

    def to_copy(self) -> list[str]:
        """Files to upload, in this order. The peer's own state is uploaded only if it is sealed."""
        listed = [name for name in sorted(self.files) if name != self.last]
        return [name for name in listed if self.is_sealed or name not in self.private] + [self.last]


def read_listing(source: CheckpointSource) -> CopyListing:
    """List the files of a checkpoint's folder. Raises ``StateFileError`` where it is damaged."""
    files: dict[str, FileEntry]
    if source.has(ENVELOPE):
        last, private = ENVELOPE, tuple(name + SUFFIX for name in OWN_FILES)
        envelope = read_envelope(source)
        files, data = dict(envelope.files), envelope.file_bytes
    else:
        last, private = MANIFEST, OWN_FILES
        manifest = read_manifest(source)
        files, data = dict(manifest.files), manifest.file_bytes
    return CopyListing(last, {**files, last: (len(data), hashlib.sha256(data).hexdigest())}, private)


def entry_of(path: Path) -> FileEntry:
    """Bytes and SHA-256 of a local file. Raises ``OSError``."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return file.tell(), digest


@dataclass(frozen=True)
class RemoteCopy:
    """A checkpoint's folder at a URL.

    ``last``: the file that lists the others, None in an unfinished copy; ``stage``: of a pipeline, by the name of the
    folder above."""

    path: str
    run: str
    peer: str
    round: int
    size_bytes: int
    last: str | None
    stage: int | None = None

    @property
    def is_sealed(self) -> bool:
        return self.last == ENVELOPE


def find_copies(remote: RemoteStore) -> list[RemoteCopy]:
    """Find all copies below a URL of a run, of a peer, of a stage, or of all of them; newest round first.

    Raises ``RemoteStorageError``."""
    found = _below(remote, "", _DEEPEST)
    return sorted(found, key=lambda copy: (-copy.round, copy.run, copy.peer, copy.stage or 0))


def _below(remote: RemoteStore, path: str, depth: int) -> list[RemoteCopy]:
    found = []
    for name in remote.folders(path):
        inside = f"{path}/{name}" if path else name
        number = round_in(name)
        if number is not None:
            sizes = remote.sizes(inside)
            last = next((one for one in reversed(LAST_FILES) if one in sizes), None)
            above = remote.shown(inside).split("/")[:-1]
            stage = _STAGE.fullmatch(above[-1])
            run, peer = (above[:-1] if stage else above)[-2:]
            size_bytes, in_stage = sum(sizes.values()), int(stage.group(1)) if stage else None
            found.append(RemoteCopy(inside, run, peer, number, size_bytes, last, in_stage))
        elif depth > 1:
            found += _below(remote, inside, depth - 1)
    return found


def by_preference(copies: Sequence[RemoteCopy], mine: str) -> list[RemoteCopy]:
    """Newest copies first; of one round the peer's own first."""
    return sorted(copies, key=lambda copy: (-copy.round, copy.peer != mine, copy.peer))


def stages_needed(copies: Sequence[RemoteCopy], mine: str) -> list[int]:
    """The stages that this peer has copied, or all stages if it has copied none."""
    own = {copy.stage for copy in copies if copy.peer == mine}
    return sorted({copy.stage for copy in copies if copy.stage is not None and (not own or copy.stage in own)})


def in_step(copies: Sequence[RemoteCopy]) -> Iterator[int]:
    """Yield the rounds of which every stage has a finished copy, newest first.

    A run can only go on from a version that all its stages have."""
    yield from sorted(set.intersection(*map(set, _rounds(copies).values())), reverse=True)


def say_rounds(copies: Sequence[RemoteCopy]) -> str:
    """Rounds of finished copies, by stage if there are any, for messages."""
    said = []
    for stage, rounds in _rounds(copies).items():
        newest = [str(number) for number in sorted(rounds, reverse=True)]
        more = f" and {len(newest) - _SAID} older" if len(newest) > _SAID else ""
        which = ", ".join(newest[:_SAID]) + more if newest else "none that is finished"
        said.append(which if stage is None else f"stage {stage}: {which}")
    return "; ".join(said)


def _rounds(copies: Sequence[RemoteCopy]) -> dict[int | None, set[int]]:
    """Rounds of finished copies, by stage."""
    stages = sorted({copy.stage for copy in copies}, key=lambda stage: -1 if stage is None else stage)
    return {stage: {copy.round for copy in copies if copy.stage == stage and copy.last is not None} for stage in stages}
