"""Bandwidth probes: fetch random bytes from other members to measure this machine's link.

A newcomer measures before its first round, and a pipeline's peer every few minutes, as plans depend on the result.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress

from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import ShoalError, WireError
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

PROBE = Blob(kind="probe", number=0)
PROBE_CHUNKS = 16
PROBE_CHUNK_BYTES = 2**16
PROBE_S = 1.0
"""Longest probe of one member, which sends 1 MiB at most."""

AGAIN_S, FIRST_S = 300.0, 10.0
"""Time between two probes, and until the next one if no member answered."""

_RECENT_PROBES = 3
_ANSWERS = 2
_MAX_ASKED = 4


class ProbeSource:
    """1 MiB of incompressible bytes (a ``ChunkSource``)."""

    chunks = PROBE_CHUNKS

    def __init__(self) -> None:
        self._bytes = memoryview(os.urandom(PROBE_CHUNK_BYTES))

    async def chunk(self, index: int) -> memoryview:
        return self._bytes


async def probe(endpoint: Endpoint, members: Sequence[str]) -> float:
    """The higher rate of the first two members that answer, in bits a second; 0 if none does."""
    rates: list[float] = []
    for member in members[:_MAX_ASKED]:
        if len(rates) < _ANSWERS and (rate := await _probe_one(endpoint, member)):
            rates.append(rate)
    return max(rates, default=0.0)


async def _probe_one(endpoint: Endpoint, member: str) -> float:
    place = memoryview(bytearray(PROBE_CHUNK_BYTES))

    def sink(chunk: int, size_bytes: int) -> memoryview:
        if size_bytes != PROBE_CHUNK_BYTES:
            raise WireError(f"a probe's chunk has {PROBE_CHUNK_BYTES} bytes, not {size_bytes}")
        return place

    loop = asyncio.get_running_loop()
    began_s, arrived_s, arrived_bytes = 0.0, 0.0, 0
    with suppress(ShoalError, TimeoutError):
        async with (
            asyncio.timeout(PROBE_S),
            aclosing(endpoint.fetch(member, PROBE, range(PROBE_CHUNKS), sink, PROBE_S)) as stream,
        ):
            async for chunk in stream:
                arrived_s = loop.time()
                if chunk == 0:  # the time to connect and ask does not count
                    began_s = arrived_s
                else:
                    arrived_bytes += PROBE_CHUNK_BYTES
    return 8 * arrived_bytes / (arrived_s - began_s) if arrived_s > began_s else 0.0


async def probe_link(client: CoordinatorClient, endpoint: Endpoint, found: Callable[[float], None]) -> None:
    """Measure the link for the plan of the first round or, in a pipeline, for the plans of stages until the run ends.

    Members that reduce nothing need not measure."""

    def members() -> list[str]:
        return witnesses(client.node.trainers(client.scope), client.peer)

    if client.run_file.pipeline is not None:
        await keep_probing(client, endpoint, members, found)
    elif client.me.role == "trainer" and client.reachable:
        found(await probe_between_rounds(client, endpoint, members()))


async def keep_probing(
    client: CoordinatorClient, endpoint: Endpoint, members: Callable[[], Sequence[str]], found: Callable[[float], None]
) -> None:
    """Probe until the run ends; call ``found`` with the highest of the last three rates, in bits a second.

    Other traffic lowers single probes, but rarely three in a row."""
    rates: deque[float] = deque(maxlen=_RECENT_PROBES)
    while client.view.phase != "ended":
        if rate := await probe_between_rounds(client, endpoint, members()):
            rates.append(rate)
            found(max(rates))
        await asyncio.sleep(AGAIN_S if rate else FIRST_S)


async def probe_between_rounds(client: CoordinatorClient, endpoint: Endpoint, members: Sequence[str]) -> float:
    """Probe while no round is averaging: its transfers have precedence, and would lower the rate."""
    view = await client.wait_for(lambda view: view.phase != "averaging")
    if view.phase == "ended":
        return 0.0
    async with asyncio.TaskGroup() as tasks:
        probing = tasks.create_task(probe(endpoint, members))
        probing.add_done_callback(lambda _: client.wake())

        def is_over(view: RunView) -> bool:
            return probing.done() or view.phase == "averaging"

        await client.wait_for(is_over)
        probing.cancel()
    return 0.0 if probing.cancelled() else probing.result()


def witnesses(members: Sequence[str], me: str) -> list[str]:
    """The other members, in an order that begins at a different one for each member, so that all share the load."""
    others = sorted(member for member in members if member != me)
    first = sum(other < me for other in others)
    return others[first:] + others[:first]
