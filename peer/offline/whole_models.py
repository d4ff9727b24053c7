"""The whole models in a folder, newest first: checkpoints of all parameters, and those of a pipeline's stages, from
whichever peers, that go together."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from shoal.peer.checkpoints.checkpoint import read_checkpoint
from shoal.peer.checkpoints.finding import checkpoints_in, is_aside, say_nothing_found
from shoal.peer.checkpoints.manifest import Manifest, read_manifest
from shoal.peer.checkpoints.sealed_folder import opened
from shoal.peer.checkpoints.source import FolderSource, Source
from shoal.peer.offline.kept_stages import KeptStage, Standing
from shoal.peer.offline.whole import StageState
from shoal.peer.training.anchor import State
from shoal.swarm.errors import SealedForOthers, StateFileError, WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.verdict_chain import are_all_stages, check_verdict

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class WholeModel:
    """``stages``: in their order; of a checkpoint that has all parameters already, that one alone. ``places``: where it
    was found."""

    round: int
    version: int
    stages: tuple[StageState, ...]
    places: tuple[Path, ...]
    is_in_stages: bool


@dataclass
class _Found:
    """What can be read of all that is there."""

    whole: list[WholeModel]
    stages: list[KeptStage]
    refused: list[StateFileError]

    def models(self) -> list[WholeModel]:
        runs: defaultdict[tuple[str, str], list[KeptStage]] = defaultdict(list)
        for kept in self.stages:
            runs[kept.manifest.run_hash, kept.manifest.coordinator_key].append(kept)
        return [*self.whole, *(model for kept in runs.values() for model in _together(kept))]


def use_newest(folder: Path, identity: Identity | None, use: Callable[[WholeModel], T]) -> T:
    """What ``use`` gives for the checkpoint in this folder, or for the newest whole model anywhere below it that it
    does not refuse; ``identity`` opens sealed ones. Manifests and verdicts have been read then, states not.

    Raises ``StateFileError`` where there is none that can be used."""
    found = _find(folder, identity)
    models = found.models()
    for model in sorted(models, key=lambda model: -model.round):
        try:
            return use(model)
        except StateFileError as error:
            log.warning("a checkpoint cannot be used, an older one may do: %s", error)
            found.refused.append(error)
    if found.stages and not any(model.is_in_stages for model in models):
        raise StateFileError(f"{folder}: {_missing(found.stages)}")
    if found.refused and all(isinstance(one, SealedForOthers) for one in found.refused):
        raise found.refused[-1]
    if found.refused:
        raise StateFileError(f"{folder}: no checkpoint here that is whole; {found.refused[-1]}")
    raise StateFileError(f"{say_nothing_found(folder)}; or the run's invite while it is running")


def _find(folder: Path, identity: Identity | None) -> _Found:
    found = _Found([], [], [])
    for place in checkpoints_in(folder):
        if is_aside(place) and place != folder:
            continue
        try:
            source = opened(FolderSource(place), identity)
            manifest = read_manifest(source)
            if manifest.stage is not None:
                found.stages.append(KeptStage.read(place, source, manifest))
            else:
                load = partial(_load, source, manifest)
                whole = (StageState(manifest, (), load),)
                found.whole.append(
                    WholeModel(manifest.round, manifest.anchor_version, whole, (place,), is_in_stages=False)
                )
        except StateFileError as error:
            log.warning("a checkpoint cannot be used, an older one may do: %s", error)
            found.refused.append(error)
    return found


def _load(source: Source, manifest: Manifest) -> State:
    return read_checkpoint(source, bytes.fromhex(manifest.run_hash)).state


def _together(kept: Sequence[KeptStage]) -> Iterator[WholeModel]:
    """Of one run: newest version first, of each version the newest round at which all stages stood there."""
    at: defaultdict[tuple[int, int], list[Standing]] = defaultdict(list)
    for one in kept:
        for standing in one.standing():
            at[standing.verdict.anchor_version, standing.verdict.round].append(standing)
    for _, same in groupby(sorted(at, reverse=True), key=lambda place: place[0]):
        model = next((model for place in same for model in _of_one_round(at[place])), None)
        if model is not None:
            yield model


def _of_one_round(standing: Sequence[Standing]) -> Iterator[WholeModel]:
    """What is tied together by the verdicts' own word: of all stages, and of one history of the run."""
    by_tie: defaultdict[bytes | None, defaultdict[int, list[Standing]]] = defaultdict(lambda: defaultdict(list))
    for one in standing:
        by_tie[one.verdict.together][one.kept.stage.number].append(one)
    for stages in by_tie.values():
        chosen = [sorted(stages[number], key=lambda one: len(one.way)) for number in sorted(stages)]
        if not _are_the_runs(chosen):
            continue
        yield WholeModel(
            chosen[0][0].verdict.round,
            chosen[0][0].verdict.anchor_version,
            tuple(_stage_state(choices) for choices in chosen),
            tuple(choices[0].kept.place for choices in chosen),
            is_in_stages=True,
        )


def _are_the_runs(chosen: Iterable[Sequence[Standing]]) -> bool:
    firsts = [choices[0] for choices in chosen]
    try:
        for one in firsts:
            check_verdict(one.verdict, bytes.fromhex(one.kept.manifest.coordinator_key))
    except WireError as error:
        log.warning("%s", error)
        return False
    return are_all_stages([one.verdict for one in firsts])


def _stage_state(choices: Sequence[Standing]) -> StageState:
    """From the first of these that is whole, and that a later plan, where one is known here, has named."""
    named = next((digest for one in choices if (digest := one.named_later()) is not None), None)

    def load() -> State:
        refused: StateFileError | None = None
        for one in choices:
            try:
                state = one.load()
                if named in (None, state.digest):
                    return state
                raise StateFileError(f"{one.kept.place}: leads to another state than the run's plan after it names")
            except StateFileError as error:
                log.warning("a stage's checkpoint cannot be used, another peer's may do: %s", error)
                refused = error
        assert refused is not None, "there is at least one"
        raise refused

    return StageState(choices[0].kept.manifest, choices[0].verdicts, load)


def _missing(kept: Sequence[KeptStage]) -> str:
    """Which stages are there, and of which versions."""
    count = max(one.stage.stages for one in kept)
    versions: Mapping[int, set[int]] = {number: set() for number in range(count)}
    for one in kept:
        versions[one.stage.number].update(standing.verdict.anchor_version for standing in one.standing())
    told = [
        f"stage {number}: {', '.join(map(str, sorted(its))) if its else 'missing'}" for number, its in versions.items()
    ]
    return (
        f"of no anchor version all {count} stages are here ({'; '.join(told)}); put the folders of more of the run's "
        "peers below one, or give its invite while it is running"
    )
