"""A member's side of the coordinator: connect, join, heartbeat, the current view, requests that outlive its absence.

``CoordinatorConnector`` chooses among the invite's addresses, ``fetch_run`` gets the run file for who is no member
(yet), ``CoordinatorClient`` is a membership.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.swarm.aio import task_scope
from shoal.swarm.deadlines import CONNECT_S, Deadlines
from shoal.swarm.errors import DeadlineExceeded, LinkError, RunChanged, Superseded, TryLater, Unreachable, WireError
from shoal.swarm.protocol.addresses import Reach, least_reach, may_dial
from shoal.swarm.protocol.identity import CurveKeys, Identity, verify_certificate
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerRun,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerView,
    PeerToCoordinatorGetRun,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorShowVerdict,
)
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import (
    MAX_TROUBLE,
    Address,
    Certificate,
    DeviceInfo,
    LeaveReason,
    Message,
    Role,
    RosterEntry,
)
from shoal.swarm.protocol.verdict_chain import check_verdict
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.control import ControlPlane
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.sockets import SILENCE_S, all_addresses

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

HEAD_START_S = 1.0
"""Between the first calls to two addresses. All go on trying, so none has to be given up for the next one."""

_FIRST_ANSWER_S = 3.0
"""For an answer from whoever is connected and silent, while there is another address; doubled with each failure of all
of them, as a slow coordinator must be heard in the end."""


class CoordinatorConnector:
    """Connection to the coordinator at one of the invite's addresses; the clients of all scopes share one.

    ``channel``: the one that was asked last, None before the first request."""

    def __init__(self, control: ControlPlane, invite: Invite) -> None:
        self.channel: Channel | None = None
        self._control = control
        self._key = invite.key
        self._addresses = list(invite.addresses)  # the one that answered last first
        self._at = invite.addresses[0]
        self._is_silent = False
        self._failures = 0

    async def request(self, message: Message, reply: type[M], limit_s: float, scope: int = 0) -> M:
        """One try: connect to whoever is there, and ask. ``limit_s``: for either of the two.

        Raises ``Unreachable``, ``DeadlineExceeded``, or what the coordinator answers."""
        try:
            channel = await self._connect(limit_s)
        except LinkError as error:
            # Another key, a refusal: somebody else is there now, and the coordinator may come back.
            raise Unreachable(str(error)) from error
        return await self._ask(channel, message, reply, self._answer_s(limit_s), scope)

    async def request_anywhere(
        self, message: Message, reply: type[M], connect_s: float, answer_s: float, scope: int = 0
    ) -> M:
        """Ask at one address after the other until somebody answers; for the first request of all.

        Raises as ``request``, and ``WrongKey`` or ``NotAdmitted`` when that is all that was found."""
        for _ in self._addresses[1:]:
            channel = await self._connect(connect_s)
            try:
                return await self._ask(channel, message, reply, min(answer_s, connect_s), scope)
            except (DeadlineExceeded, Unreachable) as error:
                log.info("%s; trying the invite's next address", error)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + connect_s
        while True:
            channel = await self._connect(connect_s)
            try:
                return await self._ask(channel, message, reply, answer_s, scope)
            except Unreachable:
                # A port that strangers flood hangs up on whoever it does not know yet, too.
                if not channel.was_connected or loop.time() > give_up_s:
                    raise

    async def _ask(self, channel: Channel, message: Message, reply: type[M], limit_s: float, scope: int) -> M:
        try:
            answer = await channel.request(message, reply, limit_s, scope)
        except (DeadlineExceeded, Unreachable):
            if channel is self.channel and len(self._addresses) > 1:
                self._failures += 1
                if channel.is_connected:  # whoever is there stands still: the others are called first
                    self._is_silent = True
                    self._addresses.sort(key=lambda one: one == self._at)
            raise
        if channel is self.channel:
            self._failures = 0
            self._addresses.sort(key=lambda one: one != self._at)
        return answer

    def _answer_s(self, limit_s: float) -> float:
        if len(self._addresses) == 1:
            return limit_s
        return min(limit_s, _FIRST_ANSWER_S * 2.0 ** min(self._failures // len(self._addresses), 16))

    async def _connect(self, limit_s: float) -> Channel:
        """The first to be connected, of those that are called ``HEAD_START_S`` apart."""
        if self.channel is not None and self.channel.is_connected and not self._is_silent:
            return self.channel
        if len(self._addresses) == 1:
            self.channel = self._dial(self._at)
            await self.channel.connected(limit_s)
            return self.channel
        troubles: dict[Address, LinkError] = {}
        async with task_scope() as tasks:
            calls = [
                tasks.create_task(self._call(address, number * HEAD_START_S, limit_s))
                for number, address in enumerate(self._addresses)
            ]
            for call in asyncio.as_completed(calls):
                address, found = await call
                if not isinstance(found, LinkError):
                    self._turn_to(address, found)
                    break
                troubles[address] = found
            for task in calls:
                task.cancel()
        if len(troubles) == len(self._addresses):
            raise _trouble(troubles)
        assert self.channel is not None
        return self.channel

    async def _call(self, address: Address, after_s: float, limit_s: float) -> tuple[Address, Channel | LinkError]:
        await asyncio.sleep(after_s)
        try:
            channel = self._dial(address)
            await channel.connected(limit_s)
        except LinkError as error:
            return address, error
        return address, channel

    def _turn_to(self, address: Address, channel: Channel) -> None:
        if self.channel is not None and address != self._at:
            log.info("connecting to the coordinator at %s from now on", address)
        self.channel, self._at, self._is_silent = channel, address, False

    def _dial(self, address: Address) -> Channel:
        return self._control.dial(address.host, address.control_port, self._key)


def _trouble(troubles: dict[Address, LinkError]) -> LinkError:
    """One error that names all addresses. When one of them may only be away, trying again is worth it."""
    away = [error for error in troubles.values() if isinstance(error, Unreachable)]
    if len(away) == len(troubles):
        places = " or ".join(map(str, troubles))
        return Unreachable(
            f"nothing answers at {places}: is the coordinator running there, are the ports open, "
            "are the addresses right?"
        )
    text = "; ".join(str(error) for error in troubles.values())
    return Unreachable(text) if away else type(next(iter(troubles.values())))(text)


@dataclass(frozen=True)
class PublishedRun:
    """``toml``: as the host wrote it; ``coordinator``: its identity and the key that the invite names."""

    toml: str
    run_file: RunFile
    coordinator: Certificate


async def fetch_run(connector: CoordinatorConnector, invite: Invite) -> PublishedRun:
    """Ask whoever answers at the invite's addresses.

    Raises ``Unreachable``, ``WrongKey``, ``UnknownRun``, ``ProtocolMismatch``, ``RunFileError`` for a file that no run
    may have, and ``RunChanged`` for another one than the invite's."""
    ask = PeerToCoordinatorGetRun(run=invite.run)
    answer = await connector.request_anywhere(ask, CoordinatorToPeerRun, CONNECT_S, CONNECT_S)
    verify_certificate(answer.coordinator)
    if answer.coordinator.curve_key != invite.key:
        raise WireError("the coordinator's certificate is for another key than the invite's")
    check_hash(answer.run_hash, invite)
    run_file = parse_run_file(answer.run_toml, "the coordinator's run file")
    if run_file.hash != invite.run_hash:
        raise RunChanged(
            "the run file that the host sent has another hash than the invite's: install the same release of shoal on "
            "both machines; if it is the same, the host has changed the run since: do not join before you know why"
        )
    return PublishedRun(answer.run_toml, run_file, answer.coordinator)


def check_hash(run_hash: bytes, invite: Invite) -> None:
    """Raises ``RunChanged`` unless the coordinator says to host the invite's run."""
    if run_hash != invite.run_hash:
        raise RunChanged(
            f"the host has changed the run {invite.run!r} since this invite: its hash is {run_hash.hex()[:16]} now, "
            f"and {invite.run_hash.hex()[:16]} in the invite; ask for a new invite, and what has changed"
        )


_RETRY_S = 0.5
_LEAVE_S = 2.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 15.0
"""Before the next try to join where there is no place at the moment."""

JOIN_S = 20.0
"""For the answer to a join: the coordinator may be trying for some seconds whether we can be reached."""


@dataclass(frozen=True)
class MemberInfo:
    """How a member introduces itself; an empty ``host`` is the address that the coordinator sees."""

    name: str
    role: Role
    device: DeviceInfo
    host: str = ""
    ports: tuple[int, int] | None = None


class CoordinatorClient:
    """``join`` first. ``scope``: what it is a member of, the run, or one of its stages (``in_scope``)."""

    def __init__(
        self, node: Node, identity: Identity, keys: CurveKeys, invite: Invite, me: MemberInfo, scope: int = 0
    ) -> None:
        self.node = node
        self.scope = scope
        self._identity, self._keys = identity, keys
        self.invite = invite
        self.peer = identity.peer_id
        self.me = me
        self._run: PublishedRun | None = None
        self.reachable = False
        self.coordinator_is_away = False
        self._away_s = -math.inf
        self.farewell: tuple[LeaveReason, str] = ("done", "")
        """What is said on leaving at the end: the reason, and the trouble if there is any."""
        self.joins = 0
        """How many times we were admitted; what an earlier membership held is with others."""
        self._certificate = identity.certify(keys)
        self._connector = CoordinatorConnector(node.control, invite)
        self._view: RunView | None = None
        self._is_ahead = False
        """We know of a verdict that the coordinator has forgotten."""
        self._closes_at_s: float | None = None
        self._roster: dict[str, RosterEntry] = {}
        self._coordinator_reach: Reach = "public"
        self._roster_version = 0  # no run has that one: the next view brings the roster
        self._changed = asyncio.Event()
        self._superseded = False
        self._clients = [self]
        """Of all scopes that this process is a member of."""
        node.control.handle(CoordinatorToPeerView, self._on_view, scope)
        node.control.handle(CoordinatorToPeerSuperseded, self._on_superseded, scope)

    def in_scope(self, scope: int) -> CoordinatorClient:
        """This process in another scope, over the same connection: ``join``, at last ``leave`` and ``withdraw``."""
        client = CoordinatorClient(self.node, self._identity, self._keys, self.invite, self.me, scope)
        client._connector, client._clients, client._run = self._connector, self._clients, self._run
        self._clients.append(client)
        return client

    # Joining ----------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Get the run file, the first time, and become a member if it is the invite's.

        Raises ``Unreachable``, ``WrongKey``, ``UnknownRun``, ``RunChanged``, ``ProtocolMismatch``, ``RunEnded``, …"""
        if self._run is None:
            self._run = await fetch_run(self._connector, self.invite)
        control, data = self.me.ports or (self.node.control_port, self.node.data_port)
        ask = PeerToCoordinatorJoinRun(
            run=self.invite.run,
            certificate=self._certificate,
            name=self.me.name,
            role=self.me.role,
            device=self.me.device,
            addresses=(Address(host=self.me.host, control_port=control, data_port=data),),
        )
        answer = await self._connector.request_anywhere(
            ask, CoordinatorToPeerJoinAccepted, CONNECT_S, JOIN_S, self.scope
        )
        check_hash(answer.run_hash, self.invite)
        self.reachable = answer.reachable
        assert self._connector.channel is not None
        host = self._connector.channel.remote_host
        self._coordinator_reach = least_reach(await all_addresses(host, 0, CONNECT_S))
        self.node.control.silence_s = min(SILENCE_S, self.deadlines.dead_s)
        self._roster_version = 0  # no run has that one: the next view brings the roster
        self.joins += 1
        self._take(answer.view)

    async def rejoin(self) -> None:
        """Hand back everything and start as a new member; outlives the coordinator's absence. Raises like ``join``."""
        await self.leave("starts afresh")
        await self.come_back()

    async def join_in_time(self) -> None:
        """Join as soon as there is a place. Raises like ``join``, without ``TryLater``."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self.join()
            except TryLater as error:
                self._require_place()
                log.warning("waiting to be let in: %s", error)
            # Those who wait together do not come back together.
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def come_back(self) -> None:
        """Join again, however long the coordinator is away. Raises like ``join_in_time``."""
        while True:
            try:
                await self.join_in_time()
            except (DeadlineExceeded, Unreachable) as error:
                await self._bear_absence(error)
            else:
                self.coordinator_is_away = False
                return

    async def leave(self, reason: LeaveReason, trouble: str = "") -> None:
        """Tell the coordinator; never fails: it would find out by itself. ``trouble``: what keeps us from going on."""
        goodbye = PeerToCoordinatorLeave(reason=reason, trouble=trouble[:MAX_TROUBLE])
        try:
            await self._connector.request(goodbye, Acknowledged, _LEAVE_S, self.scope)
        except LinkError as error:
            log.debug("left without a goodbye: %s", error)

    def withdraw(self) -> None:
        """Nothing of this scope, a stage's, is for this process any more."""
        assert self.scope, "the run's own membership ends with the node"
        self._clients.remove(self)
        self.node.leave(self.scope)

    # The run ----------------------------------------------------------------------------------------------

    @property
    def published(self) -> PublishedRun:
        assert self._run is not None, "join first"
        return self._run

    @property
    def run_file(self) -> RunFile:
        return self.published.run_file

    @property
    def run_toml(self) -> str:
        return self.published.toml

    @property
    def coordinator(self) -> Certificate:
        return self.published.coordinator

    @property
    def coordinator_key(self) -> bytes:
        """The identity key that verdicts are signed with."""
        return self.coordinator.identity_key

    # The view ---------------------------------------------------------------------------------------------

    @property
    def view(self) -> RunView:
        assert self._view is not None, "join first"
        return self._view

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.run_file.round.patience_s)

    @property
    def closes_at_s(self) -> float | None:
        """When the round closes, on the event loop's clock; None while that is not announced."""
        return self._closes_at_s

    async def wait_for(self, predicate: Callable[[RunView], bool], timeout_s: float | None = None) -> RunView:
        """The first view that satisfies the predicate; the current one after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self.view):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.view

    def _take(self, view: RunView) -> None:
        old = self._view
        # Late, or from a coordinator that goes on from an old copy of its journal; that one we show what it lacks.
        self._is_ahead = old is not None and old.verdict is not None and view.round <= old.verdict.round
        if self._is_ahead or (old is not None and (view.epoch, view.sequence) < (old.epoch, old.sequence)):
            return
        verdict = view.verdict
        if verdict is None and view.verdict_chain is not None:
            verdict = old.verdict if old is not None else None
            if verdict is None or verdict.chain != view.verdict_chain:
                log.debug("a view without a verdict that is not known here")
                return  # as if it were lost: the next heartbeat says what we have
            view = view.model_copy(update={"verdict": verdict})
        if verdict is not None and (old is None or old.verdict is None or verdict.chain != old.verdict.chain):
            check_verdict(verdict, self.coordinator_key)
        if view.pipeline is None and old is not None and old.pipeline is not None:  # as we have said that we know it
            view = view.model_copy(update={"pipeline": old.pipeline})
        self._take_roster(view)
        self._view = view
        loop = asyncio.get_running_loop()
        self._closes_at_s = None if view.closes_in_s is None else loop.time() + view.closes_in_s
        self._changed.set()

    def _take_roster(self, view: RunView) -> None:
        """The whole one, or what has changed since the version that is known here; what a change for another version
        lacks comes with the answer to the next heartbeat, which says ours."""
        delta = view.roster_delta
        if view.roster is not None:
            self._roster = {entry.peer: self._checked(entry) for entry in view.roster}
        elif delta is not None and delta.since <= self._roster_version <= view.roster_version:
            for peer in delta.removed:
                self._roster.pop(peer, None)
            self._roster |= {entry.peer: self._checked(entry) for entry in delta.changed}
        else:
            return
        self._roster_version = view.roster_version
        self.node.update_roster(tuple(self._roster.values()), self.scope)

    def _checked(self, entry: RosterEntry) -> RosterEntry:
        """Leave out addresses that would have us connect to something in our own network that the coordinator cannot
        know; a member without any other counts as one that cannot be reached."""
        if not entry.reachable:
            return entry
        usable = tuple(address for address in entry.addresses if may_dial(address.host, self._coordinator_reach))
        if usable == entry.addresses:
            return entry
        log.info("%s is not called at an address that is not in the coordinator's network", entry.peer)
        return entry.model_copy(update={"addresses": usable} if usable else {"reachable": False})

    def wake(self) -> None:
        """Make ``wait_for`` look again."""
        self._changed.set()

    async def _on_view(self, channel: Channel, message: Message) -> None:
        assert isinstance(message, CoordinatorToPeerView)
        if channel is self._connector.channel and self._view is not None:
            self._take(message.view)

    async def _on_superseded(self, channel: Channel, message: Message) -> None:
        if channel is self._connector.channel:
            self._superseded = True
            self._changed.set()

    # Requests ---------------------------------------------------------------------------------------------

    async def ask(self, message: Message, reply: type[M]) -> M:
        """Repeat until the coordinator answers, however long it is away. All requests are idempotent.

        Raises its typed errors; ``NotAdmitted`` when it does not know us any more (``rejoin`` then).
        """
        while True:
            try:
                answer = await self._connector.request(message, reply, self.deadlines.request_s, self.scope)
            except (DeadlineExceeded, Unreachable) as error:
                await self._bear_absence(error)
                continue
            self.coordinator_is_away = False
            self._require_place()
            if isinstance(answer, CoordinatorToPeerView):
                self._take(answer.view)
            return answer

    async def ask_view(self, message: Message) -> RunView:
        """``ask`` what is answered with a view; returns the current one, which may be newer."""
        await self.ask(message, CoordinatorToPeerView)
        return self.view

    def was_away(self, since_s: float) -> bool:
        """Whether the coordinator did not answer, now or since that moment of the event loop's clock."""
        return self.coordinator_is_away or self._away_s > since_s

    async def _bear_absence(self, error: LinkError) -> None:
        self._require_place()
        if not self.coordinator_is_away:
            log.warning("the coordinator does not answer; going on without it: %s", error)
        self.coordinator_is_away = True
        self._away_s = asyncio.get_running_loop().time()
        await asyncio.sleep(_RETRY_S)

    async def heartbeat(self, heartbeat: PeerToCoordinatorHeartbeat) -> None:
        """One beat; raises like ``ask``."""
        headway, plan = heartbeat.headway, self.view.pipeline
        if plan is not None:
            headway = headway.model_copy(update={"plan_version": plan.version})
        known = {"roster_version": self._roster_version, "verdict_chain": self.view.verdict_chain, "headway": headway}
        beat = heartbeat.model_copy(update=known)
        await self.ask(beat, CoordinatorToPeerView)
        if self._is_ahead and self.view.verdict is not None:
            await self.ask(PeerToCoordinatorShowVerdict(verdict=self.view.verdict), Acknowledged)

    def _require_place(self) -> None:
        if self._superseded:
            raise Superseded

    async def admit(self, curve_key: bytes) -> bool:
        """Whether a caller's key is on the roster of any of our scopes; asks for fresh ones when it is not."""
        if curve_key == self.invite.key or self.node.knows_key(curve_key):
            return True
        async with task_scope() as tasks:
            asked = [tasks.create_task(client._looks_for(curve_key)) for client in self._clients]
            for found in asyncio.as_completed(asked):
                if await found:
                    break
            for task in asked:
                task.cancel()
        return self.node.knows_key(curve_key)

    async def _looks_for(self, curve_key: bytes) -> bool:
        if self._view is not None:
            # The answer to the next heartbeat has what is new, and takes a moment.
            await self.wait_for(lambda view: self.node.knows_key(curve_key), 1.5 * self.deadlines.heartbeat_s)
        return self.node.knows_key(curve_key)
