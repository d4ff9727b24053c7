"""``shoal relay``: passes on sealed bytes of members that cannot reach each other, until it is stopped."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from shoal.peer.relay.process import REPORT_EVERY_S, serve_orders
from shoal.swarm.aio import task_scope
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.relay_url import TOKEN_BYTES, RelayUrl
from shoal.swarm.system import call_on_signals
from shoal.swarm.transport.relay.books import RelayBooks, RelayLimits
from shoal.swarm.transport.relay.server import HostPolicy, RelayServer
from shoal.swarm.transport.tcp.sockets import listen

log = logging.getLogger(__name__)

_TOKEN_CONTEXT = b"shoal relay token, version 1"
_MAX_ORDERS = 4096


@dataclass(frozen=True)
class RelayOptions:
    """``identity``: file of the relay's key pair, made if missing; ``advertise``: host that its URL names, by default
    the bound one; ``hosts``: keys of hosts whose runs are served without the token; ``is_open``: serve every host."""

    identity: Path
    bind: tuple[str, int]
    advertise: str = ""
    hosts: tuple[bytes, ...] = ()
    is_open: bool = False
    limits: RelayLimits = field(default_factory=RelayLimits)


async def relay(options: RelayOptions, on_start: Callable[[RelayUrl], None], *, beside: bool = False) -> None:
    """Serve until SIGINT or SIGTERM or, ``beside`` a host or peer, until the standard input ends with it; see
    ``RelayProcess`` for what they tell each other.

    Raises ``IdentityError`` and ``Unreachable``."""
    identity = Identity.load_or_create(options.identity)
    # The same token as long as the identity is the same, so that the URL stays valid without another file.
    token = hmac.digest(identity.sign(_TOKEN_CONTEXT), _TOKEN_CONTEXT, "sha256")[:TOKEN_BYTES]
    no_token = options.is_open or beside
    policy = HostPolicy(options.hosts, b"" if no_token else token, is_open=options.is_open)
    server = RelayServer(identity, policy, RelayBooks(options.limits))
    listener = listen(*options.bind)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    call_on_signals(stop.set)
    if beside:
        loop.add_reader(sys.stdin, lambda: serve_orders(_read_orders, server.books.set_rate, stop.set))
    host = options.advertise or options.bind[0]
    on_start(RelayUrl(host, listener.getsockname()[1], identity.public_key, b"" if no_token else token))
    async with task_scope() as tasks:
        running = [tasks.create_task(server.serve(listener))]
        if beside:
            running.append(tasks.create_task(_report(server)))
        await stop.wait()
        for task in running:
            task.cancel()
    log.info("the relay ends: %s", server.describe())


def _read_orders() -> bytes:
    return os.read(sys.stdin.fileno(), _MAX_ORDERS)


async def _report(server: RelayServer) -> None:
    """Print what the relay carries, as long as that changes."""
    told = None
    while True:
        load = server.load()
        if load != told:
            told = load
            print(load.model_dump_json(), flush=True)
        await asyncio.sleep(REPORT_EVERY_S)
