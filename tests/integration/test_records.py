"""Round records in real processes: their writer is killed at every step, and returning members catch up by them."""

import json

import pytest
from tests.integration.harness import (
    CALM,
    DOOMED_MEMBER,
    KILLED,
    ROUNDS_S,
    SHOAL,
    START_S,
    Member,
    Swarm,
    eventually,
    finish,
    run_toml,
)

from shoal.peer.history.round_records import RECORDS, open_record

pytestmark = pytest.mark.integration


def whole_records(member: Member) -> list[int]:
    """Return the rounds whose records are on the member's disk; all of them have to be whole."""
    paths = sorted(member.folder.glob(f"state/*/*/{RECORDS}/*.safetensors"))
    for path in paths:
        assert any(open_record(path).read())
    return [int(path.stem) for path in paths]


def leftovers(member: Member) -> int:
    return len(list(member.folder.glob(f"state/*/*/{RECORDS}/.*")))


def test_a_member_is_killed_as_it_keeps_a_round(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    others = swarm.members(host.invite, "a", "b")
    doomed = swarm.member(host.invite, "doomed")
    arguments = doomed.command[doomed.command.index("join") :]
    peer = doomed.peer
    left = []
    for number, step in enumerate(("recording", "half_recorded", "recorded", "published", "removing")):
        armed = swarm.folder / f"armed-{number}"
        doomed.kill()
        doomed.command = [*DOOMED_MEMBER, step, "1", str(armed), *arguments]
        doomed.start()
        doomed.committed(within_s=START_S + ROUNDS_S)
        eventually("what its predecessor left is removed", lambda: not leftovers(doomed), ROUNDS_S, doomed.tail)
        armed.touch()
        assert doomed.exit_code(ROUNDS_S) == KILLED, doomed.tail()
        left.append(leftovers(doomed))
        whole_records(doomed)
    assert left == [0, 1, 1, 0, 0]
    doomed.command = [*CALM, *arguments]
    doomed.start()
    doomed.committed(within_s=START_S + ROUNDS_S)
    assert doomed.peer == peer
    finish(host, [doomed, *others])
    assert len(whole_records(doomed)) >= 3
    assert [one for one in others if one.events("resync")] == [], "nobody else has lost anything"


def test_a_member_that_comes_back_catches_up_by_what_was_committed(swarm: Swarm) -> None:
    host = swarm.host(run_toml(codec="int2", max_s=4))
    *others, late = swarm.members(host.invite, "a", "b", "late")
    for member in (late, *others):
        member.committed(within_s=START_S + ROUNDS_S)
    late.kill()
    gone = late.last_round()
    others[0].committed(after=gone + 1)
    late.start()
    synced = late.event("synced", START_S + ROUNDS_S)
    assert synced["caught_up"] >= 1, late.tail()
    late.committed()
    finish(host, [late, *others])
    replay = swarm.command("replay", *SHOAL, "replay", str(others[0].folder), "--json")
    assert replay.exit_code(START_S) == 0, replay.tail()
    rows = [json.loads(line) for line in replay.log.read_text().splitlines() if line.startswith("{")]
    assert any(row["equal"] for row in rows), rows
    digests = {one["round"]: one["digest"] for one in others[0].all_events() if one["event"] == "committed"}
    assert all(digests[row["round"]] == row["digest"] for row in rows)
