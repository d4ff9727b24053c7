"""Members and the coordinator are killed at named steps; the others go on, and the killed ones come back."""

import signal
from collections.abc import Sequence

import pytest
from tests.integration.harness import (
    CALM,
    DOOMED_HOST,
    DOOMED_MEMBER,
    KILLED,
    LEAVE_S,
    ROUNDS_S,
    SHOAL,
    SLOW_DISK_HOST,
    START_S,
    STOPPED_AT_ONCE,
    Host,
    Member,
    Swarm,
    eventually,
    finish,
    run_toml,
)

from shoal.swarm.coordinator.events import MemberLost, VerdictGiven
from shoal.swarm.errors import Superseded

pytestmark = pytest.mark.integration


# Members ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "deaths",
    [
        ["ready 1", "serving 3"],
        ["reducing 1", "reducing 2"],
        ["exchanged 1", "reported 1", "applying 1"],
    ],
    ids=["contributing", "reducing", "done"],
)
def test_a_member_is_killed(swarm: Swarm, deaths: list[str]) -> None:
    host = swarm.host(run_toml())
    others = swarm.members(host.invite, "a", "b")
    doomed = swarm.member(host.invite, "doomed")
    arguments = doomed.command[doomed.command.index("join") :]
    peer = doomed.peer
    fatal: dict[str, int] = {}
    for number, death in enumerate(deaths):
        armed = swarm.folder / f"armed-{number}"
        doomed.kill()
        doomed.command = [*DOOMED_MEMBER, *death.split(), str(armed), *arguments]
        doomed.start()
        for member in [doomed, *others]:
            member.committed(within_s=START_S + ROUNDS_S)
        armed.touch()
        assert doomed.exit_code(ROUNDS_S) == KILLED, doomed.tail()
        fatal[death] = doomed.last_round() + 1
        for member in others:
            member.committed(after=fatal[death])

    # The same command, now with nothing that kills it.
    doomed.command = [*CALM, *arguments]
    doomed.start()
    back = doomed.committed(within_s=START_S + ROUNDS_S)["round"]
    assert doomed.peer == peer
    for member in others:
        member.event("committed", round=back)
    verdicts = finish(host, [doomed, *others])
    assert [one for one in others if one.events("resync")] == [], "nobody else has lost anything"
    for death, number in fatal.items():
        verdict = verdicts[number].verdict
        assert verdict.plan is not None
        assert verdict.committed, f"{death}: {verdict.reason}"
        assert None not in verdict.digests, f"{death}: a stand-in makes what it had not delivered"
        if death.split()[0] in ("exchanged", "reported", "applying"):
            assert peer in [member.peer for member in verdict.plan.members], death


def test_members_are_killed_at_random_moments(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "a", "b", "c")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    for turn in range(3):
        victim, others = members[turn], members[:turn] + members[turn + 1 :]
        at = others[0].last_round()
        others[0].committed(after=at)
        victim.kill()
        victim.start()
        for member in others:
            member.committed(after=at + 1)
        victim.committed()
    finish(host, members)


# The coordinator --------------------------------------------------------------------------------------------


def restart(host: Host, launcher: Sequence[str] = SHOAL) -> None:
    """Start the host's command again; the invite stays the same, port included."""
    invite = host.invite
    host.command = [*launcher, *host.command[host.command.index("host") :]]
    host.start()
    assert host.invite == invite


def goes_on(host: Host, members: list[Member], pids: list[int], ended: int) -> list[VerdictGiven]:
    """Check that rounds after ``ended`` are committed by the same processes, with all their work."""
    for member in members:
        member.committed(after=ended + 1)
    assert [member.pid for member in members] == pids
    assert all(member.running for member in members)
    verdicts = finish(host, members)
    for member in members:
        assert member.events("resync") == [], "the restart cost nobody its work"
    lost = [event for event in host.journal_events() if isinstance(event, MemberLost) and event.reason == "silent"]
    assert lost == [], "the restart cost nobody its membership"
    return verdicts


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_coordinator_is_killed_as_it_writes(swarm: Swarm, when: str) -> None:
    # While members train, as they are told to stop, as they average, and at the end of it.
    events = ["LeaseGranted", "RoundClosing", "RoundPlanned", "VerdictGiven"]
    host = swarm.host(run_toml(), launcher=(*DOOMED_HOST, when, events[0], "0"))
    members = swarm.members(host.invite, "a", "b")
    pids = [member.pid for member in members]
    for next_event in [*events[1:], None]:
        assert host.exit_code(START_S + ROUNDS_S) == KILLED, host.tail()
        ended = max(member.last_round() for member in members)
        # Some rounds in between, so that each death finds the run at work.
        restart(host, (*DOOMED_HOST, when, next_event, str(ended + 3)) if next_event else SHOAL)
    goes_on(host, members, pids, ended)


def test_the_coordinator_is_killed_with_a_member(swarm: Swarm) -> None:
    host = swarm.host(run_toml(), launcher=(*DOOMED_HOST, "after", "RoundPlanned", "2"))
    members = swarm.members(host.invite, "a", "b", "c")
    assert host.exit_code(START_S + ROUNDS_S) == KILLED, host.tail()
    members[2].kill()
    ended = max(member.last_round() for member in members)
    restart(host)
    members[2].start()
    for member in members:
        member.committed(after=ended + 1)
    finish(host, members)


# Leaving ----------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_at_once_and_frees_the_samples(swarm: Swarm) -> None:
    host = swarm.host(run_toml(max_s=3600))
    leaver, other = swarm.members(host.invite, "leaver", "other")
    for member in (leaver, other):
        member.event("synced", START_S)
    peer = leaver.peer
    leaver.leave()
    gone = host.event("member_lost", peer=peer)
    assert gone["reason"] != "silent"
    assert other.running
    finish(host, [other])


def test_the_second_ctrl_c_stops_at_once(swarm: Swarm) -> None:
    # Its round is closing and waits for a member that is stopped: a graceful end has to wait for the verdict.
    host = swarm.host(run_toml(patience_s=30))
    member, silent = swarm.members(host.invite, "member", "silent")
    for one in (member, silent):
        one.committed(within_s=START_S + ROUNDS_S)
    silent.send(signal.SIGSTOP)
    before = member.last_round()
    eventually(
        "a round waits for the silent member",
        lambda: any(one["round"] > before for one in host.events("round_closing")),
        ROUNDS_S,
        host.tail,
    )
    member.interrupt()
    # Two signals that come at the same moment are one: once more, until it has ended.
    eventually("the second Ctrl-C ends it", lambda: member.interrupt() or not member.running, LEAVE_S, member.tail)
    assert member.exit_code(0) == STOPPED_AT_ONCE, member.tail()


def test_ctrl_c_on_the_host_and_the_same_command_again(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "a", "b")
    pids = [member.pid for member in members]
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    host.stop()
    ended = max(member.last_round() for member in members)
    restart(host)
    goes_on(host, members, pids, ended)


def test_ctrl_c_on_the_host_does_not_cut_the_journal_short(swarm: Swarm) -> None:
    host = swarm.host(run_toml(), launcher=SLOW_DISK_HOST)
    swarm.member(host.invite, "member")
    host.says("writing MemberJoined", START_S)
    host.stop()
    assert "written MemberJoined" in host.text()


def test_the_same_identity_twice(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    other, first = swarm.members(host.invite, "other", "first")
    first.committed(within_s=START_S + ROUNDS_S)
    second = swarm.member(host.invite, "second", identity=first.folder / "identity")
    assert first.exit_code(START_S) == Superseded.exit_code, first.tail()
    assert "--identity" in first.text()
    assert second.peer == first.events("joined")[0]["peer"]
    second.committed()
    finish(host, [other, second])


def test_everybody_leaves_and_comes_back(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "a", "b")
    for member in members:
        member.committed(after=1)
    for member in members:
        member.interrupt()
    left = [member.has_left()["anchor_version"] for member in members]
    host.stop()
    restart(host)
    for member in members:
        member.start()
    for member in members:
        assert member.event("synced", START_S)["anchor_version"] >= max(left)
    # Who saved the newest version is the first in the run again, and goes on with what it carried.
    assert any(member.events("synced", residual=True) for member in members)
    for member in members:
        member.committed()
    finish(host, members)


def test_everybody_is_killed_and_comes_back(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "a", "b")
    for member in members:
        member.committed(after=1)
    for process in [host, *members]:
        process.kill()
    restart(host)
    for member in members:
        member.start()
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    finish(host, members)
