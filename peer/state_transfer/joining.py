"""How a member comes to hold the run's state: its own, if it is that, else from others, and the rounds since then."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from shoal.peer.state_transfer.chunk_format import RAW, Form
from shoal.peer.state_transfer.partial_state import PartialState, Wanted, begun_state, remove_incoming
from shoal.peer.state_transfer.start_state import StartState
from shoal.peer.state_transfer.state_fetch import Report, StateFetch
from shoal.peer.training.anchor import State
from shoal.swarm.aio import in_thread
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import LinkError, RunEnded
from shoal.swarm.protocol.messages import KeptState
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

CatchUp = Callable[[State], Awaitable[State]]
"""Brings an outdated state up to the run's newest one, from the rounds committed since. Raises ``LinkError`` when those
cannot be had (any more)."""

_LOOK_AGAIN_S = 0.2


class Holder(Protocol):
    """What joining needs of a member."""

    client: CoordinatorClient

    def hold(self, state: State) -> None: ...

    def let_go(self) -> None: ...

    async def tell(self, kept: tuple[KeptState, ...]) -> None: ...

    async def beat(self) -> None: ...


class Own(Protocol):
    """The states that a member can go on from by itself (``own_states.py``). ``earlier``: what it has held last."""

    earlier: State | None

    @property
    def newest(self) -> State | None: ...

    def find(self, version: int, digest: bytes | None) -> State | None: ...

    def tell(self) -> tuple[KeptState, ...]: ...


class Downloads:
    """The one state that is being fetched; begun by this process or by one before, whose file is in ``folder``."""

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
        """What is on disk stays there."""
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
