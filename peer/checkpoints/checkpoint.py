"""One checkpoint: what is written into its folder, and what comes out of it after every check."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from shoal.peer.checkpoints.local_state import LocalStateContent, SavedLocalState, residual_pieces
from shoal.peer.checkpoints.manifest import (
    MANIFEST,
    OWN_FILE,
    OWN_FILES,
    RESIDUAL_FILE,
    CheckpointAbout,
    Manifest,
    read_file,
    read_manifest,
)
from shoal.peer.checkpoints.source import CheckpointSource, refusal
from shoal.peer.checkpoints.tensor_file import check_size, checked_stream, read_entries
from shoal.peer.checkpoints.tensor_reader import CheckpointTensors, TensorPlaces
from shoal.peer.checkpoints.tensors import PIECE_BYTES
from shoal.peer.regular_file import check_memory
from shoal.peer.training.anchor import AnchorState, GrowingDigest, bytes_of
from shoal.swarm.averaging.outcome import CarriedResidual
from shoal.swarm.errors import StateFileError, WireError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.verdict_chain import pack_verdict
from shoal.swarm.protocol.verdict_chain import unpack_verdicts as unpack_each_verdict

log = logging.getLogger(__name__)

MAX_VERDICTS = 64
"""Newest verdicts in a checkpoint: in a large swarm one is as large as a shard of a small model."""


@dataclass(frozen=True)
class OwnContents:
    """A peer's own state as it goes into a checkpoint, by reference: nothing changes it until it is written."""

    content: LocalStateContent
    carried: CarriedResidual

    def files(self) -> Iterator[tuple[str, Iterator[bytes | memoryview]]]:
        """Yield name and content, in pieces, of each file."""
        yield OWN_FILE, self.content.pieces()
        yield RESIDUAL_FILE, residual_pieces(self.carried)


@dataclass(frozen=True)
class CheckpointContents:
    """The content of a checkpoint that is to be written.

    ``own``: the peer's own state, None in a copy for others; ``verdicts``: up to that of the checkpoint's round, oldest
    first."""

    about: CheckpointAbout
    state: AnchorState
    own: OwnContents | None
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read, after every check but that of its verdicts.

    ``own``: the peer's own state, which has been checked and not read, None where it is not there or was not asked for;
    ``verdicts``: the content of the verdicts' files: one of the run or of the stage, or one of each stage of a whole
    model."""

    manifest: Manifest
    state: AnchorState
    own: SavedLocalState | None
    verdicts: tuple[bytes, ...]


@dataclass(frozen=True)
class CheckedCheckpoint:
    """A checkpoint that passed the checks of ``read_checkpoint``, and of which only the verdicts were kept.

    ``tensors``: reads it again, piece by piece."""

    manifest: Manifest
    verdicts: tuple[bytes, ...]
    tensors: CheckpointTensors


def read_checkpoint(source: CheckpointSource, run_hash: bytes | None = None, *, with_own: bool = True) -> Checkpoint:
    """Read a checkpoint and check format, signature, run, sizes, digests, layout and state digest.

    Anchor and outer optimizer are read straight into the memory of the state that is returned. Nobody uses it before
    the files' digests and the state's have been found right, so the files are read once.

    ``with_own``: the files of the peer's own state are read through and checked, too; a copy may lack them. The chain
    of the verdicts is not checked. Raises ``StateFileError`` naming file, field and what was expected."""
    manifest = read_manifest(source, run_hash)
    check_sizes(source, manifest)
    try:
        check_memory(4 * (1 + manifest.outer_vectors) * manifest.elements)
    except OSError as error:
        raise StateFileError(f"{source.place(MANIFEST)}: layout: {error}") from error
    values = torch.empty(1 + manifest.outer_vectors, manifest.elements)
    _stream_state(source, manifest, lambda row, start, stop: values[row, start:stop])
    state = AnchorState.of(values, manifest.anchor_version)
    _check_digest(source, manifest, state.digest)
    own = _checked_own(source, manifest) if with_own else None
    return Checkpoint(manifest, state, own, _all_verdicts(source, manifest))


def check_checkpoint(source: CheckpointSource, run_hash: bytes | None = None) -> CheckedCheckpoint:
    """Check all that ``read_checkpoint`` does, and the digests of the parts of a whole model, a few MiB at a time.

    Raises ``StateFileError`` naming file, field and what was expected."""
    manifest = read_manifest(source, run_hash)
    check_sizes(source, manifest)
    buffer = torch.empty(PIECE_BYTES // 4)
    places = _stream_state(source, manifest, lambda row, start, stop: buffer[: stop - start])
    tensors = CheckpointTensors(source, manifest, places)
    rows, version = 1 + manifest.outer_vectors, manifest.anchor_version
    whole = GrowingDigest(version, (rows, manifest.elements))
    parts = [GrowingDigest(version, (rows, part.elements)) for part in manifest.parts or ()]
    ends, at = list(accumulate(part.elements for part in manifest.parts or ())), 0
    for values in tensors.pieces(rows):
        whole.take(values)
        if parts:  # each has whole tensors
            parts[bisect_right(ends, at)].take(values)
        at += values.shape[1]
    _check_digest(source, manifest, whole.digest())
    for number, (part, about) in enumerate(zip(parts, manifest.parts or (), strict=True)):
        found = part.digest().hex()
        if found != about.state_digest:
            raise refusal(source.place(MANIFEST), f"parts.{number}.state_digest", found, about.state_digest)
    _checked_own(source, manifest)
    return CheckedCheckpoint(manifest, _all_verdicts(source, manifest), tensors)


def check_sizes(source: CheckpointSource, manifest: Manifest) -> None:
    """Check sizes on disk against the manifest, before any memory is taken. Raises ``StateFileError``."""
    for name in (*manifest.names("anchor"), *manifest.names("outer")):
        check_size(source.place(name), manifest.files[name][0], source.size_bytes(name))


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


def _all_verdicts(source: CheckpointSource, manifest: Manifest) -> tuple[bytes, ...]:
    return tuple(_verdict_bytes(source, manifest, name) for name in manifest.verdicts_files)


def _checked_own(source: CheckpointSource, manifest: Manifest) -> SavedLocalState | None:
    """The peer's own state, whose files are read through here; None where they are not all there."""
    if not all(name in manifest.files and source.has(name) for name in OWN_FILES):
        return None
    for name in OWN_FILES:
        with checked_stream(source, name, manifest.files[name]) as stream:
            read_entries(stream, stream.place)
    return SavedLocalState(source)


def read_buffers(source: CheckpointSource, manifest: Manifest) -> dict[str, Tensor]:
    """Read the model's buffers, such as running statistics, from the peer's own state.

    None where the checkpoint has no such state, or, with a warning, a damaged one."""
    try:
        if not all(name in manifest.files and source.has(name) for name in OWN_FILES):
            return {}
        found = SavedLocalState(source).buffers()
        if found:
            _checked_own(source, manifest)
        return found
    except StateFileError as error:
        log.warning("the model's buffers are left out: %s", error)
        return {}


def _check_digest(source: CheckpointSource, manifest: Manifest, digest: bytes) -> None:
    if digest.hex() != manifest.state_digest:
        raise refusal(source.place(MANIFEST), "state_digest", digest.hex(), manifest.state_digest)


def _stream_state(
    source: CheckpointSource,
    manifest: Manifest,
    room: Callable[[int, int, int], Tensor],
) -> TensorPlaces:
    """Read the files of anchor and outer optimizer, piece by piece; return where their tensors are.

    ``room``: returns the memory, (k,) float32, for the values of a row from one column to another. Raises
    ``StateFileError`` unless each tensor of the layout is there once, as float32 in its shape, and nothing else."""
    places = _places(manifest)
    seen: TensorPlaces = {}
    for kind in ("anchor", "outer"):
        missing, place = places[kind], ""
        for name in manifest.names(kind):
            with checked_stream(source, name, manifest.files[name]) as stream:
                place = stream.place
                for entry in read_entries(stream, place):
                    row, column, shape = missing.pop(entry.name, (0, 0, None))
                    if shape is None:
                        raise refusal(place, f"tensor {entry.name[:100]!r}", "a name of the layout, once", "another")
                    if (entry.dtype, entry.shape) != (torch.float32, shape):
                        expected, found = f"torch.float32 of shape {shape}", f"{entry.dtype} of {entry.shape}"
                        raise refusal(place, f"tensor {entry.name[:100]!r}", expected, found)
                    for start in range(0, entry.elements, PIECE_BYTES // 4):
                        stop = min(start + PIECE_BYTES // 4, entry.elements)
                        values = room(row, column + start, column + stop)
                        stream.read_into(entry.start + 4 * start, bytes_of(values))
                    seen[kind, entry.name] = name, entry
        if missing:
            raise refusal(place, "its tensors", f"also {next(iter(missing))[:100]!r}, as the layout says", "none")
    return seen


def _places(manifest: Manifest) -> dict[str, dict[str, tuple[int, int, tuple[int, ...] | None]]]:
    """Row, first column and shape of each tensor by its name in the files of the anchor and of the outer optimizer."""
    anchor: dict[str, tuple[int, int, tuple[int, ...] | None]] = {}
    at = 0
    for spec in manifest.layout:
        anchor[spec.name] = (0, at, spec.shape)
        at += spec.elements
    outer = {
        f"{number}.{name}": (1 + number, column, shape)
        for number in range(manifest.outer_vectors)
        for name, (_, column, shape) in anchor.items()
    }
    return {"anchor": anchor, "outer": outer}
