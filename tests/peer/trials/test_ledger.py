"""Tests of trials/ledger: what Optuna is asked and told, through a kill between any two of its calls."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from shoal.peer.trials.ledger import TrialLedger
from shoal.peer.trials.report import best_of, write_plot, write_results
from shoal.peer.trials.study_file import StudyFile
from shoal.swarm.errors import StudyError
from shoal.swarm.protocol.run_file import parse_run_file

BASE = '[run]\nname = "b"\nrounds = 3\n[recipe]\nname = "gpt"\n[round]\ntokens = 8\n'


def make(trials: int = 3, **about: Any) -> StudyFile:
    content = {
        "study": {"name": "s", "trials": trials, "startup_trials": 1, **about},
        "base": BASE,
        "space": {
            "inner.lr": {"low": 1e-4, "high": 1.0, "log": True},
            "inner.batch_samples": {"low": 1, "high": 8},
            "inner.optimizer": {"choices": ["adamw", "muon"]},
        },
        "first": [{"inner.lr": 0.5}],
    }
    return StudyFile.model_validate_json(json.dumps(content))


def test_a_study_through_kills_counts_each_trial_once(tmp_path: Path) -> None:
    study = make()
    ledger = TrialLedger(study, tmp_path)
    assert ledger.begin() == 0
    # Killed before the values were chosen, then before they were used, then with a loss reported.
    for loss in (None, None, 2.0):
        ledger = TrialLedger(study, tmp_path)
        assert ledger.resume() == [0]
        values = ledger.values(0)
        assert values["inner.lr"] == 0.5, "the first values are as the study says"
        assert ledger.values(0) == values
        study.trial(0, values)
        if loss is not None:
            assert not ledger.report(0, 1, loss)
    ledger = TrialLedger(study, tmp_path)
    assert ledger.resume() == [0]
    assert not ledger.report(0, 1, 9.0), "the loss of an evaluation is noted once"
    assert not ledger.report(0, 2, 1.5)
    assert ledger.finish(0).loss == 1.5

    assert ledger.begin() == 1
    ledger.values(1)
    assert ledger.report(1, 1, 5.0), "the other one was better by then"
    ledger = TrialLedger(study, tmp_path)  # killed before its run has ended
    assert ledger.resume() == [1]
    assert ledger.is_pruned(1)
    assert ledger.finish(1).state == "pruned"

    assert ledger.begin() == 2
    ledger.values(2)
    assert ledger.begin() is None
    row = ledger.finish(2)  # its run has ended before any evaluation
    assert (row.state, row.loss, row.losses) == ("failed", None, {})
    ledger = TrialLedger(study, tmp_path)
    assert (ledger.resume(), ledger.begin()) == ([], None)
    rows = ledger.rows()
    assert [(one.number, one.state) for one in rows] == [(0, "complete"), (1, "pruned"), (2, "failed")]
    assert rows[0].values == values
    assert values != rows[1].values

    write_results(study, rows, tmp_path)
    write_plot(study, rows, tmp_path)
    best = best_of(rows)
    assert best is not None
    assert best.number == 0
    assert parse_run_file((tmp_path / "best.toml").read_text()) == study.trial(0, values)[1]
    lines = (tmp_path / "trials.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["trial", "0", "1", "2"]
    assert json.loads((tmp_path / "trials.json").read_text())["trials"][1]["losses"] == {"1": 5.0}
    assert (tmp_path / "trials.png").read_bytes().startswith(b"\x89PNG")

    with pytest.raises(StudyError, match="another study of that name"):
        TrialLedger(make(trials=4), tmp_path)


def test_losses_that_are_not_finite_end_a_trial(tmp_path: Path) -> None:
    ledger = TrialLedger(make(pruner="none", sampler="random"), tmp_path)
    assert ledger.begin() == 0
    ledger.values(0)
    assert not ledger.report(0, 1, 1e9)
    assert ledger.report(0, 2, float("nan"))
    assert ledger.finish(0).state == "pruned"
    assert best_of(ledger.rows()) is None


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "trials.db").write_bytes(b"x" * 5000)
    with pytest.raises(StudyError, match=r"trials\.db: cannot be used"):
        TrialLedger(make(), tmp_path)


def test_trials_that_begin_at_once_are_no_more_than_the_study_has(tmp_path: Path) -> None:
    ledger = TrialLedger(make(trials=2), tmp_path)
    with ThreadPoolExecutor(4) as threads:
        begun = list(threads.map(lambda _: ledger.begin(), range(4)))
    assert sorted(one for one in begun if one is not None) == [0, 1]
