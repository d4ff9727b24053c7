"""Exchange of one secure round: masked contributions to the owners of parts, opened sums, and means from the owners.

The network's side of ``swarm/secure``. The way of a mean back, its digests and the verdict are those of any round.
There are no stand-ins, row reducers and prefetched streams here, as each would be a second sum of the same
contributions: a part whose owner fails is void.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.fixed_point import FixedPoint, mean_of, moves_of, next_exponents, packed_codes
from shoal.compression.formats import CodecError
from shoal.compression.robust_mean import mean_of_groups
from shoal.compression.weighted_mean import EncodingLoss
from shoal.swarm.aio import Changes, in_thread
from shoal.swarm.averaging.allreduce import ExchangeResult
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.chunk_streams import ExchangeContext, StreamRequest
from shoal.swarm.averaging.contribution import contribution_blob
from shoal.swarm.averaging.reduction import ReducedChunk
from shoal.swarm.averaging.result_fetch import fetch_part
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.straggler_guard import StragglerGuard
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import AboveBound, BlobUnavailable, SecureRefused, ShoalError, StorageError
from shoal.swarm.protocol.messages import CoordinatorToPeerSecureBoard, PeerToCoordinatorSecureStep
from shoal.swarm.protocol.rounds import Part, RoundPlan
from shoal.swarm.protocol.secure import Arrival, SecurePlan, SecureStage, UnopenedSecret, fewest_groups
from shoal.swarm.protocol.statements import ChunkRanges, PlanSigner
from shoal.swarm.protocol.types import Blob, Delivery
from shoal.swarm.secure.groups import MaskingGroup, lane_bits
from shoal.swarm.secure.masks import Lanes, add_masks, add_packed, pack, packed_bytes, padded
from shoal.swarm.secure.member import SecureMember
from shoal.swarm.secure.opening import Unopened, masks_left
from shoal.swarm.transport.bulk.source import ChunkSource
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_AT_ONCE = 2**17
"""Elements of a call to encode: with what it reads and writes they stay in a processor's cache."""


class BoardLink(Protocol):
    """Access of a member of a secure round to the coordinator's board."""

    async def post(self, step: PeerToCoordinatorSecureStep) -> CoordinatorToPeerSecureBoard:
        """Post a step; returns what is shown in answer. Waits while the coordinator is away."""
        ...

    async def changed(self, stage: int, is_due: Callable[[], bool]) -> int:
        """Return the stage that the round has got to when it may be beyond ``stage``, ``is_due()`` holds, or it is time
        to ask again."""
        ...

    def wake(self) -> None:
        """Have ``is_due`` looked at again."""
        ...


class LaneLayout:
    """Lanes of a round's chunks: the codes of a chunk, and zeros up to a whole group of lanes."""

    def __init__(self, store: ResultStore) -> None:
        assert store.plan.secure is not None
        self.secure: SecurePlan = store.plan.secure
        self.scales: NDArray[np.int8] = np.frombuffer(self.secure.scales, dtype=np.int8)
        self._store = store

    def blocks(self, start: int, stop: int) -> slice:
        """Return the blocks of a range of elements that begins with one."""
        return slice(start // self.secure.block, -(-stop // self.secure.block))

    def runs(self, chunk: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of elements of a chunk that are encoded in one call: whole leaves."""
        start, stop = self._store.bounds(chunk)
        step = max(1, _AT_ONCE // self._store.leaf_grid.leaf) * self._store.leaf_grid.leaf
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def values(self, chunk: int) -> int:
        start, stop = self._store.bounds(chunk)
        return stop - start

    def lanes(self, chunk: int) -> int:
        """Return the number of lanes of a chunk."""
        return padded(self.values(chunk))

    def places(self, chunks: range) -> list[slice]:
        """Return where the lanes of each of these chunks are among those of all."""
        places, at = [], 0
        for chunk in chunks:
            places.append(slice(at, at + self.lanes(chunk)))
            at = places[-1].stop
        return places


class MaskedSource:
    """Masked chunks of our contribution, by index, each once its part is masked (a ``ChunkSource``). The bytes of a
    chunk are the same whoever asks, however often."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._masked: dict[int, memoryview] = {}
        self._changes = Changes()
        self._closed = False

    def put(self, chunks: range, masked: Sequence[memoryview]) -> None:
        self._masked.update(zip(chunks, masked, strict=True))
        self._changes.announce()

    async def chunk(self, index: int) -> memoryview:
        """Return a chunk, not to be changed. Raises ``BlobUnavailable`` once closed."""
        await self._changes.until(lambda: index in self._masked or self._closed)
        if self._closed:
            raise BlobUnavailable("the contribution is not offered any more")
        return self._masked[index]

    def close(self) -> None:
        self._closed = True
        self._masked.clear()
        self._changes.announce()


@dataclass
class _PartSum:
    """Sums of a part's masked lanes by group, and whose they are. Once ``is_closed``, nobody is added any more."""

    sums: dict[MaskingGroup, Lanes]
    members: set[int] = field(default_factory=set)
    is_closed: bool = False


class SecureExchange:
    """One member's part in one secure round. ``made``: the chunks that we made the mean of."""

    def __init__(
        self,
        endpoint: Endpoint,
        store: ResultStore,
        signer: PlanSigner,
        feedback: ErrorFeedback,
        member: SecureMember,
        board: BoardLink,
        deadlines: Deadlines,
        was_away: Callable[[float], bool] = lambda since_s: False,
    ) -> None:
        """``feedback``: begun with our contribution."""
        self.signer = signer
        self.store = store
        self.feedback = feedback
        self.member = member
        self.me = member.me
        self.moved = 0
        """Masked chunks that have arrived here."""
        self.made_chunks: dict[int, ReducedChunk] = {}
        self._plan: RoundPlan = store.plan
        self._is_trimmed = store.plan.mean == "trimmed"
        self._fewest = fewest_groups(is_trimmed=self._is_trimmed)
        self._endpoint = endpoint
        self._board = board
        self._layout = LaneLayout(store)
        self._source = MaskedSource(store.chunks)
        self._blob = contribution_blob(store.plan)
        sources: dict[Blob, ChunkSource] = {self._blob: self._source}
        self._context = ExchangeContext(
            endpoint, store, self.me, deadlines, was_away, sources, plan_statement=signer.plan
        )
        self._exchange = ExchangeResult()
        self._stage = 0
        self._is_refusing = False
        self._changes = Changes()
        self._owned = [index for index, part in enumerate(self._plan.parts) if part.owner == self.me]
        self._sums: dict[int, _PartSum] = {}
        self._revealed: dict[int, dict[int, bytes]] = {}
        self._guard = StragglerGuard(
            self._context, lambda: [part.start for part in self._plan.parts if not self.store.has(part)]
        )

    # Interface of every exchange

    async def run(self) -> ExchangeResult:
        """Run the exchange until every part is in the store or given up."""
        self._context.publish()
        self._context.share_uplink()
        async with asyncio.TaskGroup() as background:
            running = [background.create_task(one) for one in (self._follow(), self._mask(), self._guard.watch())]
            async with asyncio.TaskGroup() as tasks:
                for index, part in enumerate(self._plan.parts):
                    tasks.create_task(self._own(index) if part.owner == self.me else self._gather(part))
            for task in running:
                task.cancel()
        if self._withheld(()):  # what could be opened then may be known only now
            board = await self._board.post(self.member.step(SecureStage.OPEN))
            self._exchange.failed |= self._withheld(board.closed)
        return self._exchange

    def _withheld(self, closed: Collection[int]) -> set[int]:
        """Return owners of means without groups that were signed for and whose sums are not ``closed``."""
        withheld = set()
        for part, included in zip(self._plan.parts, self.member.sets, strict=False):
            if self.store.has(part) and part.owner != self.me:
                means = [set(self.store.header(chunk).included) for chunk in self.store.chunks_of(part)]
                opened = [mine for mine in self._sums_of(included) if mine.isdisjoint(closed)]
                if len(opened) >= self._fewest and not set().union(*opened) <= set.intersection(*means):
                    withheld.add(part.owner)
        return withheld

    async def close(self) -> None:
        """Serve nothing more. Call it after ``run``, before the feedback's round ends."""
        await self._context.withdraw()
        self._source.close()

    def deliveries(self) -> tuple[Delivery, ...]:
        """Return the delivery rates of the other members in this exchange."""
        return self._context.meters.deliveries(self._context.members, self.signer.peer, self._plan.round)

    def made(self) -> dict[int, ChunkRanges]:
        """Return the parts that this member has reduced, by index, with their chunks."""
        ranges = {index: self.store.chunks_of(self._plan.parts[index]) for index in self._owned}
        return {
            index: ((chunks.start, chunks.stop),)
            for index, chunks in ranges.items()
            if all(one in self.made_chunks for one in chunks)
        }

    # The board

    async def _follow(self) -> None:
        """Post what each stage asks for, and take what is shown, until cancelled.

        A stage that has begun elsewhere is gone to without asking for it: each answer takes a round trip. Nothing is
        posted that says and asks for nothing, unless it is time to look."""
        posted = silence = PeerToCoordinatorSecureStep(round=self._plan.round, plan=self.signer.plan.plan)
        while True:
            step = self.member.step(self._stage)
            if step in (posted, silence):
                stage = await self._board.changed(self._stage, lambda: self.member.step(self._stage) != step)  # noqa: B023
                step = self.member.step(max(stage, self._stage))
            posted = step
            board = await self._board.post(step)
            try:
                await in_thread(self.member.take, board)
            except (SecureRefused, StorageError) as error:
                log.error("round %d: %s; nothing more is signed or revealed in it", self._plan.round, error)
                self._exchange.trouble = str(error)
                self._refuse()
                return
            self._stage = board.stage
            for part, included in zip(self._plan.parts, self.member.sets, strict=False):
                self.store.signed_sums[part.start] = self._sums_of(included)
            for one in board.revealed:
                self._revealed.setdefault(one.part, {})[one.member] = one.shares
            self._changes.announce()

    def _sums_of(self, included: Sequence[int]) -> list[set[int]]:
        """Return the members of each sum that a part's set has."""
        sums = [set(group.among(included)) for group in self.member.groups]
        return [one for one in sums if one]

    def _refuse(self) -> None:
        """Go on as somebody who only waits for the others' means."""
        self._source.close()
        self._is_refusing = True
        self._stage = SecureStage.OPEN
        self._changes.announce()

    # Sending

    async def _mask(self) -> None:
        """Mask our contribution part by part, once the others have our shares and we have theirs."""
        await self._changes.until(lambda: self._stage == SecureStage.MASKS and self.member.can_mask)
        first = self._owned[0] if self._owned else self.me
        order = [(first + 1 + turn) % len(self._plan.parts) for turn in range(len(self._plan.parts))]
        try:
            for part in order:
                chunks = self.store.chunks_of(self._plan.parts[part])
                self._source.put(chunks, await in_thread(self._masked, part))
        except (CodecError, SecureRefused, StorageError) as error:
            self._exchange.trouble = str(error)
            self._refuse()

    def _masked(self, index: int) -> list[memoryview]:
        """Encode and mask a part; returns its chunks. For a worker thread."""
        part, layout, group = self._plan.parts[index], self._layout, self.member.group
        chunks = self.store.chunks_of(part)
        places = layout.places(chunks)
        lanes = np.zeros(places[-1].stop, dtype="<u2")
        signed = lanes.view("<i2")
        for chunk, place in zip(chunks, places, strict=True):
            at = place.start
            for start, stop in layout.runs(chunk):
                codec = FixedPoint(
                    layout.secure.bits,
                    layout.secure.block,
                    layout.scales[layout.blocks(start, stop)],
                    self.factor,
                    self.least,
                )
                codes = packed_codes(self.feedback.encode_chunk(codec, start, stop))
                signed[at : at + codes.size] = codes
                at += codes.size
        add_masks(lanes, self.member.masks(index))
        bits, masked = lane_bits(len(group.members), layout.secure.bits), []
        for place in places:
            out = np.empty(packed_bytes(place.stop - place.start, bits), dtype=np.uint8)
            pack(lanes[place], bits, out)
            masked.append(out.data)
        return masked

    @property
    def factor(self) -> float:
        """Factor of our values: our weight over that of the heaviest member of our group."""
        return self._plan.members[self.me].weight / self._heaviest(self.member.group)

    @property
    def least(self) -> int:
        """The largest code that a block needs: two for the lightest member, were it to bring the same."""
        weights = [member.weight for member in self._plan.members]
        return -(-2 * weights[self.me] // min(weights))

    def _heaviest(self, group: MaskingGroup) -> int:
        return max(self._plan.members[one].weight for one in group.members)

    # Summing and opening, as an owner

    async def _own(self, index: int) -> None:
        await self._changes.until(lambda: self._stage > SecureStage.MASKS or bool(self.member.senders))
        if self._stage == SecureStage.MASKS:
            await self._collect(index)
            if len(self._sums) == len(self._owned) and all(one.is_closed for one in self._sums.values()):
                self.member.arrived = tuple(
                    Arrival(part=part, members=tuple(sorted(one.members))) for part, one in sorted(self._sums.items())
                )
                self._board.wake()
        await self._changes.until(lambda: self._stage >= SecureStage.OPEN)
        opened = None if self._is_refusing else await self._opened(index)
        if opened is None:
            if not self._exchange.trouble:
                self._exchange.trouble = "the masked contributions to a part were not summed as the sets say"
            return
        part = self._plan.parts[index]
        await in_thread(self._make, index, opened)
        for chunk in self.store.chunks_of(part):
            await self.store.put(chunk, self.made_chunks[chunk].result)
        await in_thread(self.store.digest, part)

    async def _opened(self, index: int) -> dict[MaskingGroup, tuple[list[int], Lanes]] | None:
        """Return the opened sums of a part, with their members; None if we have not what the sets say.

        A group stays out if a dealer's shares are wrong, or if a patience is over and too few were revealed: nobody can
        open its sum. Without any group the part has an empty mean, for which nobody need wait."""
        included, summed = set(self.member.sets[index]) if self.member.sets else set(), self._sums.get(index)
        if included and (summed is None or not included <= summed.members):
            return None
        opened: dict[MaskingGroup, tuple[list[int], Lanes]] = {}
        waiting = [group for group in self.member.groups if group.among(list(included))]
        due_s = asyncio.get_running_loop().time() + self._context.deadlines.patience_s
        while waiting and not self._is_refusing:
            known = self._shares_known()  # before they are read: more may come while a thread opens with these
            for group in list(waiting):
                outcome = await in_thread(self._open, index, group)
                if not isinstance(outcome, Unopened):
                    opened[group] = outcome
                    waiting.remove(group)
                elif outcome.dealer is not None:
                    dealer = self._context.members[outcome.dealer]
                    log.warning("round %d: %s has dealt wrong shares", self._plan.round, dealer)
                    self.member.unopened.append(UnopenedSecret(part=index, dealer=outcome.dealer))
                    self._board.wake()
                    waiting.remove(group)
            if waiting and not await self._more_shares(known, due_s):
                break
        return {group: opened[group] for group in self.member.groups if group in opened}

    def _shares_known(self) -> dict[int, int]:
        """Return of how many members shares for each part have been revealed to us."""
        return {part: len(shares) for part, shares in self._revealed.items()}

    async def _more_shares(self, known: dict[int, int], due_s: float) -> bool:
        """Return once more shares than those may have been revealed, or False when it is time to do without."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                await self._changes.until(lambda: self._is_refusing or self._shares_known() != known)
                return True
        return False

    async def _collect(self, index: int) -> None:
        """Fetch and sum the masked contributions to a part: of each member the whole part or nothing."""
        chunks = self.store.chunks_of(self._plan.parts[index])
        lanes = self._layout.places(chunks)[-1].stop
        sums = {
            group: np.zeros(lanes, dtype=np.uint16) for group in self.member.groups if self.member.senders_of(group)
        }
        summed, turn = _PartSum(sums), asyncio.Lock()
        behind = set(self.member.senders)
        guard = StragglerGuard(self._context, lambda: behind)
        async with asyncio.TaskGroup() as background:
            watch = background.create_task(guard.watch())
            async with asyncio.TaskGroup() as tasks:
                for group in sums:
                    for member in self.member.senders_of(group):
                        tasks.create_task(self._add(guard, summed, turn, group, member, chunks, behind))
            watch.cancel()
        summed.is_closed = True
        self._sums[index] = summed
        self._exchange.undelivered |= set(self.member.senders) - summed.members

    async def _add(
        self,
        guard: StragglerGuard,
        summed: _PartSum,
        turn: asyncio.Lock,
        group: MaskingGroup,
        member: int,
        chunks: range,
        behind: set[int],
    ) -> None:
        """Fetch a member's masked part and add it to its group's sum."""
        bits = lane_bits(len(group.members), self._layout.secure.bits)
        here: dict[int, memoryview] = {}

        def sizes(chunk: int) -> Collection[int]:
            return (packed_bytes(self._layout.lanes(chunk), bits),)

        request = StreamRequest(self._blob, sizes, 0, self._context.deadlines.contribution_s)
        meter = self._context.meter(member, self._blob)

        async def attempt() -> None:
            rest = range(chunks.start + len(here), chunks.stop)
            async for chunk, data in self._context.open_stream(member, request, rest, meter):
                here[chunk] = data
                self.moved += 1

        try:
            if member == self.me:
                await attempt()
            else:
                await guard.fetch(member, request.wait_s, len(chunks), meter, attempt)
        except ShoalError as error:
            log.warning("round %d continues without %s: %s", self._plan.round, self._context.members[member], error)
            behind.discard(member)
            return
        behind.discard(member)

        def add() -> None:
            total = summed.sums[group]
            for chunk, place in zip(chunks, self._layout.places(chunks), strict=True):
                add_packed(here.pop(chunk), bits, total[place])

        async with turn:
            await in_thread(add)
            summed.members.add(member)

    def _open(self, index: int, group: MaskingGroup) -> tuple[list[int], Lanes] | Unopened:
        """Take the masks off one group's sum; returns whose it is. For a worker thread."""
        summed, mine = self._sums[index], group.among(self.member.sets[index])
        if set(mine) != summed.members.intersection(group.members):
            return Unopened(None)  # other sets than what we have summed: nobody can open that
        revealed = dict(self._revealed.get(index, {}))
        senders = self.member.senders_of(group)
        left = masks_left(self.signer.plan, index, group, senders, mine, self.member.keys, revealed)
        if isinstance(left, Unopened):
            return left
        lanes = summed.sums[group].copy()
        add_masks(lanes, left)
        return mine, lanes

    def _make(self, index: int, opened: dict[MaskingGroup, tuple[list[int], Lanes]]) -> None:
        """Make a part's mean from the groups' sums, encoded once.

        Where these are compared with each other and too few could be opened, the mean is empty, as without any."""
        layout, store, is_trimmed = self._layout, self.store, self._is_trimmed
        included = sorted(member for members, _ in opened.values() for member in members)
        chunks = store.chunks_of(self._plan.parts[index])
        if len(opened) < self._fewest:
            nothing = ReducedChunk(memoryview(store.group.pack_header(ChunkHeader())), [], None)
            self.made_chunks.update(dict.fromkeys(chunks, nothing))
            return
        weight = store.group.weight(included)
        for chunk, place in zip(chunks, layout.places(chunks), strict=True):
            start, stop = store.bounds(chunk)
            block, scales = layout.secure.block, layout.scales[layout.blocks(start, stop)]
            means, total = [], np.zeros(stop - start)
            for group, (members, lanes) in opened.items():
                one = self._weighted(group, lanes[place][: stop - start])
                if is_trimmed:
                    means.append(mean_of(one, block, scales, 1 / store.group.weight(members)))
                else:
                    total += one
            mean = mean_of_groups(means) if is_trimmed else mean_of(total, block, scales, 1 / weight)
            self.made_chunks[chunk] = self._encoded(chunk, mean, ChunkHeader(included))

    def _weighted(self, group: MaskingGroup, lanes: Lanes) -> NDArray[np.float64]:
        """Return the sums of a group's codes, times weights."""
        shift = 16 - lane_bits(len(group.members), self._layout.secure.bits)
        signed = (lanes << np.uint16(shift)).view("<i2") >> np.int16(shift)
        sums: NDArray[np.float64] = signed * np.float64(self._heaviest(group))
        return sums

    def _encoded(self, chunk: int, mean: torch.Tensor, header: ChunkHeader) -> ReducedChunk:
        store, group, codec = self.store, self.store.group, self.store.codec(chunk)
        result = store.buffers.results.take(store.result_bytes(chunk), group.header_bytes)
        result[: group.header_bytes] = group.pack_header(header)
        packed = torch.frombuffer(result[group.header_bytes :], dtype=torch.uint8)
        left = torch.zeros_like(mean)
        try:
            codec.encode_residual(mean, left, left.view(-1), packed)
        except CodecError:  # a sum that does not fit into float32
            return ReducedChunk(memoryview(group.pack_header(ChunkHeader())), [], None)
        loss = EncodingLoss.of(left) if not self._is_trimmed else None  # it would come in one group, trimmed
        return ReducedChunk(result, header.included, loss)

    # Gathering

    async def _gather(self, part: Part) -> None:
        """Fetch a part's mean from its owner, once its sum can be opened."""
        await self._changes.until(lambda: self._stage >= SecureStage.OPEN)
        peer, wait_s = self._context.members[part.owner], self._context.deadlines.result_s
        meter = self._context.meter(part.owner, self.store.blob)
        attempt = functools.partial(
            fetch_part, self._endpoint, self.store, part, peer, wait_s, self.store.put_checked, meter
        )
        try:
            await self._guard.fetch(part.start, wait_s, self.store.lacks(part), meter, attempt)
            await in_thread(self.store.digest, part)
        except ShoalError as error:
            log.warning("round %d: %s did not deliver a part: %s", self._plan.round, peer, error)
            self._exchange.failed.add(part.owner)
            if isinstance(error, AboveBound) or not self._exchange.trouble:
                self._exchange.trouble = f"{peer}: {error}"


def scales_after(store: ResultStore) -> bytes:
    """Return the scales of the next round: those of this one, moved as follows from the mean of each committed chunk.

    The same for all who hold the committed bytes. For a worker thread, after ``ResultStore.find_undecodable``."""
    layout = LaneLayout(store)
    moves = np.zeros(layout.scales.size, dtype=np.int8)
    for chunk in range(store.chunks):
        if members := len(store.header(chunk).included):
            span, secure = layout.blocks(*store.bounds(chunk)), layout.secure
            mean = store.codec(chunk).decode(store[chunk][store.group.header_bytes :], layout.values(chunk))
            moves[span] = moves_of(mean, secure.block, layout.scales[span], secure.bits, members)
    return next_exponents(layout.scales, moves).tobytes()


def settle_secure(exchange: SecureExchange, *, keep: bool) -> None:
    """Record what the committed means lack of our contribution, and commit the residual.

    As ``round_feedback.settle``, with one difference: what may be in a sum that somebody has opened is never offered
    again, also where no mean of it was committed. For a worker thread, after ``ResultStore.find_undecodable``."""
    store, feedback, me = exchange.store, exchange.feedback, exchange.me
    leave_out = feedback.keep_chunk if keep else feedback.withdraw_chunk
    weight, layout = store.plan.members[me].weight, LaneLayout(store)
    for index, part in enumerate(store.plan.parts):
        is_spent = exchange.member.is_spent(index)
        for chunk in store.chunks_of(part):
            header = store.header(chunk)
            for bounds in layout.runs(chunk):
                if me in header.included or is_spent:
                    feedback.include_chunk(*bounds)
                else:
                    leave_out(*bounds)
            made = exchange.made_chunks.get(chunk)
            if made is not None and made.loss is not None and header.included:
                feedback.add_mean_loss(store.bounds(chunk)[0], made.loss, store.group.weight(made.included) / weight)
    feedback.commit()
