"""Contributions that an owner's means include, kept as they came until the next round's verdict, and shown to auditors.

They show that the means are right, so an owner keeps them whatever it costs: about as many bytes as its own encoded
contribution has, on the disk when that is much.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.spooled_chunks import SpooledChunks
from shoal.swarm.errors import BlobUnavailable, Busy
from shoal.swarm.protocol.types import Blob

log = logging.getLogger(__name__)

_SLACK = 4
"""Factor on the streams that an auditor opens on average in a round, after which it is refused; at least so many."""


def audits_a_round(share: float, members: int, chunks: int) -> float:
    """Return how many chunks a member audits in a round, on average.

    A round brings it about ``2 * (members - 1) / members * chunks`` packed chunks, contributions and results. An audit
    brings ``members`` contributions to one chunk, and is to take ``share`` of that."""
    return 2.0 * share * chunks * (members - 1) / members**2


class Inclusions:
    """Contributions' chunks that a member reduced in one round (a ``CountedSource`` once ``publish_as`` names it).

    In the blob, chunk c of the round, of the plan's member m, has the index ``c * members + m``; it is empty where the
    member did not deliver it here."""

    def __init__(self, store: ResultStore, share: float, folder: Path | None = None) -> None:
        """``folder``: for the file, the machine's folder for temporary files by default."""
        self.members = len(store.plan.members)
        self.chunks = store.chunks * self.members
        self.blob = Blob(kind="included", number=store.plan.round)
        self._most_streams = _SLACK * max(1.0, audits_a_round(share, self.members, store.chunks))
        self._streams: Counter[bytes] = Counter()
        self._reading: set[bytes] = set()
        self._kept = SpooledChunks(folder)

    def keep(self, chunk: int, member: int, data: memoryview) -> None:
        """Keep a contribution's chunk with its path. For a worker thread; never raises."""
        try:
            self._kept.put(chunk * self.members + member, data)
        except OSError as error:
            log.warning("the contributions in our means cannot be kept, so nobody can audit them: %s", error)

    def close(self) -> None:
        """Drop everything."""
        self._kept.close()

    # A source for auditors ----------------------------------------------------------------------------------

    def begin_reading(self, reader: bytes) -> None:
        """Count an auditor's stream. Raises ``Busy`` where it has one already, ``BlobUnavailable`` after its share.

        There is no bound for all of them together: a few that never read on would keep out the others, who would
        accuse us of showing nothing."""
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
        """Return a contribution's chunk with its path, or nothing. Raises ``BlobUnavailable`` once it is dropped."""
        return await in_thread(self._kept.get, index)
