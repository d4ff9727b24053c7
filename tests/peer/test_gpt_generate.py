import math

import pytest
import torch

from shoal.peer.recipes.gpt import Gpt, GptRecipe, generate
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection

TINY = {"layers": 2, "heads": 2, "width": 16, "context": 12}


@pytest.fixture(scope="module")
def model() -> Gpt:
    torch.set_num_threads(1)
    return GptRecipe(dict(TINY), DataSection()).build_model(0)


def test_generate_is_determined_by_its_seed(model: Gpt) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    text = generate(model, b"import ", 40, 1.0, None, 1)
    assert len(text) == 40
    assert generate(model, b"import ", 40, 1.0, None, 1) == text
    assert generate(model, b"import ", 40, 1.0, None, 2) != text
    assert generate(model, b"import ", 40, 1.0, 256, 1) == text
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_generate_takes_the_likeliest_at_temperature_zero(model: Gpt) -> None:
    greedy = generate(model, b"", 20, 0.0, None, 1)
    assert greedy == generate(model, b"", 20, 0.0, None, 2) == generate(model, b"", 20, 1.0, 1, 2)
    assert greedy[0] == int(model(torch.zeros(1, 1, dtype=torch.int64))[0, -1].argmax())
    assert generate(model, b"abc", 0, 1.0, None, 0) == b""


def test_generate_sees_the_last_context_bytes(model: Gpt) -> None:
    assert generate(model, b"far away" + b"x" * 12, 8, 1.0, None, 0) == generate(model, b"x" * 12, 8, 1.0, None, 0)


def test_generate_uses_all_of_the_context(model: Gpt) -> None:
    seen: list[list[int]] = []
    hook = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0].tolist()))
    try:
        text = b"0123456789" + generate(model, b"0123456789", 5, 1.0, None, 0)
    finally:
        hook.remove()
    assert seen == [list(text[max(0, end - 12) : end]) for end in range(10, 15)]


def test_generate_refuses_tokens_that_are_no_bytes() -> None:
    other = GptRecipe.model_from_config({"name": "gpt", "settings": TINY | {"vocab": 300}})
    with pytest.raises(RecipeError, match="vocabulary of 300"):
        generate(other, b"", 3, 1.0, None, 0)


@pytest.mark.parametrize(
    ("tokens", "temperature", "top_k"), [(-1, 1.0, None), (1, -0.1, None), (1, math.nan, None), (1, 1.0, 0)]
)
def test_generate_refuses_bad_arguments(model: Gpt, tokens: int, temperature: float, top_k: int | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        generate(model, b"", tokens, temperature, top_k, 0)
