"""Attempts to connect to the members that reduce parts, so that the coordinator plans no meeting that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from shoal.swarm.client.bandwidth_probe import PROBE, PROBE_CHUNK_BYTES
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import ShoalError, WireError
from shoal.swarm.transport.node import Endpoint

MOST_TRIED = 16
"""Members that are tried without any other reason: those that are there the longest, who mostly own the parts."""

_ATTEMPT_S, _MOST_TIMES = 3.0, 4
"""Least time for a first attempt, and how many times as long the later ones may take; each takes once more. Where
machines are busy a connection takes seconds, and a member may be named after two attempts."""

_LOOK_S, _GROWTH, _LONGEST_S = 5.0, 1.5, 120.0
"""Between two looks at what is due; growth of the pause between two attempts with a member, and the longest one. A
member that names another one is left out of rounds until an attempt succeeds."""


@dataclass(frozen=True)
class _Attempts:
    """Attempts with one member so far; the next one is due at a moment of the loop's clock, if the last has failed."""

    made: int
    due_s: float
    pause_s: float

    def after(self, now_s: float) -> _Attempts:
        return _Attempts(self.made + 1, now_s + self.pause_s, min(_GROWTH * self.pause_s, _LONGEST_S))


async def keep_meeting(client: CoordinatorClient, endpoint: Endpoint, changed: Callable[[], None]) -> None:
    """Connect to members that can be dialed, once each, and again and again, ever more seldom, to those that failed; at
    once when they have connected to this one.

    ``changed``: called when other members could not be met than before. Not while a round is averaged."""
    node, loop = client.node, asyncio.get_running_loop()
    node.unmet.patience_s = client.deadlines.dead_s
    # Whoever does not know our key yet asks with its next heartbeat before it lets us in.
    first_s = max(_ATTEMPT_S, 2 * client.deadlines.heartbeat_s)
    tried: dict[str, _Attempts] = {}

    async def attempt(peer: str) -> None:
        before = tried.get(peer, _Attempts(0, 0.0, client.deadlines.dead_s))
        await _meet(endpoint, peer, first_s * min(before.made + 1, _MOST_TIMES))
        tried[peer] = before.after(loop.time())

    while client.view.phase != "ended":
        view = await client.wait_for(lambda view: view.phase != "averaging")
        if view.phase == "ended":
            return
        named, failed = node.unmet.named, node.unmet.failed
        others = [peer for peer in node.reachable_owners() if peer != client.peer][:MOST_TRIED]
        tried = {peer: attempts for peer, attempts in tried.items() if peer in others or peer in failed}
        again = [
            peer
            for peer in failed
            if (known := tried.get(peer)) is not None and (loop.time() >= known.due_s or node.is_linked(peer))
        ]
        for peer in dict.fromkeys((*others, *failed)):  # one by one, as this process has just begun
            if peer not in tried:
                await attempt(peer)
        async with asyncio.TaskGroup() as tasks:  # together, as each may take all of its time
            for peer in again:
                tasks.create_task(attempt(peer))
        if node.unmet.named != named:
            changed()
        await asyncio.sleep(_LOOK_S)


async def _meet(endpoint: Endpoint, peer: str, limit_s: float) -> None:
    place = memoryview(bytearray(PROBE_CHUNK_BYTES))

    def sink(chunk: int, size_bytes: int) -> memoryview:
        if size_bytes > PROBE_CHUNK_BYTES:
            raise WireError(f"a probe's chunk has {PROBE_CHUNK_BYTES} bytes, not {size_bytes}")
        return place[:size_bytes]

    with suppress(ShoalError):
        async with aclosing(endpoint.fetch(peer, PROBE, range(1), sink, limit_s)) as stream:
            async for _ in stream:
                pass
