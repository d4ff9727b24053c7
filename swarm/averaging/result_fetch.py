"""Fetching of results from other members: within a round, after its verdict, and of earlier rounds."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_header import may_hold
from shoal.swarm.averaging.chunk_streams import ExchangeContext, StreamMeter, receive_chunks
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import AboveBound, LinkError, ShoalError
from shoal.swarm.protocol.rounds import Part, Verdict
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_PARTS_AT_ONCE = 8
_DONORS_ASKED = 3
"""Donors asked for each part, one after the other: a donor that lacks one part of a round lacks all of it, and a member
can fetch the state instead."""


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
    """Adopt chunks of a failed owner's part of which two ``holders``, indices of the plan, have the same bytes.

    There is no verdict yet that tells which bytes are the owner's, so one holder alone is not believed, unless the plan
    has no two others. Means above the plan's bound are never adopted."""
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


async def complete_results(
    endpoint: Endpoint, store: ResultStore, verdict: Verdict, me: str, deadlines: Deadlines
) -> None:
    """Complete the results of the round that was just committed: its members are still making or fetching them.

    Raises ``LinkError`` when a part cannot be had."""
    plan = store.plan
    for part, digest in zip(plan.parts, verdict.digests, strict=True):
        if digest is None:
            store.drop(part)
            continue
        nearest = dict.fromkeys([part.owner, *may_hold(plan, part), *range(len(plan.members))])
        others = [plan.members[one].peer for one in nearest if plan.members[one].peer != me]
        await complete_part(endpoint, store, part, digest, others, deadlines)


async def complete_part(
    endpoint: Endpoint, store: ResultStore, part: Part, digest: bytes, others: Sequence[str], deadlines: Deadlines
) -> None:
    """Make sure that the store holds the committed bytes of a part; the ``others`` are asked in this order.

    Each is asked for the chunks that it has already, again and again until ``result_s`` pass without a new one: some
    may still be making them, but most of those that lack chunks lack them as we do, so nobody is waited for alone.
    Raises ``LinkError`` when nobody has them."""
    if store.has(part):
        if await in_thread(store.digest, part) == digest:
            return
        store.forget(part)
    loop, holders, trouble = asyncio.get_running_loop(), list(others), "no other member has them"
    fewest, moved_s, one_by_one = len(store.chunks_of(part)), loop.time(), False
    while holders and loop.time() - moved_s < deadlines.result_s:
        for holder in list(holders):
            if one_by_one:
                store.forget(part)
            lacked = store.lacks(part)
            try:
                await fetch_part(endpoint, store, part, holder, deadlines.adopt_s, only_held=True)
            except ShoalError as error:  # the holder's errors, too
                trouble = f"{holder}: {error}"
            if store.lacks(part) < fewest:
                fewest, moved_s = store.lacks(part), loop.time()
            if not store.has(part):
                continue
            if await _is_committed(store, part, digest):
                return
            trouble = f"{holder} has other bytes than the committed ones"
            fewest = len(store.chunks_of(part))
            if lacked == fewest:
                holders.remove(holder)
                log.warning("round %d: %s; it is not asked again for this part", store.plan.round, trouble)
            else:  # the wrong chunks may be of any holder: from now on, take all chunks of one holder
                one_by_one = True
            store.forget(part)
        await asyncio.sleep(deadlines.heartbeat_s if holders else 0.0)
    store.forget(part)
    raise LinkError(trouble)


async def fetch_committed(
    endpoint: Endpoint, store: ResultStore, verdict: Verdict, donors: Sequence[str], progress_s: float
) -> None:
    """Fetch all results of an earlier round, different parts from different donors.

    A donor that has other bytes than the committed ones, or does not send its bytes, is asked for nothing more of that
    round. Raises ``LinkError`` when a part cannot be had."""
    useless: set[str] = set()
    places = asyncio.Semaphore(_PARTS_AT_ONCE)

    async def bring(index: int, part: Part, digest: bytes) -> None:
        trouble = f"no member has the results of round {verdict.round}"
        async with places:
            for _ in range(_DONORS_ASKED):
                left = [donor for donor in donors if donor not in useless]
                if not left:
                    break
                donor = left[index % len(left)]
                try:
                    await fetch_part(endpoint, store, part, donor, progress_s)
                except ShoalError as error:  # the donor's errors, too
                    trouble = f"{donor}: {error}"
                else:
                    if await _is_committed(store, part, digest):
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


async def _is_committed(store: ResultStore, part: Part, digest: bytes) -> bool:
    """Whether a complete part has the committed bytes; logs those of its means that are above the bound.

    They are applied all the same: most members have reported them, and parity comes first."""

    def check() -> bool:
        if store.digest(part) != digest:
            return False
        for index in store.chunks_of(part):
            try:
                store.check_norm(index, store[index])
            except AboveBound as error:
                log.warning("round %d was committed with a mean above the plan's bound: %s", store.plan.round, error)
        return True

    return await in_thread(check)
