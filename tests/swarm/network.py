"""Real nodes on loopback, in one process, for tests of the transport."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import wraps
from typing import Any

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.types import Address, Blob, RosterEntry
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits
from shoal.swarm.transport.node import Node

HOST = "127.0.0.1"
LONG_S = 30.0


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return wrapper


async def until(condition: Callable[[], bool]) -> None:
    """For what no event of ours announces."""
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Source:
    """``size`` bytes a chunk, each chunk different; from chunk ``held_at`` on they wait for ``go``."""

    def __init__(self, chunks: int, size: int = 1000, held_at: int | None = None) -> None:
        self.chunks = chunks
        self.size = size
        self.held_at = chunks if held_at is None else held_at
        self.go = asyncio.Event()
        self.asked: list[int] = []

    def data(self, index: int) -> bytes:
        return (index * 7919).to_bytes(8, "big") * (self.size // 8)

    async def chunk(self, index: int) -> memoryview:
        self.asked.append(index)
        if index >= self.held_at:
            await self.go.wait()
        return memoryview(self.data(index))


class Sink:
    """Keeps what arrives; refuses chunks larger than ``limit``."""

    def __init__(self, limit: int = 2**21) -> None:
        self.limit = limit
        self.chunks: dict[int, bytearray] = {}

    def __call__(self, chunk: int, size: int) -> memoryview:
        if size > self.limit:
            raise WireError(f"chunk of {size} bytes")
        self.chunks[chunk] = bytearray(size)
        return memoryview(self.chunks[chunk])

    def holds(self, source: Source, chunks: Iterable[int]) -> bool:
        return all(bytes(self.chunks[index]) == source.data(index) for index in chunks)


class Member:
    """What outlives a node: its identity, keys and, once it was open, its ports."""

    def __init__(self, limits: TrafficLimits | None = None) -> None:
        self.limits = limits
        self.identity = Identity.generate()
        self.keys = CurveKeys.fresh()
        self.ports = (0, 0)
        self.reachable = True
        self.relays: tuple[Address, ...] = ()
        self.allowed: set[bytes] = set()
        self.node: Node
        self.stack = AsyncExitStack()

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    async def admit(self, key: bytes) -> bool:
        return key in self.allowed

    async def start(self) -> None:
        self.node = await self.stack.enter_async_context(
            Node.open(self.keys, HOST, self.ports, self.admit, self.limits)
        )
        self.ports = (self.node.control_port, self.node.data_port)

    async def stop(self) -> None:
        await self.stack.aclose()
        self.stack = AsyncExitStack()

    def entry(self) -> RosterEntry:
        return RosterEntry(
            peer=self.peer,
            certificate=self.identity.certify(self.keys),
            name="x",
            role="trainer",
            addresses=(Address(host=HOST, control_port=self.ports[0], data_port=self.ports[1]), *self.relays),
            reachable=self.reachable,
        )


def introduce(*members: Member) -> None:
    """Give everybody the roster of these members."""
    roster = tuple(member.entry() for member in members)
    for member in members:
        member.allowed |= {other.keys.public for other in members}
        member.node.update_roster(roster)


@asynccontextmanager
async def swarm(size: int = 2) -> AsyncIterator[list[Member]]:
    async with swarm_of(*(Member() for _ in range(size))) as members:
        yield members


@asynccontextmanager
async def swarm_of(*members: Member) -> AsyncIterator[list[Member]]:
    try:
        for member in members:
            await member.start()
        introduce(*members)
        yield list(members)
    finally:
        for member in reversed(members):
            await member.stop()


STATE = Blob(kind="state", number=1)


async def fetch(
    to: Member, source_of: Member, sink: Sink, chunks: range, progress_s: float = 20, blob: Blob = STATE
) -> list[int]:
    stream = to.node.fetch(source_of.peer, blob, chunks, sink, progress_s)
    return [index async for index in stream]
