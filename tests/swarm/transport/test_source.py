"""Sources that know who reads them, on real nodes."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest
from tests.swarm.network import LONG_S, STATE, Member, Sink, Source, fetch, swarm, until

from shoal.swarm.errors import Busy
from shoal.swarm.transport.bulk.source import CountedSource


class Counted(Source):
    """Has streams for so many at once."""

    def __init__(self, chunks: int, most: int = 8, held_at: int | None = None) -> None:
        super().__init__(chunks, held_at=held_at)
        self.most = most
        self.begun: Counter[bytes] = Counter()
        self.streams = 0

    def begin_reading(self, reader: bytes) -> None:
        if self.streams >= self.most:
            raise Busy("enough of you")
        self.begun[reader] += 1
        self.streams += 1

    def end_reading(self, reader: bytes) -> None:
        assert self.begun[reader]
        self.streams -= 1


def test_streams_are_counted_by_their_reader() -> None:
    async def main() -> None:
        async with swarm(3) as (a, b, c):
            source = Counted(5)
            assert isinstance(source, CountedSource)
            assert not isinstance(Source(5), CountedSource)
            a.node.publish(STATE, source)
            assert await fetch(b, a, Sink(), range(5)) == list(range(5))
            await fetch(b, a, Sink(), range(2, 4))
            await fetch(c, a, Sink(), range(5))
            await until(lambda: source.streams == 0)
            assert source.begun == {b.keys.public: 2, c.keys.public: 1}

    asyncio.run(main())


def test_who_is_busy_says_so_at_once() -> None:
    async def main() -> None:
        async with swarm() as (a, b):
            a.node.publish(STATE, Counted(5, most=0))
            async with asyncio.timeout(LONG_S):
                with pytest.raises(Busy, match="enough of you"):
                    await fetch(b, a, Sink(), range(5), progress_s=10 * LONG_S)

    asyncio.run(main())


@pytest.mark.parametrize("way", ["closed", "at once", "killed"])
def test_every_stream_is_ended(way: str) -> None:
    async def begin(to: Member, holder: Member) -> None:
        async with aclosing(to.node.fetch(holder.peer, STATE, range(5), Sink(), LONG_S)) as stream:
            async for _ in stream:
                return

    async def main() -> None:
        async with swarm() as (a, b):
            source = Counted(5, held_at=0 if way == "at once" else 2)
            a.node.publish(STATE, source)
            if way == "closed":
                await begin(b, a)
            else:
                fetching = asyncio.ensure_future(fetch(b, a, Sink(), range(5)))
                await until(lambda: source.streams > 0)
                if way == "killed":
                    await b.stop()
                fetching.cancel()
                await asyncio.wait([fetching])
            await until(lambda: source.streams == 0)

    asyncio.run(main())
