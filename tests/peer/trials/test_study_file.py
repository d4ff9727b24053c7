"""Tests of trials/study_file: what a study may say, and that a trial's run file is a function of it."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shoal.peer.trials.study_file import SearchRange, StudyFile, load_study, parse_study, toml_text
from shoal.swarm.errors import RunFileError, StudyError
from shoal.swarm.protocol.run_file import parse_run_file

EXAMPLES = Path(__file__).parents[3] / "examples"
BASE = """
averaging.codec = { name = "int8", block = 64 }
[run]
name = "base"
rounds = 5
[recipe]
name = "gpt"
[recipe.settings]
layers = 2
heads = 2
nested = { "a b" = [1, 2.5, "x\\u00e9", true], empty = {} }
[inner]
betas = [0.9, 0.95]
[round]
tokens = 1000
"""
STUDY = """
run = "base.toml"
[study]
name = "rates"
trials = 4
[space]
"inner.lr" = { low = 1e-5, high = 1e-1, log = true }
"recipe.settings.layers" = { low = 1, high = 5, step = 2 }
"inner.optimizer" = { choices = ["adamw", "muon"] }
"""
VALUES = {"inner.lr": 0.01, "recipe.settings.layers": 3, "inner.optimizer": "muon"}


def load(folder: Path, study: str = STUDY, base: str = BASE) -> StudyFile:
    (folder / "base.toml").write_text(base)
    (folder / "study.toml").write_text(study)
    return load_study(folder / "study.toml")


def refusal(folder: Path, study: str = STUDY, base: str = BASE) -> str:
    with pytest.raises(StudyError) as refused:
        load(folder, study, base)
    assert refused.value.exit_code == 64
    return str(refused.value)


def test_a_trial_is_the_run_file_with_its_values_under_a_name_of_its_own(tmp_path: Path) -> None:
    text, run = load(tmp_path).trial(7, VALUES)
    assert run.run.name == "rates-7"
    assert (run.inner.lr, run.inner.optimizer, run.recipe.settings["layers"]) == (0.01, "muon", 3)
    base = parse_run_file(BASE)
    assert run.recipe.settings | {"layers": 2} == base.recipe.settings
    assert (run.averaging, run.round, run.inner.betas) == (base.averaging, base.round, base.inner.betas)
    assert parse_run_file(text).hash == run.hash


@pytest.mark.parametrize("name", ["stdlib.toml", "pipeline.toml", "fine_tune.toml"])
def test_run_files_are_written_as_they_were_read(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert tomllib.loads(toml_text(tomllib.loads(text))) == tomllib.loads(text)


def test_the_example_is_a_study() -> None:
    study = load_study(EXAMPLES / "study.toml")
    assert study.trial(0, {key: one.corners()[0] for key, one in study.space.items()})[1].run.rounds == 20


def test_the_hash_is_of_study_and_run_file_and_goes_over_the_wire(tmp_path: Path) -> None:
    study = load(tmp_path)
    assert parse_study(study.as_json()) == study
    assert parse_study(study.as_json()).hash == study.hash
    others = [
        load(tmp_path, STUDY.replace("1e-5", "1e-6")),
        load(tmp_path, base=BASE.replace("1000", "1001")),
        load(tmp_path, STUDY.replace("trials = 4", "trials = 5")),
    ]
    assert len({one.hash for one in [study, *others]}) == 4


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**VALUES, "inner.lr": 1.0},
        {**VALUES, "inner.lr": "0.01"},
        {**VALUES, "inner.lr": True},
        {**VALUES, "recipe.settings.layers": 2},
        {**VALUES, "recipe.settings.layers": 3.0},
        {**VALUES, "inner.optimizer": "adafactor"},
        {**VALUES, "data.source": "text:*"},
    ],
)
def test_values_outside_of_the_study_make_no_trial(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(StudyError, match="is not of the study's search space"):
        load(tmp_path).trial(0, values)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("trials = 4", "trails = 4", r"study\.trails: no such field; did you mean 'trials'\?"),
        ("low = 1e-5", "lwo = 1e-5", "did you mean 'low'"),
        ('"inner.lr"', '"inner.lrr"', r"space\.inner\.lrr.*did you mean 'lr'"),
        ("high = 1e-1", "high = 1e-6", "expected low < high"),
        ("low = 1e-5", "low = 0.0", "low > 0"),
        ("high = 1e-1", "high = 1e9", r"space\.inner\.lr: 1000000000\.0: .*less than or equal to 1000000"),
        ('choices = ["adamw", "muon"]', 'choices = ["adamw", "lion"]', "space.inner.optimizer: 'lion'"),
        ('choices = ["adamw", "muon"]', "choices = []", "expected choices, or low and high"),
        ('choices = ["adamw", "muon"]', 'choices = ["muon"], low = 1', "choices alone"),
        ('"inner.optimizer"', '"run.name"', "is the same in all trials"),
        ('"inner.optimizer"', '"pins.corpus"', "is the same in all trials"),
        ('"inner.optimizer"', '"access.admission"', "is the same in all trials"),
        ("step = 2", "step = 2, log = true", "without log"),
        ('name = "rates"', 'name = "Rates"', r"study\.name"),
        ("[study]", 'first = [{ "inner.lr" = 5.0 }]\n[study]', "first: inner.lr = 5.0: is not in the search space"),
        ("[study]", "[study", "not valid TOML"),
    ],
)
def test_a_refusal_names_the_field_and_what_is_expected(tmp_path: Path, old: str, new: str, expected: str) -> None:
    said = refusal(tmp_path, STUDY.replace(old, new))
    assert re.search(expected, said), said
    assert str(tmp_path / "study.toml") in said


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("rounds = 5", "", "has to end"),
        ('name = "gpt"', 'name = "own"', "recipe"),
        ("[round]", '[access]\nadmission = "list"\n[round]', "admission"),
    ],
)
def test_run_files_that_make_no_trials(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert expected in refusal(tmp_path, base=BASE.replace(old, new))


def test_a_run_file_that_is_wrong_itself_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"base\.toml: round\.tokens"):
        load(tmp_path, base=BASE.replace("tokens = 1000", "tokens = 0"))


def test_a_host_s_study_is_checked(tmp_path: Path) -> None:
    content = json.loads(load(tmp_path).as_json())
    for broken in ("{", "[]", json.dumps(content | {"space": {}}), json.dumps(content | {"base": 5})):
        with pytest.raises(StudyError, match="the host's study"):
            parse_study(broken)
    with pytest.raises(StudyError, match="not valid TOML"):
        parse_study(json.dumps(content | {"base": "[run"})).trial(0, VALUES)


def test_a_study_that_no_message_has_room_for_is_refused(tmp_path: Path) -> None:
    assert "400000 bytes" in refusal(tmp_path, base=f"# {'é' * 90_000}\n{BASE}")


def test_integers_are_integers() -> None:
    assert SearchRange(low=1, high=9, step=2).has(3)
    assert not SearchRange(low=1, high=9).has(3.0)
    assert SearchRange(low=1.0, high=9).has(3)
    assert SearchRange(choices=(True, 1)).corners() == (True, 1)
