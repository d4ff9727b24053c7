"""Download of one state from several donors at once; every chunk is checked as it arrives."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from shoal.peer.state_transfer.chunk_format import RAW, Form
from shoal.peer.state_transfer.donor import digests_blob
from shoal.peer.state_transfer.partial_state import PartialState
from shoal.peer.training.anchor import CHUNK_BYTES, DIGEST_BYTES, chunks_in
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.errors import Busy, LinkError, ShoalError, WireError
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_ASKED_FROM = 2
"""The last chunks are asked from so many donors, so that a slow one does not hold up the end."""


@dataclass(frozen=True, eq=False)
class ChunkRun:
    """Consecutive chunks that one donor was asked for."""

    donor: str
    chunks: range


class ChunkShares:
    """Division of the missing chunks among donors, without clock or network.

    Donors take runs of chunks as they finish those before, so a slow one gets less. ``missing``: the chunks that are
    not here yet, each named once."""

    def __init__(self, missing: Iterable[int]) -> None:
        self._missing = set(missing)
        self._free = deque(_ranges(self._missing))
        self._askers: dict[int, list[str]] = {}
        self._runs: dict[ChunkRun, None] = {}  # the oldest first

    @property
    def left(self) -> int:
        """Number of chunks that are not here."""
        return len(self._missing)

    def wants(self, chunk: int) -> bool:
        return chunk in self._missing

    def take(self, donor: str, most: int) -> ChunkRun | None:
        """Assign chunks to ask ``donor`` for, at most so many chunks; None when there is nothing for it now.

        When all is asked for, a donor that has nothing else to do is asked for the last chunk of who was asked the
        longest ago and has not delivered."""
        chunks = self._take_free(most) or self._second_ask(donor)
        if chunks is None:
            return None
        run = ChunkRun(donor, chunks)
        self._runs[run] = None
        for chunk in chunks:
            self._askers.setdefault(chunk, []).append(donor)
        return run

    def arrived(self, chunk: int) -> None:
        self._missing.discard(chunk)

    def end(self, run: ChunkRun) -> bool:
        """That donor delivers no more of it; returns whether others can now be asked for something."""
        del self._runs[run]
        given_back = False
        for chunk in run.chunks:
            self._askers[chunk].remove(run.donor)
            if self._askers[chunk]:
                given_back = given_back or chunk in self._missing
                continue
            del self._askers[chunk]
        unasked = [chunk for chunk in run.chunks if chunk in self._missing and chunk not in self._askers]
        # In front: what was asked for first is missed most.
        self._free.extendleft(reversed(list(_ranges(unasked))))
        return given_back or bool(unasked)

    def _take_free(self, most: int) -> range | None:
        if not self._free:
            return None
        chunks = self._free.popleft()
        if len(chunks) > most:
            self._free.appendleft(chunks[most:])
        return chunks[:most]

    def _second_ask(self, donor: str) -> range | None:
        if any(run.donor == donor for run in self._runs):
            return None
        for run in self._runs:
            for chunk in reversed(run.chunks):
                askers = self._askers[chunk]
                if chunk in self._missing and len(askers) < _ASKED_FROM and donor not in askers:
                    return range(chunk, chunk + 1)
        return None


def _ranges(chunks: Iterable[int]) -> Iterable[range]:
    """Those numbers as ranges of consecutive ones."""
    following = count()
    for _, group in groupby(sorted(chunks), key=lambda chunk: chunk - next(following)):
        run = list(group)
        yield range(run[0], run[-1] + 1)


MOST_DONORS = 16
_RUNS_AT_ONCE = 2
"""Of each donor: while one run is on its way, the next one has been asked for."""

MOST_CHUNKS_A_RUN = 4
"""With ``_RUNS_AT_ONCE``, 8 MiB are under way from one donor at most; from a slow one, what takes it seconds."""

_BUFFER_BYTES = CHUNK_BYTES + 2**12  # packed, noise is a little longer
_RUN_S = 0.5
_ASK_AGAIN_S = 0.5
_LOOK_S = 1.0

Report = Callable[..., Any]
"""``report(event, **fields)``."""


class _Wrong(Exception):
    """Raised when a donor sent something that is not of this state; the text says what."""


@dataclass
class _Donor:
    """Speed of a donor. ``chunks_a_run``: how many it delivered lately in about half a second."""

    peer: str
    chunks_a_run: int = 1
    spare: list[bytearray] = field(default_factory=list)

    def took(self, run_s: float, whole: bool) -> None:
        if run_s > 2 * _RUN_S:
            self.chunks_a_run = max(1, self.chunks_a_run // 2)
        elif whole and run_s < _RUN_S:
            self.chunks_a_run = min(MOST_CHUNKS_A_RUN, 2 * self.chunks_a_run)


class StateFetch:
    """Fetch of what is missing of ``partial``. ``run`` it once; another try takes another ``StateFetch``.

    ``donors``: whom to ask, in this order; looked at again and again, as members come and go. A donor that is silent
    for ``progress_s`` is given up for a while; one that is ``Busy`` lives, and that is no silence."""

    def __init__(
        self,
        endpoint: Endpoint,
        partial: PartialState,
        donors: Callable[[], Sequence[str]],
        progress_s: float,
        report: Report | None = None,
        form: Form = RAW,
    ) -> None:
        self._endpoint = endpoint
        self._partial = partial
        self._donors = donors
        self._progress_s = progress_s
        self._report = report or say_nothing
        self._form = form
        self._shares = ChunkShares(partial.missing)
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._trouble = LinkError(f"nobody in the run offers the state of version {partial.wanted.version} yet")
        self._changed = asyncio.Event()
        self.delivered: dict[str, int] = {}
        """Chunks by donor."""

    async def run(self) -> None:
        """Raises the last ``LinkError`` when there is no donor left that has not failed."""
        async with task_scope() as tasks:
            writing = tasks.create_task(self._write())
            try:
                while self._partial.missing:
                    self._ask_more(tasks)
                    if not self._asked:
                        raise self._trouble
                    await self._change()
            finally:
                for task in [*self._asked.values(), writing]:
                    task.cancel()

    def _ask_more(self, tasks: asyncio.TaskGroup) -> None:
        now_s = asyncio.get_running_loop().time()
        for peer in self._donors():
            if len(self._asked) >= MOST_DONORS:
                return
            if peer in self._asked or peer in self._partial.refused or now_s < self._not_before_s.get(peer, now_s):
                continue
            self._asked[peer] = tasks.create_task(self._take_from(peer))

    async def _take_from(self, peer: str) -> None:
        donor = _Donor(peer)
        try:
            if not self._partial.chunk_digests:
                await self._learn_digests(donor)
            async with task_scope() as tasks:
                for _ in range(_RUNS_AT_ONCE):
                    tasks.create_task(self._take_runs(donor))
        except _Wrong as error:
            self._refuse(peer, str(error))
        except ShoalError as error:  # the donor's errors come out of here, too
            self._trouble = LinkError(f"{peer}: {error}")
            self._not_before_s[peer] = asyncio.get_running_loop().time() + 2 * self._progress_s
            log.info("no more of the state from %s for now: %s", peer, error)
        finally:
            del self._asked[peer]
            self._changed.set()

    def _refuse(self, peer: str, why: str) -> None:
        version = self._partial.wanted.version
        self._partial.refused.add(peer)
        self._trouble = LinkError(f"{peer} {why}")
        log.warning("%s is not asked for version %d of the state any more: it %s", peer, version, why)
        self._report("donor_refused", donor=peer, anchor_version=version, reason=why)

    async def _learn_digests(self, donor: _Donor) -> None:
        partial = self._partial
        size = DIGEST_BYTES * partial.wanted.chunks
        digests = bytearray()
        async for _, data in self._received(donor, digests_blob(partial.wanted.version), range(chunks_in(size))):
            digests += data
        if not await in_thread(partial.learn_digests, bytes(digests)):
            raise _Wrong("has another state of that version than the run agreed on")

    async def _take_runs(self, donor: _Donor) -> None:
        """Until all chunks are here."""
        while self._partial.missing:
            run = self._shares.take(donor.peer, donor.chunks_a_run)
            if run is None:
                await self._change()
                continue
            is_busy = False
            try:
                await self._take_run(donor, run)
            except Busy as error:
                log.debug("%s: %s", donor.peer, error)
                is_busy = True
            finally:
                if self._shares.end(run):
                    self._changed.set()
            if is_busy:
                await asyncio.sleep(_ASK_AGAIN_S)

    async def _take_run(self, donor: _Donor, run: ChunkRun) -> None:
        loop, partial = asyncio.get_running_loop(), self._partial
        began_s = loop.time()
        async for index, data in self._received(donor, self._form.blob(partial.wanted.version), run.chunks):
            if self._shares.wants(index):
                if not await in_thread(self._put, index, data):
                    raise _Wrong(f"sent a wrong chunk {index}")
                self._arrived(donor, index)
            if index != run.chunks[-1] and not any(map(self._shares.wants, run.chunks)):
                break  # others had the rest sooner
        donor.took(loop.time() - began_s, len(run.chunks) == donor.chunks_a_run)

    def _put(self, index: int, packed: memoryview) -> bool:
        """In a thread."""
        try:
            values = self._form.unpack(packed, self._partial.chunk(index).nbytes)
        except WireError as error:
            log.debug("chunk %d: %s", index, error)
            return False
        return self._partial.put(index, values)

    def _arrived(self, donor: _Donor, index: int) -> None:
        if index in self._partial.missing:
            self._partial.missing.discard(index)
            self._shares.arrived(index)
            self.delivered[donor.peer] = self.delivered.get(donor.peer, 0) + 1
            self._partial.unwritten.append(index)
            self._changed.set()

    async def _received(self, donor: _Donor, blob: Blob, chunks: range) -> AsyncGenerator[tuple[int, memoryview], None]:
        """Each chunk with its bytes, in memory that is used again as soon as the caller goes on."""
        places: dict[int, memoryview] = {}

        def sink(chunk: int, size_bytes: int) -> memoryview:  # on the data plane's thread
            # Whoever sends more than a chunk is found out by its hash.
            fits = size_bytes <= _BUFFER_BYTES
            buffer = donor.spare.pop() if fits and donor.spare else bytearray(max(size_bytes, _BUFFER_BYTES))
            places[chunk] = memoryview(buffer)[:size_bytes]
            return places[chunk]

        async with aclosing(self._endpoint.fetch(donor.peer, blob, chunks, sink, self._progress_s)) as stream:
            async for index in stream:
                place = places.pop(index)
                yield index, place
                if isinstance(place.obj, bytearray) and len(place.obj) == _BUFFER_BYTES:
                    donor.spare.append(place.obj)

    async def _write(self) -> None:
        """Keep what has come for another process, behind everything else. A disk that refuses is a warning."""
        partial = self._partial
        try:
            while partial.folder is not None:
                while partial.unwritten:
                    await in_thread(partial.write_next)
                await self._change()
        except OSError as error:
            log.warning("the state is fetched into memory only, and begins anew after a restart: %s", error)

    async def _change(self) -> None:
        """Something has happened, or might have."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._changed.wait()


def say_nothing(event: str, **fields: Any) -> None:
    log.debug("%s: %s", event, fields)
