"""Record files that are read while another process appends to them."""

import os
from pathlib import Path

import pytest

from shoal.swarm.coordinator import record_log
from shoal.swarm.coordinator.record_log import CHECK_BYTES, RecordFile, pack_file, pack_record

KIND = 1


def records(count: int) -> bytes:
    return pack_file("journal", {"run_hash": b"h"}, [(KIND, bytes([number]) * 100) for number in range(count)])


@pytest.mark.parametrize("arrived_bytes", [0, 1, 24, 25, 60, 140])
@pytest.mark.parametrize("later", [1, 2])
def test_a_record_that_is_completed_while_the_file_is_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived_bytes: int, later: int
) -> None:
    """The file's size shows a part of the third record; by the time that this is judged, the record is whole."""
    path, before, after = tmp_path / "journal.records", records(2), records(2 + later)
    path.write_bytes(after[: len(before) + arrived_bytes])
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        path.write_bytes(after)
        return found

    monkeypatch.setattr(record_log.os, "fstat", fstat)
    file = RecordFile(path, "journal", writable=False)
    assert [file.read(number) for number in range(len(file.offsets))] == [bytes([0]) * 100, bytes([1]) * 100]
    assert file.size_bytes == len(before)
    file.close()


def test_a_good_record_after_a_damaged_one_is_still_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "journal.records", records(3)
    size = len(pack_record(KIND, bytes(CHECK_BYTES), bytes(100)))
    path.write_bytes(whole[: -2 * size + 40] + b"?" + whole[-2 * size + 41 :])
    with pytest.raises(record_log.StorageError, match="record 1 at byte"):
        RecordFile(path, "journal", writable=False)
