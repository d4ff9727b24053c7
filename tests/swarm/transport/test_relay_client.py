"""A registration with a relay is ended by its cancellation, whatever fails in the same moment."""

import asyncio
from typing import Any

import pytest

from shoal.swarm.errors import LinkClosed
from shoal.swarm.protocol.types import Address
from shoal.swarm.transport.relay.client import Registration

RELAY = Address(kind="relayed", host="192.0.2.1", control_port=7000, relay_key=bytes(32))


def test_a_cancelled_registration_ends_though_its_connection_fails_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stay_registered(self: Any, tasks: asyncio.TaskGroup) -> None:
        async def fail() -> None:
            raise LinkClosed("the connection was lost")

        tasks.create_task(fail())
        await asyncio.Event().wait()

    async def main() -> None:
        registration = Registration(RELAY, lambda: pytest.fail("not asked"), lambda caller: asyncio.sleep(0))
        running = asyncio.create_task(registration.run())
        await asyncio.sleep(0)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=5.0)
        running.cancel()
        assert done, "it goes on as if nobody had cancelled it"
        assert running.cancelled()

    monkeypatch.setattr(Registration, "_stay_registered", stay_registered)
    asyncio.run(main())
