"""A whole model's checkpoint of a pipeline, put together from its stages' states, one stage in memory at a time."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from shoal.peer.checkpoints.checkpoint import pack_verdicts
from shoal.peer.checkpoints.manifest import About, Manifest, StagePart, shard_name, stage_verdicts_name
from shoal.peer.checkpoints.tensors import file_pieces, shards, vectors
from shoal.peer.checkpoints.writing import WRITING, BegunCheckpoint, CheckpointWriter
from shoal.peer.training.anchor import GrowingDigest, State
from shoal.swarm.durable import sync_folder
from shoal.swarm.errors import StorageError
from shoal.swarm.protocol.messages import Verdict

_KINDS = ("anchor", "outer")


@dataclass(frozen=True)
class StageState:
    """A stage's share of a whole model. ``about``: of a checkpoint of that stage; ``load`` reads the state that the
    last of ``verdicts`` made, and may raise ``StateFileError``."""

    about: About
    verdicts: tuple[Verdict, ...]
    load: Callable[[], State]


def write_whole(place: Path, stages: Sequence[StageState], writer: CheckpointWriter) -> Manifest:
    """Write ``place``, which must not be there, as a checkpoint of these stages, which are all, in their order, with
    their states at the end of one round. Raises ``StorageError``, and what loading raises; nothing is left then."""
    with WholeCheckpoint(place, [stage.about for stage in stages], writer) as whole:
        for stage in stages:
            whole.append(stage.load(), stage.verdicts)
        return whole.finish()


class WholeCheckpoint:
    """``place`` once it is finished; until then, and if it never is, there is nothing. ``stages``: what they are of, in
    their order, which the states that are appended follow.

    Raises ``StorageError``; its methods block."""

    def __init__(self, place: Path, stages: Sequence[About], writer: CheckpointWriter) -> None:
        self._place = place
        self._hidden = place.with_name(f"{WRITING}{place.name}-{secrets.token_hex(4)}")
        self._stages = stages
        self._writer = writer
        self._rows = 1 + stages[0].outer_vectors
        self._counts = self._count_files()
        self._written = Counter[str]()
        self._parts: list[StagePart] = []
        self._begun: BegunCheckpoint
        self._digest: GrowingDigest
        self._last: Verdict

    def append(self, state: State, verdicts: tuple[Verdict, ...]) -> None:
        """The next stage's state, which the last of these verdicts made."""
        about, self._last = self._stages[len(self._parts)], verdicts[-1]
        column = sum(part.elements for part in self._parts)
        if not self._parts:
            elements = sum(stage.elements for stage in self._stages)
            self._digest = GrowingDigest(state.version, (self._rows, elements))
        for row, values in enumerate(state.values):
            self._digest.take(row, column, values)
        try:
            self._begun.add(self._files(state, about, verdicts))
        except OSError as error:
            raise self._refusal(error) from error
        chain = self._last.chain.hex()
        self._parts.append(StagePart(elements=about.elements, state_digest=state.digest.hex(), chain=chain))

    def finish(self) -> Manifest:
        """Once all have been appended."""
        assert len(self._parts) == len(self._stages), "all stages"
        try:
            manifest = self._begun.finish(self._about())
            self._hidden.rename(self._place)
            sync_folder(self._place.parent)
        except OSError as error:
            raise self._refusal(error) from error
        return manifest

    def _files(
        self, state: State, about: About, verdicts: tuple[Verdict, ...]
    ) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
        for kind, named in zip(_KINDS, vectors(state.values, about.layout), strict=True):
            for tensors in shards(named.items()):
                yield shard_name(kind, self._written[kind], self._counts[kind]), file_pieces(tensors)
                self._written[kind] += 1
        yield stage_verdicts_name(len(self._parts), len(self._stages)), iter([pack_verdicts(verdicts)])

    def _about(self) -> About:
        """As that of the first stage, but for what differs."""
        last = self._last
        assert last.together is not None, "a stage's verdict"
        first = {name: getattr(self._stages[0], name) for name in About.model_fields}
        own = {
            "layout": tuple(spec for stage in self._stages for spec in stage.layout),
            "round": last.round,
            "anchor_version": last.anchor_version,
            "state_digest": self._digest.digest().hex(),
            "chain": last.together.hex(),
            "tokens": last.tokens_total,
            "stage": None,
            "parts": tuple(self._parts),
        }
        return About(**{**first, **own})

    def _count_files(self) -> Counter[str]:
        """How many of each kind there will be: names say so from the first one on."""
        counts = Counter[str]()
        for stage in self._stages:
            outline = torch.empty(self._rows, stage.elements, device="meta")
            for kind, named in zip(_KINDS, vectors(outline, stage.layout), strict=True):
                counts[kind] += len(shards(named.items()))
        return counts

    def _refusal(self, error: OSError) -> StorageError:
        return StorageError(f"{self._place}: the checkpoint cannot be written: {error}")

    def __enter__(self) -> Self:
        if self._place.exists():
            raise StorageError(f"{self._place}: is there already: give a folder that is not")
        try:
            self._hidden.mkdir(parents=True)
        except OSError as error:
            raise self._refusal(error) from error
        self._begun = self._writer.begin(self._hidden)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)
