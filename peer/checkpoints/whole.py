"""A whole model's checkpoint of a pipeline, put together from its stages' states, one stage in memory at a time."""

from __future__ import annotations

import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.peer.checkpoints.checkpoint import pack_verdicts
from shoal.peer.checkpoints.manifest import About, Manifest, StagePart, shard_name, stage_verdicts_name
from shoal.peer.checkpoints.tensors import file_pieces, shards, vectors
from shoal.peer.checkpoints.writing import WRITING, CheckpointWriter
from shoal.peer.state import GrowingDigest, State
from shoal.swarm.durable import sync_folder
from shoal.swarm.errors import StorageError
from shoal.swarm.identity import Identity
from shoal.swarm.messages import Verdict

_KINDS = ("anchor", "outer")


@dataclass(frozen=True)
class StageState:
    """A stage's share of a whole model. ``about``: of a checkpoint of that stage; ``load`` reads the state that the
    last of ``verdicts`` made, and may raise ``StateFileError``."""

    about: About
    verdicts: tuple[Verdict, ...]
    load: Callable[[], State]


def write_whole(
    place: Path, stages: Sequence[StageState], identity: Identity, sealed_for: Iterable[bytes] | None = None
) -> Manifest:
    """Write ``place``, which must not be there, as a checkpoint of all stages, in their order. The caller has made sure
    that their last verdicts are those of one round, and of all stages.

    Raises ``StorageError``, and what loading a stage raises; nothing is left then."""
    whole = _Whole(stages)
    hidden = place.with_name(f"{WRITING}{place.name}-{secrets.token_hex(4)}")
    try:
        if place.exists():
            raise StorageError(f"{place}: is there already: give a folder that is not")
        hidden.mkdir(parents=True)
        manifest = CheckpointWriter(identity, sealed_for).fill(hidden, whole.files(), whole.about)
        hidden.rename(place)
        sync_folder(place.parent)
    except OSError as error:
        raise StorageError(f"{place}: the checkpoint cannot be written: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return manifest


class _Whole:
    """``files`` once, to its end; then ``about``."""

    def __init__(self, stages: Sequence[StageState]) -> None:
        self._stages = stages
        self._rows = 1 + stages[0].about.outer_vectors
        elements = sum(stage.about.elements for stage in stages)
        self._digest = GrowingDigest(stages[0].verdicts[-1].anchor_version, (self._rows, elements))
        self._parts: list[StagePart] = []

    def files(self) -> Iterator[tuple[str, Iterator[bytes | memoryview]]]:
        counts, written = self._counts(), Counter[str]()
        for number, stage in enumerate(self._stages):
            state = stage.load()
            for kind, named in zip(_KINDS, vectors(state.values, stage.about.layout), strict=True):
                for tensors in shards(named.items()):
                    yield shard_name(kind, written[kind], counts[kind]), file_pieces(tensors)
                    written[kind] += 1
            self._take(state, stage)
            del state, named, tensors
            yield stage_verdicts_name(number, len(self._stages)), iter([pack_verdicts(stage.verdicts)])

    def about(self) -> About:
        """As that of the first stage, but for what differs."""
        last, digest = self._stages[0].verdicts[-1], self._digest.digest()
        assert last.together is not None, "a stage's verdict"
        return self._stages[0].about.model_copy(
            update={
                "layout": tuple(spec for stage in self._stages for spec in stage.about.layout),
                "round": last.round,
                "anchor_version": last.anchor_version,
                "state_digest": digest.hex(),
                "chain": last.together.hex(),
                "tokens": last.tokens_total,
                "stage": None,
                "parts": tuple(self._parts),
            }
        )

    def _take(self, state: State, stage: StageState) -> None:
        column = sum(part.elements for part in self._parts)
        for row, values in enumerate(state.values):
            self._digest.take(row, column, values)
        chain = stage.verdicts[-1].chain.hex()
        self._parts.append(StagePart(elements=stage.about.elements, state_digest=state.digest.hex(), chain=chain))

    def _counts(self) -> Counter[str]:
        """How many files of each kind there will be: names say so from the first one on."""
        counts = Counter[str]()
        for stage in self._stages:
            outline = torch.empty(self._rows, stage.about.elements, device="meta")
            for kind, named in zip(_KINDS, vectors(outline, stage.about.layout), strict=True):
                counts[kind] += len(shards(named.items()))
        return counts
