"""A member's use of relays: which of them it chooses, and what it does while its coordinator is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.swarm.client import relay_access
from shoal.swarm.client.relay_access import RelayAccess
from shoal.swarm.errors import DeadlineExceeded, LinkError, Removed, Unreachable
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.paths import PASS_S, SignedRelay, sign_relay
from shoal.swarm.protocol.types import Address, Message
from shoal.swarm.transport.relay.books import RelayBooks, RelayLimits
from shoal.swarm.transport.relay.client import measure
from shoal.swarm.transport.relay.server import HostPolicy, RelayServer
from shoal.swarm.transport.tcp.sockets import listen

RELAY = Address(kind="relayed", host="192.0.2.1", control_port=7000, relay_key=bytes(32))


def client_whose_coordinator_answers(error: LinkError) -> Any:
    async def show_addresses() -> None:
        raise error

    control = SimpleNamespace(handle=lambda kind, handler: None)
    return SimpleNamespace(node=SimpleNamespace(control=control), relays=(), show_addresses=show_addresses)


def test_a_coordinator_that_does_not_answer_ends_nothing() -> None:
    client = client_whose_coordinator_answers(DeadlineExceeded("no answer"))
    asyncio.run(RelayAccess(client)._show([RELAY]))
    assert client.relays == (), "the next look tries again"


def test_a_member_that_was_removed_ends() -> None:
    client = client_whose_coordinator_answers(Removed("by the host"))
    with pytest.raises(Removed):
        asyncio.run(RelayAccess(client)._show([RELAY]))


@pytest.mark.parametrize("expires_s", [0, 2**40])
def test_a_pass_is_used_for_its_time_whatever_the_hosts_clock_says(
    expires_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def ask(message: Message, reply: type[Message]) -> Any:
        nonlocal asked
        asked += 1
        return SimpleNamespace(relays=(), relay_pass=SimpleNamespace(expires_s=expires_s))

    async def main() -> None:
        client = client_whose_coordinator_answers(Unreachable("not asked"))
        client.ask, client.identity, client.keys, client.certificate = ask, None, None, None
        access = RelayAccess(client)
        assert access.held_credentials() is None
        for _ in range(2):
            assert await access.credentials() is not None
        assert asked == 1
        assert access.held_credentials() is not None
        late_s = relay_access.time.monotonic() + PASS_S + 1
        monkeypatch.setattr(relay_access, "time", SimpleNamespace(monotonic=lambda: late_s))
        assert access.held_credentials() is None, "nobody is asked for this"
        await access.credentials()
        assert asked == 2

    asyncio.run(main())


HOST, RUN = Identity.generate(), b"r" * 32


@asynccontextmanager
async def relay_with(links: int) -> AsyncIterator[SignedRelay]:
    """A relay that carries so many of ten connections."""
    server = RelayServer(Identity.generate(), HostPolicy(), RelayBooks(RelayLimits(links=10)))
    for _ in range(links):
        server.books.open_link(b"somebody", HOST.public_key)
    listener = listen("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve(listener))
    try:
        place = "127.0.0.1", listener.getsockname()[1]
        yield sign_relay(HOST.sign, RUN, server.identity.public_key, place)
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def test_a_member_moves_from_a_relay_that_is_gone_and_from_a_full_one() -> None:
    async def main() -> None:
        async with AsyncExitStack() as half_full, AsyncExitStack() as idle, relay_with(10) as full:
            second = await half_full.enter_async_context(relay_with(5))
            first = await idle.enter_async_context(relay_with(0))
            forged = sign_relay(Identity.generate().sign, RUN, bytes(32), ("127.0.0.1", 1))
            run_relays = (forged, full, second, first)

            async def ask(message: Message, reply: type[Message]) -> Any:
                return SimpleNamespace(relays=run_relays, relay_pass=None)

            client = client_whose_coordinator_answers(Unreachable("not asked"))
            client.ask, client.identity, client.keys, client.certificate = ask, None, None, None
            client.invite, client.coordinator_key = SimpleNamespace(run_hash=RUN), HOST.public_key
            client.reachable, client.me = False, SimpleNamespace(role="trainer")
            access = RelayAccess(client)
            client.relays = await access._wanted()
            assert client.relays == (first.address, second.address)
            await idle.aclose()
            client.relays = await access._wanted()
            assert client.relays == (second.address, full.address)
            await half_full.aclose()
            client.relays = await access._wanted()
            assert client.relays[0] == full.address
            client.reachable = True
            assert await access._wanted() == ()

    asyncio.run(main())


def test_a_relay_says_what_it_carries_to_whom_it_may_concern() -> None:
    async def main() -> None:
        async with relay_with(7) as relay:
            measured = await measure(relay.address)
            assert measured is not None
            assert (measured.load.busy, measured.load.links) == (0.7, 7)
            assert 0.0 < measured.trip_s < 1.0
            assert await measure(relay.address.model_copy(update={"relay_key": bytes(32)})) is None

    asyncio.run(main())
