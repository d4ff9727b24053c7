"""``shoal relay``: passes on sealed bytes of members that cannot reach each other, until it is stopped.

``RelayBeside`` is the one that a host runs beside itself, as a process of its own: what it carries must not delay the
coordinator."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from shoal.swarm.aio import task_scope
from shoal.swarm.errors import Unreachable, UserError
from shoal.swarm.protocol.identity import Identity, key_text
from shoal.swarm.protocol.paths import SignedRelay, sign_relay
from shoal.swarm.protocol.relay_url import TOKEN_BYTES, RelayUrl
from shoal.swarm.protocol.types import Address
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.relay.books import RelayBooks, RelayLimits
from shoal.swarm.transport.relay.client import RelayCredentials
from shoal.swarm.transport.relay.server import HostPolicy, RelayServer
from shoal.swarm.transport.tcp.sockets import listen

log = logging.getLogger(__name__)

RELAY_IDENTITY_FILE = "relay-identity"

_TOKEN_CONTEXT = b"shoal relay token, version 1"
_START_S, _END_S = 60.0, 5.0
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class RelayOptions:
    """``identity``: file of the relay's key pair, made if missing; ``advertise``: host that its URL names, by default
    the bound one; ``hosts``: keys of hosts whose runs are served without the token; ``is_open``: serve every host."""

    identity: Path
    bind: tuple[str, int]
    advertise: str = ""
    hosts: tuple[bytes, ...] = ()
    is_open: bool = False
    limits: RelayLimits = field(default_factory=RelayLimits)


def parse_rate(text: str, option: str) -> float:
    """Bytes a second of ``20Mbit``, ``1Gbit`` and the like; 0 for an empty text. Raises ``UserError``."""
    number, unit = text.strip().lower().removesuffix("/s"), ""
    if not number:
        return 0.0
    if number.endswith("bit"):
        number = number.removesuffix("bit")
        number, unit = (number[:-1], number[-1]) if number[-1:] in _RATES and number[-1:] else (number, "")
        with suppress(ValueError):
            rate = float(number) * _RATES[unit] / 8
            if rate > 0:
                return rate
    raise UserError(f"{option} {text}: expected a rate such as 20Mbit or 1Gbit")


async def relay(options: RelayOptions, on_start: Callable[[RelayUrl], None], *, beside: bool = False) -> None:
    """Serve until SIGINT or SIGTERM or, ``beside`` a host, until the standard input ends with it.

    Raises ``IdentityError`` and ``Unreachable``."""
    identity = Identity.load_or_create(options.identity)
    # The same token as long as the identity is the same, so that the URL stays valid without another file.
    token = hmac.digest(identity.sign(_TOKEN_CONTEXT), _TOKEN_CONTEXT, "sha256")[:TOKEN_BYTES]
    no_token = options.is_open or beside
    policy = HostPolicy(options.hosts, b"" if no_token else token, is_open=options.is_open)
    server = RelayServer(identity, policy, RelayBooks(options.limits))
    listener = listen(*options.bind)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if beside:
        loop.add_reader(sys.stdin, stop.set)
    host = options.advertise or options.bind[0]
    on_start(RelayUrl(host, listener.getsockname()[1], identity.public_key, b"" if no_token else token))
    async with task_scope() as tasks:
        serving = tasks.create_task(server.serve(listener))
        await stop.wait()
        serving.cancel()
    log.info("the relay ends: %s", server.describe())


class RelayBeside:
    """The relay that a host runs beside itself, started when the first member asks for the run's relays."""

    def __init__(self, identity: Path, bind: tuple[str, int], host_key: bytes) -> None:
        """``bind``: where to listen; any other port is taken if that one is in use."""
        self._identity, self._bind, self._host_key = identity, bind, host_key
        self._process: asyncio.subprocess.Process | None = None
        self._url: RelayUrl | None = None
        self._starting: asyncio.Task[None] | None = None

    def url(self) -> RelayUrl | None:
        """Return where it listens; None while it is being started, as it is now if it does not run."""
        if self._process is not None and self._process.returncode is None:
            return self._url
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start_anywhere())
        return None

    async def _start_anywhere(self) -> None:
        self._url = await self._start(self._bind[1]) or (await self._start(0) if self._bind[1] else None)
        if self._url is None:
            log.warning("the relay beside this host could not be started: members behind walls cannot meet")

    async def _start(self, port: int) -> RelayUrl | None:
        host = self._bind[0]
        command = [sys.executable, "-m", "shoal.peer", "relay", "--beside", "--bind", f"{host}:{port}"]
        command += ["--identity", str(self._identity), "--host", key_text(self._host_key)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        url = None
        try:
            async with asyncio.timeout(_START_S):
                line = (await process.stdout.readline()).decode(errors="replace").strip()
            url = RelayUrl.parse(line)
        except (TimeoutError, ValueError) as error:
            log.debug("the relay beside this host did not start: %s", error)
        finally:
            if url is None and process.returncode is None:
                process.kill()
        self._process = process
        return url

    async def stop(self) -> None:
        """End the process, if there is one."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _same(credentials: RelayCredentials) -> RelayCredentials:
    return credentials


class HostRelays:
    """The relays of one hosted run, each signed by the host: the one beside it, or those that it is reached through."""

    def __init__(self, identity: Identity, run_hash: bytes, node: Node) -> None:
        self._identity, self._run_hash, self._node = identity, run_hash, node
        self._signed: dict[Address, SignedRelay] = {}
        self._via: tuple[Address, ...] = ()
        self._beside: tuple[RelayBeside, str] | None = None
        self._registering: list[asyncio.Task[None]] = []

    def run_beside(self, relay: RelayBeside, advertised: str) -> None:
        """Name this relay to members, at the host ``advertised``."""
        self._beside = relay, advertised

    async def register(self, urls: tuple[RelayUrl, ...], wait_s: float) -> None:
        """Have the coordinator reached over these relays. Raises ``Unreachable`` if none has answered in time."""
        changed = asyncio.Event()
        certificate = self._identity.certify(self._node.control.keys)
        registrations = []
        for url in urls:
            mine = RelayCredentials(self._identity, self._node.control.keys, certificate, None, url.token)
            registration, task = self._node.relays.register(url.address, partial(_same, mine), changed.set)
            registrations.append(registration)
            self._registering.append(task)
        self._via = tuple(url.address for url in urls)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not any(one.is_registered for one in registrations) and not all(
                    one.trouble for one in registrations
                ):
                    changed.clear()
                    await changed.wait()
        if not any(one.is_registered for one in registrations):
            troubles = "; ".join(f"{one.relay}: {one.trouble or 'no answer'}" for one in registrations)
            raise Unreachable(f"this host is not registered with any relay of --via ({troubles})")

    def close(self) -> None:
        """Withdraw the registrations."""
        for task in self._registering:
            task.cancel()

    async def current(self) -> tuple[SignedRelay, ...]:
        """The run's relays, for the coordinator to hand out."""
        addresses = list(self._via)
        if self._beside is not None and (url := self._beside[0].url()) is not None:
            addresses.append(url.address.model_copy(update={"host": self._beside[1]}))
        for address in addresses:
            if address not in self._signed:
                assert address.relay_key is not None
                place = address.host, address.control_port
                self._signed[address] = sign_relay(self._identity.sign, self._run_hash, address.relay_key, place)
        return tuple(self._signed[address] for address in addresses)
