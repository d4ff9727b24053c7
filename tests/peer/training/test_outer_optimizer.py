"""Tests of training/outer_optimizer: the published formulas, with the same bits on every device and in any pieces."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.outer_steps import stepped
from torch import Tensor

from shoal.peer.training import outer_optimizer
from shoal.peer.training.outer_optimizer import SGD, AdamW, Nesterov, OuterOptimizer, f32, make_outer

LR, MOMENTUM, BETAS, EPS, DECAY = 0.7, 0.9, (0.9, 0.95), 1e-8, 0.1
NAMES = ["nesterov", "sgd", "adamw"]
every_outer = pytest.mark.parametrize("name", NAMES)


def make(name: str, lr: float = LR) -> OuterOptimizer:
    return make_outer(name, lr=lr, momentum=MOMENTUM, betas=BETAS, eps=EPS, weight_decay=DECAY)


def noise(seed: int, n: int) -> Tensor:
    """Values of very different sizes, so that every rounding shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10 ** (torch.randint(-6, 2, (n,), generator=generator).float())


def run(name: str, n: int, steps: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    outer = make(name)
    anchor, state = noise(0, n).to(device), torch.zeros(outer.slots, n, device=device)
    for version in range(steps):
        factor = 1.0 / (1 + version)
        anchor, state = stepped(outer, anchor, state, noise(version + 1, n).to(device), version, factor)
    return anchor.cpu(), state.cpu()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


TORCH: dict[str, Callable[[list[Tensor]], Any]] = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=LR),
    "adamw": lambda p: torch.optim.AdamW(p, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
}


@every_outer
@pytest.mark.parametrize("scheduled", [False, True])
def test_matches_torch_over_20_steps(name: str, scheduled: bool) -> None:
    n = 1000
    outer, theirs = make(name), noise(0, n).double().requires_grad_()
    optimizer = TORCH[name]([theirs])
    ours, state = noise(0, n), torch.zeros(outer.slots, n)
    for version in range(20):
        factor = 0.5 + version / 40 if scheduled else 1.0
        gradient = noise(version + 1, n)
        optimizer.param_groups[0]["lr"] = LR * factor
        theirs.grad = gradient.double()
        optimizer.step()
        ours, state = stepped(outer, ours, state, gradient, version, factor)
    torch.testing.assert_close(ours.double(), theirs.detach(), rtol=1e-5, atol=1e-5)


def numpy_step(name: str, anchor: Any, state: Any, mean: Any, version: int, factor: float) -> tuple[Any, Any]:
    """The same formulas in NumPy, whose float32 operations round once each."""
    s = np.float32
    if name == "sgd":
        return anchor - mean * s(LR * factor), state
    if name == "nesterov":
        buffer = state[0] * s(MOMENTUM) + mean
        return anchor - (buffer * s(MOMENTUM) + mean) * s(LR * factor), np.stack([buffer])
    lr, t = LR * factor, version + 1
    first = state[0] * s(BETAS[0]) + mean * s(1 - BETAS[0])
    second = state[1] * s(BETAS[1]) + mean * mean * s(1 - BETAS[1])
    denominator = np.sqrt(second) * s(1 / math.sqrt(1 - BETAS[1] ** t)) + s(EPS)
    change = first * s(lr / (1 - BETAS[0] ** t)) / denominator
    return anchor * s(1 - lr * DECAY) - change, np.stack([first, second])


@every_outer
def test_every_operation_rounds_once(name: str) -> None:
    n, outer = 100_003, make(name)
    anchor, state = noise(0, n), torch.zeros(outer.slots, n)
    their_anchor, their_state = anchor.numpy(), state.numpy()
    for version in range(4):
        mean, factor = noise(version + 1, n), 1 / (1 + version)
        anchor, state = stepped(outer, anchor, state, mean, version, factor)
        their_anchor, their_state = numpy_step(name, their_anchor, their_state, mean.numpy(), version, factor)
        assert their_anchor.dtype == np.float32
        assert torch.equal(bits(anchor), bits(torch.from_numpy(their_anchor)))
        assert torch.equal(bits(state), bits(torch.from_numpy(their_state)))


@given(seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_root_is_correctly_rounded(seed: int) -> None:
    patterns = np.random.default_rng(seed).integers(0, 0x7F7FFFFF, 50_000, dtype=np.int32)
    x = torch.from_numpy(patterns).view(torch.float32)
    exact = torch.from_numpy(np.sqrt(x.numpy().astype(np.float64)).astype(np.float32))
    assert torch.equal(bits(outer_optimizer._sqrt(x, torch.empty_like(x))), bits(exact))
    # What other devices do, done here: it has to be the same.
    assert torch.equal(bits(x.double().sqrt_().float()), bits(exact))


@every_outer
@pytest.mark.parametrize("size", [1, 7, 1000, 2999, 3000])
def test_slices_make_no_difference(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(name, 3000, 3)
    monkeypatch.setattr(outer_optimizer, "_SLICE", size)
    sliced = run(name, 3000, 3)
    for a, b in zip(whole, sliced, strict=True):
        assert torch.equal(bits(a), bits(b))


@every_outer
def test_vectors_larger_than_a_slice(name: str) -> None:
    n = outer_optimizer._SLICE + 5
    outer, anchor, mean = make(name), noise(0, n), noise(1, n)
    new, _ = stepped(outer, anchor, torch.zeros(outer.slots, n), mean, 0)
    tail, _ = stepped(outer, anchor[-7:], torch.zeros(outer.slots, 7), mean[-7:].clone(), 0)
    assert torch.equal(bits(new[-7:]), bits(tail))


@every_outer
@pytest.mark.parametrize("size", [4001, 99_999, 200_000])
def test_ranges_stepped_one_by_one_have_the_bits_of_the_formula(name: str, size: int) -> None:
    n, outer = 200_000, make(name)
    anchor, state, mean = noise(0, n), noise(1, outer.slots * n).abs().view(outer.slots, n), noise(2, n)
    values, mean_was = torch.cat([anchor.unsqueeze(0), state]), mean.clone()
    for start in range(0, n, size):
        outer.step_(values[:, start : start + size], mean[start : start + size], 3, 0.5)
    expected_anchor, expected_state = numpy_step(name, anchor.numpy(), state.numpy(), mean.numpy(), 3, 0.5)
    assert torch.equal(bits(values[0]), bits(torch.from_numpy(expected_anchor)))
    assert torch.equal(bits(values[1:]), bits(torch.from_numpy(expected_state)))
    assert torch.equal(bits(mean), bits(mean_was)), "the mean is only read"


@every_outer
def test_empty_vector(name: str) -> None:
    outer = make(name)
    anchor, state = stepped(outer, torch.empty(0), torch.empty(outer.slots, 0), torch.empty(0), 0)
    assert anchor.shape == (0,)
    assert state.shape == (outer.slots, 0)


def test_slots() -> None:
    assert [make(name).slots for name in NAMES] == [1, 0, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to compare with the CPU")
@every_outer
def test_cpu_and_cuda_agree_to_the_bit(name: str) -> None:
    n = outer_optimizer._SLICE + 12345
    for on_cpu, on_cuda in zip(run(name, n, 5), run(name, n, 5, "cuda"), strict=True):
        assert torch.equal(bits(on_cpu), bits(on_cuda))


@given(x=st.floats(-1e30, 1e30))
@settings(deadline=None)
def test_f32_is_what_torch_makes_of_a_scalar(x: float) -> None:
    assert f32(x) == float(torch.tensor(x, dtype=torch.float32))
    assert f32(f32(x)) == f32(x)


@given(base=st.floats(0, 0.99999), exponent=st.integers(0, 10_000))
@settings(deadline=None)
def test_power(base: float, exponent: int) -> None:
    assert outer_optimizer._power(base, exponent) == pytest.approx(base**exponent, rel=1e-11, abs=1e-300)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lion'.*nesterov, sgd, adamw"):
        make("lion")


@pytest.mark.parametrize(
    "build",
    [
        lambda: SGD(-1.0),
        lambda: SGD(math.nan),
        lambda: Nesterov(1.0, 1.0),
        lambda: Nesterov(1.0, -0.1),
        lambda: AdamW(1.0, (0.9, 1.0), 1e-8, 0.0),
        lambda: AdamW(1.0, (0.9,), 1e-8, 0.0),
        lambda: AdamW(1.0, BETAS, 1e-60, 0.0),
        lambda: AdamW(1.0, BETAS, 1e-8, -1.0),
    ],
)
def test_settings_out_of_range_are_refused(build: Callable[[], OuterOptimizer]) -> None:
    with pytest.raises(ValueError, match=r"must be|are two"):
        build()
