"""State that a run starts from when that is a checkpoint: found, checked, served and fetched.

A peer that has the checkpoint's files serves all tensors of the model, whichever stages it holds itself. A peer without
them fetches the tensors that it needs. Both check every tensor by the hashes in the run file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shoal.peer.checkpoints.encryption import open_source
from shoal.peer.checkpoints.manifest import MANIFEST, Manifest, read_manifest
from shoal.peer.checkpoints.source import CheckpointSource, FolderSource, refusal
from shoal.peer.checkpoints.store import checkpoints_in
from shoal.peer.checkpoints.tensor_reader import CheckpointTensors
from shoal.peer.state_transfer.chunk_format import PIECE_BYTES, pieces_in
from shoal.peer.state_transfer.download import fetch_into
from shoal.peer.state_transfer.pretrained import PretrainedModel
from shoal.peer.training.anchor import AnchorState, bytes_of
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.errors import (
    BlobUnavailable,
    Busy,
    LinkError,
    ModelMismatch,
    SealedForOthers,
    ShoalError,
    StateFileError,
)
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.start_section import StartSection, tensor_hash
from shoal.swarm.protocol.types import Blob, TensorSpec
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

MAX_TENSORS_SERVED = 8
"""Tensors in memory for other peers at once; readers of further ones are told to ask again."""

_DONORS_AT_ONCE = 16
_BUSY_RETRY_S = 0.25
_POLL_S = 2.0
Layout = Sequence[TensorSpec]


class StartTensors(Protocol):
    """Tensors of a checkpoint that a run starts from."""

    @property
    def place(self) -> str:
        """Name of the checkpoint in messages."""

    def rows(self, name: str, count: int) -> Tensor:
        """The values of a tensor in the first ``count`` vectors, ``(count, elements) float32``.

        Raises ``StateFileError``."""


class StartFiles:
    """Files of the checkpoint that ``start`` names. For any thread; methods block."""

    def __init__(self, tensors: StartTensors, start: StartSection) -> None:
        self._tensors = tensors
        self._start = start

    @classmethod
    def find(cls, folder: Path | str, start: StartSection, identity: Identity | None) -> StartFiles:
        """Find the checkpoint in this folder or below it, or the model that transformers has saved there or at a URL.

        Raises ``StateFileError`` where it is missing, or has other tensors than the run file says."""
        pretrained = PretrainedModel.open(folder)
        if pretrained is not None:
            found = {name: entry.shape for name, (_, entry) in pretrained.tensors.items()}
            for name, known in start.tensors.items():
                if found.get(name) != known.shape:
                    expected = f"{list(known.shape)}, as the run file says"
                    raise refusal(pretrained.place, f"tensor {name!r}", expected, str(found.get(name, "none")))
            return cls(pretrained, start)
        folder = Path(folder)
        others: list[str] = []
        for source, manifest in whole_checkpoints(folder, identity, others):
            if (manifest.round, manifest.state_digest) != (start.round, start.state):
                others.append(f"{source.place(MANIFEST)} is round {manifest.round} of {manifest.run_folder}")
                continue
            difference = start.difference(manifest.layout, whole=True)
            if difference:
                raise refusal(source.place(MANIFEST), "layout", f"that of the run's [start] ({difference})", "another")
            return cls(CheckpointTensors(source, manifest), start)
        seen = f"; {others[0]}" if others else ""
        raise StateFileError(
            f"{folder}: the checkpoint that this run starts from, {start.source} with the state {start.state[:8]}, is "
            f"not here{seen}"
        )

    def rows(self, name: str, count: int) -> Tensor:
        """The values of a tensor, ``(count, elements) float32``.

        Raises ``StateFileError`` naming tensor and file unless they are those that the run file names."""
        rows, expected = self._tensors.rows(name, count), self._start.tensors[name]
        found = hash_of(expected.shape, rows)
        if found != expected.sha256:
            raise refusal(
                self._tensors.place,
                f"SHA-256 of the tensor {name!r}",
                f"{expected.sha256}, as the run file says",
                found,
            )
        return rows


def hash_of(shape: tuple[int, ...], rows: Tensor) -> str:
    """Hash of a tensor as in a run file's ``[start]``; ``rows``: ``(count, elements) float32``."""
    return tensor_hash(shape, len(rows), [bytes_of(row) for row in rows])


def whole_checkpoints(
    folder: Path, identity: Identity | None, refused: list[str]
) -> Iterator[tuple[CheckpointSource, Manifest]]:
    """Yield the checkpoints of whole models in the folder and below; ``refused`` receives why others are not used."""
    for place in checkpoints_in(folder):
        try:
            source = open_source(FolderSource(place), identity)
            manifest = read_manifest(source)
        except SealedForOthers:
            raise
        except StateFileError as error:
            log.warning("a checkpoint cannot be used: %s", error)
            refused.append(str(error))
            continue
        if manifest.stage is not None:
            refused.append(f"{place} is of one stage: join all stages first, with `shoal checkpoint`")
            continue
        yield source, manifest


@dataclass(eq=False)
class RunStart:
    """The state that the run starts from, as this process serves or fetches it.

    ``endpoint``: of the run's own scope, which all of its peers share; ``files``: the checkpoint's, None where they are
    not here; ``donors``: peers to ask for tensors, in order of preference; ``slots``: vectors of the outer optimizer. A
    donor that is silent for ``progress_s`` is not asked for a while. A process with files calls ``offer``, on the event
    loop."""

    start: StartSection
    slots: int
    files: StartFiles | None
    endpoint: Endpoint
    donors: Callable[[], Sequence[str]]
    progress_s: float
    _serving: int = field(default=0, init=False)

    @property
    def rows(self) -> int:
        """Vectors that the start has: the anchor's, and the outer optimizer's if they are taken over."""
        return self.start.rows(self.slots)

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self.start.tensors)

    def offer(self) -> None:
        """Serve every tensor of the model from the files."""
        assert self.files is not None
        for name in self._names:
            self.endpoint.publish(self.blob(name), _TensorSource(self, name))

    def state_of(self, layout: Layout) -> StartState:
        """The start of a whole model or of a stage. Raises ``ModelMismatch`` naming the first difference to the run's
        model."""
        self.check(layout, whole=False)
        return StartState(self, tuple(layout))

    def check(self, layout: Layout, *, whole: bool) -> None:
        """Raise ``ModelMismatch`` unless the checkpoint has these tensors; with ``whole`` these and no others."""
        difference = self.start.difference(layout, whole=whole)
        if difference:
            raise ModelMismatch(f"this model is not that of {self.start.source}, where the run starts: {difference}")

    def blob(self, name: str) -> Blob:
        return Blob(kind="start", number=self._names.index(name))

    def begin_serving(self) -> None:
        """Reserve memory for one tensor. Raises ``Busy``."""
        if self._serving >= MAX_TENSORS_SERVED:
            raise Busy("other tensors of the start are being served here; ask again")
        self._serving += 1

    def end_serving(self) -> None:
        self._serving -= 1


class StartState:
    """The state of some tensors at the run's start: version 0 of their scope."""

    def __init__(self, run: RunStart, layout: tuple[TensorSpec, ...]) -> None:
        self.digest = run.start.state_digest(layout)
        self._run = run
        self._places: dict[str, Tensor] = {}
        self._values = torch.zeros(0)
        self._layout = layout
        self._missing: list[TensorSpec] = []
        self._in_flight = 0

    @property
    def is_here(self) -> bool:
        """Whether ``read`` can be called: the files are here."""
        return self._run.files is not None

    def read(self) -> AnchorState:
        """Read the state from the files; blocks. Raises ``StateFileError``."""
        assert self._run.files is not None
        self._allocate()
        for spec in self._layout:
            self._places[spec.name].copy_(self._run.files.rows(spec.name, self._run.rows))
        return self._finished()

    async def fetch(self) -> AnchorState:
        """Fetch the state from peers that have the files, several at once; resumes where an earlier attempt stopped.

        Raises ``LinkError`` while nobody has them."""
        if not self._missing:
            self._allocate()
            self._missing = [spec for spec in reversed(self._layout) if spec.elements]
        donors = list(self._run.donors())
        trouble = LinkError(self._run.start.outlook)
        for at in range(0, len(donors), _DONORS_AT_ONCE):
            async with task_scope() as tasks:
                asked = [tasks.create_task(self._fetch_from(peer)) for peer in donors[at : at + _DONORS_AT_ONCE]]
            errors = [error for task in asked if (error := task.result()) is not None]
            if not self._missing:
                return await in_thread(self._finished)
            trouble = next((error for error in errors if not isinstance(error, BlobUnavailable)), trouble)
        await asyncio.sleep(_POLL_S)
        raise trouble

    def _allocate(self) -> None:
        at, run = 0, self._run
        self._values = torch.zeros(1 + run.slots, sum(spec.elements for spec in self._layout))
        for spec in self._layout:
            self._places[spec.name] = self._values[: run.rows, at : at + spec.elements]
            at += spec.elements

    def _finished(self) -> AnchorState:
        values, self._values, self._places = self._values, torch.zeros(0), {}
        return AnchorState.of(values, 0, self.digest)

    async def _fetch_from(self, peer: str) -> LinkError | None:
        """Fetch tensors from one peer until all are here; return the error that ended it, if any.

        Waits for tensors that other peers are sending, as this peer may have to send them instead."""
        while self._missing or self._in_flight:
            if not self._missing:
                await asyncio.sleep(_BUSY_RETRY_S)
                continue
            spec = self._missing.pop()
            self._in_flight += 1
            has_arrived = False
            try:
                await self._fetch_tensor(peer, spec)
                has_arrived = True
            except Busy:
                pass
            except ShoalError as error:  # the donor's errors come out of here, too
                log.info("fetching the start from %s stopped and is tried again later: %s", peer, error)
                return error if isinstance(error, LinkError) else LinkError(f"{peer}: {error}")
            finally:
                self._in_flight -= 1
                if not has_arrived:
                    self._missing.append(spec)
            if not has_arrived:
                await asyncio.sleep(_BUSY_RETRY_S)
        return None

    async def _fetch_tensor(self, peer: str, spec: TensorSpec) -> None:
        """Fetch one tensor. Raises ``LinkError``, also where it is not the run's."""
        run = self._run
        rows = torch.empty(run.rows, spec.elements)
        await fetch_into(run.endpoint, peer, run.blob(spec.name), bytes_of(rows), repr(spec.name), run.progress_s)
        if await in_thread(hash_of, spec.shape, rows) != run.start.tensors[spec.name].sha256:
            log.warning("%s sent another tensor %r than the run starts from", peer, spec.name)
            raise LinkError(f"{peer} sent another tensor {spec.name!r} than the run starts from")
        self._places[spec.name].copy_(rows)


class _TensorSource:
    """One tensor of the files, in memory only while somebody reads it (a ``CountedSource``)."""

    def __init__(self, run: RunStart, name: str) -> None:
        elements = torch.Size(run.start.tensors[name].shape).numel()
        self.chunks = pieces_in(4 * elements * run.rows)
        self._run = run
        self._name = name
        self._readers = 0
        self._rows: Tensor | None = None
        self._reading = asyncio.Lock()

    def begin_reading(self, reader: bytes) -> None:
        if not self._readers:
            self._run.begin_serving()
        self._readers += 1

    def end_reading(self, reader: bytes) -> None:
        self._readers -= 1
        if not self._readers:
            self._rows = None
            self._run.end_serving()

    async def chunk(self, index: int) -> memoryview:
        async with self._reading:
            if self._rows is None:
                self._rows = await in_thread(self._read)
            return bytes_of(self._rows)[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]

    def _read(self) -> Tensor:
        assert self._run.files is not None
        try:
            return self._run.files.rows(self._name, self._run.rows)
        except StateFileError as error:
            log.warning("this peer cannot serve what the run starts from: %s", error)
            raise BlobUnavailable(f"the tensor {self._name!r} cannot be read here") from error
