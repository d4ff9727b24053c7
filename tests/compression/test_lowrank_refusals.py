"""PowerSGD given what it should not be given: refused with CodecError, or finite all the same."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.lowrank_cases import SHAPES, N, normal, one_round, same_bits
from torch import Tensor

from shoal.compression.codec import CodecError
from shoal.compression.lowrank import PowerSGD


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_hostile_means_give_finite_values_or_are_refused(data: st.DataObject) -> None:
    power = PowerSGD([("a", (6, 7)), ("bias", (3,))], 2, 0.1)
    hot = st.sampled_from([0.0, 3.4e38, -3.4e38, 1e-45, 1.0, math.nan, math.inf]) | st.floats(width=32)

    def draw(size: int) -> Tensor:
        return torch.tensor(data.draw(st.lists(hot, min_size=size, max_size=size)), dtype=torch.float32)

    try:
        mean = power.follow(draw(power.first_size), draw(power.second_size))
    except CodecError:
        return
    assert bool(torch.isfinite(mean).all())
    power.commit()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in power.state().values())


def test_a_product_that_overflows_is_refused() -> None:
    power = PowerSGD([("a", (2, 7))], 2, 0.1)
    first = torch.tensor([1.0, 1.0, 1.0, -1.0])
    with pytest.raises(CodecError):
        power.follow(first, torch.full((14,), 3e38))
    assert float(power.follow(first, torch.full((14,), 2e38)).max()) > 2.8e38
    power.discard()
    values = torch.zeros(14)
    values[0] = values[7] = 3e38
    power.first(values)
    with pytest.raises(CodecError):
        power.second(first)


def test_vectors_may_be_overwritten_once_they_are_handed_over() -> None:
    one, two = PowerSGD(SHAPES, 2), PowerSGD(SHAPES, 2)
    values = normal(0, N)
    one_round([two], [values], [1.0])
    first = one.first(values)
    second = one.second(first)
    first.zero_()
    mean_second = second.clone()
    second.zero_()
    one.finish(mean_second)
    mean_second.zero_()
    assert same_bits(one.residual(), two.residual())
    one.commit()
    two.commit()
    assert torch.equal(one.state()["q.w"], two.state()["q.w"])


def test_wrong_lengths_are_refused_and_the_round_goes_on() -> None:
    power, values = PowerSGD(SHAPES, 2), normal(0, N)
    for wrong in (normal(0, N - 1), normal(0, N + 1), values.double(), values.view(1, -1), torch.full((N,), math.nan)):
        with pytest.raises(CodecError):
            power.first(wrong)
    with pytest.raises(CodecError):
        power.first(torch.full((N,), 3e38))
    first = power.first(values)
    for wrong in (first[1:].clone(), torch.cat([first, first]), torch.full_like(first, math.inf)):
        with pytest.raises(CodecError):
            power.second(wrong)
        with pytest.raises(CodecError):
            power.follow(wrong, torch.zeros(power.second_size))
    second = power.second(first)
    for wrong in (second[1:].clone(), torch.cat([second, second]), torch.full_like(second, math.nan)):
        with pytest.raises(CodecError):
            power.finish(wrong)
        with pytest.raises(CodecError):
            power.residual(sent_second=wrong)
    with pytest.raises(CodecError):
        power.residual(sent_first=second)
    assert bool(torch.isfinite(power.finish(second)).all())


def test_bad_arguments_are_refused() -> None:
    for shapes in ([("a", (-1, 3))], [("a", (2**40, 2**40))], [("a", (2.0, 3))], [("a", (3, 3)), ("a", (3, 3))]):
        with pytest.raises(CodecError):
            PowerSGD(shapes, 1)  # type: ignore[arg-type]
    for arguments in ({"rank": 0}, {"rank": 1, "min_compression_ratio": 0.0}, {"rank": 1, "seed": -1}):
        with pytest.raises(CodecError):
            PowerSGD(SHAPES, **arguments)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    power = PowerSGD(SHAPES, 2)
    good = power.state()
    bad = [
        {name: tensor for name, tensor in good.items() if name != "q.conv"},
        good | {"q.bias": torch.zeros(1)},
        good | {"q.tall": torch.zeros(9, 3)},
        good | {"q.tall": torch.zeros(9, 2, dtype=torch.float64)},
        good | {"q.tall": torch.full((9, 2), math.nan)},
        good | {"generation": torch.tensor([-1])},
        good | {"generation": torch.tensor([1, 2])},
    ]
    for state in bad:
        with pytest.raises(CodecError):
            power.load({name: tensor + 1 if name == "q.w" else tensor for name, tensor in state.items()})
    after = power.state()
    assert all(torch.equal(after[name], tensor) for name, tensor in good.items())
