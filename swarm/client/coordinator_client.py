"""A member's side of the coordinator: join, heartbeat, the current view, and requests that outlive its absence."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shoal.swarm.client.coordinator_line import Line
from shoal.swarm.deadlines import CONNECT_S, Deadlines
from shoal.swarm.errors import DeadlineExceeded, LinkError, Superseded, TryLater, Unreachable
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    MAX_TROUBLE,
    Acknowledged,
    Certificate,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerView,
    DeviceInfo,
    LeaveReason,
    Message,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorShowVerdict,
    Role,
    RosterEntry,
    RunView,
)
from shoal.swarm.protocol.published_run import PublishedRun, check_hash, fetch_run
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.verdict_chain import check_verdict
from shoal.swarm.tasks import task_scope
from shoal.swarm.transport.addresses import Reach, least_reach, may_dial
from shoal.swarm.transport.control import Channel
from shoal.swarm.transport.sockets import SILENCE_S, all_addresses
from shoal.swarm.transport.transport import Node

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
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
        self._line = Line(node.control, invite)
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
        client._line, client._clients, client._run = self._line, self._clients, self._run
        self._clients.append(client)
        return client

    # Joining ----------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Get the run file, the first time, and become a member if it is the invite's.

        Raises ``Unreachable``, ``WrongKey``, ``UnknownRun``, ``RunChanged``, ``ProtocolMismatch``, ``RunEnded``, …"""
        if self._run is None:
            self._run = await fetch_run(self._line, self.invite)
        control, data = self.me.ports or (self.node.control_port, self.node.data_port)
        ask = PeerToCoordinatorJoinRun(
            run=self.invite.run,
            certificate=self._certificate,
            name=self.me.name,
            role=self.me.role,
            device=self.me.device,
            host=self.me.host,
            control_port=control,
            data_port=data,
        )
        answer = await self._line.request_anywhere(ask, CoordinatorToPeerJoinAccepted, CONNECT_S, JOIN_S, self.scope)
        check_hash(answer.run_hash, self.invite)
        self.reachable = answer.reachable
        assert self._line.channel is not None
        host = self._line.channel.remote_host
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
            await self._line.request(goodbye, Acknowledged, _LEAVE_S, self.scope)
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
        """As somebody who cannot be reached, where its address would have us connect to something in our own network
        that the coordinator cannot know."""
        if not entry.reachable or may_dial(entry.host, self._coordinator_reach):
            return entry
        log.info("%s is not called at %s, which is not in the coordinator's network", entry.peer, entry.host)
        return entry.model_copy(update={"reachable": False})

    def wake(self) -> None:
        """Make ``wait_for`` look again."""
        self._changed.set()

    async def _on_view(self, channel: Channel, message: Message) -> None:
        assert isinstance(message, CoordinatorToPeerView)
        if channel is self._line.channel and self._view is not None:
            self._take(message.view)

    async def _on_superseded(self, channel: Channel, message: Message) -> None:
        if channel is self._line.channel:
            self._superseded = True
            self._changed.set()

    # Requests ---------------------------------------------------------------------------------------------

    async def ask(self, message: Message, reply: type[M]) -> M:
        """Repeat until the coordinator answers, however long it is away. All requests are idempotent.

        Raises its typed errors; ``NotAdmitted`` when it does not know us any more (``rejoin`` then).
        """
        while True:
            try:
                answer = await self._line.request(message, reply, self.deadlines.request_s, self.scope)
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
