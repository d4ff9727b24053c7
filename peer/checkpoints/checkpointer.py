"""Background writing of a training peer's checkpoints, as often as takes a twentieth of the time."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal.peer.checkpoints.checkpoint import (
    MAX_VERDICTS,
    Checkpoint,
    CheckpointContents,
    OwnContents,
    unpack_verdicts,
)
from shoal.peer.checkpoints.local_state import LocalStateContent, residual_pieces
from shoal.peer.checkpoints.manifest import OWN_FILE, RESIDUAL_FILE, CheckpointAbout, StageAbout
from shoal.peer.checkpoints.store import CheckpointStore, UnfinishedCheckpoint
from shoal.peer.network_thread import NetworkThread
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.deferred_copy import DeferredCopy
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.outcome import CarriedResidual
from shoal.swarm.errors import RecipeError, StateFileError, StorageError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import TensorSpec

log = logging.getLogger(__name__)

_TIME_SHARE = 20
"""Writing takes at most one part in this many of the time."""

_MEASURED_ROUNDS = 8
"""Number of newest rounds over which the duration of a round is measured."""

_MAX_SPACING = 2**20


class CheckpointPace:
    """Choice of the rounds after which a checkpoint is written, so that writing stays within its share of the time.

    ``in_step``: for stages, whose peers write parts of the same state, each as fast as its disk. Rounds are then left
    out by powers of two, so that every round that the slowest peer writes is written by all."""

    def __init__(self, *, in_step: bool) -> None:
        self._in_step = in_step
        self._begun: deque[tuple[int, float]] = deque(maxlen=_MEASURED_ROUNDS + 1)
        self._wrote_s = 0.0
        self._stalled_s = 0.0
        self._next_s = -math.inf

    def is_due(self, number: int, now_s: float) -> bool:
        """Whether the state that this round makes, which is about to be averaged, is written."""
        self._begun.append((number, now_s))
        return number % self.spacing == 0 if self._in_step else now_s >= self._next_s

    def stalled(self, seconds: float) -> None:
        """Record how long the training waited for a part of a checkpoint; it counts with the next one."""
        self._stalled_s += seconds

    def wrote(self, spent_s: float, now_s: float) -> None:
        """Record the time that writing a checkpoint took, or an attempt that the disk ended."""
        self._wrote_s, self._stalled_s = spent_s + self._stalled_s, 0.0
        self._next_s = now_s + _TIME_SHARE * self._wrote_s

    @property
    def spacing(self) -> int:
        """In step: the number of rounds from one checkpoint to the next, a power of two."""
        (first, first_s), (last, last_s) = (self._begun[0], self._begun[-1]) if self._begun else ((0, 0.0), (0, 0.0))
        if last <= first or last_s <= first_s:
            return 1
        rounds = _TIME_SHARE * self._wrote_s * (last - first) / (last_s - first_s)
        return min(_MAX_SPACING, 1 << max(0, math.ceil(math.log2(rounds)))) if rounds > 0 else 1


@dataclass(frozen=True)
class CheckpointSubject:
    """The run and model that all checkpoints of a member belong to. ``stage``: None in a run without stages."""

    run: RunFile
    run_toml: str
    recipe_config: dict[str, Any] | None
    layout: tuple[TensorSpec, ...]
    outer_vectors: int
    coordinator_key: bytes
    stage: StageAbout | None = None

    def __post_init__(self) -> None:
        """Raises ``RecipeError`` for a config that is not JSON, before the first round instead of after it."""
        try:
            recipe = json.loads(json.dumps(self.recipe_config, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"the recipe's config has to be JSON, to stand in checkpoints: {error}") from error
        object.__setattr__(self, "recipe_config", recipe)

    def about(self, anchor_version: int, digest: bytes, verdict: Verdict) -> CheckpointAbout:
        """Description of a checkpoint of the state of that version and digest, which ``verdict`` made."""
        return CheckpointAbout(
            run=self.run.run.name,
            run_hash=self.run.hash.hex(),
            run_toml=self.run_toml,
            recipe=self.recipe_config,
            layout=self.layout,
            outer_vectors=self.outer_vectors,
            round=verdict.round,
            anchor_version=anchor_version,
            state_digest=digest.hex(),
            chain=verdict.chain.hex(),
            tokens=verdict.tokens_total,
            coordinator_key=self.coordinator_key.hex(),
            stage=self.stage,
        )

    def fits(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint belongs to this model, or to this stage."""
        manifest = checkpoint.manifest
        ours = (self.layout, self.outer_vectors, self.stage)
        return (manifest.layout, manifest.outer_vectors, manifest.stage) == ours


@dataclass(frozen=True)
class _Part:
    """A part of a checkpoint that was written, or that the disk refused, and how long that took."""

    seconds: float
    is_written: bool


@dataclass(frozen=True)
class _Begun:
    """A checkpoint of the state that a round will make, whose verdict is not known yet.

    ``own``: the writing of the peer's own state."""

    unfinished: UnfinishedCheckpoint
    own: futures.Future[_Part]


class Checkpointer:
    """Writes a member's checkpoints in the background, from the memory that is in use.

    The peer's own state is written while the round is averaged: nothing changes it then. After the verdict the residual
    follows, before the next round changes that, and then the state that the round has made; a step that overwrites it
    has those ranges written first that are not yet (``StateFiles``). Methods are for the training thread."""

    def __init__(
        self,
        store: CheckpointStore,
        network: NetworkThread[Any],
        subject: CheckpointSubject,
        own: Callable[[], dict[str, Any]],
        carried: Callable[[], CarriedResidual],
        *,
        before_step: Callable[[DeferredCopy], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``own``: gives the tree of the peer's own state; ``carried``: its residual; ``before_step``: has a copy of
        that state completed before the inner optimizer's next step, None where there is none while a round is averaged,
        so that no copy is made."""
        self.store = store
        self._network = network
        self._subject = subject
        self._own = own
        self._carried = carried
        self._before_step = before_step
        self._clock = clock
        self._begun: _Begun | None = None
        self._residual: futures.Future[_Part] | None = None
        self._writing: futures.Future[None] | None = None
        self._pace = CheckpointPace(in_step=subject.stage is not None)
        self._trouble = ""
        self._verdicts: tuple[Verdict, ...] = ()

    def find(self, version: int, digest: bytes | None, *, with_own: bool) -> Checkpoint | None:
        """The checkpoint of the run's present state, else the newest undamaged one of this model; None without any.

        ``with_own``: the peer's own state is going to be restored from it."""
        load = partial(self.store.load_newest, with_own=with_own)
        found = load(version, digest) or load()
        if found is not None and not self._subject.fits(found):
            log.warning("the checkpoint of round %d is of another model and is not used", found.manifest.round)
            return None
        if found is not None and not self._verdicts:
            try:
                self._verdicts = unpack_verdicts(found.verdicts[0], f"the checkpoint of round {found.manifest.round}")
            except StateFileError as error:  # undamaged, but written with nonsense by another peer
                log.warning("the checkpoint's verdicts are not used: %s", error)
        return found

    def add_verdict(self, verdict: Verdict) -> None:
        """Record a verdict of the run; called with each, as it becomes known."""
        if self._verdicts and verdict.chain == self._verdicts[-1].chain:
            return
        follows = bool(self._verdicts) and verdict.previous_chain == self._verdicts[-1].chain
        self._verdicts = (*self._verdicts[1 - MAX_VERDICTS :], verdict) if follows else (verdict,)

    def begin(self, number: int) -> None:
        """Begin to write this peer's own state, if a checkpoint of the state that round ``number`` makes is due and
        none is being written. Called when the round is being averaged."""
        if self._writing is not None and self._writing.done():
            self.wait_for_writing()
        if not self._pace.is_due(number, self._clock()) or self._writing is not None:
            return
        try:
            unfinished = self.store.begin(number)
        except StorageError as error:
            self._warn(error)
            return
        content = LocalStateContent.of(self._own())
        if self._before_step is None:
            content.wait_for_device()
        else:
            content = content.copy()
            assert content.copying is not None
            self._before_step(content.copying)
        write = partial(unfinished.add, [(OWN_FILE, content.pieces())])
        self._begun = _Begun(unfinished, self._network.submit(self._timed(unfinished, write)))

    def discard(self) -> None:
        """Remove what was begun with a round that did not make a state."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.unfinished.stop()
            self._writing = self._network.submit(self._discard(begun))

    def commit(self, state: AnchorState, verdict: Verdict) -> None:
        """Complete the checkpoint that was begun with the round, if one was, in the background, with the state that
        ``verdict`` made. When this returns the peer's own state may change, and the residual after
        ``wait_for_residual``."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if self._before_step is None:
            self._wait(begun.own)
        unfinished, about = begun.unfinished, self._subject.about(state.version, state.digest, verdict)
        files, verdicts = unfinished.state_files(state.values, about.layout), self._verdicts_to(verdict)
        write = partial(unfinished.add, [(RESIDUAL_FILE, residual_pieces(self._carried()))])
        self._residual = self._network.submit(self._timed(unfinished, write))
        is_guarded = state.add_guard(files)
        assert is_guarded, "it is overwritten only in the next round"

        def write_rest() -> None:
            unfinished.add_state(files)
            unfinished.finish(about, verdicts)

        async def complete() -> None:
            try:
                await self._complete(begun, residual, write_rest)
            finally:
                files.abandon()
                state.remove_guard(files)

        residual = self._residual
        self._writing = self._network.submit(complete())

    def wait_for_residual(self) -> None:
        """Wait until the residual is written, which the next round changes."""
        residual, self._residual = self._residual, None
        if residual is not None:
            self._wait(residual)

    def wait_for_writing(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.wait_for_residual()
        writing, self._writing = self._writing, None
        if writing is not None:
            self._network.wait_for(writing)

    def save_final(self, state: AnchorState, verdict: Verdict | None) -> None:
        """Write the last state and wait until it is on disk. ``verdict``: None where it is not known; nothing is
        written then."""
        self.discard()
        self.wait_for_writing()
        if state.version == 0 and self._subject.run.start is not None:
            return  # the checkpoint that the run starts from is enough
        kept = {(one.anchor_version, one.digest) for one in self.store.kept()}
        if verdict is not None and (state.version, state.digest) not in kept:
            content = LocalStateContent.of(self._own())
            content.wait_for_device()
            own = OwnContents(content, self._carried())
            about = self._subject.about(state.version, state.digest, verdict)
            contents = CheckpointContents(about, state, own, self._verdicts_to(verdict))
            self._network.call(self._write(contents))

    def _verdicts_to(self, verdict: Verdict) -> tuple[Verdict, ...]:
        upto = next((at for at, one in enumerate(self._verdicts) if one.chain == verdict.chain), -1)
        return self._verdicts[: upto + 1] or (verdict,)

    def _wait(self, part: futures.Future[_Part]) -> None:
        """Wait for a part of a checkpoint; the training is held up for as long."""
        began_s = self._clock()
        self._network.wait_for(part)
        self._pace.stalled(self._clock() - began_s)

    async def _timed(self, unfinished: UnfinishedCheckpoint, work: Callable[[], object]) -> _Part:
        """Write a part of a checkpoint in a worker thread.

        A disk that refuses is a warning: others hold the state, too, and the next attempt may succeed."""
        began_s = self._clock()
        try:
            await in_thread(work)
        except StorageError as error:
            if not unfinished.is_stopped:
                self._warn(error)
            return _Part(self._clock() - began_s, is_written=False)
        return _Part(self._clock() - began_s, is_written=True)

    async def _complete(self, begun: _Begun, residual: futures.Future[_Part], write_rest: Callable[[], None]) -> None:
        """Write the rest of a checkpoint once the peer's own files are written."""
        parts = [await asyncio.wrap_future(part) for part in (begun.own, residual)]
        if all(part.is_written for part in parts):
            parts.append(await self._timed(begun.unfinished, write_rest))
        if all(part.is_written for part in parts):
            self._note_success()
        self._pace.wrote(sum(part.seconds for part in parts), self._clock())

    async def _discard(self, begun: _Begun) -> None:
        await asyncio.wrap_future(begun.own)
        await in_thread(begun.unfinished.discard)

    async def _write(self, contents: CheckpointContents) -> None:
        """Write a whole checkpoint at once."""
        try:
            await in_thread(self.store.write, contents)
        except StorageError as error:
            self._warn(error)
        else:
            self._note_success()

    def _warn(self, error: StorageError) -> None:
        log.log(logging.DEBUG if self._trouble else logging.WARNING, "a checkpoint is left out: %s", error)
        self._trouble = str(error)

    def _note_success(self) -> None:
        if self._trouble:
            log.warning("checkpoints can be written again")
        self._trouble = ""
