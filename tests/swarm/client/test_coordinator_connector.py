"""A coordinator with several addresses is found where it is: on the virtual clock; and its errors, of real sockets."""

import asyncio
import socket
from typing import Any

import pytest
import torch
from tests.fakes.memory_coordinator import MemoryChannel, MemoryCoordinator, curve_keys, identity, make_client
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.swarm import PATIENCE_S, SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import now_s, run_virtual, until
from tests.swarm.coordinator.world import heartbeat
from tests.swarm.network import HOST
from tests.swarm.network import swarm as strangers

from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.client.coordinator_client import HEAD_START_S, CoordinatorClient, CoordinatorConnector
from shoal.swarm.coordinator.events import JournalEvent, RoundPlanned, VerdictGiven
from shoal.swarm.errors import DeadlineExceeded, LinkError, Unreachable, WrongKey
from shoal.swarm.protocol.identity import CurveKeys
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import PeerToPeerPing, PeerToPeerPong
from shoal.swarm.protocol.types import Address, Message

ELEMENTS = 4096
FEW_S = 5.0
SILENCE = heartbeat(anchor_version=None, state_digest=None)


class Member(SimMember):
    ports = (1, 2)


def a_client(coordinator: MemoryCoordinator, latency_s: float = 0.01) -> tuple[CoordinatorClient, MemoryChannel]:
    me, keys = identity(1), curve_keys(1)
    return make_client(coordinator, MemoryNetwork().endpoint(me.peer_id), me, keys, latency_s, (1, 2))


async def play(run: Swarm) -> None:
    outcomes = await together(*(member.play(torch.ones(ELEMENTS), 4) for member in run.members))
    assert all(isinstance(outcome, Committed) for outcome in outcomes)


@pytest.mark.parametrize("moment", ["RoundClosing", "RoundPlanned", "VerdictGiven"])
@pytest.mark.parametrize("old_port_is_deaf", [False, True])
def test_a_round_ends_once_though_the_coordinator_moves_in_it(moment: str, old_port_is_deaf: bool) -> None:
    async def main() -> None:
        async with swarm(3, run_toml(12), ELEMENTS, make=Member) as run:
            coordinator = run.coordinator
            await play(run)

            def die(step: str, events: list[JournalEvent]) -> None:
                if step == "journaled" and moment in {type(event).__name__ for event in events}:
                    coordinator.away = True
                    coordinator.at = 0
                    coordinator.deaf_ports = {1} if old_port_is_deaf else set()

            coordinator.watch = die
            plays = asyncio.create_task(play(run))
            await until(lambda: coordinator.away, 0.05)
            coordinator.watch = lambda step, events: None
            await asyncio.sleep(1.0)
            coordinator.at = 2
            coordinator.restart()
            moved_s = now_s()
            await until(lambda: all(not one.client.coordinator_is_away for one in run.members), 0.05)
            await plays
            assert now_s() - moved_s < 2 * PATIENCE_S
            await play(run)
            verdicts = [event.verdict for event in coordinator.events if isinstance(event, VerdictGiven)]
            assert [(one.round, one.committed) for one in verdicts] == [(0, True), (1, True), (2, True)]
            assert len([event for event in coordinator.events if isinstance(event, RoundPlanned)]) == 3
            assert {member.version for member in run.members} == {3}
            assert len({member.digest for member in run.members}) == 1
            assert not any(member.rejoined for member in run.members)
            for member in run.members:
                assert member.client._connector.channel is not None
                assert member.client._connector.channel.port == 2  # type: ignore[attr-defined]

    run_virtual(main())


@pytest.mark.parametrize("deaf", [set(), {1}])
def test_joining_at_the_second_address(deaf: set[int]) -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        coordinator.at, coordinator.deaf_ports = 2, deaf
        client, _ = a_client(coordinator)
        started_s = now_s()
        await client.join()
        assert now_s() - started_s < (10.0 if deaf else 2 * HEAD_START_S)

    run_virtual(main())


def test_the_address_that_answered_last_comes_first() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        coordinator.at = 2
        client, _ = a_client(coordinator)
        await client.join()
        client._connector.channel = None  # the connection was lost
        coordinator.deaf_ports = {1}
        started_s = now_s()
        await client.rejoin()
        assert now_s() - started_s < HEAD_START_S / 2
        assert client.joins == 2

    run_virtual(main())


def test_nobody_spins_while_all_addresses_are_dead() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        client, _ = a_client(coordinator)
        await client.join()
        coordinator.at = 0
        dials = 0
        dial = client.node.control.dial

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal dials
            dials += 1
            return dial(*arguments, **options)

        client.node.control.dial = counted  # type: ignore[method-assign]
        asked = asyncio.create_task(client.rejoin())
        await asyncio.sleep(60.0)
        assert not asked.done()
        assert client.coordinator_is_away
        assert dials <= 2 * 60 / 3
        coordinator.at = 1
        started_s = now_s()
        await asked
        assert now_s() - started_s < FEW_S

    run_virtual(main())


def test_a_slow_coordinator_is_heard_though_there_is_another_address() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4).replace(f"{PATIENCE_S}", "20.0"))
        client, channel = a_client(coordinator, latency_s=2.4)
        request = channel.request

        async def impatient(message: Message, reply: type[Message], deadline_s: float, scope: int) -> Message:
            try:
                async with asyncio.timeout(deadline_s):
                    return await request(message, reply, deadline_s, scope)
            except TimeoutError:
                raise DeadlineExceeded("too slow") from None

        channel.request = impatient  # type: ignore[method-assign]
        await client.join()
        await asyncio.wait_for(client.ask_view(SILENCE), 30.0)

    run_virtual(main())


def test_who_has_one_address_waits_for_it_as_long_as_ever() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4).replace(f"{PATIENCE_S}", "20.0"))
        me, keys = identity(1), curve_keys(1)
        client, _ = make_client(coordinator, MemoryNetwork().endpoint(me.peer_id), me, keys, 4.5)
        await client.join()
        started_s = now_s()
        await client.ask_view(SILENCE)
        assert now_s() - started_s < 9.5, "at the first try"

    run_virtual(main())


# Errors, of real sockets ------------------------------------------------------------------------------------


def trouble(*names: str) -> LinkError:
    """Of a first request, where at ``stranger`` somebody with another key listens and at ``nobody`` no one."""

    async def main() -> LinkError:
        async with strangers(2) as (caller, stranger):
            with socket.create_server((HOST, 0)) as closed:
                ports = {"stranger": stranger.ports[0], "nobody": closed.getsockname()[1]}
            addresses = tuple(
                Address(host=host, control_port=ports[name])
                for host, name in zip((HOST, "localhost"), names, strict=False)
            )
            connector = CoordinatorConnector(
                caller.node.control, caller.node.relays, Invite(addresses, "run", CurveKeys.fresh().public, bytes(32))
            )
            with pytest.raises(LinkError) as refused:
                await connector.request_anywhere(PeerToPeerPing(), PeerToPeerPong, 2.0, 2.0)
            for address in addresses:
                assert f"{address.host}:{address.control_port}" in str(refused.value)
            with pytest.raises(Unreachable):
                await connector.request(PeerToPeerPing(), PeerToPeerPong, 0.5)
            return refused.value

    return asyncio.run(main())


def test_errors_name_all_addresses_that_were_tried() -> None:
    nobody = trouble("nobody", "nobody")
    assert type(nobody) is Unreachable
    assert "are the ports open" in str(nobody)
    assert type(trouble("stranger", "stranger")) is WrongKey
    mixed = trouble("stranger", "nobody")
    assert type(mixed) is Unreachable, "who is away may come back"
    assert "the key that was expected" in str(mixed)


def test_a_name_that_nobody_has_is_said_at_once_and_another_server_soon() -> None:
    async def ask(host: str, port: int) -> str:
        async with strangers(1) as (caller,):
            address = Address(host=host, control_port=port)
            invite = Invite((address,), "run", CurveKeys.fresh().public, bytes(32))
            connector = CoordinatorConnector(caller.node.control, caller.node.relays, invite)
            with pytest.raises(Unreachable) as refused:
                async with asyncio.timeout(10.0):  # far less than the time for a connection
                    await connector.request_anywhere(PeerToPeerPing(), PeerToPeerPong, 60.0, 60.0)
            return str(refused.value)

    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9\r\n")
        await reader.read()
        writer.close()

    async def main() -> tuple[str, str]:
        async with await asyncio.start_server(ssh, HOST, 0) as server:
            return await ask("nobody.invalid", 7707), await ask(HOST, server.sockets[0].getsockname()[1])

    unknown, other = asyncio.run(main())
    assert "no machine is known by the name 'nobody.invalid'" in unknown
    assert "an SSH server answers" in other


def test_one_address_fails_as_it_always_did() -> None:
    assert type(trouble("nobody")) is Unreachable
    assert type(trouble("stranger")) is WrongKey
