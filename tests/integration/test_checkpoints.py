"""Members are killed at every step of saving a checkpoint; the next start finds a whole one and goes on from it."""

import sys
from pathlib import Path

import pytest
from tests.integration.harness import (
    CALM,
    DOOMED_MEMBER,
    HERE,
    KILLED,
    LEAVE_S,
    LOOPBACK,
    ROUNDS_S,
    START_S,
    Member,
    Swarm,
    finish,
    run_toml,
)

from shoal.peer.offline.verify import Verified, find_checkpoints, verify_checkpoints

pytestmark = pytest.mark.integration

KEEP_TWO = ("--keep-checkpoints", "2")


def whole_rounds(member: Member) -> list[int]:
    """Return the rounds of the member's checkpoints, oldest first; all of them have to be whole."""
    results = verify_checkpoints(find_checkpoints(member.folder / "state"))
    assert all(isinstance(one, Verified) for one in results), results
    return [one.manifest.round for one in results if isinstance(one, Verified)]


def hidden(member: Member) -> set[Path]:
    return {path for path in (member.folder / "state").glob("**/checkpoints/.*") if path.is_dir()}


# The peer's own while the round is averaged, then the residual, anchor, outer, verdicts, manifest: in this order.
@pytest.mark.parametrize(
    "deaths",
    [
        ["saving 1", "saved 1", "saving 2", "saved 2"],
        ["saving 4", "saved 4", "saving 5", "saved 5"],
        ["saving 6", "saved 6", "named 1", "retiring 1"],
    ],
    ids=["own", "state", "end"],
)
def test_a_member_is_killed_as_it_saves(swarm: Swarm, deaths: list[str]) -> None:
    host = swarm.host(run_toml(codec="int2"))  # rounds of few bytes: whoever missed some does not fetch a state instead
    other = swarm.member(host.invite, "other")
    doomed = swarm.member(host.invite, "doomed", extra=KEEP_TWO)
    arguments = doomed.command[doomed.command.index("join") :]
    doomed.committed(within_s=START_S + ROUNDS_S)
    doomed.leave()
    for number, death in enumerate(deaths):
        before, left = whole_rounds(doomed), hidden(doomed)
        armed = swarm.folder / f"armed-{number}"
        doomed.command = [*DOOMED_MEMBER, *death.split(), str(armed), *arguments]
        doomed.start()
        assert doomed.event("synced", START_S)["checkpoint"] == before[-1], death
        assert not left & hidden(doomed), "what was left half done is gone"
        doomed.committed(within_s=ROUNDS_S)
        armed.touch()
        assert doomed.exit_code(ROUNDS_S) == KILLED, doomed.tail()
        assert hidden(doomed) or death.startswith("named"), "it was killed in the midst of it"
    rounds = whole_rounds(doomed)
    doomed.command = [*CALM, *arguments]
    doomed.start()
    assert doomed.event("synced", START_S)["checkpoint"] == rounds[-1]
    back = doomed.committed(within_s=ROUNDS_S)["round"]
    other.event("committed", round=back)
    assert other.events("resync") == []
    finish(host, [doomed, other])
    assert not hidden(doomed)
    assert len(whole_rounds(doomed)) == 2


def test_no_checkpoint_is_kept_where_none_is_wanted(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    member = swarm.member(host.invite, "member", extra=("--keep-checkpoints", "off"))
    member.committed(within_s=START_S + ROUNDS_S)
    member.leave()
    kept = {path.name for path in (member.folder / "state").glob("*/*/*")}
    assert kept == {"history.msgpack", "rounds", "traffic.json"}, "what others may lack of the run, which is little"
    host.stop()


STEADY = """
[run]
name = "steady"
[recipe]
name = "own"
[data]
source = "own"
[averaging]
codec = "float32"
[round]
tokens = 32
max_s = 3600
patience_s = 3
"""
STEADY_LOOP = (sys.executable, str(HERE / "steady_loop.py"))


def test_who_was_stopped_trains_on_with_the_same_bits(swarm: Swarm) -> None:
    digests = []
    for label, stops in (("straight", ["5"]), ("stopped", ["2", "3", "5"])):
        host = swarm.host(STEADY, f"{label}-host")
        folder = swarm.folder / label
        folder.mkdir()
        for number, stop in enumerate(stops):
            loop = swarm.command(f"{label}-{number}", *STEADY_LOOP, host.invite, str(folder), stop, LOOPBACK)
            assert loop.exit_code(START_S + ROUNDS_S) == 0, loop.tail()
        digests.append([line for line in loop.text().splitlines() if line.startswith("version 5")])
        host.interrupt()
        host.exit_code(LEAVE_S)
    assert len(digests[0]) == 1
    assert digests[0] == digests[1]
