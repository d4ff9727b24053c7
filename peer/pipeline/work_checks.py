"""Checks of other stages' work: a replica computes a drawn micro-batch again, and the results are compared.

Whoever gets a gradient checks the stages that made it, forward and backward; whoever gets an activation of the model's
first stages checks these, as nobody else does. Which micro-batches are drawn nobody else knows until the checked
replica has delivered. ``swarm/pipeline/engine/work_checks.py`` compares.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.formats import CodecError
from shoal.peer.member.memberships import Memberships
from shoal.peer.pipeline.mailbox import StageShapes, sender_of
from shoal.peer.pipeline.tensor_io import ComputedTensor, Staging, TensorHeader, pack, unpack
from shoal.peer.pipeline.tensor_store import TensorStore
from shoal.peer.pipeline.training import RepeatedTensors, RepeatTask
from shoal.peer.pipeline.view_watch import holders, is_held
from shoal.swarm.aio import in_thread
from shoal.swarm.errors import Busy, LinkError, StaleWork, WireError
from shoal.swarm.pipeline.engine.effects import Fetch, MicroBatch
from shoal.swarm.pipeline.engine.engine import StageSpan
from shoal.swarm.pipeline.engine.work_checks import SEED_BYTES, Result, Values, rule, sketch
from shoal.swarm.protocol.messages import (
    PeerToPeerConfirmTensors,
    PeerToPeerRepeatWork,
    PeerToPeerTensorsConfirmed,
    PeerToPeerWorkRepeated,
)
from shoal.swarm.protocol.types import Message
from shoal.swarm.transport.channel import Channel

log = logging.getLogger(__name__)

_ASKED = 4
"""Most replicas that are asked to compute a micro-batch again, until two have."""

_CONFIRMING = 32
"""Most replicas of the stage after the checked one that are asked what they exchanged with it."""

_AT_ONCE = 4
"""Most micro-batches that are computed again here at a time."""

_REMEMBERED = 2**14
"""Most exchanges of a round that can be confirmed, the newest ones."""


@dataclass(frozen=True)
class CheckSettings:
    """Settings of checks.

    ``share``: of the micro-batches, drawn with ``chance``; ``tolerance``: relative distance of two honest replicas'
    results; ``stages``: of the model."""

    share: float
    tolerance: float
    stages: int
    chance: random.Random


@dataclass(frozen=True)
class CheckContext:
    """Stages held here, and their links, as both sides of a check use them."""

    members: Memberships
    span: StageSpan
    shapes: StageShapes
    tensors: TensorStore
    staging: Staging
    settings: CheckSettings

    @property
    def wait_s(self) -> float:
        return self.members.run.client.deadlines.patience_s

    def holds(self, peer: str, stage: int) -> bool:
        return is_held(self.members.run.client.view, peer, stage)

    def packed_bytes(self, header: TensorHeader) -> int:
        return header.packed_bytes(self.staging.codec)

    def tensor_header(self, stage: int, samples: int) -> TensorHeader:
        """Return the header of the input of a stage."""
        return TensorHeader((samples, *self.shapes.inputs[stage]), "float32")

    def targets_header(self, samples: int) -> TensorHeader:
        return TensorHeader((samples, *self.shapes.targets.shape), self.shapes.targets.dtype)

    def unpacked(self, packed: Tensor, header: TensorHeader) -> Tensor:
        return unpack(packed, header, self.staging.codec)


class ExchangeLog:
    """Digests of what this peer took from others, and gave back, in the current round."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[MicroBatch, str], PeerToPeerTensorsConfirmed] = OrderedDict()

    def clear(self) -> None:
        self._known.clear()

    def took(self, micro_batch: MicroBatch, peer: str, digest: bytes) -> None:
        """Note an activation that was taken from a peer."""
        self._note(micro_batch, peer, {"activation": digest})

    def gave(self, micro_batch: MicroBatch, peer: str, digest: bytes) -> None:
        """Note a gradient that was offered to a peer."""
        self._note(micro_batch, peer, {"gradient": digest})

    def of(self, micro_batch: MicroBatch, peer: str) -> PeerToPeerTensorsConfirmed:
        return self._known.get((micro_batch, peer), PeerToPeerTensorsConfirmed(activation=None, gradient=None))

    def _note(self, micro_batch: MicroBatch, peer: str, update: dict[str, bytes]) -> None:
        self._known[micro_batch, peer] = self.of(micro_batch, peer).model_copy(update=update)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


# Checking ---------------------------------------------------------------------------------------------------


class WorkChecker:
    """Checks of what this peer fetches. ``is_trusted``: whether this peer takes tensors from another one."""

    def __init__(self, context: CheckContext, is_trusted: Callable[[str], bool]) -> None:
        self._context = context
        self._is_trusted = is_trusted
        self._node = context.members.run.node
        self._contradictors: dict[str, set[str]] = {}
        """By checked replica, those of the stage after it that exchanged other bytes with it than it has shown."""

    async def check(self, fetch: Fetch) -> str | None:
        """Check a fetched tensor, if it is drawn; returns the peer that is found to be wrong.

        Raises ``WireError`` if replicas disagree and nobody can say who is wrong, or if the checked one shows nothing:
        then the tensor is not to be used. Without another replica it is used unchecked."""
        settings = self._context.settings
        if settings.chance.random() >= settings.share:
            return None
        return await (self._check_driver(fetch) if fetch.kind == "activation" else self._check_next(fetch))

    async def _check_next(self, fetch: Fetch) -> str | None:
        """Check the stages from the next one to the last that the sender of a gradient holds."""
        context, tensors, micro_batch = self._context, self._context.tensors, fetch.micro_batch
        first = context.span.last + 1
        last = self._last_stage(fetch.peer)
        if last is None or last < first or not (witnesses := self._witnesses(fetch.peer, first, last)):
            return None
        own, seed = tensors.output(fetch.job), secrets.token_bytes(SEED_BYTES)
        gradient = tensors.received_gradient(fetch.job)
        assert gradient is not None
        output = b""
        try:
            if last + 1 < context.settings.stages:
                header = context.tensor_header(last + 1, micro_batch.samples)
                size_bytes = context.packed_bytes(header)
                shown = await tensors.fetch_packed(
                    fetch.peer, "activation", fetch.number, size_bytes + len(own.data) - own.size_bytes, context.wait_s
                )
                returned = await tensors.fetch_packed(fetch.peer, "returned", fetch.number, size_bytes, context.wait_s)
                confirmation = await self._confirmation(fetch, last + 1, shown, returned)
                if confirmation != "given":
                    return fetch.peer if confirmation == "contradicted" else None
                if shown[size_bytes:].numpy().tobytes() != bytes(own.data[own.size_bytes :]):
                    return fetch.peer  # the targets are passed on as they are
                output = await in_thread(_sketched, context.unpacked(shown[:size_bytes], header), seed)
                tensors.publish_repeated(fetch.job, returned)
            claimed = Result(output, await in_thread(_sketched, gradient, seed))
            request = _request(micro_batch, first, last, fetch.job, seed, backward=True)
            return await self._judge(fetch.peer, claimed, request, witnesses)
        finally:
            tensors.retract_repeated(fetch.job)

    async def _check_driver(self, fetch: Fetch) -> str | None:
        """Check an activation whose sender holds the first stages: it made it of samples that all have."""
        context, last = self._context, fetch.stage - 1
        if self._last_stage(fetch.peer) != last or not context.holds(fetch.peer, 0):
            return None
        witnesses = self._witnesses(fetch.peer, 0, last)
        given, targets = context.tensors.received_input(fetch.job)
        if not witnesses or given is None or targets is None:
            return None
        seed = secrets.token_bytes(SEED_BYTES)
        claimed = Result(await in_thread(_sketched, given, seed), b"", _targets_digest(targets, context.staging.codec))
        request = _request(fetch.micro_batch, 0, last, fetch.job, seed, backward=False)
        return await self._judge(fetch.peer, claimed, request, witnesses)

    async def _judge(
        self, suspect: str, claimed: Result, request: PeerToPeerRepeatWork, witnesses: list[str]
    ) -> str | None:
        found: list[tuple[str, Result]] = []
        for witness in witnesses[:_ASKED]:
            try:
                made = await self._node.ask(witness, request, PeerToPeerWorkRepeated, self._context.wait_s)
            except LinkError as error:
                log.debug("%s did not compute a micro-batch again: %s", witness, error)
                continue
            found.append((witness, Result(made.output, made.gradient, made.targets)))
            ruling = rule(claimed, [result for _, result in found], self._context.settings.tolerance)
            if ruling in ("agree", "suspect", "witness"):
                return None if ruling == "agree" else suspect if ruling == "suspect" else found[0][0]
            if len(found) > 1:
                break
        if not found:
            return None
        names = ", ".join(witness for witness, _ in found)
        log.warning(
            "peer %s and %s compute other values for samples %d to %d in stages %d to %d, and nobody can say who is "
            "wrong: their result is not used. A third replica of these stages would tell",
            suspect,
            names,
            request.start,
            request.stop,
            request.stage,
            request.last,
        )
        raise WireError(f"{suspect} and {names} do not agree on a micro-batch")

    async def _confirmation(
        self, fetch: Fetch, stage: int, shown: Tensor, returned: Tensor
    ) -> Literal["given", "unknown", "contradicted"]:
        """Ask the replicas of the stage after the checked one whether they exchanged with it what it has shown.

        The checked one is wrong once two of them have contradicted it, now or before. Raises ``WireError`` for one:
        then it is word against word."""
        context, batch = self._context, fetch.micro_batch
        asked = sorted(holders(context.members.run.client.view, stage).keys() - {fetch.peer})
        context.settings.chance.shuffle(asked)
        question = PeerToPeerConfirmTensors(of=fetch.peer, round=batch.round, start=batch.start, stop=batch.stop)

        async def ask(peer: str) -> tuple[str, PeerToPeerTensorsConfirmed | None]:
            try:
                wait_s = context.members.run.client.deadlines.request_s
                return peer, await self._node.ask(peer, question, PeerToPeerTensorsConfirmed, wait_s)
            except LinkError:
                return peer, None

        answers = dict(await asyncio.gather(*map(ask, asked[:_CONFIRMING])))
        known = {peer: one for peer, one in answers.items() if one is not None and one.activation and one.gradient}
        if not known:
            return "unknown"
        activation, gradient = await in_thread(_digest, shown), await in_thread(_digest, returned)
        against = {peer for peer, one in known.items() if one.activation != activation}
        if not against and gradient in {one.gradient for one in known.values()}:
            return "given"
        here = self._node.processes().keys()
        self._contradictors = {peer: by for peer, by in self._contradictors.items() if peer in here}
        contradictors = self._contradictors.setdefault(fetch.peer, set())
        contradictors |= against or known.keys()
        if len(contradictors) > 1:
            del self._contradictors[fetch.peer]
            return "contradicted"
        (other,) = contradictors
        log.warning("peers %s and %s do not agree on what they sent each other", fetch.peer, other)
        raise WireError(f"{fetch.peer} and {other} do not agree on what they sent each other")

    def _last_stage(self, peer: str) -> int | None:
        pipeline = self._context.members.run.client.view.pipeline
        return next((one.last for one in pipeline.spans if one.peer == peer), None) if pipeline else None

    def _witnesses(self, suspect: str, first: int, last: int) -> list[str]:
        """Return the other trusted peers that hold all these stages, in random order."""
        view, me = self._context.members.run.client.view, self._context.members.run.client.peer
        able = holders(view, first).keys() & holders(view, last).keys() & self._node.processes().keys()
        found = sorted(peer for peer in able if peer not in (suspect, me) and self._is_trusted(peer))
        self._context.settings.chance.shuffle(found)
        return found


def _request(
    micro_batch: MicroBatch, first: int, last: int, number: int, seed: bytes, *, backward: bool
) -> PeerToPeerRepeatWork:
    return PeerToPeerRepeatWork(
        round=micro_batch.round,
        start=micro_batch.start,
        stop=micro_batch.stop,
        stage=first,
        last=last,
        number=number,
        backward=backward,
        seed=seed,
    )


# Computing again --------------------------------------------------------------------------------------------


class WorkRepeater:
    """Answers to other peers' checks. ``queue``: hands a task to the training thread.

    Others cost this peer no more than four times the share of its own work, and four micro-batches a round; each of
    them at most twice its part of that, so that none uses it up."""

    def __init__(self, context: CheckContext, exchanges: ExchangeLog, queue: Callable[[RepeatTask], None]) -> None:
        self._context = context
        self._exchanges = exchanges
        self._queue = queue
        self._node = context.members.run.node
        self._round = -1
        self._forwards = self._running = 0
        self._repeated = Counter[str]()
        """Micro-batches that were computed again in this round, by who asked."""
        self._is_open = False

    def open(self) -> None:
        """Register the handlers, which answer until ``close``."""
        self._is_open = True
        self._node.control.handle(PeerToPeerConfirmTensors, self._on_confirm)
        self._node.control.handle(PeerToPeerRepeatWork, self._on_repeat)

    def close(self) -> None:
        self._is_open = False

    def round_opened(self, number: int) -> None:
        if number != self._round:
            self._round, self._forwards = number, 0
            self._repeated.clear()

    def note_forward(self) -> None:
        """Count a micro-batch of this peer's own work."""
        self._forwards += 1

    async def _on_confirm(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerConfirmTensors)
        self._member(channel)
        return self._exchanges.of(MicroBatch(message.round, message.start, message.stop), message.of)

    async def _on_repeat(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerRepeatWork)
        sender = self._member(channel)
        self._check_request(sender, message)
        self._repeated[sender] += 1
        self._running += 1
        try:
            async with asyncio.timeout(self._context.wait_s):
                task = await self._task(sender, message)
                self._queue(task)
                return await in_thread(self._answer, await asyncio.wrap_future(task.done), message.seed)
        except TimeoutError as error:
            raise Busy("this peer did not get to computing the micro-batch again") from error
        finally:
            self._running -= 1

    def _check_request(self, sender: str, message: PeerToPeerRepeatWork) -> None:
        """Refuse what this peer cannot compute, what only other peers could ask for, and too much."""
        span, most = self._context.span, self._context.shapes.micro_batch
        if not 0 < message.stop - message.start <= most:
            raise WireError(f"a micro-batch of {message.stop - message.start} samples; expected 1 to {most}")
        if not span.first <= message.stage <= message.last <= span.last:
            raise StaleWork(f"this peer holds the stages {span.first} to {span.last}")
        beside = message.stage - 1 if message.stage else message.last + 1
        if not self._context.holds(sender, beside):
            raise Busy(f"as far as is known here, this peer does not hold stage {beside}")
        if message.round != self._round:
            raise StaleWork(f"this peer is in round {self._round}")
        budget = _AT_ONCE + 4 * self._context.settings.share * self._forwards
        of_each = max(1.0, 2 * budget / max(1, len(self._neighbours(beside))))
        is_used_up = self._repeated.total() >= budget or self._repeated[sender] >= of_each
        if self._running >= _AT_ONCE or is_used_up:
            raise Busy("this peer has computed enough of others' work again for now")

    def _neighbours(self, stage: int) -> set[str]:
        """Return the peers that may ask as holders of that stage."""
        return set(holders(self._context.members.run.client.view, stage)) - {self._context.members.run.client.peer}

    async def _task(self, sender: str, message: PeerToPeerRepeatWork) -> RepeatTask:
        """Fetch what a micro-batch needs."""
        context, tensors = self._context, self._context.tensors
        micro_batch = MicroBatch(message.round, message.start, message.stop)
        samples, given, targets, gradient = micro_batch.samples, None, None, None
        is_end = message.last + 1 == context.settings.stages
        if message.stage:
            header, targets_header = context.tensor_header(message.stage, samples), context.targets_header(samples)
            size_bytes = context.packed_bytes(header)
            whole_bytes = size_bytes + context.packed_bytes(targets_header)
            room = await tensors.fetch_packed(sender, "activation", message.number, whole_bytes, context.wait_s)
            given = await in_thread(context.unpacked, room[:size_bytes], header)
            targets = context.unpacked(room[size_bytes:], targets_header)
            if is_end:
                await in_thread(context.shapes.check_targets, targets, samples)
        if message.backward and message.stage and not is_end:
            header = context.tensor_header(message.last + 1, samples)
            room = await tensors.fetch_packed(
                sender, "repeated", message.number, context.packed_bytes(header), context.wait_s
            )
            gradient = await in_thread(context.unpacked, room, header)
        done: futures.Future[RepeatedTensors] = futures.Future()
        return RepeatTask(micro_batch, message.stage, message.last, given, targets, gradient, done)

    def _answer(self, made: RepeatedTensors, seed: bytes) -> PeerToPeerWorkRepeated:
        return PeerToPeerWorkRepeated(
            output=self._sketched(made.output, seed),
            gradient=self._sketched(made.gradient, seed),
            targets=b"" if made.targets is None else _targets_digest(made.targets, self._context.staging.codec),
        )

    def _sketched(self, made: ComputedTensor | None, seed: bytes) -> bytes:
        """Return the sketch of a tensor as it would arrive elsewhere: packed and unpacked."""
        if made is None:
            return b""
        try:
            packed = self._context.staging.pack_result(made)
        except CodecError as error:
            raise WireError(f"the result of what was sent cannot be packed: {error}") from error
        return _sketched(self._context.unpacked(packed, TensorHeader.of(made.tensor)), seed)

    def _member(self, channel: Channel) -> str:
        return sender_of(self._node, channel, is_open=self._is_open)


def _sketched(tensor: Tensor, seed: bytes) -> bytes:
    values: Values = tensor.detach().float().reshape(-1).cpu().numpy()
    return sketch(values, seed)


def _digest(packed: Tensor) -> bytes:
    return hashlib.sha256(packed.numpy().data).digest()


def _targets_digest(targets: Tensor, codec: Codec) -> bytes:
    return _digest(pack(targets.cpu(), codec))


def rounding_error(codec: Codec) -> float:
    """Return the relative error of a codec on normally distributed values."""
    values = torch.randn(2**14, generator=torch.Generator().manual_seed(0))
    again = codec.decode(codec.encode(values), values.numel())
    return float((again - values).norm() / values.norm())
