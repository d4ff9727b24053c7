"""Recipes: model, loss and data of a run, found by name among those that the volunteer has installed.

Nothing here imports code that a run names by path or sends over the network: a name is looked up among the
installed entry points, or the run is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor, nn

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes.packages import InstalledPackage, check_package, installed_package, plain_name, provider_of
from shoal.peer.training.layers import LayeredRecipe
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.field_errors import did_you_mean, field_errors
from shoal.swarm.protocol.run_file import DataSection, RunFile

log = logging.getLogger(__name__)

GROUP = "shoal.recipes"

# Found in a source checkout, too, where no distribution has registered them.
_OWN = {"gpt": "shoal.peer.recipes.gpt:GptRecipe", "hf": "shoal.peer.recipes.hf:HfRecipe"}

SettingsT = TypeVar("SettingsT", bound=BaseModel)


class Samples(Protocol):
    """Map-style training data; a sample is a window of ``tokens_per_sample + 1`` tokens.

    Data that is better read in an order of its own also has ``OrderedDataset``'s methods."""

    def __len__(self) -> int:
        """Number of samples, at least 1."""
        ...

    def __getitem__(self, index: int, /) -> Tensor:
        """Sample ``index``: ``(context + 1,) int64``. Raises ``IndexError`` outside ``range(len(self))``."""
        ...

    def batch(self, indices: Sequence[int] | npt.NDArray[np.int64], /) -> Tensor:
        """Several samples at once: ``(len(indices), context + 1) int64``; errors as above."""
        ...


class Recipe(Protocol):
    """Model, loss and data of a run. Constructed as ``RecipeClass(settings, data, places)``.

    Files that ``data`` names may be read below ``places.folders`` only, which the owner of this machine has named
    (``peer/training/data_files.py``); ``corpus.open_samples`` opens every source by these rules.

    The constructor raises ``RecipeError`` for settings that it cannot use. It opens no data: the first access to the
    data does that, and raises ``CorpusError``."""

    tokens_per_sample: int

    def __init__(self, settings: dict[str, Any], data: DataSection, places: DataPlaces) -> None: ...

    @property
    def corpus_digest(self) -> bytes:
        """SHA-256 (32 bytes) of the training and held-out data: peers with another digest have other data."""
        ...

    @property
    def corpus_about(self) -> str:
        """One line about the corpus for the owner of this machine: its source and size, and the Python that it depends
        on."""
        ...

    def build_model(self, seed: int) -> nn.Module:
        """The initial model on the CPU, as a function of settings and ``seed`` only.

        Its trainable parameters are float32, float64, bfloat16 or float16; the inner optimizer steps float32 masters of
        the last two. Neither reads nor advances torch's global random generator."""
        ...

    def training_data(self) -> Samples: ...

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross entropy, nats a token, ``() float32``; ``batch``: ``(b, context + 1) int64``."""
        ...

    def held_out_loss(self, model: nn.Module, device: torch.device | str, max_samples: int = 256) -> float:
        """Mean cross entropy, nats a token, on at most ``max_samples`` samples that nobody trains on."""
        ...

    def config(self) -> dict[str, Any]:
        """``{"name": …, "settings": {…}}``, which JSON can hold, and which is enough for ``model_from_config``."""
        ...

    @classmethod
    def model_from_config(cls, config: Mapping[str, Any]) -> nn.Module:
        """The model that ``config`` describes, on the CPU, before its parameters are loaded.

        Needs no corpus. Raises ``RecipeError`` for a config that is not this recipe's."""
        ...


def load_recipe(run_file: RunFile, places: DataPlaces = NOWHERE) -> Recipe:
    """The recipe that the run names. It opens its data at the first access, from ``places`` only.

    Raises ``RecipeError`` where it is not installed, is of another package than the run names, refuses its settings, or
    cannot be cut into the run's stages, and ``RunFileError`` where a round is no whole number of micro-batches."""
    point = installed_recipes().get(run_file.recipe.name)
    check_package(run_file, point.dist if point else None, is_installed=point is not None)
    recipe = find_recipe(run_file.recipe.name)(run_file.recipe.settings, run_file.data, places)
    if run_file.pipeline is not None:
        run_file.check_micro_batches(recipe.tokens_per_sample)
        stages = run_file.pipeline.stages
        layered_recipe(recipe, run_file).layers(run_file.run.seed).check_stages(2 if stages == "auto" else stages)
    return recipe


def package_of(run_file: RunFile) -> InstalledPackage | None:
    """The package to pin in a run: the one that it names, or the one that its recipe comes from.

    None for Shoal's own recipes, unless the run names a package, and for code in editable mode, which is warned of.
    Raises ``RecipeError`` where the named one cannot be pinned."""
    named, point = run_file.recipe.package, installed_recipes().get(run_file.recipe.name)
    name = plain_name(named.partition("==")[0]) if named else None
    provider = provider_of(run_file.recipe.name, point.dist if point else None, name)
    if provider is None:
        return None
    try:
        return installed_package(provider)
    except RecipeError as error:
        if named:
            raise
        log.warning("the recipe's version is not pinned: %s", error)
        return None


def layered_recipe(recipe: Recipe, run_file: RunFile) -> LayeredRecipe:
    """The same recipe as one that gives its model in layers, which a pipeline needs. Raises ``RecipeError`` for
    others."""
    if not isinstance(recipe, LayeredRecipe):
        raise RecipeError(
            f"recipe.name: {run_file.recipe.name!r} does not give its model in layers, which [pipeline] needs: take a "
            f"recipe that does (docs/pipeline.md), or leave the section out"
        )
    return recipe


def load_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a saved ``Recipe.config()``, before its parameters are loaded; no corpus is opened.

    Raises ``RecipeError`` where the recipe is not installed or the config is damaged."""
    name = config.get("name")
    if not isinstance(name, str):
        raise RecipeError(f"model config: name: expected the name of a recipe, not {name!r}")
    return find_recipe(name).model_from_config(config)


def installed_recipes() -> dict[str, EntryPoint]:
    """The recipes that are installed here, by name; nothing of them is imported."""
    own = {name: EntryPoint(name, target, GROUP) for name, target in _OWN.items()}
    # A package may add recipes but not replace our own: a run file has one meaning.
    return {point.name: point for point in entry_points(group=GROUP)} | own


def find_recipe(name: str) -> type[Recipe]:
    """The installed recipe class of that name. Raises ``RecipeError``, naming the installed ones."""
    installed = installed_recipes()
    if name not in installed:
        raise RecipeError(
            f"recipe.name: {name!r} is not installed here (installed: {', '.join(sorted(installed))}); "
            f"install the package that provides it, which the run's host can name{did_you_mean(name, installed)}"
        )
    try:
        found: type[Recipe] = installed[name].load()
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"recipe.name: {name!r} is installed but does not load ({error}); reinstall the package of "
            f"{installed[name].value!r}"
        ) from error
    return found


def check_settings(settings_type: type[SettingsT], settings: Any, where: str = "recipe.settings") -> SettingsT:
    """Validate a recipe's settings. Raises ``RecipeError`` naming each bad field and what was expected."""
    try:
        return settings_type.model_validate(settings)
    except ValidationError as error:
        raise RecipeError("; ".join(field_errors(error, settings_type, where, got=True))) from error


__all__ = [
    *("Recipe", "Samples", "check_settings", "find_recipe", "installed_recipes", "layered_recipe", "load_model"),
    "load_recipe",
]
