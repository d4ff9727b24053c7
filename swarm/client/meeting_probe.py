"""Attempts to connect to the members that reduce parts, so that the coordinator plans no meeting that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

from shoal.swarm.client.bandwidth_probe import PROBE, PROBE_CHUNK_BYTES
from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import ShoalError, WireError
from shoal.swarm.transport.node import Endpoint

MOST_TRIED = 16
"""Members that are tried without any other reason: those that are there the longest, who mostly own the parts."""

_ATTEMPT_S, _LOOK_S, _LONGEST_S = 3.0, 5.0, 600.0


async def keep_meeting(client: CoordinatorClient, endpoint: Endpoint, changed: Callable[[], None]) -> None:
    """Connect to members that can be dialed, once each, and again and again, ever more seldom, to those that failed.

    ``changed``: called when other members could not be met than before. Not while a round is averaged."""
    node, loop = client.node, asyncio.get_running_loop()
    node.unmet.patience_s = client.deadlines.dead_s
    tried: dict[str, tuple[float, float]] = {}
    """By member, the moment of the next attempt, and the time after that."""
    while client.view.phase != "ended":
        view = await client.wait_for(lambda view: view.phase != "averaging")
        if view.phase == "ended":
            return
        named, failed = node.unmet.named, node.unmet.failed
        others = [peer for peer in node.reachable_owners() if peer != client.peer][:MOST_TRIED]
        tried = {peer: plan for peer, plan in tried.items() if peer in others or peer in failed}
        for peer in {*others, *failed}:
            due_s, pause_s = tried.get(peer, (0.0, client.deadlines.dead_s))
            if loop.time() >= due_s and (peer not in tried or peer in failed):
                await _meet(endpoint, peer)
                tried[peer] = loop.time() + pause_s, min(2 * pause_s, _LONGEST_S)
        if node.unmet.named != named:
            changed()
        await asyncio.sleep(_LOOK_S)


async def _meet(endpoint: Endpoint, peer: str) -> None:
    place = memoryview(bytearray(PROBE_CHUNK_BYTES))

    def sink(chunk: int, size_bytes: int) -> memoryview:
        if size_bytes > PROBE_CHUNK_BYTES:
            raise WireError(f"a probe's chunk has {PROBE_CHUNK_BYTES} bytes, not {size_bytes}")
        return place[:size_bytes]

    with suppress(ShoalError):
        async with aclosing(endpoint.fetch(peer, PROBE, range(1), sink, _ATTEMPT_S)) as stream:
            async for _ in stream:
                pass
