import copy
import hashlib
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.peer.recipes import Recipe, load_model
from shoal.peer.recipes.exact_draws import ExactDraws
from shoal.peer.recipes.hf import HfRecipe, _import_transformers, transformers_config
from shoal.peer.recipes.model_memory import outline_of
from shoal.swarm.errors import CorpusError, RecipeError
from shoal.swarm.protocol.run_file import DataSection, RunFile

CONTEXT = 12

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}

GPT2 = {"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}

MAMBA = {"model_type": "mamba", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def recipe_of(config: dict[str, Any], **changes: Any) -> HfRecipe:
    return HfRecipe({"context": CONTEXT, "config": config | changes}, DataSection())


def values(model: nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", [LLAMA, GPT2, MAMBA])
def test_the_model_depends_on_the_seed_only(config: dict[str, Any]) -> None:
    recipe = recipe_of(config)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = recipe.build_model(5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        again = recipe.build_model(5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert values(again) == values(first)
    assert {one.dtype for one in again.parameters()} == {torch.float32}
    assert all(bool(torch.isfinite(one).all()) for one in first.parameters())
    assert values(recipe.build_model(6)) != values(first)
    assert recipe.loss(first, random_tokens(2, CONTEXT + 1)).item() == pytest.approx(math.log(256), abs=0.5)


def test_the_start_is_the_same_on_every_machine() -> None:
    """Another value here means that peers of different versions start from different anchors."""
    assert hashlib.sha256(values(recipe_of(LLAMA).build_model(5))).hexdigest() == GOLDEN_START


GOLDEN_START = "ec055d3be56b2b7e8aa13b1243eeab9d34a9783900cc033e42f4125eebd5a590"


def test_trains_on_the_corpus_and_is_a_recipe() -> None:
    recipe: Recipe = recipe_of(LLAMA)
    model, data = recipe.build_model(1), recipe.training_data()
    batch = data.batch([0, 1, 2, 3])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = recipe.loss(model, batch).item()
    for _ in range(5):
        loss = recipe.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert recipe.loss(model, batch).item() < first - 0.3
    assert model.training
    assert 3 < recipe.held_out_loss(model, "cpu", 4) < 6
    assert model.training


def test_a_saved_config_makes_the_same_model_without_values() -> None:
    recipe = recipe_of(LLAMA, tie_word_embeddings=True)
    model = recipe.build_model(3)
    again = load_model(recipe.config())
    again.load_state_dict(model.state_dict())
    assert again.lm_head.weight is again.model.embed_tokens.weight
    tokens = random_tokens(1, CONTEXT)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    with pytest.raises(RecipeError, match="model config: name: expected 'hf', not 'gpt'"):
        HfRecipe.model_from_config({"name": "gpt"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "flux"}, r"model_type: expected a causal language model of transformers, .* not 'flux'"),
        ({"auto_map": {"AutoModelForCausalLM": "evil--model.Evil"}}, r"config\.auto_map: cannot be set by a run"),
        ({"attn_implementation": "org/kernel"}, r"config\.attn_implementation: cannot be set"),
        ({"_attn_implementation": "org/kernel"}, r"config\._attn_implementation: cannot be set"),
        ({"rope_parameters": {"_name_or_path": "x"}}, r"config\.rope_parameters\._name_or_path: cannot be set"),
        ({"quantization_config": {"quant_method": "x"}}, r"config\.quantization_config: cannot be set"),
        ({"no_such_field": 1}, r"config\.no_such_field: 'llama' has no such field"),
        ({"hidden_size": "wide"}, r"config: .*hidden_size"),
        ({"hidden_size": 15}, r"config: .*not a multiple"),
        ({"num_hidden_layers": 10**6}, r"config\.num_hidden_layers: expected at most 4,096, not 1,000,000"),
        ({"hidden_size": 10**12}, r"config\.hidden_size: expected at most .*, not 1,000,000,000,000"),
        (
            {"model_type": "gpt_neo", "attention_types": [[["global"], 10**6]]},
            r"config\.attention_types: expected lists that make at most 65,536",
        ),
        ({"hidden_act": "no-such"}, r"config: transformers cannot build the model: .*no-such"),
        ({"max_position_embeddings": 8}, r"context: the model has 8 positions .*, fewer than 12"),
        ({"vocab_size": 1}, r"vocab_size: expected the number of tokens, not 1"),
    ],
)
def test_settings_that_make_no_model_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        recipe_of(LLAMA, **changes)


def test_a_model_that_sees_what_it_predicts_is_refused() -> None:
    sizes = {name: LLAMA[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    with pytest.raises(RecipeError, match="is_decoder: expected true: without it, 'bert' sees"):
        recipe_of(sizes | {"model_type": "bert"})
    recipe_of(sizes | {"model_type": "bert", "is_decoder": True})


def test_a_vocabulary_smaller_than_the_corpus_is_refused() -> None:
    with pytest.raises(CorpusError, match="256, not 200"):
        len(recipe_of(LLAMA, vocab_size=200).training_data())


def test_the_layers_that_a_config_may_name_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.peer.recipes.hf._MAX_OPERATIONS", 20)
    with pytest.raises(RecipeError, match="too many parts"):
        recipe_of(LLAMA)


def test_kernels_from_a_hub_are_off_whoever_imported_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    monkeypatch.setenv("USE_HUB_KERNELS", "YES")
    _import_transformers()
    assert not hub_kernels._kernels_enabled
    assert os.environ["USE_HUB_KERNELS"] == "YES"


@pytest.mark.parametrize("config", [LLAMA, MAMBA])
def test_the_size_is_found_without_building_the_model(config: dict[str, Any]) -> None:
    run = RunFile.model_validate(
        {
            "run": {"name": "r"},
            "recipe": {"name": "hf", "settings": {"context": CONTEXT, "config": config}},
            "round": {"tokens": 1},
        }
    )
    recipe = recipe_of(config)
    model = recipe.build_model(0)
    outline = outline_of(run, recipe, 10)  # too little memory for a child process
    assert outline.trained == sum(one.numel() for one in model.parameters())
    assert outline.other_bytes == sum(one.nbytes for one in model.buffers())


# Exact draws --------------------------------------------------------------------------------------------------


def draws(work: Callable[[], object], *named: tuple[str, torch.Tensor], seed: int = 1) -> object:
    with ExactDraws(seed, named):
        return work()


def test_draws_depend_on_name_and_count_only() -> None:
    a, b = torch.zeros(3), torch.zeros(3)
    draws(lambda: (a.normal_(), b.normal_()), ("a", a), ("b", b))
    alone = torch.zeros(3)
    draws(lambda: alone.normal_(), ("b", alone))
    assert torch.equal(alone, b)
    assert not torch.equal(a, b)
    twice = torch.zeros(3)
    draws(lambda: (twice.normal_(), twice.normal_()), ("b", twice))
    assert not torch.equal(twice, b)


def test_draws_have_the_asked_moments() -> None:
    a = torch.zeros(3, 2**19 + 5)
    draws(lambda: a.normal_(2.0, 0.5), ("a", a))  # more than one piece
    assert float(a.mean()) == pytest.approx(2.0, abs=0.01)
    assert float(a.std()) == pytest.approx(0.5, rel=0.01)
    draws(lambda: a.t().uniform_(-1.0, 3.0), ("a", a))
    assert (float(a.min()), float(a.max())) == (pytest.approx(-1, abs=1e-3), pytest.approx(3, abs=1e-3))
    assert float(a.mean()) == pytest.approx(1.0, abs=0.01)
    limited = torch.zeros(1000)
    draws(lambda: nn.init.trunc_normal_(limited, std=0.02, a=-0.04, b=0.04), ("c", limited))
    assert 0.03 < float(limited.abs().max()) <= 0.04


def test_functions_are_rounded_from_more_precise_values() -> None:
    given = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    found = draws(lambda: copy.deepcopy(given).log_().exp())
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, given.double().log().float().double().exp().float())


def test_random_numbers_of_another_kind_are_refused() -> None:
    with pytest.raises(RecipeError, match="come from exponential_, whose bits differ"):
        draws(lambda: torch.zeros(3).exponential_())


def test_a_config_is_transformers_own() -> None:
    found = transformers_config(GPT2)
    assert (type(found).__name__, found.hidden_size, found.num_hidden_layers) == ("GPT2Config", 16, 2)
