"""Tests of journal: verdicts in pages that fit into messages."""

import dataclasses

import pytest

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.coordinator.journal import PAGE_BYTES, read_page
from shoal.swarm.protocol.messages import CoordinatorToPeerVerdicts
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import MAX_VERDICTS
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES, Envelope, encode

ABORTED = Verdict(
    round=0,
    committed=False,
    reason="",
    anchor_version=0,
    plan=None,
    digests=(),
    tokens=0,
    tokens_total=0,
    loss=None,
    ended_s=1.7e9,
    sent_bytes=0,
    previous_chain=bytes(32),
    chain=bytes(32),
    signature=bytes(64),
)


@dataclasses.dataclass
class Kept:
    all: list[VerdictGiven]
    read: int = 0

    def verdicts(self, first: int, limit: int, scope: int | None = None) -> list[VerdictGiven]:
        found = self.all[first : first + limit]
        self.read += len(found)
        return found


def kept(number: int, reason: str = "") -> Kept:
    verdicts = [ABORTED.model_copy(update={"round": at, "reason": reason}) for at in range(number)]
    return Kept([VerdictGiven(verdict=one, elapsed_s=0.0, lost=()) for one in verdicts])


def pages(journal: Kept, first: int = 0) -> list[CoordinatorToPeerVerdicts]:
    found = []
    while True:
        found.append(read_page(journal, first))
        first += len(found[-1].verdicts)
        if not found[-1].more:
            return found


@pytest.mark.parametrize("number", [0, 1, 15, 16, 17, MAX_VERDICTS - 1, MAX_VERDICTS, MAX_VERDICTS + 1, 600])
def test_pages_are_all_of_it_in_order(number: int) -> None:
    found = pages(kept(number))
    assert [one.round for page in found for one in page.verdicts] == list(range(number))
    assert len(found) == max(1, -(-number // MAX_VERDICTS))
    assert [one.round for page in pages(kept(number), 10) for one in page.verdicts] == list(range(10, number))


def test_large_verdicts_make_small_pages() -> None:
    journal = kept(40, reason="x" * 2000)
    large = read_page(kept(10**4 // 16, reason="x" * 2000), 0)
    assert PAGE_BYTES < len(encode(Envelope("reply", 1, large))) < PAGE_BYTES + 3000 < MAX_MESSAGE_BYTES
    assert large.more
    assert len(pages(journal)) == 1


def test_a_page_reads_little_more_than_it_gives() -> None:
    journal = kept(600, reason="x" * 2000)
    page = read_page(journal, 100)
    assert journal.read <= len(page.verdicts) + 16
