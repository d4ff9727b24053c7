"""Background writing of a training peer's checkpoints, as often as takes a twentieth of the time."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from shoal.peer.checkpoints.checkpoint import MAX_VERDICTS, Checkpoint, CheckpointContents, unpack_verdicts
from shoal.peer.checkpoints.local_state import SnapshotBuffers
from shoal.peer.checkpoints.manifest import CheckpointAbout, StageAbout
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.network_thread import NetworkThread
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.aio import in_thread
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
        self._ended: deque[tuple[int, float]] = deque(maxlen=_MEASURED_ROUNDS + 1)
        self._wrote_s = 0.0
        self._next_s = -math.inf

    def is_due(self, number: int, now_s: float) -> bool:
        """Whether the state of this round, which has just ended, is written."""
        self._ended.append((number, now_s))
        return number % self.spacing == 0 if self._in_step else now_s >= self._next_s

    def wrote(self, began_s: float, now_s: float) -> None:
        """Record the duration of a checkpoint, or of an attempt that the disk ended."""
        self._wrote_s = now_s - began_s
        self._next_s = now_s + _TIME_SHARE * self._wrote_s

    @property
    def spacing(self) -> int:
        """In step: the number of rounds from one checkpoint to the next, a power of two."""
        (first, first_s), (last, last_s) = (self._ended[0], self._ended[-1]) if self._ended else ((0, 0.0), (0, 0.0))
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


class Checkpointer:
    """Writes a member's checkpoints in the background; the training thread only copies the peer's own state.

    ``own``: gives the tree of the peer's own state."""

    def __init__(
        self,
        store: CheckpointStore,
        network: NetworkThread[Any],
        subject: CheckpointSubject,
        own: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._network = network
        self._subject = subject
        self._own = own
        self._clock = clock
        self._snapshots = SnapshotBuffers()
        self._is_prepared = False
        self._preparing: futures.Future[None] | None = None
        self._writing: futures.Future[None] | None = None
        self._pace = CheckpointPace(in_step=subject.stage is not None)
        self._trouble = ""
        self._verdicts: tuple[Verdict, ...] = ()

    def prepare(self) -> None:
        """Allocate the memory for snapshots in the background, once the inner optimizer has its state.

        The first touch of fresh pages costs more than the copy."""
        if not self._is_prepared:
            self._is_prepared = True
            self._preparing = self._network.submit(in_thread(self._snapshots.prepare, self._own()))

    def find(self, version: int, digest: bytes | None) -> Checkpoint | None:
        """The checkpoint of the run's present state, else the newest undamaged one of this model; None without any."""
        found = self.store.load_newest(version, digest) or self.store.load_newest()
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

    def save_if_due(self, state: AnchorState, verdict: Verdict) -> None:
        """Start writing the state that ``verdict`` made, unless one is being written or it would take too much of the
        time."""
        if self._writing is not None and self._writing.done():
            self._wait_for_writing()
        if self._pace.is_due(verdict.round, self._clock()) and self._writing is None:
            self._start_writing(state, verdict)

    def save_final(self, state: AnchorState, verdict: Verdict | None) -> None:
        """Write the last state and wait until it is on disk. ``verdict``: None where it is not known; nothing is
        written then."""
        self._wait_for_writing()
        if state.version == 0 and self._subject.run.start is not None:
            return  # the checkpoint that the run starts from is enough
        kept = {(one.anchor_version, one.digest) for one in self.store.kept()}
        if verdict is not None and (state.version, state.digest) not in kept:
            self._start_writing(state, verdict)
            self._wait_for_writing()

    def _start_writing(self, state: AnchorState, verdict: Verdict) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            self._network.wait_for(preparing)
        about, own = self._subject.about(state.version, state.digest, verdict), self._snapshots.copy(self._own())
        upto = next((at for at, one in enumerate(self._verdicts) if one.chain == verdict.chain), -1)
        contents = CheckpointContents(about, state, own, self._verdicts[: upto + 1] or (verdict,))
        self._writing = self._network.submit(self._write(contents))

    def _wait_for_writing(self) -> None:
        """Wait for the checkpoint that is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._network.wait_for(writing)

    async def _write(self, contents: CheckpointContents) -> None:
        """Write a checkpoint. A disk that refuses is a warning: others hold the state, too, and the next attempt may
        succeed."""
        started_s = self._clock()
        try:
            await in_thread(self.store.write, contents)
        except StorageError as error:
            log.log(logging.DEBUG if self._trouble else logging.WARNING, "a checkpoint is left out: %s", error)
            self._trouble = str(error)
        else:
            if self._trouble:
                log.warning("checkpoints can be written again")
            self._trouble = ""
            log.debug("checkpoint of round %d: %.3f s", contents.about.round, self._clock() - started_s)
        finally:
            self._pace.wrote(started_s, self._clock())
