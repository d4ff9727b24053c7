"""Exchange of one secure round: masked contributions to the owners of parts, opened sums, and means from the owners.

The network's side of ``swarm/secure``. The way of a mean back, its digests and the verdict are those of any round.
There are no stand-ins, row reducers and prefetched streams here, as each would be a second sum of the same
contributions: a part whose owner fails is void.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.fixed_point import FixedPoint, moves_of, next_exponents, packed_codes
from shoal.compression.formats import CodecError
from shoal.swarm.aio import Changes, in_thread
from shoal.swarm.averaging.allreduce import ExchangeResult
from shoal.swarm.averaging.chunk_header import ChunkHeader
from shoal.swarm.averaging.chunk_streams import ExchangeContext, StreamRequest
from shoal.swarm.averaging.contribution import contribution_blob
from shoal.swarm.averaging.inclusions import Inclusions
from shoal.swarm.averaging.masked_chunks import LaneLayout, SignedRoot, checked_lanes, write_proofs
from shoal.swarm.averaging.masked_means import encoded_mean, heaviest, mean_of_sums
from shoal.swarm.averaging.reduction import ReducedChunk
from shoal.swarm.averaging.result_fetch import fetch_part
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.averaging.straggler_guard import StragglerGuard
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import AboveBound, BlobUnavailable, SecureRefused, ShoalError, StorageError, WireError
from shoal.swarm.protocol.messages import CoordinatorToPeerSecureBoard, PeerToCoordinatorSecureStep
from shoal.swarm.protocol.rounds import Part, RoundPlan
from shoal.swarm.protocol.secure import Arrival, SecureStage, UnopenedSecret, fewest_groups
from shoal.swarm.protocol.statements import ChunkRanges, PlanSigner
from shoal.swarm.protocol.types import Blob, Delivery
from shoal.swarm.secure.groups import MaskingGroup
from shoal.swarm.secure.masks import Lanes, add_masks, add_packed, pack
from shoal.swarm.secure.member import SecureMember
from shoal.swarm.secure.opening import Unopened, masks_of, secrets_of
from shoal.swarm.secure.shown_opening import ShownOpening
from shoal.swarm.secure.sum_names import keys_digest, names_of_sums
from shoal.swarm.transport.bulk.source import ChunkSource
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)


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
    """Sums of a part's masked lanes by group; whose they are, with the root that each has signed. Once ``is_closed``,
    nobody is added any more."""

    sums: dict[MaskingGroup, Lanes]
    roots: dict[int, bytes] = field(default_factory=dict)
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
        self._fewest = fewest_groups(is_trimmed=store.plan.mean == "trimmed")
        self._inclusions: Inclusions | None = None
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
        self._secrets: dict[int, dict[int, bytes]] = {}
        """By part, what has opened its sums, by sender."""
        self._guard = StragglerGuard(
            self._context, lambda: [part.start for part in self._plan.parts if not self.store.has(part)]
        )

    # Interface of every exchange

    def keep_inclusions(self, inclusions: Inclusions) -> None:
        """Keep what our means are made of, for auditors. Call it before ``run``."""
        self._inclusions = inclusions

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
            for part, included, name in zip(self._plan.parts, self.member.sets, self.member.names, strict=False):
                self.store.signed_sums[part.start] = self._sums_of(included)
                self.store.signed_names[part.start] = name
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
        """Encode and mask a part; returns its chunks with their proofs. For a worker thread."""
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
        members, masked = len(group.members), []
        sizes = [layout.packed_bytes(chunk, members) for chunk in chunks]
        for chunk, place, size in zip(chunks, places, sizes, strict=True):
            out = np.empty(layout.chunk_bytes(part, chunk, members), dtype=np.uint8)
            pack(lanes[place], layout.bits(members), out[:size])
            masked.append(out.data)
        write_proofs(masked, sizes, functools.partial(self.member.sign_masked, index))
        return masked

    @property
    def factor(self) -> float:
        """Factor of our values: our weight over that of the heaviest member of our group."""
        return self._plan.members[self.me].weight / heaviest(self._plan, self.member.group)

    @property
    def least(self) -> int:
        """The largest code that a block needs: two for the lightest member, were it to bring the same."""
        weights = [member.weight for member in self._plan.members]
        return -(-2 * weights[self.me] // min(weights))

    # Summing and opening, as an owner

    async def _own(self, index: int) -> None:
        await self._changes.until(lambda: self._stage > SecureStage.MASKS or bool(self.member.senders))
        if self._stage == SecureStage.MASKS:
            await self._collect(index)
            if len(self._sums) == len(self._owned) and all(one.is_closed for one in self._sums.values()):
                self.member.arrived = tuple(
                    Arrival(part=part, members=tuple(roots), roots=tuple(roots.values()))
                    for part, roots in sorted(
                        (part, dict(sorted(one.roots.items()))) for part, one in self._sums.items()
                    )
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
        if included and (summed is None or not included <= summed.roots.keys()):
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
                        tasks.create_task(self._add(guard, summed, turn, group, member, index, behind))
            watch.cancel()
        summed.is_closed = True
        self._sums[index] = summed
        self._exchange.undelivered |= set(self.member.senders) - summed.roots.keys()

    async def _add(
        self,
        guard: StragglerGuard,
        summed: _PartSum,
        turn: asyncio.Lock,
        group: MaskingGroup,
        member: int,
        index: int,
        behind: set[int],
    ) -> None:
        """Fetch a member's masked part and add it to its group's sum, if it is what the member has signed."""
        part, layout, inclusions, many = self._plan.parts[index], self._layout, self._inclusions, len(group.members)
        chunks = self.store.chunks_of(part)
        here: dict[int, memoryview] = {}
        signed: list[SignedRoot] = []

        def sizes(chunk: int) -> Collection[int]:
            return (layout.chunk_bytes(part, chunk, many),)

        def check(chunk: int, data: memoryview) -> None:
            place, size = chunk - chunks.start, layout.packed_bytes(chunk, many)
            _, shown = checked_lanes(data, size, place, len(chunks))
            if not signed and shown.is_of(self.signer.plan, index, member, self._plan.members[member]):
                signed.append(shown)
            if signed != [shown]:
                raise WireError("a masked chunk has another root than that which its member has signed for this part")

        request = StreamRequest(self._blob, sizes, 0, self._context.deadlines.contribution_s)
        meter = self._context.meter(member, self._blob)

        async def attempt() -> None:
            rest = range(chunks.start + len(here), chunks.stop)
            async for chunk, data in self._context.open_stream(member, request, rest, meter):
                await in_thread(check, chunk, data)
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
            for chunk, place in zip(chunks, layout.places(chunks), strict=True):
                data = here.pop(chunk)
                if inclusions is not None:
                    inclusions.keep(chunk, member, data)
                add_packed(data[: layout.packed_bytes(chunk, many)], layout.bits(many), total[place])

        async with turn:
            await in_thread(add)
            summed.roots[member] = signed[0].root

    def _open(self, index: int, group: MaskingGroup) -> tuple[list[int], Lanes] | Unopened:
        """Take the masks off one group's sum; returns whose it is. For a worker thread."""
        summed, mine = self._sums[index], group.among(self.member.sets[index])
        if set(mine) != summed.roots.keys() & set(group.members):
            return Unopened(None)  # other sets than what we have summed: nobody can open that
        revealed = dict(self._revealed.get(index, {}))
        senders = self.member.senders_of(group)
        secrets = secrets_of(index, group, senders, mine, self.member.keys, revealed)
        if isinstance(secrets, Unopened):
            return secrets
        self._secrets.setdefault(index, {}).update(secrets)
        lanes = summed.sums[group].copy()
        add_masks(lanes, masks_of(self.signer.plan, index, mine, self.member.keys, secrets))
        return mine, lanes

    def _make(self, index: int, opened: dict[MaskingGroup, tuple[list[int], Lanes]]) -> None:
        """Make a part's mean from the groups' sums, encoded once.

        Where these are compared with each other and too few could be opened, the mean is empty, as without any."""
        layout, store = self._layout, self.store
        included = sorted(member for members, _ in opened.values() for member in members)
        chunks = store.chunks_of(self._plan.parts[index])
        if len(opened) < self._fewest:
            nothing = ReducedChunk(memoryview(store.group.pack_header(ChunkHeader())), [], None)
            self.made_chunks.update(dict.fromkeys(chunks, nothing))
            return
        header = ChunkHeader(included, seal=self.member.names[index])
        for chunk, place in zip(chunks, layout.places(chunks), strict=True):
            sums = {group: (members, lanes[place]) for group, (members, lanes) in opened.items()}
            self.made_chunks[chunk] = self._encoded(chunk, mean_of_sums(store, layout, chunk, sums), header)
        if self._inclusions is not None:
            self._keep_opening(self._inclusions, index, set(included))

    def _encoded(self, chunk: int, mean: torch.Tensor, header: ChunkHeader) -> ReducedChunk:
        return encoded_mean(self.store, chunk, mean, header)

    def _keep_opening(self, inclusions: Inclusions, index: int, included: set[int]) -> None:
        """Keep what has opened a part's sums, for auditors: of those that are in its mean."""
        member, roots = self.member, self._sums[index].roots
        senders = [one for group in member.groups if group.among(list(included)) for one in member.senders_of(group)]
        opened = self._secrets[index]
        keys = {one: keys_digest(self.signer.plan, one, member.keys[one]) for one in member.senders}
        mine = {one: roots[one] for one in member.sets[index]}
        names = names_of_sums(self.signer.plan, index, member.groups, member.senders, mine, keys)
        shown = ShownOpening(names, {one: member.keys[one] for one in senders}, {one: opened[one] for one in senders})
        inclusions.keep_opening(self.store.chunks_of(self._plan.parts[index]), memoryview(shown.pack()))

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
