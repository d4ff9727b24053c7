"""Endpoints in one process: chunks take time by latency and bandwidth, and faults happen at named steps."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from tests.fakes.virtual_clock import now_s, until

from shoal.swarm.errors import BlobUnavailable, Busy, LinkError, MemberGone, Unreachable
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.bulk.link import ChunkSink
from shoal.swarm.transport.bulk.source import ChunkSource, CountedSource


@dataclass(frozen=True)
class Step:
    """``holder`` is about to send ``chunk`` of ``blob`` to ``to``."""

    holder: str
    to: str
    blob: Blob
    chunk: int


Fault = Callable[[Step, bytes], Awaitable[bytes]]
"""Sees every step and its bytes; waits, changes the bytes, kills somebody or raises, as it likes."""


class MemoryNetwork:
    """``latency_s`` and ``bandwidth_bps``: ranges; every link draws its own from the seed."""

    sends_on = False
    """Whether a chunk is on its way while its receiver has not asked for it yet, as far as a stream's credit goes."""

    def __init__(
        self,
        seed: int = 0,
        latency_s: tuple[float, float] = (0.001, 0.01),
        bandwidth_bps: tuple[float, float] = (1e8, 1e9),
    ) -> None:
        self.endpoints: dict[str, MemoryEndpoint] = {}
        self.faults: list[Fault] = []
        self.log: list[Step] = []
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        """By sender and receiver."""
        self.cut: set[frozenset[str]] = set()
        """Pairs without a connection: both notice at once."""
        self.silent: set[tuple[str, str]] = set()
        """(from, to): what goes this way is lost, and nobody notices but by waiting."""
        self.is_stopped: Callable[[str], bool] = lambda peer: False
        self._seed, self._latency_s, self._bandwidth_bps = seed, latency_s, bandwidth_bps
        self._links: dict[tuple[str, str], tuple[float, float]] = {}

    def endpoint(self, peer: str) -> "MemoryEndpoint":
        self.endpoints[peer] = MemoryEndpoint(self, peer)
        return self.endpoints[peer]

    def kill(self, peer: str) -> None:
        """Cut the peer off in both directions from now on."""
        self.endpoints[peer].alive = False

    def connected(self, one: str, other: str) -> bool:
        alive = self.endpoints[one].alive and self.endpoints[other].alive
        return alive and frozenset((one, other)) not in self.cut

    async def carried(self, sender: str, receiver: str) -> None:
        """Return when what the one sends now reaches the other; never, if nothing does."""
        await until(lambda: not self.is_stopped(sender), 0.01)
        if (sender, receiver) in self.silent:
            await asyncio.Event().wait()

    def link(self, one: str, other: str) -> tuple[float, float]:
        """Return latency and bandwidth from one peer to the other."""
        if (one, other) not in self._links:
            draw = random.Random(f"{self._seed} {one} {other}")
            self._links[one, other] = draw.uniform(*self._latency_s), draw.uniform(*self._bandwidth_bps)
        return self._links[one, other]


class UplinkNetwork(MemoryNetwork):
    """``uplinks_bps`` by peer, of each line that it has to another; ``usual_bps`` for all others."""

    sends_on = True

    def __init__(self, usual_bps: float) -> None:
        super().__init__()
        self.usual_bps = usual_bps
        self.uplinks_bps: dict[str, float] = {}

    def link(self, one: str, other: str) -> tuple[float, float]:
        return 0.01, self.uplinks_bps.get(one, self.usual_bps)


class MemoryEndpoint:
    """Resumes and gives up like ``Node``. ``roster``: who may be asked; None for everybody; ``key``: by which sources
    know it as their reader."""

    def __init__(self, network: MemoryNetwork, peer: str) -> None:
        self.peer = peer
        self.key = peer.encode()
        self.alive = True
        self.blobs: dict[Blob, ChunkSource] = {}
        self.roster: set[str] | None = None
        self.uplink_shares: dict[str, float] = {}
        self._network = network

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self.blobs[blob] = source

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        """Remember the shares; links are even here."""
        self.uplink_shares = dict(shares)

    def leave(self, scope: int) -> None:
        self.blobs = {blob: source for blob, source in self.blobs.items() if blob.scope != scope}

    def path_reports(self) -> tuple[()]:
        return ()

    def retract(self, blob: Blob) -> None:
        self.blobs.pop(blob, None)

    async def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        assert peer != self.peer, "nobody has a link with itself"
        following, progress, trouble = chunks.start, now_s(), LinkError(f"{peer} sent nothing")
        while following < chunks.stop:
            try:
                rest = range(following, chunks.stop)
                async with aclosing(self._attempt(peer, blob, rest, sink, progress_s / 3)) as attempt:
                    async for chunk in attempt:
                        yield chunk
                        following, progress = chunk + 1, now_s()
            except (MemberGone, Busy):
                raise
            except LinkError as error:
                trouble = error
            if following < chunks.stop:
                if now_s() - progress > progress_s:
                    raise trouble
                await asyncio.sleep(0.25)

    async def _attempt(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, wait_s: float
    ) -> AsyncGenerator[int, None]:
        if self.roster is not None and peer not in self.roster:
            raise MemberGone(f"{peer} is not a member of the run (any more)")
        latency_s, _ = self._network.link(peer, self.peer)
        await asyncio.sleep(2 * latency_s)
        try:
            async with asyncio.timeout(wait_s):
                await self._network.carried(self.peer, peer)
                await until(lambda: not self._network.is_stopped(peer), 0.01)
        except TimeoutError as error:
            raise LinkError(f"{peer} did not answer for {wait_s:.1f} s") from error
        source = self._holder(peer).blobs.get(blob)
        if source is None:
            raise BlobUnavailable(f"no {blob.kind} of {blob.number} here")
        if chunks.stop > source.chunks:
            raise BlobUnavailable("not so many chunks")
        if isinstance(source, CountedSource):
            source.begin_reading(self.key)
        try:
            async with aclosing(self._receive(peer, blob, chunks, source, sink, wait_s)) as stream:
                async for chunk in stream:
                    yield chunk
        finally:
            if isinstance(source, CountedSource):
                source.end_reading(self.key)

    async def _receive(
        self, peer: str, blob: Blob, chunks: range, source: ChunkSource, sink: ChunkSink, wait_s: float
    ) -> AsyncGenerator[int, None]:
        latency_s, bandwidth_bps = self._network.link(peer, self.peer)
        free_s = math.inf
        for chunk in chunks:
            try:
                async with asyncio.timeout(wait_s):
                    payload = await self._send(Step(peer, self.peer, blob, chunk), source)
                    sent_s = max(0.0, now_s() - free_s) if self._network.sends_on else 0.0
                    await asyncio.sleep(max(0.0, 8 * len(payload) / bandwidth_bps - sent_s))
                    if chunk == chunks.start:
                        await asyncio.sleep(latency_s)
            except TimeoutError as error:
                raise LinkError(f"{peer} sent no chunk for {wait_s:.1f} s") from error
            self._holder(peer)
            free_s = now_s()
            sink(chunk, len(payload))[:] = payload
            yield chunk

    async def _send(self, step: Step, source: ChunkSource) -> bytes:
        payload = bytes(await source.chunk(step.chunk))
        for fault in self._network.faults:
            payload = await fault(step, payload)
        await self._network.carried(step.holder, step.to)
        if not self._network.connected(step.holder, step.to):
            raise LinkError("the connection was lost")
        self._network.log.append(step)
        self._network.moved_bytes[step.holder, step.to] += len(payload)
        return payload

    def _holder(self, peer: str) -> "MemoryEndpoint":
        holder = self._network.endpoints[peer]
        if not self._network.connected(peer, self.peer):
            raise Unreachable(f"nothing answers at {peer}")
        return holder


# Faults -------------------------------------------------------------------------------------------------------


def at(kind: str, holder: str, chunk: int, act: Callable[[], None], to: str | None = None) -> Fault:
    """``act`` just before ``holder`` sends that chunk (to ``to``) for the first time; the chunk is lost."""
    done = False

    async def fault(step: Step, payload: bytes) -> bytes:
        nonlocal done
        if not done and (step.blob.kind, step.holder, step.chunk) == (kind, holder, chunk) and to in (None, step.to):
            done = True
            act()
            raise LinkError("the connection was lost")
        return payload

    return fault


def stalled(kind: str, holder: str, chunk: int, to: str | None = None) -> Fault:
    """``holder`` never sends that chunk, nor any after it."""

    async def fault(step: Step, payload: bytes) -> bytes:
        if (step.blob.kind, step.holder) == (kind, holder) and step.chunk >= chunk and to in (None, step.to):
            await asyncio.Event().wait()
        return payload

    return fault


def dripping(kind: str, holder: str, every_s: float, to: str | None = None) -> Fault:
    """``holder`` sends each chunk that long after it was first asked for it."""
    due_s: dict[tuple[str, int], float] = {}

    async def fault(step: Step, payload: bytes) -> bytes:
        if (step.blob.kind, step.holder) == (kind, holder) and to in (None, step.to):
            await asyncio.sleep(max(0.0, due_s.setdefault((step.to, step.chunk), now_s() + every_s) - now_s()))
        return payload

    return fault


def changed(kind: str, holder: str, change: Callable[[bytes], bytes], to: str | None = None) -> Fault:
    """``holder`` sends other bytes than it has (to ``to``)."""

    async def fault(step: Step, payload: bytes) -> bytes:
        wrong = (step.blob.kind, step.holder) == (kind, holder) and to in (None, step.to)
        return change(payload) if wrong else payload

    return fault
