"""Tests of pipeline/engine/norm_bounds."""

import math
import random

import pytest

from shoal.swarm.pipeline.engine.effects import TensorKind
from shoal.swarm.pipeline.engine.norm_bounds import FIRST_BOUND, NormBounds

KINDS: list[TensorKind] = ["activation", "gradient"]


def take(bounds: NormBounds, kind: TensorKind, sender: str, size: float) -> bool:
    """What a receiver does with a tensor."""
    if not bounds.accepts((kind, 1), size):
        return False
    bounds.learn((kind, 1), sender, size)
    return True


def learnt(kind: TensorKind, *senders: str) -> NormBounds:
    bounds = NormBounds()
    bounds.round_opened(0)
    for _ in range(16):
        for sender in senders:
            assert take(bounds, kind, sender, 1.0)
    return bounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [math.nan, math.inf, 2 * FIRST_BOUND])
def test_the_first_tensor_is_bounded_too(kind: TensorKind, size: float) -> None:
    assert not take(NormBounds(), kind, "a", size)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_far_above_the_usual_is_refused_and_not_learnt(kind: TensorKind) -> None:
    bounds = learnt(kind, "a", "b")
    before = bounds.bound((kind, 1))
    for _ in range(100):
        assert not take(bounds, kind, "b", 100.0)
    assert bounds.bound((kind, 1)) == before


@pytest.mark.parametrize("kind", KINDS)
def test_one_replica_of_three_moves_nothing_however_much_it_sends(kind: TensorKind) -> None:
    bounds = learnt(kind, "a", "b", "c")
    before = bounds.bound((kind, 1))
    for _ in range(1000):
        take(bounds, kind, "c", before * 0.9)
    assert bounds.bound((kind, 1)) == before


def test_one_replica_of_two_raises_the_bound_by_four_a_round_at_most() -> None:
    bounds = learnt("activation", "a", "b")
    for number in range(1, 4):
        bounds.round_opened(number)
        before = bounds.bound(("activation", 1))
        for _ in range(1000):
            take(bounds, "activation", "b", bounds.bound(("activation", 1)))
        assert bounds.bound(("activation", 1)) <= 4 * before


@pytest.mark.parametrize("kind", KINDS)
def test_honest_work_of_a_model_that_grows_is_accepted(kind: TensorKind) -> None:
    draw, bounds = random.Random(3), NormBounds()
    for number in range(1000):
        bounds.round_opened(number)
        for sender in "ab":
            assert take(bounds, kind, sender, draw.lognormvariate(0.0, 0.5) * 1.05**number % FIRST_BOUND)
        if 1.05**number > FIRST_BOUND / 100:
            return


def test_who_takes_the_place_of_a_lone_replica_is_bounded_by_its_sizes() -> None:
    bounds = learnt("gradient", "a")
    bounds.forget("a")
    assert not take(bounds, "gradient", "b", 1000.0)


def test_zeros_do_not_lower_the_bound() -> None:
    bounds = learnt("gradient", "a")
    for _ in range(100):
        assert take(bounds, "gradient", "a", 0.0)
    assert take(bounds, "gradient", "a", 2.0)
