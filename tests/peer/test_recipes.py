import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.peer import recipes
from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes import Recipe, find_recipe, layered_recipe, load_model, load_recipe
from shoal.peer.recipes.gpt import Gpt, GptRecipe
from shoal.swarm.errors import RecipeError, RunFileError
from shoal.swarm.protocol.run_file import DataSection, RunFile

TINY = {"layers": 1, "heads": 1, "width": 8, "context": 12}


def run_file(name: str = "gpt", **settings: Any) -> RunFile:
    return RunFile.model_validate(
        {"run": {"name": "r"}, "recipe": {"name": name, "settings": TINY | settings}, "round": {"tokens": 1}}
    )


def install(monkeypatch: pytest.MonkeyPatch, name: str, target: str) -> None:
    point = EntryPoint(name, target, recipes.GROUP)
    monkeypatch.setattr(recipes, "entry_points", lambda group: [point] if group == recipes.GROUP else [])


def test_loads_the_named_recipe() -> None:
    recipe = load_recipe(run_file())
    assert isinstance(recipe, GptRecipe)
    protocol: Recipe = recipe  # mypy compares them here
    assert protocol is recipe
    assert recipe.tokens_per_sample == 12
    assert len(recipe.corpus_digest) == 32
    assert len(recipe.training_data()[0]) == 13


def test_a_pipelines_round_is_a_whole_number_of_the_recipes_micro_batches() -> None:
    content = run_file(tie_embedding=False).model_dump() | {
        "algorithm": "virtual_batch",
        "pipeline": {"micro_batch": 4},
    }
    with pytest.raises(RunFileError, match=r"round\.tokens: .*4 samples of 12 tokens each, such as 96, not 100"):
        load_recipe(RunFile.model_validate(content | {"round": {"tokens": 100}}))
    load_recipe(RunFile.model_validate(content | {"round": {"tokens": 96}}))


def pipeline(stages: int | str, **settings: Any) -> RunFile:
    section = {"micro_batch": 1, "stages": stages}
    content = {"algorithm": "virtual_batch", "pipeline": section, "round": {"tokens": 12}}
    return RunFile.model_validate(run_file(**settings).model_dump() | content)


def test_a_model_that_cannot_be_cut_is_refused_at_once() -> None:
    load_recipe(pipeline("auto", tie_embedding=False))
    load_recipe(pipeline(3, tie_embedding=False))
    with pytest.raises(RecipeError, match=r"pipeline\.stages: a model of 3 layers .* at 2 places gives no 4 stages$"):
        load_recipe(pipeline(4, tie_embedding=False))
    with pytest.raises(RecipeError, match=r"no 2 stages; .*share .*embedding\.weight, .*: set .*tie_embedding = false"):
        load_recipe(pipeline("auto"))


class WholeOnly:
    """A recipe that gives no layers."""

    tokens_per_sample = 12

    def __init__(self, settings: dict[str, Any], data: DataSection, places: DataPlaces = NOWHERE) -> None:
        """Accepts anything."""


def test_a_pipelines_recipe_gives_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(pipeline("auto", tie_embedding=False))
    assert layered_recipe(recipe, run_file()) is recipe
    install(monkeypatch, "whole", f"{__name__}:WholeOnly")
    run = pipeline("auto").model_dump() | {"recipe": {"name": "whole"}}
    with pytest.raises(RecipeError, match="'whole' does not give its model in layers, which"):
        load_recipe(RunFile.model_validate(run))
    load_recipe(RunFile.model_validate(run | {"pipeline": None}))


def test_ours_are_those_that_the_distribution_registers() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    registered = tomllib.loads(project.read_text())["project"]["entry-points"][recipes.GROUP]
    assert registered == recipes._OWN


def test_an_unknown_recipe_says_what_is_installed_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vision", "json:loads")
    with pytest.raises(
        RecipeError, match=r"'moe' is not installed here \(installed: gpt, hf, vision\); install the package"
    ):
        load_recipe(run_file("moe"))


def test_other_packages_add_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "vision", "shoal.peer.recipes.gpt:GptRecipe")
    assert isinstance(load_recipe(run_file("vision")), GptRecipe)


def test_other_packages_do_not_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "gpt", "json:loads")
    assert find_recipe("gpt") is GptRecipe


@pytest.mark.parametrize("target", ["no_such_package_at_all:Recipe", "json:NoSuchRecipe"])
def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    install(monkeypatch, "vision", target)
    with pytest.raises(RecipeError, match=f"'vision' is installed but does not load.*{target}"):
        load_recipe(run_file("vision"))


def test_bad_settings_name_the_field() -> None:
    with pytest.raises(RecipeError, match=r"recipe\.settings\.heads"):
        load_recipe(run_file(heads=-1))


def test_a_saved_config_makes_the_model_again() -> None:
    recipe = load_recipe(run_file())
    model = recipe.build_model(0)
    rebuilt = load_model(recipe.config())
    assert isinstance(rebuilt, Gpt)
    rebuilt.load_state_dict(model.state_dict())
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    assert torch.equal(rebuilt(tokens), model(tokens))


@pytest.mark.parametrize("name", [None, 3, ["gpt"]])
def test_a_config_without_a_name_is_refused(name: Any) -> None:
    with pytest.raises(RecipeError, match="model config: name"):
        load_model({"name": name})
