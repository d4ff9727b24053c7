"""Tests of cli/doctor_gpu: what GPUs could train, predicted from a model without values."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.peer.cli.doctor_gpu import PredictedModel, predict, prediction_report
from shoal.peer.cli.main import app
from shoal.peer.recipes import load_recipe
from shoal.peer.training.step_memory import StepMemory, step_peak
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file

TOML = """
[run]
name = "small"
[recipe]
name = "gpt"
settings = { layers = 2, width = 32, heads = 2, context = 64 }
[inner]
batch_samples = 20
precision = "float32"
[round]
tokens = 6400
"""
GIB = 2**30


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def test_a_model_without_values_takes_what_the_model_takes(run_path: Path) -> None:
    run = load_run_file(run_path)[1]
    recipe = load_recipe(run)
    model, data = recipe.build_model(1), recipe.training_data()
    batches = {samples: data.batch([0] * samples) for samples in (1, 2)}
    one, two = (step_peak(model, lambda n: recipe.loss(model, batches[n]), n, GIB) for n in (1, 2))
    found = predict(run_path)
    plain, again = found.steps
    assert plain == StepMemory.of(one, two)
    assert again is not None
    assert again.sample < plain.sample
    assert found.trained == sum(parameter.numel() for parameter in model.parameters())


def outline(run: RunFile | None = None) -> PredictedModel:
    run = run or parse_run_file(TOML)
    return PredictedModel(run, 2**28, 4.0, GIB // 2, (StepMemory(GIB, GIB), StepMemory(GIB, GIB // 8)))


def test_samples_fill_what_the_state_leaves() -> None:
    """2**28 parameters: AdamW and gradients take 4 GiB, and an island divides them."""
    member = outline().member(10 * GIB, 1)
    assert (member.state_bytes, member.samples, member.recomputes) == (4 * GIB + GIB // 2, 3, False)
    member = outline().member(10 * GIB, 8)
    assert (member.state_bytes, member.samples) == ((4 * GIB + GIB // 2) // 8, 3), "of 20 samples, on each"
    member = outline().member(7 * GIB, 1)
    assert (member.samples, member.recomputes) == (6, True)
    assert outline().member(6 * GIB, 1).samples == 0
    assert outline().member(6 * GIB, 1).host_bytes == member.host_bytes > 2 * GIB


def test_eighty_columns_say_it() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(prediction_report(outline(), [7 * GIB]))
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert any(row.startswith("1 x 7.0 GiB 4.5 GiB") and row.endswith("6 computed again") for row in rows)
    assert any(row.startswith("8 x 7.0 GiB 576.0 MiB") and row.endswith("3 kept") for row in rows)


def test_stages_and_own_models_are_refused(tmp_path: Path, run_path: Path) -> None:
    path = tmp_path / "stages.toml"
    path.write_text(f'algorithm = "virtual_batch"\n{TOML}[pipeline]\nmicro_batch = 1\n')
    with pytest.raises(RecipeError, match="for whole models"):
        predict(path)
    path.write_text(TOML.replace('"gpt"', '"own"').replace("settings", "# settings"))
    with pytest.raises(RecipeError, match="bring their own model"):
        predict(path)
    done = CliRunner().invoke(app, ["doctor", "--gpu-memory", "24G"])
    assert done.exit_code != 0
