"""A member's or host's side of a relay: being registered there, and calling others that are."""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from shoal.swarm.errors import LinkClosed, LinkError, NotAdmitted, ShoalError, Unreachable, WireError
from shoal.swarm.protocol.addresses import join_host_port
from shoal.swarm.protocol.identity import CurveKeys, Identity, verify_signature
from shoal.swarm.protocol.messages import (
    ClientToRelayAccept,
    ClientToRelayConnect,
    ClientToRelayRegister,
    PeerToPeerPing,
    PeerToPeerPong,
    RelayToClientCaller,
    RelayToClientConnected,
    RelayToClientHello,
    RelayToClientRegistered,
)
from shoal.swarm.protocol.paths import Plane, RelayPass, introduction_bytes, proof_bytes
from shoal.swarm.protocol.types import Address, Certificate, Message
from shoal.swarm.transport.relay.choice import RelayMeasure
from shoal.swarm.transport.relay.framing import receive, send
from shoal.swarm.transport.relay.server import MAX_TICKETS_PER_CLIENT, REQUEST_S, SILENT_S, token_proof
from shoal.swarm.transport.tcp.sockets import connect, shortest_round_trip_s, tune_relayed

log = logging.getLogger(__name__)

CALL_S = 8.0
"""Time for a call over one relay, from dialing the relay until the other end has answered."""

_PING_S = SILENT_S / 3
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.5, 15.0


@dataclass(frozen=True)
class RelayCredentials:
    """What a client shows to relays. ``keys``: those of its control plane, which the certificate names; ``relay_pass``:
    None for a run's host; ``token``: the operator's, for a host."""

    identity: Identity
    keys: CurveKeys
    certificate: Certificate
    relay_pass: RelayPass | None = None
    token: bytes = b""


@dataclass(frozen=True)
class RelayedSocket:
    """A connection over ``relay``.

    ``other``: from where the other end has connected to the relay; ``local``: from where this end has; ``dial_in_s``:
    when both may dial each other there."""

    socket: sockets.socket
    relay: Address
    plane: Plane
    other: tuple[str, int]
    local: tuple[str, int]
    dial_in_s: float


async def _dial(relay: Address, from_port: int = 0) -> tuple[sockets.socket, RelayToClientHello]:
    """Connect to a relay and check its key if that is known. Raises ``LinkError``; sets no deadline."""
    name = f"a connection to the relay {relay}"
    socket = await connect(relay.host, relay.control_port, from_port=from_port, what=name)
    try:
        tune_relayed(socket)
        hello = await receive(socket, RelayToClientHello)
        if relay.relay_key not in (None, hello.relay_key):
            raise NotAdmitted(f"the relay at {relay} has another key than the run's host says")
    except BaseException:
        socket.close()
        raise
    return socket, hello


async def observe(relay: Address, from_port: int) -> tuple[sockets.socket, tuple[str, int]]:
    """Connect to a relay from a local port; return the connection, and from where the relay sees it come.

    Raises ``LinkError``."""
    try:
        async with asyncio.timeout(CALL_S):
            socket, hello = await _dial(relay, from_port)
    except (TimeoutError, OSError) as error:
        raise Unreachable(f"the relay {relay} does not answer") from error
    return socket, (hello.observed_host, hello.observed_port)


async def measure(relay: Address) -> RelayMeasure | None:
    """Measure the round trip to a relay, which says what it carries; None if it does not answer."""
    try:
        async with asyncio.timeout(CALL_S):
            socket, hello = await _dial(relay)
    except (ShoalError, TimeoutError, OSError) as error:
        log.debug("the relay %s does not answer: %s", relay, error)
        return None
    with socket:
        return RelayMeasure(shortest_round_trip_s(socket), hello.load)


def _connected(socket: sockets.socket, relay: Address, plane: Plane, told: RelayToClientConnected) -> RelayedSocket:
    host, port = socket.getsockname()[:2]
    return RelayedSocket(socket, relay, plane, (told.host, told.port), (host, port), told.dial_in_s)


async def call(
    relay: Address, target: bytes, plane: Plane, credentials: RelayCredentials | None, limit_s: float = CALL_S
) -> RelayedSocket:
    """Connect over a relay to the client that is registered there under the CURVE key ``target``.

    Without ``credentials`` only to a host. Raises ``Unreachable``, whatever it was that failed."""
    try:
        async with asyncio.timeout(limit_s):
            socket, hello = await _dial(relay)
            try:
                ask = ClientToRelayConnect(target=target, plane=plane)
                if credentials is not None and credentials.relay_pass is not None:
                    said = proof_bytes(hello.relay_key, hello.nonce, "connect", target)
                    ask = ask.model_copy(
                        update={
                            "certificate": credentials.certificate,
                            "relay_pass": credentials.relay_pass,
                            "proof": credentials.identity.sign(said),
                        }
                    )
                await send(socket, ask)
                return _connected(socket, relay, plane, await receive(socket, RelayToClientConnected))
            except BaseException:
                socket.close()
                raise
    except TimeoutError as error:
        raise Unreachable(f"the relay {relay} did not answer within {limit_s:.0f} s") from error
    except (ShoalError, OSError) as error:
        raise Unreachable(f"the relay {relay} does not connect: {error}") from error


class Registration:
    """A registration with one relay, kept up for as long as ``run`` is awaited."""

    def __init__(
        self,
        relay: Address,
        credentials: Callable[[], RelayCredentials],
        on_caller: Callable[[RelayedSocket], Coroutine[Any, Any, None]],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_caller``: takes over a connection that somebody has opened over the relay, and closes it at the end;
        ``on_change``: called when the registration was made or lost."""
        self.relay = relay
        self.relay_key = relay.relay_key
        """The relay's key, once it is known."""
        self.is_registered = False
        self.trouble = ""
        """Why it is not registered, after a try."""
        self._credentials, self._on_caller, self._on_change = credentials, on_caller, on_change
        self._accepting = 0

    async def run(self) -> None:
        """Register, again and again when the connection is lost, until cancelled."""
        wait_s = _FIRST_RETRY_S
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    await self._stay_registered(tasks)
            except* (ShoalError, OSError, TimeoutError) as group:
                self.trouble = str(group.exceptions[0]) or "the relay does not answer"
                log.log(
                    logging.INFO if self.is_registered else logging.DEBUG,
                    "not registered with the relay %s: %s",
                    self.relay,
                    self.trouble,
                )
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a task group drops that where one of its tasks has failed
                raise asyncio.CancelledError
            if self.is_registered:
                wait_s, self.is_registered = _FIRST_RETRY_S, False
            self._on_change()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_RETRY_S)

    async def _stay_registered(self, tasks: asyncio.TaskGroup) -> None:
        async with asyncio.timeout(CALL_S):
            socket, hello = await _dial(self.relay)
        try:
            mine = self._credentials()
            said = proof_bytes(hello.relay_key, hello.nonce, "register", mine.certificate.curve_key)
            ask = ClientToRelayRegister(
                certificate=mine.certificate,
                relay_pass=mine.relay_pass,
                proof=mine.identity.sign(said),
                key_proof=mine.keys.prove(hello.challenge, said),
                token=token_proof(mine.token, said) if mine.token else b"",
            )
            async with asyncio.timeout(CALL_S):
                await send(socket, ask)
                await receive(socket, RelayToClientRegistered)
            self.relay_key, self.is_registered, self.trouble = hello.relay_key, True, ""
            log.info("registered with the relay %s", self.relay)
            self._on_change()
            pinging = tasks.create_task(self._ping(socket))
            try:
                await self._serve(socket, mine.certificate.curve_key, hello.relay_key, tasks)
            finally:
                pinging.cancel()
        finally:
            socket.close()

    async def _ping(self, socket: sockets.socket) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            await send(socket, PeerToPeerPing())

    async def _serve(self, socket: sockets.socket, me: bytes, relay_key: bytes, tasks: asyncio.TaskGroup) -> None:
        while True:
            async with asyncio.timeout(SILENT_S):
                message = await receive(socket, Message)
            match message:
                case PeerToPeerPong():
                    pass
                case RelayToClientCaller() as caller:
                    said = introduction_bytes(me, caller.ticket, caller.host, caller.port)
                    if not verify_signature(relay_key, caller.signature, said):
                        raise WireError("the relay has not signed for a caller")
                    if self._accepting < MAX_TICKETS_PER_CLIENT:
                        self._accepting += 1
                        tasks.create_task(self._accept(caller))
                case other:
                    raise WireError(f"{type(other).__name__} was not expected from a relay")

    async def _accept(self, caller: RelayToClientCaller) -> None:
        """Dial back to the relay with a caller's ticket, and hand the connection on."""
        try:
            async with asyncio.timeout(REQUEST_S):
                socket, _ = await _dial(self.relay)
                try:
                    await send(socket, ClientToRelayAccept(ticket=caller.ticket))
                    connected = _connected(
                        socket, self.relay, caller.plane, await receive(socket, RelayToClientConnected)
                    )
                    if connected.other != (caller.host, caller.port):
                        raise WireError("the relay names another caller than it has signed for")
                except BaseException:
                    socket.close()
                    raise
        except (LinkError, OSError, TimeoutError) as error:
            log.debug("a caller at the relay %s was lost: %s", join_host_port(caller.host, caller.port), error)
            return
        finally:
            self._accepting -= 1
        try:
            await self._on_caller(connected)
        except (LinkError, LinkClosed, OSError) as error:
            log.debug("a connection over a relay could not be taken: %s", error)
            connected.socket.close()
