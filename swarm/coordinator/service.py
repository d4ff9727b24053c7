"""The coordinator as a program: sockets, a clock and the journal around the pure machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from shoal.swarm.control import Channel
from shoal.swarm.coordinator.facts import Fact, VerdictGiven
from shoal.swarm.coordinator.history import read_page
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.leases import to_wire
from shoal.swarm.coordinator.machine import RunMachine
from shoal.swarm.coordinator.outdated import check_ours
from shoal.swarm.errors import DeadlineExceeded, LinkError, NotAdmitted, StorageError, UnknownRun
from shoal.swarm.identity import Identity, verify_certificate
from shoal.swarm.links import in_thread
from shoal.swarm.messages import (
    Acknowledged,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    CoordinatorToPeerStatus,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerView,
    Message,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorShowVerdict,
    PeerToPeerPing,
    PeerToPeerPong,
    RosterEntry,
)
from shoal.swarm.run_file import RunFile
from shoal.swarm.sockets import look_up
from shoal.swarm.tasks import task_scope
from shoal.swarm.transport import Node

log = logging.getLogger(__name__)

_DIAL_BACK_S = 2.0
_TICK_S = 0.1
_STOPS = "the coordinator cannot go on from its journal, and stops"

M = TypeVar("M", bound=Message)


class CoordinatorService:
    """Answers the members of one run. Make it with ``serve``; ``wait`` raises when the journal fails."""

    def __init__(self, run_toml: str, run: RunFile, identity: Identity, node: Node, journal: Journal) -> None:
        self.identity = identity
        self.node = node
        self._run_toml = run_toml
        self._journal = journal
        self._certificate = identity.certify(node.control.keys)
        self._epoch = time.time_ns()
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._announced = -1
        self._known: dict[str, tuple[int, bytes | None]] = {}
        """What each member has: the version of the roster, as it said itself or as it was sent, and the chain of the
        verdict, as it said itself, for what was sent may get lost."""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observers: list[Callable[[Fact], None]] = []
        self.machine = RunMachine(run, identity.sign, time.monotonic(), self._epoch)
        self.machine.replay(journal.read(), time.monotonic())
        self.machine.begin()
        self._set_clock()
        self._register()

    @classmethod
    @asynccontextmanager
    async def serve(
        cls, run_toml: str, run: RunFile, identity: Identity, address: tuple[str, int], journal: Journal
    ) -> AsyncIterator[CoordinatorService]:
        """Listen on ``address`` until the context ends."""

        async def admit(key: bytes) -> bool:
            return True  # strangers may ask to join; every other handler looks the key up

        async with Node.open(identity.coordinator_keys(), address[0], (address[1], None), admit) as node:
            service = cls(run_toml, run, identity, node, journal)
            async with task_scope() as tasks:
                loops = [tasks.create_task(service._tick()), tasks.create_task(service._push())]
                try:
                    yield service
                finally:
                    for task in loops:
                        task.cancel()

    async def wait(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set; raises ``StorageError`` when the journal cannot be written any more."""
        self._broken.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if self._broken.done():
            await self._broken

    def observe(self, observer: Callable[[Fact], None]) -> None:
        """Call ``observer`` with every fact once it is in the journal."""
        self._observers.append(observer)

    # Events, one at a time --------------------------------------------------------------------------------

    async def _flush(self) -> None:
        """Journal first, then tell. A coordinator that cannot journal must not go on.

        Members hear ``DeadlineExceeded`` then, as if it were gone already: they go on without it until it is back."""
        if self._broken.done():  # facts were lost with it: what the machine says now may not be in the journal
            raise DeadlineExceeded(_STOPS)
        facts = self.machine.take_facts()
        if facts:
            try:
                await in_thread(self._journal.write, facts)  # never cut short: the journal is closed next
            except StorageError as error:
                if not self._broken.done():
                    self._broken.set_exception(error)
                raise DeadlineExceeded(_STOPS) from error
            for fact in facts:
                for observer in self._observers:
                    observer(fact)
        if self.machine.announcements != self._announced:
            self._announced = self.machine.announcements
            self._changed.set()
            for peer in self._known.keys() - self.machine.membership.members.keys():  # observers that have left
                del self._known[peer]
        ended = any(isinstance(fact, VerdictGiven) for fact in facts)
        if ended and self._journal.has_grown and (snapshot := self.machine.snapshot()) is not None:
            await in_thread(self._journal.compact, snapshot)  # nobody waits for us when a round has just begun

    async def _tick(self) -> None:
        while not self._broken.done():
            async with self._lock:
                self._set_clock()
                self.machine.tick(time.monotonic())
                with suppress(DeadlineExceeded):
                    await self._flush()
            await asyncio.sleep(_TICK_S)

    def _set_clock(self) -> None:
        """Again and again: the one clock stands while the machine sleeps, the other one is set by people."""
        self.machine.unix_offset_s = time.time() - time.monotonic()

    async def _push(self) -> None:
        """Tell everybody, at once when the round goes on.

        Who came or went can wait as long as telling it takes: not each of a thousand joins costs a thousand rosters."""
        loop = asyncio.get_running_loop()
        told, pause_until_s = (-1, ""), 0.0
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._stage() == told and loop.time() < pause_until_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(pause_until_s):
                        await self._changed.wait()
                self._changed.clear()
            told, start_s = self._stage(), loop.time()
            for peer, member in list(self.machine.membership.members.items()):
                channel = self.node.control.incoming(member.entry.certificate.curve_key)
                if member.alive and channel is not None:
                    await self._notify(channel, self._view(peer))
            pause_until_s = 2 * loop.time() - start_s

    def _stage(self) -> tuple[int, str]:
        return self.machine.round.number, self.machine.round.phase

    async def _notify(self, channel: Channel, message: Message) -> None:
        try:
            async with asyncio.timeout(1.0):
                await channel.notify(message)
        except (LinkError, TimeoutError) as error:
            log.debug("could not tell %s: %s", channel.label, error)

    def _view(self, peer: str) -> CoordinatorToPeerView:
        """With the roster, if the member lacks it. Should it get lost, the next heartbeat says so."""
        roster_version, chain = self._known.get(peer, (-1, None))
        view = self.machine.view(peer, time.monotonic(), roster_version, chain)
        self._known[peer] = view.roster_version, chain
        return CoordinatorToPeerView(view=view)

    # Requests ---------------------------------------------------------------------------------------------

    def _register(self) -> None:
        handle = self.node.control.handle
        handle(PeerToCoordinatorJoinRun, self._join)
        handle(PeerToCoordinatorDescribeModel, self._describe)
        handle(PeerToCoordinatorHeartbeat, self._heartbeat)
        handle(PeerToCoordinatorRequestLease, self._lease)
        handle(PeerToCoordinatorRoundReady, self._ready)
        handle(PeerToCoordinatorRoundReport, self._report)
        handle(PeerToCoordinatorLeave, self._leave)
        handle(PeerToCoordinatorShowVerdict, self._shown)
        handle(PeerToCoordinatorGetStatus, self._status)
        handle(PeerToCoordinatorGetVerdicts, self._history)

    async def _join(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorJoinRun)
        name = self.machine.run.run.name
        if message.run != name:
            raise UnknownRun(f"this coordinator hosts the run {name!r}, not {message.run!r}: check the invite")
        peer = verify_certificate(message.certificate)
        if message.certificate.curve_key != channel.remote_key:
            raise NotAdmitted("the certificate is for another connection's key")
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
        entry = entry.model_copy(update={"reachable": await self._is_reachable(entry)})
        self.machine.refuse_replaced(channel.remote_key)
        await self._retire_earlier(peer, channel.remote_key)
        async with self._lock:
            self.machine.join(entry, message.device, time.monotonic())
            await self._flush()
            self._known.pop(peer, None)
            return CoordinatorToPeerJoinAccepted(
                peer=peer,
                run_toml=self._run_toml,
                run_hash=self.machine.run.hash,
                coordinator=self._certificate,
                observed_host=channel.remote_host,
                reachable=entry.reachable,
                view=self._view(peer).view,
            )

    async def _is_reachable(self, entry: RosterEntry) -> bool:
        """Dial back: whether others can open connections to this member."""
        if entry.role == "observer":
            return False
        channel = None
        try:
            channel = self.node.control.dial(entry.host, entry.control_port, entry.certificate.curve_key)
            await channel.connected(_DIAL_BACK_S)
            await channel.request(PeerToPeerPing(), PeerToPeerPong, _DIAL_BACK_S)
        except LinkError as error:
            log.info("%s (%s) cannot be reached: %s", entry.name, entry.peer, error)
            return False
        finally:
            if channel is not None:
                self.node.control.hang_up(channel)
        return True

    async def _retire_earlier(self, peer: str, new_key: bytes) -> None:
        earlier = self.machine.membership.members.get(peer)
        if earlier is not None and earlier.alive and earlier.entry.certificate.curve_key != new_key:
            channel = self.node.control.incoming(earlier.entry.certificate.curve_key)
            if channel is not None:
                await self._notify(channel, CoordinatorToPeerSuperseded())

    async def _describe(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorDescribeModel)
        async with self._lock:
            peer = self.machine.require_member(channel.remote_key)
            self.machine.describe_model(peer, message)
            await self._flush()
        return CoordinatorToPeerModelAccepted()

    async def _heartbeat(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorHeartbeat)
        async with self._lock:
            peer = self.machine.require_member(channel.remote_key)
            self.machine.heartbeat(peer, message, time.monotonic())
            await self._flush()
            self._known[peer] = message.roster_version, message.verdict_chain
            return self._view(peer)

    async def _lease(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRequestLease)
        async with self._lock:
            peer = self.machine.require_member(channel.remote_key)
            ranges = self.machine.request_lease(peer, message, time.monotonic())
        # Whoever waited for the lock meanwhile has asked too when it is our turn again: one write for all of them.
        async with self._lock:
            await self._flush()
        return CoordinatorToPeerLease(ranges=to_wire(ranges))

    async def _ready(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRoundReady)
        async with self._lock:
            peer = self.machine.require_member(channel.remote_key)
            self.machine.ready(peer, message, time.monotonic())
            if self.machine.is_complete():
                self.machine.tick(time.monotonic())
            await self._flush()
            return self._view(peer)

    async def _report(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRoundReport)
        async with self._lock:
            peer = self.machine.require_member(channel.remote_key)
            self.machine.report(peer, message, time.monotonic())
            if self.machine.is_complete():
                self.machine.tick(time.monotonic())
            await self._flush()
            return self._view(peer)

    async def _leave(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorLeave)
        async with self._lock:
            peer = self.machine.require_member(channel.remote_key)
            self.machine.leave(peer, message.reason, time.monotonic())
            self.machine.tick(time.monotonic())
            await self._flush()
        return Acknowledged()

    async def _shown(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorShowVerdict)
        verdict = message.verdict
        async with self._lock:
            self.machine.require_member(channel.remote_key)
            check_ours(verdict, self.machine.run.hash, self.identity.public_key)
            if not self.machine.take_over(verdict, time.monotonic()) and not self._broken.done():
                self._broken.set_exception(self._journal.is_outdated(verdict.round))
            await self._flush()
        return Acknowledged()

    async def _status(self, channel: Channel, message: Message) -> Message:
        async with self._lock:
            self.machine.require_member(channel.remote_key)
            status: CoordinatorToPeerStatus = self.machine.status(time.monotonic())
        return status

    async def _history(self, channel: Channel, message: Message) -> Message:
        """From the journal, beside everything else: what is in it never changes."""
        assert isinstance(message, PeerToCoordinatorGetVerdicts)
        self.machine.require_member(channel.remote_key)
        async with self._reading:  # one page at a time: rounds go before history
            return await in_thread(read_page, self._journal, message.first)
