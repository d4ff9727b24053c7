"""Runs with ``overlap``: members train on while a round is averaged, and while one of them dies in it."""

import signal
from contextlib import suppress

import pytest
from tests.integration.harness import (
    CALM,
    DOOMED_HOST,
    DOOMED_MEMBER,
    KILLED,
    ROUNDS_S,
    SHOAL,
    START_S,
    Host,
    Member,
    Swarm,
    eventually,
    finish,
    run_toml,
)

from shoal.peer.array_averager import ArrayAverager
from shoal.peer.options import SessionOptions
from shoal.swarm.coordinator.events import LeaseGranted, VerdictGiven
from shoal.swarm.errors import UserError

pytestmark = pytest.mark.integration

TRIES, STILL_S = 6, 12.0


def test_a_member_is_killed_and_comes_back(swarm: Swarm) -> None:
    host = swarm.host(run_toml(overlap=True))
    others = swarm.members(host.invite, "a", "b")
    doomed = swarm.member(host.invite, "doomed")
    peer, armed = doomed.peer, swarm.folder / "armed"
    arguments = doomed.command[doomed.command.index("join") :]
    doomed.kill()
    doomed.command = [*DOOMED_MEMBER, "reducing", "1", str(armed), *arguments]
    doomed.start()
    for member in [doomed, *others]:
        member.committed(within_s=START_S + ROUNDS_S)
    armed.touch()
    assert doomed.exit_code(ROUNDS_S) == KILLED, doomed.tail()
    fatal = doomed.last_round() + 1
    for member in others:
        member.committed(after=fatal)
    doomed.command = [*CALM, *arguments]
    doomed.start()
    back = doomed.committed(within_s=START_S + ROUNDS_S)["round"]
    for member in others:
        member.event("committed", round=back)
    verdicts = finish(host, [doomed, *others])
    assert [one for one in others if one.events("resync")] == [], "nobody else has lost anything"
    verdict = verdicts[fatal].verdict
    assert verdict.committed, verdict.reason
    assert verdict.plan is not None
    assert peer in [member.peer for member in verdict.plan.members]


def test_the_coordinator_is_killed_when_members_work_ahead_and_one_of_them_with_it(swarm: Swarm) -> None:
    host = swarm.host(run_toml(overlap=True), launcher=(*DOOMED_HOST, "after", "LeaseAhead", "3"))
    others = swarm.members(host.invite, "a", "b")
    pids = [member.pid for member in others]
    silent = swarm.member(host.invite, "silent")
    everybody = [silent, *others]
    eventually(
        "all have committed, or the host is gone already",
        lambda: not host.running or all(member.events("committed", included=True) for member in everybody),
        START_S + ROUNDS_S,
        swarm.tails,
    )
    for _ in range(TRIES):
        if stands_still_until_gone(silent, host):
            break
    assert host.exit_code(ROUNDS_S) == KILLED, host.tail()
    events = host.journal_events()
    ended = max(event.verdict.round for event in events if isinstance(event, VerdictGiven))
    assert [event for event in events if isinstance(event, LeaseGranted) and event.round == ended + 2]
    silent.kill()
    host.command = [*SHOAL, *host.command[host.command.index("host") :]]
    host.start()
    for member in others:
        member.committed(after=ended + 2)
    assert [member.pid for member in others] == pids
    silent.start()
    silent.committed(within_s=START_S + ROUNDS_S)
    finish(host, everybody)
    assert [one for one in others if one.events("resync")] == [], "the restart cost nobody its work"


def stands_still_until_gone(member: Member, host: Host) -> bool:
    """Whether the host ends while ``member`` does nothing: if it has samples then, the round takes longer than those of
    the others last. Between two rounds nobody waits for it; then it goes on, until it is in a round again."""
    before = member.last_round()
    member.send(signal.SIGSTOP)
    with suppress(AssertionError):
        return eventually("the host ends", lambda: not host.running, STILL_S)
    member.send(signal.SIGCONT)
    eventually(
        "it is back, or the host is gone",
        lambda: not host.running or [one for one in member.events("committed", included=True) if one["round"] > before],
        START_S + ROUNDS_S,
        member.tail,
    )
    return not host.running


def test_a_run_that_ends_by_itself_and_a_member_that_leaves_under_an_exchange(swarm: Swarm) -> None:
    host = swarm.host(run_toml(overlap=True, rounds=5))
    leaver, *others = swarm.members(host.invite, "leaver", "a", "b")
    for member in (leaver, *others):
        member.committed(within_s=START_S + ROUNDS_S)
    leaver.leave()
    for member in others:
        assert member.exit_code(ROUNDS_S) == 0, member.tail()
        assert member.events("left")[-1]["anchor_version"] == 5
    assert [one for one in others if one.events("resync")] == []
    finish(host, [])


def test_averaging_only_waits_for_its_mean(swarm: Swarm) -> None:
    toml = run_toml(overlap=True).replace('name = "gpt"', 'name = "own"')
    head, _, rest = toml.partition("[recipe.settings]")
    host = swarm.host(head + rest[rest.index("[data]") :].replace('"stdlib"', '"own"'))
    options = SessionOptions(identity=swarm.folder / "id", state=swarm.folder / "state", bind=("127.0.0.1", 0))
    with pytest.raises(UserError, match="overlap"):
        ArrayAverager.join(host.invite, {"w": [1.0]}, options)
