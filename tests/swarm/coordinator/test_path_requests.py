"""Requests about paths, called as the coordinator's sockets would call them: who may ask, for what, and how often."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.hosts import serve
from tests.swarm.coordinator.world import CPU, entry

from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import LinkError, NotAdmitted, TryLater
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerAddresses,
    CoordinatorToPeerDial,
    CoordinatorToPeerRelayOffered,
    CoordinatorToPeerRelays,
    CoordinatorToPeerStatus,
    PeerToCoordinatorGetRelays,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorOfferRelay,
    PeerToCoordinatorRequestDial,
    PeerToCoordinatorShowAddresses,
)
from shoal.swarm.protocol.paths import check_relay
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import Address, Message, RosterEntry
from shoal.swarm.transport.relay.books import RelayBooks, RelayLimits
from shoal.swarm.transport.relay.server import HostPolicy, RelayServer
from shoal.swarm.transport.tcp.sockets import listen

TOML = '[run]\nname = "tiny"\n[recipe]\nname = "own"\n[access]\nadmission = "open"\n[round]\ntokens = 100000\n'
RUN = parse_run_file(TOML)
PUBLIC, WALLED, OBSERVER, STRANGER = 1, 2, 3, 4
HOST = "127.0.0.1"


def served(tmp_path: Path, test: Callable[[CoordinatorService], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a coordinator that has a member that can be dialed, one that cannot, and an observer."""

    async def main() -> None:
        journal = LocalJournal(tmp_path, RUN.hash, TOML)
        try:
            async with serve(TOML, RUN, Identity.generate(), (HOST, 0), journal, journal.lease()) as service:
                for one in (entry(PUBLIC), entry(WALLED, reachable=False), entry(OBSERVER, role="observer")):
                    at_home = one.model_copy(update={"addresses": (Address(host=HOST, control_port=1, data_port=2),)})
                    service.scope.admission.join(at_home, CPU, service.run.log.now_s)
                await test(service)
        finally:
            journal.close()

    asyncio.run(main())


async def ask(service: CoordinatorService, number: int, message: Message) -> Any:
    """What a member is answered."""
    channel: Any = SimpleNamespace(remote_key=entry(number).certificate.curve_key, remote_host=HOST)
    return await service.handlers[0]._requests()[type(message)](channel, message)


def entry_of(service: CoordinatorService, number: int) -> RosterEntry:
    return service.scope.membership.members[entry(number).peer].entry


@asynccontextmanager
async def relay_on_this_machine() -> AsyncIterator[tuple[bytes, int]]:
    server = RelayServer(Identity.generate(), HostPolicy(is_open=True), RelayBooks(RelayLimits()))
    listener = listen(HOST, 0)
    serving = asyncio.create_task(server.serve(listener))
    try:
        yield server.identity.public_key, listener.getsockname()[1]
    finally:
        serving.cancel()
        await asyncio.wait([serving])


REQUESTS: tuple[Message, ...] = (
    PeerToCoordinatorGetRelays(),
    PeerToCoordinatorShowAddresses(addresses=(Address(host="", control_port=1, data_port=2),)),
    PeerToCoordinatorRequestDial(peer=entry(WALLED).peer),
    PeerToCoordinatorOfferRelay(relay_key=bytes(32), port=9),
)


def test_only_members_may_ask_for_relays_dials_and_addresses(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        for message in REQUESTS:
            with pytest.raises(NotAdmitted):
                await ask(service, STRANGER, message)

    served(tmp_path, main)


def test_requests_of_each_member_are_limited_and_those_of_others_are_not(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        answered = 0
        while answered < 1000:
            try:
                await ask(service, WALLED, PeerToCoordinatorGetRelays())
            except TryLater:
                break
            answered += 1
        assert 64 <= answered < 1000
        for message in REQUESTS[1:2]:
            with pytest.raises(TryLater):
                await ask(service, WALLED, message)
        await ask(service, PUBLIC, PeerToCoordinatorGetRelays())

    served(tmp_path, main)


def test_a_pass_is_for_the_member_that_asks_and_its_own_key(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        for number in (PUBLIC, WALLED, OBSERVER):
            answer = await ask(service, number, PeerToCoordinatorGetRelays())
            assert isinstance(answer, CoordinatorToPeerRelays)
            certificate = entry(number).certificate
            shown = answer.relay_pass
            assert (shown.member_key, shown.curve_key) == (certificate.identity_key, certificate.curve_key)
            assert (shown.run_hash, shown.host_key) == (RUN.hash, service.identity.public_key)

    served(tmp_path, main)


def test_a_member_is_shown_at_relays_of_the_run_alone_and_not_dialed_for_that(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        async def dial(entry: RosterEntry) -> str:
            raise AssertionError("its own address is the same")

        service.handlers[0]._dial_back = dial  # type: ignore[method-assign]
        async with relay_on_this_machine() as (key, port):
            await ask(service, PUBLIC, PeerToCoordinatorOfferRelay(relay_key=key, port=port))
            named = Address(kind="relayed", host=HOST, control_port=port, relay_key=key)
            others = named.model_copy(update={"relay_key": bytes(32)}), named.model_copy(update={"control_port": 1})
            own = Address(host="", control_port=1, data_port=2)
            shown = PeerToCoordinatorShowAddresses(addresses=(own, named, *others))
            answer = await ask(service, WALLED, shown)
        assert answer == CoordinatorToPeerAddresses(reachable=False)
        assert entry_of(service, WALLED).relays == (named,)
        assert entry_of(service, WALLED).can_be_met

    served(tmp_path, main)


def test_a_new_address_is_dialed_and_must_be_the_members_own(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        dialed: list[str] = []

        async def dial(entry: RosterEntry) -> str:
            dialed.append(str(entry.address))
            return ""

        service.handlers[0]._dial_back = dial  # type: ignore[method-assign]
        for host in ("10.1.2.3", "a.name.example"):  # an inner address of another network, and a name
            elsewhere = PeerToCoordinatorShowAddresses(addresses=(Address(host=host, control_port=5, data_port=6),))
            with pytest.raises(NotAdmitted):
                await ask(service, WALLED, elsewhere)
        assert dialed == []
        moved = PeerToCoordinatorShowAddresses(addresses=(Address(host="", control_port=5, data_port=6),))
        assert await ask(service, WALLED, moved) == CoordinatorToPeerAddresses(reachable=True)
        assert dialed == [f"{HOST}:5"]
        assert entry_of(service, WALLED).reachable

    served(tmp_path, main)


def test_only_a_member_that_can_be_met_has_others_asked_to_dial_it(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        told: list[tuple[bytes, Message]] = []

        def incoming(key: bytes) -> Any:
            async def notify(message: Message, scope: int) -> None:
                told.append((key, message))
                if len(told) > 1:
                    raise LinkError("it has just gone")

            return SimpleNamespace(notify=notify, label="a member")

        service.node.control.incoming = incoming  # type: ignore[method-assign]
        wish = PeerToCoordinatorRequestDial(peer=entry(WALLED).peer)
        for _ in range(2):
            assert await ask(service, PUBLIC, wish) == Acknowledged()
        assert told == [(entry(WALLED).certificate.curve_key, CoordinatorToPeerDial(peer=entry(PUBLIC).peer))] * 2
        for number, peer in ((WALLED, PUBLIC), (PUBLIC, STRANGER)):
            with pytest.raises(NotAdmitted):
                await ask(service, number, PeerToCoordinatorRequestDial(peer=entry(peer).peer))
        service.scope.admission.leave(entry(WALLED).peer, "done", service.run.log.now_s, "")
        with pytest.raises(NotAdmitted):
            await ask(service, PUBLIC, wish)
        assert len(told) == 2

    served(tmp_path, main)


def test_a_members_relay_is_named_once_it_has_answered_and_as_long_as_it_does(tmp_path: Path) -> None:
    async def main(service: CoordinatorService) -> None:
        async def named() -> list[tuple[str, int, bool]]:
            answer = await ask(service, WALLED, PeerToCoordinatorGetRelays())
            for one in answer.relays:
                check_relay(one, RUN.hash, service.identity.public_key)
                with pytest.raises(NotAdmitted):
                    check_relay(one.model_copy(update={"of_member": False}), RUN.hash, service.identity.public_key)
            return [(one.host, one.port, one.of_member) for one in answer.relays]

        async with relay_on_this_machine() as (key, port):
            offer = PeerToCoordinatorOfferRelay(relay_key=key, port=port)
            for number in (WALLED, OBSERVER):
                answer = await ask(service, number, offer)
                assert isinstance(answer, CoordinatorToPeerRelayOffered)
                assert "cannot reach" in answer.trouble
            wrong = await ask(service, PUBLIC, PeerToCoordinatorOfferRelay(relay_key=bytes(32), port=port))
            assert "no relay answers" in wrong.trouble
            assert await named() == []
            assert await ask(service, PUBLIC, offer) == CoordinatorToPeerRelayOffered(trouble="")
            assert await named() == [(HOST, port, True)]
            status = await ask(service, WALLED, PeerToCoordinatorGetStatus())
            assert isinstance(status, CoordinatorToPeerStatus)
            assert [(one.peer, one.port) for one in status.relays] == [(entry(PUBLIC).peer, port)]
        gone = await ask(service, PUBLIC, offer)
        assert "no relay answers" in gone.trouble
        assert await named() == []

    served(tmp_path, main)
