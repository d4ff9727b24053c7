"""Real processes: records of rounds as their writer is killed, and members that come back by what rounds committed."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence

import pytest
from tests.fakes.rounds import protocol_3_digest
from tests.integration.harness import (
    CALM,
    DOOMED_MEMBER,
    HERE,
    KILLED,
    ROUNDS_S,
    SHOAL,
    START_S,
    Host,
    Member,
    Process,
    Swarm,
    eventually,
    finish,
    run_toml,
)

from shoal.peer.round_records import RECORDS, open_record
from shoal.swarm.averaging.part_digest import part_digest
from shoal.swarm.averaging.results import chunks_of
from shoal.swarm.errors import ProtocolMismatch

pytestmark = pytest.mark.integration

PROTOCOL_3 = (sys.executable, str(HERE / "protocol_3.py"))


def whole_records(member: Member) -> list[int]:
    """The rounds whose records are there; all of them have to be whole."""
    paths = sorted(member.folder.glob(f"state/*/*/{RECORDS}/*.safetensors"))
    for path in paths:
        assert any(open_record(path).read())
    return [int(path.stem) for path in paths]


def digested_by(member: Member, digest: Callable[[Iterable[memoryview]], bytes]) -> set[int]:
    """The rounds of its records whose digests were made like this."""
    found = set()
    for path in member.folder.glob(f"state/*/*/{RECORDS}/*.safetensors"):
        record = open_record(path)
        chunks, plan = record.read(), record.verdict.plan
        assert plan is not None
        parts = [[one for index in chunks_of(plan, part) if (one := chunks[index])] for part in plan.parts]
        if [digest(part) if part else None for part in parts] == list(record.verdict.digests):
            found.add(record.verdict.round)
    return found


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
    replayed(swarm, others[0], others[0])


def replayed(swarm: Swarm, member: Member, witness: Member) -> list[int]:
    """The rounds that ``shoal replay`` makes again of what a member kept, all as ``witness`` had them."""
    replay = swarm.command("replay", *SHOAL, "replay", str(member.folder), "--json")
    assert replay.exit_code(START_S) == 0, replay.tail()
    rows = [json.loads(line) for line in replay.log.read_text().splitlines() if line.startswith("{")]
    assert any(row["equal"] for row in rows), rows
    digests = {one["round"]: one["digest"] for one in witness.all_events() if one["event"] == "committed"}
    assert all(digests[row["round"]] == row["digest"] for row in rows)
    return [row["round"] for row in rows]


def test_a_run_of_protocol_version_3_goes_on_with_this_release(swarm: Swarm) -> None:
    host = swarm.host(run_toml(codec="int2", max_s=4), launcher=PROTOCOL_3)
    *others, late = everybody = swarm.members(host.invite, "a", "b", "late", launcher=PROTOCOL_3)
    for member in (late, *others):
        member.committed(within_s=START_S + ROUNDS_S)
    stranger = swarm.member(host.invite, "stranger")
    assert stranger.exit_code(START_S) == ProtocolMismatch.exit_code, stranger.tail()
    stranger.says("install the same release of shoal on both machines")
    late.kill()
    others[0].committed(after=late.last_round() + 1)
    for process in (*others, host):
        process.kill()
    of_before = digested_by(others[0], protocol_3_digest)
    assert max(of_before) > late.last_round()

    for process in (host, *others):
        again(process, SHOAL if process is host else CALM)
    for member in others:
        member.committed(within_s=START_S + ROUNDS_S)
    again(late, CALM)
    synced = late.event("synced", START_S + ROUNDS_S)
    assert synced["caught_up"] >= 2, late.tail()
    late.committed()
    finish(host, everybody)
    assert digested_by(others[0], protocol_3_digest) >= of_before
    of_now = digested_by(others[0], part_digest)
    assert min(of_now) > max(of_before)
    assert not of_before.isdisjoint(replayed(swarm, late, others[0]))


def again(process: Process, launcher: Sequence[str]) -> None:
    """Start what it is with another launcher."""
    role = "host" if isinstance(process, Host) else "join"
    process.command = [*launcher, *process.command[process.command.index(role) :]]
    process.start()
