"""A member's use of relays while its coordinator is away."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.swarm.client.relay_access import RelayAccess
from shoal.swarm.errors import DeadlineExceeded, LinkError, Removed
from shoal.swarm.protocol.types import Address

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
