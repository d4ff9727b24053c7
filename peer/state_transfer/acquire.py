"""Acquisition of the run's current state: from local candidates, by catching up on rounds, or from other peers."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from shoal.peer.checkpoints.checkpoint import Checkpoint
from shoal.peer.checkpoints.writer import CheckpointKeeper
from shoal.peer.state_transfer.chunk_format import RAW, Form
from shoal.peer.state_transfer.download import Report, StateFetch
from shoal.peer.state_transfer.partial_state import PartialState, Wanted, begun_state, remove_incoming
from shoal.peer.state_transfer.start import StartState
from shoal.peer.training.anchor import State
from shoal.swarm.aio import in_thread
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError, RunEnded
from shoal.swarm.protocol.types import MAX_KEPT, KeptState
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)


class LocalCandidates:
    """States that this peer can go on from without anybody's help.

    They are its checkpoints, the rounds that it has recorded since, what it held before it started afresh
    (``earlier``), and the state that the run began with. Methods read and hash: call them in worker threads."""

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


CatchUp = Callable[[State], Awaitable[State]]
"""Brings an outdated state up to the run's newest one, from the rounds committed since. Raises ``LinkError`` when those
cannot be had (any more)."""

_LOOK_AGAIN_S = 0.2


class Holder(Protocol):
    """Part of a member that the acquisition of a state needs."""

    client: CoordinatorClient

    def hold(self, state: State) -> None: ...

    def let_go(self) -> None: ...

    async def tell(self, kept: tuple[KeptState, ...]) -> None: ...

    async def beat(self) -> None: ...


class Own(Protocol):
    """Interface of ``LocalCandidates``. ``earlier``: the state held last."""

    earlier: State | None

    @property
    def newest(self) -> State | None: ...

    def find(self, version: int, digest: bytes | None) -> State | None: ...

    def tell(self) -> tuple[KeptState, ...]: ...


class Downloads:
    """Download of the one state that is wanted; begun by this process, or by an earlier one that left its file."""

    def __init__(
        self,
        endpoint: Endpoint,
        donors: Callable[[], Sequence[str]],
        progress_s: float,
        folder: Path | None,
        report: Report,
        form: Form = RAW,
    ) -> None:
        self._endpoint = endpoint
        self._donors = donors
        self._progress_s = progress_s
        self._folder = folder
        self._report = report
        self._form = form
        self.start: StartState | None = None
        """Version 0 of a run that starts from a checkpoint; it comes from those who have that."""
        self._partial: PartialState | None = None
        self._forgiving_s = -math.inf

    @property
    def done(self) -> float | None:
        """Which share of the state is here, 0 to 1; None while nothing is being fetched."""
        partial = self._partial
        return None if partial is None else 1 - len(partial.missing) / max(1, partial.wanted.chunks)

    async def begun(self) -> Wanted | None:
        """The state that was being fetched when an earlier try, or process, ended."""
        if self._partial is not None:
            return self._partial.wanted
        return None if self._folder is None else await in_thread(begun_state, self._folder)

    async def fetch(self, wanted: Wanted) -> State:
        """That state, from all donors that have it; goes on from what there is of it. Raises ``LinkError``."""
        if self.start is not None and wanted.version == 0:
            return await self.start.fetch()
        if self._partial is None or self._partial.wanted != wanted:
            self.close()
            self._partial = await in_thread(PartialState.resume, wanted, self._folder)
        partial, began_s = self._partial, asyncio.get_running_loop().time()
        if partial.resumed:
            log.info("%d of %d chunks of the state are here from before", partial.resumed, wanted.chunks)
        fetch = StateFetch(self._endpoint, partial, self._donors, self._progress_s, self._report, self._form)
        try:
            await fetch.run()
        except LinkError:
            self._forgive(partial)
            raise
        self._report(
            "state_fetched",
            anchor_version=wanted.version,
            chunks=wanted.chunks,
            resumed=partial.resumed,
            donors=fetch.delivered,
            seconds=asyncio.get_running_loop().time() - began_s,
        )
        return partial.whole()

    def _forgive(self, partial: PartialState) -> None:
        """Nobody is left to ask: who sent something wrong is asked again, though not all the time. It may have been
        about to learn that its state was not the run's."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._forgiving_s:
            partial.refused.clear()
            self._forgiving_s = now_s + 2 * self._progress_s

    async def drop(self) -> None:
        """Nothing of it is needed any more."""
        self.close()
        self._partial = None
        if self._folder is not None:
            with suppress(OSError):
                await in_thread(remove_incoming, self._folder)

    def close(self) -> None:
        """Stop; chunks on disk stay there."""
        if self._partial is not None:
            self._partial.close()


async def agree_on_state(
    holder: Holder, own: Own, shape: tuple[int, int], downloads: Downloads, catch_up: CatchUp | None
) -> State:
    """The run's current state, held and announced: one of our own where it is that, or where ``catch_up`` makes that of
    it, else fetched. Waits for a donor, or until the run goes back to what somebody has: while nobody has anything
    newer, all say what they could go back to.

    What was begun to be fetched is fetched to its end while somebody serves it, if ``catch_up`` can bring it up to the
    newest; without that only the newest will do. Raises ``RunEnded`` when the run is over and nobody serves it."""
    tried: State | None = None
    missing: int | None = None
    trouble = ""
    while True:
        view = holder.client.view
        mine = await in_thread(own.find, view.anchor_version, view.state_digest)
        if mine is not None and await _is_agreed(holder, mine):
            await downloads.drop()
            return mine
        start = own.newest
        if catch_up is not None and start is not tried and start is not None and _is_behind(start, holder):
            tried, found = start, await _caught_up(start, catch_up)
            if found is not None:
                own.earlier = found
                continue
        view = holder.client.view
        if view.state_digest is None:
            if view.phase == "ended":
                raise RunEnded("the run is over, and none of its members holds its last state any more")
            kept = await in_thread(own.tell)
            if missing != view.anchor_version:
                missing = view.anchor_version
                log.info("%s", _waiting_for(missing, kept))
            await holder.tell(kept)
            await _until_news(holder.client, view.anchor_version)
            continue
        newest = Wanted(view.anchor_version, view.state_digest, shape)
        begun = await downloads.begun() if catch_up else None
        wanted = begun if begun and begun.shape == shape and begun.version <= newest.version else newest
        try:
            state = await downloads.fetch(wanted)
            if catch_up is not None and state.version != holder.client.view.anchor_version:
                state = await catch_up(state)
            if await _is_agreed(holder, state):
                await downloads.drop()
                return state
            await downloads.drop()
        except LinkError as error:
            if str(error) != trouble:  # once, and not every time that it is tried
                trouble = str(error)
                log.info("version %d of the state cannot be had now: %s", wanted.version, error)
            await holder.tell(await in_thread(own.tell))
            if wanted != newest:
                await downloads.drop()
        await asyncio.sleep(_LOOK_AGAIN_S)


def _waiting_for(version: int, kept: Sequence[KeptState]) -> str:
    words = f"nobody holds version {version} now; waiting for a peer that does"
    if not kept:
        return words
    newest = kept[0].anchor_version
    return f"{words}, or until the run goes back (here is version {newest}; `shoal status` says when)"


async def _until_news(client: CoordinatorClient, version: int) -> None:
    """Until somebody holds the run's state, or the run has another version; or a while."""
    view = await client.wait_for(lambda new: new.state_digest is not None or new.anchor_version != version, 2.0)
    if view.anchor_version < version and view.verdict is not None:
        log.warning("the run went back: %s", view.verdict.reason)


async def _is_agreed(holder: Holder, state: State) -> bool:
    """Hold it, and see whether it is the run's."""
    holder.hold(state)
    await holder.beat()
    view = holder.client.view
    if (view.anchor_version, view.state_digest) == (state.version, state.digest):
        return True
    holder.let_go()
    return False


def _is_behind(state: State, holder: Holder) -> bool:
    return state.version < holder.client.view.anchor_version


async def _caught_up(state: State, catch_up: CatchUp) -> State | None:
    try:
        return await catch_up(state)
    except LinkError as error:
        log.info("version %d is not caught up from: %s", state.version, error)
        return None
