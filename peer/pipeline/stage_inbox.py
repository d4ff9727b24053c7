"""What other peers of a pipeline send to one of them: offers and notes, checked before the engine hears of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shoal.peer.member.memberships import scope_of
from shoal.peer.pipeline.stage_shapes import StageShapes
from shoal.peer.pipeline.tensor_store import StageTensors
from shoal.swarm.errors import Busy, NotAdmitted, StaleWork
from shoal.swarm.pipeline.engine.effects import Answer, Fetch, MicroBatch, Note, Offer
from shoal.swarm.pipeline.engine.hops import Span
from shoal.swarm.protocol.messages import Acknowledged, Message, PeerToPeerNote, PeerToPeerOfferTensor
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.transport import Node


class StageInbox:
    """``offered`` and ``noted`` tell the engine, and have what follows done."""

    def __init__(
        self,
        node: Node,
        span: Span,
        shapes: StageShapes,
        tensors: StageTensors,
        offered: Callable[[Offer], Answer],
        noted: Callable[[Note], None],
    ) -> None:
        self._node = node
        self._span = span
        self._shapes = shapes
        self._tensors = tensors
        self._offered = offered
        self._noted = noted
        self._offers: dict[tuple[str, str, int], PeerToPeerOfferTensor] = {}
        self._is_open = False

    def open(self) -> None:
        """Listen, until ``close``."""
        self._is_open = True
        self._node.control.handle(PeerToPeerNote, self._on_note)
        for stage in range(self._span.first, self._span.last + 1):
            self._node.control.handle(PeerToPeerOfferTensor, partial(self._on_offer, stage), scope_of(stage))

    def close(self) -> None:
        """These stages are being left: what comes for them is refused."""
        self._is_open = False

    def offer_for(self, fetch: Fetch) -> PeerToPeerOfferTensor:
        """What is to be fetched, as it was offered."""
        return self._offers[fetch.kind, fetch.peer, fetch.number]

    def forget(self) -> None:
        """The round is over, and what was offered in it."""
        self._offers.clear()

    async def _on_offer(self, stage: int, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerOfferTensor)
        sender = self._member(channel)
        shape, targets = self._shapes.expected(message, stage)
        self._tensors.check(message, shape, targets)
        key = (message.kind, sender, message.number)
        is_known = key in self._offers  # offered before: another attempt offers the same
        self._offers.setdefault(key, message)
        micro_batch = MicroBatch(message.round, message.start, message.stop)
        offer = Offer(message.kind, sender, micro_batch, stage, message.attempt, message.number)
        answer = self._offered(offer)
        if answer == "accepted":
            return Acknowledged()
        if not is_known:
            self._offers.pop(key, None)
        if answer == "busy":
            raise Busy("no room for another micro-batch now")
        raise StaleWork("that micro-batch is not, or not any more, of use here")

    async def _on_note(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerNote)
        micro_batch = MicroBatch(message.round, message.start, message.stop)
        self._noted(Note(message.kind, self._member(channel), micro_batch, message.stage, message.attempt))
        return Acknowledged()

    def _member(self, channel: Channel) -> str:
        if not self._is_open:
            raise Busy("these stages are being left")
        peer = self._node.peer_with(channel.remote_key)
        if peer is None:
            raise NotAdmitted("only members of the run take part in its pipeline")
        return peer
