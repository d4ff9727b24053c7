"""A run is amended while host and members are killed: every peer takes each step with its round's settings."""

import json

import pytest
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Host, Swarm, check_parity, finish, run_toml

from shoal.swarm.errors import RunAmended

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def amend(swarm: Swarm, host: Host, *changes: str) -> None:
    command = swarm.command(f"amend-{len(swarm.processes)}", *SHOAL, "amend", str(host.state), *changes)
    assert command.exit_code(START_S) == 0, command.tail()


def test_rounds_around_an_amendment_survive_kills(swarm: Swarm) -> None:
    host = swarm.host(run_toml(rounds=100_000, max_s=1.0))
    accepts = ("--accept-amendments", "--keep-checkpoints", "500")
    first, second = (swarm.member(host.invite, name, extra=accepts) for name in ("first", "second"))
    for member in (first, second):
        member.committed(within_s=START_S + ROUNDS_S)
    at_round = first.last_round() + 15
    amend(swarm, host, "outer.lr=0.35", "inner.lr=0.004", "round.max_s=0.5", "--at-round", str(at_round))
    told = first.event("amended", ROUNDS_S)
    assert (told["round"], told["changes"]["outer.lr"]) == (at_round, "0.35")

    first.committed(after=at_round - 3)
    second.kill()
    host.kill()
    host.start()
    second.start()
    first.committed(after=at_round)
    second.committed(after=at_round, within_s=START_S + ROUNDS_S)
    late = swarm.member(host.invite, "late")
    late.committed(within_s=START_S + ROUNDS_S)
    assert late.event("amended", START_S)["round"] == at_round
    check_parity(host, [first, second, late])

    amend(swarm, host, "run.rounds=200000")
    assert late.exit_code(ROUNDS_S) == RunAmended.exit_code, late.tail()
    assert "--accept-amendments" in late.tail()
    first.committed(after=first.last_round() + 1)
    verdicts = finish(host, [first, second])
    changes = (("inner.lr", "0.004"), ("outer.lr", "0.35"), ("round.max_s", "0.5"))
    for one in (given.verdict for given in verdicts):
        assert one.amended[:3] == (changes if one.round >= at_round else ()), one.round
    assert verdicts[-1].verdict.amended[3:] == (("run.rounds", "200000"),)
    replay = swarm.command("replay", *SHOAL, "replay", str(first.folder), "--json")
    assert replay.exit_code(ROUNDS_S) == 0, replay.tail()
    rounds = [json.loads(line)["round"] for line in replay.log.read_text().splitlines() if line.startswith("{")]
    assert min(rounds) < at_round < max(rounds)
