"""Tests of pipeline/compute: stages give the whole model's gradient, and refuse inputs that do not fit."""

from collections.abc import Callable, Collection
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from tests.fakes.gradients import take_gradients
from tests.fakes.outer_steps import stepped
from tests.peer.layered_models import (
    CPU,
    Key,
    LayeredAndWhole,
    Line,
    SquaredError,
    batch_of,
    gpt,
    mean_gradient,
    shapes,
)
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.compression.range_reader import whole_vector
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage, StageCompute
from shoal.peer.training.algorithms import AccumulatedGradient
from shoal.peer.training.layers import Layered, layered_from_sequential
from shoal.peer.training.outer_optimizer import AdamW
from shoal.peer.training.parameters import ParameterVector, split_by_layout
from shoal.swarm.errors import WireError

SIZES = (2, 3, 1, 2, 1, 3)
"""Of a round's micro-batches, in samples: unequal, so that weights matter."""

BATCH = sum(SIZES)
CUT = (0, 2, 4, 6)
"""Both models have six layers."""

REPLICAS = ((0, 0), (0, 0), (1, 1), (2, 2), (2, 2))
MIXED = ((0, 0), (0, 2), (1, 1), (1, 2), (2, 2))
"""With a full replica, and one that holds two stages."""

WAYS = {REPLICAS: ((0, 2, 3), (1, 2, 4), (0, 2, 4), (1, 2, 3)), MIXED: ((0, 2, 4), (1,), (0, 3))}

recipes = pytest.mark.parametrize("make", [gpt, shapes])


def micro_batches(number: int) -> list[Key]:
    stops = [number * BATCH + stop for stop in accumulate(SIZES)]
    return [Key(number, stop - size, stop) for size, stop in zip(SIZES, stops, strict=True)]


def train_round(line: Line, recipe: LayeredAndWhole, number: int, ways: tuple[tuple[int, ...], ...]) -> float:
    """The mean loss."""
    total = 0.0
    for index, key in enumerate(micro_batches(number)):
        batch = batch_of(recipe.training_data(), key.start, key.stop)
        total += line.drive(key, batch, ways[index % len(ways)]) * (key.stop - key.start)
    return total / BATCH


def apart(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


# The whole ------------------------------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("spans", [REPLICAS, MIXED])
@pytest.mark.parametrize("recompute", [False, True])
def test_stages_on_five_peers_have_the_gradient_of_the_batch(
    make: Callable[[], LayeredAndWhole], spans: Any, recompute: bool
) -> None:
    recipe = make()
    line = Line(recipe, CUT, spans, recompute=recompute)
    loss = train_round(line, recipe, 0, WAYS[spans])
    model, batch = recipe.build_model(1), batch_of(recipe.training_data(), 0, BATCH)
    expected = mean_gradient(recipe, model, batch)
    assert apart(torch.cat(line.means()), expected) < 1e-5
    assert loss == pytest.approx(recipe.loss(model, batch).item(), rel=1e-5)
    assert all(one.in_flight == 0 for one in line.computes)


@recipes
@pytest.mark.parametrize("spans", [REPLICAS, MIXED])
def test_twenty_steps_are_those_of_one_process(make: Callable[[], LayeredAndWhole], spans: Any) -> None:
    recipe = make()
    line = Line(recipe, CUT, spans)
    outer = AdamW(lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    whole = recipe.build_model(1)
    vector = ParameterVector(whole)
    anchors, states = line.anchors(), [torch.zeros(outer.slots, one.numel()) for one in line.anchors()]
    anchor, state = whole_vector(vector), torch.zeros(outer.slots, vector.elements)
    assert torch.equal(torch.cat(anchors), anchor)
    for number in range(20):
        train_round(line, recipe, number, WAYS[spans])
        steps = [stepped(outer, *one, number) for one in zip(anchors, states, line.means(), strict=True)]
        anchors, states = [one for one, _ in steps], [one for _, one in steps]
        line.restart(anchors)
        batch = batch_of(recipe.training_data(), number * BATCH, (number + 1) * BATCH)
        anchor, state = stepped(outer, anchor, state, mean_gradient(recipe, whole, batch), number)
        vector.write(anchor)
    start = whole_vector(ParameterVector(recipe.build_model(1)))
    assert apart(anchor, start) > 0.01, "it has learnt something"
    for found, its in zip(
        split_by_layout(torch.cat(anchors), vector.layout).values(),
        split_by_layout(anchor, vector.layout).values(),
        strict=True,
    ):
        assert apart(found, its) < 1e-5


@recipes
def test_recomputing_changes_no_bit(make: Callable[[], LayeredAndWhole]) -> None:
    recipe = make()
    found = []
    for recompute in (False, True):
        line = Line(recipe, CUT, REPLICAS, recompute=recompute)
        losses = train_round(line, recipe, 0, WAYS[REPLICAS])
        found.append((losses, torch.cat(line.means())))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def trained(recipe: LayeredAndWhole, activations: str, rounds: int) -> float:
    """The held-out loss of the whole model, put together from the stages."""
    line = Line(recipe, CUT, REPLICAS, activations)
    outer = AdamW(lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    anchors, states = line.anchors(), [torch.zeros(outer.slots, one.numel()) for one in line.anchors()]
    for number in range(rounds):
        train_round(line, recipe, number, WAYS[REPLICAS])
        steps = [stepped(outer, *one, number) for one in zip(anchors, states, line.means(), strict=True)]
        anchors, states = [one for one, _ in steps], [one for _, one in steps]
        line.restart(anchors)
    whole = recipe.build_model(1)
    ParameterVector(whole).write(torch.cat(anchors))
    return recipe.held_out_loss(whole, CPU, 128)


@pytest.mark.parametrize(("make", "within"), [(gpt, 0.01), (shapes, 0.1)])
def test_int8_activations_learn_as_much(make: Callable[[], LayeredAndWhole], within: float) -> None:
    """So small batches of images are noisy: any change in the last bits moves the loss by several percent."""
    recipe = make()
    exact, packed = trained(recipe, "float32", 20), trained(recipe, "int8", 20)
    assert exact < 0.85 * recipe.held_out_loss(recipe.build_model(1), CPU, 128)
    assert packed != exact
    assert packed / exact == pytest.approx(1.0, rel=within)


@pytest.mark.parametrize(("make", "within"), [(gpt, 0.02), (shapes, 0.15)])
def test_int8_activations_hardly_change_the_gradient(make: Callable[[], LayeredAndWhole], within: float) -> None:
    """Those of the convolutional net have some values that are much larger than the others of their block."""
    recipe = make()
    means = []
    for activations in ("float32", "int8"):
        line = Line(recipe, CUT, REPLICAS, activations)
        train_round(line, recipe, 0, WAYS[REPLICAS])
        means.append(torch.cat(line.means()))
    assert 1e-5 < apart(means[1], means[0]) < within


# Whose gradient counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [REPLICAS, MIXED])
@pytest.mark.parametrize("granted", [(), (0,), (1,), (2,), (0, 2)])
def test_passing_through_adds_nothing(spans: Any, granted: Collection[int]) -> None:
    recipe = gpt()
    alone, both = Line(recipe, CUT, spans), Line(recipe, CUT, spans)
    for index, key in enumerate(micro_batches(0)):
        batch, way = batch_of(recipe.training_data(), key.start, key.stop), WAYS[spans][index % len(WAYS[spans])]
        alone.drive(key, batch, way)
        both.drive(key, batch, way)
    alone_means, before = alone.means(), both.means()
    assert all(torch.equal(one, other) for one, other in zip(alone_means, before, strict=True))
    more = Key(0, BATCH, BATCH + 2)
    batch = batch_of(recipe.training_data(), more.start, more.stop)
    for way in WAYS[spans]:
        both.drive(more, batch, way, granted)
    for number, (one, other) in enumerate(zip(alone_means, both.means(), strict=True)):
        assert torch.equal(one, other) == (number not in granted)
    for compute in both.peers:
        assert all(one.grad is None for stage in compute for one in stage.model.parameters())


def test_a_span_passes_on_the_same_gradient_whoever_counts() -> None:
    recipe = gpt()
    key, given = Key(0, 0, 2), torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2))
    targets = recipe.targets_of(batch_of(recipe.training_data(), 0, 2))
    gradients = []
    for granted in ((1, 2), (2,), (1,), ()):
        span = Line(recipe, CUT, [(1, 2)]).computes[0]
        assert span.forward(key, given) is None
        gradients.append(span.backward(key, targets, granted).input_gradient)
    for one in gradients:
        assert one is not None
        assert torch.equal(one, gradients[0])  # type: ignore[arg-type]


def test_a_first_stage_has_no_input_gradient_and_a_last_one_the_loss() -> None:
    recipe = gpt()
    whole = Line(recipe, CUT, [(0, 2)]).computes[0]
    batch = batch_of(recipe.training_data(), 0, 2)
    key = Key(0, 0, 2)
    for granted in ((), (0, 1, 2)):
        assert whole.forward(key, recipe.input_of(batch)) is None
        done = whole.backward(key, recipe.targets_of(batch), granted)
        assert done.input_gradient is None
        assert done.loss is not None
        assert float(done.loss) == pytest.approx(recipe.loss(recipe.build_model(1), batch).item(), rel=1e-6)


# One micro-batch at a time --------------------------------------------------------------------------------


def middle(recipe: LayeredAndWhole, **settings: Any) -> StageCompute:
    return Line(recipe, CUT, [(1, 1)], **settings).computes[0]


def test_what_is_in_flight_is_bounded_and_dropped() -> None:
    compute = middle(gpt(), max_in_flight=2, input_shape=(16, 32))
    given = torch.randn(2, 16, 32)
    keys = [Key(0, start, start + 2) for start in (0, 2, 4)]
    for key in keys[:2]:
        compute.forward(key, given)
    with pytest.raises(AssertionError):
        compute.forward(keys[2], given)
    compute.drop(keys[0])
    compute.drop(keys[0])
    compute.forward(keys[2], given)
    assert compute.in_flight == 2
    compute.drop_all()
    assert compute.in_flight == 0


def test_attempts_at_one_micro_batch_are_apart() -> None:
    compute = middle(gpt())
    first, second = Key(0, 0, 2, 0), Key(0, 0, 2, 1)
    compute.forward(first, torch.randn(2, 16, 32))
    compute.forward(second, torch.randn(2, 16, 32))
    compute.drop(first)
    assert compute.backward(second, torch.randn(2, 16, 32), {1}).input_gradient is not None


@pytest.mark.parametrize("shape", [(3, 16, 32), (2, 16), (2, 16, 33), (2, 1, 16, 32), ()])
def test_an_input_of_another_shape_is_the_senders_fault(shape: tuple[int, ...]) -> None:
    compute = middle(gpt(), input_shape=(16, 32))
    with pytest.raises(WireError, match="an activation of"):
        compute.forward(Key(0, 0, 2), torch.zeros(shape))
    assert compute.in_flight == 0


def test_an_input_of_integers_is_the_senders_fault() -> None:
    with pytest.raises(WireError, match="floating-point"):
        middle(gpt(), input_shape=(16, 32)).forward(Key(0, 0, 2), torch.zeros(2, 16, 32, dtype=torch.int64))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_of_another_shape_is_the_senders_fault(recompute: bool) -> None:
    compute = middle(gpt(), recompute=recompute)
    key = Key(0, 0, 2)
    compute.forward(key, torch.zeros(2, 16, 32))
    for wrong in (torch.zeros(2, 16, 31), torch.zeros(1, 16, 32), torch.zeros(2, 16, 32, dtype=torch.int32)):
        with pytest.raises(WireError, match="a gradient of"):
            compute.backward(key, wrong, {1})
    assert compute.backward(key, torch.zeros(2, 16, 32), {1}).input_gradient is not None


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (gpt, torch.full((2, 16), 256)),
        (gpt, torch.full((2, 16), -1)),
        (gpt, torch.zeros(2, 15, dtype=torch.int64)),
        (gpt, torch.zeros(2, 16)),
        (shapes, torch.full((2,), 4)),
        (shapes, torch.full((2,), -1)),
        (shapes, torch.zeros(3, dtype=torch.int64)),
    ],
)
def test_targets_that_cannot_be_are_the_senders_fault(make: Callable[[], LayeredAndWhole], wrong: Tensor) -> None:
    recipe = make()
    compute = Line(recipe, CUT, [(2, 2)]).computes[0]
    shape = recipe.layers(1).activation_shapes(recipe.input_of(batch_of(recipe.training_data(), 0, 2)))[3]
    key = Key(0, 0, 2)
    compute.forward(key, torch.zeros(shape))
    with pytest.raises(WireError, match="targets: expected"):
        compute.backward(key, wrong, {2})
    assert compute.in_flight == 1


def test_bfloat16_autocast_is_that_of_the_unsplit_model() -> None:
    recipe = gpt()

    def cast() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    line = Line(recipe, CUT, [(0, 0), (1, 1), (2, 2)], autocast=cast)
    batch = batch_of(recipe.training_data(), 0, 2)
    loss = line.drive(Key(0, 0, 2), batch, (0, 1, 2))
    model = recipe.build_model(1)
    with cast():
        expected = recipe.loss(model, batch)
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == expected.item()
    assert torch.equal(torch.cat(line.means()), take_gradients(ParameterVector(model)))


# Layers that draw, and layers that count ------------------------------------------------------------------


class Noisy(nn.Module):
    """Draws without being a dropout module."""

    def forward(self, given: Tensor) -> Tensor:
        return given * (1 + torch.rand_like(given))


def noisy_layers() -> Layered:
    torch.manual_seed(4)
    parts = [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), Noisy(), nn.Linear(6, 6), nn.Linear(6, 3)]
    return layered_from_sequential(nn.Sequential(*parts))


def noisy_run(recompute: bool, boundaries: tuple[int, ...], before: int = 0) -> tuple[Tensor, Tensor]:
    """Gradients of two micro-batches, and the input's of the last of them; the generator is elsewhere each time."""
    layered = noisy_layers()
    torch.manual_seed(before)
    computes, works = [], []
    for number, (first, stop) in enumerate(pairwise(boundaries)):
        model = layered.build(first, stop)
        work = AccumulatedGradient(ParameterVector(model))
        stage = HeldStage(number, first, model, work)
        loss = SquaredError() if stop == len(layered) else None
        computes.append(StageCompute([stage], ComputeSettings(CPU, recompute=recompute, seed=9), loss))
        works.append((work, model))
    flowing: Tensor | None
    for start in (0, 4):
        key = Key(0, start, start + 4)
        flowing = torch.ones(4, 6)
        for compute in computes:
            assert flowing is not None
            torch.rand(3)  # somebody else draws too
            flowing = compute.forward(key, flowing)
        received: Tensor | None = torch.zeros(4, 3)
        for number, compute in reversed(list(enumerate(computes))):
            assert received is not None
            torch.rand(2)
            received = compute.backward(key, received, {number}).input_gradient
    return torch.cat(
        [whole_vector(work.contribution(whole_vector(ParameterVector(model)))) for work, model in works]
    ), torch.rand(2)


def test_what_layers_draw_is_a_function_of_the_micro_batch() -> None:
    plain, drawn = noisy_run(False, (0, 1, 2, 4))
    again, drawn_again = noisy_run(True, (0, 1, 2, 4))
    assert torch.equal(plain, again), "recomputed"
    assert torch.equal(drawn, drawn_again), "the global generator is left alone"
    torch.testing.assert_close(noisy_run(False, (0, 4))[0], plain)  # cut elsewhere
    torch.testing.assert_close(noisy_run(True, (0, 3, 4), before=77)[0], plain)


def test_another_micro_batch_draws_something_else() -> None:
    layered = noisy_layers()
    model = layered.build(0, 2)
    stage = HeldStage(0, 0, model, AccumulatedGradient(ParameterVector(model)))
    compute = StageCompute([stage], ComputeSettings(CPU, seed=9, max_in_flight=9), None)
    keys = [Key(0, 0, 4), Key(0, 4, 8), Key(1, 0, 4)]
    outputs = [compute.forward(key, torch.ones(4, 6)) for key in keys]
    assert not torch.equal(outputs[0], outputs[1])  # type: ignore[arg-type]
    assert not torch.equal(outputs[0], outputs[2])  # type: ignore[arg-type]
    same = compute.forward(Key(0, 0, 4, 1), torch.ones(4, 6))
    assert torch.equal(outputs[0], same)  # type: ignore[arg-type]


class Counting(nn.Module):
    """Scales by how often it has been run, which it counts, in place and not."""

    count: Tensor
    again: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        self.count.add_(1.0)
        self.again = self.again + 2.0
        scaled: Tensor = self.linear(given) * float(self.count) * float(self.again)
        return scaled


def counting_run(recompute: bool) -> tuple[Tensor, float]:
    torch.manual_seed(5)
    layered = layered_from_sequential(nn.Sequential(Counting(), nn.BatchNorm1d(3), nn.Linear(3, 3)))
    model = layered.build(0, 2)
    work = AccumulatedGradient(ParameterVector(model))
    compute = StageCompute([HeldStage(0, 0, model, work)], ComputeSettings(CPU, recompute=recompute), None)
    given = torch.arange(12.0).view(4, 3)
    keys = [Key(0, 0, 4), Key(0, 4, 8)]
    for key in keys:
        compute.forward(key, given)
    for key in keys:
        compute.backward(key, given.square(), {0})
    buffers = torch.cat([one.reshape(-1).float() for one in model.buffers()])
    return torch.cat([whole_vector(work.contribution(whole_vector(ParameterVector(model)))), buffers]), float(
        buffers[0]
    )


def test_buffers_change_once_a_micro_batch_recomputed_or_not() -> None:
    plain, count = counting_run(False)
    assert count == 2
    assert torch.equal(counting_run(True)[0], plain)


def test_tied_weights_within_a_stage_have_the_sum_of_their_gradients() -> None:
    recipe = gpt(tie_embedding=True)
    line = Line(recipe, (0, 1), [(0, 0)])
    batch = batch_of(recipe.training_data(), 0, 2)
    line.drive(Key(0, 0, 2), batch, (0,))
    expected = mean_gradient(recipe, recipe.build_model(1), batch)
    assert apart(line.means()[0], expected) < 1e-6


def test_a_gradient_that_reaches_nothing_is_zeros() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(3))
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, given: Tensor) -> Tensor:
            return F.relu(self.bias).expand_as(given)

    layered = layered_from_sequential(nn.Sequential(nn.Linear(3, 3), Cut()))
    model = layered.build(1, 2)
    work = AccumulatedGradient(ParameterVector(model))
    compute = StageCompute([HeldStage(1, 1, model, work)], ComputeSettings(CPU), None)
    key = Key(0, 0, 2)
    compute.forward(key, torch.ones(2, 3))
    done = compute.backward(key, torch.ones(2, 3), {1})
    assert torch.equal(done.input_gradient, torch.zeros(2, 3))  # type: ignore[arg-type]
    assert torch.equal(whole_vector(work.contribution(torch.zeros(5))), torch.tensor([2.0, 2, 2, 0, 0]))


# What another replica has computed ------------------------------------------------------------------------


@pytest.mark.parametrize("span", [(1, 1), (1, 2), (2, 2)])
def test_repeating_gives_the_same_bits_and_counts_nothing(span: tuple[int, int]) -> None:
    recipe = gpt()
    batch = batch_of(recipe.training_data(), 0, 2)
    key, given = Key(0, 0, 2), torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2))
    compute, other = (Line(recipe, CUT, [span]).computes[0] for _ in range(2))
    output = compute.forward(key, given)
    received = recipe.targets_of(batch) if output is None else torch.ones_like(output)
    gradient = compute.backward(key, received, range(span[0], span[1] + 1)).input_gradient
    repeated, back = other.repeat(key, given, received)
    assert back is not None
    assert torch.equal(back, gradient)  # type: ignore[arg-type]
    assert output is None or torch.equal(repeated, output)
    assert other.in_flight == 0
    forward, nothing = other.repeat(key, given, None)
    assert nothing is None
    assert output is None or torch.equal(forward, output)


def test_repeating_draws_the_same_and_leaves_buffers_alone() -> None:
    torch.manual_seed(5)
    layered = layered_from_sequential(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 3)))
    model = layered.build(0, 2)
    work = AccumulatedGradient(ParameterVector(model))
    stage, settings = HeldStage(1, 1, model, work), ComputeSettings(CPU, seed=9)
    key, given = Key(0, 0, 4), torch.arange(12.0).view(4, 3)
    before = [one.clone() for one in model.buffers()]
    first, back = StageCompute([stage], settings, None).repeat(key, given, torch.ones(4, 3))
    assert all(torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True))
    compute = StageCompute([stage], settings, None)
    assert torch.equal(first, compute.forward(key, given))  # type: ignore[arg-type]
    assert any(not torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True))
    gradient = compute.backward(key, torch.ones(4, 3), {1}).input_gradient
    assert torch.equal(back, gradient)  # type: ignore[arg-type]


def test_what_does_not_fit_is_the_askers_fault() -> None:
    compute = middle(gpt(), input_shape=(16, 32))
    for given, received in (
        (torch.zeros(2, 16, 31), torch.zeros(2, 16, 32)),
        (torch.zeros(2, 16, 32), torch.zeros(2, 16, 31)),
    ):
        with pytest.raises(WireError):
            compute.repeat(Key(0, 0, 2), given, received)
