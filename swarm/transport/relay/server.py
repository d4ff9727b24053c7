"""The relay: registers clients, and splices connections between them. It keeps no state and no content.

A caller names the CURVE key that it wants to reach. The holder of that key is told over its registration, and dials
the relay with a ticket; then the bytes of both connections are passed on, sealed as they are.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import secrets
import socket as sockets
import time
import traceback
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.swarm.errors import LinkClosed, LinkError, NotAdmitted, ShoalError, TryLater, Unreachable, WireError
from shoal.swarm.protocol.addresses import network_of, plain_host
from shoal.swarm.protocol.identity import CurveKeys, Identity, verify_certificate, verify_signature
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
from shoal.swarm.protocol.paths import RelayPass, check_pass, introduction_bytes, proof_bytes
from shoal.swarm.protocol.types import Certificate, Message, RelayLoad
from shoal.swarm.transport.limits.caller_limits import StrangerPlaces
from shoal.swarm.transport.relay.books import MAX_CLIENTS, MAX_REGISTRATIONS_PER_HOST, RelayBooks
from shoal.swarm.transport.relay.framing import receive, send, send_error
from shoal.swarm.transport.tcp.sockets import shortest_round_trip_s, tune_relayed
from shoal.swarm.transport.tcp.splice import DATA_REST_S, Splice

log = logging.getLogger(__name__)

REQUEST_S = 10.0
"""Time for a new connection to say what it wants, and for a called client to dial back."""

SILENT_S = 45.0
"""A registered client that says nothing for so long is forgotten; it says something three times as often."""

_SEND_S = 5.0
_MAX_STRANGERS = 512
_MAX_TICKETS = 2048
MAX_TICKETS_PER_CLIENT = 256
"""Callers that may wait for one client at once: a full group may call an owner in the same moment."""

_REPORT_S, _SWEEP_S = 60.0, 5.0
_KNOWN_HOST_S = 3600.0
"""For so long after its last registration members of a host's runs are admitted: the host may be about to return."""

_MAX_HOSTS, _MAX_FAULTS = 256, 64
_DIAL_MARGIN_S = 0.05


@dataclass(eq=False)
class _Client:
    """A registered client. ``run_hash``: None for a host, which may have several runs."""

    socket: sockets.socket
    host: str
    curve_key: bytes
    identity_key: bytes
    host_key: bytes
    run_hash: bytes | None
    sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def tell(self, message: Message) -> None:
        """Send a message. Raises ``LinkError`` if the client does not read."""
        try:
            async with asyncio.timeout(_SEND_S), self.sending:
                await send(self.socket, message)
        except TimeoutError as error:
            raise Unreachable("the client does not read what the relay tells it") from error


@dataclass(eq=False)
class _Call:
    """A caller that waits for the called client."""

    target: bytes
    accepted: asyncio.Future[tuple[sockets.socket, tuple[str, int]]]


class HostPolicy:
    """Decides whose runs a relay serves: of known hosts, of those that show the operator's token, or of all."""

    def __init__(self, known: Collection[bytes] = (), token: bytes = b"", *, is_open: bool = False) -> None:
        """``token``: empty if hosts cannot register."""
        self.token = token
        self.is_open = is_open
        self._known = frozenset(known)
        self._registered_s: dict[bytes, float] = {}

    def check_registration(self, host_key: bytes, shown: bytes, said: bytes, now_s: float) -> None:
        """Check whether a host may register that has shown this token for what it ``said``. Raises ``NotAdmitted``."""
        is_shown = bool(self.token) and hmac.compare_digest(shown, token_proof(self.token, said))
        if not (is_shown or self.is_open or host_key in self._known):
            raise NotAdmitted("this relay does not serve this host: ask its operator for the address with the token")
        self.note(host_key, now_s)

    def note(self, host_key: bytes, now_s: float) -> None:
        """Note that a host is registered."""
        self._registered_s.pop(host_key, None)
        self._registered_s[host_key] = now_s
        if len(self._registered_s) > _MAX_HOSTS:
            del self._registered_s[next(iter(self._registered_s))]

    def serves(self, host_key: bytes, now_s: float) -> bool:
        """Whether members of this host's runs are admitted."""
        if self.is_open or host_key in self._known:
            return True
        return now_s - self._registered_s.get(host_key, -_KNOWN_HOST_S) < _KNOWN_HOST_S


def token_proof(token: bytes, said: bytes) -> bytes:
    """What shows that a host knows the operator's token, without telling it."""
    return hmac.digest(token, said, "sha256")


class RelayServer:
    """One relay on one port. Make it, and call ``serve`` in a task."""

    def __init__(self, identity: Identity, policy: HostPolicy, books: RelayBooks) -> None:
        self.identity = identity
        self.policy = policy
        self.books = books
        self._clients: dict[bytes, dict[bytes, _Client]] = {}
        """By CURVE key and host: one process may host several runs, each with a key of its own for signatures."""
        self._clients_of_host: Counter[bytes] = Counter()
        self._calls: dict[bytes, _Call] = {}
        self._splices: set[Splice] = set()
        self._challenge = CurveKeys.fresh()
        self._faults = set[str]()
        """Kinds of errors of our own that were logged."""
        self._strangers = StrangerPlaces[sockets.socket](_MAX_STRANGERS, random.Random(), lambda one: 0)

    async def serve(self, listener: sockets.socket) -> None:
        """Accept connections until cancelled; then close all of them."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sweep())
                tasks.create_task(self._report())
                while True:
                    try:
                        socket, address = await loop.sock_accept(listener)
                    except OSError as error:  # no descriptor is left
                        log.warning("cannot accept a connection: %s", error)
                        await asyncio.sleep(0.1)
                        continue
                    victim = self._strangers.add(socket, network_of(plain_host(address[0])))
                    if victim is not None:
                        self._refuse("too many connections")
                        _end(victim)
                    tasks.create_task(self._handle(socket, (plain_host(address[0]), address[1])))
        finally:
            listener.close()
            for splice in list(self._splices):
                splice.close()

    def describe(self) -> str:
        """Say in a line what is carried now, and what was in all."""
        carried = self.books.carried
        refused = ", ".join(f"{count} {reason}" for reason, count in sorted(carried.refused.items()))
        return (
            f"{self._clients_of_host.total()} clients, {len(self._splices)} connections of "
            f"{len(self.books.open_links)} members; "
            f"carried {carried.sent_bytes / 1e6:,.1f} MB over {carried.links} connections"
            + (f"; refused: {refused}" if refused else "")
        )

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            log.info("%s", self.describe())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = asyncio.get_running_loop().time()
            for splice in list(self._splices):
                if now_s - splice.last_s > self.books.limits.idle_s:
                    splice.close()

    def _refuse(self, reason: str) -> None:
        self.books.carried.refused[reason] += 1

    # One connection -----------------------------------------------------------------------------------------

    async def _handle(self, socket: sockets.socket, address: tuple[str, int]) -> None:
        """Serve one connection until it is spliced, registered and gone, or refused."""
        is_kept = False
        try:
            tune_relayed(socket)
            nonce = secrets.token_bytes(32)
            async with asyncio.timeout(REQUEST_S):
                await send(socket, self._hello(nonce, address))
                request = await receive(socket, Message)
            self._strangers.remove(socket)
            match request:
                case ClientToRelayAccept(ticket=ticket):
                    is_kept = self._accept(ticket, socket, address)
                case ClientToRelayRegister():
                    self.books.count_request(network_of(address[0]), time.monotonic())
                    await self._register(socket, address[0], request, nonce)
                case ClientToRelayConnect():
                    self.books.count_request(network_of(address[0]), time.monotonic())
                    await self._connect(socket, address, request, nonce)
                case _:
                    raise WireError(f"{type(request).__name__} is not for a relay")
        except TimeoutError:
            self._refuse("silent")
        except (LinkClosed, OSError) as error:
            log.debug("a connection from %s ended: %s", address[0], error)
        except ShoalError as error:
            self._refuse(type(error).__name__)
            log.debug("refused %s: %s", address[0], error)
            with suppress(LinkError, TimeoutError, OSError):
                async with asyncio.timeout(_SEND_S):
                    await send_error(socket, error)
        except Exception as error:  # a fault of ours: it ends this connection, and no others
            self._refuse("faults")
            kind = f"{type(error).__name__} at {_line_of(error)}"
            if kind not in self._faults and len(self._faults) < _MAX_FAULTS:
                self._faults.add(kind)
                log.exception("a connection from %s was ended by a fault of this relay, said once", address[0])
        finally:
            self._strangers.remove(socket)
            if not is_kept:
                socket.close()

    def _hello(self, nonce: bytes, address: tuple[str, int]) -> RelayToClientHello:
        return RelayToClientHello(
            relay_key=self.identity.public_key,
            nonce=nonce,
            challenge=self._challenge.public,
            load=self.load(),
            observed_host=address[0],
            observed_port=address[1],
        )

    def load(self) -> RelayLoad:
        """What this relay carries."""
        books = self.books
        return RelayLoad(
            busy=max(books.busy(time.monotonic()), self._clients_of_host.total() / MAX_CLIENTS),
            clients=self._clients_of_host.total(),
            links=books.open_links.total(),
            carried_bytes=books.carried.sent_bytes,
        )

    def _accept(self, ticket: bytes, socket: sockets.socket, address: tuple[str, int]) -> bool:
        call = self._calls.pop(ticket, None)
        if call is None or call.accepted.done():
            raise NotAdmitted("the ticket is not valid (any more)")
        call.accepted.set_result((socket, address))
        return True

    # Registration -------------------------------------------------------------------------------------------

    async def _register(self, socket: sockets.socket, host: str, ask: ClientToRelayRegister, nonce: bytes) -> None:
        certificate, shown = ask.certificate, ask.relay_pass
        said = proof_bytes(self.identity.public_key, nonce, "register", certificate.curve_key)
        if not hmac.compare_digest(self._challenge.prove(certificate.curve_key, said), ask.key_proof):
            raise NotAdmitted("the client has not proved that it holds its transport key", "no proof")
        if shown is None:
            verify_certificate(certificate)
            self._check_proof(certificate, ask.proof, said)
            self.policy.check_registration(certificate.identity_key, ask.token, said, time.monotonic())
        else:
            self._check_member(certificate, shown, ask.proof, said)
        host_key = certificate.identity_key if shown is None else shown.host_key
        if (
            self._clients_of_host.total() >= MAX_CLIENTS
            or self._clients_of_host[host_key] >= MAX_REGISTRATIONS_PER_HOST
        ):
            raise TryLater("this relay has as many clients as it may: try again in a minute")
        run_hash = None if shown is None else shown.run_hash
        client = _Client(socket, host, certificate.curve_key, certificate.identity_key, host_key, run_hash)
        alike = self._clients.setdefault(client.curve_key, {})
        if host_key in alike:
            _end(alike[host_key].socket)
        alike[host_key] = client
        self._clients_of_host[host_key] += 1
        try:
            await client.tell(RelayToClientRegistered())
            while True:
                async with asyncio.timeout(SILENT_S):
                    await receive(socket, PeerToPeerPing)
                if shown is None:
                    self.policy.note(host_key, time.monotonic())
                await client.tell(PeerToPeerPong())
        finally:
            if alike.get(host_key) is client:
                del alike[host_key]
            if not alike and self._clients.get(client.curve_key) is alike:
                del self._clients[client.curve_key]
            self._clients_of_host[host_key] -= 1
            if not self._clients_of_host[host_key]:
                del self._clients_of_host[host_key]

    def _check_proof(self, certificate: Certificate, proof: bytes | None, said: bytes) -> None:
        if proof is None or not verify_signature(certificate.identity_key, proof, said):
            raise NotAdmitted("the client has not proved that it holds its key", "no proof")

    def _check_member(self, certificate: Certificate, shown: RelayPass, proof: bytes | None, said: bytes) -> None:
        """Check that a client is a member of a run that this relay serves. Raises ``NotAdmitted``."""
        if not self.policy.serves(shown.host_key, time.monotonic()):
            raise NotAdmitted("this relay does not serve this run", "unknown run")
        check_pass(shown, certificate, time.time())
        self._check_proof(certificate, proof, said)

    # Calls --------------------------------------------------------------------------------------------------

    async def _connect(
        self, socket: sockets.socket, address: tuple[str, int], ask: ClientToRelayConnect, nonce: bytes
    ) -> None:
        caller, caller_key = self._caller(ask, nonce, address[0])
        is_guest = ask.relay_pass is None
        self.books.count_call(caller, time.monotonic(), is_guest=is_guest)
        alike = self._clients.get(ask.target, {}).values()
        target = next((client for client in alike if self._may_call(ask, client)), None)
        if target is None:
            raise Unreachable("nobody is registered here under this key")
        if self.policy.is_open:
            self.books.check_share(target.host_key)
        self.books.open_link(caller, target.host_key, is_guest=is_guest)
        try:
            await self._splice(socket, address, target, (caller, caller_key), ask, is_guest=is_guest)
        finally:
            self.books.close_link(caller, target.host_key, is_guest=is_guest)

    def _caller(self, ask: ClientToRelayConnect, nonce: bytes, host: str) -> tuple[bytes, bytes]:
        """Whose limits apply, and the caller's CURVE key, zeros for a newcomer. Raises ``NotAdmitted``."""
        if ask.relay_pass is None or ask.certificate is None:
            if ask.plane != "control":
                raise NotAdmitted("only members of a run may send data over this relay", "no pass")
            return network_of(host).encode(), bytes(32)
        said = proof_bytes(self.identity.public_key, nonce, "connect", ask.target)
        self._check_member(ask.certificate, ask.relay_pass, ask.proof, said)
        return ask.certificate.identity_key, ask.certificate.curve_key

    @staticmethod
    def _may_call(ask: ClientToRelayConnect, target: _Client) -> bool:
        """Whether a caller may know that this client is here: a member of its run, or a host that admits newcomers."""
        if ask.relay_pass is None:
            return target.run_hash is None
        is_of_run = target.run_hash is None or target.run_hash == ask.relay_pass.run_hash
        return is_of_run and target.host_key == ask.relay_pass.host_key

    async def _splice(
        self,
        socket: sockets.socket,
        address: tuple[str, int],
        target: _Client,
        caller: tuple[bytes, bytes],
        ask: ClientToRelayConnect,
        *,
        is_guest: bool,
    ) -> None:
        other, other_address = await self._call(address, target, caller[1], ask)
        try:
            await self._announce((socket, address), (other, other_address))
        except BaseException:
            other.close()
            raise
        senders = caller[0], target.identity_key
        splice = Splice(
            socket,
            other,
            lambda direction, size: self.books.pass_on(
                senders[direction], size, time.monotonic(), is_guest=is_guest and direction == 0
            ),
            *((DATA_REST_S,) if ask.plane == "data" else ()),
        )
        self._splices.add(splice)
        try:
            await asyncio.wait([splice.ended])
        finally:
            splice.close()
            self._splices.discard(splice)

    async def _call(
        self, address: tuple[str, int], target: _Client, caller_key: bytes, ask: ClientToRelayConnect
    ) -> tuple[sockets.socket, tuple[str, int]]:
        """Have the called client dial back. Raises ``Unreachable``, ``TryLater``."""
        waiting = sum(call.target == target.curve_key for call in self._calls.values())
        if len(self._calls) >= _MAX_TICKETS or waiting >= MAX_TICKETS_PER_CLIENT:
            raise TryLater("too many connections are being made: try again")
        ticket = secrets.token_bytes(16)
        call = _Call(target.curve_key, asyncio.get_running_loop().create_future())
        self._calls[ticket] = call
        signature = self.identity.sign(introduction_bytes(target.curve_key, ticket, *address))
        introduction = RelayToClientCaller(
            ticket=ticket,
            plane=ask.plane,
            caller_key=caller_key,
            host=address[0],
            port=address[1],
            signature=signature,
        )
        try:
            await target.tell(introduction)
            # Unlike ``timeout``, this loses no connection that is accepted in the same moment.
            await asyncio.wait([call.accepted], timeout=REQUEST_S)
        except LinkError:
            _end(target.socket)
            raise
        except BaseException:
            if call.accepted.done():
                call.accepted.result()[0].close()
            raise
        finally:
            self._calls.pop(ticket, None)
        if not call.accepted.done():  # it stays registered: callers may make more calls than a client can answer
            raise Unreachable("the client did not answer the relay")
        return call.accepted.result()

    async def _announce(
        self, first: tuple[sockets.socket, tuple[str, int]], second: tuple[sockets.socket, tuple[str, int]]
    ) -> None:
        """Tell both ends that they are connected, from where the other one comes, and when both may dial each other."""
        trips_s = [shortest_round_trip_s(socket) for socket, _ in (first, second)]
        for (socket, _), (_, other), trip_s in zip((first, second), (second, first), trips_s, strict=True):
            dial_in_s = min(10.0, (max(trips_s) - trip_s) / 2 + _DIAL_MARGIN_S)
            async with asyncio.timeout(_SEND_S):
                await send(socket, RelayToClientConnected(host=other[0], port=other[1], dial_in_s=dial_in_s))


def _end(socket: sockets.socket) -> None:
    """Shut a connection down; the task that reads it then closes it."""
    with suppress(OSError):
        socket.shutdown(sockets.SHUT_RDWR)


def _line_of(error: BaseException) -> str:
    """Where an error was raised, as a file and a line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
