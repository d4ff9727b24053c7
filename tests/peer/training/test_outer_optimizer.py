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
from shoal.peer.training.outer_optimizer import (
    LAMB,
    LARS,
    SGD,
    AdamW,
    Nesterov,
    OuterOptimizer,
    OuterStep,
    f32,
    make_outer,
)
from shoal.swarm.protocol.run_file import OuterSection
from shoal.swarm.protocol.types import TensorSpec

LR, MOMENTUM, BETAS, EPS, DECAY, TRUST = 0.7, 0.9, (0.9, 0.95), 1e-8, 0.1, 0.01
ELEMENTWISE, LAYERWISE = ["nesterov", "sgd", "adamw"], ["lamb", "lars"]
NAMES = ELEMENTWISE + LAYERWISE
every_outer = pytest.mark.parametrize("name", NAMES)


def make(name: str, **settings: Any) -> OuterOptimizer:
    usual = {"lr": LR, "momentum": MOMENTUM, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    return make_outer(OuterSection(optimizer=name, **usual | {"trust_coefficient": TRUST} | settings))  # type: ignore[arg-type]


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


@pytest.mark.parametrize("name", ELEMENTWISE)
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


def norm(x: Any) -> float:
    """The norm from the exact sum of squares, to within the last bits of float64."""
    return math.sqrt(math.fsum((x.astype(np.float64) ** 2).tolist()))


def numpy_step(name: str, anchor: Any, state: Any, mean: Any, version: int, factor: float) -> tuple[Any, Any]:
    """The same formulas in NumPy, whose float32 operations round once each."""
    s = np.float32
    if name == "sgd":
        return anchor - mean * s(LR * factor), state
    if name == "nesterov":
        buffer = state[0] * s(MOMENTUM) + mean
        return anchor - (buffer * s(MOMENTUM) + mean) * s(LR * factor), np.stack([buffer])
    if name == "lars":
        own, its = norm(anchor), norm(mean)
        lr = s(LR * factor * (TRUST * own / (its + DECAY * own)))
        buffer = state[0] * s(MOMENTUM) + (anchor * s(DECAY) + mean) * lr
        return anchor - buffer, np.stack([buffer])
    lr, t = LR * factor, version + 1
    first = state[0] * s(BETAS[0]) + mean * s(1 - BETAS[0])
    second = state[1] * s(BETAS[1]) + mean * mean * s(1 - BETAS[1])
    denominator = np.sqrt(second) * s(1 / math.sqrt(1 - BETAS[1] ** t)) + s(EPS)
    if name == "lamb":
        direction = first * s(1 / (1 - BETAS[0] ** t)) / denominator + anchor * s(DECAY)
        return anchor - direction * s(lr * (norm(anchor) / norm(direction))), np.stack([first, second])
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


@pytest.mark.parametrize("name", ELEMENTWISE)
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
    mean_was = mean.clone()
    after = stepped(outer, anchor, state, mean, 3, 0.5, piece=size)
    values = torch.cat([after[0].unsqueeze(0), after[1]])
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
    assert [make(name).slots for name in NAMES] == [1, 0, 2, 2, 1]
    assert all(make(name).slots == OuterSection(optimizer=name).slots for name in NAMES)  # type: ignore[arg-type]


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
        lambda: LAMB(1.0, (0.9, 1.0), 1e-8, 0.0),
        lambda: LARS(1.0, 0.9, 0.0, 0.0),
        lambda: LARS(1.0, 1.0, 0.0, 0.001),
    ],
)
def test_settings_out_of_range_are_refused(build: Callable[[], OuterOptimizer]) -> None:
    with pytest.raises(ValueError, match=r"must be|are two"):
        build()


# Layer-wise optimizers ----------------------------------------------------------------------------------------

LAYOUT = [
    TensorSpec(name="embedding", shape=(300, 40)),
    TensorSpec(name="gain", shape=(40,)),
    TensorSpec(name="nothing", shape=(0, 3)),
    TensorSpec(name="matrix", shape=(9, 1000, 2)),
    TensorSpec(name="bias", shape=(7,)),
    TensorSpec(name="head", shape=(3, 5)),
]
ELEMENTS = sum(spec.elements for spec in LAYOUT)


def float64_step(
    name: str, weights: list[Tensor], states: list[list[Tensor]], means: list[Tensor], version: int
) -> None:
    """The papers' algorithms (LAMB: arXiv:1904.00962, algorithm 2; LARS: arXiv:1708.03888, algorithm 1), in float64."""
    for spec, w, state, g in zip(LAYOUT, weights, states, means, strict=True):
        is_matrix = len(spec.shape) > 1
        decay = DECAY if is_matrix else 0.0
        if name == "lars":
            local = TRUST * w.norm() / (g.norm() + decay * w.norm()) if is_matrix and w.numel() else 1.0
            state[0].mul_(MOMENTUM).add_(LR * local * (g + decay * w))
            w.sub_(state[0])
            continue
        state[0].mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
        state[1].mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
        first, second = state[0] / (1 - BETAS[0] ** (version + 1)), state[1] / (1 - BETAS[1] ** (version + 1))
        r = first / (second.sqrt() + EPS) + decay * w
        w.sub_(LR * (w.norm() / r.norm() if is_matrix and w.numel() else 1.0) * r)


@pytest.mark.parametrize("name", LAYERWISE)
def test_layers_are_stepped_as_published(name: str) -> None:
    outer, anchor = make(name), torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    state, sizes = torch.zeros(outer.slots, ELEMENTS), [spec.elements for spec in LAYOUT]
    weights = list(anchor.double().split(sizes))
    states = [[torch.zeros(size, dtype=torch.float64) for _ in range(outer.slots)] for size in sizes]
    for version in range(10):
        mean = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(version + 1))
        anchor, state = stepped(outer, anchor, state, mean, version, layout=LAYOUT, piece=777)
        float64_step(name, weights, states, list(mean.double().split(sizes)), version)
    torch.testing.assert_close(anchor.double(), torch.cat(weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("piece", [1, 39, 8191, 8193, 12_000])
def test_pieces_that_ignore_the_layers_give_the_same_bits(name: str, piece: int) -> None:
    outer, state_was = make(name), noise(1, make(name).slots * ELEMENTS).abs().view(-1, ELEMENTS)
    small = slice(-2000, None) if piece == 1 else slice(None)  # of which there are many
    layout = LAYOUT[3:] if piece == 1 else LAYOUT
    layout = [TensorSpec(name="m", shape=(2, 989)), *LAYOUT[4:]] if piece == 1 else layout
    given = (noise(0, ELEMENTS)[small], state_was[:, small], noise(2, ELEMENTS)[small])
    whole = stepped(outer, *given, 3, 0.5, layout=layout)
    cut = stepped(outer, *given, 3, 0.5, layout=layout, piece=piece)
    for a, b in zip(whole, cut, strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("name", LAYERWISE)
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(run(name, 300_000, 2))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("name", LAYERWISE)
def test_measuring_changes_nothing(name: str) -> None:
    outer = make(name)
    values, mean = noise(0, (1 + outer.slots) * 100).abs().view(-1, 100), noise(1, 100)
    was = values.clone(), mean.clone()
    OuterStep(outer, [TensorSpec(name="w", shape=(10, 10))], 5, 1.0).measure(values, lambda: [(0, 100, mean)])
    assert torch.equal(values, was[0])
    assert torch.equal(mean, was[1])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_read_the_mean_once(name: str) -> None:
    step = OuterStep(make(name), LAYOUT, 0, 1.0)
    step.measure(torch.empty(0), lambda: pytest.fail("another pass over the mean"))


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize("zero", ["anchor", "mean", "both"])
def test_a_layer_without_a_norm_is_stepped_by_the_learning_rate(name: str, zero: str) -> None:
    outer = make(name, weight_decay=0.0)
    anchor = torch.zeros(50) if zero in ("anchor", "both") else noise(0, 50)
    mean = torch.zeros(50) if zero in ("mean", "both") else noise(1, 50)
    after, _ = stepped(outer, anchor, torch.zeros(outer.slots, 50), mean, 0)
    assert bool(torch.isfinite(after).all())
    assert torch.equal(after, anchor) == (zero in ("mean", "both"))


@pytest.mark.parametrize("name", LAYERWISE)
def test_tiny_gradients_do_not_make_infinite_steps(name: str) -> None:
    outer = make(name, weight_decay=0.0, eps=1.0)
    anchor, mean = torch.full((64,), 1e15), torch.full((64,), 1e-44)
    after, state = stepped(outer, anchor, torch.zeros(outer.slots, 64), mean, 0)
    assert bool(torch.isfinite(after).all())
    assert bool(torch.isfinite(state).all())
