"""Time and traffic in verdicts, and the order of coordinators that follow each other."""

import pytest
from tests.swarm.coordinator.world import CPU, World, entry, heartbeat, run_file

from shoal.swarm.coordinator.admission import SentBytes
from shoal.swarm.protocol.rounds import Verdict


def rounds(world: World, number: int) -> list[Verdict]:
    while len(world.verdicts) < number:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    return [event.verdict for event in world.verdicts]


# Time and traffic -------------------------------------------------------------------------------------------


def test_verdicts_say_when_they_fell_on_the_clock_of_the_wall() -> None:
    world = World(run_file(), 2)
    world.machine.log.unix_offset_s = 1.7e9
    first = rounds(world, 1)[0]
    assert first.ended_s == pytest.approx(1.7e9 + world.now_s, abs=0.3)
    world.machine.log.unix_offset_s = -1e6  # a machine whose clock has never been set
    assert rounds(world, 2)[1].ended_s == 0.0


def test_verdicts_say_what_was_sent_since_the_one_before() -> None:
    world = World(run_file(), 2)
    first, second = world.workers[:2]
    world.beat(first, bytes_sent=700)
    world.beat(second, bytes_sent=50)
    world.beat(first, bytes_sent=900)
    assert world.scope.admission.sent_bytes.take() == 950
    world.join(first)
    world.beat(first, bytes_sent=30)
    assert world.scope.admission.sent_bytes.take() == 30, "a new process counts from 0"
    world.afresh(first)
    world.beat(first, bytes_sent=45)
    assert world.scope.admission.sent_bytes.take() == 15, "the same process joined again and counts on"
    world.beat(second, bytes_sent=60)
    world.revive()
    world.beat(second, bytes_sent=80)
    assert world.scope.admission.sent_bytes.take() == 0, "who is first heard after a restart has sent it at any time"
    world.beat(second, bytes_sent=85)
    assert rounds(world, 1)[0].sent_bytes == 5
    assert world.scope.admission.sent_bytes.take() == 0


def test_counters_that_go_back_are_not_believed_twice() -> None:
    sent = SentBytes()
    sent.start_process("a", b"key")
    for said in (10, 0, 10, 4, 11):
        sent.add("a", b"key", said)
    assert sent.take() == 11
    sent.add("a", b"another process that nobody announced", 5)
    assert sent.take() == 0
    for _ in range(3):
        sent.start_process("b", b"key")
        sent.add("b", b"key", 2**62)
    assert sent.take() == 2**62, "as much as a message has room for"


def test_observers_are_not_counted() -> None:
    world = World(run_file(), 1)
    world.scope.admission.join(entry(7, role="observer"), CPU, world.now_s)
    world.scope.heartbeat(entry(7).peer, heartbeat(bytes_sent=0), world.now_s)
    assert world.scope.admission.sent_bytes.take() == 0


def test_every_start_has_a_larger_epoch_and_later_rosters() -> None:
    world = World(run_file(), 2)
    for _ in range(3):
        before = world.scope.view(entry(0).peer, world.now_s)
        world.revive()
        after = world.scope.view(entry(0).peer, world.now_s)
        assert after.epoch > before.epoch
        assert after.roster_version > before.roster_version
