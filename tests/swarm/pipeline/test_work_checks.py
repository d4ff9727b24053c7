"""Tests of comparing replicas' results: sketches, tolerance, and who is wrong."""

import numpy as np
import pytest

from shoal.swarm.pipeline.engine.work_checks import (
    SEED_BYTES,
    SKETCH_BYTES,
    Result,
    Ruling,
    Values,
    distance,
    rule,
    sketch,
    tolerance,
)

SEED = bytes(range(SEED_BYTES))


def values(seed: int, size: int = 100_000) -> Values:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 1.0])
def test_sketches_are_as_far_apart_as_the_values(share: float) -> None:
    one, noise = values(1), values(2)
    found = distance(sketch(one, SEED), sketch(one + np.float32(share) * noise, SEED))
    real = float(np.linalg.norm(share * noise) / max(np.linalg.norm(one), np.linalg.norm(one + share * noise)))
    assert found == pytest.approx(real, rel=0.15)


def test_a_sketch_is_small_and_depends_on_the_seed() -> None:
    one = values(1)
    assert len(sketch(one, SEED)) == SKETCH_BYTES
    assert sketch(one, SEED) == sketch(one.copy(), SEED)
    assert distance(sketch(one, SEED), sketch(one, SEED[::-1])) > 1.0


def test_opposite_unrelated_and_no_numbers_are_far_apart() -> None:
    one = sketch(values(1), SEED)
    assert distance(one, sketch(-values(1), SEED)) == pytest.approx(2.0)
    assert distance(one, sketch(values(2), SEED)) == pytest.approx(2**0.5, rel=0.15)
    assert distance(one, sketch(values(1) * np.float32(np.nan), SEED)) == np.inf
    assert distance(one, sketch(np.zeros(10, np.float32), SEED)) == 1.0


def test_two_zeros_are_equal() -> None:
    zero = sketch(np.zeros(10, np.float32), SEED)
    assert distance(zero, zero) == 0.0


def test_the_tolerance_follows_from_precision_and_codec() -> None:
    assert tolerance("float32", 0.0) == 0.02
    assert tolerance("auto", 0.0) == 0.1
    assert tolerance("float32", 0.01) == pytest.approx(0.06)
    assert tolerance("float32", 1.0) == 0.5, "never near the distance of unrelated values"


def result(seed: int) -> Result:
    return Result(sketch(values(seed), SEED), sketch(values(seed + 100), SEED), b"t" * 32)


@pytest.mark.parametrize(
    ("claimed", "repeated", "expected"),
    [
        (1, (1,), "agree"),
        (1, (2,), "undecided"),
        (2, (1, 1), "suspect"),
        (1, (2, 1), "witness"),
        (1, (2, 3), "undecided"),
    ],
)
def test_two_of_three_decide(claimed: int, repeated: tuple[int, ...], expected: Ruling) -> None:
    assert rule(result(claimed), [result(one) for one in repeated], 0.02) == expected


@pytest.mark.parametrize("part", ["output", "gradient", "targets"])
def test_each_part_of_a_result_counts(part: str) -> None:
    one, other = result(1), result(2)
    mixed = Result(**{name: getattr(one, name) for name in ("output", "gradient", "targets")} | {part: b""})
    assert not one.agrees(mixed, 0.02)
    changed = b"u" * 32 if part == "targets" else getattr(other, part)
    mixed = Result(**{name: getattr(one, name) for name in ("output", "gradient", "targets")} | {part: changed})
    assert not one.agrees(mixed, 0.02)
    assert one.agrees(result(1), 0.0)
