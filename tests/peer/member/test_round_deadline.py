"""Tests of member/round_deadline: when a round has to be closed, and what goes before local work."""

import math

import pytest
from tests.swarm.coordinator.world import World, run_file

from shoal.peer.member.round_deadline import is_due, least_s
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.types import Phase


def view(round_number: int, phase: Phase) -> RunView:
    world = World(run_file(), 1)
    return world.view(world.workers[0]).model_copy(update={"round": round_number, "phase": phase})


def due(now: RunView, closes_at_s: float | None = None, step_s: float = 1.0, exchanging: bool = False) -> bool:
    """Of a member that works for round 3 when it is 100 s."""
    return is_due(now, closes_at_s, 100.0, step_s, round_number=3, exchanging=exchanging)


@pytest.mark.parametrize("exchanging", [False, True])
def test_the_announced_moment_leaves_time_for_whole_steps(exchanging: bool) -> None:
    closing = view(3, "closing")
    assert not due(closing, 101.5, exchanging=exchanging)
    assert due(closing, 100.5, exchanging=exchanging)
    assert not due(view(3, "training"), exchanging=exchanging)
    assert not due(closing, exchanging=exchanging)


@pytest.mark.parametrize("exchanging", [False, True])
def test_without_samples_there_is_nothing_to_wait_for(exchanging: bool) -> None:
    assert due(view(3, "closing"), 200.0, step_s=math.inf, exchanging=exchanging)
    assert not due(view(3, "closing"), 200.0, step_s=0.0, exchanging=exchanging)
    assert not due(view(3, "training"), 200.0, step_s=math.inf, exchanging=exchanging)


def test_there_has_to_be_time_for_a_step_that_samples_are_asked_for() -> None:
    assert least_s(4, 2.0, 5.0, may_ask=True) == least_s(4, 0.0, 5.0, may_ask=False) == 0.0
    assert least_s(0, 2.0, 5.0, may_ask=True) == 2.0
    assert least_s(0, 0.0, 5.0, may_ask=True) == 5.0, "of the first step nobody knows how long it takes"
    assert least_s(0, 2.0, 5.0, may_ask=False) == math.inf


@pytest.mark.parametrize("exchanging", [False, True])
def test_whoever_is_late_closes_at_once(exchanging: bool) -> None:
    assert due(view(3, "averaging"), exchanging=exchanging)
    assert due(view(4, "training"), exchanging=exchanging)


@pytest.mark.parametrize("phase", ["closing", "averaging"])
def test_the_round_before_is_no_reason_to_stop_while_it_is_averaged(phase: Phase) -> None:
    assert not due(view(2, phase), 99.0, step_s=math.inf, exchanging=True)
