"""What comes in frames over a link, and whose it is: chunks, credit, messages. On the data plane's thread.

Frames of other links, of streams that nobody waits for, or under other keys do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from shoal.swarm.errors import WireError
from shoal.swarm.transport.frame_crypto import CHUNK, CREDIT, ORDER, TAG_BYTES, Header
from shoal.swarm.transport.framing import PREFIX_BYTES
from shoal.swarm.transport.links import Link, Meter

MAX_ORDER_BYTES = 2**12
"""Of a message about a stream."""


class Intake:
    """Opens frames, each into its place."""

    def __init__(
        self, meter: Meter, tell: Callable[[Callable[[], None]], None], on_orders: Callable[[Link], None]
    ) -> None:
        """``tell``: has something called on the event loop; there ``on_orders`` is when a link has ``orders``."""
        self._meter = meter
        self._tell = tell
        self._on_orders = on_orders

    def take(self, link: Link, header_bytes: bytes, body: memoryview) -> None:
        """A frame that has come over ``link``. Raises ``WireError`` for one that breaks it."""
        header = Header.unpack(header_bytes)
        if header.link != link.sealed.link:
            raise WireError("a bulk frame of another link")
        link.last_frame_s = time.monotonic()
        if header.kind == CHUNK:
            self._take_chunk(link, header, header_bytes, body)
            return
        if body.nbytes > MAX_ORDER_BYTES + TAG_BYTES:
            raise WireError(f"a message of {body.nbytes} bytes about a stream")
        said = bytearray(body.nbytes - TAG_BYTES)
        link.sealed.open(header_bytes, body, memoryview(said))
        if header.kind == CREDIT:
            outgoing = link.outgoing.get(header.stream)
            if outgoing is not None and outgoing.receive(header.chunk):
                self._tell(outgoing.notify)
        elif header.kind == ORDER and link.order(bytes(said)):
            self._tell(partial(self._on_orders, link))

    def _take_chunk(self, link: Link, header: Header, header_bytes: bytes, body: memoryview) -> None:
        incoming = link.incoming.get(header.stream)
        if incoming is None:
            return  # nobody waits for it any more
        if header.scope != incoming.scope:
            raise WireError("a chunk of another scope than its stream's")
        size = body.nbytes - TAG_BYTES
        if incoming.receive(header.chunk, size, lambda place: link.sealed.open(header_bytes, body, place)):
            self._meter.received(PREFIX_BYTES + body.nbytes, link.last_frame_s, header.scope)
        if not incoming.is_announced:
            incoming.is_announced = True
            self._tell(incoming.notify)
