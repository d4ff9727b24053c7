"""Times by phase of a member's rounds, on a clock that tests turn."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.protocol.timing import MAX_SPANS
from shoal.swarm.protocol.types import PhaseTimes


class Hand:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def clock(hand: Hand) -> PhaseClock:
    return PhaseClock(hand)


def test_a_thread_that_waits_for_a_round_does_what_the_exchange_does(hand: Hand, clock: PhaseClock) -> None:
    clock.train("data")
    hand.now_s += 1
    clock.train("compute")
    hand.now_s += 10
    with clock.training(None):
        hand.now_s += 0.5  # the exchange has not begun yet
        clock.exchange("packing")
        hand.now_s += 2
        clock.exchange("exchange")
        hand.now_s += 4
        clock.exchange(None)
    hand.now_s += 3
    times = clock.end_round()
    assert times.training == PhaseTimes(data=1, compute=13, waiting=0.5, packing=2, exchange=4)
    assert times.exchange == PhaseTimes(packing=2, exchange=4)
    assert times.training.total_s == 20.5


def test_an_overlapped_exchange_is_told_beside_what_the_thread_does(hand: Hand, clock: PhaseClock) -> None:
    clock.train("compute")
    clock.exchange("exchange")
    hand.now_s += 5
    clock.exchange("waiting")
    hand.now_s += 1
    times = clock.times()
    assert (times.training, times.exchange) == (PhaseTimes(compute=6), PhaseTimes(exchange=5, waiting=1))


def test_a_round_begins_where_the_one_before_has_ended(hand: Hand, clock: PhaseClock) -> None:
    clock.train("compute")
    hand.now_s += 5
    assert clock.end_round().training == PhaseTimes(compute=5)
    hand.now_s += 2
    clock.train("checkpoint")
    hand.now_s += 1
    assert clock.phase == "checkpoint"
    assert clock.times().training == PhaseTimes(compute=2, checkpoint=1)


def test_the_phase_before_goes_on_also_after_an_error(hand: Hand, clock: PhaseClock) -> None:
    clock.train("compute")

    def fail() -> None:
        with clock.training("applying"):
            hand.now_s += 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    hand.now_s += 2
    assert clock.times().training == PhaseTimes(applying=1, compute=2)


def test_spans_of_the_last_rounds_are_kept_without_gaps(hand: Hand, clock: PhaseClock) -> None:
    for number in range(6):
        clock.train("data")
        hand.now_s += 1
        clock.train("compute")
        hand.now_s += 3
        clock.train("compute")
        hand.now_s += 4
        clock.end_round(number)
    assert clock.spans(1) == ((), hand.now_s)
    spans, now_s = clock.spans(5)
    assert now_s == hand.now_s
    assert [(one.phase, one.start_s, one.seconds) for one in spans] == [("data", 140, 1), ("compute", 141, 7)]


def test_many_short_spans_are_merged_into_few_that_still_cover_the_round(hand: Hand, clock: PhaseClock) -> None:
    for _ in range(5000):
        clock.train("data")
        hand.now_s += 0.0005
        clock.train("compute")
        hand.now_s += 0.25
    clock.end_round(0)
    spans, _ = clock.spans(0)
    assert 1 <= len(spans) <= MAX_SPANS
    assert sum(one.seconds for one in spans) == pytest.approx(1252.5)
    assert all(one.start_s + one.seconds == pytest.approx(two.start_s) for one, two in pairwise(spans))


def test_an_exchange_beside_the_training_has_a_track_of_its_own(hand: Hand, clock: PhaseClock) -> None:
    clock.train("compute")
    hand.now_s += 1
    clock.exchange("packing")
    hand.now_s += 1
    clock.exchange(None)
    hand.now_s += 1
    clock.end_round(0)
    spans, _ = clock.spans(0)
    assert [(one.track, one.phase, one.start_s, one.seconds) for one in spans] == [
        ("training", "compute", 100, 3),
        ("exchange", "packing", 101, 1),
    ]
