from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.hf import HfRecipe
from shoal.peer.recipes.hf_layers import CUT
from shoal.peer.recipes.model_memory import outline_of
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection, RunFile

CONTEXT = 16

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}

GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 1, "pad_token_id": 0}

WITH_HEADS = GROUPED | {"head_dim": 8}

SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

GPT2 = {"vocab_size": 256, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64, "tie_word_embeddings": False}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(sorted(CUT), GROUPED),
    **dict.fromkeys(("gemma", "glm", "helium", "qwen3"), WITH_HEADS),
    **dict.fromkeys(("gemma2", "gemma3_text"), WITH_HEADS | SLIDING),
    "gpt2": GPT2,
    "gpt_neox": SIZES | {"hidden_dropout": 0.1},
    "mistral": GROUPED | {"sliding_window": 5},
    "olmo3": GROUPED | SLIDING,
    "qwen2": GROUPED | SLIDING | {"use_sliding_window": True},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def recipe_of(kind: str, **changes: Any) -> HfRecipe:
    config = {"model_type": kind} | CONFIGS.get(kind, SIZES) | changes
    return HfRecipe({"context": CONTEXT, "config": config}, DataSection())


def some_batch() -> Tensor:
    return torch.randint(0, 256, (2, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", sorted(CUT))
def test_stages_are_the_whole_model_bit_for_bit(kind: str) -> None:
    recipe, batch = recipe_of(kind), some_batch()
    whole, layered = recipe.build_model(5).eval(), recipe.layers(5)
    layered.check_whole(whole)
    edges = (0, 1, 3, len(layered))
    stages = [layered.build(*ends).eval() for ends in pairwise(edges)]
    values = {name: one for stage in stages for name, one in stage.named_parameters()}
    for name, one in whole.named_parameters():
        assert torch.equal(one, values[name]), name
    flowing = recipe.input_of(batch)
    for stage in stages:
        flowing = stage(flowing)
    logits = recipe.logits(whole, recipe.input_of(batch))
    assert torch.equal(flowing, logits)
    recipe.loss_of(flowing, recipe.targets_of(batch)).backward()  # type: ignore[no-untyped-call]
    recipe.loss(whole, batch).backward()  # type: ignore[no-untyped-call]
    for name, one in whole.named_parameters():
        assert one.grad is not None, name
        assert values[name].grad is not None, name
        torch.testing.assert_close(values[name].grad, one.grad, atol=1e-6, rtol=1e-5)
    shapes = layered.activation_shapes(recipe.input_of(batch))
    assert (shapes[0], shapes[-1]) == ((2, CONTEXT, 16), (2, CONTEXT, 256))


def test_parts_of_a_block_follow_its_mode_and_its_parameters() -> None:
    stage = recipe_of("llama", attention_dropout=0.5).layers(1).build(1, 2)
    given = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(stage.train()(given), stage(given))
    stage.eval()
    found = stage(given)
    assert torch.equal(found, stage(given))
    with torch.no_grad():
        for one in stage.parameters():
            one.zero_()
    assert torch.equal(stage(given), given)
    assert stage.double()(given.double()).dtype == torch.float64


def run_of(kind: str, config: dict[str, Any], **content: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"name": "r"},
            "recipe": {"name": "hf", "settings": {"context": CONTEXT, "config": {"model_type": kind} | config}},
            "algorithm": "virtual_batch",
            "round": {"tokens": CONTEXT},
            **content,
        }
    )


def test_a_pipeline_of_what_cannot_be_cut_is_refused() -> None:
    pipeline = {"micro_batch": 1, "stages": 2}
    load_recipe(run_of("llama", SIZES, pipeline=pipeline))
    with pytest.raises(RecipeError, match=r"no 2 stages; .*share.*: set .*config\.tie_word_embeddings = false"):
        load_recipe(run_of("llama", SIZES | {"tie_word_embeddings": True}, pipeline=pipeline))
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    with pytest.raises(RecipeError, match=r"model_type: how .*'mamba' is cut into stages is not known; leave \[pip"):
        load_recipe(run_of("mamba", sizes, pipeline=pipeline))
    load_recipe(run_of("mamba", sizes))


def test_a_tied_model_is_one_layer() -> None:
    recipe = recipe_of("llama", tie_word_embeddings=True)
    (layer,) = recipe.layers(5).names
    assert layer == "model.embed_tokens + model.layers.0 + model.layers.1 + model.layers.2 + lm_head"
    stage, whole, batch = recipe.layers(5).build(0, 1), recipe.build_model(5), some_batch()
    assert torch.equal(stage(recipe.input_of(batch)), recipe.logits(whole, recipe.input_of(batch)))


def test_the_size_of_each_layer_is_known() -> None:
    outline = outline_of(run_of("llama", SIZES), recipe_of("llama"), 10)
    assert len(outline.layers) == 5
    assert outline.layers[0] == outline.layers[-1] - 16 == 256 * 16
    assert sum(outline.layers) == outline.trained
