"""The states that a peer can go on from without anybody's help, and which of them is the run's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shoal.peer.checkpoints.checkpoint import Checkpoint
from shoal.peer.checkpoints.writer import CheckpointKeeper
from shoal.peer.training.anchor import State
from shoal.swarm.protocol.messages import MAX_KEPT, KeptState


class OwnStates:
    """Its checkpoints, the rounds that it has kept since, what it held before it started afresh (``earlier``), and the
    state that the run began with.

    Its methods read and hash: call them in worker threads."""

    def __init__(
        self,
        keeper: CheckpointKeeper | None,
        make_initial: Callable[[], State] | None,
        roll_forward: Callable[[State, int], State],
        *,
        is_first: bool,
        initial_digest: bytes | None = None,
    ) -> None:
        """``make_initial``: None where it cannot be made (any more); ``roll_forward``: what the rounds kept here make
        of a state, up to an anchor version; ``is_first``: this process has held no state yet; ``initial_digest``:
        where it is known before the initial state is made."""
        self.earlier: State | None = None
        self.checkpoint: Checkpoint | None = None
        """The last one that was read: of the run's state, or else the newest whole one."""
        self._keeper = keeper
        self._make_initial = make_initial
        self._roll_forward = roll_forward
        self._rolled: State | None = None
        self._is_first = is_first
        self._initial_digest = initial_digest

    def find(self, version: int, digest: bytes | None) -> State | None:
        """The state of that version and digest (of any one for None), if it is here and whole."""
        if self.earlier is not None and _is(self.earlier, version, digest):
            return self.earlier
        if version > 0:
            return self._from_checkpoint(version, digest) or self._from_records(version, digest)
        if self._make_initial is None or digest not in (None, self._initial_digest or digest):
            return None
        initial = self._make_initial()
        self._initial_digest = initial.digest
        return initial

    def _from_checkpoint(self, version: int, digest: bytes | None) -> State | None:
        if self._keeper is None:
            return None
        last = self.checkpoint
        is_it = last is not None and _is(last.state, version, digest)
        # A process that starts takes up its optimizer from any: that is better than none.
        takes_any = last is None and self._is_first
        if takes_any or (not is_it and (version, digest) in self._on_disk(digest)):
            self.checkpoint = self._keeper.find(version, digest) or last
        found = self.checkpoint
        return found.state if found is not None and _is(found.state, version, digest) else None

    def _from_records(self, version: int, digest: bytes | None) -> State | None:
        """What a process that starts makes, once, of the last state that it finds and of the rounds since."""
        if self._rolled is None and self._is_first:
            last = self.checkpoint.state if self.checkpoint is not None else None
            if last is None and self._make_initial is not None:
                last = self._make_initial()
            if last is not None:
                self._rolled = self._roll_forward(last, version) if last.version < version else last
        return self._rolled if self._rolled is not None and _is(self._rolled, version, digest) else None

    @property
    def newest(self) -> State | None:
        """The newest of those that ``find`` has looked at; what the run has done since would be added to that."""
        held = [self.earlier, self._rolled, self.checkpoint.state if self.checkpoint is not None else None]
        return max((state for state in held if state is not None), key=lambda one: one.version, default=None)

    def _on_disk(self, digest: bytes | None) -> set[tuple[int, bytes | None]]:
        kept = self._keeper.store.kept() if self._keeper is not None else ()
        return {(one.anchor_version, one.digest if digest is not None else None) for one in kept}

    def tell(self) -> tuple[KeptState, ...]:
        """All of them, newest first, as far as a heartbeat has room for them."""
        newest = dict.fromkeys(self._before_initial())
        told = [KeptState(anchor_version=version, digest=digest) for version, digest in newest][: MAX_KEPT - 1]
        if self._make_initial is not None:
            self._initial_digest = self._initial_digest or self._make_initial().digest
            told.append(KeptState(anchor_version=0, digest=self._initial_digest))
        return tuple(told)

    def _before_initial(self) -> Iterator[tuple[int, bytes]]:
        if self.earlier is not None:
            yield self.earlier.version, self.earlier.digest
        if self._rolled is not None and self._rolled.version > 0:
            yield self._rolled.version, self._rolled.digest
        if self._keeper is not None:
            yield from ((one.anchor_version, one.digest) for one in self._keeper.store.kept())


def _is(state: State, version: int, digest: bytes | None) -> bool:
    return state.version == version and digest in (None, state.digest)
