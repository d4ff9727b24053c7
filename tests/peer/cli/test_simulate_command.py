"""``shoal simulate`` on run files of all kinds."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.peer.cli.simulate import app, parse_number
from shoal.swarm.errors import UserError

RUN = """
{algorithm}
[run]
name = "simulated"
[recipe]
name = "{recipe}"
{settings}
[data]
source = "{source}"
{more}
[round]
tokens = 4096
max_s = 3000
"""
PIPELINE = "[pipeline]\nstages = 2\nmicro_batch = 2\n"
VIRTUAL = 'algorithm = "virtual_batch"'


def simulated(tmp_path: Path, text: str, *options: str) -> dict[str, object]:
    path, trace = tmp_path / "run.toml", tmp_path / "trace.toml"
    path.write_text(text)
    trace.write_text("[[member]]\ncount = 4\ntokens_per_s = 1000\nup_mbit = 1000\nlatency_ms = 1\n")
    arguments = [str(path), "--trace", str(trace), "--rounds", "2", "--json", *options]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


def test_a_pipeline_is_simulated_in_layers(tmp_path: Path) -> None:
    text = RUN.format(algorithm=VIRTUAL, recipe="own", settings="", source="own", more=PIPELINE)
    size = ("--parameters", "1M", "--tokens-per-sample", "64")
    found = simulated(tmp_path, text, *size, "--layers", "4")
    assert found["rounds_committed"] == 2
    pipeline = found["pipeline"]
    assert isinstance(pipeline, dict)
    assert pipeline["stages"] == 2
    with pytest.raises(UserError, match="--layers"):
        simulated(tmp_path, text, *size)


def test_only_a_pipeline_has_layers(tmp_path: Path) -> None:
    text = RUN.format(algorithm="", recipe="own", settings="", source="own", more="")
    size = ("--parameters", "1M", "--tokens-per-sample", "64")
    assert simulated(tmp_path, text, *size)["pipeline"] is None
    with pytest.raises(UserError, match="no \\[pipeline\\]"):
        simulated(tmp_path, text, *size, "--layers", "4")


def test_a_recipe_says_how_many_layers_it_has(tmp_path: Path) -> None:
    settings = "[recipe.settings]\nlayers = 2\nwidth = 32\nheads = 2\ncontext = 64\ntie_embedding = false"
    text = RUN.format(algorithm=VIRTUAL, recipe="gpt", settings=settings, source="stdlib", more=PIPELINE)
    found = simulated(tmp_path, text)
    pipeline = found["pipeline"]
    assert isinstance(pipeline, dict)
    assert pipeline["stages"] == 2


def test_numbers_have_units() -> None:
    assert (parse_number("1.5B", "--x"), parse_number("4000", "--x")) == (1_500_000_000, 4000)
    with pytest.raises(UserError, match="--x 3Q"):
        parse_number("3Q", "--x")
