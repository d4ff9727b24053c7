"""A member's side of the coordinator: the run file, checked against the invite; join, heartbeats, view, requests.

``CoordinatorConnector`` chooses among the invite's addresses, ``fetch_run`` fetches the run file without joining, and
``CoordinatorClient`` is a membership.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.deadlines import CONNECT_S, Deadlines
from shoal.swarm.errors import (
    DeadlineExceeded,
    InviteError,
    LinkError,
    RunChanged,
    Superseded,
    TryLater,
    Unreachable,
    WireError,
)
from shoal.swarm.protocol.addresses import Reach, least_reach, may_dial
from shoal.swarm.protocol.amendments import amended, changes_at
from shoal.swarm.protocol.evaluations import Evaluation, SignedEvaluation
from shoal.swarm.protocol.evidence import evidence_id
from shoal.swarm.protocol.identity import CurveKeys, Identity, verify_certificate
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    EVIDENCE_PIECE_BYTES,
    Acknowledged,
    CoordinatorToPeerAddresses,
    CoordinatorToPeerAddressTried,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerReceipt,
    CoordinatorToPeerRelayOffered,
    CoordinatorToPeerRun,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerView,
    PeerToCoordinatorGetRun,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorOfferRelay,
    PeerToCoordinatorRequestDial,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorShowAddresses,
    PeerToCoordinatorShowEvidence,
    PeerToCoordinatorShowVerdict,
    PeerToCoordinatorTryAddress,
)
from shoal.swarm.protocol.rounds import RoundPlan, RunView
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.statements import RoundName, Statement, check_plan
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
from shoal.swarm.protocol.verdict_chain import check_agreement, check_verdict
from shoal.swarm.protocol.work_scores import SignedScore, WorkScore
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.control import ControlPlane
from shoal.swarm.transport.node import Node
from shoal.swarm.transport.paths.relay_paths import RelayPaths
from shoal.swarm.transport.tcp.diagnosis import unknown_name, why_silent
from shoal.swarm.transport.tcp.sockets import SILENCE_S, all_addresses

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

HEAD_START_S = 1.0
"""Time between the first attempts at two addresses. Attempts continue in parallel, so no address is given up."""

_LOOK_AFTER_S = 1.0
"""Time after which a coordinator that has not connected yet is looked at, to say why."""

_TRYING_AFTER_S = 2.0
"""Time after which somebody who waits is told that it is being tried."""

_FIRST_ANSWER_S = 3.0
"""Time for an answer of a connected coordinator while there are other addresses. It doubles whenever all addresses have
failed, so that a slow coordinator gets enough time in the end."""


class CoordinatorConnector:
    """Connection to the coordinator at one of the invite's addresses, shared by the clients of all scopes.

    ``channel``: the channel of the last request; None before the first one."""

    def __init__(self, control: ControlPlane, relays: RelayPaths, invite: Invite, from_port: int = 0) -> None:
        """``relays``: the node's, for a coordinator that is reached over a relay; ``from_port``: the local port from
        which to dial it otherwise, 0 for any."""
        self._from_port = from_port
        self.channel: Channel | None = None
        self._control = control
        self._relays = relays
        self._key, self._run = invite.key, invite.run
        # The last one that answered is first. All relays are one way, as the forwarder chooses among them.
        self._relayed = tuple(address for address in invite.addresses if address.is_relayed)
        self._addresses = [
            address for address in invite.addresses if not address.is_relayed or address is self._relayed[0]
        ]
        self._at = self._addresses[0]
        self._is_silent = False
        self._has_met = False
        self._failures = 0

    async def request(self, message: Message, reply: type[M], limit_s: float, scope: int = 0) -> M:
        """Connect and send a request, once. ``limit_s`` applies to each of the two steps.

        Raises ``Unreachable``, ``DeadlineExceeded``, or the coordinator's error."""
        try:
            channel = await self._connect(limit_s)
        except LinkError as error:
            # A wrong key or a refusal: another server uses the address now, and the coordinator may come back.
            raise Unreachable(str(error)) from error
        return await self._ask(channel, message, reply, self._answer_s(limit_s), scope)

    async def request_anywhere(
        self, message: Message, reply: type[M], connect_s: float, answer_s: float, scope: int = 0
    ) -> M:
        """Send the first request at one address after the other until an answer comes.

        Raises like ``request``, and ``WrongKey`` or ``NotAdmitted`` when all addresses fail with these."""
        for _ in self._addresses[1:]:
            channel = await self._connect(connect_s)
            try:
                return await self._ask(channel, message, reply, min(answer_s, connect_s), scope)
            except (DeadlineExceeded, Unreachable) as error:
                log.info("%s; trying the next address of the invite", error)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + connect_s
        while True:
            channel = await self._connect(connect_s)
            try:
                return await self._ask(channel, message, reply, answer_s, scope)
            except Unreachable:
                # A coordinator that is flooded by strangers disconnects newcomers, too: try again.
                if not channel.was_connected or loop.time() > give_up_s:
                    raise

    async def _ask(self, channel: Channel, message: Message, reply: type[M], limit_s: float, scope: int) -> M:
        try:
            answer = await channel.request(message, reply, limit_s, scope)
        except (DeadlineExceeded, Unreachable):
            if channel is self.channel and len(self._addresses) > 1:
                self._failures += 1
                if channel.is_connected:  # it is connected but silent: try the other addresses first
                    self._is_silent = True
                    self._addresses.sort(key=lambda one: one == self._at)
            raise
        if channel is self.channel:
            self._failures = 0
            self._addresses.sort(key=lambda one: one != self._at)
        return answer

    def avoid(self) -> None:
        """Try the other addresses first: who answers at this one does not lead the run."""
        self._is_silent = len(self._addresses) > 1
        self._addresses.sort(key=lambda one: one == self._at)

    def _answer_s(self, limit_s: float) -> float:
        if len(self._addresses) == 1:
            return limit_s
        return min(limit_s, _FIRST_ANSWER_S * 2.0 ** min(self._failures // len(self._addresses), 16))

    async def _connect(self, limit_s: float) -> Channel:
        """Connect to all addresses, ``HEAD_START_S`` apart, and return the first channel that is connected."""
        if self.channel is not None and self.channel.is_connected and not self._is_silent:
            return self.channel
        if len(self._addresses) == 1:
            self.channel = self._dial(self._at)
            await self._connected(self.channel, self._at, limit_s)
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
                    self._use(address, found)
                    break
                troubles[address] = found
            for task in calls:
                task.cancel()
        if len(troubles) == len(self._addresses):
            raise _combined_error(troubles)
        assert self.channel is not None
        return self.channel

    async def _call(self, address: Address, after_s: float, limit_s: float) -> tuple[Address, Channel | LinkError]:
        await asyncio.sleep(after_s)
        try:
            channel = self._dial(address)
            await self._connected(channel, address, limit_s)
        except LinkError as error:
            return address, error
        return address, channel

    async def _connected(self, channel: Channel, address: Address, limit_s: float) -> None:
        """As ``channel.connected``; before the first contact with a coordinator, an error says what is wrong there.

        Raises ``Unreachable`` at once where waiting is in vain: for an unknown name, and where another kind of server
        answers."""
        if self._has_met or address.is_relayed:
            await channel.connected(limit_s)
            return
        if told := await unknown_name(address.host, limit_s):
            raise Unreachable(told)
        connecting = asyncio.ensure_future(channel.connected(limit_s))
        looking = asyncio.ensure_future(self._look(address, limit_s))
        try:
            await asyncio.wait((connecting, looking), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done() and (found := looking.result())[1]:
                raise Unreachable(found[0])
            try:
                await connecting
            except Unreachable as error:
                raise Unreachable(looking.result()[0] if looking.done() else str(error)) from error
        finally:
            for one in (connecting, looking):
                one.cancel()
            await asyncio.wait((connecting, looking))
        self._has_met = True

    async def _look(self, address: Address, limit_s: float) -> tuple[str, bool]:
        """Find out why there is no connection yet, if it takes long, as ``why_silent``; say that it is being tried."""
        await asyncio.sleep(_LOOK_AFTER_S)
        asking = asyncio.ensure_future(
            why_silent(address.host, address.control_port, max(1.0, limit_s - 2 * _LOOK_AFTER_S))
        )
        try:
            await asyncio.wait((asking,), timeout=_TRYING_AFTER_S - _LOOK_AFTER_S)
            if not asking.done():
                log.warning("trying %s …", address)
            elif not asking.result()[1]:
                log.warning("trying %s …: %s", address, asking.result()[0])
            return await asking
        finally:
            asking.cancel()

    def _use(self, address: Address, channel: Channel) -> None:
        if self.channel is not None and address != self._at:
            log.info("connecting to the coordinator at %s from now on", address)
        self.channel, self._at, self._is_silent = channel, address, False

    def _dial(self, address: Address) -> Channel:
        if address.is_relayed:
            port = self._relays.forwarder_to(self._key, self._relayed, as_guest=True)
            channel = self._control.dial("127.0.0.1", port, self._key, via=address)
        else:
            channel = self._control.dial(address.host, address.control_port, self._key, from_port=self._from_port)
        channel.run = self._run
        return channel


def _combined_error(errors: dict[Address, LinkError]) -> LinkError:
    """One error that names all addresses; ``Unreachable``, so that callers try again, if any of them may come back."""
    away = [error for error in errors.values() if isinstance(error, Unreachable)]
    if len(away) == len(errors):
        places = " or ".join(map(str, errors))
        return Unreachable(
            f"nothing answers at {places}: is the coordinator running there, are the ports open, "
            "are the addresses right?"
        )
    text = "; ".join(str(error) for error in errors.values())
    return Unreachable(text) if away else type(next(iter(errors.values())))(text)


@dataclass(frozen=True)
class PublishedRun:
    """A run as its coordinator publishes it: run file, as the host wrote it and validated, and certificate."""

    toml: str
    run_file: RunFile
    coordinator: Certificate


async def fetch_run(connector: CoordinatorConnector, invite: Invite) -> PublishedRun:
    """Fetch the run file from the coordinator and check it against the invite.

    Raises ``Unreachable``, ``WrongKey``, ``UnknownRun``, ``ProtocolMismatch``, ``RunFileError`` for an invalid run
    file, and ``RunChanged`` for one that the invite does not name."""
    if invite.is_study:
        raise InviteError(f"this invite is to the study {invite.run!r}, of which `shoal join` takes part in each run")
    ask = PeerToCoordinatorGetRun(run=invite.run)
    answer = await connector.request_anywhere(ask, CoordinatorToPeerRun, CONNECT_S, CONNECT_S)
    verify_certificate(answer.coordinator)
    if answer.coordinator.curve_key != invite.key:
        raise WireError("the coordinator's certificate is not for the key that the invite names")
    check_hash(answer.run_hash, invite)
    run_file = parse_run_file(answer.run_toml, "the coordinator's run file")
    if run_file.hash != invite.run_hash:
        raise RunChanged(
            "the host's run file does not have the hash that the invite names: install the same release of shoal on "
            "both machines; if it is the same already, the host has changed the run: ask why before you join"
        )
    return PublishedRun(answer.run_toml, run_file, answer.coordinator)


def check_hash(run_hash: bytes, invite: Invite) -> None:
    """Check the hash of the hosted run against the invite. Raises ``RunChanged``."""
    if run_hash != invite.run_hash:
        raise RunChanged(
            f"the host has changed the run {invite.run!r} since this invite was made: its hash is "
            f"{run_hash.hex()[:16]} now, and {invite.run_hash.hex()[:16]} in the invite; ask what has changed, and for "
            "a new invite"
        )


_RETRY_S = 0.5
_LEAVE_S = 2.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 15.0
"""Time until the next attempt to join a run that has no place at the moment."""

JOIN_S = 20.0
"""Time for the answer to a join: the coordinator may test for some seconds whether this peer can be reached."""


@dataclass(frozen=True)
class MemberInfo:
    """A member as it describes itself; an empty ``host`` stands for the address that the coordinator sees."""

    name: str
    role: Role
    device: DeviceInfo
    host: str = ""
    ports: tuple[int, int] | None = None


class CoordinatorClient:
    """A membership of a run, or of one of its stages (``in_scope``); call ``join`` first."""

    def __init__(
        self,
        node: Node,
        identity: Identity,
        keys: CurveKeys,
        invite: Invite,
        me: MemberInfo,
        scope: int = 0,
        from_port: int = 0,
    ) -> None:
        """``from_port``: the local port from which to dial the coordinator, 0 for any."""
        self.node = node
        self.scope = scope
        self.identity, self.keys = identity, keys
        self.invite = invite
        self.peer = identity.peer_id
        self.me = me
        self._run: PublishedRun | None = None
        self.reachable, self.unreachable = False, ""
        """Whether others can dial this peer, and if not, why."""
        self.observed_host = ""
        """The address that this peer comes from, as the coordinator sees it."""
        self.observed_port = 0
        """The port of that; 0 over a relay."""
        self.mapped: Address | None = None
        """Where a router forwards this member's ports to it; its next join names that, too."""
        self.coordinator_is_away = False
        self._away_s = -math.inf
        self.farewell: tuple[LeaveReason, str] = ("done", "")
        """Reason for leaving at the end, and the error if there was one."""
        self.joins = 0
        """Number of admissions; samples and claims of earlier memberships were given to others."""
        self.certificate = identity.certify(keys)
        self.relays: tuple[Address, ...] = ()
        """The relays that this member is registered with, which its next join names."""
        self._showing = asyncio.Lock()
        self._connector = CoordinatorConnector(node.control, node.relays, invite, from_port)
        self._view: RunView | None = None
        self._least_epoch = 0
        """Epoch of the newest verdict that an earlier process of this member has stored."""
        self._is_ahead = False
        """Whether this member knows a verdict that the coordinator has lost."""
        self._closes_at_s: float | None = None
        self._plan: RoundPlan | None = None
        """The newest plan, which views and verdicts may refer to; checked."""
        self._plan_digest: bytes | None = None
        self._plan_signature = b""
        self._roster: dict[str, RosterEntry] = {}
        self._coordinator_reach: Reach = "public"
        self._roster_version = 0  # a version that no run has, so the next view brings the roster
        self._changed = asyncio.Event()
        self._superseded = False
        self._heartbeats_sent = self._heartbeats_answered = 0
        """Number of the newest heartbeat, and of the newest one with an answer."""
        node.host_key = invite.key
        self._clients = [self]
        """Clients of all scopes that this process is a member of."""
        node.control.handle(CoordinatorToPeerView, self._on_view, scope)
        node.control.handle(CoordinatorToPeerSuperseded, self._on_superseded, scope)

    def in_scope(self, scope: int) -> CoordinatorClient:
        """A client of another scope over the same connection: ``join``, and at the end ``leave`` and ``withdraw``."""
        client = CoordinatorClient(self.node, self.identity, self.keys, self.invite, self.me, scope)
        client._connector, client._clients, client._run = self._connector, self._clients, self._run
        self._clients.append(client)
        return client

    # Joining ----------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Fetch the run file, the first time, and join if it is the one that the invite names.

        Raises ``Unreachable``, ``WrongKey``, ``UnknownRun``, ``RunChanged``, ``ProtocolMismatch``, ``RunEnded``, …"""
        if self._run is None:
            self._run = await fetch_run(self._connector, self.invite)
        ask = PeerToCoordinatorJoinRun(
            run=self.invite.run,
            certificate=self.certificate,
            name=self.me.name,
            role=self.me.role,
            device=self.me.device,
            addresses=self._addresses(),
            token=b"" if self.scope else self.invite.token,
        )
        answer = await self._connector.request_anywhere(
            ask, CoordinatorToPeerJoinAccepted, CONNECT_S, JOIN_S, self.scope
        )
        check_hash(answer.run_hash, self.invite)
        self.reachable, self.unreachable = answer.reachable, answer.unreachable
        self.observed_host, self.observed_port = answer.observed_host, answer.observed_port
        assert self._connector.channel is not None
        host = self._connector.channel.remote_host
        self._coordinator_reach = least_reach(await all_addresses(host, 0, CONNECT_S))
        self.node.control.silence_s = min(SILENCE_S, self.deadlines.dead_s)
        self._roster_version = 0  # a version that no run has, so the next view brings the roster
        self.joins += 1
        self._apply_view(answer.view)
        self._refuse_older(answer.view)

    @property
    def coordinator_host(self) -> str:
        """Host at which the coordinator was reached last; empty before that."""
        channel = self._connector.channel
        return channel.remote_host if channel is not None else ""

    @property
    def round_trip_s(self) -> float:
        """Shortest recent time from a request to the coordinator's answer; 0 before any."""
        channel = self._connector.channel
        return (channel.round_trip_s if channel is not None else None) or 0.0

    def _addresses(self) -> tuple[Address, ...]:
        """The ways in which others reach this member, the preferred one first."""
        control, data = self.me.ports or (self.node.control_port, self.node.data_port)
        own = Address(host=self.me.host, control_port=control, data_port=data)
        return (self.mapped, own, *self.relays) if self.mapped is not None else (own, *self.relays)

    async def show_addresses(self) -> None:
        """Tell the coordinator, once, how this member is reached from now on. Raises ``LinkError``.

        The answer may take seconds, as the coordinator tries what it is told: one after the other, as two attempts at
        the same moment would end each other's connections."""
        async with self._showing:
            shown = PeerToCoordinatorShowAddresses(addresses=self._addresses())
            answer = await self._connector.request(shown, CoordinatorToPeerAddresses, JOIN_S)
            self.reachable = answer.reachable

    async def try_address(self, address: Address) -> str:
        """Have the coordinator dial this process at an address, once. Returns what does not work; empty if both ports
        answer. Raises ``LinkError``."""
        ask = PeerToCoordinatorTryAddress(addresses=(address,))
        return (await self._connector.request(ask, CoordinatorToPeerAddressTried, JOIN_S)).trouble

    async def offer_relay(self, relay_key: bytes, port: int) -> str:
        """Offer this machine's relay to the run, once. Returns why it is not named to others; empty if it is.

        Raises ``LinkError``."""
        ask = PeerToCoordinatorOfferRelay(relay_key=relay_key, port=port)
        return (await self._connector.request(ask, CoordinatorToPeerRelayOffered, JOIN_S)).trouble

    async def request_dial(self, ask: PeerToCoordinatorRequestDial, limit_s: float) -> None:
        """Have another member asked to dial this one, once. Raises ``LinkError``."""
        await self._connector.request(ask, Acknowledged, limit_s)

    def is_coordinator(self, channel: Channel) -> bool:
        """Whether a message that came over this channel is the coordinator's."""
        return channel is self._connector.channel

    async def rejoin(self) -> None:
        """Leave and join again, also after the coordinator's absence. Raises like ``join``."""
        await self.leave("starts afresh")
        await self.come_back()

    async def join_in_time(self) -> None:
        """Join as soon as the run has a place. Raises like ``join``, except ``TryLater``."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self.join()
            except TryLater as error:
                self._check_superseded()
                log.warning("cannot join yet, trying again soon: %s", error)
            # Peers that wait at the same time should not try again at the same time.
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def come_back(self) -> None:
        """Join, however long the coordinator is away. Raises like ``join_in_time``."""
        while True:
            try:
                await self.join_in_time()
            except (DeadlineExceeded, Unreachable) as error:
                await self._wait_for_return(error)
            else:
                self.coordinator_is_away = False
                return

    async def leave(self, reason: LeaveReason, trouble: str = "") -> None:
        """Tell the coordinator, without raising: it would notice anyway. ``trouble``: the error that was the cause."""
        goodbye = PeerToCoordinatorLeave(reason=reason, trouble=trouble[:MAX_TROUBLE])
        try:
            await self._connector.request(goodbye, Acknowledged, _LEAVE_S, self.scope)
        except LinkError as error:
            log.debug("could not tell the coordinator that this peer leaves: %s", error)

    def withdraw(self) -> None:
        """Remove this client of a stage's scope from the process."""
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
        """The identity key whose signature verdicts carry."""
        return self.coordinator.identity_key

    def round_name(self, number: int) -> RoundName:
        """Name of a round of this scope in what is signed about it."""
        return RoundName(self.invite.run_hash, self.scope - 1 if self.scope else None, number)

    def sign(self, statement: Statement) -> bytes:
        """Sign a statement with this member's identity key."""
        return self.identity.sign(statement.bytes_to_sign())

    # The view ---------------------------------------------------------------------------------------------

    @property
    def run_now(self) -> RunFile:
        """The run file as it is in the open round, with what its host has amended. Raises ``RunChanged``."""
        return amended(self.run_file, changes_at(self.view.amendments, self.view.round))

    @property
    def view(self) -> RunView:
        assert self._view is not None, "join first"
        return self._view

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.run_file.round.patience_s)

    @property
    def closes_at_s(self) -> float | None:
        """Closing time of the round on the event loop's clock; None if not announced yet."""
        return self._closes_at_s

    async def wait_for(self, predicate: Callable[[RunView], bool], timeout_s: float | None = None) -> RunView:
        """Wait for a view that satisfies the predicate; return the current one after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while not predicate(self.view):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.view

    def _apply_view(self, view: RunView) -> None:
        old = self._view
        # A late view, or one of a coordinator with an old copy of its journal, to which we show what it lacks.
        self._is_ahead = old is not None and old.verdict is not None and view.round <= old.verdict.round
        if self._is_ahead or view.epoch < self._least_epoch:
            return
        if old is not None and (view.epoch, view.sequence) < (old.epoch, old.sequence):
            return
        whole = self._with_plans(view)
        if whole is None:
            log.debug("ignored a view that refers to a plan that is not known here")
            return  # the next heartbeat says which one is
        view = whole
        if view.verdict is not None and view.verdict.epoch > view.epoch:
            raise WireError("a view with the verdict of a later coordinator than the one that sends it")
        known = old.verdict if old is not None else None
        if view.verdict is not None and (known is None or view.verdict.chain != known.chain):
            check_verdict(view.verdict, self.coordinator_key)
        elif view.verdict is not None or view.verdict_chain is not None:
            if known is None or (view.verdict is None and known.chain != view.verdict_chain):
                log.debug("ignored a view that refers to a verdict that is not known here")
                return  # the next heartbeat shows the coordinator what is known here
            # Also where it is told again: what has this chain was checked when it came first.
            view = view.model_copy(update={"verdict": known})
        self._check_agreement(view, old)
        if (
            view.pipeline is None and old is not None and old.pipeline is not None
        ):  # left out, as the heartbeat has named its version
            view = view.model_copy(update={"pipeline": old.pipeline})
        self._apply_roster(view)
        if view.wall and (old is None or view.wall != old.wall):
            log.warning("this machine cannot take part now: %s", view.wall)
        self._view = view
        loop = asyncio.get_running_loop()
        self._closes_at_s = None if view.closes_in_s is None else loop.time() + view.closes_in_s
        self._changed.set()

    def _with_plans(self, view: RunView) -> RunView | None:
        """Return a view with the plan and the verdict that it refers to; None if those are not known here.

        A new plan is checked: raises ``WireError`` if the host has not signed it."""
        update: dict[str, object] = {}
        short = view.verdict_on_plan
        if short is not None:  # first, as the view may bring the plan of the round after it
            if view.verdict is not None:
                raise WireError("a view tells a verdict in two forms")
            if self._plan is None or short.plan_digest != self._plan_digest:
                return None
            try:
                update |= {"verdict": short.on(self._plan), "verdict_on_plan": None}
            except ValueError as error:
                raise WireError("a verdict does not fit the plan that it names") from error
        if view.plan is not None:
            if self._plan is None or (view.plan, view.plan_signature) != (self._plan, self._plan_signature):
                name = self.round_name(view.round)
                self._plan_digest = check_plan(name, view.plan, view.plan_signature, self.coordinator_key)
                self._plan, self._plan_signature = view.plan, view.plan_signature
        elif view.plan_digest is not None:
            if self._plan is None or (view.plan_digest, view.round) != (self._plan_digest, self._plan.round):
                return None
            update["plan"] = self._plan
        return view.model_copy(update=update) if update else view

    def _check_agreement(self, view: RunView, old: RunView | None) -> None:
        """Check that the host has signed the state of this version. Raises ``WireError`` if it has not."""
        if view.is_disputed and (old is None or not old.is_disputed):
            log.warning("the state of version %d is disputed: members replay it", view.anchor_version)
        agreement = view.agreement
        if view.state_digest is None or (agreement is None and view.anchor_version == 0):
            return
        named = (agreement.anchor_version, agreement.digest) if agreement is not None else None
        if agreement is None or named != (view.anchor_version, view.state_digest):
            raise WireError("the view names a state that the coordinator has not signed")
        if old is None or agreement != old.agreement:
            check_agreement(agreement, self.coordinator_key)

    def _apply_roster(self, view: RunView) -> None:
        """Apply a whole roster, or the changes since the version that is known here.

        Changes since another version are ignored; the answer to the next heartbeat, which names our version, has
        them."""
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
        """Remove addresses inside our private network of which the coordinator cannot know.

        A member without other addresses counts as one that cannot be reached."""
        if not entry.reachable:
            return entry
        usable = tuple(address for address in entry.addresses if may_dial(address.host, self._coordinator_reach))
        if usable == entry.addresses:
            return entry
        log.info("ignored addresses of %s that lie outside of the coordinator's network", entry.peer)
        return entry.model_copy(update={"addresses": usable} if usable else {"reachable": False})

    def is_validator(self, curve_key: bytes) -> bool:
        """Whether a transport key is of a validator, all of which the host has authorised."""
        return any(one.role == "validator" and one.certificate.curve_key == curve_key for one in self._roster.values())

    def is_trainer(self, curve_key: bytes) -> bool:
        """Whether a transport key is of a member that trains, and so may audit others."""
        return any(one.role == "trainer" and one.certificate.curve_key == curve_key for one in self._roster.values())

    def has_validators(self) -> bool:
        """Whether there is a validator, who may ask for contributions."""
        return any(one.role == "validator" for one in self._roster.values())

    def sign_score(self, score: WorkScore) -> SignedScore:
        """Sign a score as this member's."""
        signature = self.identity.sign(score.signed_bytes)
        return SignedScore(score=score, validator_key=self.identity.public_key, signature=signature)

    def sign_evaluation(self, evaluation: Evaluation) -> SignedEvaluation:
        """Sign an evaluation of the run's model as this member's."""
        signature = self.identity.sign(evaluation.signed_bytes(self.run_file.hash))
        return SignedEvaluation(evaluation=evaluation, validator_key=self.identity.public_key, signature=signature)

    def is_member(self, peer: str) -> bool:
        """Whether a peer is on the roster."""
        return peer in self._roster

    def wake(self) -> None:
        """Make ``wait_for`` test its predicate again."""
        self._changed.set()

    async def _on_view(self, channel: Channel, message: Message) -> None:
        assert isinstance(message, CoordinatorToPeerView)
        if channel is self._connector.channel and self._view is not None:
            self._apply_view(message.view)

    async def _on_superseded(self, channel: Channel, message: Message) -> None:
        if channel is self._connector.channel:
            self._superseded = True
            self._changed.set()

    # Requests ---------------------------------------------------------------------------------------------

    async def report(self, report: PeerToCoordinatorRoundReport) -> RunView:
        """Send a report on the plan that is known here; as ``ask_view``."""
        return await self.ask_view(report.model_copy(update={"plan_digest": self._plan_digest}))

    async def ask(self, message: Message, reply: type[M]) -> M:
        """Repeat a request until the coordinator answers, however long it is away. All requests are idempotent.

        Raises the coordinator's errors; ``NotAdmitted`` when this peer is not a member any more (then ``rejoin``)."""
        while True:
            try:
                answer = await self._connector.request(message, reply, self.deadlines.request_s, self.scope)
                if isinstance(answer, CoordinatorToPeerView):
                    self._apply_view(answer.view)
                    self._refuse_older(answer.view)
            except (DeadlineExceeded, Unreachable) as error:
                await self._wait_for_return(error)
                continue
            self.coordinator_is_away = False
            self._check_superseded()
            return answer

    def hold_epoch(self, epoch: int) -> None:
        """Believe no coordinator of an earlier epoch from now on, as this member has stored a verdict of this one. Its
        first view may be one of a coordinator that was paused since, and is told again by the one that leads."""
        self._least_epoch = max(self._least_epoch, epoch)
        if self._view is not None and self._view.epoch < self._least_epoch:
            self._connector.avoid()

    def _refuse_older(self, view: RunView) -> None:
        """Raise ``DeadlineExceeded`` for an answer of a coordinator that another one has followed: it was paused, and
        does not know that yet. Where it lacks a verdict, it is shown that instead, and stops."""
        if view.epoch < max(self.view.epoch, self._least_epoch) and not self._is_ahead:
            self._connector.avoid()
            raise DeadlineExceeded("this coordinator was paused, and another one leads the run by now")

    async def ask_view(self, message: Message) -> RunView:
        """Send a request whose answer is a view; returns the current view, which may be newer."""
        await self.ask(message, CoordinatorToPeerView)
        return self.view

    async def show_evidence(self, data: bytes) -> CoordinatorToPeerReceipt:
        """Show packed evidence to the coordinator, which judges it. Raises like ``ask``."""
        evidence = await in_thread(evidence_id, data)
        for start in range(0, len(data), EVIDENCE_PIECE_BYTES):
            piece = data[start : start + EVIDENCE_PIECE_BYTES]
            message = PeerToCoordinatorShowEvidence(evidence=evidence, size_bytes=len(data), start=start, data=piece)
            receipt = await self.ask(message, CoordinatorToPeerReceipt)
        log.warning("the coordinator finds by evidence %s: %s", evidence.hex()[:16], receipt.judgement)
        return receipt

    def was_away(self, since_s: float) -> bool:
        """Whether the coordinator has failed to answer at any time since ``since_s`` on the event loop's clock."""
        return self.coordinator_is_away or self._away_s > since_s

    async def _wait_for_return(self, error: LinkError) -> None:
        self._check_superseded()
        if not self.coordinator_is_away:
            log.warning("the coordinator does not answer; continuing without it until it is back: %s", error)
        self.coordinator_is_away = True
        self._away_s = asyncio.get_running_loop().time()
        await asyncio.sleep(_RETRY_S)

    async def heartbeat(self, heartbeat: PeerToCoordinatorHeartbeat) -> None:
        """Send a heartbeat. Raises like ``ask``."""
        headway, plan = heartbeat.headway, self.view.pipeline
        if plan is not None:
            headway = headway.model_copy(update={"plan_version": plan.version})
        known = {
            "roster_version": self._roster_version,
            "verdict_chain": self.view.verdict_chain,
            "plan_digest": self._plan_digest,
            "headway": headway,
            "unmet": self.node.unmet.named,
        }
        beat = heartbeat.model_copy(update=known)
        self._heartbeats_sent += 1
        number = self._heartbeats_sent
        await self.ask(beat, CoordinatorToPeerView)
        self._heartbeats_answered = max(self._heartbeats_answered, number)
        self._changed.set()
        if self._is_ahead and self.view.verdict is not None:
            await self.ask(PeerToCoordinatorShowVerdict(verdict=self.view.verdict), Acknowledged)

    def _check_superseded(self) -> None:
        if self._superseded:
            raise Superseded

    async def admit(self, curve_key: bytes) -> bool:
        """Whether a caller's key is on a roster of any of our scopes; waits for fresh rosters if it is not."""
        if curve_key == self.invite.key or self.node.knows_key(curve_key):
            return True
        async with task_scope() as tasks:
            asked = [tasks.create_task(client._await_key(curve_key)) for client in self._clients]
            for found in asyncio.as_completed(asked):
                if await found:
                    break
            for task in asked:
                task.cancel()
        return self.node.knows_key(curve_key)

    async def _await_key(self, curve_key: bytes) -> bool:
        """Wait for a roster sent after this call: that in the answer to the next heartbeat, which may be late.

        After ``dead_s`` without an answer this peer counts as dead itself."""
        if self._view is not None:
            number = self._heartbeats_sent + 1
            await self.wait_for(
                lambda view: self.node.knows_key(curve_key) or self._heartbeats_answered >= number,
                self.deadlines.dead_s,
            )
        return self.node.knows_key(curve_key)
