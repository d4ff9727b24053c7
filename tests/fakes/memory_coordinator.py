"""The real ``PlainRun`` and the real ``CoordinatorClient`` with nothing but the event loop between them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.fakes.memory_network import MemoryEndpoint
from tests.fakes.virtual_clock import now_s

from shoal.swarm.client.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.coordinator.events import JournalEvent, VerdictGiven
from shoal.swarm.coordinator.journal import read_page
from shoal.swarm.coordinator.round_scope import RoundScope
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.coordinator.stale_journal import check_ours
from shoal.swarm.coordinator.stores.fenced_store import EPOCH_STEP
from shoal.swarm.errors import DeadlineExceeded, ShoalError, Unreachable, WireError
from shoal.swarm.protocol.identity import CurveKeys, Identity, verify_certificate
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    CoordinatorToPeerRun,
    CoordinatorToPeerView,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorGetRun,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorGetWork,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorScoreWork,
    PeerToCoordinatorSecureStep,
    PeerToCoordinatorShowVerdict,
)
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.statements import RoundName, check_ready, check_report
from shoal.swarm.protocol.types import Address, DeviceInfo, Message, Role, RosterEntry
from shoal.swarm.sample_ranges import to_wire
from shoal.swarm.transport.paths.unmet_peers import UnmetPeers

_DEVICE = DeviceInfo(kind="cpu", name="fake", memory_bytes=0)


def identity(number: int) -> Identity:
    """Return the identity of that number, always the same; the order of numbers is that of peer ids."""
    return Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big")))


def curve_keys(number: int) -> CurveKeys:
    return CurveKeys.from_secret(bytes([1 + number % 200]) * 32)


def name_as_stage(scope: RoundScope, stage: int) -> None:
    """Name the rounds of a plain run as its members do, who have it in the scope of a stage."""

    class Named(RoundScope):
        @property
        def name_of_round(self) -> RoundName:
            return RoundName(self.run.hash, stage, self.round.number)

    scope.__class__ = Named


class MemoryCoordinator:
    """``away``: it hears nothing. ``deaf_to``: messages of these classes are lost. ``stopped``: it does nothing, and
    hears later what came meanwhile. ``at``: the port that it is at; at ``deaf_ports`` connections are taken and nobody
    answers. ``watch`` sees events twice, before they are journaled and before they are told;
    when it stops or kills the coordinator then, they go no further. ``scopes``: who answers for each scope on the same
    channels (``add_scope``), as long as this one is there and hears."""

    scope = 0
    tick_s = 0.1

    def __init__(self, run_toml: str) -> None:
        self.run_toml = run_toml
        self.scopes: dict[int, MemoryCoordinator] = {0: self}
        self.run = parse_run_file(run_toml)
        self.identity = identity(1_000_000)
        self.keys = curve_keys(199)
        self.away = False
        self.is_outdated = False
        self.stopped = False
        self.at = 1
        self.deaf_ports: set[int] = set()
        self.unheard: list[tuple[MemoryChannel, Message]] = []
        self.watch: Callable[[str, list[JournalEvent]], None] = lambda step, events: None
        self.pushes = True
        self.deaf_to: set[type[Message]] = set()
        self.events: list[JournalEvent] = []
        self.members: dict[bytes, MemoryChannel] = {}
        self._verdicts: dict[bytes, bytes | None] = {}
        self._plans: dict[bytes, bytes | None] = {}
        self._rosters: dict[bytes, int] = {}
        """By key, the version that it was sent, or said to have."""
        self.refusals: list[ShoalError] = []
        """What the next joins are answered, one after the other."""
        self._epoch = 1
        self.machine: PlainRun
        self._announced = -1
        self._start()

    def add_scope(self, scope: int, run_toml: str) -> "MemoryCoordinator":
        """Add a scope with rounds of its own on the same channels; ``serve`` it, too."""
        other = self.scopes[scope] = MemoryCoordinator(run_toml)
        other.scope, other.scopes = scope, self.scopes
        name_as_stage(other.machine.scope, scope - 1)
        return other

    def _start(self) -> None:
        self.machine = PlainRun(self.run, self.identity.sign, now_s(), self._epoch)
        if self.scope:
            name_as_stage(self.machine.scope, self.scope - 1)
        self.machine.log.replay(self.machine.scope, list(self.events), now_s())

    def restart(self) -> None:
        """Restart as after ``kill -9``: what was not journaled is forgotten."""
        self._epoch += EPOCH_STEP
        self._verdicts.clear()
        self._plans.clear()
        self._rosters.clear()
        self._start()
        self.away = False

    async def serve(self) -> None:
        """Tick and push views for ever."""
        while True:
            if not self.away and not self.stopped:
                await self._hear_late()
                self.machine.tick(now_s())
                await self._flush()
            await asyncio.sleep(self.tick_s)

    async def _hear_late(self) -> None:
        """Handle what lay in the socket while we were stopped; nobody waits for the answers any more."""
        unheard, self.unheard = self.unheard, []
        for channel, message in unheard:
            with suppress(ShoalError):
                await self.answer(channel, message)

    def verdicts(self, first: int, limit: int, scope: int | None = None) -> list[VerdictGiven]:
        """Return verdicts as a journal does."""
        return [event for event in self.events if isinstance(event, VerdictGiven)][first : first + limit]

    async def _flush(self) -> None:
        events = self.machine.log.take()
        self.watch("decided", events)
        if self.away:
            return
        self.events += events
        self.watch("journaled", events)
        if self.away or self.stopped:
            return
        if self.machine.log.announcements != self._announced:
            self._announced = self.machine.log.announcements
            if self.pushes:
                for peer, member in list(self.machine.scope.membership.members.items()):
                    channel = self.members.get(member.entry.certificate.curve_key)
                    if member.alive and channel is not None:
                        await channel.push(self._view(peer, channel.own_keys.public), self.scope)

    def _view(self, peer: str, key: bytes) -> CoordinatorToPeerView:
        known = self._rosters.get(key, -1), self._verdicts.get(key), self._plans.get(key)
        # Whoever reads a message has an object of its own, though the coordinator tells all the same one.
        view = self.machine.scope.view(peer, now_s(), *known).model_copy()
        self._rosters[key] = view.roster_version
        return CoordinatorToPeerView(view=view)

    async def answer(self, channel: "MemoryChannel", message: Message) -> Message:
        key = channel.own_keys.public
        if key in self.members:
            self.members[key] = channel
        machine, now = self.machine, now_s()
        answer: Message | None = None
        if isinstance(message, PeerToCoordinatorGetRun):
            certificate = self.identity.certify(self.keys)
            return CoordinatorToPeerRun(run_toml=self.run_toml, run_hash=self.run.hash, coordinator=certificate)
        if isinstance(message, PeerToCoordinatorJoinRun):
            return await self._join(channel, message)
        peer = machine.scope.admission.require_member(key)
        match message:
            case PeerToCoordinatorHeartbeat():
                machine.scope.heartbeat(peer, message, now)
            case PeerToCoordinatorRoundReady():
                entry = machine.scope.membership.members[peer].entry
                check_ready(replace(machine.scope.name_of_round, round=message.round), message, entry.certificate)
                machine.scope.ready(peer, message, now)
                machine.tick(now)
            case PeerToCoordinatorRoundReport():
                plan, entry = machine.scope.round.plan, machine.scope.membership.members[peer].entry
                if plan is not None and message.round == plan.round:
                    check_report(machine.scope.plan_statement(plan), plan, message, entry.certificate)
                machine.scope.report(peer, message, now)
                machine.tick(now)
            case PeerToCoordinatorSecureStep():
                board = machine.scope.round.board
                if board is not None and board.is_of(message):
                    board.check(peer, message)
                machine.scope.secure_step(peer, message, now)
                machine.tick(now)
                answer = machine.scope.secure_step(peer, message, now)
            case PeerToCoordinatorDescribeModel():
                machine.scope.describe_model(peer, message)
                answer = CoordinatorToPeerModelAccepted()
            case PeerToCoordinatorRequestLease():
                answer = CoordinatorToPeerLease(ranges=to_wire(machine.scope.leasing.request(peer, message, now)))
            case PeerToCoordinatorGetVerdicts():
                answer = read_page(self, message.first)
            case PeerToCoordinatorShowVerdict():
                check_ours(message.verdict, self.run.hash, self.identity.public_key)
                if not machine.scope.take_over(message.verdict, now):
                    self.away = self.is_outdated = True
                answer = Acknowledged()
            case PeerToCoordinatorGetWork():
                answer = machine.scope.review.samples_of(peer, message)
            case PeerToCoordinatorScoreWork():
                machine.scope.review.score(peer, message.signed)
                answer = Acknowledged()
            case PeerToCoordinatorLeave():
                machine.scope.admission.leave(peer, message.reason, now, message.trouble)
                machine.tick(now)
                answer = Acknowledged()
        await self._flush()
        if isinstance(message, PeerToCoordinatorHeartbeat):
            self._rosters[key], self._verdicts[key] = message.roster_version, message.verdict_chain
        if isinstance(message, PeerToCoordinatorHeartbeat | PeerToCoordinatorRoundReport):
            self._plans[key] = message.plan_digest
        return answer or self._view(peer, key)

    async def _join(self, channel: "MemoryChannel", message: PeerToCoordinatorJoinRun) -> Message:
        if self.refusals:
            raise self.refusals.pop(0)
        peer = verify_certificate(message.certificate)
        entry = RosterEntry(
            peer=peer,
            certificate=message.certificate,
            name=message.name,
            role=message.role,
            addresses=(Address(**(message.addresses[0].model_dump() | {"host": "127.0.0.1"})),),
            reachable=True,
        )
        self.machine.scope.admission.join(entry, message.device, now_s(), token=message.token or None)
        self._verdicts.pop(channel.own_keys.public, None)
        self._plans.pop(channel.own_keys.public, None)
        self._rosters.pop(channel.own_keys.public, None)
        self.members[channel.own_keys.public] = channel
        await self._flush()
        return CoordinatorToPeerJoinAccepted(
            peer=peer,
            run_hash=self.run.hash,
            observed_host="127.0.0.1",
            observed_port=1,
            reachable=True,
            view=self._view(peer, channel.own_keys.public).view,
        )


class MemoryChannel:
    """A member's connection to the coordinator. ``open``: whether anything gets through; ``silent``: whether what the
    coordinator says is lost."""

    def __init__(self, coordinator: MemoryCoordinator, own_keys: CurveKeys, latency_s: float, port: int = 1) -> None:
        self.own_keys = own_keys
        self.open = True
        self.silent = False
        self.remote_host = "127.0.0.1"
        self.port = port
        self._coordinator = coordinator
        self._latency_s = latency_s
        self._main = self
        self.handlers: dict[tuple[int, type[Message]], Callable[[Any, Any], Awaitable[None]]] = {}

    def at(self, port: int) -> "MemoryChannel":
        """Return the member's connection to another port, with ``open`` and ``silent`` of this one."""
        if port == self.port:
            return self
        other = MemoryChannel(self._coordinator, self.own_keys, self._latency_s, port)
        other._main, other.handlers = self, self.handlers
        return other

    @property
    def is_connected(self) -> bool:
        return self.port == self._coordinator.at or self.port in self._coordinator.deaf_ports

    async def connected(self, deadline_s: float) -> None:
        until_s = now_s() + deadline_s
        while not self.is_connected:
            if now_s() >= until_s:
                raise Unreachable(f"nothing answers at port {self.port}")
            await asyncio.sleep(0.1)

    async def request(self, message: Message, reply: type[Message], deadline_s: float, scope: int = 0) -> Message:
        start = now_s()
        await asyncio.sleep(self._latency_s)
        if not self.is_connected:
            raise Unreachable("the connection was lost")
        if not self._hears(message):
            await asyncio.sleep(deadline_s - self._latency_s)
            raise DeadlineExceeded("the coordinator did not answer")
        while self._coordinator.stopped:
            await asyncio.sleep(0.01)
            if now_s() > start + deadline_s:
                self._coordinator.scopes[scope].unheard.append((self, message))
                raise DeadlineExceeded("the coordinator did not answer")
        if scope not in self._coordinator.scopes:
            raise WireError(f"{type(message).__name__} is not for this side (in scope {scope})")
        answer = await self._coordinator.scopes[scope].answer(self, message)
        await asyncio.sleep(self._latency_s)
        coordinator = self._coordinator
        if not self.is_connected:
            raise Unreachable("the connection was lost")
        if coordinator.away or coordinator.stopped or self._main.silent or not self._main.open:  # the answer was lost
            await asyncio.sleep(max(0.0, start + deadline_s - now_s()))
            raise DeadlineExceeded("the coordinator did not answer")
        assert isinstance(answer, reply)
        return answer

    def _hears(self, message: Message) -> bool:
        here = self._main.open and self.port == self._coordinator.at
        return here and not self._coordinator.away and type(message) not in self._coordinator.deaf_to

    async def push(self, message: Message, scope: int = 0) -> None:
        handler = self.handlers.get((scope, type(message)))
        if self._main.open and not self._main.silent and handler is not None:
            await handler(self, message)


class _Control:
    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel
        self._dialed = {channel.port: channel}

    def dial(self, host: str, port: int, key: bytes, *, from_port: int = 0) -> MemoryChannel:
        return self._dialed.setdefault(port, self._channel.at(port))

    def handle(self, kind: type[Message], handler: Any, scope: int = 0) -> None:
        self._channel.handlers[scope, kind] = handler

    def leave(self, scope: int) -> None:
        for of in [of for of in self._channel.handlers if of[0] == scope]:
            del self._channel.handlers[of]


class MemoryNode:
    """The part of a node that ``CoordinatorClient`` uses."""

    control_port = data_port = 1
    host_key = b""
    relays = None

    def __init__(self, channel: MemoryChannel, endpoint: MemoryEndpoint) -> None:
        self.unmet = UnmetPeers()
        self.control = _Control(channel)
        self._endpoint = endpoint
        self._rosters: dict[int, set[str]] = {}
        self._keys: dict[int, set[bytes]] = {}

    def path_reports(self) -> tuple[()]:
        return ()

    def update_roster(self, roster: tuple[RosterEntry, ...], scope: int = 0) -> None:
        self._rosters[scope] = {entry.peer for entry in roster}
        self._keys[scope] = {entry.certificate.curve_key for entry in roster}
        self._endpoint.roster = set().union(*self._rosters.values())

    def leave(self, scope: int) -> None:
        self.control.leave(scope)
        self._endpoint.leave(scope)
        self._rosters.pop(scope, None)
        self._keys.pop(scope, None)
        self._endpoint.roster = set().union(*self._rosters.values())

    def knows_key(self, key: bytes) -> bool:
        return any(key in keys for keys in self._keys.values())


def make_client(
    coordinator: MemoryCoordinator,
    endpoint: MemoryEndpoint,
    me: Identity,
    keys: CurveKeys,
    latency_s: float,
    ports: tuple[int, ...] = (1,),
    role: Role = "trainer",
    token: bytes = b"",
) -> tuple[CoordinatorClient, MemoryChannel]:
    channel = MemoryChannel(coordinator, keys, latency_s)
    node: Any = MemoryNode(channel, endpoint)
    addresses = tuple(Address(host="127.0.0.1", control_port=port) for port in ports)
    invite = Invite(addresses, coordinator.run.run.name, coordinator.keys.public, coordinator.run.hash, token)
    info = MemberInfo(name="fake", role=role, device=_DEVICE)
    return CoordinatorClient(node, me, keys, invite, info), channel
