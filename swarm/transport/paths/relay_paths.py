"""Ways around walls: relayed connections for both planes, and the punching of direct ones out of them.

ZeroMQ takes no ready socket, so a local forwarder carries the control plane: libzmq connects to it on loopback, and
each connection is spliced with one over a relay. Data connections are handed to the data plane as they are. CURVE and
the frames' cipher work from end to end; a relay sees neither.
"""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
from collections.abc import Awaitable, Callable
from contextlib import suppress

from shoal.swarm.aio import task_scope
from shoal.swarm.errors import LinkError, Unreachable
from shoal.swarm.protocol.addresses import join_host_port, may_dial, plain_host, reach_of
from shoal.swarm.protocol.paths import Plane
from shoal.swarm.protocol.types import MAX_RELAYS, Address, PathKind
from shoal.swarm.transport.limits.origins import Origins
from shoal.swarm.transport.relay.client import Registration, RelayCredentials, RelayedSocket, call
from shoal.swarm.transport.tcp.sockets import connect, listen, share_port, tune_relayed
from shoal.swarm.transport.tcp.splice import Splice

log = logging.getLogger(__name__)

_HEAD_START_S = 1.0
"""Time between the first attempts over two relays."""

_PUNCHES, _PUNCH_S, _PUNCH_PAUSE_S = 4, 2.0, 0.15
"""Attempts to dial each other, the time for all of them, and between two. 98 of 100 that succeed do so at the first
(arXiv 2510.27500); here the later ones make up for a late start of the other side."""

_LEAST_PORT = 1024
_ACCEPT_PAUSE_S = 0.1
_MAX_DIALING = 4

TakeData = Callable[[sockets.socket, str, PathKind], None]
"""Takes over a data connection that another member has opened, with the address that it comes from."""


class Forwarder:
    """A listener on loopback: each connection to it becomes one over a relay, to the holder of one key.

    Several are made at once: libzmq gives a slow one up and connects again."""

    def __init__(self, dial: Callable[[], Awaitable[RelayedSocket]], tasks: asyncio.TaskGroup) -> None:
        self._dial = dial
        self._tasks = tasks
        self._splices: set[Splice] = set()
        self._dialing: set[asyncio.Task[None]] = set()
        self._listener = listen("127.0.0.1", 0)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._task = tasks.create_task(self._serve())
        self._task.add_done_callback(lambda _: self._listener.close())  # not before: the loop still waits for it

    def close(self) -> None:
        for task in (self._task, *self._dialing):
            task.cancel()
        for splice in list(self._splices):
            splice.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                local, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is left: that must not end the node
                log.warning("cannot accept a connection of this process: %s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._dialing) >= _MAX_DIALING:
                local.close()
                continue
            dialing = self._tasks.create_task(self._forward(local))
            self._dialing.add(dialing)
            dialing.add_done_callback(self._dialing.discard)

    async def _forward(self, local: sockets.socket) -> None:
        """Connect one local connection onwards; libzmq tries again when it is closed."""
        try:
            tune_relayed(local)
            relayed = await self._dial()
        except (LinkError, OSError) as error:
            log.debug("no path over a relay: %s", error)
            local.close()
            return
        except BaseException:
            local.close()
            raise
        splice = Splice(local, relayed.socket)
        self._splices.add(splice)
        splice.ended.add_done_callback(lambda _: self._splices.discard(splice))


class RelayPaths:
    """A node's connections over relays: calls to others, and its own registrations."""

    def __init__(self, tasks: asyncio.TaskGroup, origins: Origins, take_data: TakeData) -> None:
        self.credentials: Callable[[], Awaitable[RelayCredentials | None]] = _none
        """Returns what to show to relays; None while this process is no member of the run."""
        self.held_credentials: Callable[[], RelayCredentials | None] = lambda: None
        """Returns what of that is valid and here, without asking anybody."""
        self.listens_at = ("127.0.0.1", 0)
        """Where this machine itself reaches our control plane."""
        self.punches = True
        """Whether to try for a direct connection wherever one was made over a relay."""
        self._tasks = tasks
        self._origins = origins
        self._take_data = take_data
        self._forwarders: dict[bytes, tuple[Forwarder, list[Address]]] = {}
        self._splices: set[Splice] = set()
        self._failed: dict[Address, float] = {}

    def stop(self) -> None:
        for key in list(self._forwarders):
            self.forget(key)
        for splice in list(self._splices):
            splice.close()

    # Calling ------------------------------------------------------------------------------------------------

    def forwarder_to(self, key: bytes, relays: tuple[Address, ...], *, as_guest: bool = False) -> int:
        """The port of the local forwarder to the holder of ``key``, which is registered with these relays.

        ``as_guest``: with those credentials alone that are here. The coordinator is reached so, as they come from it;
        relays have more room for members than for newcomers."""
        known = self._forwarders.get(key)
        if known is not None:
            known[1][:] = relays
            return known[0].port
        ways = list(relays)
        forwarder = Forwarder(lambda: self.call(key, tuple(ways), "control", as_guest=as_guest), self._tasks)
        self._forwarders[key] = forwarder, ways
        return forwarder.port

    def forget(self, key: bytes) -> None:
        """Close the forwarder to the holder of ``key``, if there is one."""
        forwarder, _ = self._forwarders.pop(key, (None, None))
        if forwarder is not None:
            forwarder.close()

    async def call(
        self, key: bytes, relays: tuple[Address, ...], plane: Plane, *, as_guest: bool = False
    ) -> RelayedSocket:
        """Connect over the first relay that can; later ones are tried a second later each. Raises ``Unreachable``.

        Of many relays, as those of several coordinators, those that have not failed for longest are tried."""
        loop = asyncio.get_running_loop()
        ways = sorted(relays, key=lambda relay: self._failed.get(relay, 0.0))[:MAX_RELAYS]
        found: list[RelayedSocket] = []
        troubles: list[LinkError] = []
        failed = asyncio.Event()

        async def attempt(relay: Address) -> None:
            try:
                shown = self.held_credentials() if as_guest else await self.credentials()
                try:
                    found.append(await call(relay, key, plane, shown))
                except LinkError:
                    if not as_guest or shown is None:
                        raise
                    found.append(await call(relay, key, plane, None))  # the pass may be what is wrong
            except LinkError as error:
                self._failed[relay] = loop.time()
                troubles.append(error)
            failed.set()

        async with task_scope() as tasks:
            attempts = []
            for relay in ways:
                failed.clear()
                attempts.append(tasks.create_task(attempt(relay)))
                with suppress(TimeoutError):
                    async with asyncio.timeout(_HEAD_START_S):
                        await failed.wait()
                if found:
                    break
            while not found and not all(task.done() for task in attempts):
                failed.clear()
                await failed.wait()
            for task in attempts:
                task.cancel()
        for late in found[1:]:
            late.socket.close()
        if not found:
            raise troubles[0] if troubles else Unreachable("it is not registered with any relay")
        return found[0]

    # Being called -------------------------------------------------------------------------------------------

    def register(
        self,
        relay: Address,
        credentials: Callable[[], RelayCredentials],
        on_change: Callable[[], None],
        *,
        names_callers: bool = True,
    ) -> tuple[Registration, asyncio.Task[None]]:
        """Be reachable over a relay until the task is cancelled.

        ``names_callers``: whether limits by network go by what the relay says of its callers' addresses; otherwise all
        of them count as coming from the relay's own, which a member's might lie about."""

        async def take(caller: RelayedSocket) -> None:
            await self._take(caller, caller.other[0] if names_callers else relay.host)

        registration = Registration(relay, credentials, take, on_change)
        return registration, self._tasks.create_task(registration.run())

    async def _take(self, caller: RelayedSocket, host: str) -> None:
        """Hand a caller's connection to the plane that it is for. Raises ``LinkError``, ``OSError``."""
        if caller.plane == "data":
            if self.punches:
                self._tasks.create_task(self._punch_and_take(caller))
            self._take_data(caller.socket, host, "relayed")
            return
        local_host = self._origins.add(host)
        try:
            local = await self._connect_locally(local_host)
        except BaseException:
            self._origins.remove(local_host)
            raise
        splice = Splice(caller.socket, local)
        self._splices.add(splice)

        def ended(_: object) -> None:
            self._splices.discard(splice)
            self._origins.remove(local_host)

        splice.ended.add_done_callback(ended)

    async def _connect_locally(self, from_host: str) -> sockets.socket:
        host, port = self.listens_at
        try:
            local = await connect(host, port, from_host=from_host, what="a connection to this process")
        except LinkError:  # this system has only one loopback address, or listens on another one
            local = await connect(host, port, what="a connection to this process")
        tune_relayed(local)
        return local

    async def _punch_and_take(self, caller: RelayedSocket) -> None:
        socket = await punch(caller)
        if socket is not None:
            self._take_data(socket, caller.other[0], "punched")


async def _none() -> None:
    return None


async def punch(relayed: RelayedSocket) -> sockets.socket | None:
    """Dial the other end of a relayed connection directly, while it dials us: TCP's simultaneous open.

    Both dial from the port of their connections to the relay, whose public mappings the relay has seen, at the moment
    that the relay has named. Returns None where that does not work, as behind symmetric NATs."""
    host, port = relayed.other
    if port < _LEAST_PORT or not may_dial(host, reach_of(relayed.relay.host)):
        return None  # a relay must not make us dial into our own network
    await asyncio.sleep(relayed.dial_in_s)
    found: list[sockets.socket] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(_PUNCH_S), task_scope() as tasks:
            # Whichever of the two SYNs is first meets either a socket that is dialing, or one that listens.
            both = [
                tasks.create_task(_accept_from(host, relayed.local[1], found)),
                tasks.create_task(_dial_often(host, port, relayed.local[1], found)),
            ]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not found:
                await asyncio.wait(both)
            for task in both:
                task.cancel()
    for late in found[1:]:
        late.close()
    return found[0] if found else None


async def _dial_often(host: str, port: int, from_port: int, found: list[sockets.socket]) -> None:
    for _ in range(_PUNCHES):
        try:
            found.append(await connect(host, port, from_port=from_port))
        except LinkError as error:
            log.debug("could not punch through to %s: %s", join_host_port(host, port), error)
            await asyncio.sleep(_PUNCH_PAUSE_S)
        else:
            return


async def _accept_from(host: str, port: int, found: list[sockets.socket]) -> None:
    """Accept a connection of the other end, and of nobody else; not where the system does not let ports be shared."""
    loop = asyncio.get_running_loop()
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with suppress(OSError), sockets.socket(family, sockets.SOCK_STREAM) as listener:
        listener.setblocking(False)
        share_port(listener)
        listener.bind(("::" if family == sockets.AF_INET6 else "0.0.0.0", port))
        listener.listen(4)
        while True:
            socket, address = await loop.sock_accept(listener)
            if plain_host(address[0]) == host:
                found.append(socket)
                return
            socket.close()
