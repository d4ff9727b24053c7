"""A study with real processes: peers go from trial to trial, the study is killed and goes on, a trial is pruned."""

import json
import sqlite3

import pytest
from tests.integration.harness import (
    CALM,
    LEAVE_S,
    LOOPBACK,
    ROUNDS_S,
    SHOAL,
    START_S,
    Process,
    Swarm,
    run_toml,
)

from shoal.swarm.protocol.run_file import parse_run_file

pytestmark = [pytest.mark.integration, pytest.mark.matrix]
pytest.importorskip("optuna")

# The third trial does not learn, so that the median of the two before ends it.
STUDY = """
run = "base.toml"
first = [
    { "inner.lr" = 1e-3, "inner.optimizer" = "adafactor" },
    { "inner.lr" = 1e-2, "inner.optimizer" = "muon" },
    { "inner.lr" = 1e-9, "inner.optimizer" = "muon" },
]
[study]
name = "rates"
trials = 3
startup_trials = 1
samples = 16
[space]
"inner.lr" = { low = 1e-9, high = 1.0, log = true }
"inner.optimizer" = { choices = ["muon", "adafactor"] }
"""


def test_peers_go_from_trial_to_trial_through_a_kill_of_the_study(swarm: Swarm) -> None:
    base = run_toml(name="base", rounds=4, max_s=1.5, outer='optimizer = "sgd"\nlr = 1.0')
    (swarm.folder / "base.toml").write_text(base)
    (swarm.folder / "study.toml").write_text(STUDY)
    folder = swarm.folder / "folder"
    options = ("--folder", str(folder), "--bind", LOOPBACK, "--no-pins", "--no-relay", "--device", "cpu")
    study: Process = swarm.command("study", *SHOAL, "trials", str(swarm.folder / "study.toml"), *options)
    study.says("shoal join 'shoal://127.0.0.1:", START_S)
    invite = (folder / "invite.txt").read_text().strip()
    members = swarm.members(invite, "one", "two", launcher=CALM)
    study.says("trial 1: running, held-out loss", ROUNDS_S)

    study.kill()
    study.start()
    assert study.exit_code(ROUNDS_S) == 0, study.tail()
    for member in members:
        assert member.exit_code(LEAVE_S) == 0, member.tail()

    found = json.loads((folder / "trials.json").read_text())["trials"]
    assert [(one["trial"], one["state"]) for one in found] == [(0, "complete"), (1, "complete"), (2, "pruned")]
    # A busy machine leaves evaluations out, but not the last one.
    assert all(max(one["losses"]) == "4" for one in found[:2]), found
    assert "the host amends the run: run.rounds = 1" in study.text()
    assert [one["values"]["inner.optimizer"] for one in found] == ["adafactor", "muon", "muon"]
    best = min(found[:2], key=lambda one: one["loss"])
    assert parse_run_file((folder / "best.toml").read_text()).run.name == f"rates-{best['trial']}"
    assert f"{best['loss']:.4f}" in (folder / "trials.txt").read_text().splitlines()[1]
    assert (folder / "trials.png").stat().st_size > 1000
    with sqlite3.connect(folder / "trials.db") as database:
        assert database.execute("select count(*) from trials where state = 'RUNNING'").fetchone() == (0,)
    runs = [{event["run"] for event in member.all_events() if event["event"] == "joined"} for member in members]
    assert runs == [{"rates-0", "rates-1", "rates-2"}] * 2
