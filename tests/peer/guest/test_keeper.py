"""The keeper's files: terms that change, pauses, and the month's counter."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.peer.guest import keeper as keeping
from shoal.peer.guest.control_files import find_peers, read_pause, read_presence, show_presence, write_pause
from shoal.peer.guest.gate import OwnerPause, Pause
from shoal.peer.guest.keeper import GuestKeeper, KeeperThread
from shoal.peer.guest.machine import MachineObserver
from shoal.peer.guest.month import SAVE_EVERY_S, TRAFFIC_FILE, MonthlyTraffic
from shoal.swarm.errors import StateFileError, StorageError, TermsError

PEER, OTHER = "a" * 16, "b" * 16


def keeper(home: Path, **options: str) -> GuestKeeper:
    folder = home / "runs" / "reef-00000000" / PEER
    return GuestKeeper("reef", folder, home / "runs", home / "terms.toml", options)


# The month's traffic ------------------------------------------------------------------------------------------


def test_the_months_counter_outlives_the_process_and_begins_anew_with_the_month(tmp_path: Path) -> None:
    folder = tmp_path / "reef-00000000" / PEER
    one = MonthlyTraffic(folder, tmp_path)
    one.count(1000, "2026-11", 0.0)
    one.count(5000, "2026-11", 1.0)
    one.save()
    again = MonthlyTraffic(folder, tmp_path)
    again.count(300, "2026-11", 0.0)
    assert again.of_run_bytes == 5300
    again.count(700, "2026-12", 10.0)
    assert again.of_run_bytes == 400
    again.save()
    assert MonthlyTraffic(folder, tmp_path).of_run_bytes == 400
    assert (folder / TRAFFIC_FILE).stat().st_mode & 0o777 == 0o600


def test_the_counter_is_written_now_and_then(tmp_path: Path) -> None:
    folder = tmp_path / "reef-00000000" / PEER
    one = MonthlyTraffic(folder, tmp_path)
    one.count(1000, "2026-11", 0.0)
    one.count(5000, "2026-11", SAVE_EVERY_S - 0.1)
    assert MonthlyTraffic(folder, tmp_path).of_run_bytes == 1000
    one.count(6000, "2026-11", SAVE_EVERY_S)
    assert MonthlyTraffic(folder, tmp_path).of_run_bytes == 6000


def test_all_peers_of_the_machine_count_together(tmp_path: Path) -> None:
    for run, peer, month in (("reef-1", PEER, "2026-11"), ("reef-1", OTHER, "2026-11"), ("kelp-1", PEER, "2026-10")):
        one = MonthlyTraffic(tmp_path / run / peer, tmp_path)
        one.count(1000, month, 0.0)
    mine = MonthlyTraffic(tmp_path / "kelp-1" / OTHER, tmp_path)
    mine.count(50, "2026-11", 0.0)
    assert (mine.of_run_bytes, mine.of_machine_bytes) == (50, 2050)


@pytest.mark.parametrize("data", [b"", b"{", b'{"month": "2026-11", "moved_bytes": -1}', b"x" * 10_000])
def test_a_damaged_counter_begins_anew(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "reef-1" / PEER
    folder.mkdir(parents=True)
    (folder / TRAFFIC_FILE).write_bytes(data)
    one = MonthlyTraffic(folder, tmp_path)
    one.count(5, "2026-11", 0.0)
    assert one.of_run_bytes == 5


# The keeper ---------------------------------------------------------------------------------------------------


def test_changed_terms_apply_to_a_running_peer(tmp_path: Path) -> None:
    (tmp_path / "terms.toml").write_text('max_upload = "20Mbit"\n')
    one = keeper(tmp_path, max_download="50Mbit")
    assert (one.limits.upload.bps, one.limits.download.bps) == (20e6, 50e6)
    assert one.look() is None
    (tmp_path / "terms.toml").write_text('max_upload = "5Mbit"\nmax_download = "1Mbit"\n')
    assert one.look() is None
    assert (one.limits.upload.bps, one.limits.download.bps) == (5e6, 50e6)
    (tmp_path / "terms.toml").unlink()
    assert one.look() is None
    assert (one.limits.upload.bps, one.limits.download.bps) == (0.0, 50e6)


def test_a_file_that_is_damaged_later_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "terms.toml").write_text('max_upload = "20Mbit"\n')
    one = keeper(tmp_path)
    (tmp_path / "terms.toml").write_text('max_upload = "fast"\n')
    assert one.look() is None
    assert one.look() is None
    assert one.limits.upload.bps == 20e6
    assert len([record for record in caplog.records if "max_upload" in record.message]) == 1
    with pytest.raises(TermsError, match="max_upload"):
        keeper(tmp_path)


def test_used_up_data_pauses_and_is_remembered(tmp_path: Path) -> None:
    with keeper(tmp_path, monthly_data="1M") as one:
        one.limits.upload.count_data(500_000)
        assert one.look() is None
        one.limits.download.count_control(500_000)
        found = one.look()
        assert found is not None
        assert "month" in found.reason
    found = keeper(tmp_path, monthly_data="1M").look()
    assert found is not None
    assert "month" in found.reason


def test_pause_and_resume_by_file(tmp_path: Path) -> None:
    one = keeper(tmp_path)
    folder = tmp_path / "runs" / "reef-00000000" / PEER
    one.show("running")
    write_pause(folder, OwnerPause())
    assert (folder / "pause.json").stat().st_mode & 0o777 == 0o600
    found = one.look()
    assert found is not None
    assert found.until == "its owner resumes it"
    assert keeper(tmp_path).look() == found  # also one that is started again
    write_pause(folder, None)
    assert one.look() is None
    (folder / "pause.json").write_text("{")
    with pytest.raises(StorageError, match="shoal resume"):
        read_pause(folder)
    assert one.look() is None


def test_peers_are_found_by_run_and_by_being_there(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "reef-00000000" / PEER, tmp_path / "kelp-00000000" / OTHER
    for folder in (mine, theirs):
        folder.mkdir(parents=True)
    assert find_peers(tmp_path, "") == []
    show_presence(mine, "reef", "running")
    assert find_peers(tmp_path, "") == [mine]
    assert find_peers(tmp_path, "kelp") == [theirs]
    assert find_peers(tmp_path, str(mine)) == [mine]
    assert find_peers(tmp_path, str(mine.parent)) == [mine]
    present = read_presence(mine)
    assert present is not None
    assert (present.pid, present.run, present.state) == (os.getpid(), "reef", "running")
    (mine / "present.json").write_text('{"pid": 4194304, "run": "reef", "state": "running"}')
    assert find_peers(tmp_path, "") == []  # it was killed
    with pytest.raises(StateFileError, match="sponge"):
        find_peers(tmp_path, "sponge")


def test_a_nice_peer_gives_way_to_all_other_programs() -> None:
    code = "import os; from shoal.peer.guest.keeper import give_way; give_way(); give_way(); print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "19"


def test_a_machine_that_cannot_be_observed_keeps_to_its_other_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(observer: MachineObserver) -> None:
        raise OSError("no such sensor")

    monkeypatch.setattr(MachineObserver, "observe", fail)
    one = keeper(tmp_path, power="idle", monthly_data="1M")
    assert one.look() is None
    assert "no such sensor" in caplog.text
    one.limits.upload.count_data(1_000_000)
    found = one.look()
    assert found is not None
    assert "month" in found.reason


def test_nothing_goes_on_under_terms_that_nobody_looks_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "LOOK_EVERY_S", 0.0)
    one, told, is_told = keeper(tmp_path), list[Pause](), threading.Event()

    def fail() -> None:
        raise AssertionError("a fault, for the test")

    def note(pause: Pause) -> None:
        told.append(pause)
        is_told.set()

    monkeypatch.setattr(one, "look", fail)
    with KeeperThread(one, note) as thread:
        assert is_told.wait(10)
    assert told == [thread.pause]


def test_a_machine_without_descriptors_still_counts_its_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_descriptors(self: Path, pattern: str) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files")

    traffic = MonthlyTraffic(tmp_path / "run" / "peer", tmp_path)
    monkeypatch.setattr(Path, "glob", out_of_descriptors)
    traffic.count(1000, "2026-11", 0.0)
    assert traffic.of_machine_bytes == 1000
