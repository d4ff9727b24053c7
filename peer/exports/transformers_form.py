"""A recipe's model as transformers knows it: the config, and the names and shapes that its parameters have there.

The recipe hf has transformers' own models, under their own names. The recipe gpt is a Qwen3 without weights in the
norms of queries and keys, which are ones here, or, without those norms, a Llama. Its fused projections are one after
the other in memory, so every parameter of transformers' model is a range of one of ours and nothing has to be moved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.peer.exports.about import ModelAbout
from shoal.peer.exports.tensor_stream import NamedShape
from shoal.peer.recipes import check_settings
from shoal.peer.recipes.gpt import NAME as GPT
from shoal.peer.recipes.gpt_model import Gpt, GptSettings
from shoal.peer.recipes.hf import NAME as HF
from shoal.peer.recipes.hf import HfSettings, transformers_config
from shoal.peer.training.parameters import layout_of, named_parameters
from shoal.swarm.errors import RecipeError, StateFileError
from shoal.swarm.protocol.types import TensorSpec

_WHERE = "model config: settings"

_TOP = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_BLOCK: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_out": ("mlp.down_proj",),
}
"""Modules of a block, and the equal parts of the first axis that transformers has instead."""


@dataclass(frozen=True)
class TransformersForm:
    """``config``: without the number format; ``named``: in the order of the anchor's values; ``extras``: float32
    parameters that the anchor does not have, and buffers; ``context``: tokens that the model was trained on at once."""

    config: dict[str, Any]
    named: tuple[NamedShape, ...]
    extras: Mapping[str, Tensor]
    context: int
    vocab: int


def transformers_form(about: ModelAbout) -> TransformersForm:
    """Find the form of a model. Raises ``RecipeError`` for one that has none, ``StateFileError`` where the layout is
    not the recipe's."""
    name = about.recipe.get("name") if about.recipe is not None else None
    settings = about.recipe.get("settings") if about.recipe is not None else None
    if name == GPT:
        return _gpt_form(check_settings(GptSettings, settings, _WHERE), about.layout)
    if name == HF:
        return _own_form(check_settings(HfSettings, settings, _WHERE), about)
    what = "a loop without a recipe" if about.recipe is None else f"the recipe {str(name)[:100]!r}"
    raise RecipeError(
        f"--format: this model is of {what}, which only --format safetensors can write; hf and gguf are for the "
        f"recipes {GPT} and {HF}"
    )


def _own_form(settings: HfSettings, about: ModelAbout) -> TransformersForm:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = transformers_config(settings.config)
    config: dict[str, Any] = json.loads(found.to_json_string(use_diff=False))
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings.config["model_type"]]]
    for name in (
        "bos_token_id",
        "eos_token_id",
    ):  # else the defaults of the type's first model, which mean nothing here
        config[name] = settings.config.get(name)
    named = tuple((spec.name, spec.shape) for spec in about.layout)
    return TransformersForm(config, named, about.buffers, settings.context, found.get_text_config().vocab_size)


def _gpt_form(settings: GptSettings, layout: Sequence[TensorSpec]) -> TransformersForm:
    with torch.device("meta"):
        expected = layout_of(named_parameters(Gpt(settings)))
    if {spec.name: spec.shape for spec in layout} != {spec.name: spec.shape for spec in expected}:
        raise StateFileError("the tensors of this state are not those of the recipe gpt with the run's settings")
    extras = {}
    head = settings.width // settings.heads
    if settings.qk_norm:
        extras = {
            f"model.layers.{number}.self_attn.{which}_norm.weight": torch.ones(head)
            for number in range(settings.layers)
            for which in "qk"
        }
    named = tuple(part for spec in layout for part in _parts(spec))
    return TransformersForm(_gpt_config(settings), named, extras, settings.context, settings.vocab)


def _parts(spec: TensorSpec) -> list[NamedShape]:
    if spec.name in _TOP:
        return [(_TOP[spec.name], spec.shape)]
    _, number, module, weight = spec.name.split(".")
    targets = _IN_BLOCK[module]
    shape = (spec.shape[0] // len(targets), *spec.shape[1:])
    return [(f"model.layers.{number}.{target}.{weight}", shape) for target in targets]


def _gpt_config(settings: GptSettings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if settings.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if settings.qk_norm else "llama",
        "vocab_size": settings.vocab,
        "hidden_size": settings.width,
        "intermediate_size": settings.hidden_width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "head_dim": settings.width // settings.heads,
        "hidden_act": "silu",
        "max_position_embeddings": settings.context,
        "rms_norm_eps": 1e-6,
        # transformers 5 reads the first one, earlier versions and other readers the second one.
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "rope_theta": settings.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": settings.tie_embedding,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return {**config, "use_sliding_window": False} if settings.qk_norm else {**config, "mlp_bias": False}
