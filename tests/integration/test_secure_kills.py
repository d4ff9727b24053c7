"""Members and hosts of secure rounds are killed at named steps: at most that round is lost, and nothing hangs."""

import pytest
from tests.integration.harness import (
    CALM,
    DOOMED_HOST,
    DOOMED_MEMBER,
    KILLED,
    ROUNDS_S,
    SHOAL,
    START_S,
    Member,
    Swarm,
    finish,
    run_toml,
)

from shoal.swarm.coordinator.events import VerdictGiven

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OTHERS = ("a", "b", "c", "d")
"""Of five members, four can open a sum."""


def secure_toml() -> str:
    return run_toml().replace("[run]", 'averaging.secure = true\naveraging.robust = "none"\n[run]', 1)


def check_losses(verdicts: list[VerdictGiven], fatal: int, back: int) -> None:
    """Check that from a death on, until ``back`` was committed, no other round was lost than that of the death.

    The round after it may have been planned before it was noticed, and is given up before anything is masked."""
    lost = [one.verdict for one in verdicts if fatal <= one.verdict.round <= back and not one.verdict.committed]
    assert all(one.round in (fatal, fatal + 1) for one in lost), lost
    assert all(one.round == fatal or not one.spent for one in lost), "masked work was lost in one round at most"


@pytest.mark.parametrize(
    "step",
    [
        "revealed",  # what is included and can be opened
        "keyed",
        "dealt",
        "masked",
        "summed",
        "signed",
        "opening",
    ],
)
def test_a_member_is_killed(swarm: Swarm, step: str) -> None:
    armed = swarm.folder / "armed"
    host = swarm.host(secure_toml())
    # Parts go to the fastest of those with credit, and who owns none sums nothing.
    doomed = swarm.member(host.invite, "doomed", launcher=(*DOOMED_MEMBER, step, "1", str(armed)))
    others = [swarm.member(host.invite, label, extra=("--max-upload", "20Mbit")) for label in OTHERS]
    for member in [doomed, *others]:
        member.committed(within_s=START_S + ROUNDS_S)
    armed.touch()
    assert doomed.exit_code(ROUNDS_S) == KILLED, doomed.tail()
    fatal, peer = doomed.last_round() + 1, doomed.peer
    goes_on(others, fatal)

    # The same command, now with nothing that kills it.
    doomed.command = [*CALM, *doomed.command[doomed.command.index("join") :]]
    doomed.start()
    back = doomed.committed(within_s=START_S + ROUNDS_S)["round"]
    assert doomed.peer == peer
    for member in others:
        member.event("committed", round=back)
    check_losses(finish(host, [doomed, *others]), fatal, back)


@pytest.mark.parametrize("stage", ["MASKS", "SHARES", "SETS", "UNMASK", "OPEN"])
def test_the_host_is_killed(swarm: Swarm, stage: str) -> None:
    host = swarm.host(secure_toml(), launcher=(*DOOMED_HOST, "at", stage, "2"))
    members = swarm.members(host.invite, *OTHERS)
    assert host.exit_code(START_S + ROUNDS_S) == KILLED, host.tail()
    fatal = max(member.last_round() for member in members) + 1
    invite = host.invite
    host.command = [*SHOAL, *host.command[host.command.index("host") :]]
    host.start()
    assert host.invite == invite
    goes_on(members, fatal)
    back = min(member.committed(after=fatal)["round"] for member in members)
    check_losses(finish(host, members), fatal, back)


def goes_on(members: list[Member], after: int) -> None:
    """Check that all commit a round after that one, as the same processes."""
    pids = [member.pid for member in members]
    for member in members:
        member.committed(after=after)
    assert [member.pid for member in members] == pids
