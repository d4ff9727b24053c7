import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from tests.swarm.coordinator.world import World, entry, journaled, run_file
from tests.swarm.samples import records

from shoal.swarm.coordinator.facts import FACTS, Fact, LeaseGranted, LeasesHeld, MemberLost, pack_fact, unpack_fact
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.machine import RunMachine
from shoal.swarm.errors import RunFileError, StorageError
from shoal.swarm.messages import SampleRange

RUN = b"r" * 32


def lost(number: int) -> MemberLost:
    return MemberLost(peer=entry(1).peer, reason=f"reason {number}")


def granted(start: int) -> LeaseGranted:
    ranges = (SampleRange(start=start, stop=start + 5),)
    return LeaseGranted(peer=entry(1).peer, round=0, tokens_done=start, ranges=ranges)


HELD = LeasesHeld(fresh=9, pool=(), held={entry(1).peer: (SampleRange(start=0, stop=9),)}, answered=(granted(0),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    opened = Journal(path, RUN, "toml")
    yield opened
    opened.close()


def reopened(path: Path) -> list[Fact]:
    journal = Journal(path, RUN, "toml")
    try:
        return journal.read()
    finally:
        journal.close()


@pytest.mark.parametrize("name", sorted(set(FACTS) - {"LeasesHeld"}))
def test_every_fact_round_trips(name: str) -> None:
    @settings(max_examples=10, deadline=None)
    @given(records(FACTS[name]))
    def check(fact: Fact) -> None:
        assert unpack_fact(pack_fact(fact)) == fact

    check()


def test_the_ledger_round_trips() -> None:
    assert unpack_fact(pack_fact(HELD)) == HELD


def test_what_is_written_is_read_after_a_restart(path: Path, journal: Journal) -> None:
    facts = [lost(1), granted(0), HELD, lost(2)]
    journal.write(facts[:1])
    journal.write(facts[1:])
    journal.close()
    assert reopened(path) == [lost(1), HELD, lost(2)]


def test_grants_go_with_the_next_verdict(path: Path, journal: Journal) -> None:
    journal.write([granted(0), lost(1), granted(5)])
    assert journal.read() == [granted(0), lost(1), granted(5)]
    journal.write([HELD])
    journal.write([granted(9), lost(2)])
    assert journal.read() == [lost(1), HELD, granted(9), lost(2)]
    journal.write([HELD, granted(20)])
    assert journal.read() == [lost(1), lost(2), HELD, granted(20)]


@pytest.mark.parametrize("algorithm", ["diloco", "virtual_batch"])
def test_a_run_comes_back_from_its_file(path: Path, algorithm: str) -> None:
    run = run_file(algorithm)
    journal = Journal(path, run.hash, "toml")
    world = World(run, 3)
    written = 0
    while len(world.verdicts) < 3:
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)
        journal.write(world.facts[written:])
        written = len(world.facts)
        machine = RunMachine(run, lambda data: data, world.now_s, 0)
        machine.replay(journal.read(), world.now_s)
        assert journaled(machine) == journaled(world.machine)
    assert [one for one in journal.read() if one in world.verdicts] == world.verdicts
    assert journal.verdicts() == world.verdicts
    assert journal.verdicts(1, 1) == world.verdicts[1:2]
    assert journal.verdicts(2, 99) == world.verdicts[2:]
    assert journal.verdicts(3) == journal.verdicts(2**62, 2**62) == []
    journal.close()


def test_another_run_file_is_refused(path: Path, journal: Journal) -> None:
    journal.write([lost(1)])
    journal.close()
    with pytest.raises(RunFileError) as refusal:
        Journal(path, b"s" * 32, "toml")
    assert str(path) in str(refusal.value)
    assert "run.name" in str(refusal.value)
    assert reopened(path) == [lost(1)]


def test_another_format_is_refused(path: Path, journal: Journal) -> None:
    journal.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = '2' WHERE key = 'format'")
    with pytest.raises(StorageError, match="journal format 2, this release reads 1"):
        Journal(path, RUN, "toml")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"noise" * 20,
        pack_fact(lost(1))[:-1],
        pack_fact(lost(1)) + b"\0",
        msgpack.packb(7),
        msgpack.packb(["MemberLost"]),
        msgpack.packb(["MemberLost", 7]),
        msgpack.packb(["NoSuchFact", {}]),
        msgpack.packb([["MemberLost"], {}]),
        msgpack.packb([{}, {}]),
        msgpack.packb(["MemberLost", {"peer": "x", "reason": ""}]),
        msgpack.packb(["MemberLost", {"peer": entry(1).peer, "reason": "", "more": 1}]),
        "text",
        None,
    ],
)
def test_a_damaged_row(path: Path, journal: Journal, data: object) -> None:
    journal.write([lost(1), lost(2)])
    journal.close()
    with sqlite3.connect(path) as database:
        if data is None:
            database.execute("DROP TABLE facts")
            database.execute("CREATE TABLE facts (id INTEGER PRIMARY KEY, kind TEXT, data BLOB)")
            database.execute("INSERT INTO facts VALUES (1, 'MemberLost', NULL)")
        else:
            database.execute("UPDATE facts SET data = ? WHERE id = 2", (data,))
    with pytest.raises(StorageError, match=r"journal\.sqlite: the journal cannot be read"):
        reopened(path)


def test_a_file_that_is_no_journal(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 500)
    with pytest.raises(StorageError, match="cannot be opened"):
        Journal(path, RUN, "toml")
    assert path.read_bytes().startswith(b"not a database")


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be opened"):
        Journal(tmp_path / "file" / "journal.sqlite", RUN, "toml")


def test_a_full_disk(path: Path, journal: Journal) -> None:
    journal.write([lost(1)])
    database = journal._database
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    many = [lost(number) for number in range(2, 3000)]
    with pytest.raises(StorageError, match="full") as refusal:
        journal.write(many)
    assert "Free some space" in str(refusal.value) or "free some space" in str(refusal.value)
    database.execute(f"PRAGMA max_page_count = {10 * pages + 1000}")
    with pytest.raises(StorageError):
        journal.write([lost(9999)])
    journal.close()
    assert reopened(path) == [lost(1)], "no part of a transaction, and nothing after a gap"


def test_a_read_only_journal(path: Path, journal: Journal) -> None:
    journal._database.execute("PRAGMA query_only = 1")
    with pytest.raises(StorageError, match="cannot be written"):
        journal.write([lost(1)])


def test_two_coordinators_on_one_journal(path: Path, journal: Journal) -> None:
    journal.write([lost(1)])
    other = Journal(path, RUN, "toml")
    other.write([lost(2)])
    with pytest.raises(StorageError, match="another coordinator"):
        journal.write([lost(3)])
    other.write([lost(4), HELD])
    assert other.read() == [lost(1), lost(2), lost(4), HELD]
    other.close()


def test_nothing_to_write(journal: Journal) -> None:
    journal.write([])
    assert journal.read() == []


def test_verdicts_are_read_from_the_disk_beside_a_write(path: Path, journal: Journal) -> None:
    world = World(run_file("virtual_batch"), 2)
    while len(world.verdicts) < 2:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    journal.write(world.verdicts[:1])
    # As another thread sees it that asks in the middle of the next write.
    journal._database.execute("BEGIN IMMEDIATE")
    journal._database.execute(
        "INSERT INTO facts (kind, data) VALUES ('VerdictGiven', ?)", (pack_fact(world.verdicts[1]),)
    )
    assert journal.verdicts() == world.verdicts[:1]
    journal._database.execute("ROLLBACK")
