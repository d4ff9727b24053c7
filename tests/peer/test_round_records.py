import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import plan_of
from tests.fakes.rounds import COORDINATOR, RUN_HASH, results_of, signed, verdict_on

from shoal.peer.history import round_records
from shoal.peer.history.round_records import RecordOwner, RoundRecords, open_record
from shoal.swarm.averaging.results import ResultStore, RoundMean
from shoal.swarm.errors import BlobUnavailable, StateFileError, StorageError, WireError

OWNER = RecordOwner(RUN_HASH, COORDINATOR.public_key)
ELEMENTS = 5 * 64 + 7
CODEC_MAP = get_codec_map("int8", None, [("w", (ELEMENTS,))])
PLAN = plan_of([3, 4], [[0, 1]], ELEMENTS, chunk=64)
CHUNKS = results_of(PLAN, CODEC_MAP, empty=[4])
VERDICT = verdict_on(PLAN, CHUNKS)


@pytest.fixture
def records(tmp_path: Path) -> RoundRecords:
    return RoundRecords(tmp_path / "rounds", OWNER)


def as_bytes(chunks: Sequence[memoryview | None]) -> list[bytes | None]:
    return [None if chunk is None else bytes(chunk) for chunk in chunks]


def cut_elsewhere() -> list[memoryview]:
    """The same bytes end to end, but two chunks of the second part have the lengths of each other."""
    joined, header_bytes = bytes(CHUNKS[3]) + bytes(CHUNKS[4]), CHUNKS[4].nbytes
    return [*CHUNKS[:3], memoryview(joined[:header_bytes]), memoryview(joined[header_bytes:]), *CHUNKS[5:]]


def test_what_was_written_comes_back(records: RoundRecords) -> None:
    records.write(VERDICT, CHUNKS)
    record = records.open(PLAN.round)
    assert record.verdict == VERDICT
    assert as_bytes(record.read()) == as_bytes(CHUNKS)
    assert [bytes(record.chunk(index)) for index in range(len(CHUNKS))] == as_bytes(CHUNKS)
    assert record.result_bytes == sum(chunk.nbytes for chunk in CHUNKS)
    assert records.numbers() == [PLAN.round]
    assert [path.name for path in records.folder.iterdir()] == ["00000003.safetensors"], "nothing else is left"


def test_it_is_a_safetensors_file(records: RoundRecords) -> None:
    records.write(VERDICT, CHUNKS)
    with safe_open(records.path(PLAN.round), "np") as file:
        assert file.metadata()["format"] == "shoal-round-1"
        assert sorted(file.keys()) == ["lengths", "part-00000", "part-00001", "verdict"]
        assert file.get_tensor("lengths").tolist() == [chunk.nbytes for chunk in CHUNKS]


def test_void_parts_are_left_out(records: RoundRecords) -> None:
    verdict = verdict_on(PLAN, CHUNKS, void=[0])
    own_bytes: list[memoryview | None] = [*CHUNKS]
    records.write(verdict, own_bytes)
    record = records.open(PLAN.round)
    first = record.read()
    store = ResultStore.of(verdict, CODEC_MAP)
    store.adopt(first)
    mean, (start, stop) = RoundMean(store).whole(), (PLAN.parts[0].start, PLAN.parts[0].stop)
    assert not bool(mean[start:stop].any())
    assert bool(mean[stop:].any())
    with pytest.raises(BlobUnavailable):
        record.chunk(0)


def test_every_flipped_byte_is_refused_by_name(records: RoundRecords) -> None:
    records.write(VERDICT, CHUNKS)
    path = records.path(PLAN.round)
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip = 0x80 if position % 2 else 0x01
        path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
        with pytest.raises(StateFileError, match="00000003"):
            records.open(PLAN.round).read()


def test_a_damaged_part_of_a_record_is_named(records: RoundRecords) -> None:
    record = records.write(VERDICT, CHUNKS)
    assert as_bytes(record.read()) == as_bytes(CHUNKS)
    whole = record.path.read_bytes()
    record.path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StateFileError, match=r"part-00001.*damaged"):
        record.read()


def test_every_truncation_and_every_appendix_is_refused_by_name(records: RoundRecords) -> None:
    records.write(VERDICT, CHUNKS)
    path = records.path(PLAN.round)
    whole = path.read_bytes()
    for data in [*(whole[:length] for length in range(0, len(whole), 7)), whole[:-1], whole + b"\0"]:
        path.write_bytes(data)
        with pytest.raises(StateFileError, match="00000003"):
            records.open(PLAN.round).read()


def test_a_chunk_that_ends_elsewhere_is_refused() -> None:
    with pytest.raises(WireError, match=r"result chunk 3 .* with its header"):
        ResultStore.of(VERDICT, CODEC_MAP).adopt(cut_elsewhere())


def test_a_record_whose_chunks_end_elsewhere_is_refused(records: RoundRecords) -> None:
    record = records.write(VERDICT, cut_elsewhere())
    with pytest.raises(StateFileError, match=r"part-00001.*damaged"):
        record.read()


def test_records_of_others_are_refused(records: RoundRecords) -> None:
    records.write(VERDICT, CHUNKS)
    path = records.path(PLAN.round)
    for owner, field in [
        (RecordOwner(bytes(32), OWNER.coordinator_key), "run_hash"),
        (RecordOwner(RUN_HASH, bytes(32)), "coord"),
    ]:
        with pytest.raises(StateFileError, match=f"00000003.safetensors: field {field}.*another run"):
            open_record(path, owner)
    path.rename(records.path(4))
    with pytest.raises(StateFileError, match="number"):
        records.open(4)


def test_a_verdict_by_somebody_else_is_refused(records: RoundRecords) -> None:
    forged = VERDICT.model_copy(update={"tokens": 1})
    with pytest.raises(StateFileError, match="field verdict"):
        records.write(forged, CHUNKS)
    aborted = signed(round=3, committed=False, anchor_version=1, plan=PLAN, digests=VERDICT.digests)
    with pytest.raises(StateFileError, match="committed round"):
        records.write(aborted, CHUNKS)


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "huge"])
def test_files_of_another_kind_are_refused(records: RoundRecords, kind: str) -> None:
    path = records.path(3)
    path.parent.mkdir()
    match kind:
        case "folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "text":
            path.write_text("hello " * 100)
        case "huge":
            path.write_bytes(b"\xff" * 100)
    with pytest.raises(StateFileError, match="00000003"):
        records.open(3)


@pytest.mark.parametrize("step", ["writev", "fsync"])
def test_a_full_disk_leaves_what_was_there(records: RoundRecords, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write(VERDICT, CHUNKS)
    whole = records.path(3).read_bytes()

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(round_records.os, step, refuse)
    with pytest.raises(StorageError, match=r"No space left.*free some space"):
        records.write(VERDICT, CHUNKS)
    assert records.path(3).read_bytes() == whole
    assert [path.name for path in records.folder.iterdir()] == ["00000003.safetensors"]


def test_short_writes_go_on(records: RoundRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.writev
    monkeypatch.setattr(round_records.os, "writev", lambda fd, pieces: real(fd, [pieces[0][:5]]))
    records.write(VERDICT, CHUNKS)
    assert as_bytes(records.open(3).read()) == as_bytes(CHUNKS)


def test_what_killed_writers_left_is_removed(records: RoundRecords) -> None:
    records.write(VERDICT, CHUNKS)
    (records.folder / ".00000004.safetensors.new").write_bytes(b"half")
    records.clean()
    assert records.numbers() == [3]
    assert len(list(records.folder.iterdir())) == 1
    records.remove([3, 9])
    assert records.numbers() == []


def test_a_folder_that_cannot_be_read_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = RoundRecords(tmp_path, OWNER)

    def refused(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "glob", refused)
    records.clean()
    assert records.numbers() == []
