"""Auditor: each member checks some chunks of the means that other members have made, after each committed round.

Which ones it draws by randomness of its own, so nobody knows before a mean is made whether it will be checked. It
fetches what the maker included, reduces that again (``chunk_judge.py``), and sends the coordinator the evidence where
the bytes differ. Nobody has to believe it: the evidence proves itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Set
from contextlib import aclosing
from dataclasses import dataclass

from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.buffer_pool import same_bytes
from shoal.swarm.averaging.chunk_judge import checked_contribution, make_evidence, reduce_again
from shoal.swarm.averaging.inclusions import audits_a_round
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import BlobUnavailable, Busy, MemberGone, ShoalError, WireError
from shoal.swarm.protocol.evidence import MAX_EVIDENCE_BYTES
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_TRIES = 5

_UNSIGNED_ROUNDS, _UNSHOWN_ROUNDS = 2, 8
"""Rounds in whose reports an owner is accused that has not signed its part, or did not show what it included. Members
find the former together, the latter one after the other."""


@dataclass(frozen=True)
class ChosenChunk:
    """A result chunk to check: index of its part in the plan, and its own in the round; ``maker``: index of a
    member."""

    part: int
    chunk: int
    maker: int


def auditable(store: ResultStore, verdict: Verdict, me: str) -> Iterator[ChosenChunk]:
    """Yield the chunks of a committed round that can be checked: others have signed for them, and their members were
    summed one by one."""
    members = store.plan.members
    for number, (digest, made) in enumerate(zip(verdict.digests, verdict.makers, strict=False)):
        if digest is None or made is None or members[made.member].peer == me:
            continue
        for chunk in store.chunks_of(store.plan.parts[number]):
            if not any(first <= chunk < stop for first, stop in made.chunks):
                continue
            header = store.group.header(store[chunk])
            size = store.leaf_grid.chunk_bytes(*store.bounds(chunk)) * (len(header.included) + 1)
            if header.included and not header.reduced_rows and size < MAX_EVIDENCE_BYTES / 2:
                yield ChosenChunk(number, chunk, made.member)


def unsigned_owners(store: ResultStore, verdict: Verdict) -> Iterator[str]:
    """Yield the owners of committed parts that nobody has signed for, or that they have signed for in part only.

    An owner that is gone may have had no time for that; one that stays lies, or it would sign."""
    makers = [*verdict.makers, *[None] * (len(verdict.digests) - len(verdict.makers))]
    for part, digest, made in zip(store.plan.parts, verdict.digests, makers, strict=True):
        chunks, signed = store.chunks_of(part), made.chunks if made is not None else ()
        is_whole = signed[:1] == ((chunks.start, chunks.stop),)
        if digest is not None and (made is None or (made.member == part.owner and not is_whole)):
            yield store.plan.members[part.owner].peer


def choose(store: ResultStore, verdict: Verdict, me: str, share: float, rng: random.Random) -> list[ChosenChunk]:
    """Draw the chunks that member ``me`` checks of a committed round, so many that on average they take ``share``."""
    found = list(auditable(store, verdict, me))
    wanted = audits_a_round(share, len(store.plan.members), store.chunks)
    count = math.floor(wanted) + (rng.random() < wanted % 1.0)
    return rng.sample(found, min(count, len(found)))


class Auditor:
    """Checks others' means in the background, while local work goes on.

    ``audited``: number of chunks checked so far; ``audited_bytes``: bytes that were fetched for that."""

    def __init__(
        self,
        endpoint: Endpoint,
        me: str,
        share: float,
        deadlines: Deadlines,
        accuse: Callable[[bytes], Awaitable[object]],
        rng: random.Random,
    ) -> None:
        """``accuse``: sends evidence to the coordinator; ``rng``: of no use to a maker that could foresee it."""
        self.audited = self.audited_bytes = 0
        self._endpoint, self._me, self._share, self._rng = endpoint, me, share, rng
        self._deadlines, self._accuse = deadlines, accuse
        self._owing: dict[str, int] = {}
        """By member that owes something, the last round in whose report it is accused."""
        self._offered: tuple[ResultStore, Verdict] | None = None
        self._news = asyncio.Event()

    def offer(self, store: ResultStore, verdict: Verdict) -> None:
        """Offer the results of the newest committed round; of earlier ones nothing more is checked."""
        for owner in unsigned_owners(store, verdict):
            self._owe(owner, verdict.round + _UNSIGNED_ROUNDS)
        self._offered = store, verdict
        self._news.set()

    def accused(self, round_number: int) -> set[str]:
        """Return the members to accuse in the report of a round, as they owe a signature or what they included.

        That proves nothing, so it excludes nobody: an owner that members with more than half of the credit accuse
        owns nothing for a while."""
        return {peer for peer, until in self._owing.items() if round_number <= until}

    def _owe(self, peer: str, until: int) -> None:
        if peer != self._me:
            self._owing[peer] = max(until, self._owing.get(peer, 0))

    async def run(self) -> None:
        """Check chunks of each offered round, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._offered is not None
            (store, verdict), self._offered = self._offered, None
            try:
                await self._audit_round(store, verdict)
            except ShoalError as error:
                log.warning("round %d: no more audits: %s", verdict.round, error)

    async def _audit_round(self, store: ResultStore, verdict: Verdict) -> None:
        chosen = await in_thread(choose, store, verdict, self._me, self._share, self._rng)
        # Held from now on: the store drops them when the next round is committed.
        results = {one.part: store.bytes_of(store.plan.parts[one.part]) for one in chosen}
        for one in chosen:
            try:
                await self._audit(store, verdict, one, results[one.part])
            except MemberGone as error:
                log.info("round %d: no audit of chunk %d: %s", verdict.round, one.chunk, error)
            except ShoalError as error:
                maker = store.plan.members[one.maker].peer
                self._owe(maker, verdict.round + _UNSHOWN_ROUNDS)
                log.warning("round %d: no audit of chunk %d of %s: %s", verdict.round, one.chunk, maker, error)

    async def _audit(self, store: ResultStore, verdict: Verdict, one: ChosenChunk, results: list[memoryview]) -> None:
        result = results[one.chunk - store.chunks_of(store.plan.parts[one.part]).start]
        contributions = await self._included(store, one, set(store.group.header(result).included))
        is_right = await in_thread(self._is_mean, store, one.chunk, contributions, result)
        self.audited += 1
        if is_right:
            return
        maker = store.plan.members[one.maker].peer
        log.warning("round %d: chunk %d of %s is not what it says it includes", verdict.round, one.chunk, maker)
        await self._accuse(await in_thread(make_evidence, verdict, one.part, one.chunk, results, contributions))

    def _is_mean(
        self, store: ResultStore, chunk: int, contributions: dict[int, memoryview], result: memoryview
    ) -> bool:
        packed = {member: checked_contribution(store, chunk, member, data) for member, data in contributions.items()}
        return same_bytes(reduce_again(store, chunk, sorted(packed), packed), result)

    async def _included(self, store: ResultStore, one: ChosenChunk, included: Set[int]) -> dict[int, memoryview]:
        """Fetch what the maker included in a chunk. Raises ``ShoalError``, the maker's too."""
        for _ in range(_TRIES - 1):
            try:
                return await self._fetch(store, one, included)
            except Busy:
                await asyncio.sleep(self._deadlines.heartbeat_s * self._rng.random())
        return await self._fetch(store, one, included)

    async def _fetch(self, store: ResultStore, one: ChosenChunk, included: Set[int]) -> dict[int, memoryview]:
        members = len(store.plan.members)
        first, size = one.chunk * members, store.leaf_grid.chunk_bytes(*store.bounds(one.chunk))
        received: dict[int, memoryview] = {}
        ignored = memoryview(bytearray(size))  # for contributions that came, but are not in the mean

        def sink(index: int, size_bytes: int) -> memoryview:  # on the data plane's thread
            if size_bytes not in (0, size):
                raise WireError(f"a contribution of {size_bytes} bytes does not fit")
            is_wanted = index - first in included
            received[index - first] = data = memoryview(bytearray(size_bytes)) if is_wanted else ignored[:size_bytes]
            return data

        blob, maker = Blob(kind="included", number=store.plan.round), store.plan.members[one.maker].peer
        chunks = range(first, first + members)
        async with aclosing(self._endpoint.fetch(maker, blob, chunks, sink, self._deadlines.request_s)) as stream:
            async for index in stream:
                self.audited_bytes += received[index - first].nbytes
        if any(not received[member].nbytes for member in included):
            raise BlobUnavailable("it does not show all that its mean includes")
        return {member: received[member] for member in included}
