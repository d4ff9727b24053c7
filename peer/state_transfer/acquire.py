"""Acquisition of the run's current state: from local candidates, by catching up on rounds, or from other peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeGuard

from shoal.peer.checkpoints.checkpoint import Checkpoint
from shoal.peer.checkpoints.checkpointer import Checkpointer
from shoal.peer.state_transfer.chunk_format import RAW, ChunkFormat
from shoal.peer.state_transfer.download import Report, StateDownload
from shoal.peer.state_transfer.partial_state import PartialState, WantedState, remove_incoming, state_on_disk
from shoal.peer.state_transfer.start import StartState
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.aio import in_thread
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import Busy, LinkError, RunEnded, StateFileError
from shoal.swarm.protocol.types import MAX_KEPT, KeptState
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

CatchUp = Callable[[AnchorState], Awaitable[AnchorState]]
"""Brings an earlier state up to the run's newest one, from the rounds committed since.

Raises ``LinkError`` when their results cannot be had (any more)."""

_POLL_S = 0.2


class LocalCandidates:
    """States from which this peer can go on without help: candidates for the run's current state.

    They are its checkpoints, the state that its round records lead to from there, the state that it held before it
    rejoined or has fetched since (``earlier``), and the run's initial state. A state that was overwritten, or released,
    is a candidate no more; it can be read again where it is on the disk. Methods read and hash: call them in worker
    threads."""

    def __init__(
        self,
        checkpointer: Checkpointer | None,
        make_initial: Callable[[], AnchorState] | None,
        roll_forward: Callable[[AnchorState, int], AnchorState],
        *,
        is_first: bool,
        initial_digest: bytes | None = None,
    ) -> None:
        """``make_initial``: None where the initial state cannot be made (any more); ``roll_forward``: applies the local
        round records to a state, up to an anchor version; ``is_first``: this process has held no state yet;
        ``initial_digest``: the initial state's, where it is known without making that."""
        self.earlier: AnchorState | None = None
        self.checkpoint: Checkpoint | None = None
        """The last checkpoint that was read: of the run's state, or else the newest undamaged one."""
        self._checkpointer = checkpointer
        self._make_initial = make_initial
        self._roll_forward = roll_forward
        self._rolled: AnchorState | None = None
        self._is_first = is_first
        self._initial_digest = initial_digest

    def find(self, version: int, digest: bytes | None) -> AnchorState | None:
        """The state of that version and digest, if it is here and undamaged. A ``digest`` of None fits any state."""
        if _is_there(self.earlier) and _matches(self.earlier, version, digest):
            return self.earlier
        if version > 0:
            return self._from_checkpoint(version, digest) or self._from_records(version, digest)
        if self._make_initial is None or digest not in (None, self._initial_digest or digest):
            return None
        initial = self._make_initial()
        self._initial_digest = initial.digest
        return initial

    def _from_checkpoint(self, version: int, digest: bytes | None) -> AnchorState | None:
        if self._checkpointer is None:
            return None
        last = self.checkpoint
        is_last = last is not None and last.state.is_current and _matches(last.state, version, digest)
        # A process that starts takes its optimizer's state from any checkpoint: that is better than none.
        takes_any = last is None and self._is_first
        if takes_any or (not is_last and (version, digest) in self._on_disk(digest)):
            self.checkpoint = self._checkpointer.find(version, digest, with_own=self._is_first) or last
        found = self.checkpoint
        is_found = found is not None and found.state.is_current and _matches(found.state, version, digest)
        return found.state if found is not None and is_found else None

    def _from_records(self, version: int, digest: bytes | None) -> AnchorState | None:
        """The state that the round records lead to from the last checkpoint; computed when a process starts, and again
        where it is asked for and is not in memory any more."""
        is_it = self._rolled is not None and _matches(self._rolled, version, digest)
        if self._is_first and (self._rolled is None or (is_it and not self._rolled.is_current)):
            self._rolled = self._roll(version) or self._rolled
        return self._rolled if _is_there(self._rolled) and _matches(self._rolled, version, digest) else None

    def _roll(self, version: int) -> AnchorState | None:
        last = self._last_checkpoint()
        if last is None and self._make_initial is not None:
            last = self._make_initial()
        try:
            return self._roll_forward(last, version) if last is not None and last.version < version else last
        except StateFileError as error:
            log.warning("a state cannot be computed again from the records of rounds: %s", error)
            return None

    def _last_checkpoint(self) -> AnchorState | None:
        """State of the last checkpoint, which is read again where it has been overwritten."""
        last = self.checkpoint
        if last is None or last.state.is_current or self._checkpointer is None:
            return last.state if last is not None and last.state.is_current else None
        again = self._checkpointer.find(last.state.version, last.state.digest, with_own=False)
        return again.state if again is not None else None

    @property
    def newest(self) -> AnchorState | None:
        """The newest state that ``find`` has read or made: the one to catch up from."""
        held = [self.earlier, self._rolled, self.checkpoint.state if self.checkpoint is not None else None]
        return max(filter(_is_there, held), key=lambda one: one.version, default=None)

    def release(self) -> None:
        """Free the memory of what was read from the disk or made, for the state that is fetched instead."""
        for state in (self._rolled, self.checkpoint.state if self.checkpoint is not None else None):
            if state is not None:
                state.release()

    def _on_disk(self, digest: bytes | None) -> set[tuple[int, bytes | None]]:
        kept = self._checkpointer.store.kept() if self._checkpointer is not None else ()
        return {(one.anchor_version, one.digest if digest is not None else None) for one in kept}

    def kept_states(self) -> tuple[KeptState, ...]:
        """Version and digest of all candidates, newest first, as many as a heartbeat has room for."""
        newest = dict.fromkeys(self._after_initial())
        kept = [KeptState(anchor_version=version, digest=digest) for version, digest in newest][: MAX_KEPT - 1]
        if self._make_initial is not None:
            self._initial_digest = self._initial_digest or self._make_initial().digest
            kept.append(KeptState(anchor_version=0, digest=self._initial_digest))
        return tuple(kept)

    def _after_initial(self) -> Iterator[tuple[int, bytes]]:
        if _is_there(self.earlier):
            yield self.earlier.version, self.earlier.digest
        if self._rolled is not None and self._rolled.version > 0:
            yield self._rolled.version, self._rolled.digest
        if self._checkpointer is not None:
            yield from ((one.anchor_version, one.digest) for one in self._checkpointer.store.kept())


def _is_there(state: AnchorState | None) -> TypeGuard[AnchorState]:
    return state is not None and state.is_current


def _matches(state: AnchorState, version: int, digest: bytes | None) -> bool:
    return state.version == version and digest in (None, state.digest)


class StateHolder(Protocol):
    """Part of a member that ``acquire_state`` needs."""

    client: CoordinatorClient

    def hold_state(self, state: AnchorState) -> None: ...

    def drop_state(self) -> None: ...

    async def report_kept(self, kept: tuple[KeptState, ...]) -> None: ...

    async def send_heartbeat(self) -> None: ...


class CurrentDownload:
    """The one state download that a member has under way, across attempts and, by its folder, across processes.

    A state that was fetched stays in the folder until ``drop``, for a process that is killed before it holds it."""

    def __init__(
        self,
        endpoint: Endpoint,
        donors: Callable[[], Sequence[str]],
        progress_s: float,
        folder: Path | None,
        report: Report,
        chunk_format: ChunkFormat = RAW,
        start: StartState | None = None,
    ) -> None:
        """``start``: version 0 of a run that starts from a checkpoint; peers that have the checkpoint serve it."""
        self._endpoint = endpoint
        self._donors = donors
        self._progress_s = progress_s
        self._folder = folder
        self._report = report
        self._format = chunk_format
        self._start = start
        self._download: StateDownload | None = None
        self._is_done = False

    @property
    def share_done(self) -> float | None:
        """Share of the state that is here, 0 to 1; None while nothing is being fetched."""
        if self._download is None:
            return 1.0 if self._is_done else None
        partial = self._download.partial
        return 1 - len(partial.missing) / max(1, partial.wanted.chunks)

    async def unfinished(self) -> WantedState | None:
        """The state whose download an earlier attempt, or an earlier process, did not finish."""
        if self._download is not None:
            return self._download.partial.wanted
        return None if self._folder is None else await in_thread(state_on_disk, self._folder)

    async def fetch(self, wanted: WantedState) -> AnchorState:
        """Fetch that state, going on from the chunks of it that are here. Raises ``LinkError``."""
        if self._start is not None and wanted.version == 0:
            return await self._start.fetch()
        if self._download is None or self._download.partial.wanted != wanted:
            self.close()
            partial = await in_thread(PartialState.resume, wanted, self._folder)
            if partial.resumed:
                log.info("resuming the state's download: %d of %d chunks are here", partial.resumed, wanted.chunks)
            self._is_done = False
            self._download = StateDownload(
                self._endpoint, partial, self._donors, self._progress_s, self._report, self._format
            )
        try:
            state = (await self._download.run()).whole()
        except LinkError:
            self._download.readmit_donors()
            raise
        self.close()
        self._download, self._is_done = None, True
        return state

    async def drop(self) -> None:
        """Stop, and remove all chunks: they are not needed any more."""
        self.close()
        self._download, self._is_done = None, False
        if self._folder is not None:
            with suppress(OSError):
                await in_thread(remove_incoming, self._folder)

    def close(self) -> None:
        """Stop; chunks on disk stay for a later process."""
        if self._download is not None:
            self._download.partial.close()


async def acquire_state(
    holder: StateHolder,
    candidates: LocalCandidates,
    shape: tuple[int, int],
    download: CurrentDownload,
    catch_up: CatchUp | None,
) -> AnchorState:
    """Return the run's current state once it is held and announced.

    A local candidate is taken where it is the run's state, or where ``catch_up`` turns it into that, in its own memory;
    otherwise the state is fetched, and is a candidate then: where rounds are faster than the download, ``catch_up``
    leads on from it. Waits for a donor, or until the run goes back to a state that a member has kept: while nobody
    holds the newest state, every member announces which ones it has.

    An unfinished download is finished while donors serve it and ``catch_up`` can bring it up to the newest state;
    without ``catch_up`` only the newest state is fetched. Raises ``RunEnded`` when the run is over and nobody serves
    its last state."""
    caught_up_from: AnchorState | None = None
    fetched: AnchorState | None = None
    waited_for: int | None = None
    last_error = ""
    while True:
        view = holder.client.view
        local = await in_thread(candidates.find, view.anchor_version, view.state_digest)
        if local is not None and await _hold_if_current(holder, local):
            await download.drop()
            return local
        newest_local = candidates.newest
        if (
            catch_up is not None
            and newest_local is not None
            and newest_local is not caught_up_from
            and newest_local.version < holder.client.view.anchor_version
        ):
            caught_up_from = newest_local
            try:
                candidates.earlier = await catch_up(newest_local)
                continue
            except LinkError as error:
                log.info("cannot catch up from version %d: %s", newest_local.version, error)
                if not newest_local.is_current:  # some rounds were applied
                    candidates.earlier = newest_local.current
        if fetched is not None:  # it leads nowhere
            fetched = None
            await download.drop()
        view = holder.client.view
        if view.state_digest is None:
            if view.phase == "ended":
                raise RunEnded("the run is over, and none of its members holds its last state any more")
            kept = await in_thread(candidates.kept_states)
            if waited_for != view.anchor_version:
                waited_for = view.anchor_version
                log.info("%s", _waiting_message(waited_for, kept))
            await holder.report_kept(kept)
            await _wait_for_state(holder.client, view.anchor_version)
            continue
        newest = WantedState(view.anchor_version, view.state_digest, shape)
        unfinished = await download.unfinished() if catch_up else None
        wanted = newest
        if unfinished is not None and unfinished.shape == shape and unfinished.version <= newest.version:
            wanted = unfinished
        candidates.release()
        try:
            candidates.earlier = fetched = await download.fetch(wanted)
        except LinkError as error:
            if str(error) != last_error:  # logged once, and not at every attempt
                last_error = str(error)
                log.info("version %d of the state cannot be fetched now: %s", wanted.version, error)
            await holder.report_kept(await in_thread(candidates.kept_states))
            if wanted != newest and not isinstance(error, Busy):  # what donors have sent stays
                await download.drop()
            await asyncio.sleep(_POLL_S)


def _waiting_message(version: int, kept: Sequence[KeptState]) -> str:
    words = f"nobody holds version {version} now; waiting for a peer that does"
    if not kept:
        return words
    newest = kept[0].anchor_version
    return f"{words}, or until the run goes back (version {newest} is kept here; `shoal status` says when)"


async def _wait_for_state(client: CoordinatorClient, version: int) -> None:
    """Wait until somebody holds the run's state or the run has another version, for two seconds at most."""
    view = await client.wait_for(lambda new: new.state_digest is not None or new.anchor_version != version, 2.0)
    if view.anchor_version < version and view.verdict is not None:
        log.warning("the run went back: %s", view.verdict.reason)


async def _hold_if_current(holder: StateHolder, state: AnchorState) -> bool:
    """Hold and announce ``state``; return whether it is the run's, and let it go again where it is not."""
    holder.hold_state(state)
    await holder.send_heartbeat()
    view = holder.client.view
    if (view.anchor_version, view.state_digest) == (state.version, state.digest):
        return True
    holder.drop_state()
    return False
