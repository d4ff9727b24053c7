"""The recipe ``hf``: any causal language model that transformers itself has, trained on a corpus of tokens.

Models come from a configuration in the run file. Nothing is downloaded, and no code but that of the installed
transformers runs: configurations cannot name code, and kernels from a hub are off. Needs the extra ``hf``."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes import check_settings
from shoal.peer.recipes.exact_draws import ExactDraws
from shoal.peer.recipes.hf_layers import CUT, CutModel
from shoal.peer.recipes.language_model import LanguageModelRecipe
from shoal.peer.training.layers import Layer, Layered
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection, check_plain

NAME = "hf"

_WHERE = "recipe.settings.config"

_REFUSED_ENDS = ("_implementation", "auto_map", "quantization_config", "name_or_path", "kernel_config", "torch_dtype")
"""Ends of the names of fields that could have other code run or files read, or that do nothing in a run."""

_REFUSED = frozenset(("dtype", "use_cache", "output_attentions", "output_hidden_states", "return_dict"))

_COUNTED = ("layer", "depth", "block", "head", "expert", "num_")
"""Parts of the names of fields that say how many parts a model has, for each of which it takes time to build it."""

_MAX_COUNT, _MAX_NUMBER = 4096, 2**28
_MAX_OPERATIONS = 500_000
_MAX_EXPANDED = 2**16

_BAD_CONFIG = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError),
    *(TypeError, ValueError),
)
"""Errors that transformers' code raises for settings that make no model."""


class HfSettings(BaseModel):
    """``[recipe.settings]`` of ``name = "hf"``.

    ``context``: tokens of a sample; ``config``: ``model_type`` and its fields, as in the model's ``config.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    context: Annotated[int, Field(ge=1, le=1_048_576)]
    config: dict[str, Any]


class HfRecipe(LanguageModelRecipe):
    """The recipe ``hf``: a model of transformers on the corpus that the run names."""

    def __init__(self, settings: dict[str, Any], data: DataSection, places: DataPlaces = NOWHERE) -> None:
        """Raises ``RecipeError``, also where transformers is not installed."""
        self.settings = check_settings(HfSettings, settings)
        self._config = transformers_config(self.settings.config)
        self._attention, _ = _outline(self._config)
        text = self._config.get_text_config()
        vocab, context = getattr(text, "vocab_size", None), self.settings.context
        if not isinstance(vocab, int) or vocab < 2:
            raise RecipeError(f"{_WHERE}.vocab_size: expected the number of tokens, not {vocab!r}")
        positions = getattr(text, "max_position_embeddings", None)
        if isinstance(positions, int) and 0 < positions < context:
            raise RecipeError(
                f"recipe.settings.context: the model has {positions} positions ({_WHERE}.max_position_embeddings), "
                f"fewer than {context}"
            )
        super().__init__(context, vocab, data, places)

    def build_model(self, seed: int) -> nn.Module:
        return drawn(_constructed(self._config, self._attention, "cpu", seed), seed)

    def layers(self, seed: int) -> Layered:
        """See ``LayeredRecipe``. Raises ``RecipeError`` for architectures that are not known to be cut rightly."""
        kind = self.settings.config["model_type"]
        if kind not in CUT:
            raise RecipeError(
                f"{_WHERE}.model_type: how a model of type {kind!r} is cut into stages is not known; leave [pipeline] "
                f"out, or take one of {', '.join(sorted(CUT))}"
            )

        def build(first: int, stop: int) -> list[Layer]:
            # Other layers stay on the meta device, where they take no memory and no values are drawn.
            model = _constructed(self._config, self._attention, "meta", seed)
            cut = CutModel(model)
            for module in (*(one for layer in cut.sources[first:stop] for one in layer), *cut.shared):
                module.to_empty(device="cpu")
            if first == 0 and stop == len(cut.sources):
                model.tie_weights()  # type: ignore[operator]
            return CutModel(drawn(model, seed)).layers()[first:stop]

        outline = CutModel(_constructed(self._config, self._attention, "meta", seed)).layers()
        return Layered(outline, build, untie=f"set {_WHERE}.tie_word_embeddings = false")

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens).logits
        return found

    def config(self) -> dict[str, Any]:
        return {"name": NAME, "settings": self.settings.model_dump(mode="json")}

    @classmethod
    def model_from_config(cls, config: Mapping[str, Any]) -> nn.Module:
        if config.get("name") != NAME:
            raise RecipeError(f"model config: name: expected {NAME!r}, not {config.get('name')!r}")
        settings = check_settings(HfSettings, config.get("settings"), "model config: settings")
        found = transformers_config(settings.config)
        attention, _ = _outline(found)
        return _constructed(found, attention, "cpu", 0)


# Configurations -----------------------------------------------------------------------------------------------


def transformers_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a causal language model, a ``PreTrainedConfig``.

    ``config``: ``model_type`` and its fields; those that are left out have transformers' defaults. Raises
    ``RecipeError`` for a type that transformers does not have, and for fields that it does not have or that name code.
    """
    _import_transformers()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    fields = dict(config)
    kind = fields.pop("model_type", None)
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = "llama, qwen3, mistral, gemma3_text, gpt2"
        raise RecipeError(
            f"{_WHERE}.model_type: expected a causal language model of transformers, such as {known}, not {kind!r:.80}"
        )
    config_class = CONFIG_MAPPING[kind]
    if not config_class.__module__.startswith("transformers.models."):
        raise RecipeError(f"{_WHERE}.model_type: {kind!r} has been registered by other code than transformers'")
    try:
        check_plain(fields, _WHERE)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    _check_fields(fields, _WHERE)
    known_fields = _fields_of(config_class)
    for name in fields:
        if name not in known_fields:
            raise RecipeError(f"{_WHERE}.{name}: {kind!r} has no such field in the installed transformers")
    try:
        found = config_class(**copy.deepcopy(fields))
    except (*_BAD_CONFIG, StrictDataclassError) as error:
        raise RecipeError(f"{_WHERE}: {_words(error)}") from error
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(found, "is_decoder", True) is False:
        raise RecipeError(f"{_WHERE}.is_decoder: expected true: without it, {kind!r} sees the tokens that it predicts")
    return found


def run_config(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's ``config`` takes of a model's ``config.json``: the fields of its own class that are set.

    Raises ``RecipeError`` as ``transformers_config``."""
    _import_transformers()
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = saved.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        transformers_config(saved)  # raises
    general = {one.name for one in dataclasses.fields(PreTrainedConfig)}
    own = _fields_of(CONFIG_MAPPING[kind]) - general | {"model_type", "tie_word_embeddings"}
    taken = {
        name: _plain(value)
        for name, value in saved.items()
        if name in own and value is not None and not name.endswith(_REFUSED_ENDS) and name not in _REFUSED
    }
    transformers_config(taken)
    return taken


def _plain(value: Any) -> Any:
    """Return a value without the nothings in its tables, which a run file cannot have."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if inner is not None}
    return value


def _fields_of(config_class: Any) -> set[str]:
    names = {one.name for one in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    return names | ({"rope_theta", "rope_scaling"} if "rope_parameters" in names else set())


def _check_fields(value: Any, where: str) -> None:
    """Check names and sizes of fields, in tables of tables, too. Raises ``RecipeError``."""
    if isinstance(value, list):
        _check_nested(value, where)
        for inner in value:
            _check_fields(inner, where)
        return
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        if name.startswith("_") or name.endswith(_REFUSED_ENDS) or name in _REFUSED:
            raise RecipeError(f"{where}.{name}: cannot be set by a run: leave it out")
        if isinstance(inner, int):
            most = _MAX_COUNT if any(part in name for part in _COUNTED) else _MAX_NUMBER
            if abs(inner) > most:
                raise RecipeError(f"{where}.{name}: expected at most {most:,}, not {inner:,}")
        _check_fields(inner, f"{where}.{name}")


def _check_nested(value: list[Any], where: str) -> None:
    """Bound what lists in a list are expanded to: GPT-Neo's ``[[["global", "local"], 6]]`` is a list, repeated.

    Raises ``RecipeError``."""
    if not any(isinstance(one, list) for one in value):
        return
    pending, count, largest = list(value), 0, 1
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
            continue
        count += 1
        largest = max(largest, abs(one)) if isinstance(one, int) else largest
    if count * largest > _MAX_EXPANDED:
        raise RecipeError(f"{where}: expected lists that make at most {_MAX_EXPANDED:,} entries when they are repeated")


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


# Models -------------------------------------------------------------------------------------------------------


def _import_transformers() -> None:
    """Import transformers with kernels from a hub turned off. Raises ``RecipeError`` where it is not installed."""
    switch = "USE_HUB_KERNELS"
    before = os.environ.get(switch)
    os.environ[switch] = "NO"
    try:
        import transformers  # noqa: F401
        from transformers.integrations import hub_kernels
    except ImportError as error:
        raise RecipeError(f"recipe 'hf' needs the package transformers: pip install 'shoal[hf]' ({error})") from error
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before
    # It may have been imported by other code of this process before.
    hub_kernels._kernels_enabled = False


class _Bounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that ends the building of a model that would take too long."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = _MAX_OPERATIONS

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RecipeError(f"{_WHERE}: the model has too many parts to be built")
        return func(*args, **(kwargs or {}))


def _outline(config: Any) -> tuple[str, nn.Module]:
    """Return the attention that a model can have, and the model on the meta device. Raises ``RecipeError``."""
    try:
        with _Bounded():
            try:
                return "sdpa", _constructed(config, "sdpa", "meta", 0)
            except ValueError:  # of architectures without it, and of settings that are wrong anyway
                return "eager", _constructed(config, "eager", "meta", 0)
    except _BAD_CONFIG as error:
        raise RecipeError(f"{_WHERE}: transformers cannot build the model: {_words(error)}") from error


def _constructed(config: Any, attention: str, device: str, seed: int) -> nn.Module:
    """Build a model with tied weights and right buffers, and with undefined values of parameters."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    own = copy.deepcopy(config)
    own.use_cache = False
    with ExactDraws(seed), torch.device(device), no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(
            own, trust_remote_code=False, dtype=torch.float32, attn_implementation=attention
        )
    model.tie_weights()
    whole: nn.Module = model.float()
    return whole


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Have a model's own code set its initial values, exactly as on any other machine."""
    for part in (*model.modules(), *model.parameters(), *model.buffers()):
        vars(part).pop("_is_hf_initialized", None)
    whole: Any = model
    with ExactDraws(seed, model.named_parameters()):
        whole.initialize_weights()
    return model


__all__ = ["NAME", "HfRecipe", "HfSettings", "transformers_config"]
