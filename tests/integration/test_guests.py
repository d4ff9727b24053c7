"""A guest's terms on real processes: a limited rate, a pause by the machine's owner, and a run after the other."""

import asyncio

import pytest
from tests.integration.harness import CALM, LEAVE_S, ROUNDS_S, SHOAL, START_S, Swarm, eventually, finish, run_toml

from shoal.peer.terminal.views import status_table
from shoal.swarm.client.observer import get_status
from shoal.swarm.protocol.invite import Invite

pytestmark = pytest.mark.integration

UPLOAD_BPS = 4e5
SLOW = (*CALM[:-1], "0.2")
"""A member that leaves the cores to the one that starts twice."""


@pytest.mark.slow
def test_a_guest_keeps_to_its_rate_and_is_paused_and_resumed(swarm: Swarm) -> None:
    """A round is 0.24 MB, which takes 5 s at the guest's rate and next to nothing without."""
    host = swarm.host(run_toml(width=128, patience_s=8.0))
    other = swarm.member(host.invite, "other", launcher=SLOW)
    guest = swarm.member(host.invite, "guest", launcher=SHOAL, extra=("--max-upload", "400kbit"))
    first, pid = guest.committed(within_s=ROUNDS_S), guest.pid
    last = guest.committed(after=first["round"] + 1)
    sent_bytes = last["bytes_sent"] - first["bytes_sent"]
    assert sent_bytes > 300_000, "rounds are too small to show a rate"
    assert 8 * sent_bytes / (last["time"] - first["time"]) <= 1.02 * UPLOAD_BPS

    state = str(guest.folder / "state")
    pause = swarm.command("pause", *SHOAL, "pause", "reef", "--state", state)
    assert pause.exit_code(LEAVE_S) == 0, pause.tail()
    paused = guest.event("paused", LEAVE_S)
    assert paused["until"] == "its owner resumes it"
    assert guest.events("left"), "it did not leave in an orderly way"
    assert guest.pid == pid
    invite = Invite.parse(host.invite)
    status = asyncio.run(get_status(invite))
    mine = next(one for one in status.members if one.name == "guest")
    assert (mine.alive, mine.left, mine.trouble) == (False, "paused", "until its owner resumes it")
    assert status_table(status)
    other.committed(after=other.last_round() + 1)  # the run goes on

    resume = swarm.command("resume", *SHOAL, "resume", "reef", "--state", state)
    assert resume.exit_code(LEAVE_S) == 0, resume.tail()
    back = eventually("it joins again", lambda: guest.events("joined")[1:] or None, ROUNDS_S, guest.tail)[0]
    again = eventually(
        "it commits a round again",
        lambda: [one for one in guest.events("committed", included=True) if one["time"] > back["time"]] or None,
        ROUNDS_S,
        guest.tail,
    )
    assert again[0]["round"] > last["round"]
    finish(host, [other, guest])


def test_when_a_run_ends_the_next_one_is_joined(swarm: Swarm) -> None:
    first = swarm.host(run_toml(name="reef", rounds=1), "first")
    second = swarm.host(run_toml(name="kelp"), "second")
    invite = swarm.folder / "kelp.invite"
    invite.write_text(second.invite)
    guest = swarm.member(first.invite, "guest", launcher=SHOAL, extra=("--then", f"@{invite}"))
    guest.event("joined", START_S, run="reef")
    guest.event("joined", START_S, run="kelp")
    guest.committed(after=0, within_s=START_S)  # reef has no such round
    guest.leave()
    second.stop()
    first.stop()
