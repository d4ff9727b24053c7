"""A backup is the journal at every moment, never stops it, and is never overwritten by something older."""

import shutil
import stat
from pathlib import Path

import pytest
from tests.fakes.dying_disk import MOMENTS, MachineDied, disk, full_disk
from tests.fakes.journals import leased
from tests.swarm.coordinator.stories import RUN, state, state_after, story

from shoal.swarm.coordinator import local_journal as journal_module
from shoal.swarm.coordinator.local_journal import JOURNAL, VERDICTS, Backup, LocalJournal
from shoal.swarm.errors import StorageError

ALL = len(story())
SECOND = next(number for number, (_, snapshot) in enumerate(story()) if snapshot and snapshot.round == 2) + 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.0)


class Place:
    """A run's folder, and that of its backup."""

    def __init__(self, folder: Path) -> None:
        self.state, self.backup = folder / "state", folder / "backup"

    def open(self) -> LocalJournal:
        backup = Backup(self.backup)
        backup.keep("identity", b"a key", 0o600)
        return leased(self.state, RUN.hash, "toml", backup)

    def live(self, stop: int = ALL, compact: bool = True, told: list[int] | None = None) -> None:
        """Open, write up to this transaction of the story, end."""
        journal = self.open()
        for number in range(journal.next_index, stop):
            events, snapshot = story()[number]
            journal.append(journal.next_index, events)
            if told is not None:
                told.append(number + 1)
            if compact and snapshot is not None:
                journal.compact(snapshot)
        journal.close()

    def same(self) -> bool:
        return all(
            (self.state / name).read_bytes() == (self.backup / name).read_bytes() for name in (JOURNAL, VERDICTS)
        )

    def let_go(self) -> None:
        """The dead hold no locks; in a test they still have them open."""
        for folder in (self.state, self.backup):
            (folder / "lock").unlink(missing_ok=True)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def transactions(folder: Path) -> int:
    """How many another machine would go on from; all of them as they were."""
    journal = leased(folder, RUN.hash, "toml")
    events, found = journal.read(), journal.next_index
    journal.close()
    assert state(events) == state_after(found)
    return found


def test_every_record_is_there_when_it_is_written(place: Place) -> None:
    journal = place.open()
    assert place.same()
    for events, snapshot in story():
        journal.append(journal.next_index, events)
        assert place.same()
        if snapshot is not None:
            journal.compact(snapshot)
            assert place.same()
    journal.close()
    assert transactions(place.backup) == ALL
    assert (place.backup / "identity").read_bytes() == b"a key"
    assert stat.S_IMODE((place.backup / "identity").stat().st_mode) == 0o600


@pytest.mark.parametrize("stop", [0, 3, SECOND, ALL])
def test_another_start_goes_on_with_it(place: Place, stop: int) -> None:
    place.live(stop)
    place.live(ALL - 1)
    assert place.same()


def test_a_backup_that_begins_late(place: Place) -> None:
    journal = leased(place.state, RUN.hash, "toml")
    for events, snapshot in story()[:SECOND]:
        journal.append(journal.next_index, events)
        if snapshot is not None:
            journal.compact(snapshot)
    journal.close()
    place.live(SECOND + 2)
    assert place.same()


def test_a_backup_from_before_the_journal_was_compacted(place: Place) -> None:
    place.live(SECOND - 2)
    older = place.backup.with_name("older")
    shutil.copytree(place.backup, older)
    place.live(ALL)
    shutil.rmtree(place.backup)
    older.rename(place.backup)
    place.live(ALL)
    assert place.same()


def test_it_goes_on_on_another_machine(place: Place, tmp_path: Path) -> None:
    place.live(SECOND + 1)
    elsewhere = Place(tmp_path / "elsewhere")
    shutil.copytree(place.backup, elsewhere.state)
    elsewhere.live(ALL)
    assert transactions(elsewhere.state) == ALL


@pytest.mark.parametrize("written_bytes", [0, 30])
def test_a_full_disk_does_not_stop_the_run_and_is_caught_up(
    place: Place, caplog: pytest.LogCaptureFixture, written_bytes: int
) -> None:
    journal = place.open()
    told = iter(story())
    for away in (False, True, False, True):
        for events, snapshot in [next(told), next(told), next(told)]:
            if away:
                with full_disk(place.backup, written_bytes):
                    journal.append(journal.next_index, events)
                    if snapshot is not None:
                        journal.compact(snapshot)
                assert not place.same()
                assert "CANNOT BE WRITTEN" in caplog.text
                assert str(place.backup) in caplog.text
            else:
                journal.append(journal.next_index, events)
                assert place.same()
    for events, snapshot in told:
        with full_disk(place.backup):
            journal.append(journal.next_index, events)
            if snapshot is not None:
                journal.compact(snapshot)
    assert transactions_of_copy(place) < journal.next_index == ALL
    journal.close()
    caplog.clear()
    place.live()
    assert place.same()


def transactions_of_copy(place: Place) -> int:
    """While the backup is open for writing."""
    copy = place.backup.with_name("copy")
    shutil.copytree(place.backup, copy)
    return transactions(copy)


def test_a_place_that_is_not_there_yet(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.backup.write_text("in the way")
    journal = place.open()
    journal.append(journal.next_index, story()[0][0])
    assert "CANNOT BE WRITTEN" in caplog.text
    behind_s = journal.backup_behind_s
    assert behind_s is not None
    assert 0 < behind_s < (journal.backup_behind_s or 0)
    place.backup.unlink()
    journal.append(journal.next_index, story()[1][0])
    assert "complete again" in caplog.text
    assert journal.backup_behind_s == 0
    assert place.same()
    journal.close()


def test_a_place_that_is_gone_when_the_journal_is_compacted(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    journal = place.open()
    away = place.backup.with_name("away")
    for number, (events, snapshot) in enumerate(story()):
        journal.append(journal.next_index, events)
        if snapshot is not None and number + 1 == SECOND:
            place.backup.rename(away)
            place.backup.write_text("in the way")
            journal.compact(snapshot)
            assert "CANNOT BE WRITTEN" in caplog.text
    assert not place.backup.is_dir()
    place.backup.unlink()
    away.rename(place.backup)
    journal.append(journal.next_index, story()[0][0])
    assert place.same()
    journal.close()


def test_tries_are_not_made_at_every_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 3600.0)
    journal = place.open()
    with full_disk(place.backup):
        journal.append(journal.next_index, story()[0][0])
    journal.append(journal.next_index, story()[1][0])
    assert not place.same(), "it was not tried again"
    journal.close()


# What is older, or other ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("older_at", "at"), [(ALL - 1, ALL), (ALL - 3, ALL), (0, ALL), (SECOND + 1, SECOND + 2), (SECOND, SECOND + 1)]
)
def test_an_outdated_copy_does_not_overwrite_the_backup(place: Place, older_at: int, at: int) -> None:
    place.live(older_at)
    older = place.state.with_name("older")
    shutil.copytree(place.state, older)
    place.live(at)
    shutil.rmtree(place.state)
    older.rename(place.state)
    before = {path.name: path.read_bytes() for path in place.backup.iterdir()}
    with pytest.raises(StorageError, match="outdated copy") as refusal:
        place.open()
    assert "--state" in str(refusal.value)
    assert {path.name: path.read_bytes() for path in place.backup.iterdir()} == before


def test_a_history_that_parted_does_not_overwrite_the_backup(place: Place) -> None:
    place.live(SECOND - 2)
    copy = place.state.with_name("copy")
    shutil.copytree(place.state, copy)
    place.live(SECOND - 1)
    other = leased(copy, RUN.hash, "toml")
    lease = story()[0][0]
    for _ in range(4):
        other.append(other.next_index, lease)
    other.close()
    with pytest.raises(StorageError, match="outdated copy"):
        leased(copy, RUN.hash, "toml", Backup(place.backup))


def test_the_backup_of_another_run(place: Place, tmp_path: Path) -> None:
    place.live(3)
    with pytest.raises(StorageError, match="another run"):
        leased(tmp_path / "other", b"o" * 32, "toml", Backup(place.backup))


def test_two_coordinators_with_one_backup(place: Place, tmp_path: Path) -> None:
    journal = place.open()
    with pytest.raises(StorageError, match="another coordinator"):
        leased(tmp_path / "other", RUN.hash, "toml", Backup(place.backup))
    journal.append(journal.next_index, story()[0][0])
    journal.close()
    assert place.same()


def test_a_damaged_backup_is_moved_aside(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.live(SECOND + 2)
    damaged = (place.backup / JOURNAL).read_bytes().replace(b"RunSnapshot", b"RunSnapshoT")
    (place.backup / JOURNAL).write_bytes(damaged)
    place.live(SECOND + 3)
    assert (place.backup / f"{JOURNAL}.damaged-1").read_bytes() == damaged
    assert "moved aside" in caplog.text
    assert place.same()


# Death at every step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_machine_dies_at_every_step(tmp_path: Path, moment: str) -> None:
    with disk() as untouched:
        Place(tmp_path / "whole").live()
    for number in range(len(untouched.steps)):
        place, about = Place(tmp_path / str(number)), f"{moment} step {number}, {untouched.steps[number]}"
        told = [0]
        with disk(number, moment), pytest.raises(MachineDied):
            place.live(told=told)
        place.let_go()
        if (place.backup / JOURNAL).exists():
            elsewhere = tmp_path / f"{number}-elsewhere"
            shutil.copytree(place.backup, elsewhere)
            assert transactions(elsewhere) in (told[-1], told[-1] + 1), about
        else:
            assert told[-1] == 0, about
        place.live()
        assert transactions(place.state) == ALL, about
        assert place.same(), about
