"""Evaluation of a model: what recipes tell of it, what is reported of that, and that it goes beside other work."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.peer.data_places import DataPlaces
from shoal.peer.recipes.evaluation import EvaluatingRecipe, EvaluationFigures, EvaluationRequest, SourceFigure
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.recipes.language_model import figures_by_source
from shoal.peer.validation.model_evaluator import ModelEvaluator, evaluation_of, figures_of
from shoal.swarm.protocol.run_file import DataSection, RunFile, parse_run_file

SETTINGS = {"layers": 1, "heads": 2, "width": 16, "context": 16}
RUN = """
[run]
name = "tiny"
seed = 3
[recipe]
name = "gpt"
settings = { layers = 1, heads = 2, width = 16, context = 16 }
[evaluation]
samples = 8
prompts = ["", "one "]
text_tokens = 6
[round]
tokens = 1000
"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def recipe(tmp_path: Path) -> GptRecipe:
    """Texts of two sources, split by files."""
    for folder, words in (("prose", "some words of it "), ("code", "def one(): return 1\n")):
        (tmp_path / folder).mkdir()
        for number in range(40):
            (tmp_path / folder / f"{number}.txt").write_text(words * (20 + number % 3))
    data = DataSection(source="text:**/*.txt", held_out=0.2)
    return GptRecipe(dict(SETTINGS), data, DataPlaces(folders=(tmp_path,)))


def test_a_gpt_tells_loss_accuracy_sources_and_texts(recipe: GptRecipe) -> None:
    assert isinstance(recipe, EvaluatingRecipe)
    model = recipe.build_model(0)
    calls: list[int] = []
    request = EvaluationRequest(24, ("", "def "), 5, go_on=lambda: calls.append(1))
    random_state = torch.get_rng_state()
    figures = recipe.evaluate(model, "cpu", request)
    assert torch.equal(random_state, torch.get_rng_state())
    assert figures.loss == recipe.held_out_loss(model, "cpu", 24)
    assert figures.samples == 24
    assert figures.accuracy is not None
    assert 0 <= figures.accuracy < 0.5
    assert {one.name for one in figures.sources} == {"prose", "code"}
    assert sum(one.samples for one in figures.sources) == 24
    weighted = math.fsum(one.loss * one.samples for one in figures.sources) / 24
    assert weighted == pytest.approx(figures.loss)
    assert len(figures.texts) == 2
    assert len(calls) > 5
    assert figures == recipe.evaluate(model, "cpu", EvaluationRequest(24, ("", "def "), 5))
    drawn = [recipe.evaluate(model, "cpu", EvaluationRequest(4, ("a",), 8, 1.0, seed)).texts for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_model_that_knows_everything_is_right(recipe: GptRecipe) -> None:
    class Oracle(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            following = torch.roll(tokens, -1, dims=1)
            following[:, -1] = 0  # what comes last it does not see
            return 50.0 * nn.functional.one_hot(following, 256).float()

    figures = recipe.evaluate(Oracle(), "cpu", EvaluationRequest(8))
    assert figures.accuracy is not None
    assert 15 / 16 <= figures.accuracy <= 1


def test_tokens_without_a_tokenizer_have_no_texts(tmp_path: Path) -> None:
    (tmp_path / "tokens.u16").write_bytes(bytes(range(256)) * 20)
    places = DataPlaces(folders=(tmp_path,))
    source = DataSection(source="tokens:tokens.u16", held_out=0.2)
    recipe = GptRecipe(SETTINGS | {"vocab": 65536}, source, places)
    figures = recipe.evaluate(recipe.build_model(0), "cpu", EvaluationRequest(2, ("a",)))
    assert (figures.texts, figures.sources) == ((), ())


def test_many_sources_are_the_largest_and_others() -> None:
    sources = [(f"{name}/a.py", 10 * (number + 1)) for number, name in enumerate("abcdefghijklmnop")]
    figures = figures_by_source(sources, range(160), [float(number) for number in range(160)])
    assert len(figures) == 13
    assert figures[0] == SourceFigure("a", 4.5, 10)
    assert (figures[-1].name, figures[-1].samples) == ("others", 40)
    assert figures_by_source([("a/x.py", 5), ("a/y.py", 9)], [0, 6], [1.0, 2.0]) == ()


def test_what_is_reported_is_bounded_and_plain() -> None:
    request = EvaluationRequest(prompts=("p",) * 2)
    wild = EvaluationFigures(
        loss=math.nan,
        samples=0,
        accuracy=math.nan,
        sources=tuple(SourceFigure(f"s{number}\x1b", 1e31 if number else 2.0, 1) for number in range(40)),
        texts=("x\x1b[2J" * 1000, "\u202eback", "more than was asked for"),
    )
    found = evaluation_of(3, bytes(32), request, wild, 1e12)
    assert (found.loss, found.accuracy, found.samples, found.took_s) == (None, None, 1, 1e9)
    assert [one.name for one in found.sources] == ["s0"]
    assert [len(one.text) for one in found.texts] == [1000, 4]


def test_others_have_their_held_out_loss() -> None:
    class Plain:
        def held_out_loss(self, model: Any, device: Any, max_samples: int) -> float:
            return 2.5

    assert figures_of(Plain(), nn.Linear(1, 1), "cpu", EvaluationRequest(7)) == EvaluationFigures(2.5, 7)  # type: ignore[arg-type]


def values_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def evaluator(recipe: Any) -> tuple[ModelEvaluator, RunFile]:
    run = parse_run_file(RUN)
    return ModelEvaluator(run, recipe, torch.device("cpu")), run


def test_one_version_at_a_time_beside_the_rest(recipe: GptRecipe) -> None:
    one, run = evaluator(recipe)
    model = recipe.build_model(7)
    anchor = values_of(model)
    with one:
        assert one.result() is None
        one.begin(4, bytes(32), anchor)
        expected = recipe.held_out_loss(model, "cpu", run.evaluation.samples)
        anchor.zero_()  # a round overwrites it meanwhile
        assert not one.is_idle
        assert one._running is not None
        one._running.exception(60)
        found = one.result()
    assert found is not None
    assert (found.version, found.loss) == (4, expected)
    assert [text.prompt for text in found.texts] == ["", "one "]
    assert one.is_idle


def test_an_evaluation_that_nobody_wants_ends_early(recipe: GptRecipe) -> None:
    begun = threading.Event()

    class Endless(GptRecipe):
        def evaluate(self, model: nn.Module, device: Any, request: EvaluationRequest) -> EvaluationFigures:
            begun.set()
            while True:
                request.go_on()

    endless = Endless(dict(SETTINGS), DataSection())
    one, _ = evaluator(endless)
    with one:
        one.begin(1, bytes(32), values_of(endless.build_model(0)))
        assert begun.wait(30)
    assert not one.is_idle, "it has no result"
