"""What members of one scope ask the coordinator, answered by its machine: each event under the service's lock, and told
once it is in the journal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.swarm.control import Channel
from shoal.swarm.coordinator.history import read_page
from shoal.swarm.coordinator.machine import RunMachine
from shoal.swarm.coordinator.outdated import check_ours
from shoal.swarm.coordinator.pipeline import PipelineMachine
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.errors import LinkError, NotAdmitted, UnknownRun
from shoal.swarm.identity import verify_certificate
from shoal.swarm.links import in_thread
from shoal.swarm.messages import (
    Acknowledged,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerView,
    Message,
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
from shoal.swarm.sockets import look_up

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
        self.service = service
        for kind, handler in self.requests().items():
            service.node.control.handle(kind, handler, scope)

    def requests(self) -> dict[type[Message], Handler]:
        """Who answers what."""
        return {
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
        view = self.machine.view(peer, time.monotonic(), roster_version, chain)
        self.known[peer] = view.roster_version, chain
        return CoordinatorToPeerView(view=view)

    def forget_those_that_left(self) -> None:
        """Observers that have left."""
        for peer in self.known.keys() - self.machine.membership.members.keys():
            del self.known[peer]

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

    async def _join(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorJoinRun)
        name = self.machine.run.run.name
        if message.run != name:
            raise UnknownRun(f"this coordinator hosts the run {name!r}, not {message.run!r}: check the invite")
        peer = verify_certificate(message.certificate)
        if message.certificate.curve_key != channel.remote_key:
            raise NotAdmitted("the certificate is for another connection's key")
        entry = await self.entry_of(peer, channel, message)
        self.machine.refuse_replaced(channel.remote_key)
        await self._retire_earlier(peer, channel.remote_key)
        async with self.service.lock:
            self.admit(entry, message)
            await self.service.flush()
            self.known.pop(peer, None)
            return CoordinatorToPeerJoinAccepted(
                peer=peer,
                run_toml=self.service.run_toml,
                run_hash=self.machine.run.hash,
                coordinator=self.service.certificate,
                observed_host=channel.remote_host,
                reachable=entry.reachable,
                view=self.view(peer).view,
            )

    def admit(self, entry: RosterEntry, message: PeerToCoordinatorJoinRun) -> None:
        self.machine.join(entry, message.device, time.monotonic())

    async def entry_of(self, peer: str, channel: Channel, message: PeerToCoordinatorJoinRun) -> RosterEntry:
        """What others have to know of who joins."""
        entry = RosterEntry(
            peer=peer,
            certificate=message.certificate,
            name=message.name,
            role=message.role,
            host=await look_up(message.host, message.control_port, _DIAL_BACK_S) or channel.remote_host,
            control_port=message.control_port,
            data_port=message.data_port,
            reachable=False,
        )
        return entry.model_copy(update={"reachable": await self._is_reachable(entry)})

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
