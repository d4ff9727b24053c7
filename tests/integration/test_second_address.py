"""The coordinator is killed in a round and started elsewhere from its files: the invite's second address finds it."""

import json
import shutil
import socket
from typing import Any

import pytest
from tests.integration.harness import (
    DOOMED_HOST,
    KILLED,
    ROUNDS_S,
    SHOAL,
    START_S,
    Swarm,
    eventually,
    finish,
    run_toml,
)

from shoal.peer.history.history_file import HISTORY_FILE, unpack_history

pytestmark = pytest.mark.integration


def free_ports() -> tuple[int, int]:
    """Return two ports that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        return one.getsockname()[1], two.getsockname()[1]


def said(swarm: Swarm, label: str, source: str) -> list[dict[str, Any]]:
    """Return the lines of ``shoal log --json`` for that source."""
    log = swarm.command(label, *SHOAL, "log", source, "--json")
    assert log.exit_code(START_S) == 0, log.tail()
    return [json.loads(line) for line in log.text().splitlines() if line.startswith("{")]


@pytest.mark.parametrize(("when", "event"), [("after", "RoundPlanned"), ("before", "VerdictGiven")])
def test_the_round_goes_on_at_the_second_address(swarm: Swarm, when: str, event: str) -> None:
    here, there = free_ports()
    both = ("--advertise", f"127.0.0.1:{here},127.0.0.1:{there}")
    host = swarm.host(run_toml(), launcher=(*DOOMED_HOST, when, event, "2"), bind=f"127.0.0.1:{here}", extra=both)
    assert f"127.0.0.1:{here},127.0.0.1:{there}/" in host.invite
    members = swarm.members(host.invite, "a", "b")
    pids = [member.pid for member in members]
    assert host.exit_code(START_S + ROUNDS_S) == KILLED, host.tail()
    ended = max(member.last_round() for member in members)

    elsewhere = swarm.folder / "elsewhere"
    shutil.copytree(host.state.parent, elsewhere / "state")
    moved = swarm.host(run_toml(), label="elsewhere", bind=f"127.0.0.1:{there}", extra=both)
    assert moved.invite == host.invite
    for member in members:
        member.committed(after=ended + 1)
    assert [member.pid for member in members] == pids
    # Who comes now finds it too, though nobody is at the first address any more.
    late = swarm.member(host.invite, "late")
    late.committed(within_s=START_S + ROUNDS_S)
    logs = {
        "invite": said(swarm, "log-of-invite", host.invite),
        "host": said(swarm, "log-of-host", str(moved.state)),
        "member": said(swarm, "log-of-member", str(members[0].folder / "state")),
    }
    # It fetches the history behind its work.
    (history,) = late.folder.glob(f"state/*/*/{HISTORY_FILE}")
    eventually(
        "the late one knows all rounds",
        lambda: len(unpack_history(history.read_bytes(), "late").verdicts) > ended,
        START_S,
    )
    verdicts = finish(moved, [*members, late])
    chain = [one.verdict.chain.hex() for one in verdicts]
    for source, lines in logs.items():
        assert len(lines) > ended + 1, source
        assert [line["chain"] for line in lines] == chain[: len(lines)], source
        assert all(line["signature_ok"] for line in lines), source
    # The one that came late knows the rounds from before, too.
    assert [line["chain"] for line in said(swarm, "log-of-late", str(late.folder / "state"))][: ended + 1] == chain[
        : ended + 1
    ]
    assert verdicts[ended + 1].verdict.committed, "the round that was under way ended there"
    for member in members:
        assert member.events("resync") == [], "the move cost nobody its work"
