"""Archive of a member's round records: writes them while it takes part, serves them to others, removes old ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from shoal.peer.history.round_records import RoundRecord, RoundRecords
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import BlobUnavailable, StateFileError, StorageError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

KEPT_RECORDS = 3
"""Number of newest records that are always kept."""

MAX_RECORDS_FOR_OTHERS = 64
"""Limit on records that are kept for other members only, however small: members that missed more fetch the state."""

MAX_MODELS = 32
MAX_BYTES = 2**30
"""Limit on all records together: this many bytes, or ``MAX_MODELS`` times the anchor's, whichever is more.

Where checkpoints can no longer be written, records must not fill the disk instead."""

_MAX_WAITING = 2
"""Rounds that wait in memory to be written; where the disk is slower than the rounds, further ones are left out."""


class RecordSource:
    """A record's chunks, read from its file when they are requested (a ``DownloadSource``); ``on_damage`` is called
    if it is damaged."""

    def __init__(
        self, record: RoundRecord, on_damage: Callable[[StateFileError], None], state_vectors: int = 0
    ) -> None:
        """``state_vectors``: vectors of the model's size in a state."""
        self.chunks = len(record.lengths)
        plan = record.verdict.plan
        self.state_bytes = 4 * state_vectors * plan.parts[-1].stop if plan is not None else 0
        self._record = record
        self._on_damage = on_damage
        self._is_whole = False
        self._checking = asyncio.Lock()

    async def chunk(self, index: int) -> memoryview:
        """Raises ``BlobUnavailable`` for a void chunk, and for every chunk of a damaged record."""
        try:
            async with self._checking:  # checked only now: most records are never requested
                if not self._is_whole:
                    await in_thread(self._record.read)
                    self._is_whole = True
            return await in_thread(self._record.chunk, index)
        except StateFileError as error:
            self._on_damage(error)
            raise BlobUnavailable(f"the record of round {self._record.verdict.round} is damaged here") from error


class RecordArchive:
    """Writes what rounds commit and serves it (a ``ResultArchive``). On the event loop; files are accessed in worker
    threads.

    ``state_vectors``: vectors of the model's size in a state. Records that are together smaller than a state are kept
    for members that missed those rounds. ``needed_since``: the round that made the oldest state that this peer may go
    on from, None for none; later records are kept, as far as there is room for them."""

    def __init__(
        self,
        records: RoundRecords,
        endpoint: Endpoint,
        tasks: asyncio.TaskGroup,
        state_vectors: int,
        needed_since: Callable[[], int | None],
    ) -> None:
        self.records = records
        self._state_vectors = state_vectors
        self.needed_since = needed_since
        self._endpoint = endpoint
        self._tasks = tasks
        self._writing = asyncio.Lock()
        self._waiting = 0
        self._is_full = False
        self._from_memory: set[int] = set()
        self._offered: dict[int, RoundRecord] = {}

    async def start(self) -> None:
        """Serve what an earlier process wrote."""
        await in_thread(self.records.clean)
        for record in await in_thread(self.records.open_all):
            self._offer(record)

    def keep(self, store: ResultStore, verdict: Verdict) -> None:
        """See ``ResultArchive.keep``."""
        self._from_memory.add(verdict.round)
        if self._waiting >= _MAX_WAITING:
            log.debug("round %d is not recorded: the disk is still busy with earlier ones", verdict.round)
            return
        self._waiting += 1
        # A list, as the store may be closed before they are written, and its memory used again.
        self._tasks.create_task(self._write(verdict, store.held_chunks))

    def take_over(self, number: int) -> None:
        """See ``ResultArchive.take_over``."""
        self._from_memory.discard(number)
        if number in self._offered:
            self._publish(self._offered[number])

    def add(self, store: ResultStore, verdict: Verdict) -> None:
        """Keep results of an earlier round, which are not served from memory here."""
        self.keep(store, verdict)
        self.take_over(verdict.round)

    async def _write(self, verdict: Verdict, chunks: list[memoryview | None]) -> None:
        async with self._writing:
            started_s = time.monotonic()
            try:
                record = await in_thread(self.records.write, verdict, chunks)
            except (StorageError, StateFileError) as error:
                log.log(logging.DEBUG if self._is_full else logging.WARNING, "a round is not recorded: %s", error)
                self._is_full = True
            else:
                self._is_full = False
                seconds = time.monotonic() - started_s
                log.debug("round %d: %d bytes kept in %.3f s", verdict.round, record.result_bytes, seconds)
                self._offer(record)
                await self._tidy()
            finally:
                self._waiting -= 1

    async def _tidy(self) -> None:
        numbers, since = await in_thread(self.records.numbers), self.needed_since()
        worth = max(KEPT_RECORDS, min(self._newest_within(numbers, self._state_vectors), MAX_RECORDS_FOR_OTHERS))
        most = max(worth, self._newest_within(numbers, MAX_MODELS, MAX_BYTES))
        older, too_old = numbers[:-worth], set(numbers[:-most])
        old = [number for number in older if since is None or number <= since or number in too_old]
        for number in old:
            if self._offered.pop(number, None) is not None and number not in self._from_memory:
                self._endpoint.retract(_blob(number))
        await in_thread(self.records.remove, old)

    def _newest_within(self, numbers: list[int], models: int, size_bytes: int = 0) -> int:
        """Number of newest records that are together smaller than ``models`` anchors, or than ``size_bytes``."""
        count, together_bytes = 0, 0
        for number in reversed(numbers):
            record = self._offered.get(number)
            if record is not None and record.verdict.plan is not None:
                together_bytes += record.result_bytes
                if together_bytes >= max(4 * models * record.verdict.plan.parts[-1].stop, size_bytes):
                    break
            count += 1
        return count

    # Serving ------------------------------------------------------------------------------------------------

    def _offer(self, record: RoundRecord) -> None:
        number = record.verdict.round
        self._offered[number] = record
        if number not in self._from_memory:
            self._publish(record)

    def _publish(self, record: RoundRecord) -> None:
        number = record.verdict.round

        def on_damage(error: StateFileError) -> None:
            if self._offered.get(number) is record:
                log.warning("a round record is not served any more: %s", error)
                del self._offered[number]
                self._endpoint.retract(_blob(number))

        self._endpoint.publish(_blob(number), RecordSource(record, on_damage, self._state_vectors))


def _blob(number: int) -> Blob:
    return Blob(kind="result", number=number)
