"""Tests of training/lr_schedule: the factor over global tokens, warm-up and decay."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.training.lr_schedule import WARMUP_START, lr_factor, round_lr_factor
from shoal.swarm.protocol.run_file import ScheduleSection, parse_run_file


def test_warms_up_linearly_from_a_small_positive_factor() -> None:
    schedule = ScheduleSection(warmup_tokens=1000)
    assert lr_factor(schedule, None, 0) == WARMUP_START > 0
    assert lr_factor(schedule, None, 500) == pytest.approx((1 + WARMUP_START) / 2)
    assert lr_factor(schedule, None, 1000) == 1.0
    assert lr_factor(schedule, None, 10**12) == 1.0


def test_without_warmup_it_starts_at_one() -> None:
    assert lr_factor(ScheduleSection(), None, 0) == 1.0
    assert lr_factor(ScheduleSection(kind="cosine"), 100, 0) == 1.0


@pytest.mark.parametrize(("kind", "quarter"), [("cosine", 0.1 + 0.9 * 0.853553), ("linear", 0.1 + 0.9 * 0.75)])
def test_decays_to_the_final_factor_and_stays(kind: str, quarter: float) -> None:
    schedule = ScheduleSection.model_validate({"kind": kind, "warmup_tokens": 200, "final_factor": 0.1})
    assert lr_factor(schedule, 1000, 200) == 1.0
    assert lr_factor(schedule, 1000, 400) == pytest.approx(quarter, abs=1e-6)
    assert lr_factor(schedule, 1000, 600) == pytest.approx(0.55)
    assert lr_factor(schedule, 1000, 1000) == pytest.approx(0.1)
    assert lr_factor(schedule, 1000, 5000) == pytest.approx(0.1)


@pytest.mark.parametrize("total", [50, 100])
def test_a_run_no_longer_than_its_warmup_ends_at_the_final_factor(total: int) -> None:
    schedule = ScheduleSection(kind="linear", warmup_tokens=100, final_factor=0.2)
    assert lr_factor(schedule, total, 50) < 1.0
    assert lr_factor(schedule, total, 100) == pytest.approx(0.2)


def test_a_decay_without_an_end_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        lr_factor(ScheduleSection(kind="cosine"), None, 5)


@given(
    st.sampled_from(["constant", "cosine", "linear"]),
    st.integers(0, 10**6),
    st.integers(1, 10**7),
    st.lists(st.integers(0, 2 * 10**7), min_size=2, max_size=20),
    st.floats(0, 1),
)
def test_stays_in_range_and_turns_only_once(
    kind: str, warmup: int, total: int, tokens: list[int], final: float
) -> None:
    schedule = ScheduleSection.model_validate({"kind": kind, "warmup_tokens": warmup, "final_factor": final})
    for before, after in pairwise(sorted(tokens)):
        low, high = lr_factor(schedule, total, before), lr_factor(schedule, total, after)
        assert 0 <= low <= 1 + 1e-12
        if after < warmup:
            assert low <= high
        elif before >= warmup:
            assert low >= high - 1e-12


BATCH = """
algorithm = "virtual_batch"
run = { name = "x", tokens = 10_000 }
recipe = { name = "gpt" }
round = { tokens = 400 }
schedule = { kind = "cosine", warmup_tokens = 1000, scaling = "%s", reference_tokens = 100 }
"""


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_a_round_is_scaled_by_the_tokens_that_it_has_committed(scaling: str, factor: float) -> None:
    run = parse_run_file(BATCH % scaling)
    assert round_lr_factor(run, 1000, 400) == factor
    assert round_lr_factor(run, 1000, 100) == 1.0
    assert round_lr_factor(run, 500, 400) == factor * round_lr_factor(run, 500, 100) < factor
    assert round_lr_factor(run, 1000, 200) == pytest.approx(factor**0.5)


def test_a_round_s_factor_is_coarse_enough_for_every_machine() -> None:
    run = parse_run_file(BATCH.replace('scaling = "%s", reference_tokens = 100', "final_factor = 0.1"))
    factor = round_lr_factor(run, 4321, 400)
    assert factor == pytest.approx(lr_factor(run.schedule, 10_000, 4321), abs=2**-16)
    assert factor * 2**16 == int(factor * 2**16)
