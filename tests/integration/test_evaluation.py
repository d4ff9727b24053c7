"""Validators evaluate a model beside its training, one is killed and comes back, and their figures end the run."""

import json

import pytest
from tests.attacks.test_invites import invite, shoal
from tests.integration.harness import ROUNDS_S, SHOAL, Swarm, check_journal, run_toml

from shoal.swarm.coordinator.events import ModelEvaluated, StopDecided
from shoal.swarm.protocol.run_file import load_run_file

pytestmark = [pytest.mark.integration, pytest.mark.slow]

_EVALUATION = """
[run.stop_when]
held_out_loss = 2.45
[evaluation]
every_rounds = 1
samples = 16
prompts = ["def "]
text_tokens = 8
[audit]
work_share = 0.0
"""


def test_two_validators_end_a_run_by_its_held_out_loss(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=1.5, patience_s=15.0) + _EVALUATION)
    member = swarm.member(host.invite, "trainer")
    names = ("one", "other")
    validators = [
        swarm.member(invite(swarm, host, "--role", "validator"), name, SHOAL, extra=["--role", "validator"])
        for name in names
    ]
    host.event("evaluated", standing="claim")
    validators[0].event("evaluation")
    validators[0].kill()
    killed_at = max(one["version"] for one in host.events("evaluated"))
    validators[0].start()
    stop = host.event("stops", ROUNDS_S)
    assert "run.stop_when asks for 2.45" in stop["reason"]
    for process in (member, *validators):
        assert process.exit_code(ROUNDS_S) == 0, process.tail()
    last = validators[1].events("left")[-1]["anchor_version"]
    status = json.loads(shoal(swarm, "status", host.invite, "--json"))
    assert (status["phase"], status["round"]) == ("ended", stop["round"] + 1)
    assert "is the last" not in status["stopping"]
    figures = status["evaluation"]["figures"]
    assert figures[-1]["version"] == last, "the model with which the run has ended is evaluated, too"
    agreed = [one for one in figures if one["standing"] == "agreed"]
    assert agreed[-1]["loss"] <= 2.45
    assert all(one["counts"] for one in agreed)
    assert not [one for one in figures if one["standing"] == "disputed"]
    assert any(one["version"] > killed_at for one in figures), "whoever comes back evaluates the newest version"
    assert figures[0]["accuracy"] < 0.5
    assert status["evaluation"]["texts"][-1]["texts"][0]["prompt"] == "def "
    shown = shoal(swarm, "log", str(host.state), "--evaluations")
    assert "agreed" not in shown, "the log has what each validator has signed"
    assert str(last) in shown
    host.stop()
    check_journal(host)
    events = host.journal_events()
    run_hash = load_run_file(host.state / "run.toml")[1].hash
    signed = [one.signed for one in events if isinstance(one, ModelEvaluated)]
    assert {one.validator for one in signed} == {one.peer for one in validators}
    assert all(one.is_signed(run_hash) for one in signed)
    assert sum(isinstance(one, StopDecided) for one in events) == 1
