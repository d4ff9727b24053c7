"""How fast the members of a round deliver: measured on the streams that we pull anyway, for the round's report."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from shoal.swarm.protocol.messages import MAX_DELIVERIES, Blob, Delivery
from shoal.swarm.transport.links import Sink
from shoal.swarm.transport.source import ChunkSource
from shoal.swarm.transport.transport import Endpoint

_FEWEST_BYTES = 2**18
"""Less says more about delays than about a link."""


@dataclass
class Pace:
    """What one member delivered, in the time that we waited for chunks of its contribution.

    Partials and results are not waited for here: who makes them waits for others itself. But they come over the same
    link, so what arrives of them meanwhile counts."""

    size_bytes: int = 0
    seconds: float = 0.0
    _beside_bytes: int = 0
    _arrived_s: float = -math.inf

    def began(self, now_s: float) -> None:
        """The first chunk of a stream is here: how long it took is not the link's, but everybody's start."""
        self._beside_bytes, self._arrived_s = 0, now_s

    def arrived(self, size_bytes: int, now_s: float, waited_s: float, paused_s: float) -> None:
        """Another chunk of a stream, ``waited_s`` after we asked for it, ``paused_s`` after the one before had come.

        After a pause of ours that was longer than the wait, it had been lying here and tells nothing. Streams run
        beside each other: no moment counts twice."""
        if waited_s >= paused_s:
            self.size_bytes += size_bytes + self._beside_bytes
            self.seconds += min(waited_s + paused_s, now_s - self._arrived_s)
        self._beside_bytes, self._arrived_s = 0, now_s

    def arrived_beside(self, size_bytes: int) -> None:
        """A chunk of something else."""
        self._beside_bytes += size_bytes

    @property
    def bps(self) -> float | None:
        """Bits a second; None while too little came to tell."""
        if self.size_bytes < _FEWEST_BYTES or not self.seconds:
            return None
        return max(1.0, 8 * self.size_bytes / self.seconds)


class PacedEndpoint:
    """An endpoint that measures what is fetched over it (an ``Endpoint``)."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._paces: dict[str, Pace] = {}

    def publish(self, blob: Blob, source: ChunkSource) -> None:
        self._endpoint.publish(blob, source)

    def retract(self, blob: Blob) -> None:
        self._endpoint.retract(blob)

    def share_uplink(self, shares: Mapping[str, float], scope: int = 0) -> None:
        self._endpoint.share_uplink(shares, scope)

    async def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: Sink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        """As the endpoint's."""
        pace, sizes = self._paces.setdefault(peer, Pace()), dict.fromkeys(chunks, 0)

        def measured(chunk: int, size_bytes: int) -> memoryview:  # on the data plane's thread
            sizes[chunk] = size_bytes
            return sink(chunk, size_bytes)

        loop = asyncio.get_running_loop()
        arrived_s = asked_s = loop.time()
        async with aclosing(self._endpoint.fetch(peer, blob, chunks, measured, progress_s)) as stream:
            async for chunk in stream:
                now_s = loop.time()
                if blob.kind != "contribution":
                    pace.arrived_beside(sizes[chunk])
                elif chunk == chunks.start:
                    pace.began(now_s)
                else:
                    pace.arrived(sizes[chunk], now_s, now_s - asked_s, asked_s - arrived_s)
                arrived_s = now_s
                yield chunk
                asked_s = loop.time()

    def forget(self) -> None:
        """Begin anew, for another round."""
        self._paces.clear()

    def deliveries(self, members: Sequence[str], me: str, round_number: int) -> tuple[Delivery, ...]:
        """Of some of the plan's ``members``, others in every round when there are more than a report has room for."""
        known = [(index, pace.bps) for index, peer in enumerate(members) if (pace := self._paces.get(peer)) is not None]
        seen = [Delivery(member=index, bps=bps) for index, bps in known if bps is not None]
        if not seen:
            return ()
        first = (members.index(me) + round_number * MAX_DELIVERIES) % len(seen)
        return tuple((seen[first:] + seen[:first])[:MAX_DELIVERIES])
