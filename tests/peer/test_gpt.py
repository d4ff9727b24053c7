import copy
import hashlib
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.peer.recipes.gpt import Gpt, GptRecipe, generate
from shoal.peer.recipes.gpt_model import rotary_table, rotate
from shoal.swarm.errors import CorpusError, RecipeError
from shoal.swarm.protocol.run_file import DataSection

TINY = {"layers": 2, "heads": 2, "width": 16, "context": 12}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def recipe() -> GptRecipe:
    return GptRecipe(dict(TINY), DataSection())


def with_settings(**changes: Any) -> GptRecipe:
    return GptRecipe(TINY | changes, DataSection())


def values(model: torch.nn.Module) -> bytes:
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


def test_build_model_depends_on_its_seed_only(recipe: GptRecipe) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = values(recipe.build_model(5))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    try:
        again = recipe.build_model(5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert values(again) == first
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert values(recipe.build_model(6)) != first


def test_the_start_is_the_same_on_every_machine(recipe: GptRecipe) -> None:
    """Another value here means that peers of different versions start from different anchors."""
    assert hashlib.sha256(values(recipe.build_model(5))).hexdigest() == GOLDEN_START


GOLDEN_START = "f263ce5eb3f36aab04ce13d5d746725e7da08ee7f062df73edbdf24264f09c5e"


def test_starts_near_the_uniform_loss() -> None:
    recipe = GptRecipe({"layers": 4, "heads": 4, "width": 128, "context": 64}, DataSection())
    model = recipe.build_model(0)
    assert recipe.held_out_loss(model, "cpu", 8) == pytest.approx(math.log(256), abs=0.8)
    assert model.embedding.weight.mean().abs() < 0.002
    # 0.7 over the root of the fan-in, and over that of twice the layers into the residual stream.
    deviations = {name: float(p.detach().std()) for name, p in model.named_parameters() if p.ndim == 2}
    assert deviations["embedding.weight"] == pytest.approx(128**-0.5, rel=0.02)
    assert deviations["blocks.1.qkv.weight"] == pytest.approx(0.7 * 128**-0.5, rel=0.02)
    assert deviations["blocks.1.attention_out.weight"] == pytest.approx(0.7 * 128**-0.5 / 8**0.5, rel=0.02)
    assert deviations["blocks.1.mlp_out.weight"] == pytest.approx(0.7 * 352**-0.5 / 8**0.5, rel=0.02)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False}, {"tie_embedding": False}, {"layers": 1, "heads": 1}])
def test_the_future_does_not_reach_the_past(changes: dict[str, Any]) -> None:
    model = with_settings(**changes).build_model(0)
    tokens = random_tokens(2, 12)
    before = model(tokens)
    assert before.shape == (2, 12, 256)
    for position in (1, 7, 11):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 256
        after = model(changed)
        assert torch.allclose(after[:, :position], before[:, :position], atol=1e-6)
        assert (after[:, position:] - before[:, position:]).abs().amax(dim=(0, 2)).min() > 1e-6


def test_samples_of_a_batch_do_not_meet(recipe: GptRecipe) -> None:
    model = recipe.build_model(0)
    tokens = random_tokens(3, 12)
    assert torch.allclose(model(tokens)[1:2], model(tokens[1:2]), atol=1e-5)


def test_rotary_products_depend_on_the_distance_only() -> None:
    cos, sin = rotary_table(64, 8, 10_000.0)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    scores = rotate(q.expand(64, 8), cos, sin) @ rotate(k.expand(64, 8), cos, sin).T
    for distance in range(-40, 41, 8):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)
    assert scores[0].std() > 0.05
    assert torch.allclose(scores[0, 0], q @ k, atol=1e-5)


def test_rotates_pairs_by_the_angle_of_their_frequency() -> None:
    cos, sin = rotary_table(5, 4, 100.0)
    for pair, frequency in enumerate((1.0, 0.1)):
        rotated = rotate(torch.eye(4)[pair].expand(5, 4), cos, sin)
        for position in range(5):
            assert rotated[position, pair] == pytest.approx(math.cos(position * frequency), abs=1e-6)
            assert rotated[position, pair + 2] == pytest.approx(math.sin(position * frequency), abs=1e-6)


def naive_forward(model: Gpt, tokens: Tensor) -> Tensor:
    """The same model written out with explicit loops over heads and positions, for one sample ``(t,)``."""
    settings, t = model.settings, len(tokens)
    size = settings.width // settings.heads

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(x: Tensor) -> Tensor:
        angles = [[p / settings.rope_theta ** (2 * i / size) for i in range(size // 2)] for p in range(t)]
        turn = torch.polar(torch.ones(t, size // 2), torch.tensor(angles))
        result = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * turn
        return torch.cat((result.real, result.imag), dim=1)

    x = model.embedding.weight[tokens]
    for block in model.blocks:
        q, k, v = (norm(x) @ block.qkv.weight.T).chunk(3, dim=1)  # type: ignore[operator, union-attr]
        heads = []
        for head in range(settings.heads):
            part = slice(head * size, (head + 1) * size)
            q_head, k_head = turned(norm(q[:, part])), turned(norm(k[:, part]))
            scores = torch.full((t, t), -math.inf)
            for i in range(t):
                for j in range(i + 1):
                    scores[i, j] = q_head[i] @ k_head[j] / math.sqrt(size)
            heads.append(scores.softmax(1) @ v[:, part])
        x = x + torch.cat(heads, dim=1) @ block.attention_out.weight.T  # type: ignore[operator, union-attr]
        gate, up = (norm(x) @ block.gate_up.weight.T).chunk(2, dim=1)  # type: ignore[operator, union-attr]
        x = x + (gate * gate.sigmoid() * up) @ block.mlp_out.weight.T  # type: ignore[operator, union-attr]
    return norm(x) @ model.embedding.weight.T


@torch.no_grad()
def test_equals_the_model_written_out(recipe: GptRecipe) -> None:
    model = recipe.build_model(3)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(2)
    tokens = random_tokens(12)
    assert torch.allclose(model(tokens[None])[0], naive_forward(model, tokens), atol=2e-4, rtol=1e-4)


def test_loss_is_the_mean_over_next_tokens(recipe: GptRecipe) -> None:
    model = recipe.build_model(0)
    batch = recipe.training_data().batch([0, 5, 9])
    losses = [F.cross_entropy(model(sample[None, :-1])[0, t], sample[t + 1]) for sample in batch for t in range(12)]
    assert recipe.loss(model, batch).item() == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)


def test_overfits_a_batch() -> None:
    recipe = GptRecipe({"layers": 2, "heads": 2, "width": 64, "context": 32}, DataSection())
    model = recipe.build_model(0)
    batch = recipe.training_data().batch([0, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = recipe.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.1
    prompt = bytes(batch[0, :16].tolist())
    assert generate(model, prompt, 16, 0.0, None, 0) == bytes(batch[0, 16:32].tolist())


def test_runs_under_bfloat16_autocast(recipe: GptRecipe) -> None:
    model = recipe.build_model(0)
    batch = recipe.training_data().batch([0, 5])
    with torch.autocast("cpu", torch.bfloat16):
        loss = recipe.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(recipe.loss(model, batch).item(), rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_every_parameter_learns() -> None:
    recipe = with_settings(tie_embedding=False)
    model = recipe.build_model(0)
    recipe.loss(model, recipe.training_data().batch([0, 1])).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_held_out_loss_is_the_mean_and_leaves_the_model_alone(recipe: GptRecipe) -> None:
    model = recipe.build_model(0)
    before, mode = values(model), model.training
    loss = recipe.held_out_loss(model, "cpu", 40)
    assert loss == recipe.held_out_loss(model, torch.device("cpu"), 40)
    assert loss != recipe.held_out_loss(model, "cpu", 41)
    assert (values(model), model.training) == (before, mode)
    assert all(p.grad is None for p in model.parameters())
    held_out = recipe._corpus.held_out
    chosen = [number * len(held_out) // 40 for number in range(40)]
    assert loss == pytest.approx(recipe.loss(model, held_out.batch(chosen)).item(), abs=1e-5)


@pytest.mark.parametrize("changes", [{}, {"tie_embedding": False, "hidden": 40, "qk_norm": False, "rope_theta": 500.0}])
def test_config_rebuilds_the_model(changes: dict[str, Any]) -> None:
    recipe = with_settings(**changes)
    model = recipe.build_model(1)
    rebuilt = GptRecipe.model_from_config(json.loads(json.dumps(recipe.config())))
    rebuilt.load_state_dict(model.state_dict())
    tokens = random_tokens(1, 12)
    assert torch.equal(rebuilt(tokens), model(tokens))
    assert recipe.config()["settings"]["hidden"] == rebuilt.blocks[0].mlp_out.weight.shape[1]  # type: ignore[union-attr, index]
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"name": "other"},
        {"name": "gpt"},
        {"name": "gpt", "settings": []},
        {"name": "gpt", "settings": {"layers": 10**9}},
    ],
)
def test_a_damaged_config_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="model config"):
        GptRecipe.model_from_config(config)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layers": 0}, r"recipe\.settings\.layers: .*greater than or equal to 1.*got 0"),
        ({"width": "wide"}, r"recipe\.settings\.width"),
        ({"width": 18, "heads": 4}, r"even multiple of heads \(4"),
        ({"width": 6, "heads": 2}, r"even multiple of heads \(2"),
        ({"depth": 3}, r"recipe\.settings\.depth: no such field"),
        ({"rope_theta": math.inf}, r"recipe\.settings\.rope_theta"),
        ({"context": None}, r"recipe\.settings\.context"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        with_settings(**changes)


def test_missing_settings_are_named() -> None:
    with pytest.raises(RecipeError, match=r"layers: is missing.*heads: is missing"):
        GptRecipe({}, DataSection())


def test_samples_of_another_size_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.tokens_per_sample: expected nothing or .*12.*not 13"):
        GptRecipe(dict(TINY), DataSection(tokens_per_sample=13))
    assert GptRecipe(dict(TINY), DataSection(tokens_per_sample=12)).tokens_per_sample == 12


def test_a_bad_corpus_is_refused() -> None:
    recipe = GptRecipe(dict(TINY), DataSection(source="text:nowhere/*.txt"))
    with pytest.raises(CorpusError):
        recipe.training_data()
