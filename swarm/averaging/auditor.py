"""Auditor: each member checks some chunks of the means that other members have made, after each committed round.

Which ones it draws by randomness of its own, so nobody knows before a mean is made whether it will be checked. It
fetches what the maker included, reduces that again (``chunk_judge.py``), and sends the coordinator the evidence where
the bytes differ. In a grid it draws then one of the partial sums that the mean includes, and checks that in the same
way with its row reducer. Nobody has to believe it: the evidence proves itself.
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
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.chunk_judge import Shown, Subject, fault_of, make_evidence, masked_round
from shoal.swarm.averaging.inclusions import FIRST_LOOKS, Places, audits_a_round, included_blob
from shoal.swarm.averaging.masked_round import MaskedRound, most_shown_bytes
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import BlobUnavailable, Busy, DeadlineExceeded, LinkError, MemberGone, ShoalError, WireError
from shoal.swarm.protocol.evidence import MAX_EVIDENCE_BYTES
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.statements import PlanStatement, name_of, plan_digest
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_TRIES = 5

_UNSIGNED_ROUNDS, _UNSHOWN_ROUNDS = 2, 8
"""Rounds in whose reports an owner is accused that has not signed its part, or did not show what it included. Members
find the former together, the latter one after the other."""


_AGAIN_ROUNDS = 32
"""Rounds in which evidence is shown again that the coordinator could not take, as it had no room or we no credit."""

_SLOWEST_BYTES_S = 2**14
"""Rate at which a maker has to show what it included, or one could keep an auditor from all others. An honest one may
have to serve all auditors at once over a slow uplink."""


@dataclass(frozen=True)
class ChosenChunk:
    """A result chunk to check: index of its part in the plan, and its own in the round; ``maker``: index of a
    member."""

    part: int
    chunk: int
    maker: int


def auditable(store: ResultStore, verdict: Verdict, me: str) -> Iterator[ChosenChunk]:
    """Yield the chunks of a committed round that can be checked: others have signed for them."""
    members = store.plan.members
    for number, (digest, made) in enumerate(zip(verdict.digests, verdict.makers, strict=False)):
        if digest is None or made is None or members[made.member].peer == me:
            continue
        for chunk in store.chunks_of(store.plan.parts[number]):
            if not any(first <= chunk < stop for first, stop in made.chunks):
                continue
            header = store.group.header(store[chunk])
            if header.included and _shown_bytes(store, chunk, header) < MAX_EVIDENCE_BYTES / 2:
                yield ChosenChunk(number, chunk, made.member)


def _shown_bytes(store: ResultStore, chunk: int, header: ChunkHeader) -> int:
    """Return about how large the evidence on a chunk may be, or on a partial sum of it."""
    if store.plan.secure is not None:
        return most_shown_bytes(store, chunk, header) + store.result_bytes(chunk)
    group, (start, stop) = store.group, store.bounds(chunk)
    sums = [_sum_bytes(store, chunk, row) for row in header.reduced_rows]
    rows = [len(group.rows[row]) for row in header.reduced_rows]
    contributions = max([len(group.summed_directly(header)), *rows]) * store.leaf_grid.chunk_bytes(start, stop)
    return contributions + sum(sums) + store.result_bytes(chunk)


def _sum_bytes(store: ResultStore, chunk: int, row: int) -> int:
    group, (start, stop) = store.group.row(row), store.bounds(chunk)
    return group.result_bytes(store.codec_map.result(start, stop, len(group.members)), stop - start)


def unsigned_owners(store: ResultStore, verdict: Verdict) -> Iterator[str]:
    """Yield the owners of committed parts of which some chunk is signed by nobody.

    An owner that is gone may have had no time for that; one that stays lies, or it would sign. A stand-in signs for the
    chunks that it has made, and not for those that it has adopted from the owner."""
    makers = [*verdict.makers, *[None] * (len(verdict.digests) - len(verdict.makers))]
    for part, digest, made in zip(store.plan.parts, verdict.digests, makers, strict=True):
        chunks, signed = store.chunks_of(part), made.chunks if made is not None else ()
        if digest is not None and signed[:1] != ((chunks.start, chunks.stop),):
            yield store.plan.members[part.owner].peer


def choose(
    store: ResultStore, verdict: Verdict, me: str, known: Set[str], share: float, rng: random.Random
) -> list[ChosenChunk]:
    """Draw the chunks that member ``me`` checks of a committed round, so many that on average they take ``share``.

    Until all makers are ``known`` one more of those that are not, as often as takes ``FIRST_LOOKS`` times the share at
    most: a model has as few as four chunks for each member, of which a share finds a liar after many rounds only."""
    found = list(auditable(store, verdict, me))
    wanted = audits_a_round(share, len(store.plan.members), store.chunks, len(store.group.rows))
    count = math.floor(wanted) + (rng.random() < wanted % 1.0)
    chosen = rng.sample(found, min(count, len(found)))
    seen = {*known, *(store.plan.members[one.maker].peer for one in chosen)}
    new = [one for one in found if store.plan.members[one.maker].peer not in seen]
    return [*chosen, rng.choice(new)] if new and rng.random() < FIRST_LOOKS * wanted else chosen


@dataclass(frozen=True)
class _CommittedPart:
    """A committed part of a round. ``about``: the round's plan; ``results``: the part's chunks, in order; ``masked``:
    of a secure round."""

    store: ResultStore
    verdict: Verdict
    about: PlanStatement
    results: list[memoryview]
    masked: MaskedRound | None


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
        self._silent: dict[str, int] = {}
        """The same of members that could not be reached since they last answered: if they are most, this peer's own
        link is at fault."""
        self._others = 0
        self._known: set[str] = set()
        """Makers whose means this auditor has checked."""
        self._unshown: dict[str, tuple[int, bytes]] = {}
        """By maker, the newest evidence that the coordinator has not taken yet, and its round; 64 MiB in all."""
        self._offered: tuple[ResultStore, Verdict] | None = None
        self._news = asyncio.Event()

    def offer(self, store: ResultStore, verdict: Verdict) -> None:
        """Offer the results of the newest committed round; of earlier ones nothing more is checked."""
        for accused in (self._owing, self._silent):
            for peer in [one for one, until in accused.items() if until < verdict.round]:
                del accused[peer]
        for owner in unsigned_owners(store, verdict):
            self._owe(owner, verdict.round + _UNSIGNED_ROUNDS)
        self._offered = store, verdict
        self._others = len(store.plan.members) - 1
        self._news.set()

    def accused(self, round_number: int) -> set[str]:
        """Return the members to accuse in the report of a round, as they owe a signature or what they included.

        That proves nothing, so it excludes nobody: an owner that members with more than half of the credit accuse
        owns nothing for a while."""
        owing, silent = (
            {peer for peer, until in one.items() if round_number <= until} for one in (self._owing, self._silent)
        )
        return owing | silent if 2 * len(silent) <= self._others else owing

    def _owe(self, peer: str, until: int, *, is_silent: bool = False) -> None:
        """``is_silent``: it may also be this peer's link."""
        if peer == self._me:
            return
        if is_silent:
            self._silent[peer] = until
        else:
            self._silent.pop(peer, None)
            self._owing[peer] = max(until, self._owing.get(peer, 0))

    async def run(self) -> None:
        """Check chunks of each offered round, for ever."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._offered is not None
            (store, verdict), self._offered = self._offered, None
            try:
                await self._show_again(verdict.round)
                await self._audit_round(store, verdict)
            except (ShoalError, OSError) as error:
                log.warning("round %d: no more audits: %s", verdict.round, error)

    async def _audit_round(self, store: ResultStore, verdict: Verdict) -> None:
        chosen = await in_thread(choose, store, verdict, self._me, self._known, self._share, self._rng)
        chosen.sort(key=lambda one: store.plan.members[one.maker].peer in {*self._silent, *self._owing})  # those last
        about = PlanStatement(name_of(verdict), await in_thread(plan_digest, store.plan))
        masked = await in_thread(masked_round, store, about, verdict)
        # Held from now on: the store drops them when the next round is committed.
        results = {one.part: store.bytes_of(store.plan.parts[one.part]) for one in chosen}
        for one in chosen:
            if self._offered is not None:  # makers drop what they show of a round at the next verdict but one
                log.info("round %d: no more audits: a newer round was committed", verdict.round)
                return
            part, committed = (
                store.plan.parts[one.part],
                _CommittedPart(store, verdict, about, results[one.part], masked),
            )
            mean = Subject(one.part, one.chunk, None, results[one.part][one.chunk - store.chunks_of(part).start])
            if masked is not None:
                try:
                    await in_thread(masked.check_sets, one.part, mean.header(store))
                except WireError as error:  # no fault of the maker's
                    log.warning("round %d: no audit of chunk %d: %s", verdict.round, one.chunk, error)
                    continue
            shown = await self._audit(committed, mean, one.maker)
            sums, row_reducers = {} if shown is None else shown.partial_sums, store.plan.row_reducers(part)
            others = [row for row in sorted(sums) if store.plan.members[row_reducers[row]].peer != self._me]
            if others:
                row = self._rng.choice(others)
                await self._audit(committed, Subject(one.part, one.chunk, row, sums[row]), row_reducers[row])

    async def _audit(self, committed: _CommittedPart, subject: Subject, member: int) -> Shown | None:
        """Check what a member made, and accuse it where that is wrong. Returns what it includes if it is right.

        What goes wrong once the maker has shown it is no fault of the maker's."""
        store, number, chunk = committed.store, committed.store.plan.round, subject.chunk
        maker = store.plan.members[member].peer
        try:
            shown = await self._shown(committed, subject, maker)
            fault = await in_thread(fault_of, store, committed.about, subject, member, shown, committed.masked)
        except MemberGone as error:
            log.info("round %d: no audit of chunk %d: %s", number, chunk, error)
            return None
        except LinkError as error:
            has_answered = isinstance(error, WireError | BlobUnavailable | Busy)
            self._owe(maker, number + _UNSHOWN_ROUNDS, is_silent=not has_answered)
            log.warning("round %d: no audit of chunk %d of %s: %s", number, chunk, maker, error)
            return None
        self.audited += 1
        self._known.add(maker)
        self._silent.pop(maker, None)
        if fault is None:
            return shown
        log.warning("round %d: %s: %s", number, maker, fault.reason)
        evidence = await in_thread(make_evidence, committed.verdict, subject, committed.results, shown)
        await self._show(maker, number, evidence)
        return None

    async def _show(self, maker: str, number: int, evidence: bytes) -> None:
        """Show the coordinator evidence of a round, and keep it for later where that is not possible now.

        A liar whose friends take up all room for evidence, or that is found by newcomers alone, is not safe by that."""
        self._unshown.pop(maker, None)
        try:
            await self._accuse(evidence)
        except LinkError as error:
            self._unshown[maker] = number, evidence
            while sum(len(kept) for _, kept in self._unshown.values()) > MAX_EVIDENCE_BYTES:
                del self._unshown[next(iter(self._unshown))]
            log.warning("round %d: the evidence on %s is shown again later: %s", number, maker, error)

    async def _show_again(self, round_number: int) -> None:
        for maker, (number, evidence) in list(self._unshown.items()):
            if round_number - number > _AGAIN_ROUNDS:
                del self._unshown[maker]
            else:
                await self._show(maker, number, evidence)

    async def _shown(self, committed: _CommittedPart, subject: Subject, maker: str) -> Shown:
        """Fetch what the maker included in a chunk. Raises ``ShoalError``, the maker's too."""
        for _ in range(_TRIES - 1):
            try:
                return await self._fetch(committed, subject, maker)
            except Busy:
                await asyncio.sleep(self._deadlines.heartbeat_s * self._rng.random())
        return await self._fetch(committed, subject, maker)

    async def _fetch(self, committed: _CommittedPart, subject: Subject, maker: str) -> Shown:
        store, masked, part = committed.store, committed.masked, subject.part
        chunk, places, header = subject.chunk, Places.of(store), subject.header(store)
        members = {one: places.contribution(chunk, one) for one in subject.group(store).summed_directly(header)}
        rows = {row: places.partial_sum(chunk, row) for row in header.reduced_rows}
        wanted = {place: _sum_bytes(store, chunk, row) for row, place in rows.items()}
        if masked is None:
            size = store.leaf_grid.chunk_bytes(*store.bounds(chunk))
            wanted |= dict.fromkeys(members.values(), size)
            sizes = [size, *(_sum_bytes(store, chunk, row) for row in range(len(store.group.rows)))]
        else:
            wanted |= {place: masked.chunk_bytes(part, chunk, one) for one, place in members.items()}
            wanted[places.opening(chunk)] = masked.opening_bytes(part, header)
            sizes = [masked.chunk_bytes(part, chunk, one) for one in range(len(store.plan.members))]
            sizes.append(masked.opening_bytes(part, header))
        received: dict[int, memoryview] = {}
        ignored = memoryview(bytearray(max(sizes)))  # for what came to the maker, but is not in the mean

        def sink(place: int, size_bytes: int) -> memoryview:  # on the data plane's thread
            if size_bytes not in (0, wanted.get(place, size_bytes)) or size_bytes > ignored.nbytes:
                raise WireError(f"what a mean includes has no chunks of {size_bytes} bytes")
            received[place] = data = memoryview(bytearray(size_bytes)) if place in wanted else ignored[:size_bytes]
            return data

        span = range(min(wanted), max(wanted) + 1)
        limit_s = self._deadlines.request_s + sum(wanted.values()) / _SLOWEST_BYTES_S
        fetch = self._endpoint.fetch(maker, included_blob(store), span, sink, self._deadlines.request_s)
        try:
            async with asyncio.timeout(limit_s), aclosing(fetch) as stream:
                async for place in stream:
                    self.audited_bytes += received[place].nbytes
        except TimeoutError as error:
            raise DeadlineExceeded(f"it has not shown what its mean includes in {limit_s:.0f} s") from error
        if any(not received[place].nbytes for place in wanted):
            raise BlobUnavailable("it does not show all that its mean includes")
        return Shown(
            {member: received[place] for member, place in members.items()},
            {row: received[place] for row, place in rows.items()},
            memoryview(b"") if masked is None else received[places.opening(chunk)],
        )
