"""Download of one state from several donors at once; every chunk is checked as it arrives."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from shoal.peer.state_transfer.chunk_format import PIECE_BYTES, RAW, ChunkFormat, pieces_in
from shoal.peer.state_transfer.donor import digests_blob
from shoal.peer.state_transfer.partial_state import PartialState
from shoal.peer.training.anchor import DIGEST_BYTES
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.errors import Busy, LinkError, ShoalError, WireError
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_REQUESTED_FROM = 2
"""The last chunks are requested from this many donors, so that a slow one does not delay the end."""

MAX_DONORS = 16
_RUNS_AT_ONCE = 2
"""Requests to one donor at a time: while one run is on its way, the next one has been requested."""

MAX_RUN_BYTES = 2**22
"""At most 8 MiB are under way from one donor, with ``_RUNS_AT_ONCE``: seconds of a slow donor's uplink."""

_MORE_BYTES = 2**12  # a packed chunk of noise is slightly longer than its values
_RUN_S = 0.5
_BUSY_RETRY_S = 0.5
_BUSY_WAIT_S, _MOST_WAIT_S = 10.0, 600.0
"""Longest wait for a busy donor before others take over its share, and before it is asked again whatever it says."""
_POLL_S = 1.0

Report = Callable[..., Any]
"""``report(event, **fields)``."""


@dataclass(frozen=True, eq=False)
class ChunkRun:
    """Consecutive chunks that were requested from one donor."""

    donor: str
    chunks: range


class ChunkShares:
    """Division of the missing chunks among donors, without clock or network.

    A donor gets a run of chunks whenever it has finished the one before, so slow donors get fewer."""

    def __init__(self, missing: Iterable[int]) -> None:
        self._missing = set(missing)
        self._free = deque(_ranges(self._missing))
        self._donors_of: dict[int, list[str]] = {}
        self._runs: dict[ChunkRun, None] = {}  # the oldest first

    @property
    def left(self) -> int:
        """Number of chunks that have not arrived."""
        return len(self._missing)

    def is_missing(self, chunk: int) -> bool:
        return chunk in self._missing

    def assign(self, donor: str, limit: int) -> ChunkRun | None:
        """Assign up to ``limit`` consecutive chunks to ``donor``; None when there is nothing for it now.

        Once every chunk has been requested, a donor without a run gets the last chunk that is missing of the run that
        was requested the longest ago."""
        chunks = self._next_free(limit) or self._second_request(donor)
        if chunks is None:
            return None
        run = ChunkRun(donor, chunks)
        self._runs[run] = None
        for chunk in chunks:
            self._donors_of.setdefault(chunk, []).append(donor)
        return run

    def mark_arrived(self, chunk: int) -> None:
        self._missing.discard(chunk)

    def end_run(self, run: ChunkRun) -> bool:
        """Record that the donor sends no more of this run; return whether other donors may now request some of it."""
        del self._runs[run]
        is_second_possible = False
        for chunk in run.chunks:
            self._donors_of[chunk].remove(run.donor)
            if self._donors_of[chunk]:
                is_second_possible = is_second_possible or chunk in self._missing
                continue
            del self._donors_of[chunk]
        unrequested = [chunk for chunk in run.chunks if chunk in self._missing and chunk not in self._donors_of]
        # In front, as they were requested first.
        self._free.extendleft(reversed(list(_ranges(unrequested))))
        return is_second_possible or bool(unrequested)

    def _next_free(self, limit: int) -> range | None:
        if not self._free:
            return None
        chunks = self._free.popleft()
        if len(chunks) > limit:
            self._free.appendleft(chunks[limit:])
        return chunks[:limit]

    def _second_request(self, donor: str) -> range | None:
        if any(run.donor == donor for run in self._runs):
            return None
        for run in self._runs:
            for chunk in reversed(run.chunks):
                donors = self._donors_of[chunk]
                if chunk in self._missing and len(donors) < _REQUESTED_FROM and donor not in donors:
                    return range(chunk, chunk + 1)
        return None


def _ranges(chunks: Iterable[int]) -> Iterable[range]:
    """Group numbers into ranges of consecutive ones."""
    following = count()
    for _, group in groupby(sorted(chunks), key=lambda chunk: chunk - next(following)):
        run = list(group)
        yield range(run[0], run[-1] + 1)


class _WrongData(Exception):
    """Raised when a donor sent data that does not belong to the wanted state; the text says what."""


@dataclass
class _Donor:
    """One donor of a download: its speed and its spare buffers.

    ``chunks_a_run`` follows the number of chunks that it delivers in about half a second, up to ``most``."""

    peer: str
    most: int
    chunks_a_run: int = 1
    spare: list[bytearray] = field(default_factory=list)

    def adapt(self, run_s: float, is_full_run: bool) -> None:
        """Adapt the size of further runs to the seconds that the last one took."""
        if run_s > 2 * _RUN_S:
            self.chunks_a_run = max(1, self.chunks_a_run // 2)
        elif is_full_run and run_s < _RUN_S:
            self.chunks_a_run = min(self.most, 2 * self.chunks_a_run)


class StateDownload:
    """Download of one state: chooses donors, divides the chunks among them, checks what they send.

    ``donors`` gives the peers to ask, in order of preference; it is called again and again, as members come and go. A
    donor that is silent for ``progress_s`` is not asked for a while; a donor that answers ``Busy`` is not silent, but
    is left alone for as long as it says if that is long: its quota for us is used up, and others have some. A
    donor that sent wrong data is refused until ``readmit_donors``."""

    def __init__(
        self,
        endpoint: Endpoint,
        partial: PartialState,
        donors: Callable[[], Sequence[str]],
        progress_s: float,
        report: Report | None = None,
        chunk_format: ChunkFormat = RAW,
    ) -> None:
        self.partial = partial
        self._endpoint = endpoint
        self._donors = donors
        self._progress_s = progress_s
        self._report = report or _log_event
        self._format = chunk_format
        self._buffer_bytes = max(PIECE_BYTES, partial.wanted.chunk_bytes(0) + _MORE_BYTES)
        self._refused: set[str] = set()
        self._readmit_from_s = -math.inf
        self._spent: dict[str, tuple[float, Busy]] = {}
        """Donors whose quota for us is used up: until when, and what they said. Kept from attempt to attempt."""
        self._changed = asyncio.Event()

    def _start_attempt(self) -> None:
        self._shares = ChunkShares(self.partial.missing)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        now_s = asyncio.get_running_loop().time()
        self._spent = {peer: one for peer, one in self._spent.items() if now_s < one[0]}
        self._retry_from_s = {peer: until_s for peer, (until_s, _) in self._spent.items()}
        self._delivered = Counter[str]()
        version = self.partial.wanted.version
        self._last_error = LinkError(f"no member of the run offers version {version} of the state yet")
        for _, error in self._spent.values():
            self._last_error = error

    async def run(self) -> PartialState:
        """Fetch all missing chunks. May be called again after an error, and resumes with the chunks that are here.

        Raises the last ``LinkError`` when every donor has failed."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._start_attempt()
        await self._fetch_missing()
        self._report(
            "state_fetched",
            anchor_version=self.partial.wanted.version,
            chunks=self.partial.wanted.chunks,
            resumed=self.partial.resumed,
            donors=dict(self._delivered),
            seconds=loop.time() - started_s,
        )
        return self.partial

    async def _fetch_missing(self) -> None:
        async with task_scope() as tasks:
            writing = tasks.create_task(self._write_chunks())
            try:
                while self.partial.missing:
                    self._ask_more_donors(tasks)
                    if not self._tasks:
                        raise self._last_error
                    await self._wait_for_change()
            finally:
                for task in [*self._tasks.values(), writing]:
                    task.cancel()

    def _ask_more_donors(self, tasks: asyncio.TaskGroup) -> None:
        now_s = asyncio.get_running_loop().time()
        for peer in self._donors():
            if len(self._tasks) >= MAX_DONORS:
                return
            if peer in self._tasks or peer in self._refused or now_s < self._retry_from_s.get(peer, now_s):
                continue
            self._tasks[peer] = tasks.create_task(self._fetch_from(peer))

    async def _fetch_from(self, peer: str) -> None:
        donor = _Donor(peer, max(1, MAX_RUN_BYTES // self.partial.wanted.chunk_bytes(0)))
        try:
            if not self.partial.chunk_digests:
                await self._fetch_digests(donor)
            async with task_scope() as tasks:
                for _ in range(_RUNS_AT_ONCE):
                    tasks.create_task(self._fetch_runs(donor))
        except _WrongData as error:
            self._refuse(peer, str(error))
        except Busy as error:
            self._last_error = Busy(f"{peer}: {error}", error.retry_s)
            until_s = asyncio.get_running_loop().time() + min(error.retry_s, _MOST_WAIT_S)
            self._spent[peer], self._retry_from_s[peer] = (until_s, self._last_error), until_s
            log.info("fetching the state from %s goes on later: %s", peer, error)
        except ShoalError as error:  # includes errors that the donor reported
            self._last_error = LinkError(f"{peer}: {error}")
            self._retry_from_s[peer] = asyncio.get_running_loop().time() + 2 * self._progress_s
            log.info("fetching the state from %s stopped and is tried again later: %s", peer, error)
        finally:
            del self._tasks[peer]
            self._changed.set()

    def _refuse(self, peer: str, why: str) -> None:
        version = self.partial.wanted.version
        self._refused.add(peer)
        self._last_error = LinkError(f"{peer} {why}")
        log.warning("%s is not asked for version %d of the state any more: it %s", peer, version, why)
        self._report("donor_refused", donor=peer, anchor_version=version, reason=why)

    def readmit_donors(self) -> None:
        """Allow refused donors in further attempts, though not all the time: for when no other donor is left.

        A donor may have been about to learn that its own state was not the run's."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._readmit_from_s:
            self._refused.clear()
            self._readmit_from_s = now_s + 2 * self._progress_s

    async def _fetch_digests(self, donor: _Donor) -> None:
        wanted = self.partial.wanted
        size = DIGEST_BYTES * wanted.chunks
        digests = bytearray()
        async for _, data in self._receive(donor, digests_blob(wanted.version), range(pieces_in(size))):
            digests += data
        if not await in_thread(self.partial.learn_digests, bytes(digests)):
            raise _WrongData("has another state of that version than the run agreed on")

    async def _fetch_runs(self, donor: _Donor) -> None:
        """Fetch runs of chunks from this donor until none is missing."""
        while self.partial.missing:
            run = self._shares.assign(donor.peer, donor.chunks_a_run)
            if run is None:
                await self._wait_for_change()
                continue
            is_busy, wait_s = False, 0.0
            try:
                await self._fetch_run(donor, run)
            except Busy as error:
                log.debug("%s: %s", donor.peer, error)
                if error.retry_s > _BUSY_WAIT_S:
                    raise
                is_busy, wait_s = True, max(_BUSY_RETRY_S, error.retry_s)
            finally:
                if self._shares.end_run(run):
                    self._changed.set()
            if is_busy:
                await asyncio.sleep(wait_s)

    async def _fetch_run(self, donor: _Donor, run: ChunkRun) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        blob = self._format.blob(self.partial.wanted.version)
        async for index, data in self._receive(donor, blob, run.chunks):
            if self._shares.is_missing(index):
                if not await in_thread(self._unpack, index, data):
                    raise _WrongData(f"sent a wrong chunk {index}")
                self._mark_arrived(donor, index)
            if index != run.chunks[-1] and not any(map(self._shares.is_missing, run.chunks)):
                break  # another donor has delivered the rest
        donor.adapt(loop.time() - began_s, len(run.chunks) == donor.chunks_a_run)

    def _unpack(self, index: int, packed: memoryview) -> bool:
        """Keep a packed chunk if its values are the right ones; for worker threads."""
        try:
            values = self._format.unpack(packed, self.partial.wanted.chunk_bytes(index))
        except WireError as error:
            log.debug("chunk %d: %s", index, error)
            return False
        return self.partial.put(index, values)

    def _mark_arrived(self, donor: _Donor, index: int) -> None:
        if index in self.partial.missing:
            self.partial.mark_arrived(index)
            self._shares.mark_arrived(index)
            self._delivered[donor.peer] += 1
            self._changed.set()

    async def _receive(self, donor: _Donor, blob: Blob, chunks: range) -> AsyncGenerator[tuple[int, memoryview], None]:
        """Yield each chunk's index and bytes; the memory is used again once the caller asks for the next chunk."""
        places: dict[int, memoryview] = {}

        def sink(chunk: int, size_bytes: int) -> memoryview:  # on the data plane's thread
            # A chunk that is too long is accepted here and refused by its digest.
            fits = size_bytes <= self._buffer_bytes
            buffer = donor.spare.pop() if fits and donor.spare else bytearray(max(size_bytes, self._buffer_bytes))
            places[chunk] = memoryview(buffer)[:size_bytes]
            return places[chunk]

        async with aclosing(self._endpoint.fetch(donor.peer, blob, chunks, sink, self._progress_s)) as stream:
            async for index in stream:
                place = places.pop(index)
                yield index, place
                if isinstance(place.obj, bytearray) and len(place.obj) == self._buffer_bytes:
                    donor.spare.append(place.obj)

    async def _write_chunks(self) -> None:
        """Write arrived chunks to the partial state's file, for a later process, while others are fetched."""
        partial = self.partial
        try:
            while partial.folder is not None:
                while partial.unwritten:
                    await in_thread(partial.write_next)
                await self._wait_for_change()
        except OSError as error:
            log.warning("the state's chunks cannot be kept on disk, so a restart fetches them again: %s", error)

    async def _wait_for_change(self) -> None:
        """Wait until something has happened, or for ``_POLL_S``: donors may have come without notice."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._changed.wait()


async def fetch_into(
    endpoint: Endpoint, donor: str, blob: Blob, place: memoryview, what: str, progress_s: float
) -> None:
    """Fetch all chunks of a blob into ``place``. Raises ``LinkError``, also for a chunk of another size."""

    def sink(chunk: int, size_bytes: int) -> memoryview:
        piece = place[chunk * PIECE_BYTES : (chunk + 1) * PIECE_BYTES]
        if size_bytes != piece.nbytes:
            raise LinkError(f"{donor} sent {size_bytes} bytes as chunk {chunk} of {what}, not {piece.nbytes}")
        return piece

    async with aclosing(endpoint.fetch(donor, blob, range(pieces_in(place.nbytes)), sink, progress_s)) as stream:
        async for _ in stream:
            pass


def _log_event(event: str, **fields: Any) -> None:
    log.debug("%s: %s", event, fields)
