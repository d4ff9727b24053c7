"""Which curves are named as divergence, and which are noise, spikes or a warm-up.

``recorded_losses.json``: of a gpt with 2 layers of width 32 on the standard library's files, loss by round and by
evaluation; each curve says what was done to it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from shoal.swarm.coordinator.loss_trend import TrendKind, trend_of

CURVES: dict[str, Any] = json.loads((Path(__file__).parent / "recorded_losses.json").read_text())


def kinds(name: str) -> list[TrendKind]:
    """What is said after each round of a recorded run."""
    training, held_out = CURVES[name]["training"], CURVES[name]["held_out"]
    return [
        trend_of(training[:stop], [(at, loss) for at, loss in held_out if at <= stop]).kind
        for stop in range(1, len(training) + 1)
    ]


@pytest.mark.parametrize("name", ["good", "noisy", "warm-up and cosine", "spike", "two spikes"])
def test_what_is_well_is_not_named(name: str) -> None:
    assert set(kinds(name)) == {""}


@pytest.mark.parametrize(
    ("name", "kind", "begins", "within"),
    [
        ("slow divergence", "diverging", 75, 40),
        ("sudden divergence", "diverging", 60, 24),
        ("not a number", "not finite", 50, 4),
        ("overfitting", "overfitting", 10, 40),
    ],
)
def test_what_goes_wrong_is_named_early(name: str, kind: str, begins: int, within: int) -> None:
    said = kinds(name)
    first = next(number for number, one in enumerate(said) if one)
    assert said[first] == kind
    assert begins <= first <= begins + within


def test_a_level_that_recovers_is_named_no_more() -> None:
    losses: list[float | None] = [3.0 + 0.01 * (-1) ** number for number in range(20)]
    risen = [*losses, *[6.0] * 10]
    assert trend_of(risen, ()).kind == "diverging"
    assert trend_of([*risen, *[3.0] * 8], ()).kind == ""


def test_the_held_out_loss_tells_before_the_training_loss() -> None:
    falling = [4.0 - 0.02 * number for number in range(40)]
    rising = [(10 * at, loss) for at, loss in enumerate([3.5, 3.2, 3.0, 3.05, 3.1, 3.2, 3.3, 3.4, 3.5])]
    assert trend_of(falling, rising).kind == "overfitting"
    assert trend_of(falling[::-1], rising).kind == "diverging"
    assert trend_of(falling, [(one, 3.0) for one in range(9)]).kind == ""
    told = trend_of(falling, [*rising, (90, None)])
    assert told.kind == "not finite"
    assert "version 90" in told.text
    assert "shoal amend" in told.text


def test_noise_alone_is_not_named() -> None:
    rng = random.Random(7)
    for deviation in (0.02, 0.2, 0.5):
        for _ in range(10):
            losses = [2.0 + rng.gauss(0, deviation) for _ in range(120)]
            assert trend_of(losses, ()).kind == "", deviation


def test_rounds_without_a_loss_are_left_out() -> None:
    assert trend_of([], ()).kind == ""
    assert trend_of([None] * 9, ()).kind == "", "nobody has ever said a loss"
    assert trend_of([3.0, None, 3.0], ()).kind == ""
    assert trend_of([3.0, None, None], ()).kind == "not finite"
