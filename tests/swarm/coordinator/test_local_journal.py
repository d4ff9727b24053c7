"""Tests of local_journal: reading, leases, full disks, damage, and death at every step."""

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from tests.fakes.dying_disk import MOMENTS, MachineDied, disk, full_disk
from tests.fakes.journals import leased
from tests.swarm.coordinator.stories import RUN, events_in, state, state_after, story
from tests.swarm.coordinator.world import entry
from tests.swarm.samples import records

from shoal.swarm.coordinator.events import (
    EVENTS,
    CoordinatorStarted,
    JournalEvent,
    LeaseGranted,
    MemberLost,
    RunSnapshot,
    VerdictGiven,
    pack_event,
    unpack_event,
)
from shoal.swarm.coordinator.local_journal import EVENTS as EVENTS_KIND
from shoal.swarm.coordinator.local_journal import JOURNAL, VERDICTS, JournalFiles, LocalJournal
from shoal.swarm.coordinator.record_log import pack_file
from shoal.swarm.coordinator.stores.fenced_store import EPOCH_STEP
from shoal.swarm.errors import RunFileError, StorageError
from shoal.swarm.protocol.types import SampleRange


def lost(number: int) -> MemberLost:
    return MemberLost(peer=entry(1).peer, reason=f"reason {number}")


def granted(start: int) -> LeaseGranted:
    ranges = (SampleRange(start=start, stop=start + 5),)
    return LeaseGranted(peer=entry(1).peer, round=0, tokens_done=start, ranges=ranges)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def opened(folder: Path) -> LocalJournal:
    return leased(folder, RUN.hash, "toml")


@pytest.fixture
def journal(folder: Path) -> Iterator[LocalJournal]:
    made = opened(folder)
    yield made
    made.close()


def reopened(folder: Path) -> list[JournalEvent]:
    journal = opened(folder)
    try:
        return journal.read()
    finally:
        journal.close()


def tell(journal: LocalJournal, first: int = 0, stop: int | None = None, compact: bool = False) -> None:
    """Write these transactions of the story."""
    for events, snapshot in story()[first:stop]:
        journal.append(journal.next_index, events)
        if compact and snapshot is not None:
            journal.compact(snapshot)


def given_in(events: list[JournalEvent]) -> list[VerdictGiven]:
    return [event for event in events if isinstance(event, VerdictGiven)]


# Events ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(EVENTS) - {"RunSnapshot", "PipelineSnapshot"}))
def test_every_event_round_trips(name: str) -> None:
    @settings(max_examples=10, deadline=None)
    @given(records(EVENTS[name]))
    def check(event: JournalEvent) -> None:
        assert unpack_event(pack_event(event)) == event

    check()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"noise" * 20,
        pack_event(lost(1))[:-1],
        pack_event(lost(1)) + b"\0",
        msgpack.packb(7),
        msgpack.packb(["MemberLost"]),
        msgpack.packb(["MemberLost", 7]),
        msgpack.packb(["NoSuchEvent", {}]),
        msgpack.packb([["MemberLost"], {}]),
        msgpack.packb([{}, {}]),
        msgpack.packb(["MemberLost", {"peer": "x", "reason": ""}]),
        msgpack.packb(["MemberLost", {"peer": entry(1).peer, "reason": "", "more": 1}]),
        "text",
        None,
    ],
)
def test_a_whole_record_that_is_no_event(folder: Path, journal: LocalJournal, data: object) -> None:
    journal.append(journal.next_index, [lost(1)])
    journal.files.journal.append([(EVENTS_KIND, msgpack.packb([data]))])
    journal.close()
    with pytest.raises(StorageError, match=r"journal\.records: record 1 cannot be read"):
        reopened(folder)


# Writing and reading ----------------------------------------------------------------------------------------


def test_what_is_written_is_read_after_a_restart(folder: Path, journal: LocalJournal) -> None:
    events: list[JournalEvent] = [lost(1), granted(0), lost(2), granted(5)]
    journal.append(journal.next_index, events[:1])
    journal.append(journal.next_index, [])
    journal.append(journal.next_index, events[1:])
    assert journal.read() == events
    journal.close()
    assert reopened(folder) == events


@pytest.mark.parametrize("compact", [False, True])
def test_it_is_read_from_an_index_on(journal: LocalJournal, compact: bool) -> None:
    tell(journal, compact=compact)
    first, snapshots = journal.files.compacted, [snapshot for _, snapshot in story() if snapshot is not None]
    assert bool(first) == compact
    for from_index in range(len(story()) + 2):
        later = [event for events, _ in story()[max(from_index, first) :] for event in events]
        assert journal.read(from_index) == (snapshots[-1:] if from_index < first else []) + later


def test_every_lease_has_a_larger_epoch_whatever_the_clock_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    for now_ns in (10**18, 9 * 10**17, 10**18 + 5, 2 * 10**18):
        monkeypatch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
        journal = LocalJournal(folder, RUN.hash, "toml")
        epochs.append(journal.lease())
        journal.append(journal.next_index, [CoordinatorStarted(epoch=epochs[-1])])
        journal.close()
    assert epochs[0] == 10**18
    assert epochs[-1] == 2 * 10**18
    assert all(later - earlier >= EPOCH_STEP for earlier, later in itertools.pairwise(epochs))


@pytest.mark.parametrize("index", [0, 2])
def test_an_append_that_expects_another_index_is_refused(folder: Path, journal: LocalJournal, index: int) -> None:
    journal.append(0, [lost(1)])
    with pytest.raises(StorageError, match=rf"it has 1 transactions, and {index} were expected"):
        journal.append(index, [lost(2)])
    with pytest.raises(StorageError):
        journal.append(1, [lost(2)])
    journal.close()
    assert reopened(folder) == [lost(1)]


def test_an_append_after_another_writer_is_refused(folder: Path, journal: LocalJournal) -> None:
    journal.append(0, [lost(1)])
    let_go(folder)
    other = opened(folder)
    other.append(1, [lost(2)])
    with pytest.raises(StorageError, match="another process writes to it"):
        journal.append(1, [lost(3)])
    other.append(2, [lost(4)])
    for one in (journal, other):
        one.close()
    assert reopened(folder) == [lost(1), lost(2), lost(4)]


@pytest.mark.parametrize("compact", [False, True])
def test_a_run_comes_back_from_its_files(folder: Path, compact: bool) -> None:
    for number in range(len(story())):
        journal = opened(folder)
        assert state(journal.read()) == state_after(number)
        assert journal.next_index == number
        tell(journal, number, number + 1, compact)
        assert state(journal.read()) == state_after(number + 1)
        assert journal.verdicts() == given_in(events_in(number + 1))
        journal.close()


def test_verdicts_are_read_in_pages(folder: Path, journal: LocalJournal) -> None:
    told = given_in(events_in(len(story())))
    compact_at = next(number for number, (_, snapshot) in enumerate(story()) if snapshot and snapshot.round == 2)
    tell(journal, 0, compact_at + 1, compact=True)
    tell(journal, compact_at + 1)
    assert journal.rounds == len(told) == 4
    for first in range(6):
        for limit in (None, 0, 1, 2, 3, 9):
            assert journal.verdicts(first, limit) == (told[first:] if limit is None else told[first : first + limit])
    files = JournalFiles(folder)
    assert files.verdicts() == told
    files.close()


def test_others_read_while_it_is_written_and_compacted(folder: Path, journal: LocalJournal) -> None:
    told, done = given_in(events_in(len(story()))), threading.Event()
    wrong: list[object] = []

    def look() -> None:
        while not done.is_set():
            try:
                files = JournalFiles(folder, live=True)
                found = files.verdicts()
                files.close()
                wrong.extend([found] if found != told[: len(found)] else [])
            except StorageError as error:
                wrong.append(error)

    reader = threading.Thread(target=look)
    reader.start()
    tell(journal, compact=True)
    done.set()
    reader.join()
    assert wrong == []


def test_a_journal_that_has_grown_is_compacted(journal: LocalJournal) -> None:
    journal.compact_at_bytes = 6000
    compactions = 0
    for events, snapshot in story():
        journal.append(journal.next_index, events)
        before = journal.files.journal.size_bytes
        if snapshot and journal.wants_snapshot:
            journal.compact(snapshot)
            compactions += 1
            assert journal.files.journal.size_bytes < before
            assert not journal.wants_snapshot
    assert 1 <= compactions < 4
    assert state(journal.read()) == state_after(len(story()))


# Other files ------------------------------------------------------------------------------------------------


def test_another_run_file_is_refused(folder: Path, journal: LocalJournal) -> None:
    journal.append(journal.next_index, [lost(1)])
    journal.close()
    with pytest.raises(RunFileError) as refusal:
        leased(folder, b"s" * 32, "toml")
    assert str(folder) in str(refusal.value)
    assert "run.name" in str(refusal.value)
    assert reopened(folder) == [lost(1)]


def test_another_format_is_refused(folder: Path, journal: LocalJournal) -> None:
    journal.close()
    path = folder / JOURNAL
    path.write_bytes(path.read_bytes().replace(b"shoal journal 1\n", b"shoal journal 2\n"))
    with pytest.raises(StorageError, match="journal format 2, but this release reads format 1"):
        opened(folder)


def test_a_file_that_is_no_journal(folder: Path) -> None:
    folder.mkdir()
    (folder / JOURNAL).write_bytes(b"not a journal at all" * 500)
    with pytest.raises(StorageError, match=r"journal\.records: this is no journal"):
        opened(folder)
    assert (folder / JOURNAL).read_bytes().startswith(b"not a journal")


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be opened"):
        opened(tmp_path / "file" / "state")


@pytest.mark.parametrize("name", [JOURNAL, VERDICTS])
def test_a_file_is_missing(folder: Path, journal: LocalJournal, name: str) -> None:
    tell(journal, compact=True)
    journal.close()
    (folder / name).unlink()
    with pytest.raises(StorageError, match=name):
        opened(folder)
    assert not (folder / name).exists(), "nothing is made up"


@pytest.mark.parametrize("name", [JOURNAL, VERDICTS])
def test_a_file_is_an_older_copy(folder: Path, journal: LocalJournal, name: str) -> None:
    third = next(number for number, (_, snapshot) in enumerate(story()) if snapshot and snapshot.round == 3)
    tell(journal, 0, third, compact=True)
    older = (folder / name).read_bytes()
    tell(journal, third, compact=True)
    journal.close()
    (folder / name).write_bytes(older)
    with pytest.raises(StorageError, match="estore this folder from its backup"):
        opened(folder)


# The disk ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written_bytes", [0, 1, 60])
def test_a_full_disk(folder: Path, journal: LocalJournal, written_bytes: int) -> None:
    journal.append(journal.next_index, [lost(1)])
    with full_disk(folder, written_bytes), pytest.raises(StorageError, match="No space left") as refusal:
        journal.append(journal.next_index, [lost(2), lost(3)])
    assert "free some space" in str(refusal.value)
    with pytest.raises(StorageError):
        journal.append(journal.next_index, [lost(9999)])
    journal.close()
    assert reopened(folder) == [lost(1)], "no part of a transaction, and nothing after a gap"


def test_a_disk_too_full_to_compact(folder: Path, journal: LocalJournal, caplog: pytest.LogCaptureFixture) -> None:
    for events, snapshot in story():
        journal.append(journal.next_index, events)
        if snapshot is not None:
            with full_disk(folder, 10):
                journal.compact(snapshot)
            assert "cannot be compacted" in caplog.text
    assert state(journal.read()) == state_after(len(story()))
    journal.close()
    assert state(reopened(folder)) == state_after(len(story()))


def test_two_coordinators_on_one_journal(folder: Path, journal: LocalJournal) -> None:
    journal.append(journal.next_index, [lost(1)])
    with pytest.raises(StorageError, match="another coordinator"):
        opened(folder)
    journal.append(journal.next_index, [lost(2)])
    journal.close()
    assert reopened(folder) == [lost(1), lost(2)]


# Damage -----------------------------------------------------------------------------------------------------


def small_run(folder: Path) -> tuple[dict[str, bytes], list[int]]:
    """A journal that was compacted in the middle; returns its files, and how many of its transactions are whole up to
    each of the journal's records."""
    journal = opened(folder)
    second = next(number for number, (_, snapshot) in enumerate(story()) if snapshot and snapshot.round == 2)
    tell(journal, 0, second + 1, compact=True)
    tell(journal, second + 1, second + 4)
    counts = [second + 1 + number for number in range(4)]
    assert len(journal.files.journal.offsets) == len(counts)
    journal.close()
    return {name: (folder / name).read_bytes() for name in (JOURNAL, VERDICTS)}, counts


def places(size_bytes: int, edges: Iterable[int] = ()) -> list[int]:
    """Every byte of each record's head, all of the end, and each third one of the rest, of which all are covered by one
    checksum a record. Three and eight have no common divisor, so that every bit of a byte has its turn."""
    near = {at for edge in (0, *edges, size_bytes) for at in range(edge - 3, edge + 24)}
    return [at for at in range(size_bytes) if at % 3 == 0 or at in near]


def outcome(folder: Path, files: dict[str, bytes], counts: list[int]) -> int | None:
    """How many transactions it opens with, all of them as they were; None when it is refused and left as it was."""
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    refusal = None
    try:
        events = reopened(folder)
    except (StorageError, RunFileError) as error:
        refusal = str(error)
    if refusal is not None:
        assert str(folder) in refusal
        assert {name: (folder / name).read_bytes() for name in files} == files
        return None
    found = state(events)
    transactions = next((count for count in counts if found == state_after(count)), None)
    assert transactions is not None, "accepted, and changed"
    aside = [path.read_bytes() for path in folder.glob("*.damaged-*")]
    kept = sum(map(len, files.values())) - sum(len((folder / name).read_bytes()) for name in files)
    assert sum(map(len, aside)) == kept, "nothing is thrown away"
    return transactions


def test_no_flipped_byte_is_accepted(folder: Path) -> None:
    files, counts = small_run(folder)
    edges = record_ends(folder)
    ends = len(files[JOURNAL]) - last_record_bytes(folder)
    for name, data in files.items():
        for at in places(len(data), edges if name == JOURNAL else ()):
            flipped = data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
            found = outcome(folder, files | {name: flipped}, counts)
            is_last = name == JOURNAL and at >= ends
            assert found == (counts[-2] if is_last else None), f"{name} byte {at} of {len(data)}"


def record_ends(folder: Path) -> list[int]:
    files = JournalFiles(folder)
    ends = [*files.journal.offsets[1:], files.journal.size_bytes]
    files.close()
    return ends


def last_record_bytes(folder: Path) -> int:
    files = JournalFiles(folder)
    size = files.journal.size_bytes - files.journal.offsets[-1]
    files.close()
    return size


def test_a_file_that_was_cut_off_opens_at_the_last_good_record(folder: Path) -> None:
    files, counts = small_run(folder)
    ends = record_ends(folder)
    for length in places(len(files[JOURNAL]), ends):
        found = outcome(folder, files | {JOURNAL: files[JOURNAL][:length]}, counts)
        good = sum(length >= end for end in ends)
        assert found == (counts[good - 1] if good else None), f"cut at {length}"
    for length in places(len(files[VERDICTS])):
        assert outcome(folder, files | {VERDICTS: files[VERDICTS][:length]}, counts) is None


def test_a_warning_names_what_was_moved_aside(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = opened(folder)
    journal.append(journal.next_index, [lost(1)])
    end = journal.files.journal.size_bytes
    journal.append(journal.next_index, [lost(2)])
    journal.close()
    data = (folder / JOURNAL).read_bytes()
    for number in (1, 2):
        (folder / JOURNAL).write_bytes(data[:-3] + bytes(3))
        assert reopened(folder) == [lost(1)]
        aside = folder / f"{JOURNAL}.damaged-{number}"
        assert aside.read_bytes() == data[end:-3] + bytes(3)
        assert str(aside) in caplog.text
        assert f"record 1 at byte {end}" in caplog.text


def test_a_refusal_says_what_to_do(folder: Path) -> None:
    files, _ = small_run(folder)
    (folder / JOURNAL).write_bytes(files[JOURNAL].replace(b"RunSnapshot", b"RunSnapshoT"))
    with pytest.raises(StorageError) as refusal:
        opened(folder)
    for words in (str(folder / JOURNAL), "record 0 at byte", "does not match its check", "backup", "--state"):
        assert words in str(refusal.value)


def test_records_in_another_order_are_refused(folder: Path) -> None:
    journal = opened(folder)
    for number in range(3):
        journal.append(journal.next_index, [lost(number)])
    places = [*journal.files.journal.offsets, journal.files.journal.size_bytes]
    journal.close()
    data = (folder / JOURNAL).read_bytes()
    one, two, three = (data[start:stop] for start, stop in itertools.pairwise(places))
    for wrong in ([two, one, three], [one, three], [one, two, two, three], [three]):
        (folder / JOURNAL).write_bytes(data[: places[0]] + b"".join(wrong))
        with pytest.raises(StorageError, match="does not follow the record before it"):
            opened(folder)


def test_an_absurd_head(folder: Path, journal: LocalJournal) -> None:
    journal.close()
    for head in ({"a": 1}, {"run_hash": RUN.hash, "archived": -1}, {"run_hash": RUN.hash, "archived": "x"}):
        (folder / JOURNAL).write_bytes(pack_file("journal", head, []))
        with pytest.raises(StorageError, match="its head has no archived"):
            opened(folder)


# Death at every step ----------------------------------------------------------------------------------------


def live(folder: Path) -> int:
    """Open, tell the rest of the story, compacting at each verdict; returns how many transactions were written."""
    journal = opened(folder)
    done.append(journal.next_index)
    for events, snapshot in story()[journal.next_index :]:
        journal.append(journal.next_index, events)
        done.append(done[-1] + 1)
        if snapshot is not None:
            journal.compact(snapshot)
    journal.close()
    return done[-1]


done: list[int] = []


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_machine_dies_at_every_step(tmp_path: Path, moment: str) -> None:
    with disk() as untouched:
        live(tmp_path / "whole")
    assert "replace journal.records" in untouched.steps
    for number in range(len(untouched.steps)):
        folder, about = tmp_path / str(number), f"{moment} step {number}, {untouched.steps[number]}"
        done.clear()
        with disk(number, moment), pytest.raises(MachineDied):
            live(folder)
        written = done[-1] if done else 0
        let_go(folder)
        events = reopened(folder)
        found = [count for count in (written, written + 1) if state(events) == state_after(count)]
        assert found, about
        live(folder)
        assert state(reopened(folder)) == state_after(len(story())), about
        assert JournalFiles(folder).verdicts() == given_in(events_in(len(story()))), about


def let_go(folder: Path) -> None:
    """The dead hold no lock; in a test they still have it open."""
    path = folder / "lock"
    if path.exists():
        path.unlink()


def test_a_journal_is_for_its_owner_and_readers(folder: Path, journal: LocalJournal) -> None:
    assert os.stat(folder / JOURNAL).st_mode & 0o777 == 0o644


def test_a_snapshot_is_what_a_compacted_journal_begins_with(journal: LocalJournal) -> None:
    tell(journal, compact=True)
    assert [type(event) for event in journal.read()] == [RunSnapshot]


def test_a_record_that_went_bad_meanwhile_is_not_compacted_and_stops_nobody(
    journal: LocalJournal, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = b""
    for events, snapshot in story():
        journal.append(journal.next_index, events)
        if snapshot is not None:
            whole = (folder / JOURNAL).read_bytes()
            (folder / JOURNAL).write_bytes(whole.replace(b"VerdictGiven", b"VerdictGiveN"))
            journal.compact(snapshot)
            assert "cannot be compacted" in caplog.text
            break
    journal.append(journal.next_index, [lost(1)])
    damaged = (folder / JOURNAL).read_bytes()
    assert damaged.startswith(whole.replace(b"VerdictGiven", b"VerdictGiveN"))
    assert len(damaged) > len(whole)
