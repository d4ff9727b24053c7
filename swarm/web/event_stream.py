"""Server-sent events of one run to one browser: what has changed, as fast as it reads and no faster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from shoal.swarm.web.feed import Feed

Message = MutableMapping[str, Any]

_PING_S = 15.0
"""Pause after which a comment is sent, so that proxies keep the connection, and dead ones are noticed."""
_LAST_S = 1.0
_SEND_S = 20.0
"""Time for a browser to take an event; one that needs longer is gone, or too slow to follow."""


async def stream(
    feed: Feed,
    headers: list[tuple[bytes, bytes]],
    ended: asyncio.Event,
    receive: Callable[[], Awaitable[Message]],
    send: Callable[[Message], Awaitable[None]],
) -> None:
    """Answer an ASGI request with the feed's events, until the browser has gone, or ``ended`` is set."""
    headers = [*headers, (b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
    headers.append((b"x-accel-buffering", b"no"))  # nginx would hold the events back
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    following = asyncio.ensure_future(_send_events(feed, send))
    others = asyncio.ensure_future(_until_gone(receive)), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((following, *others), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (following, *others):
            task.cancel()
        await asyncio.gather(following, *others, return_exceptions=True)
    if ended.is_set():
        async with asyncio.timeout(_LAST_S):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_events(feed: Feed, send: Callable[[Message], Awaitable[None]]) -> None:
    known = 0
    while True:
        try:
            async with asyncio.timeout(_PING_S):
                known, data = await feed.after(known)
        except TimeoutError:
            data = b": still here\n\n"
        async with asyncio.timeout(_SEND_S):
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
