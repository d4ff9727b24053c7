"""What peers say to each other, not to the coordinator: links, streams of chunks, and a pipeline's tensors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.protocol.types import Blob, Count, Dtype, Key, Message, Shape, Stage, TensorForm, Text

LinkName = Annotated[bytes, Field(min_length=8, max_length=8)]
StreamNumber = Annotated[int, Field(ge=0, lt=2**32)]


class PeerToPeerPing(Message):
    """Are you there? Also the coordinator's test whether a new member can be reached."""


class PeerToPeerPong(Message):
    """Yes."""


class PeerToPeerOpenLink(Message):
    """Agree on keys for bulk frames; travels inside CURVE. The opener then attaches its data socket."""

    link: LinkName
    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]


class PeerToPeerLinkOpened(Message):
    """The acceptor's half of the secret, and the cipher that both will use."""

    secret: Key
    cipher: Literal["aes-256-gcm", "chacha20-poly1305"]


class PeerToPeerOfferMemory(Message):
    """Over a link between processes of one machine, by whoever opened it: that descriptor of ours is memory in which
    frames can lie, and begins with the token."""

    process: Annotated[int, Field(ge=1, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]
    token: Key


class PeerToPeerMemoryOpened(Message):
    """Over a link: whether we could open what you have offered; if so, frames may lie there from now on."""

    is_open: bool


class PeerToPeerOpenStream(Message):
    """Over a link: send chunks ``first <= c < stop`` of ``blob``, as each becomes available."""

    stream: StreamNumber
    blob: Blob
    first: Annotated[int, Field(ge=0, lt=2**32)]
    stop: Annotated[int, Field(ge=0, lt=2**32)]
    credit: Annotated[int, Field(ge=1, le=1024)]


class PeerToPeerCloseStream(Message):
    """Over a link: send no more of that stream."""

    stream: StreamNumber


class PeerToPeerStreamEnded(Message):
    """Over a link: no chunk more comes in a stream that you opened, and why; ``code`` as in ``RequestFailed``."""

    stream: StreamNumber
    code: Annotated[str, Field(max_length=64)]
    message: Text


class PeerToPeerOfferTensor(Message):
    """In the scope of the receiver's stage: a micro-batch's activation, or the gradient for the one that it had sent,
    can be fetched here, packed, as the blob of that kind and ``number``. Acknowledged, or refused as ``Busy``.

    (``round``, ``start``, ``stop``): the micro-batch's samples; ``attempt``: which drive of them it is; ``size_bytes``:
    of the packed tensor. After it come the raw bytes of ``targets``, with the activations of a forward pass."""

    kind: Literal["activation", "gradient"]
    round: Count
    start: Count
    stop: Count
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
    shape: Shape
    dtype: Dtype
    size_bytes: Count
    number: Count
    targets: TensorForm | None = None


class PeerToPeerNote(Message):
    """What saves another peer of the pipeline time or memory, and is not needed for a result: ``cancel`` of what was
    offered to it; ``abandoned``, what it had offered; ``taken``, the gradient that it keeps for us; ``room`` for one
    micro-batch more. ``stage``: the receiver's, whose input or output it is about; ``attempt`` as in the offer."""

    kind: Literal["cancel", "abandoned", "taken", "slot_free"]
    round: Count
    start: Count
    stop: Count
    stage: Stage
    attempt: Annotated[int, Field(ge=0, lt=2**31)]
