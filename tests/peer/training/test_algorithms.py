"""Tests of training/algorithms: contributions and steps of each algorithm, also with overlap."""

import math
import tracemalloc
import weakref
from typing import Any

import pytest
import torch
from tests.fakes.gradients import take_gradients
from tests.fakes.swarm import run_toml
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.compression.range_reader import whole_vector
from shoal.peer.training.algorithms import (
    AccumulatedGradient,
    OverlappedPseudoGradient,
    OwnLoop,
    PseudoGradient,
    local_work,
)
from shoal.peer.training.parameters import MasterWeights, ParameterVector
from shoal.swarm.protocol.run_file import parse_run_file

DATA = torch.randn(12, 3, generator=torch.Generator().manual_seed(3))


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(3, 1)


def backward(model: nn.Module, batch: Tensor, factor: float = 1.0) -> None:
    (factor * model(batch).square().mean()).backward()


def test_a_pseudo_gradient_is_the_way_back_to_the_anchor() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = whole_vector(vector)
    work = PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None)
    assert not bool(whole_vector(work.contribution(anchor)).any())
    for _ in range(3):
        backward(model, DATA)
        work.step(12, 1.0)
    moved = whole_vector(work.contribution(anchor))
    assert torch.equal(moved, anchor - whole_vector(vector))
    assert bool(moved.any())
    assert all(parameter.grad is None for parameter in model.parameters())
    work.restart_from(anchor)
    assert torch.equal(whole_vector(vector), anchor)


def test_what_the_inner_optimizer_remembers_can_be_forgotten() -> None:
    """One gradient that is not a number stays in its moments for ever."""
    model = make_model()
    vector = ParameterVector(model)
    anchor = whole_vector(vector)
    work = PseudoGradient(vector, torch.optim.AdamW(model.parameters(), lr=0.1), None)
    backward(model, DATA, math.nan)
    work.step(12, 1.0)
    work.reset_optimizer()
    work.restart_from(anchor)
    backward(model, DATA)
    work.step(12, 1.0)
    assert bool(whole_vector(work.contribution(anchor)).isfinite().all())


def overlapped() -> tuple[nn.Module, ParameterVector, OverlappedPseudoGradient]:
    model = make_model()
    vector = ParameterVector(model)
    return model, vector, OverlappedPseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None)


def train(model: nn.Module, work: PseudoGradient, steps: int) -> None:
    for _ in range(steps):
        backward(model, DATA)
        work.step(12, 1.0)


def test_work_done_under_an_exchange_is_in_the_next_contribution_in_full() -> None:
    model, vector, work = overlapped()
    anchor = whole_vector(vector)
    train(model, work, 2)
    offered = whole_vector(work.contribution(anchor))
    at_offer = whole_vector(vector)
    train(model, work, 3)
    done_since = at_offer - whole_vector(vector)
    assert bool(done_since.any())
    anchor = anchor - 0.7 * offered + 0.25
    work.continue_from(anchor)
    torch.testing.assert_close(whole_vector(work.contribution(anchor)), done_since)


def test_whoever_did_nothing_under_an_exchange_is_exactly_at_the_anchor() -> None:
    model, vector, work = overlapped()
    anchor = whole_vector(vector)
    train(model, work, 2)
    whole_vector(work.contribution(anchor))
    anchor = anchor * 1.1 + 0.3
    work.continue_from(anchor)
    assert torch.equal(whole_vector(vector), anchor)


def test_an_aborted_rounds_work_is_in_the_next_contribution_with_what_is_done_since() -> None:
    model, vector, work = overlapped()
    anchor = whole_vector(vector)
    train(model, work, 2)
    whole_vector(work.contribution(anchor))
    train(model, work, 1)
    both = whole_vector(work.contribution(anchor))
    assert torch.equal(both, anchor - whole_vector(vector))
    train(model, work, 1)
    last = whole_vector(vector)
    work.continue_from(anchor)
    torch.testing.assert_close(whole_vector(vector), anchor + (last - (anchor - both)))


def test_an_offer_is_not_changed_by_what_is_done_since() -> None:
    model, vector, work = overlapped()
    anchor = whole_vector(vector)
    train(model, work, 1)
    offered = whole_vector(work.contribution(anchor))
    as_offered = offered.clone()
    train(model, work, 2)
    work.continue_from(anchor * 2)
    assert torch.equal(offered, as_offered)


def test_an_own_loop_keeps_the_learning_rates_that_it_sets() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = parse_run_file(run_toml(64, "float32"))
    assert run.inner.clip_norm == 1.0
    vector = ParameterVector(model)
    work = local_work(run, vector, optimizer, OwnLoop())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    anchor = whole_vector(vector)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        work.step(1, 0.1)
        schedule.step()
    expected = torch.full((4,), 1.0 + 0.5 + 0.25)
    torch.testing.assert_close(whole_vector(work.contribution(anchor)), expected)


def test_an_own_loop_is_clipped_only_if_it_says_so() -> None:
    model = make_model()
    run = parse_run_file(run_toml(64, "float32"))
    vector = ParameterVector(model)
    work = local_work(run, vector, torch.optim.SGD(model.parameters(), lr=1.0), OwnLoop(clip_norm=0.5))
    anchor = whole_vector(vector)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    work.step(1, 1.0)
    torch.testing.assert_close(whole_vector(work.contribution(anchor)), torch.full((4,), 0.25))


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.0])
def test_the_schedule_scales_the_base_rate_each_time(factor: float) -> None:
    model = make_model()
    vector = ParameterVector(model)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.4}]  # type: ignore[list-item]
    )
    work = PseudoGradient(vector, optimizer, None)
    for _ in range(2):
        anchor = whole_vector(vector)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        work.step(1, factor)
        expected = torch.tensor([0.1, 0.1, 0.1, 0.4]) * factor
        torch.testing.assert_close(whole_vector(work.contribution(anchor)), expected)


def test_gradients_are_clipped_before_the_step() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = whole_vector(vector)
    work = PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=1.0), 0.5)
    backward(model, DATA, 1000.0)
    work.step(12, 1.0)
    assert float(whole_vector(work.contribution(anchor)).norm()) == pytest.approx(0.5, rel=1e-4)


def test_accumulated_gradients_are_the_mean_over_all_samples() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = whole_vector(vector)
    work = AccumulatedGradient(vector)
    for start, stop in ((0, 2), (2, 3), (3, 12)):
        backward(model, DATA[start:stop])
        work.step(stop - start, 0.5)
    found = whole_vector(work.contribution(anchor))
    assert torch.equal(whole_vector(vector), anchor), "no inner step"
    backward(model, DATA)
    torch.testing.assert_close(found, take_gradients(vector))


def test_a_contribution_may_be_changed_and_made_again() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor = whole_vector(vector)
    for work in (
        AccumulatedGradient(vector),
        PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None),
    ):
        backward(model, DATA)
        work.step(1, 1.0)
        first = whole_vector(work.contribution(anchor))
        kept = first.clone()
        first.fill_(0.0)
        assert torch.equal(whole_vector(work.contribution(anchor)), kept)


def test_a_restart_forgets() -> None:
    model = make_model()
    vector = ParameterVector(model)
    work = AccumulatedGradient(vector)
    backward(model, DATA)
    work.step(12, 1.0)
    anchor = torch.arange(4.0)
    work.restart_from(anchor)
    assert torch.equal(whole_vector(vector), anchor)
    assert torch.equal(whole_vector(work.contribution(anchor)), torch.zeros(4))
    backward(model, DATA[:3])
    work.step(3, 1.0)
    found = whole_vector(work.contribution(anchor))
    backward(model, DATA[:3])
    torch.testing.assert_close(found, take_gradients(vector))


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that notes the elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        given |= {one.untyped_storage().data_ptr() for one in (kwargs or {}).values() if isinstance(one, Tensor)}
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, made.numel())
        return made


def test_nothing_of_the_size_of_the_model_is_made() -> None:
    """Neither to contribute nor to go on; and a gradient is summed up without another one."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    vector, made = ParameterVector(model), _Largest()
    anchor, out = whole_vector(vector), torch.empty(2**16)
    overlap = OverlappedPseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None)
    works = (PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.1), None), AccumulatedGradient(vector))
    for work in (*works, overlap):
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            work.step(1, 1.0)
        tracemalloc.start()  # of NumPy's memory
        for at in (0, vector.elements // 2, vector.elements - len(out)) if work is not overlap else ():
            with made:
                work.contribution(anchor).read(at, at + len(out), out)
            assert bool(out.any())
        numpy_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert numpy_bytes < 2**20
        if work is overlap:
            work.contribution(anchor)
        with made:
            work.continue_from(anchor)
    assert made.elements <= 2**20


def test_virtual_batch_holds_parameters_gradients_and_sums_alone() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    vector = ParameterVector(model)
    work = AccumulatedGradient(vector)
    for samples in (3, 5):
        gradients = []
        for parameter in vector.parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
            gradients.append(weakref.ref(parameter.grad))
        work.step(samples, 1.0)
        assert all(one() is None for one in gradients), "gradients are freed as they are added"
    assert torch.equal(whole_vector(work.contribution(torch.empty(0))), torch.full((vector.elements,), 2.0))


def test_one_tensor_may_be_the_gradient_of_two_parameters() -> None:
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    vector = ParameterVector(model)
    work = AccumulatedGradient(vector)
    shared = torch.ones(2, 2)
    for _ in range(2):
        for parameter in vector.parameters:
            parameter.grad = shared
        work.step(3, 1.0)
    assert torch.equal(whole_vector(work.contribution(torch.empty(0))), torch.ones(8))


# Low precision ------------------------------------------------------------------------------------------

LOW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [PseudoGradient, OverlappedPseudoGradient])
@pytest.mark.parametrize("has_masters", [False, True])
def test_zero_work_contributes_exactly_zero(dtype: torch.dtype, kind: type[PseudoGradient], has_masters: bool) -> None:
    """Whatever bits the anchor has below the parameters' precision; also after rounds under which nothing was done."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)).to(dtype)
    model[0].float()
    masters = MasterWeights(model) if has_masters else None
    vector = ParameterVector(model, masters)
    work = kind(vector, torch.optim.SGD(vector.weights, lr=0.0), None)
    anchor = torch.randn(vector.elements, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(anchor, anchor.to(dtype).float())
    work.restart_from(anchor)
    for number in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        work.step(1, 1.0)
        contribution = work.contribution(anchor)
        assert not bool(whole_vector(contribution).any())
        part = torch.ones(7)
        contribution.read(3 * number, 3 * number + 7, part)
        assert not bool(part.any())
        anchor = anchor + torch.randn(vector.elements, generator=torch.Generator().manual_seed(number))
        work.continue_from(anchor)


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_work_is_contributed_as_it_was_done(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    vector = ParameterVector(model)
    work = PseudoGradient(vector, torch.optim.SGD(model.parameters(), lr=0.5), None)
    anchor = torch.randn(20, generator=torch.Generator().manual_seed(1))
    work.restart_from(anchor)
    before = whole_vector(vector)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    work.step(1, 1.0)
    assert torch.equal(whole_vector(work.contribution(anchor)), before - whole_vector(vector))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("kind", [PseudoGradient, OverlappedPseudoGradient])
def test_with_masters_updates_below_an_ulp_move_the_anchor_as_in_float32(
    dtype: torch.dtype, kind: type[PseudoGradient]
) -> None:
    """Over a hundred rounds, each of which alone changes no parameter of low precision."""

    def move(model: nn.Module, masters: MasterWeights | None) -> tuple[Tensor, bool]:
        vector = ParameterVector(model, masters)
        work = kind(vector, torch.optim.SGD(vector.weights, lr=1e-5), None)
        anchor = torch.linspace(1.0, 2.0, vector.elements).to(torch.bfloat16).float()
        work.restart_from(anchor)
        start, is_seen = anchor.clone(), False
        for number in range(100):
            before = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            work.step(1, 1.0)
            if number == 0:
                is_seen = any(not torch.equal(one, its) for one, its in zip(before, model.parameters(), strict=True))
            anchor = anchor - whole_vector(work.contribution(anchor))
            work.continue_from(anchor)
        return anchor - start, is_seen

    expected, _ = move(nn.Linear(8, 8), None)
    low = nn.Linear(8, 8).to(dtype)
    found, is_seen = move(low, MasterWeights(low))
    assert not is_seen, "the first update is below every parameter's last bit"
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0)
    lost, _ = move(nn.Linear(8, 8).to(dtype), None)
    assert not bool(lost.any()), "without masters they vanish"


def test_masters_take_the_gradients_and_are_clipped() -> None:
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    masters = MasterWeights(model)
    vector = ParameterVector(model, masters)
    anchor = whole_vector(vector)
    work = PseudoGradient(vector, torch.optim.SGD(vector.weights, lr=1.0), 0.5)
    model.weight.grad = torch.full_like(model.weight, 100.0)
    work.step(1, 1.0)
    assert model.weight.grad is None
    contribution = whole_vector(work.contribution(anchor))
    torch.testing.assert_close(contribution, torch.full((4,), 0.25), rtol=1e-4, atol=0)
    assert torch.equal(model.weight.detach().reshape(-1), (anchor - contribution).to(torch.bfloat16))
    model.weight.grad = torch.full_like(model.weight, math.nan)
    work.reset_optimizer()
    assert model.weight.grad is None


def test_low_precision_gradients_are_summed_in_float32() -> None:
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    work = AccumulatedGradient(ParameterVector(model))
    for gradient in (1.0, 2.0**-10):
        model.weight.grad = torch.full_like(model.weight, gradient)
        work.step(3, 1.0)
    assert torch.equal(whole_vector(work.contribution(torch.empty(0))), torch.full((4,), (1 + 2.0**-10) / 2))


@pytest.mark.parametrize(
    ("dtype", "algorithm", "has_masters", "warnings"),
    [
        (torch.bfloat16, "diloco", False, 1),
        (torch.float16, "diloco", False, 1),
        (torch.bfloat16, "diloco", True, 0),
        (torch.bfloat16, "virtual_batch", False, 0),
        (torch.float32, "diloco", False, 0),
    ],
)
def test_loops_without_masters_are_told_once_what_they_lose(
    dtype: torch.dtype, algorithm: str, has_masters: bool, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2).to(dtype)
    vector = ParameterVector(model, MasterWeights(model) if has_masters else None)
    run = parse_run_file(run_toml(48, "int8", algorithm))
    work = local_work(run, vector, torch.optim.SGD(vector.weights, lr=0.1))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        work.step(1, 1.0)
    found = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(found) == warnings
    assert all("are lost" in one or "is lost" in one for one in found)
    assert all(str(dtype).removeprefix("torch.") in one and "torch.autocast" in one for one in found)
