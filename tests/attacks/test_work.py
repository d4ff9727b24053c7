"""A member contributes the opposite of its work, within the bound on norms: a validator's scores expel it."""

import json
import sys
from pathlib import Path

import pytest
from tests.attacks.test_invites import invite, shoal
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Swarm, check_journal, check_parity, eventually, run_toml

from shoal.swarm.coordinator.events import PeerBanned, VerdictGiven, WorkScored
from shoal.swarm.coordinator.trust import DOUBTED_AFTER, EXPELLED_AFTER
from shoal.swarm.protocol.work_scores import BAD

pytestmark = pytest.mark.integration

FLIPPER = (sys.executable, str(Path(__file__).with_name("flipping_member.py")))
SPARE_ROUNDS = 6
"""Rounds after its first bad score in which the flipper may be that a busy machine does not score, or not beyond
chance."""


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (run_toml(max_s=4.0), "harms"),
        (run_toml(algorithm="virtual_batch", tokens=6_400, max_s=60), "wrong gradient"),
    ],
    ids=["diloco", "virtual_batch"],
)
def test_a_member_that_flips_the_sign_is_expelled(swarm: Swarm, run: str, found: str) -> None:
    host = swarm.host(run + "[audit]\nwork_share = 1.0\n")
    fair = swarm.members(host.invite, "a", "b", "c")
    flipper = swarm.member(host.invite, "flipper", FLIPPER)
    refused = swarm.member(host.invite, "self-made", SHOAL, extra=["--role", "validator"])
    assert refused.exit_code(START_S) == 24, refused.tail()
    authorised = invite(swarm, host, "--role", "validator")
    validator = swarm.member(authorised, "validator", SHOAL, extra=["--role", "validator"])
    liar = flipper.peer

    def banned() -> list[PeerBanned] | None:
        assert all(one.running for one in (*fair, validator)), "nobody honest ends"
        return [one for one in host.journal_events() if isinstance(one, PeerBanned)] or None

    (ban,) = eventually("somebody is expelled", banned, ROUNDS_S, swarm.tails)
    assert ban.peer == liar
    assert "bad scores of its work in a row" in ban.note
    assert flipper.exit_code(START_S) == 54, flipper.tail()
    last = max(one.last_round() for one in fair)
    for member in fair:
        member.committed(after=last)
    ids = {one.peer for one in fair}
    for member in (*fair, validator):
        member.interrupt()
    for member in (*fair, validator):
        member.has_left()
    host.stop()
    check_parity(host, [*fair, validator])
    check_journal(host)

    events = host.journal_events()
    scores = [one.signed.score for one in events if isinstance(one, WorkScored)]
    assert {one.by for one in events if isinstance(one, WorkScored)} == {validator.peer}
    assert [one.finding for one in scores if one.peer == liar].count(found) >= EXPELLED_AFTER
    for peer in ids:
        assert sum(one.finding in BAD for one in scores if one.peer == peer) < DOUBTED_AFTER, scores
        assert not any(one.finding == "wrong loss" for one in scores if one.peer == peer), scores
    if found == "harms":
        measured = [one for one in scores if one.loss is not None]
        assert measured, "members say which loss their first batch had"
        assert all(one.claimed_loss == pytest.approx(one.loss, rel=1e-3) for one in measured)
    plans = [
        one.verdict.plan
        for one in events
        if isinstance(one, VerdictGiven) and one.verdict.committed and one.verdict.plan is not None
    ]
    first = min(one.round for one in scores if one.peer == liar and one.finding == found)
    attacked = [plan.round for plan in plans if liar in [one.peer for one in plan.members] and plan.round >= first]
    assert len(attacked) <= EXPELLED_AFTER + SPARE_ROUNDS

    shown = [json.loads(line) for line in shoal(swarm, "log", str(host.state), "--scores", "--json").splitlines()]
    assert [one["peer"] for one in shown if one["kind"] == "scored"] == [one.peer for one in scores]
    assert all(one["signature_ok"] for one in shown)
