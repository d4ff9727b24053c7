import asyncio
from collections import Counter

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork

from shoal.peer.state_transfer.chunk_format import LOSSLESS, RAW
from shoal.peer.state_transfer.donor import (
    MAX_READERS,
    MAX_STREAMS_PER_READER,
    DigestSource,
    StateDonor,
    StateSource,
    digests_blob,
)
from shoal.peer.training.anchor import AnchorState, state_digest
from shoal.swarm.errors import Busy

SIZE = 300_000
"""Elements: the state below takes three chunks, the last one short."""

KEEP_S = 5.0


def make_state(version: int = 3, seed: int = 0, size: int = SIZE) -> AnchorState:
    generator = torch.Generator().manual_seed(seed)
    return AnchorState.make(torch.randn(size, generator=generator), torch.randn(1, size, generator=generator), version)


class Shelf:
    """A donor, its endpoint, and a way to read from it; within a running loop."""

    def __init__(self) -> None:
        self.endpoint = MemoryNetwork().endpoint("donor")
        self.donor = StateDonor(self.endpoint, KEEP_S)

    def source(self, version: int) -> StateSource:
        source = self.endpoint.blobs[RAW.blob(version)]
        assert isinstance(source, StateSource)
        return source

    @property
    def offered(self) -> set[int]:
        states = {blob.number for blob in self.endpoint.blobs if blob.kind == "state"}
        assert states == {blob.number for blob in self.endpoint.blobs if blob.kind == "state_digests"}
        assert states == set(self.donor.versions)
        assert Counter(blob.number for blob in self.endpoint.blobs) == dict.fromkeys(states, 4), (
            "two forms, with digests"
        )
        return states


def test_what_is_offered_does_not_change_with_the_next_state() -> None:
    async def main() -> None:
        shelf, state = Shelf(), make_state()
        shelf.donor.offer(state)
        source = shelf.source(3)
        assert source.chunks == 3
        parts = [await source.chunk(index) for index in range(3)]
        assert b"".join(parts) == state.values.numpy().tobytes()
        assert [len(part) for part in parts] == [2**20, 2**20, 8 * SIZE - 2**21]
        state.values[0, 0] = 7.0
        assert parts[0][:4] == state.values[:1, :1].numpy().tobytes(), "it is no copy"

    asyncio.run(main())


def test_a_lossless_run_offers_packed_chunks() -> None:
    async def main() -> None:
        endpoint, state = MemoryNetwork().endpoint("donor"), make_state()
        StateDonor(endpoint, KEEP_S, LOSSLESS).offer(state)
        assert RAW.blob(3) not in endpoint.blobs
        source = endpoint.blobs[LOSSLESS.blob(3)]
        packed = [await source.chunk(index) for index in range(3)]
        assert sum(map(len, packed)) < 0.9 * state.values.nbytes
        sizes = [2**20, 2**20, 8 * SIZE - 2**21]
        data = b"".join(bytes(LOSSLESS.unpack(one, size)) for one, size in zip(packed, sizes, strict=True))
        assert data == state.values.numpy().tobytes()

    asyncio.run(main())


def test_the_list_of_digests_is_checked_by_the_state_s() -> None:
    state = make_state()
    source = DigestSource(3, lambda: state.chunk_digests)
    assert source.chunks == 1
    assert state_digest(3, (2, SIZE), bytes(asyncio.run(source.chunk(0)))) == state.digest


def test_the_newest_and_the_one_before_are_offered() -> None:
    async def main() -> None:
        shelf = Shelf()
        for version in (3, 4, 7, 8):
            shelf.donor.offer(make_state(version, size=10))
        assert shelf.offered == {7, 8}
        shelf.donor.offer(make_state(7, 1, size=10))
        assert shelf.donor.versions == (8, 7), "back to an earlier version: that is the newest now"
        assert digests_blob(7) in shelf.endpoint.blobs

    asyncio.run(main())


def test_one_older_state_stays_while_somebody_downloads_it() -> None:
    async def main() -> None:
        shelf = Shelf()
        for version in range(3):
            shelf.donor.offer(make_state(version, size=10))
        shelf.source(1).begin_reading(b"joiner")
        shelf.donor.offer(make_state(3, size=10))
        assert shelf.offered == {1, 2, 3}
        shelf.source(2).begin_reading(b"another")
        shelf.donor.offer(make_state(4, size=10))
        assert shelf.offered == {1, 3, 4}, "one, not two"
        shelf.source(1).end_reading(b"joiner")
        shelf.donor.offer(make_state(5, size=10))
        assert shelf.offered == {1, 4, 5}, "its joiner may just be about to ask for more"
        shelf.source(1).last_read_s -= KEEP_S
        shelf.donor.offer(make_state(6, size=10))
        assert shelf.offered == {5, 6}

    asyncio.run(main())


def test_who_is_told_to_ask_again_still_finds_that_state() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.donor.offer(make_state(0, size=10))
        shelf.donor.pause(True)
        with pytest.raises(Busy, match="round"):
            shelf.source(0).begin_reading(b"joiner")
        for version in range(1, 4):
            shelf.donor.offer(make_state(version, size=10))
        assert shelf.offered == {0, 2, 3}

    asyncio.run(main())


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
        assert len(await reading) == 2**20
        shelf.source(3).begin_reading(b"joiner")

    asyncio.run(main())


def test_so_many_joiners_are_served_at_once() -> None:
    async def main() -> None:
        shelf = Shelf()
        shelf.donor.offer(make_state(3, size=10))
        shelf.donor.offer(make_state(4, size=10))
        readers = [bytes([number]) for number in range(MAX_READERS)]
        for number, reader in enumerate(readers):
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
