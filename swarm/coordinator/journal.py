"""Journal of a run: an ordered log of the coordinator's decisions, which one process at a time may extend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.swarm.coordinator.events import JournalEvent, PipelineSnapshot, RunSnapshot, VerdictGiven
from shoal.swarm.protocol.access_records import AccessRecord
from shoal.swarm.protocol.messages import CoordinatorToPeerVerdicts
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import MAX_VERDICTS
from shoal.swarm.protocol.verdict_chain import pack_verdict


class VerdictSource(Protocol):
    """Verdicts of a run, read by round."""

    def verdicts(self, first: int, limit: int, scope: int | None) -> list[VerdictGiven]:
        """Read at most ``limit`` verdicts from round ``first`` on, oldest first: those of one scope, or with None of
        the lowest scope that has one, as all stages' rounds end alike. Raises ``StorageError``."""


class Journal(VerdictSource, Protocol):
    """Log of one run's transactions, numbered from 0; each is a list of events.

    A coordinator takes the lease, reads the journal, and from then on appends what it decides before it announces it.
    Methods may block, and may be called from any thread. All raise ``StorageError`` when the storage fails."""

    location: str
    """The journal's place, for messages to people."""

    is_shared: bool
    """Whether another host may take the lease when this one's has ended."""

    def lease(self) -> int:
        """Make this process the only writer, until ``close`` or its end, and return its fencing epoch.

        Every epoch is larger than that of any earlier lease, by ``EPOCH_STEP`` or more (``stores/fenced_store.py``).
        Raises ``StorageError`` while another process has the lease, and ``RunFileError`` for the journal of another run
        file."""

    @property
    def next_index(self) -> int:
        """Index of the transaction that will be appended next."""

    def append(self, expected_index: int, events: Sequence[JournalEvent]) -> None:
        """Append the events as transaction ``expected_index``: after a crash all of them are there, or none.

        Raises ``StorageError`` if that is not the next transaction: another process has written meanwhile. After any
        error all later calls fail, as a journal with a gap would tell another history."""

    def read(self, from_index: int) -> list[JournalEvent]:
        """Read the events of all transactions from ``from_index`` on, oldest first. Where some of these were compacted
        away, the first event is the snapshot that stands for them and for all transactions before them."""

    @property
    def access_count(self) -> int:
        """Number of access records (``AccessRecorded``) that were ever appended."""

    def access_records(self, first: int, limit: int) -> list[AccessRecord]:
        """Read at most ``limit`` access records from number ``first`` on. They outlive every compaction."""

    def keep_evidence(self, name: str, data: bytes) -> None:
        """Keep evidence under this name, before an event refers to it."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether the journal has grown so much that it should be compacted."""

    def compact(self, snapshot: RunSnapshot | PipelineSnapshot) -> None:
        """Replace all transactions so far by a snapshot of the state that they lead to, and keep their verdicts. Never
        raises: a journal that cannot be compacted stays as it is, or, if that is in doubt, fails the next append."""

    @property
    def backup_behind_s(self) -> float | None:
        """Seconds for which the backup lacks something of the journal, 0 while it is complete; None without one."""

    def check_lease(self) -> None:
        """Raise ``LeaseLost`` unless this process surely has the lease still: only then it may say anything."""

    @property
    def trouble(self) -> str:
        """Why the storage takes no writes at the moment, though it may again; empty while it does. ``append`` waits."""

    def close(self) -> None:
        """Give up the lease."""


# Pages of verdicts, for messages ----------------------------------------------------------------------------

PAGE_BYTES = 2**19
"""A page ends with the verdict that reaches this size: packing more would hold up the event loop. A single verdict
always fits into a message, as the views that announced it carried it."""

_READ_AT_ONCE = 16
"""With a thousand members, a few verdicts fill a page."""


def read_page(source: VerdictSource, first: int, scope: int | None = None) -> CoordinatorToPeerVerdicts:
    """Read the verdicts from round ``first`` on, as many as one message should carry. ``scope`` as in
    ``VerdictSource.verdicts``. Raises ``StorageError``."""
    page: list[Verdict] = []
    size = 0
    while True:
        read = [event.verdict for event in source.verdicts(first + len(page), _READ_AT_ONCE, scope)]
        for verdict in read:
            if len(page) == MAX_VERDICTS or size >= PAGE_BYTES:
                return CoordinatorToPeerVerdicts(verdicts=tuple(page), more=True)
            page.append(verdict)
            size += len(pack_verdict(verdict))
        if len(read) < _READ_AT_ONCE:
            return CoordinatorToPeerVerdicts(verdicts=tuple(page), more=False)
