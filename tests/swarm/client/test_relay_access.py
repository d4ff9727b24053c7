"""A member's use of relays while its coordinator is away."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.swarm.client import relay_access
from shoal.swarm.client.relay_access import RelayAccess
from shoal.swarm.errors import DeadlineExceeded, LinkError, Removed, Unreachable
from shoal.swarm.protocol.paths import PASS_S
from shoal.swarm.protocol.types import Address, Message

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
        client.ask, client.identity, client.certificate = ask, None, None
        access = RelayAccess(client)
        for _ in range(2):
            assert await access.credentials() is not None
        assert asked == 1
        late_s = relay_access.time.monotonic() + PASS_S + 1
        monkeypatch.setattr(relay_access, "time", SimpleNamespace(monotonic=lambda: late_s))
        await access.credentials()
        assert asked == 2

    asyncio.run(main())
