"""The run's verdicts in pages that fit a message, read from the journal."""

from __future__ import annotations

from typing import Protocol

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.protocol.messages import MAX_VERDICTS, CoordinatorToPeerVerdicts, Verdict
from shoal.swarm.protocol.verdict_chain import pack_verdict

PAGE_BYTES = 2**19
"""A page ends with the verdict that reaches it: packing more would hold up the event loop. One verdict alone always
fits a message, as the views that told it had to."""

_READ_AT_ONCE = 16
"""Of a thousand members, a few verdicts are a page."""


class Verdicts(Protocol):
    """What is needed of a journal."""

    def verdicts(self, first: int, limit: int, scope: int | None) -> list[VerdictGiven]: ...


def read_page(journal: Verdicts, first: int, scope: int | None = None) -> CoordinatorToPeerVerdicts:
    """The verdicts from round ``first`` on: a scope's, or of each round the first one. Raises ``StorageError``."""
    page: list[Verdict] = []
    size = 0
    while True:
        read = [fact.verdict for fact in journal.verdicts(first + len(page), _READ_AT_ONCE, scope)]
        for verdict in read:
            if len(page) == MAX_VERDICTS or size >= PAGE_BYTES:
                return CoordinatorToPeerVerdicts(verdicts=tuple(page), more=True)
            page.append(verdict)
            size += len(pack_verdict(verdict))
        if len(read) < _READ_AT_ONCE:
            return CoordinatorToPeerVerdicts(verdicts=tuple(page), more=False)
