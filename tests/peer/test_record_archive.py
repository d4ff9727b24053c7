"""Round records beside training: what is written, when it is served, and what a full disk costs."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import plan_of
from tests.fakes.memory_network import MemoryEndpoint, MemoryNetwork
from tests.fakes.rounds import COORDINATOR, RUN_HASH, results_of, verdict_on
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.history import record_archive, round_records
from shoal.peer.history.record_archive import RecordArchive
from shoal.peer.history.round_records import RecordOwner, RoundRecords
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import BlobUnavailable
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import Blob

ELEMENTS = 5 * 64 + 7
CODEC_MAP = get_codec_map("int8", None, [("w", (ELEMENTS,))])


def round_of(number: int) -> tuple[ResultStore, Verdict]:
    """A round's results in memory, and the verdict on them."""
    plan = plan_of([3, 4], [[0, 1]], ELEMENTS, chunk=64).model_copy(update={"round": number, "anchor_version": number})
    chunks = results_of(plan, CODEC_MAP, seed=number)
    verdict = verdict_on(plan, chunks)
    store = ResultStore.of(verdict, CODEC_MAP)
    for index, chunk in enumerate(chunks):  # memory of the store's own, which it uses again
        held = store.buffers.results.take(chunk.nbytes, store.group.header_bytes)
        held[:] = chunk
        store.adopt([*[None] * index, held])
    return store, verdict


class Kept:
    def __init__(self, folder: Path, tasks: asyncio.TaskGroup, state_vectors: int) -> None:
        self.endpoint: MemoryEndpoint = MemoryNetwork().endpoint("a" * 16)
        self.records = RoundRecords(folder, RecordOwner(RUN_HASH, COORDINATOR.public_key))
        self.since: int | None = None
        self.keeper = RecordArchive(self.records, self.endpoint, tasks, state_vectors, lambda: self.since)

    @property
    def offered(self) -> list[int]:
        return sorted(blob.number for blob in self.endpoint.blobs)


def with_keeper(folder: Path, main: Callable[[Kept], Coroutine[Any, Any, None]], state_vectors: int = 0) -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            await main(Kept(folder, tasks, state_vectors))

    run_virtual(run())


def test_a_record_is_offered_when_the_memory_is_not(tmp_path: Path) -> None:
    async def main(kept: Kept) -> None:
        store, verdict = round_of(0)
        kept.keeper.keep(store, verdict)
        await asyncio.sleep(0.01)
        assert (kept.records.numbers(), kept.offered) == ([0], []), "the averager still offers it"
        kept.keeper.take_over(0)
        source = kept.endpoint.blobs[Blob(kind="result", number=0)]
        assert source.chunks == store.chunks
        for index in range(store.chunks):
            assert bytes(await source.chunk(index)) == bytes(store[index])

    with_keeper(tmp_path, main)


def test_memory_is_not_used_again_before_it_is_written(tmp_path: Path) -> None:
    async def main(kept: Kept) -> None:
        store, verdict = round_of(0)
        sizes = [store[index].nbytes for index in range(store.chunks)]
        kept.keeper.keep(store, verdict)
        await store.close()  # before the write has begun
        for size in sizes:
            store.buffers.results.take(size, store.group.header_bytes)[:] = bytes(size)
        await asyncio.sleep(0.01)
        assert any(kept.records.open(0).read())

    with_keeper(tmp_path, main)


def test_an_earlier_process_s_records_are_offered_and_damaged_ones_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(kept: Kept) -> None:
        for number in range(3):
            store, verdict = round_of(number)
            kept.records.write(verdict, store.held_chunks)
        kept.records.path(1).write_bytes(b"nothing")
        (tmp_path / ".00000007.safetensors.new").write_bytes(b"half")
        await kept.keeper.start()
        assert kept.offered == [0, 2]
        assert "00000001.safetensors" in caplog.text
        assert not (tmp_path / ".00000007.safetensors.new").exists()
        whole = bytearray(kept.records.path(2).read_bytes())
        whole[-1] ^= 1
        kept.records.path(2).write_bytes(whole)
        with pytest.raises(BlobUnavailable, match="damaged"):
            await kept.endpoint.blobs[Blob(kind="result", number=2)].chunk(0)
        assert kept.offered == [0]
        assert "00000002.safetensors" in caplog.text

    with_keeper(tmp_path, main)


def test_three_stay_and_those_that_a_checkpoint_needs(tmp_path: Path) -> None:
    async def main(kept: Kept) -> None:
        for number in range(6):
            kept.keeper.add(*round_of(number))
            await asyncio.sleep(0.01)
        assert kept.records.numbers() == kept.offered == [3, 4, 5]
        kept.since = 3
        for number in (6, 7):
            kept.keeper.add(*round_of(number))
            await asyncio.sleep(0.01)
        assert kept.records.numbers() == kept.offered == [4, 5, 6, 7]
        kept.since = 7
        kept.keeper.add(*round_of(8))
        await asyncio.sleep(0.01)
        assert kept.records.numbers() == kept.offered == [6, 7, 8]

    with_keeper(tmp_path, main)


def test_checkpoints_that_are_never_written_do_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_archive, "MAX_MODELS", 2)

    async def main(kept: Kept) -> None:
        kept.since = 0  # and no other checkpoint since
        for number in range(12):
            kept.keeper.add(*round_of(number))
            await asyncio.sleep(0.01)
        assert kept.records.numbers() == list(range(1, 12)), "they are so small that all stay"
        monkeypatch.setattr(record_archive, "MAX_BYTES", 0)
        kept.keeper.add(*round_of(12))
        await asyncio.sleep(0.01)
        size_bytes = kept.records.open(12).result_bytes
        rounds = len(kept.records.numbers())
        assert rounds * size_bytes < 2 * 4 * ELEMENTS <= (rounds + 1) * size_bytes
        assert kept.records.numbers() == kept.offered == list(range(13 - rounds, 13))

    with_keeper(tmp_path, main)


def test_as_many_stay_as_are_fewer_bytes_than_a_state(tmp_path: Path) -> None:
    async def main(kept: Kept) -> None:
        for number in range(12):
            kept.keeper.add(*round_of(number))
            await asyncio.sleep(0.01)
        size_bytes = kept.records.open(11).result_bytes
        rounds = len(kept.records.numbers())
        assert rounds * size_bytes < 2 * 4 * ELEMENTS <= (rounds + 1) * size_bytes
        assert kept.records.numbers() == kept.offered == list(range(12 - rounds, 12))

    with_keeper(tmp_path, main, state_vectors=2)


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.fsync

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def warnings() -> int:
        return sum(one.levelno >= logging.WARNING for one in caplog.records)

    async def main(kept: Kept) -> None:
        monkeypatch.setattr(round_records.os, "fsync", refuse)
        for number in range(3):
            kept.keeper.add(*round_of(number))
            await asyncio.sleep(0.01)
        assert (kept.records.numbers(), kept.offered, warnings()) == ([], [], 1)
        assert "free some space" in caplog.text
        monkeypatch.setattr(round_records.os, "fsync", real)
        kept.keeper.add(*round_of(3))
        await asyncio.sleep(0.01)
        assert kept.offered == [3]
        monkeypatch.setattr(round_records.os, "fsync", refuse)
        kept.keeper.add(*round_of(4))
        await asyncio.sleep(0.01)
        assert (kept.offered, warnings()) == ([3], 2)

    with_keeper(tmp_path, main)


def test_a_slow_disk_gets_two_rounds_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(kept: Kept) -> None:
        may_write = asyncio.Event()

        async def slow(work: Callable[..., Any], *arguments: Any) -> Any:
            await may_write.wait()
            return work(*arguments)

        monkeypatch.setattr(record_archive, "in_thread", slow)
        for number in range(4):
            kept.keeper.add(*round_of(number))
            await asyncio.sleep(0.01)
        may_write.set()
        await asyncio.sleep(0.01)
        assert kept.records.numbers() == [0, 1]
        kept.keeper.add(*round_of(4))
        await asyncio.sleep(0.01)
        assert kept.records.numbers() == [0, 1, 4]

    with_keeper(tmp_path, main)
