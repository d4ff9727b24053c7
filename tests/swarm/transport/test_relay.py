"""A relay between nodes that cannot dial each other: in one process, over real sockets on loopback."""

import asyncio
import errno
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest
from tests.swarm.network import HOST, LONG_S, Member, Sink, Source, introduce, run, swarm_of, until

from shoal.swarm.errors import TryLater, Unreachable
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.messages import PeerToPeerPing, PeerToPeerPong
from shoal.swarm.protocol.paths import make_pass
from shoal.swarm.protocol.types import MAX_RELAYS, Address, Blob
from shoal.swarm.transport.limits.origins import Origins
from shoal.swarm.transport.paths.relay_paths import Forwarder, RelayPaths
from shoal.swarm.transport.relay import server as relay_server
from shoal.swarm.transport.relay.books import RelayBooks, RelayLimits
from shoal.swarm.transport.relay.client import Registration, RelayCredentials, RelayedSocket, call
from shoal.swarm.transport.relay.server import HostPolicy, RelayServer
from shoal.swarm.transport.tcp import splice
from shoal.swarm.transport.tcp.sockets import listen
from shoal.swarm.transport.tcp.splice import Splice

RUN, HOST_KEY = b"r" * 32, b"h" * 32
STATE = Blob(kind="state", number=1)


class Relay:
    def __init__(self, server: RelayServer, port: int) -> None:
        self.server = server
        self.address = Address(kind="relayed", host=HOST, control_port=port, relay_key=server.identity.public_key)


@asynccontextmanager
async def relay_of(
    host: Identity,
    limits: RelayLimits | None = None,
    token: bytes = b"",
    *,
    known: bool = True,
    is_open: bool = False,
) -> AsyncIterator[Relay]:
    policy = HostPolicy([host.public_key] if known else [], token, is_open=is_open)
    server = RelayServer(Identity.generate(), policy, RelayBooks(limits or RelayLimits()))
    listener = listen(HOST, 0)
    serving = asyncio.create_task(server.serve(listener))
    try:
        yield Relay(server, listener.getsockname()[1])
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def credentials(host: Identity, member: Member, run_hash: bytes = RUN, valid_s: int = 600) -> RelayCredentials:
    certificate = member.identity.certify(member.keys)
    shown = make_pass(host.sign, host.public_key, run_hash, certificate, int(time.time()) + valid_s)
    return RelayCredentials(member.identity, member.keys, certificate, shown)


async def use(member: Member, relay: Relay, host: Identity, *, registered: bool = True) -> None:
    """Have a member use a relay, and be registered there."""
    mine = credentials(host, member)

    async def shown() -> RelayCredentials:
        return mine

    member.node.relays.credentials = shown
    member.node.relays.punches = False
    if registered:
        registration, _ = member.node.relays.register(relay.address, lambda: mine, lambda: None)
        await until(lambda: registration.is_registered)
        member.relays = (relay.address,)


@asynccontextmanager
async def walled(size: int = 2) -> AsyncIterator[tuple[Relay, Identity, list[Member]]]:
    """Members that nobody can dial, all registered with one relay."""
    host, members = Identity.generate(), [Member() for _ in range(size)]
    async with relay_of(host) as relay, swarm_of(*members):
        for member in members:
            member.reachable = False
            await use(member, relay, host)
        introduce(*members)
        yield relay, host, members


async def fetched(a: Member, b: Member, source: Source, blob: Blob = STATE) -> None:
    sink = Sink()
    async with (
        asyncio.timeout(LONG_S),
        aclosing(a.node.fetch(b.peer, blob, range(source.chunks), sink, LONG_S)) as stream,
    ):
        assert [chunk async for chunk in stream] == list(range(source.chunks))
    assert sink.holds(source, range(source.chunks))


@run
async def test_two_members_that_nobody_can_dial_exchange_data() -> None:
    async with walled() as (relay, _, (a, b)):
        source = Source(40, size=100_000)
        a.node.publish(STATE, source)
        b.node.publish(STATE, source)
        await asyncio.gather(fetched(a, b, source), fetched(b, a, source))
        assert [(one.peer, one.kind) for one in a.node.path_reports()] == [(b.peer, "relayed")]
        assert all(link.memory is None for link in a.node._data.all_links())
        assert relay.server.books.carried.sent_bytes > 2 * 40 * 100_000


@run
async def test_limits_by_network_see_the_address_behind_the_relay() -> None:
    async with walled() as (_, _, (a, b)):
        b.node.publish(STATE, Source(1))
        await fetched(a, b, Source(1))
        channel = b.node.control.incoming(a.keys.public)
        assert channel is not None
        assert channel.remote_host == HOST
        assert [link.remote_host for link in b.node._data.all_links()] == [HOST]


@run
async def test_a_relayed_link_becomes_a_direct_one_while_it_is_used() -> None:
    async with walled() as (relay, _, (a, b)):
        for member in (a, b):
            member.node.relays.punches = True
        source = Source(400, size=10_000, held_at=20)
        a.node.publish(STATE, source)
        sink, rest = Sink(), list[int]()
        async with asyncio.timeout(LONG_S), aclosing(b.node.fetch(a.peer, STATE, range(400), sink, LONG_S)) as stream:
            async for chunk in stream:
                rest.append(chunk)
                if chunk == 19:  # the stream goes on over the relay while the direct link is made
                    await until(lambda: [one.kind for one in b.node.path_reports()] == ["punched"])
                    source.go.set()
        assert rest == list(range(400))
        assert sink.holds(source, range(400))
        await until(lambda: {link.path for link in b.node._data.all_links()} == {"punched"})
        await until(lambda: {link.path for link in a.node._data.all_links()} == {"punched"})
        before = relay.server.books.carried.sent_bytes
        other = Blob(kind="state", number=2)
        a.node.publish(other, Source(40, size=100_000))
        await fetched(b, a, Source(40, size=100_000), other)
        assert relay.server.books.carried.sent_bytes - before < 100_000, "the data was direct"


@run
async def test_who_can_dial_nobody_is_met_over_its_relay_by_those_who_can_be_dialed() -> None:
    """As behind a firewall that lets out port 443 alone: the coordinator can dial the other one, and we cannot."""
    async with walled() as (_, _, (a, b)):
        b.reachable = True
        asked: list[str] = []

        async def request_dial(peer: str) -> None:
            asked.append(peer)
            b.node.dial_back(a.peer)

        a.node.request_dial = request_dial
        b.ports, port_of_b = (1, 1), b.ports
        introduce(a, b)
        b.ports = port_of_b
        b.node.publish(STATE, Source(3))
        await fetched(a, b, Source(3))
        assert [one.kind for one in a.node.path_reports()] == ["relayed"]
        assert set(asked) == {b.peer}
        asked.clear()
        other = Blob(kind="state", number=2)
        b.node.publish(other, Source(3))
        await fetched(a, b, Source(3), other)
        assert not asked, "the link that is there is used"


@run
async def test_a_member_that_does_not_dial_when_asked_is_dialed_again() -> None:
    async with swarm_of(Member(), Member()) as (a, b):
        asked: list[str] = []

        async def request_dial(peer: str) -> None:
            asked.append(peer)

        a.node.request_dial = request_dial
        b.ports, port_of_b = (1, 1), b.ports
        introduce(a, b)
        with pytest.raises(Unreachable):
            await a.node.ask(b.peer, PeerToPeerPing(), PeerToPeerPong, 0.2)
        b.ports = port_of_b
        introduce(a, b)
        a.node._undialed.note(b.keys.public, time.monotonic())
        b.node.publish(STATE, Source(3))
        await fetched(a, b, Source(3))
        assert asked == [b.peer]


@run
async def test_a_punched_path_that_breaks_is_replaced_by_the_relay_and_not_tried_for_at_once() -> None:
    async with walled() as (relay, _, (a, b)):
        for member in (a, b):
            member.node.relays.punches = True
        source = Source(60, size=50_000, held_at=20)
        a.node.publish(STATE, Source(1))
        await fetched(b, a, Source(1))
        await until(lambda: {link.path for link in b.node._data.all_links()} == {"punched"})
        before = relay.server.books.carried.sent_bytes
        long = Blob(kind="state", number=2)
        a.node.publish(long, source)
        fetching = asyncio.create_task(fetched(b, a, source, long))
        await until(lambda: 20 in source.asked)
        assert relay.server.books.carried.sent_bytes == before, "it goes over the direct path"
        for link in b.node._data.all_links():
            for connection in list(link.connections):
                connection.socket.shutdown(socket.SHUT_RDWR)
        source.go.set()
        await fetching
        assert relay.server.books.carried.sent_bytes - before > 39 * 50_000
        assert [one.kind for one in b.node.path_reports()] == ["relayed"]
        assert not b.node._punch_pauses.may_punch(a.peer, time.monotonic())


@run
async def test_another_relay_takes_over_from_one_that_is_gone() -> None:
    host, members = Identity.generate(), [Member(), Member()]
    async with relay_of(host) as second, swarm_of(*members) as (a, b):
        for member in members:
            member.reachable = False
        async with relay_of(host) as first:
            for member in members:
                await use(member, first, host)
                before = member.relays
                await use(member, second, host)
                member.relays = (*before, *member.relays)
            introduce(a, b)
            source = Source(60, size=50_000, held_at=30)
            a.node.publish(STATE, source)
            fetching = asyncio.create_task(fetched(b, a, source))
            await until(lambda: 29 in source.asked)
            assert first.server.books.carried.sent_bytes > 0
            assert second.server.books.carried.sent_bytes == 0
        source.go.set()
        await fetching
        assert second.server.books.carried.sent_bytes > 0


@run
async def test_members_of_other_runs_and_without_a_valid_pass_are_refused() -> None:
    async with walled() as (relay, host, (a, _)):
        stranger = Member()
        good = credentials(host, stranger)
        assert good.relay_pass is not None
        other_run = credentials(host, stranger, b"o" * 32)
        refused = {
            "expired": credentials(host, stranger, valid_s=-1000),
            "of another run": other_run,
            "of another host": credentials(Identity.generate(), stranger),
            "somebody else's": RelayCredentials(
                stranger.identity, stranger.keys, good.certificate, credentials(host, a).relay_pass
            ),
            "stolen": RelayCredentials(
                stranger.identity, a.keys, a.identity.certify(a.keys), credentials(host, a).relay_pass
            ),
            "made for another run": RelayCredentials(
                stranger.identity,
                stranger.keys,
                good.certificate,
                good.relay_pass.model_copy(update={"run_hash": b"o" * 32}),
            ),
            "none": None,
        }
        for why, shown in refused.items():
            with pytest.raises(Unreachable):
                await call(relay.address, a.keys.public, "data", shown)
            assert why
        relayed = await call(relay.address, a.keys.public, "data", good)
        relayed.socket.close()


@run
async def test_no_member_takes_the_registration_of_another_one_or_of_the_host() -> None:
    async with walled() as (relay, host, (a, b)):
        host_keys = host.coordinator_keys()
        mine = RelayCredentials(host, host_keys, host.certify(host_keys))
        registration, _ = b.node.relays.register(relay.address, lambda: mine, lambda: None)
        await until(lambda: registration.is_registered)
        kept = {key: dict(alike) for key, alike in relay.server._clients.items()}
        honest = credentials(host, b)
        for keys in (a.keys, host_keys):
            lie = RelayCredentials(b.identity, keys, b.identity.certify(keys), honest.relay_pass)
            trial, task = b.node.relays.register(relay.address, lambda lie=lie: lie, lambda: None)
            await until(lambda one=trial: one.is_registered or bool(one.trouble))
            assert not trial.is_registered
            task.cancel()
        assert relay.server._clients == kept


@run
async def test_newcomers_call_hosts_alone_and_for_the_control_plane() -> None:
    host, keys, taken = Identity.generate(), CurveKeys.fresh(), asyncio.Event()

    async def take(relayed: object) -> None:
        taken.set()

    async with relay_of(host, token=b"t" * 16, known=False) as relay:
        for token, is_admitted in ((b"", False), (b"u" * 16, False), (b"t" * 16, True)):
            mine = RelayCredentials(host, keys, host.certify(keys), None, token)
            registration = Registration(relay.address, lambda mine=mine: mine, take)
            registering = asyncio.create_task(registration.run())
            await until(lambda one=registration: one.is_registered or bool(one.trouble))
            assert registration.is_registered is is_admitted, registration.trouble
            if not is_admitted:
                with pytest.raises(Unreachable):
                    await call(relay.address, keys.public, "control", None)
                registering.cancel()
        relayed = await call(relay.address, keys.public, "control", None)
        relayed.socket.close()
        await taken.wait()
        with pytest.raises(Unreachable):
            await call(relay.address, keys.public, "data", None)
        registering.cancel()


@run
async def test_a_host_cannot_register_under_the_key_of_another_host() -> None:
    host, hostile, keys = Identity.generate(), Identity.generate(), CurveKeys.fresh()

    async def take(relayed: RelayedSocket) -> None:
        relayed.socket.close()

    async with relay_of(host, known=False, is_open=True) as relay:
        own_secret = CurveKeys(keys.public, CurveKeys.fresh().secret)
        for identity, shown, is_admitted in ((hostile, own_secret, False), (hostile, keys, True), (host, keys, True)):
            mine = RelayCredentials(identity, shown, identity.certify(shown))
            registration = Registration(relay.address, lambda mine=mine: mine, take)
            registering = asyncio.create_task(registration.run())
            await until(lambda one=registration: one.is_registered or bool(one.trouble))
            assert registration.is_registered is is_admitted
            assert is_admitted or "transport key" in registration.trouble
            registering.cancel()
            await asyncio.wait([registering])


@run
async def test_a_fault_of_the_relay_ends_one_connection_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with walled() as (relay, host, (a, b)):
        accept, faults = relay.server._may_call, [ZeroDivisionError("nobody has thought of this")] * 2

        def may_call(*args: object) -> bool:
            if faults:
                raise faults.pop()
            return accept(*args)

        relay.server._may_call = may_call  # type: ignore[method-assign]
        mine = credentials(host, a)
        for _ in range(2):
            with pytest.raises(Unreachable):
                await call(relay.address, b.keys.public, "data", mine)
        (await call(relay.address, b.keys.public, "data", mine)).socket.close()
        assert relay.server.books.carried.refused["faults"] == 2
        assert [one for one in caplog.records if one.exc_info] == caplog.records[-1:] != []


@run
async def test_what_a_members_relay_says_of_its_callers_is_not_believed() -> None:
    taken: list[str] = []
    relay = Address(kind="relayed", host="192.0.2.9", control_port=7709, relay_key=bytes(32))
    async with asyncio.TaskGroup() as tasks:
        paths = RelayPaths(tasks, Origins(), lambda one, host, path: taken.append(host))
        paths.punches = False
        with socket.socket() as one:
            for names_callers in (True, False):
                registration, running = paths.register(
                    relay, lambda: pytest.fail("not asked"), lambda: None, names_callers=names_callers
                )
                await registration._on_caller(
                    RelayedSocket(one, relay, "data", ("198.51.100.1", 5), ("10.0.0.1", 6), 0.1)
                )
                running.cancel()
    assert taken == ["198.51.100.1", "192.0.2.9"]


@run
async def test_members_show_their_pass_to_reach_the_coordinator_again() -> None:
    host, keys, member = Identity.generate(), CurveKeys.fresh(), Member()

    async def take(relayed: RelayedSocket) -> None:
        relayed.socket.close()

    async with relay_of(host) as relay, swarm_of(member):
        mine = RelayCredentials(host, keys, host.certify(keys))
        registration = Registration(relay.address, lambda: mine, take)
        registering = asyncio.create_task(registration.run())
        await until(lambda: registration.is_registered)
        callers = list[bytes]()
        count = relay.server.books.open_link

        def open_link(caller: bytes, host_key: bytes, *, is_guest: bool = False) -> None:
            callers.append(b"guest" if is_guest else caller)
            count(caller, host_key, is_guest=is_guest)

        relay.server.books.open_link = open_link  # type: ignore[method-assign]
        paths = member.node.relays
        good, bad = credentials(host, member), credentials(Identity.generate(), member)
        for held in (None, good, bad):
            paths.held_credentials = lambda held=held: held
            (await paths.call(keys.public, (relay.address,), "control", as_guest=True)).socket.close()
        assert callers == [b"guest", member.identity.public_key, b"guest"]
        registering.cancel()


@run
async def test_the_coordinator_is_found_behind_the_last_of_many_relays() -> None:
    """An invite names the relays of several coordinators; those of hosts that stand by know nobody."""
    host, keys, member = Identity.generate(), CurveKeys.fresh(), Member()

    async def take(relayed: RelayedSocket) -> None:
        relayed.socket.close()

    async with AsyncExitStack() as relays, swarm_of(member):
        named = [await relays.enter_async_context(relay_of(host)) for _ in range(MAX_RELAYS + 1)]
        addresses = tuple(one.address for one in named)
        mine = RelayCredentials(host, keys, host.certify(keys))
        registration = Registration(addresses[-1], lambda: mine, take)
        registering = asyncio.create_task(registration.run())
        await until(lambda: registration.is_registered)
        paths = member.node.relays
        with pytest.raises(Unreachable):
            await paths.call(keys.public, addresses, "control", as_guest=True)
        (await paths.call(keys.public, addresses, "control", as_guest=True)).socket.close()
        registering.cancel()


@run
async def test_a_relay_with_another_key_is_not_believed() -> None:
    async with walled() as (relay, host, (a, b)):
        wrong = relay.address.model_copy(update={"relay_key": bytes(32)})
        with pytest.raises(Unreachable, match="another key"):
            await call(wrong, b.keys.public, "data", credentials(host, a))


@run
async def test_a_call_that_is_not_answered_costs_no_registration() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_server, "REQUEST_S", 0.3)
        async with walled() as (relay, host, (a, b)):
            mine = credentials(host, b)
            registration, _ = b.node.relays.register(relay.address, lambda: mine, lambda: None)
            await until(lambda: registration.is_registered)
            client = relay.server._clients[b.keys.public][host.public_key]
            registration._accepting = 10_000  # as many as it takes are being made
            with pytest.raises(Unreachable, match="did not answer the relay"):
                await call(relay.address, b.keys.public, "data", credentials(host, a))
            assert relay.server._clients[b.keys.public][host.public_key] is client
            registration._accepting = 0
            patch.setattr(relay_server, "REQUEST_S", LONG_S)
            (await call(relay.address, b.keys.public, "data", credentials(host, a))).socket.close()


@run
async def test_a_connection_that_is_accepted_as_its_call_ends_is_closed() -> None:
    host, keys = Identity.generate(), CurveKeys.fresh()
    server = RelayServer(Identity.generate(), HostPolicy(), RelayBooks(RelayLimits()))
    ends, accepted = socket.socketpair(), socket.socketpair()
    for one in ends:
        one.setblocking(False)
    client = relay_server._Client(ends[0], HOST, keys.public, host.public_key, host.public_key, None)
    ask = relay_server.ClientToRelayConnect(target=keys.public, plane="control")
    calling = asyncio.create_task(server._call((HOST, 5000), client, bytes(32), ask))
    await until(lambda: bool(server._calls) and bool(ends[1].recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert server._accept(next(iter(server._calls)), accepted[0], (HOST, 5001))
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()
    assert accepted[0].fileno() == -1
    assert not server._calls
    for one in (*ends, accepted[1]):
        one.close()


def pairs() -> tuple[socket.socket, socket.socket, socket.socket, socket.socket]:
    """Two connections, each with the caller's end first."""
    both = *socket.socketpair(), *socket.socketpair()
    for one in both:
        one.setblocking(False)
    return both


@run
async def test_one_end_alone_does_not_keep_a_spliced_connection_open() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splice, "_HALF_OPEN_S", 0.05)
        caller, first, second, called = pairs()
        spliced = Splice(first, second)
        called.send(b"last")
        called.close()
        async with asyncio.timeout(LONG_S):
            await spliced.ended
        assert caller.recv(10) == b"last"
        assert first.fileno() == second.fileno() == -1
        caller.close()


@run
async def test_bytes_are_passed_on_where_no_pipe_can_be_opened() -> None:
    def pipe2(flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pipe2", pipe2)
        patch.setattr(splice, "_buffers", splice._Buffers())
        caller, first, second, called = pairs()
        spliced = Splice(first, second)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(LONG_S):
            await loop.sock_sendall(caller, b"x" * 1000)
            assert await loop.sock_recv(called, 1000) == b"x" * 1000
        spliced.close()
        caller.close()
        called.close()


@run
async def test_a_forwarder_without_a_descriptor_goes_on_later() -> None:
    dialed = asyncio.Event()

    async def dial() -> RelayedSocket:
        dialed.set()
        raise Unreachable("enough is known")

    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "too many open files")]

    async def sock_accept(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(listener)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "sock_accept", sock_accept)
        async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
            forwarder = Forwarder(dial, tasks)
            with socket.create_connection((HOST, forwarder.port)):
                await dialed.wait()
            forwarder.close()


@run
async def test_a_slow_path_of_a_forwarder_holds_up_no_other_connection() -> None:
    dials, all_of_them = 0, asyncio.Event()

    async def dial() -> RelayedSocket:
        nonlocal dials
        dials += 1
        if dials == 4:
            all_of_them.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(LONG_S), asyncio.TaskGroup() as tasks:
        forwarder = Forwarder(dial, tasks)
        callers = [socket.create_connection((HOST, forwarder.port)) for _ in range(5)]
        await all_of_them.wait()
        callers[4].setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(callers[4], 1) == b"", "as many as may be are being made"
        forwarder.close()
        for caller in callers:
            caller.close()


def test_who_sends_too_much_pauses() -> None:
    books = RelayBooks(RelayLimits(bytes_s=1000.0, member_bytes_s=100.0))
    assert books.pass_on(b"a", 50, 0.0, is_guest=False) == 0.0
    assert books.pass_on(b"a", 100, 0.0, is_guest=False) == pytest.approx(0.51)
    assert books.pass_on(b"b", 50, 0.0, is_guest=False) == 0.0, "it has a rate of its own"
    assert books.pass_on(b"a", 10, 2.0, is_guest=False) == 0.0
    assert books.carried.sent_bytes == 210


def test_connections_are_bounded_in_all_and_for_each_member() -> None:
    books = RelayBooks(RelayLimits(links=3, links_per_member=2))
    for _ in range(2):
        books.count_call(b"a", 0.0)
        books.open_link(b"a", HOST_KEY)
    with pytest.raises(TryLater, match="for you"):
        books.count_call(b"a", 0.0)
    books.count_call(b"b", 0.0)
    books.open_link(b"b", HOST_KEY)
    with pytest.raises(TryLater, match="as many connections"):
        books.count_call(b"c", 0.0)
    books.close_link(b"a", HOST_KEY)
    books.count_call(b"a", 0.0)


def test_newcomers_leave_links_to_members_and_to_other_networks() -> None:
    books = RelayBooks(RelayLimits(links=200))

    def fill(network: bytes) -> int:
        for count in range(1000):
            try:
                books.count_call(network, 1000.0 * count, is_guest=True)
            except TryLater:
                return count
            books.open_link(network, HOST_KEY, is_guest=True)
        raise AssertionError

    assert [fill(name) for name in (b"n1", b"n2", b"n3")] == [33, 22, 15]
    others = [fill(b"m%d" % number) for number in range(100)]
    assert sum(others) == 100 - 33 - 22 - 15, "newcomers have half of the links"
    books.count_call(b"a member", 0.0)
    books.close_link(b"n1", HOST_KEY, is_guest=True)
    books.count_call(b"n9", 0.0, is_guest=True)


def test_on_an_open_relay_no_host_has_all_links() -> None:
    books = RelayBooks(RelayLimits(links=90, links_per_member=90))
    for _ in range(30):
        books.check_share(b"first")
        books.open_link(b"a", b"first")
    with pytest.raises(TryLater, match="host"):
        books.check_share(b"first")
    books.check_share(b"second")


def test_a_relay_says_how_busy_it_is() -> None:
    books = RelayBooks(RelayLimits(bytes_s=1000.0, links=10))
    assert books.busy(0.0) == 0.0
    books.open_link(b"a", HOST_KEY)
    assert books.busy(0.0) == pytest.approx(0.1)
    for second in range(60):
        books.pass_on(b"a", 500, float(second), is_guest=False)
    assert books.busy(59.0) == pytest.approx(0.5, abs=0.05)
    assert books.busy(159.0) == pytest.approx(0.1)
