"""What members of one scope ask the coordinator, answered by its machine: each event under the service's lock, and told
once it is in the journal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.swarm.coordinator.history import read_page
from shoal.swarm.coordinator.machine import RunMachine
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.outdated import check_ours
from shoal.swarm.coordinator.pipeline import PipelineMachine
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.errors import LinkError, NotAdmitted, UnknownRun
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerRun,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerView,
    Message,
    PeerToCoordinatorGetRun,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorShowVerdict,
    PeerToPeerPing,
    PeerToPeerPong,
    RosterEntry,
    Verdict,
)
from shoal.swarm.transport.addresses import may_name, network_of, plain_text
from shoal.swarm.transport.control import Channel
from shoal.swarm.transport.links import in_thread
from shoal.swarm.transport.sockets import look_up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shoal.swarm.coordinator.service import CoordinatorService

log = logging.getLogger(__name__)

_DIAL_BACK_S = 2.0

M = TypeVar("M", bound=RunMachine | PipelineMachine | StageMachine)
Handler = Callable[[Channel, Message], Coroutine[Any, Any, Message]]


class Door(Generic[M]):
    """One scope's. What kinds of scopes there are is in ``doors.py``."""

    def __init__(self, service: CoordinatorService, machine: M, scope: int) -> None:
        self.machine = machine
        self.scope = scope
        self.known: dict[str, tuple[int, bytes | None]] = {}
        """What each member has: the version of the roster, as it said itself or as it was sent, and the chain of the
        verdict, as it said itself, for what was sent may get lost."""
        self._whole_roster_from_s: dict[str, float] = {}
        """Who was sent a whole roster gets the next one not before this moment, whatever version it says to have."""
        self._told_from_s: dict[str, float] = {}
        self.service = service
        for kind, handler in self.requests().items():
            service.node.control.handle(kind, handler, scope)

    def requests(self) -> dict[type[Message], Handler]:
        """Who answers what."""
        return {
            PeerToCoordinatorGetRun: self._run_file,
            PeerToCoordinatorJoinRun: self._join,
            PeerToCoordinatorHeartbeat: self._heartbeat,
            PeerToCoordinatorLeave: self._leave,
            PeerToCoordinatorGetStatus: self._status,
            PeerToCoordinatorGetVerdicts: self._history,
        }

    @asynccontextmanager
    async def event(self, channel: Channel) -> AsyncIterator[str]:
        """The member that asks; what it causes is journaled before it is answered. Raises ``NotAdmitted``."""
        async with self.service.lock:
            yield self.machine.require_member(channel.remote_key)
            await self.service.flush()

    @asynccontextmanager
    async def small_event(self, channel: Channel) -> AsyncIterator[str]:
        """The same for what very many ask for: whoever waits for the lock meanwhile has asked too when it is our turn
        again, and there is one write for all of them."""
        async with self.service.lock:
            yield self.machine.require_member(channel.remote_key)
        async with self.service.lock:
            await self.service.flush()

    def view(self, peer: str) -> CoordinatorToPeerView:
        """With the roster, if the member lacks it. Should it get lost, the next heartbeat says so."""
        roster_version, chain = self.known.get(peer, (-1, None))
        now_s = time.monotonic()
        view = self.machine.view(peer, now_s, roster_version, chain)
        if view.roster is not None:
            if now_s < self._whole_roster_from_s.get(peer, 0.0):
                return CoordinatorToPeerView(view=view.model_copy(update={"roster": None}))
            self._whole_roster_from_s[peer] = now_s + self.machine.deadlines.heartbeat_s
        self.known[peer] = view.roster_version, chain
        return CoordinatorToPeerView(view=view)

    def is_due(self, peer: str, member: Member) -> bool:
        """Whether to tell it of a change. A member that has not begun with anything has its heartbeats' answers, and is
        told no more often than that: newcomers cost little until they work."""
        now_s = time.monotonic()
        if member.has_begun or now_s >= self._told_from_s.get(peer, 0.0):
            self._told_from_s[peer] = now_s + self.machine.deadlines.heartbeat_s
            return True
        return False

    def forget_those_that_left(self) -> None:
        """Whom the run has forgotten."""
        members = self.machine.membership.members
        for peer in (self.known.keys() | self._whole_roster_from_s.keys() | self._told_from_s.keys()) - members.keys():
            for kept in (self.known, self._whole_roster_from_s, self._told_from_s):
                kept.pop(peer, None)

    def go_on_if_complete(self, is_complete: bool) -> None:
        """Nobody is left to be heard: no need to wait for the next tick."""
        if is_complete:
            self.service.machine.tick(time.monotonic())

    def heard(self) -> None:
        """A member has said how it is: what need not wait for the next tick."""

    async def shown(
        self, channel: Channel, message: PeerToCoordinatorShowVerdict, take_over: Callable[[Verdict], bool]
    ) -> Message:
        """A verdict that this journal may lack. Without it we must not go on."""
        async with self.event(channel):
            check_ours(message.verdict, self.machine.run.hash, self.service.identity.public_key)
            if not take_over(message.verdict):
                self.service.is_outdated(message.verdict)
        return Acknowledged()

    # Requests ---------------------------------------------------------------------------------------------

    async def _run_file(self, channel: Channel, message: Message) -> Message:
        """For anybody, at no cost: neither the lock nor the journal is needed."""
        assert isinstance(message, PeerToCoordinatorGetRun)
        self._require_name(message.run)
        service = self.service
        return CoordinatorToPeerRun(
            run_toml=service.run_toml, run_hash=self.machine.run.hash, coordinator=service.certificate
        )

    def _require_name(self, run: str) -> None:
        name = self.machine.run.run.name
        if run != name:
            raise UnknownRun(f"this coordinator hosts the run {name!r}, not {run!r}: check the invite")

    async def _join(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorJoinRun)
        self._require_name(message.run)
        if message.certificate.curve_key != channel.remote_key:
            raise NotAdmitted("the certificate is for another connection's key")
        with self.joining(channel, message) as peer:
            return await self._admit(peer, channel, message)

    def joining(self, channel: Channel, message: PeerToCoordinatorJoinRun) -> AbstractContextManager[str]:
        """While somebody joins: who it is. Raises whatever keeps it out, before anything is done for it."""
        network = network_of(channel.remote_host)
        return self.machine.joining(message.certificate, message.role, network, time.monotonic())

    async def _admit(self, peer: str, channel: Channel, message: PeerToCoordinatorJoinRun) -> Message:
        entry = await self.entry_of(peer, channel, message)
        self.machine.refuse_replaced(channel.remote_key)
        await self._retire_earlier(peer, channel.remote_key)
        async with self.service.lock:
            self.admit(entry, message, network_of(channel.remote_host))
            await self.service.flush()
            self.known.pop(peer, None)
            self._whole_roster_from_s.pop(peer, None)  # joins have limits of their own
            return CoordinatorToPeerJoinAccepted(
                peer=peer,
                run_hash=self.machine.run.hash,
                observed_host=plain_text(channel.remote_host),
                reachable=entry.reachable,
                view=self.view(peer).view,
            )

    def admit(self, entry: RosterEntry, message: PeerToCoordinatorJoinRun, network: str) -> None:
        self.machine.join(entry, message.device, time.monotonic(), network)

    async def entry_of(self, peer: str, channel: Channel, message: PeerToCoordinatorJoinRun) -> RosterEntry:
        """What others have to know of who joins."""
        entry = RosterEntry(
            peer=peer,
            certificate=message.certificate,
            name=message.name,
            role=message.role,
            host=await self._address_of(channel, message),
            control_port=message.control_port,
            data_port=message.data_port,
            reachable=False,
        )
        return entry.model_copy(update={"reachable": await self._is_reachable(entry)})

    async def _address_of(self, channel: Channel, message: PeerToCoordinatorJoinRun) -> str:
        """The one that it names, if it may name that; a name is looked up once, and the address is what counts. Raises
        ``NotAdmitted``."""
        observed = plain_text(channel.remote_host)
        if message.role == "observer":
            return observed  # nobody calls it
        named = plain_text(await look_up(message.host, message.control_port, _DIAL_BACK_S) or observed)
        if may_name(named, observed):
            return named
        what = named if named == message.host else f"{message.host} ({named})"
        raise NotAdmitted(
            f"this machine cannot be known as {what}, as it comes from {observed}: an address that is not "
            "public must be the one that it comes from. Leave out --advertise, or give it a public address"
        )

    async def _is_reachable(self, entry: RosterEntry) -> bool:
        """Dial back: whether others can open connections to this member."""
        if entry.role == "observer":
            return False
        control, channel = self.service.node.control, None
        try:
            channel = control.dial(entry.host, entry.control_port, entry.certificate.curve_key)
            await channel.connected(_DIAL_BACK_S)
            await channel.request(PeerToPeerPing(), PeerToPeerPong, _DIAL_BACK_S)
        except LinkError as error:
            log.info("%s (%s) cannot be reached: %s", entry.name, entry.peer, error)
            return False
        finally:
            if channel is not None:
                control.hang_up(channel)
        return True

    async def _retire_earlier(self, peer: str, new_key: bytes) -> None:
        earlier = self.machine.membership.members.get(peer)
        if earlier is not None and earlier.alive and earlier.entry.certificate.curve_key != new_key:
            channel = self.service.node.control.incoming(earlier.entry.certificate.curve_key)
            if channel is not None:
                await self.service.notify(channel, CoordinatorToPeerSuperseded(), self.scope)

    async def _heartbeat(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorHeartbeat)
        async with self.service.lock:
            peer = self.machine.require_member(channel.remote_key)
            self.machine.heartbeat(peer, message, time.monotonic())
            self.heard()
            await self.service.flush()
            self.known[peer] = message.roster_version, message.verdict_chain
            return self.view(peer)

    async def _leave(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorLeave)
        async with self.event(channel) as peer:
            self.machine.leave(peer, message.reason, time.monotonic(), message.trouble)
            self.service.machine.tick(time.monotonic())
        return Acknowledged()

    async def _status(self, channel: Channel, message: Message) -> Message:
        async with self.service.lock:
            self.machine.require_member(channel.remote_key)
            return self.machine.status(time.monotonic())

    async def _history(self, channel: Channel, message: Message) -> Message:
        """From the journal, beside everything else: what is in it never changes."""
        assert isinstance(message, PeerToCoordinatorGetVerdicts)
        self.machine.require_member(channel.remote_key)
        async with self.service.reading:  # one page at a time: rounds go before history
            return await in_thread(read_page, self.service.journal, message.first, self.scope or None)
