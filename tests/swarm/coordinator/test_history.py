"""What verdicts say of their time and traffic, and how they are read back in pages."""

import dataclasses

import pytest
from tests.swarm.coordinator.world import CPU, World, entry, heartbeat, run_file

from shoal.swarm.coordinator.admission import SentBytes
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


def rounds(world: World, number: int) -> list[Verdict]:
    while len(world.verdicts) < number:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    return [event.verdict for event in world.verdicts]


# Time and traffic -------------------------------------------------------------------------------------------


def test_verdicts_say_when_they_fell_on_the_clock_of_the_wall() -> None:
    world = World(run_file(), 2)
    world.machine.unix_offset_s = 1.7e9
    first = rounds(world, 1)[0]
    assert first.ended_s == pytest.approx(1.7e9 + world.now_s, abs=0.3)
    world.machine.unix_offset_s = -1e6  # a machine whose clock has never been set
    assert rounds(world, 2)[1].ended_s == 0.0


def test_verdicts_say_what_was_sent_since_the_one_before() -> None:
    world = World(run_file(), 2)
    first, second = world.workers[:2]
    world.beat(first, bytes_sent=700)
    world.beat(second, bytes_sent=50)
    world.beat(first, bytes_sent=900)
    assert world.machine.sent_bytes.take() == 950
    world.join(first)
    world.beat(first, bytes_sent=30)
    assert world.machine.sent_bytes.take() == 30, "a new process counts from 0"
    world.afresh(first)
    world.beat(first, bytes_sent=45)
    assert world.machine.sent_bytes.take() == 15, "the same process joined again and counts on"
    world.beat(second, bytes_sent=60)
    world.revive()
    world.beat(second, bytes_sent=80)
    assert world.machine.sent_bytes.take() == 0, "who is first heard after a restart has sent it at any time"
    world.beat(second, bytes_sent=85)
    assert rounds(world, 1)[0].sent_bytes == 5
    assert world.machine.sent_bytes.take() == 0


def test_counters_that_go_back_are_not_believed_twice() -> None:
    sent = SentBytes()
    sent.begin("a", b"key")
    for said in (10, 0, 10, 4, 11):
        sent.hear("a", b"key", said)
    assert sent.take() == 11
    sent.hear("a", b"another process that nobody announced", 5)
    assert sent.take() == 0
    for _ in range(3):
        sent.begin("b", b"key")
        sent.hear("b", b"key", 2**62)
    assert sent.take() == 2**62, "as much as a message has room for"


def test_observers_are_not_counted() -> None:
    world = World(run_file(), 1)
    world.machine.join(entry(7, role="observer"), CPU, world.now_s)
    world.machine.heartbeat(entry(7).peer, heartbeat(bytes_sent=0), world.now_s)
    assert world.machine.sent_bytes.take() == 0


def test_every_start_has_a_larger_epoch_and_later_rosters() -> None:
    world = World(run_file(), 2)
    for _ in range(3):
        before = world.machine.view(entry(0).peer, world.now_s)
        world.revive()
        after = world.machine.view(entry(0).peer, world.now_s)
        assert after.epoch > before.epoch
        assert after.roster_version > before.roster_version


# Pages ------------------------------------------------------------------------------------------------------


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
