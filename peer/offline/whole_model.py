"""Whole models in a folder, newest first: checkpoints of all parameters, and stages that fit together.

The stages of a pipeline may come from the checkpoints of several peers. Each gives a stage's state after the
checkpoint's round, and after those rounds whose records were kept beside it. States of one round make a whole model,
which is read, or written as one checkpoint, with one stage in memory at a time."""

from __future__ import annotations

import logging
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from torch import Tensor

from shoal.peer.checkpoints.checkpoint import (
    MAX_VERDICTS,
    check_checkpoint,
    pack_verdicts,
    read_buffers,
    read_checkpoint,
    read_verdicts,
)
from shoal.peer.checkpoints.encryption import open_source
from shoal.peer.checkpoints.manifest import (
    MANIFEST,
    CheckpointAbout,
    Manifest,
    StageAbout,
    StagePart,
    read_manifest,
    stage_verdicts_name,
)
from shoal.peer.checkpoints.source import CheckpointSource, FolderSource, refusal
from shoal.peer.checkpoints.state_files import state_shards
from shoal.peer.checkpoints.store import (
    CHECKPOINTS,
    WRITING,
    checkpoints_in,
    is_aside,
    say_nothing_found,
)
from shoal.peer.checkpoints.tensors import file_pieces
from shoal.peer.checkpoints.writer import CheckpointWriter
from shoal.peer.history.catch_up import RoundApplier, roll_forward, rounds_after
from shoal.peer.history.chain import check_chain
from shoal.peer.history.history_file import HISTORY_FILE, unpack_history
from shoal.peer.history.round_records import RECORDS, RecordOwner, RoundRecords
from shoal.peer.member.memberships import scope_of
from shoal.peer.regular_file import read_regular
from shoal.peer.training.anchor import AnchorState, GrowingDigest
from shoal.swarm.durable import sync_folder
from shoal.swarm.errors import SealedForOthers, StateFileError, StorageError, WireError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.verdict_chain import are_all_stages, check_verdict

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class StageState:
    """A stage's share of a whole model.

    ``about``: of a checkpoint of that stage; ``load`` reads the state that the last of ``verdicts`` made, and may raise
    ``StateFileError``; ``pieces`` yields its anchor instead, checked, where that needs less memory; ``kept_in``: the
    checkpoint that the model's buffers are taken from, which are its peer's; ``history``: reads the known verdicts up
    to this state, checked, by scope."""

    about: CheckpointAbout
    verdicts: tuple[Verdict, ...]
    load: Callable[[], AnchorState]
    pieces: Callable[[], Iterator[Tensor]] | None = None
    kept_in: tuple[CheckpointSource, Manifest] | None = None
    history: Callable[[], list[Sequence[Verdict]]] = list

    def buffers(self) -> dict[str, Tensor]:
        """Read the model's buffers, which are not averaged; none where the checkpoint is a copy for others."""
        return read_buffers(*self.kept_in) if self.kept_in is not None else {}

    def anchor(self) -> Iterator[Tensor]:
        """Yield the anchor's values in their order, in pieces, (k,) float32; each is to be used before the next one is
        requested. Raises ``StateFileError`` before the first one."""
        return self.pieces() if self.pieces is not None else iter([self.load().anchor])


def write_whole(
    place: Path, stages: Sequence[StageState], identity: Identity, sealed_for: Iterable[bytes] | None = None
) -> Manifest:
    """Write ``place``, which must not exist, as a checkpoint of all stages, with their states at the end of one round.

    Raises ``StorageError``, and what loading raises; nothing is left then."""
    with WholeCheckpoint(place, [stage.about for stage in stages], identity, sealed_for) as whole:
        for stage in stages:
            whole.append(stage.load(), stage.verdicts)
        return whole.finish()


class WholeCheckpoint:
    """Writer of one checkpoint of a whole pipeline; ``place`` exists only once it is finished.

    ``stages``: descriptions in their order, which is the order in which states are appended. Methods block, and raise
    ``StorageError``."""

    def __init__(
        self,
        place: Path,
        stages: Sequence[CheckpointAbout],
        identity: Identity,
        sealed_for: Iterable[bytes] | None = None,
    ) -> None:
        self._place = place
        self._hidden = place.with_name(f"{WRITING}{place.name}-{secrets.token_hex(4)}")
        self._stages = stages
        self._writer = CheckpointWriter(self._hidden, identity, sealed_for)
        self._rows = 1 + stages[0].outer_vectors
        self._count = sum(len(state_shards(stage.layout)) for stage in stages)
        """Number of files of each kind, which is part of their names."""
        self._written = 0
        self._parts: list[StagePart] = []
        self._digest: GrowingDigest
        self._last: Verdict

    def append(self, state: AnchorState, verdicts: tuple[Verdict, ...]) -> None:
        """Write the next stage's state, which the last of these verdicts made."""
        about, self._last = self._stages[len(self._parts)], verdicts[-1]
        if not self._parts:
            elements = sum(stage.elements for stage in self._stages)
            self._digest = GrowingDigest(state.version, (self._rows, elements))
        self._digest.take(state.values)
        try:
            self._writer.add(self._files(state, about, verdicts))
        except OSError as error:
            raise self._refusal(error) from error
        chain = self._last.chain.hex()
        self._parts.append(StagePart(elements=about.elements, state_digest=state.digest.hex(), chain=chain))

    def finish(self) -> Manifest:
        """Complete the checkpoint, once all stages have been appended."""
        assert len(self._parts) == len(self._stages), "all stages"
        try:
            manifest = self._writer.finish(self._about())
            self._hidden.rename(self._place)
            sync_folder(self._place.parent)
        except OSError as error:
            raise self._refusal(error) from error
        return manifest

    def _files(
        self, state: AnchorState, about: CheckpointAbout, verdicts: tuple[Verdict, ...]
    ) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
        found = state_shards(about.layout, self._written, self._count)
        for shard in found:
            for name, tensors in shard.files(state.values):
                yield name, file_pieces(tensors)
        self._written += len(found)
        yield stage_verdicts_name(len(self._parts), len(self._stages)), iter([pack_verdicts(verdicts)])

    def _about(self) -> CheckpointAbout:
        """Description of the whole: the first stage's, with what differs replaced."""
        last = self._last
        assert last.together is not None, "a stage's verdict"
        first = {name: getattr(self._stages[0], name) for name in CheckpointAbout.model_fields}
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
        return CheckpointAbout(**{**first, **own})

    def _refusal(self, error: OSError) -> StorageError:
        return StorageError(f"{self._place}: the checkpoint cannot be written: {error}")

    def __enter__(self) -> Self:
        if self._place.exists():
            raise StorageError(f"{self._place}: exists already: give a folder that does not")
        try:
            self._hidden.mkdir(parents=True)
        except OSError as error:
            raise self._refusal(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)


@dataclass(frozen=True)
class KeptStage:
    """A stage's checkpoint; ``known``: the verdicts in it and beside it, by round, not checked."""

    place: Path
    source: CheckpointSource
    manifest: Manifest
    stage: StageAbout
    known: Mapping[int, Verdict] = field(repr=False)

    @classmethod
    def read(cls, place: Path, source: CheckpointSource, manifest: Manifest) -> KeptStage:
        """Raises ``StateFileError``."""
        assert manifest.stage is not None
        own = {verdict.round: verdict for verdict in read_verdicts(source, manifest)}
        if manifest.round not in own or own[manifest.round].chain.hex() != manifest.chain:
            raise refusal(source.place(MANIFEST), "chain", "that of its last verdict", manifest.chain)
        beside = _history(place) if place.parent.name == CHECKPOINTS else {}
        return cls(place, source, manifest, manifest.stage, {**beside, **own})

    def states(self) -> Iterator[LoadableState]:
        """Yield the state at the end of each round at which the stage had a state that can be loaded from here."""
        way: tuple[Verdict, ...] = ()
        for made in (self.known[self.manifest.round], *self.rounds):
            if made.round != self.manifest.round:
                way = (*way, made)
            for verdict in self._unchanged_around(made):
                yield LoadableState(self, verdict, way)

    @cached_property
    def rounds(self) -> tuple[Verdict, ...]:
        """The committed rounds after the checkpoint whose bytes lie beside it."""
        found = [record.verdict for record in self.records.open_all()]
        return tuple(rounds_after(found, self.manifest.anchor_version, bytes.fromhex(self.manifest.state_digest)))

    @property
    def records(self) -> RoundRecords:
        """The round records beside the checkpoint."""
        owner = RecordOwner(bytes.fromhex(self.manifest.run_hash), bytes.fromhex(self.manifest.coordinator_key))
        return RoundRecords(self.place.parent.with_name(RECORDS), owner)

    def _unchanged_around(self, made: Verdict) -> Iterator[Verdict]:
        """Yield that verdict, and those before and after it of rounds that changed nothing."""
        yield made
        before = made
        while not before.committed:
            earlier = self.known.get(before.round - 1)
            if earlier is None or (earlier.anchor_version, earlier.chain) != (
                made.anchor_version,
                before.previous_chain,
            ):
                break
            yield earlier
            before = earlier
        after = made
        while (later := self.known.get(after.round + 1)) is not None and later.previous_chain == after.chain:
            if later.committed or later.anchor_version != made.anchor_version:
                break
            yield later
            after = later


@dataclass(frozen=True)
class LoadableState:
    """The state of a stage at the end of the round of ``verdict``; ``way``: the rounds from the checkpoint to it."""

    kept: KeptStage
    verdict: Verdict
    way: tuple[Verdict, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The known, unbroken part of the chain up to ``verdict``, oldest first, as far as checkpoints have room."""
        return _unbroken(self.kept.known, self.verdict, MAX_VERDICTS)

    def load(self) -> AnchorState:
        """The checkpoint's state with the rounds of ``way`` applied. Raises ``StateFileError``."""
        manifest, records = self.kept.manifest, self.kept.records
        state = read_checkpoint(self.kept.source, bytes.fromhex(manifest.run_hash), with_own=False).state
        if not self.way:
            return state
        run = parse_run_file(manifest.run_toml, f"{self.kept.place}: the run file")
        newest = self.way[-1].anchor_version
        state = roll_forward(state, records, RoundApplier(run, manifest.layout), newest)
        if state.version != newest:
            raise StateFileError(
                f"{records.folder}: the records there lead to version {state.version} only, not to {newest}"
            )
        return state

    def named_later(self) -> bytes | None:
        """The digest of this state by the next round's plan, which the coordinator signed; None where it is not known
        here."""
        later = self.kept.known.get(self.verdict.round + 1)
        if later is None or later.plan is None or later.previous_chain != self.verdict.chain:
            return None
        if later.plan.anchor_version != self.verdict.anchor_version:
            return None
        try:
            check_verdict(later, bytes.fromhex(self.kept.manifest.coordinator_key))
        except WireError as error:
            log.warning("%s: %s", self.kept.place, error)
            return None
        return later.plan.state_digest


def _history(place: Path) -> dict[int, Verdict]:
    """Verdicts by round of the peer's history of that stage, as far as it can be read."""
    file = place.parent.with_name(HISTORY_FILE)
    try:
        return {verdict.round: verdict for verdict in unpack_history(read_regular(file), str(file)).verdicts}
    except FileNotFoundError:
        return {}
    except (OSError, StateFileError) as error:
        log.warning("a history is left out: %s", error)
        return {}


@dataclass(frozen=True)
class WholeModel:
    """A whole model that can be loaded. ``stages``: in their order, or the one checkpoint of all parameters;
    ``places``: where it was found."""

    round: int
    version: int
    stages: tuple[StageState, ...]
    places: tuple[Path, ...]
    is_in_stages: bool


@dataclass
class _Found:
    """All readable checkpoints and stages in a folder."""

    whole: list[WholeModel]
    stages: list[KeptStage]
    refused: list[StateFileError]

    def models(self) -> list[WholeModel]:
        runs: defaultdict[tuple[str, str], list[KeptStage]] = defaultdict(list)
        for kept in self.stages:
            runs[kept.manifest.run_hash, kept.manifest.coordinator_key].append(kept)
        return [*self.whole, *(model for kept in runs.values() for model in _join_stages(kept))]


def use_newest(folder: Path, identity: Identity | None, use: Callable[[WholeModel], T]) -> T:
    """Return ``use`` of the checkpoint in this folder, or of the newest whole model below it that ``use`` does not
    refuse.

    ``identity`` opens sealed ones. ``use`` gets models whose manifests and verdicts have been read, and states not.
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
        raise StateFileError(f"{folder}: no undamaged checkpoint here; {found.refused[-1]}")
    raise StateFileError(f"{say_nothing_found(folder)}; or the run's invite while it is running")


def _find(folder: Path, identity: Identity | None) -> _Found:
    found = _Found([], [], [])
    for place in checkpoints_in(folder):
        if is_aside(place) and place != folder:
            continue
        try:
            source = open_source(FolderSource(place), identity)
            manifest = read_manifest(source)
            if manifest.stage is not None:
                found.stages.append(KeptStage.read(place, source, manifest))
            else:
                load, pieces = partial(_load, source, manifest), partial(_anchor, source, manifest)
                history = partial(_whole_history, place, source, manifest)
                whole = (StageState(manifest, (), load, pieces, (source, manifest), history),)
                found.whole.append(
                    WholeModel(manifest.round, manifest.anchor_version, whole, (place,), is_in_stages=False)
                )
        except StateFileError as error:
            log.warning("a checkpoint cannot be used, an older one may do: %s", error)
            found.refused.append(error)
    return found


def _load(source: CheckpointSource, manifest: Manifest) -> AnchorState:
    return read_checkpoint(source, bytes.fromhex(manifest.run_hash), with_own=False).state


def _anchor(source: CheckpointSource, manifest: Manifest) -> Iterator[Tensor]:
    """The anchor of a checkpoint, which is checked before the first piece."""
    checked = check_checkpoint(source, bytes.fromhex(manifest.run_hash))
    for piece in checked.tensors.pieces(1):
        yield piece[0]


def _join_stages(kept: Sequence[KeptStage]) -> Iterator[WholeModel]:
    """Whole models of one run: newest version first, of each version the newest round at which all stages had it."""
    at: defaultdict[tuple[int, int], list[LoadableState]] = defaultdict(list)
    for one in kept:
        for state in one.states():
            at[state.verdict.anchor_version, state.verdict.round].append(state)
    for _, same in groupby(sorted(at, reverse=True), key=lambda place: place[0]):
        model = next((model for place in same for model in _of_one_round(at[place])), None)
        if model is not None:
            yield model


def _of_one_round(states: Sequence[LoadableState]) -> Iterator[WholeModel]:
    """Whole models of one round: all stages, of one history of the run, tied together by their signed verdicts."""
    by_tie: defaultdict[bytes | None, defaultdict[int, list[LoadableState]]] = defaultdict(lambda: defaultdict(list))
    for one in states:
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


def _are_the_runs(chosen: Iterable[Sequence[LoadableState]]) -> bool:
    firsts = [choices[0] for choices in chosen]
    try:
        for one in firsts:
            check_verdict(one.verdict, bytes.fromhex(one.kept.manifest.coordinator_key))
    except WireError as error:
        log.warning("%s", error)
        return False
    return are_all_stages([one.verdict for one in firsts])


def _stage_state(choices: Sequence[LoadableState]) -> StageState:
    """The stage's state from the first choice that is undamaged and that a later plan, if one is known here, names."""
    named = next((digest for one in choices if (digest := one.named_later()) is not None), None)

    def load() -> AnchorState:
        refused: StateFileError | None = None
        for one in choices:
            try:
                state = one.load()
                if named in (None, state.digest):
                    return state
                raise StateFileError(f"{one.kept.place}: leads to another state than the next round's plan names")
            except StateFileError as error:
                log.warning("a stage's checkpoint cannot be used, another peer's may do: %s", error)
                refused = error
        assert refused is not None, "there is at least one"
        raise refused

    first, kept = choices[0], choices[0].kept

    def history() -> list[Sequence[Verdict]]:
        return [_checked(kept.manifest, _unbroken(kept.known, first.verdict), kept.stage.number)]

    return StageState(kept.manifest, first.verdicts, load, kept_in=(kept.source, kept.manifest), history=history)


def _whole_history(place: Path, source: CheckpointSource, manifest: Manifest) -> list[Sequence[Verdict]]:
    """The verdicts in a checkpoint of all parameters and beside it: the run's, or those of each stage."""
    if manifest.parts is not None:
        stages = range(len(manifest.parts))
        return [_checked(manifest, read_verdicts(source, manifest, number), number) for number in stages]
    own = {verdict.round: verdict for verdict in read_verdicts(source, manifest)}
    beside = _history(place) if place.parent.name == CHECKPOINTS else {}
    if manifest.round not in own:
        return []
    return [_checked(manifest, _unbroken({**beside, **own}, own[manifest.round]), None)]


def _checked(manifest: Manifest, verdicts: Sequence[Verdict], stage: int | None) -> Sequence[Verdict]:
    """Check hashes, links and signatures. Raises ``StateFileError``."""
    run_hash, key = bytes.fromhex(manifest.run_hash), bytes.fromhex(manifest.coordinator_key)
    scope, whole = 0 if stage is None else scope_of(stage), bool(verdicts) and verdicts[0].round == 0
    check_chain(verdicts, run_hash, key, scope=scope, whole=whole)
    return verdicts


def _unbroken(known: Mapping[int, Verdict], last: Verdict, limit: int | None = None) -> tuple[Verdict, ...]:
    """The known, unbroken part of the chain up to ``last``, oldest first, of at most ``limit`` verdicts."""
    found = [last]
    while limit is None or len(found) < limit:
        earlier = known.get(found[-1].round - 1)
        if earlier is None or earlier.chain != found[-1].previous_chain:
            break
        found.append(earlier)
    return tuple(reversed(found))


def _missing(kept: Sequence[KeptStage]) -> str:
    """Words on the stages that are there, with their versions."""
    count = max(one.stage.stages for one in kept)
    versions: Mapping[int, set[int]] = {number: set() for number in range(count)}
    for one in kept:
        versions[one.stage.number].update(state.verdict.anchor_version for state in one.states())
    told = [
        f"stage {number}: {', '.join(map(str, sorted(its))) if its else 'missing'}" for number, its in versions.items()
    ]
    return (
        f"of no anchor version all {count} stages are here ({'; '.join(told)}); put the folders of more of the run's "
        "peers below one, or give its invite while it is running"
    )
