"""Fetching of results from other members: during a round, until its verdict is applied, and long after."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_streams import ExchangeContext, StreamMeter, receive_chunks
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import AboveBound, LinkError, ShoalError
from shoal.swarm.protocol.rounds import Part, Verdict
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_PARTS_AT_ONCE = 8
_DONORS_ASKED = 3
"""For each part, one after the other: who lacks a round lacks all of it, and the state can be had instead."""


async def fetch_part(
    endpoint: Endpoint,
    store: ResultStore,
    part: Part,
    holder: str,
    progress_s: float,
    put: Callable[[int, memoryview], Awaitable[None]] | None = None,
    meter: StreamMeter | None = None,
    *,
    only_held: bool = False,
) -> None:
    """Fetch what the store lacks of one part from ``holder``. Raises ``ShoalError``, the holder's too.

    ``put``: takes the chunks instead of the store; ``only_held``: skip chunks that the holder does not have yet."""
    put, blob = put or store.put, store.held if only_held else store.blob

    def room(chunk: int, size: int) -> memoryview:
        return memoryview(bytearray()) if only_held and not size else store.room(chunk, size)

    for run in store.missing(part):
        fetch = functools.partial(endpoint.fetch, holder, blob, run, progress_s=progress_s)
        async with aclosing(receive_chunks(fetch, room, meter or StreamMeter())) as stream:
            async for chunk, data in stream:
                if data.nbytes:
                    store.check(chunk, data)
                    await put(chunk, data)


async def adopt_agreed(context: ExchangeContext, part: Part, holders: Sequence[int]) -> None:
    """Adopt chunks of a part that two of ``holders``, indices of the plan, have already and alike.

    Nothing shows yet which bytes are the owner's, so nobody's word alone counts; unless there are no two others. Means
    above the plan's bound are never adopted."""
    store = context.store
    enough = min(2, len(store.plan.members) - 2)
    said: dict[int, list[memoryview]] = {}

    async def hear(chunk: int, data: memoryview) -> None:
        said.setdefault(chunk, []).append(data)
        if sum(same_bytes(data, one) for one in said[chunk]) >= enough:
            await store.put_checked(chunk, data)
            del said[chunk]

    for holder in holders:
        if store.has(part):
            return
        peer, wait_s = context.members[holder], context.deadlines.adopt_s
        with suppress(ShoalError):
            meter = context.meter(holder, store.held)
            await fetch_part(context.endpoint, store, part, peer, wait_s, hear, meter, only_held=True)


async def ensure_part(
    endpoint: Endpoint, store: ResultStore, part: Part, digest: bytes, others: Sequence[str], deadlines: Deadlines
) -> None:
    """Make sure that the store holds the committed bytes of a part, from its owner or any other member of the plan.

    Everybody is asked in turn for what is there already, again and again until nothing new has come for long: some may
    still be making them, but most who have not got them lack them as we do, and are not waited for one by one. Raises
    ``LinkError`` when nobody has them."""
    loop = asyncio.get_running_loop()
    if store.has(part):
        if await in_thread(store.digest, part) == digest:
            return
        store.forget(part)
    owner, trouble = store.plan.members[part.owner].peer, "nobody has them"
    holders = sorted(others, key=lambda peer: peer != owner)
    fewest, moved_s, one_by_one = len(store.chunks_of(part)), loop.time(), False
    while holders and loop.time() - moved_s < deadlines.result_s:
        for holder in list(holders):
            if one_by_one:
                store.forget(part)
            lacked = store.lacks(part)
            try:
                await fetch_part(endpoint, store, part, holder, deadlines.adopt_s, only_held=True)
            except ShoalError as error:  # the other side's errors come out of here, too
                trouble = str(error)
            if store.lacks(part) < fewest:
                fewest, moved_s = store.lacks(part), loop.time()
            if not store.has(part):
                continue
            if await in_thread(store.digest, part) == digest:
                await in_thread(_warn_of_norms, store, part)
                return
            trouble = f"{holder} has other bytes than the committed ones"
            fewest = len(store.chunks_of(part))
            if lacked == fewest:
                holders.remove(holder)
                log.warning("round %d: %s", store.plan.round, trouble)
            else:  # of several sources, any may be the wrong one: from now on everybody's bytes are taken by themselves
                one_by_one = True
            store.forget(part)
        await asyncio.sleep(deadlines.heartbeat_s if holders else 0.0)
    store.forget(part)
    raise LinkError(trouble)


async def fetch_committed(
    endpoint: Endpoint, store: ResultStore, verdict: Verdict, donors: Sequence[str], progress_s: float
) -> None:
    """Bring everything that a verdict of an earlier round has committed, different parts from different members.

    Whoever has other bytes, or does not send them, is asked for nothing more of that round. Raises ``LinkError`` when a
    part cannot be had."""
    useless: set[str] = set()
    places = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def bring(index: int, part: Part, digest: bytes) -> None:
        trouble = f"nobody has the results of round {verdict.round}"
        async with places:
            for _ in range(_DONORS_ASKED):
                left = [donor for donor in donors if donor not in useless]
                if not left:
                    break
                donor = left[index % len(left)]
                try:
                    await fetch_part(endpoint, store, part, donor, progress_s)
                except ShoalError as error:  # the donor's errors come out of here, too
                    trouble = f"{donor}: {error}"
                else:
                    if await in_thread(store.digest, part) == digest:
                        await in_thread(_warn_of_norms, store, part)
                        return
                    trouble = f"{donor} has other bytes of round {verdict.round} than the committed ones"
                    log.warning("%s", trouble)
                useless.add(donor)
                store.forget(part)
        raise LinkError(trouble)

    async with task_scope() as tasks:
        for index, (part, digest) in enumerate(zip(store.plan.parts, verdict.digests, strict=True)):
            if digest is not None:
                tasks.create_task(bring(index, part, digest))


def _warn_of_norms(store: ResultStore, part: Part) -> None:
    """Log committed means above the bound. They are applied all the same, as most members have reported them and parity
    comes first."""
    for index in store.chunks_of(part):
        try:
            store.check_norm(index, store[index])
        except AboveBound as error:
            log.warning("round %d was committed with a mean above the bound: %s", store.plan.round, error)
