"""Tests of pipeline/capability_updates: traces of measurements, checked every 15 s, and the reports they cause."""

from collections.abc import Callable

import pytest

from shoal.peer.pipeline.capability_updates import CapabilityUpdates, SpeedEstimate
from shoal.swarm.pipeline.planner.model import PeerCapability

LOOK_S = 15
HOUR = range(0, 3600, LOOK_S)


def one(seconds: float = 1.0, bandwidth_bps: float = 1e8, rtt_s: float = 0.02) -> PeerCapability:
    return PeerCapability("me", 10**9, (seconds / 4, 3 * seconds / 4), bandwidth_bps, rtt_s)


def told(trace: Callable[[int], PeerCapability]) -> list[int]:
    """The moments at which it is shown after the first one."""
    showing = CapabilityUpdates()
    showing.note_report(trace(0), 0.0, is_guess=False)
    moments = []
    for now_s in HOUR:
        if showing.is_due(trace(now_s), now_s, is_guess=False):
            showing.note_report(trace(now_s), now_s, is_guess=False)
            moments.append(now_s)
    return moments


def test_what_stays_about_the_same_is_not_told_again() -> None:
    assert told(lambda now_s: one(1.3 if now_s % 60 < 30 else 0.9, 1.3e8 if now_s % 90 < 30 else 1e8)) == []


@pytest.mark.parametrize(
    "other",
    [one(1.6), one(0.6), one(bandwidth_bps=4e7), one(bandwidth_bps=2e8), one(rtt_s=0.04)],
    ids=["slower", "faster", "narrower", "wider", "farther"],
)
def test_what_is_clearly_something_else_is_told_once(other: PeerCapability) -> None:
    assert told(lambda now_s: one() if now_s < 1000 else other) == [1065]  # the look at 1005, and 60 s


def test_what_passes_is_not_told() -> None:
    assert told(lambda now_s: one(3.0) if now_s % 300 < 45 and now_s else one()) == []


def test_it_is_not_told_more_often_than_every_three_minutes() -> None:
    moments = told(lambda now_s: one(4.0 ** (now_s // 75 % 2)))
    assert moments
    assert all(later - earlier >= 180 for earlier, later in zip([0, *moments], moments, strict=False))


def test_small_round_trips_are_all_the_same() -> None:
    assert told(lambda now_s: one(rtt_s=0.001 if now_s < 1000 else 0.004)) == []
    assert told(lambda now_s: one(rtt_s=0.0 if now_s < 1000 else 0.1)) == [1065]


def test_a_bandwidth_that_was_guessed_is_put_right_at_once() -> None:
    showing = CapabilityUpdates()
    showing.note_report(one(), 0.0, is_guess=True)
    assert not showing.is_due(one(bandwidth_bps=1e9), 15.0, is_guess=True), "still a guess"
    assert not showing.is_due(one(bandwidth_bps=1.2e8), 15.0, is_guess=False), "the guess was good"
    assert showing.is_due(one(bandwidth_bps=1e9), 15.0, is_guess=False)
    showing.note_report(one(bandwidth_bps=1e9), 15.0, is_guess=False)
    assert not showing.is_due(one(bandwidth_bps=1e8), 30.0, is_guess=False)


# Real speed -----------------------------------------------------------------------------------------------


def test_the_real_speed_is_the_usual_micro_batchs() -> None:
    speed = SpeedEstimate({0: 3.0, 1: 1.0}.__getitem__)
    for number in range(7):
        speed.add(number % 2, 6.0 if number % 2 == 0 else 2.0)
    assert speed.factor is None, "too few"
    speed.add(0, 600.0)
    assert speed.factor == 2.0, "the odd one counts for nothing"
    for _ in range(32):
        speed.add(1, 1.0)
    assert speed.factor == 1.0, "what was long ago, too"


def test_layers_that_take_no_time_say_nothing() -> None:
    speed = SpeedEstimate(lambda stage: 0.0)
    for _ in range(10):
        speed.add(0, 1.0)
    assert speed.factor is None
