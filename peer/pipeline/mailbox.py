"""Mailbox of a pipeline's peer: tensor offers and notes from other peers, checked before the engine sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shoal.peer.member.memberships import scope_of
from shoal.peer.pipeline.tensor_io import TensorHeader
from shoal.peer.pipeline.tensor_store import TensorStore
from shoal.peer.training.layers import Layered, LayeredRecipe
from shoal.swarm.errors import Busy, NotAdmitted, StaleWork, WireError
from shoal.swarm.pipeline.engine.effects import Answer, Fetch, MicroBatch, PeerNote, TensorOffer
from shoal.swarm.pipeline.engine.engine import StageSpan
from shoal.swarm.protocol.messages import Acknowledged, PeerToPeerNote, PeerToPeerOfferTensor
from shoal.swarm.protocol.types import Message
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.node import Node


@dataclass(frozen=True)
class StageShapes:
    """Expected shapes of activations and targets, to check offers before anything is fetched.

    ``recipe``: checks the targets' values; ``inputs``: shape of one sample of each stage's input; ``targets``: shape
    and type of one sample's targets; ``micro_batch``: the most samples of one micro-batch.
    """

    recipe: LayeredRecipe
    inputs: tuple[tuple[int, ...], ...]
    targets: TensorHeader
    micro_batch: int

    @classmethod
    def of(
        cls, recipe: LayeredRecipe, layered: Layered, boundaries: tuple[int, ...], batch: Tensor, micro_batch: int
    ) -> StageShapes:
        """Derive the shapes. ``batch``: any samples of the run's data, collated, (b, …). Raises ``RecipeError``."""
        given, targets = recipe.input_of(batch), TensorHeader.of(recipe.targets_of(batch))
        outputs = [tuple(given.shape), *layered.activation_shapes(given)]
        inputs = tuple(outputs[first][1:] for first in boundaries[:-1])
        return cls(recipe, inputs, TensorHeader(targets.shape[1:], targets.dtype), micro_batch)

    def expected(self, offer: PeerToPeerOfferTensor, stage: int) -> tuple[tuple[int, ...], TensorHeader | None]:
        """Return the shape that an offer to ``stage`` must have, and the header of its targets (None for a gradient).

        Raises ``WireError`` for an offer that no other stage makes, or of too many samples.
        """
        samples = offer.stop - offer.start
        if not 0 < samples <= self.micro_batch:
            raise WireError(f"a micro-batch of {samples} samples; expected 1 to {self.micro_batch}")
        at = stage if offer.kind == "activation" else stage + 1
        if not 0 < at < len(self.inputs):
            raise WireError(f"an offer of a {offer.kind} to stage {stage}, which gets none from other stages")
        shape = (samples, *self.inputs[at])
        if offer.kind == "gradient":
            return shape, None
        return shape, TensorHeader((samples, *self.targets.shape), self.targets.dtype)

    def check_targets(self, targets: Tensor | None, samples: int) -> None:
        """Check received targets before they reach a device. Raises ``WireError`` unless they fit ``samples``."""
        if targets is None:
            raise WireError("an activation came without targets, which the last stage needs")
        try:
            self.recipe.check_targets(targets, samples)
        except ValueError as error:
            raise WireError(f"the targets are not those of any samples: {error}") from error


def sender_of(node: Node, channel: Channel, *, is_open: bool) -> str:
    """Return the member at the other end. Raises ``NotAdmitted`` for others, and ``Busy`` when this peer is leaving."""
    if not is_open:
        raise Busy("this peer is leaving these stages")
    peer = node.peer_with(channel.remote_key)
    if peer is None:
        raise NotAdmitted("only members of the run may send to its pipeline")
    return peer


class StageMailbox:
    """Handlers of tensor offers and notes from other peers of the pipeline.

    ``on_offer`` and ``on_note`` report checked ones to the engine and execute its effects. ``holds``: whether the plan
    gives a peer a stage; ``is_trusted``: whether this peer takes tensors from another one.
    """

    def __init__(
        self,
        node: Node,
        span: StageSpan,
        shapes: StageShapes,
        tensors: TensorStore,
        on_offer: Callable[[TensorOffer], Answer],
        on_note: Callable[[PeerNote], None],
        holds: Callable[[str, int], bool],
        is_trusted: Callable[[str], bool],
    ) -> None:
        self._node = node
        self._span = span
        self._shapes = shapes
        self._tensors = tensors
        self._report_offer = on_offer
        self._report_note = on_note
        self._holds = holds
        self._is_trusted = is_trusted
        self._offers: dict[tuple[str, str, int], PeerToPeerOfferTensor] = {}
        self._is_open = False

    def open(self) -> None:
        """Register the handlers, which accept messages until ``close``."""
        self._is_open = True
        self._node.control.handle(PeerToPeerNote, self._on_note)
        for stage in range(self._span.first, self._span.last + 1):
            self._node.control.handle(PeerToPeerOfferTensor, partial(self._on_offer, stage), scope_of(stage))

    def close(self) -> None:
        """Refuse all messages from now on, because this peer leaves the stages."""
        self._is_open = False

    def offer_for(self, fetch: Fetch) -> PeerToPeerOfferTensor:
        """Return the accepted offer that a fetch belongs to."""
        return self._offers[fetch.kind, fetch.peer, fetch.number]

    def drop_offers(self) -> None:
        """Drop all offers, at the end of a round."""
        self._offers.clear()

    async def _on_offer(self, stage: int, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerOfferTensor)
        sender = self._member(channel)
        shape, targets = self._shapes.expected(message, stage)
        self._check_sender(sender, stage - 1 if message.kind == "activation" else stage + 1)
        self._tensors.check_offer(message, shape, targets)
        key = (message.kind, sender, message.number)
        is_known = key in self._offers  # a further attempt offers the same tensor again
        self._offers.setdefault(key, message)
        micro_batch = MicroBatch(message.round, message.start, message.stop)
        offer = TensorOffer(message.kind, sender, micro_batch, stage, message.attempt, message.number)
        answer = self._report_offer(offer)
        if answer == "accepted":
            return Acknowledged()
        if not is_known:
            self._offers.pop(key, None)
        if answer == "busy":
            raise Busy("as many micro-batches as may be are in flight here; offer it again later")
        raise StaleWork("this peer does not need the micro-batch, or no longer: offer it no more")

    def _check_sender(self, sender: str, stage: int) -> None:
        """Refuse tensors that can only come from a stage, unless the sender holds it.

        With ``Busy``, as a sender may know a newer plan, or be trusted again later."""
        if not self._holds(sender, stage):
            raise Busy(f"as far as is known here, this peer does not hold stage {stage}")
        if not self._is_trusted(sender):
            raise Busy("other replicas have computed other values than this peer: nothing is taken from it for a while")

    async def _on_note(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToPeerNote)
        micro_batch = MicroBatch(message.round, message.start, message.stop)
        self._report_note(PeerNote(message.kind, self._member(channel), micro_batch, message.stage, message.attempt))
        return Acknowledged()

    def _member(self, channel: Channel) -> str:
        return sender_of(self._node, channel, is_open=self._is_open)
