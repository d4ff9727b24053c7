"""One checkpoint: what is written into its folder, and what comes out of it after every check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.peer.checkpoints.local_state import LocalStateSnapshot, parse_local_state
from shoal.peer.checkpoints.manifest import (
    MANIFEST,
    OWN_FILE,
    VERDICTS_FILE,
    CheckpointAbout,
    Manifest,
    read_file,
    read_manifest,
    shard_name,
)
from shoal.peer.checkpoints.source import CheckpointSource, refusal
from shoal.peer.checkpoints.tensors import file_pieces, fill, parse_file, shards, vectors
from shoal.peer.regular_file import check_memory
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import StateFileError, WireError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import pack_verdict
from shoal.swarm.protocol.verdict_chain import unpack_verdicts as unpack_each_verdict

MAX_VERDICTS = 64
"""Newest verdicts in a checkpoint: in a large swarm one is as large as a shard of a small model."""


@dataclass(frozen=True)
class CheckpointContents:
    """The content of a checkpoint that is to be written.

    ``own``: the peer's own state, None in a copy for others; ``verdicts``: up to that of the checkpoint's round, oldest
    first."""

    about: CheckpointAbout
    state: AnchorState
    own: LocalStateSnapshot | None
    verdicts: tuple[Verdict, ...]

    def files(self) -> Iterator[tuple[str, Iterator[bytes | memoryview]]]:
        """Yield name and content, in pieces, of each file but the manifest."""
        for kind, named in zip(("anchor", "outer"), vectors(self.state.values, self.about.layout), strict=True):
            cut = shards(named.items())
            for index, tensors in enumerate(cut):
                yield shard_name(kind, index, len(cut)), file_pieces(tensors)
        if self.own is not None:
            self.own.wait()
            yield OWN_FILE, file_pieces(self.own.file())
        yield VERDICTS_FILE, iter([pack_verdicts(self.verdicts)])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read, after every check but that of its verdicts.

    ``own``: the peer's own tree (``local_state.local_state_tree``), None where it is not there; ``verdicts``: the
    content of the verdicts' files: one of the run or of the stage, or one of each stage of a whole model."""

    manifest: Manifest
    state: AnchorState
    own: dict[str, Any] | None
    verdicts: tuple[bytes, ...]


def read_checkpoint(source: CheckpointSource, run_hash: bytes | None = None) -> Checkpoint:
    """Read a checkpoint and check format, signature, run, sizes, digests, layout and state digest.

    The chain of its verdicts is not checked. A copy may lack the file of the peer's own state. Raises
    ``StateFileError`` naming file, field and what was expected."""
    manifest = read_manifest(source, run_hash)
    check_sizes(source, manifest)
    values = torch.empty(1 + manifest.outer_vectors, manifest.elements)
    anchor, outer = vectors(values, manifest.layout)
    fill(anchor, _tensors(source, manifest, "anchor"))
    fill(outer, _tensors(source, manifest, "outer"))
    state = AnchorState.of(values, manifest.anchor_version)
    if state.digest.hex() != manifest.state_digest:
        raise refusal(source.place(MANIFEST), "state_digest", state.digest.hex(), manifest.state_digest)
    own = None
    if OWN_FILE in manifest.files and source.has(OWN_FILE):
        own = parse_local_state(read_file(source, OWN_FILE, manifest.files[OWN_FILE]), source.place(OWN_FILE))
    return Checkpoint(
        manifest, state, own, tuple(_verdict_bytes(source, manifest, name) for name in manifest.verdicts_files)
    )


def check_sizes(source: CheckpointSource, manifest: Manifest) -> None:
    """Check sizes on disk and free memory against the manifest, before any memory is taken. Raises
    ``StateFileError``."""
    for name in (*manifest.names("anchor"), *manifest.names("outer")):
        claimed_bytes, found_bytes = manifest.files[name][0], source.size_bytes(name)
        if claimed_bytes != found_bytes:
            raise refusal(source.place(name), "size", f"{claimed_bytes} bytes", f"{found_bytes} bytes")
    try:
        check_memory(4 * (1 + manifest.outer_vectors) * manifest.elements)
    except OSError as error:
        raise StateFileError(f"{source.place(MANIFEST)}: layout: {error}") from error


def read_verdicts(source: CheckpointSource, manifest: Manifest, stage: int = 0) -> tuple[Verdict, ...]:
    """Read the checkpoint's verdicts, oldest first, without checking them; ``stage``: which stage's, in a checkpoint of
    a whole pipeline. Raises ``StateFileError``."""
    name = manifest.verdicts_files[stage]
    return unpack_verdicts(_verdict_bytes(source, manifest, name), source.place(name))


def pack_verdicts(verdicts: tuple[Verdict, ...]) -> bytes:
    """Encode the verdicts of a checkpoint, the oldest first."""
    return b"".join(map(pack_verdict, verdicts))


def unpack_verdicts(data: bytes, place: str) -> tuple[Verdict, ...]:
    """Decode what ``pack_verdicts`` wrote. Raises ``StateFileError``."""
    try:
        found = list(unpack_each_verdict(data))
    except WireError as error:
        raise refusal(place, "its content", "verdicts", str(error)) from error
    if (found[-1][1] if found else 0) != len(data):
        raise refusal(place, "its content", "verdicts", "an incomplete one")
    return tuple(verdict for verdict, _ in found)


def _verdict_bytes(source: CheckpointSource, manifest: Manifest, name: str) -> bytes:
    if name not in manifest.files:
        raise refusal(source.place(MANIFEST), "files", f"also {name}", "none")
    return read_file(source, name, manifest.files[name])


def _tensors(source: CheckpointSource, manifest: Manifest, kind: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the files of that kind with their tensors, one after the other, so that only one is in memory."""
    for name in manifest.names(kind):
        place = source.place(name)
        yield place, parse_file(read_file(source, name, manifest.files[name]), place)
