"""Tests of training/layers: models as layers, their stages, shared weights and shapes."""

import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.fakes.gradients import take_gradients
from tests.peer.layered_models import GPT, LayeredAndWhole, batch_of, gpt, shapes
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from shoal.compression.range_reader import whole_vector
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.recipes.gpt_model import GptSettings, layered_gpt
from shoal.peer.training.layers import (
    Layer,
    Layered,
    LayeredRecipe,
    StageModel,
    layered_from_makers,
    layered_from_sequential,
)
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.errors import ModelMismatch, RecipeError
from shoal.swarm.protocol.run_file import DataSection

recipes = pytest.mark.parametrize("make", [gpt, shapes])


def sequential() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Linear(5, 2, bias=False))


# A stage is a part of the whole ---------------------------------------------------------------------------


@recipes
def test_a_stage_built_alone_has_the_parameters_of_the_whole(make: Callable[[], LayeredAndWhole]) -> None:
    recipe = make()
    whole = dict(recipe.build_model(5).named_parameters())
    layered = recipe.layers(5)
    for first, stop in itertools.combinations(range(len(layered) + 1), 2):
        stage = dict(layered.build(first, stop).named_parameters())
        expected = [spec.name for layout in layered.layouts[first:stop] for spec in layout]
        assert list(stage) == expected
        assert all(torch.equal(one, whole[name]) for name, one in stage.items())
        assert {one.dtype for one in stage.values()} == {torch.float32}
    assert list(whole) == [spec.name for spec in layered.layout]
    other = recipe.layers(6).build(0, len(layered)).state_dict()
    assert any(not torch.equal(other[name], one) for name, one in whole.items())


@recipes
def test_the_wholes_vector_is_those_of_its_stages(make: Callable[[], LayeredAndWhole]) -> None:
    recipe = make()
    layered, whole = recipe.layers(2), ParameterVector(recipe.build_model(2))
    layered.check_whole(recipe.build_model(2))
    vectors = [ParameterVector(layered.build(first, stop)) for first, stop in ((0, 1), (1, 4), (4, 6))]
    assert tuple(spec for one in vectors for spec in one.layout) == whole.layout == layered.layout
    assert torch.equal(torch.cat([whole_vector(one) for one in vectors]), whole_vector(whole))
    assert sum(layered.parameters_bytes(number) for number in range(6)) == 4 * whole.elements


@recipes
def test_layer_after_layer_is_the_forward_pass(make: Callable[[], LayeredAndWhole]) -> None:
    recipe = make()
    layered = recipe.layers(5)
    batch = batch_of(recipe.training_data(), 0, 3)
    flowing = recipe.input_of(batch)
    expected = layered.activation_shapes(flowing)
    for number in range(len(layered)):
        flowing = layered.build(number, number + 1)(flowing)
        assert tuple(flowing.shape) == expected[number]
    model = recipe.build_model(5)
    assert torch.equal(flowing, model(recipe.input_of(batch)))
    loss = recipe.loss_of(flowing, recipe.targets_of(batch))
    assert torch.equal(loss, recipe.loss(model, batch))
    recipe.check_targets(recipe.targets_of(batch), 3)


def test_gpt_in_layers_is_the_tied_one_too() -> None:
    recipe = gpt(tie_embedding=True)
    layered = recipe.layers(5)
    whole = layered.build(0, len(layered))
    tokens = recipe.input_of(batch_of(recipe.training_data(), 0, 2))
    assert torch.equal(whole(tokens), recipe.build_model(5)(tokens))
    layered.check_whole(recipe.build_model(5))
    assert [spec.name for spec in ParameterVector(whole).layout] == [spec.name for spec in layered.layout]


@recipes
def test_building_is_a_function_of_the_seed_alone(make: Callable[[], LayeredAndWhole]) -> None:
    recipe = make()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = whole_vector(ParameterVector(recipe.layers(5).build(1, 3)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(whole_vector(ParameterVector(recipe.layers(5).build(1, 3))), first)


def test_defaults_of_the_caller_do_not_matter() -> None:
    expected = whole_vector(ParameterVector(gpt().layers(5).build(1, 3)))
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(whole_vector(ParameterVector(gpt().layers(5).build(1, 3))), expected.to(torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


def test_two_builds_share_nothing() -> None:
    layered = gpt().layers(5)
    one, other = layered.build(0, 3), layered.build(0, 3)
    storages = {tensor.data_ptr() for tensor in (*one.parameters(), *one.buffers())}
    assert not storages & {tensor.data_ptr() for tensor in (*other.parameters(), *other.buffers())}


def test_the_recipes_are_layered() -> None:
    recipe: LayeredRecipe = GptRecipe(GPT, DataSection())  # mypy compares them here
    assert len(recipe.layers(0)) == 6


# Memory ---------------------------------------------------------------------------------------------------


def tensors_alive() -> list[Tensor]:
    """Float tensors in memory (those on the meta device, and those that only stand for one, take none)."""
    gc.collect()
    alive = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and not isinstance(one, FakeTensor)]
    dense = [one for one in alive if one.layout == torch.strided]
    return [one for one in dense if one.device.type == "cpu" and one.is_floating_point()]


def elements_beside(before: list[Tensor]) -> int:
    """Alive now, each storage once, but for those of ``before``, of which none can be freed meanwhile."""
    old = {one.untyped_storage().data_ptr() for one in before}
    sizes = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() // one.element_size()
        for one in tensors_alive()
    }
    return sum(size for pointer, size in sizes.items() if pointer not in old)


def test_building_a_stage_never_holds_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted whenever random numbers are drawn, which is between any two tensors."""
    settings = GptSettings(layers=40, heads=2, width=64, context=8, vocab=2048, tie_embedding=False)
    before = tensors_alive()
    most, draws, rand = 0, 0, torch.rand

    def counted(*arguments: Any, **options: Any) -> Tensor:
        nonlocal most, draws
        draws += 1
        if draws % 20 == 0:
            most = max(most, elements_beside(before))
        return rand(*arguments, **options)

    monkeypatch.setattr(torch, "rand", counted)
    layered = layered_gpt(settings, 3)
    stage = layered.build(20, 22)
    whole = sum(layered.parameters_bytes(number) for number in range(len(layered))) // 4
    ours = ParameterVector(stage).elements
    assert whole > 15 * ours
    assert draws > 80
    # Our parameters, the rotary tables, and one tensor being made.
    assert ours < elements_beside(before) < 1.2 * ours
    assert ours / 3 < most < 2 * ours


def test_makers_make_only_what_is_built() -> None:
    made = []

    def maker(number: int) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            linear = nn.Linear(2, 2)
            made.append((number, linear.weight.device.type))
            return linear

        return make

    layered = layered_from_makers([(f"layer{number}", maker(number)) for number in range(4)], 7)
    assert made == [(number, "meta") for number in range(4)]
    made.clear()
    alone = layered.build(2, 3)
    assert made == [(2, "cpu")]
    whole = layered.build(0, 4)
    assert torch.equal(alone.state_dict()["layer2.weight"], whole.state_dict()["layer2.weight"])
    assert not torch.equal(whole.state_dict()["layer1.weight"], whole.state_dict()["layer2.weight"])


# Any nn.Sequential ----------------------------------------------------------------------------------------


def test_a_sequential_is_layered_as_it_is() -> None:
    model = sequential()
    layered = layered_from_sequential(model)
    assert layered.names == ("1", "3", "4"), "what has no parameters belongs to the layer before, or the first"
    assert [[spec.name for spec in layout] for layout in layered.layouts] == [
        ["1.weight", "1.bias"],
        ["3.weight", "3.bias"],
        ["4.weight"],
    ]
    layered.check_whole(model)
    given = torch.randn(6, 2, 2)
    expected = model(given)
    assert torch.equal(layered.build(1, 3)(layered.build(0, 1)(given)), expected)
    stage = layered.build(1, 3)
    assert stage.state_dict().keys() == {name for name in model.state_dict() if name[0] in "34"}
    assert next(stage.parameters()) is model[3].weight
    assert layered.activation_shapes(given) == ((6, 5), (6, 5), (6, 2))
    assert list(model.state_dict()) == list(layered.build(0, 3).state_dict())


def test_names_of_the_whole_lie_as_deep_as_they_are() -> None:
    parts = [Layer("in", (("net.in_layer", nn.Linear(2, 2)),))]
    parts += [Layer(f"{number}", ((f"net.blocks.{number}", nn.Linear(2, 2)),)) for number in range(2)]
    stage = StageModel(parts[1:])
    assert list(stage.state_dict()) == [f"net.blocks.{n}.{what}" for n in range(2) for what in ("weight", "bias")]
    stage.load_state_dict({name: torch.ones_like(one) for name, one in stage.state_dict().items()})
    assert torch.equal(stage(torch.ones(1, 2)), torch.full((1, 2), 7.0))


def test_names_that_would_change_the_order_are_refused() -> None:
    parts = [("a.first", nn.Linear(2, 2)), ("b", nn.Linear(2, 2)), ("a.second", nn.Linear(2, 2))]
    with pytest.raises(RecipeError, match=r"layer b: .* parts whose names begin alike have to follow each other"):
        StageModel([Layer(name, ((name, part),)) for name, part in parts])


@pytest.mark.parametrize("name", ["forward", "", "a.", ".a", "training", "a", "a.weight", "a.b"])
def test_names_that_are_taken_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="the name is taken"):
        StageModel([Layer("a", (("a", nn.Linear(2, 2)),)), Layer("b", ((name, nn.Linear(2, 2)),))])


# What cannot be cut ---------------------------------------------------------------------------------------


def tied() -> Layered:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[1].weight
    return layered_from_sequential(model)


def test_neighbours_that_share_weights_are_one_layer() -> None:
    layered = tied()
    assert layered.names == ("0", "1 + 2", "3")
    assert layered.cuts == (1, 2)
    layered.check_boundaries((0, 1, 2, 3))
    layered.check_stages(3)
    with pytest.raises(RecipeError, match="of 4 layers that can be cut at 2 places gives no 4 stages; layers 1 and 2"):
        layered.check_stages(4)
    assert [spec.name for spec in layered.layouts[1]] == ["1.weight", "1.bias", "2.bias"]
    assert [spec.name for spec in ParameterVector(layered.build(1, 2)).layout] == ["1.weight", "1.bias", "2.bias"]
    assert [spec.name for spec in layered.layouts[2]] == ["3.weight", "3.bias"]
    assert layered.parameters_bytes(1) == 4 * (9 + 3 + 3)
    assert len(layered.outline(1)) == 2


def test_stages_with_shared_weights_give_the_whole_models_gradient() -> None:
    layered, given = tied(), torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    whole = layered.build(0, 3)
    whole(given).square().mean().backward()
    expected = take_gradients(ParameterVector(whole))
    stages = [layered.build(number, number + 1) for number in range(3)]
    flowing = given
    for stage in stages:
        flowing = stage(flowing)
    flowing.square().mean().backward()
    assert torch.equal(torch.cat([take_gradients(ParameterVector(stage)) for stage in stages]), expected)


def test_all_between_two_that_share_weights_is_one_layer_with_them() -> None:
    parts = [nn.Linear(2, 2) for _ in range(7)]
    parts[3].weight = parts[1].weight
    parts[4].bias = parts[2].bias
    layered = layered_from_sequential(nn.Sequential(*parts))
    assert layered.names == ("0", "1 + 2 + 3 + 4", "5", "6")
    runs: list[int] = []

    def around(layer: int) -> nullcontext[None]:
        runs.append(layer)
        return nullcontext()

    given = torch.ones(1, 2)
    assert torch.equal(layered.build(1, 3)(given, around), nn.Sequential(*parts[1:6])(given))
    assert runs == [0, 1]


def test_gpt_says_how_to_untie() -> None:
    layered = gpt(tie_embedding=True).layers(0)
    for stages in (2, 6):
        with pytest.raises(RecipeError, match=r"embedding and head share .*embedding\.weight.*tie_embedding = false"):
            layered.check_stages(stages)
    layered.check_boundaries((0, 1))
    gpt().layers(0).check_boundaries((0, 3, 6))


@pytest.mark.parametrize("boundaries", [(), (0,), (0, 7), (1, 6), (0, 3, 3, 6), (0, 4, 2, 6), (0, -1, 6), (0, 3, 5)])
def test_boundaries_of_another_model_are_refused(boundaries: tuple[int, ...]) -> None:
    with pytest.raises(ModelMismatch, match="this model has 6 layers"):
        gpt().layers(0).check_boundaries(boundaries)


def test_a_stage_without_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    layered = layered_from_sequential(model)
    with pytest.raises(RecipeError, match="layers 1 would have no trainable parameters"):
        layered.check_boundaries((0, 1, 2))
    assert layered.cuts == ()


def test_another_model_than_the_layers_is_refused() -> None:
    layered = gpt().layers(0)
    with pytest.raises(ModelMismatch, match=r"the layers have embedding\.weight \(256, 32\)"):
        layered.check_whole(gpt(width=64).build_model(0))
    with pytest.raises(ModelMismatch, match="the layers have 27 parameters and the model 26"):
        layered.check_whole(gpt(tie_embedding=True).build_model(0))


def test_layers_whose_shapes_need_values_are_named() -> None:
    class Chosen(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            return given[given > 0]

    layered = layered_from_sequential(nn.Sequential(nn.Linear(2, 2), Chosen()))
    with pytest.raises(RecipeError, match="layer 0: 1 gives no shapes without values"):
        layered.activation_shapes(torch.zeros(1, 2))
