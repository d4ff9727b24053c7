"""Contributions and partial sums that a member's means include, kept as they came, and shown to auditors. In a secure
round these are masked contributions, and what has opened their sums.

They show that the means are right, so an owner or row reducer keeps them until the next verdict but one, whatever it
costs: about as many bytes as its own encoded contribution has, on the disk when that is much.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.spooled_chunks import SpooledChunks
from shoal.swarm.errors import BlobUnavailable, Busy
from shoal.swarm.protocol.types import Blob

log = logging.getLogger(__name__)

_SLACK = 4
"""Factor on the streams that an auditor opens on average in a round, after which it is refused; at least so many."""


FIRST_LOOKS = 5.0
"""Bytes of audits of makers that were not checked yet, in shares of a round: a tenth of it at 2 %."""


def audits_a_round(share: float, members: int, chunks: int, rows: int = 1) -> float:
    """Return how many chunks a member audits in a round, on average.

    A round brings it about ``2 * (members - 1) / members * chunks`` packed chunks, contributions and results. An audit
    of one chunk is to take ``share`` of that: it brings all members' contributions or, in a grid, those of a row and
    the other rows' partial sums, and then those of a row to one of these."""
    return 2.0 * share * chunks * (members - 1) / members / chunks_brought(members, rows)


def chunks_brought(members: int, rows: int) -> float:
    """Return how many packed chunks an audit of one chunk brings."""
    return members if rows == 1 else 2 * members / rows + rows - 1


def included_blob(store: ResultStore) -> Blob:
    """Return the blob of what a member's means of a round include."""
    return Blob(kind="included", number=store.plan.round)


class Places:
    """Places in the blob of what was reduced: to each chunk all members' contributions, row by row, and then, in a
    grid, all rows' partial sums, or in a secure round the opening of its part."""

    def __init__(self, group: Group, *, is_secure: bool = False) -> None:
        rows = len(group.rows) if len(group.rows) > 1 else 0
        self._order = [member for row in group.rows for member in row]
        self.a_chunk = len(self._order) + rows + is_secure

    @classmethod
    def of(cls, store: ResultStore) -> Places:
        return cls(store.group, is_secure=store.plan.secure is not None)

    @cached_property
    def _place_of(self) -> dict[int, int]:
        return {member: place for place, member in enumerate(self._order)}

    def contribution(self, chunk: int, member: int) -> int:
        return chunk * self.a_chunk + self._place_of[member]

    def partial_sum(self, chunk: int, row: int) -> int:
        return chunk * self.a_chunk + len(self._order) + row

    def opening(self, chunk: int) -> int:
        return chunk * self.a_chunk + len(self._order)


class Inclusions:
    """Contributions that a member reduced in one round, as owner, stand-in and row reducer (a ``CountedSource``).

    What did not come here is empty."""

    def __init__(
        self,
        store: ResultStore,
        share: float,
        folder: Path | None = None,
        may_read: Callable[[bytes], bool] | None = None,
    ) -> None:
        """``folder``: for the file, the machine's folder for temporary files by default; ``may_read``: whether the
        transport key is that of somebody who may see this, by default anybody's who is in the run."""
        self.places = Places.of(store)
        self.chunks = store.chunks * self.places.a_chunk
        self.blob = included_blob(store)
        audits = audits_a_round(share, len(store.plan.members), store.chunks, len(store.group.rows))
        self._most_streams = _SLACK * max(1.0, audits)
        self._streams: Counter[bytes] = Counter()
        self._reading: set[bytes] = set()
        self._may_read = may_read
        self._kept = SpooledChunks(folder)
        self._same: dict[int, int] = {}

    def keep(self, chunk: int, member: int, data: memoryview) -> None:
        """Keep a contribution's chunk with its path. For a worker thread; never raises."""
        self._keep(self.places.contribution(chunk, member), data)

    def keep_partial_sum(self, chunk: int, row: int, data: memoryview) -> None:
        """Keep a row's partial sum, with its signature. For a worker thread; never raises."""
        self._keep(self.places.partial_sum(chunk, row), data)

    def keep_opening(self, chunks: range, data: memoryview) -> None:
        """Keep what has opened a secure part of these chunks (``secure/shown_opening.py``): once, as it is the same for
        all of them. For a worker thread; never raises."""
        places = [self.places.opening(chunk) for chunk in chunks]
        self._keep(places[0], data)
        self._same.update(dict.fromkeys(places[1:], places[0]))

    def _keep(self, place: int, data: memoryview) -> None:
        try:
            self._kept.put(place, data)
        except OSError as error:
            log.warning("what our means include cannot be kept, so nobody can audit them: %s", error)

    def close(self) -> None:
        """Drop everything."""
        self._kept.close()

    # A source for auditors ----------------------------------------------------------------------------------

    def begin_reading(self, reader: bytes) -> None:
        """Count an auditor's stream. Raises ``Busy`` where it has one already, ``BlobUnavailable`` after its share.

        There is no bound for all of them together: a few that never read on would keep out the others, who would
        accuse us of showing nothing."""
        if self._may_read is not None and not self._may_read(reader):
            raise BlobUnavailable("only members that train may audit secure rounds")
        if reader in self._reading:
            raise Busy("this auditor is being served")
        if self._streams[reader] >= self._most_streams:
            raise BlobUnavailable("this auditor has seen its share of that round")
        self._streams[reader] += 1
        self._reading.add(reader)

    def end_reading(self, reader: bytes) -> None:
        """See ``CountedSource``."""
        self._reading.discard(reader)

    async def chunk(self, index: int) -> memoryview:
        """Return what was kept at that place, or nothing. Raises ``BlobUnavailable`` once it is dropped."""
        return await in_thread(self._kept.get, self._same.get(index, index))
