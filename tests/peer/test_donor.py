import asyncio
import errno
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.outer_steps import TensorMean
from torch import Tensor

from shoal.peer.state_transfer import spool
from shoal.peer.state_transfer.chunk_format import BFLOAT16, LOSSLESS, RAW
from shoal.peer.state_transfer.donor import (
    MAX_READERS,
    MAX_STREAMS_PER_READER,
    StateDonor,
    StateSource,
    digests_blob,
)
from shoal.peer.state_transfer.spool import StateSpool
from shoal.peer.training.anchor import AnchorState, state_digest
from shoal.swarm.errors import BlobUnavailable, Busy

SIZE = 600_000
"""Elements: the state below takes three chunks, the last one short."""

KEEP_S = 5.0


def make_state(version: int = 3, seed: int = 0, size: int = SIZE) -> AnchorState:
    generator = torch.Generator().manual_seed(seed)
    return AnchorState.make(torch.randn(size, generator=generator), torch.randn(1, size, generator=generator), version)


def in_chunks(state: AnchorState) -> bytes:
    """All rows of one range after the other."""
    return b"".join(values.numpy().tobytes() for values in state.values.split(2**18, dim=1))


def next_of(state: AnchorState, version: int | None = None) -> AnchorState:
    """The state of the next round, in the memory of this one, which is overwritten in pieces: one more everywhere."""
    mean = TensorMean(torch.ones(state.elements), 100_003)
    return state.step(version or state.version + 1, mean.pieces(), lambda _, values, piece: values.add_(piece))


class Shelf:
    """A donor, its endpoint, and a way to read from it; within a running loop."""

    def __init__(self, folder: Path | None = None) -> None:
        self.endpoint = MemoryNetwork().endpoint("donor")
        self.donor = StateDonor(self.endpoint, KEEP_S, folder=folder)

    def source(self, version: int) -> StateSource:
        source = self.endpoint.blobs[RAW.blob(version)]
        assert isinstance(source, StateSource)
        return source

    async def read(self, version: int) -> bytes:
        source = self.source(version)
        return b"".join([await source.chunk(index) for index in range(source.chunks)])

    @property
    def offered(self) -> set[int]:
        states = {blob.number for blob in self.endpoint.blobs if blob.kind == "state"}
        assert states == {blob.number for blob in self.endpoint.blobs if blob.kind == "state_digests"}
        assert states == set(self.donor.versions)
        assert Counter(blob.number for blob in self.endpoint.blobs) == dict.fromkeys(states, 4), (
            "two forms, with digests"
        )
        return states


def test_chunks_have_all_rows_of_a_range() -> None:
    async def main() -> None:
        shelf, state = Shelf(), make_state()
        shelf.donor.offer(state)
        source = shelf.source(3)
        assert source.chunks == 3
        parts = [await source.chunk(index) for index in range(3)]
        assert b"".join(parts) == in_chunks(state)
        assert [len(part) for part in parts] == [2**21, 2**21, 8 * SIZE - 2**22]

    asyncio.run(main())


def test_a_lossless_run_offers_packed_chunks() -> None:
    async def main() -> None:
        endpoint, state = MemoryNetwork().endpoint("donor"), make_state()
        StateDonor(endpoint, KEEP_S, LOSSLESS).offer(state)
        assert RAW.blob(3) not in endpoint.blobs
        source = endpoint.blobs[LOSSLESS.blob(3)]
        packed = [await source.chunk(index) for index in range(3)]
        assert sum(map(len, packed)) < 0.9 * state.values.nbytes
        sizes = [2**21, 2**21, 8 * SIZE - 2**22]
        data = b"".join(bytes(LOSSLESS.unpack(one, size)) for one, size in zip(packed, sizes, strict=True))
        assert data == in_chunks(state)

    asyncio.run(main())


def test_the_list_of_digests_is_checked_by_the_state_s() -> None:
    async def main() -> None:
        shelf, state = Shelf(), make_state()
        shelf.donor.offer(state)
        source = shelf.endpoint.blobs[digests_blob(3)]
        assert source.chunks == 1
        assert state_digest(3, (2, SIZE), bytes(await source.chunk(0))) == state.digest

    asyncio.run(main())


# The next step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_version_that_nobody_downloads_is_gone_with_the_next_step(tmp_path: Path, has_folder: bool) -> None:
    async def main() -> None:
        shelf, state = Shelf(tmp_path if has_folder else None), make_state(3, size=10)
        shelf.donor.offer(state)
        before = shelf.source(3)
        following = next_of(state)
        with pytest.raises(BlobUnavailable, match="version 3 of the state has been replaced"):
            await before.chunk(0)
        shelf.donor.offer(following)
        assert shelf.offered == {4}
        assert await shelf.read(4) == in_chunks(following)
        shelf.donor.offer(next_of(following, version=2))
        assert shelf.donor.versions == (2,), "back to an earlier version: that is the newest now"

    asyncio.run(main())


@pytest.mark.parametrize("first", ["digests", "chunk", "refused"])
def test_a_version_that_somebody_downloads_stays_to_its_end(tmp_path: Path, first: str) -> None:
    async def main() -> None:
        shelf, state = Shelf(tmp_path), make_state()
        expected = in_chunks(state)
        shelf.donor.offer(state)
        match first:
            case "digests":
                shelf.endpoint.blobs[digests_blob(3)].begin_reading(b"joiner")  # type: ignore[attr-defined]
            case "chunk":
                shelf.source(3).begin_reading(b"joiner")
                shelf.source(3).end_reading(b"joiner")
            case "refused":  # who is told to ask again still finds that state
                shelf.donor.pause(True)
                with pytest.raises(Busy, match="round"):
                    shelf.source(3).begin_reading(b"joiner")
                shelf.donor.pause(False)
        for _ in range(3):
            state = next_of(state)
            shelf.donor.offer(state)
        assert shelf.offered == {3, 6}
        assert await shelf.read(3) == expected
        assert await shelf.read(6) == in_chunks(state) != expected
        rounded = shelf.endpoint.blobs[BFLOAT16.blob(3)]
        assert len(await rounded.chunk(0)) == 2**19, "the anchor alone, in all forms"

    asyncio.run(main())


def test_older_versions_go_when_nobody_wants_them_any_more(tmp_path: Path) -> None:
    async def main() -> None:
        shelf, state = Shelf(tmp_path), make_state(0, size=10)
        for version in range(1, 5):
            state = next_of(state)
            shelf.donor.offer(state)
            shelf.source(version).begin_reading(b"joiner")
        assert shelf.offered == {1, 2, 4}, "of several those that began first"
        shelf.source(1).end_reading(b"joiner")
        state = next_of(state)
        shelf.donor.offer(state)
        assert shelf.offered == {1, 2, 5}, "its joiner may just be about to ask for more"
        shelf.source(1)._offered.last_read_s -= KEEP_S
        shelf.donor.offer(next_of(state))
        assert shelf.offered == {2, 6}
        shelf.donor.close()
        assert shelf.offered == set()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == [], "files have no names"


def test_a_read_during_a_step_is_of_one_version(tmp_path: Path) -> None:
    """Chunks are read again and again by several threads while the state is stepped in small pieces."""

    async def main() -> None:
        shelf, state = Shelf(tmp_path), make_state(0, size=3 * 2**18 + 5)
        shelf.donor.offer(state)
        shelf.source(0).begin_reading(b"joiner")
        expected, source = state.values.clone(), shelf.source(0)
        wrong, reads, done = [], 0, False

        def change(start: int, values: Tensor, piece: Tensor) -> None:
            values[0].add_(piece)
            time.sleep(0.002)
            values[1].add_(piece)

        async def read(index: int) -> None:
            nonlocal reads
            chunk = expected[:, index * 2**18 : (index + 1) * 2**18].numpy().tobytes()
            while not done:
                reads += 1
                if bytes(await source.chunk(index)) != chunk:
                    wrong.append(index)

        readers = [asyncio.ensure_future(read(index)) for index in range(4)]
        for _ in range(3):
            mean = TensorMean(torch.ones(state.elements), 2**15)
            state = await asyncio.to_thread(state.step, state.version + 1, mean.pieces(), change)
            shelf.donor.offer(state)
        done = True
        await asyncio.gather(*readers)
        assert reads > 10
        assert wrong == []
        assert torch.equal(state.values, expected + 1 + 1 + 1)
        assert state.digest == AnchorState.of(state.values, 3).digest

    asyncio.run(main())


def test_without_a_disk_a_version_is_gone_rather_than_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: StateSpool, offset: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(StateSpool, "_write_at", full)

    async def main() -> None:
        shelf, state = Shelf(tmp_path), make_state()
        shelf.donor.offer(state)
        source = shelf.source(3)
        source.begin_reading(b"joiner")
        following = next_of(state)
        with pytest.raises(BlobUnavailable):
            await source.chunk(0)
        shelf.donor.offer(following)
        assert shelf.offered == {4}
        assert caplog.text.count("No space left") == 1

    asyncio.run(main())


def test_a_step_does_not_wait_long_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spool, "MAX_STALL_S", 0.0)

    async def main() -> None:
        shelf, state = Shelf(tmp_path), make_state()
        shelf.donor.offer(state)
        source = shelf.source(3)
        source.begin_reading(b"joiner")
        next_of(state)
        with pytest.raises(BlobUnavailable):
            await source.chunk(2)
        assert "too slow to keep version 3" in caplog.text

    asyncio.run(main())


def test_a_wanted_version_is_written_ahead_of_the_step(tmp_path: Path) -> None:
    async def main() -> None:
        shelf, state = Shelf(tmp_path), make_state()
        running = asyncio.ensure_future(shelf.donor.run())
        shelf.donor.offer(state)
        shelf.source(3).begin_reading(b"joiner")
        kept = shelf.source(3)._offered.spool
        assert kept is not None
        for _ in range(2000):
            await asyncio.sleep(0 if kept.is_whole else 0.01)
        assert kept.is_whole
        running.cancel()
        written = in_chunks(state)
        next_of(state)
        assert await shelf.read(3) == written

    asyncio.run(main())


# Readers --------------------------------------------------------------------------------------------------------


def test_chunks_wait_while_a_round_is_averaged() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.donor.offer(make_state())
        shelf.source(3).begin_reading(b"joiner")
        shelf.donor.pause(True)
        reading = asyncio.ensure_future(shelf.source(3).chunk(0))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not reading.done()
        shelf.donor.pause(False)
        assert len(await reading) == 2**21
        shelf.source(3).begin_reading(b"joiner")

    asyncio.run(main())


def test_so_many_joiners_are_served_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        shelf, state = Shelf(tmp_path), make_state(3, size=10)
        shelf.donor.offer(state)
        shelf.source(3).begin_reading(b"\0")
        shelf.donor.offer(next_of(state))
        readers = [bytes([number]) for number in range(MAX_READERS)]
        for number, reader in enumerate(readers[1:], 1):
            shelf.source(3 + number % 2).begin_reading(reader)
        with pytest.raises(Busy, match="others"):
            shelf.source(4).begin_reading(b"one more")
        for _ in range(MAX_STREAMS_PER_READER - 1):
            shelf.source(3).begin_reading(readers[0])
        with pytest.raises(Busy, match="go to you"):
            shelf.source(3).begin_reading(readers[0])
        shelf.source(4).end_reading(readers[1])
        shelf.source(4).begin_reading(b"one more")
        with pytest.raises(Busy):
            shelf.source(4).begin_reading(readers[1])

    asyncio.run(main())
