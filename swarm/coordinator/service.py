"""The coordinator as a program: sockets, a clock and the journal around the pure machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.coordinator.events import JournalEvent, verdicts_in
from shoal.swarm.coordinator.history_reader import HistoryReader
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.placement import Planner, planner_of
from shoal.swarm.coordinator.run import PlainRun
from shoal.swarm.coordinator.stage_scope import StageScope
from shoal.swarm.coordinator.stale_journal import check_ours, is_known, stale_journal_error
from shoal.swarm.errors import DeadlineExceeded, LinkError, NotAdmitted, StorageError, UnknownRun
from shoal.swarm.protocol.addresses import may_name, network_of, plain_host
from shoal.swarm.protocol.identity import Identity, verify_certificate
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerClaimed,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    CoordinatorToPeerRun,
    CoordinatorToPeerSuperseded,
    CoordinatorToPeerView,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorGetRun,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorLeave,
    PeerToCoordinatorRelease,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorShowCapability,
    PeerToCoordinatorShowVerdict,
    PeerToPeerPing,
    PeerToPeerPong,
)
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import Address, Message, RosterEntry
from shoal.swarm.sample_ranges import Ranges, to_wire
from shoal.swarm.transport.channel import Channel
from shoal.swarm.transport.node import Node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

log = logging.getLogger(__name__)


# Handlers of every scope ------------------------------------------------------------------------------------

_DIAL_BACK_S = 2.0

M = TypeVar("M", bound=PlainRun | PipelineRun | StageScope)
Handler = Callable[[Channel, Message], Coroutine[Any, Any, Message]]


class ScopeHandlers(Generic[M]):
    """Answers to what members ask in one scope: a run, a pipeline run, or one of its stages."""

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
        """Return which method answers which message."""
        return {
            PeerToCoordinatorGetRun: self._run_file,
            PeerToCoordinatorJoinRun: self._join,
            PeerToCoordinatorHeartbeat: self._heartbeat,
            PeerToCoordinatorLeave: self._leave,
            PeerToCoordinatorGetStatus: self._status,
            PeerToCoordinatorGetVerdicts: self._history,
            PeerToCoordinatorDescribeModel: self._describe,
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
                observed_host=plain_host(channel.remote_host),
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
            addresses=_addresses_of(channel, message),
            reachable=False,
        )
        return entry.model_copy(update={"reachable": await self._is_reachable(entry)})

    async def _is_reachable(self, entry: RosterEntry) -> bool:
        """Dial back: whether others can open connections to this member."""
        if entry.role == "observer":
            return False
        control, channel = self.service.node.control, None
        try:
            channel = control.dial(entry.address.host, entry.address.control_port, entry.certificate.curve_key)
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

    def describe(self, peer: str, message: PeerToCoordinatorDescribeModel) -> None:
        """Take down what a member says of the scope's model."""
        self.machine.describe_model(peer, message)

    async def _describe(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorDescribeModel)
        async with self.event(channel) as peer:
            self.describe(peer, message)
        return CoordinatorToPeerModelAccepted()

    async def _status(self, channel: Channel, message: Message) -> Message:
        async with self.service.lock:
            self.machine.require_member(channel.remote_key)
            return self.machine.status(time.monotonic())

    async def _history(self, channel: Channel, message: Message) -> Message:
        """From the journal, beside everything else: what is in it never changes."""
        assert isinstance(message, PeerToCoordinatorGetVerdicts)
        peer = self.machine.require_member(channel.remote_key)
        is_guest = self.machine.membership.members[peer].entry.role == "observer"
        return await self.service.history.page(peer, message.first, self.scope or None, is_guest=is_guest)


# Handlers of one kind of scope ------------------------------------------------------------------------------


async def _ready(
    handlers: ScopeHandlers[PlainRun] | ScopeHandlers[StageScope], channel: Channel, message: Message
) -> Message:
    assert isinstance(message, PeerToCoordinatorRoundReady)
    async with handlers.event(channel) as peer:
        handlers.machine.ready(peer, message, time.monotonic())
        handlers.go_on_if_complete(handlers.machine.is_complete())
    return handlers.view(peer)


async def _report(
    handlers: ScopeHandlers[PlainRun] | ScopeHandlers[StageScope], channel: Channel, message: Message
) -> Message:
    assert isinstance(message, PeerToCoordinatorRoundReport)
    async with handlers.event(channel) as peer:
        handlers.machine.report(peer, message, time.monotonic())
        handlers.go_on_if_complete(handlers.machine.is_complete())
    return handlers.view(peer)


class RunHandlers(ScopeHandlers[PlainRun]):
    """Answers of a run that is one scope."""

    def requests(self) -> dict[type[Message], Handler]:
        return super().requests() | {
            PeerToCoordinatorRequestLease: self._lease,
            PeerToCoordinatorRoundReady: lambda channel, message: _ready(self, channel, message),
            PeerToCoordinatorRoundReport: lambda channel, message: _report(self, channel, message),
            PeerToCoordinatorShowVerdict: self._shown,
        }

    async def _lease(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRequestLease)
        async with self.small_event(channel) as peer:
            ranges = self.machine.request_lease(peer, message, time.monotonic())
        return CoordinatorToPeerLease(ranges=to_wire(ranges))

    async def _shown(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorShowVerdict)
        return await self.shown(channel, message, lambda verdict: self.machine.take_over(verdict, time.monotonic()))


class PipelineHandlers(ScopeHandlers[PipelineRun]):
    """Answers of a pipeline run: its peers, what they can do and what they drive."""

    def __init__(self, service: CoordinatorService, machine: PipelineRun, scope: int) -> None:
        super().__init__(service, machine, scope)
        self._assembled = asyncio.Event()
        self._assembled.set()

    def requests(self) -> dict[type[Message], Handler]:
        return super().requests() | {
            PeerToCoordinatorShowCapability: self._capability,
            PeerToCoordinatorDrive: self._drive,
        }

    async def _capability(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorShowCapability)
        async with self.event(channel) as peer:
            self.machine.show_capability(peer, message, time.monotonic())
        return Acknowledged()

    async def _drive(self, channel: Channel, message: Message) -> Message:
        """A driver that is early has its answer when the last stage has somebody, as it would ask again too late."""
        assert isinstance(message, PeerToCoordinatorDrive)
        ranges = await self._given(channel, message)
        if not ranges and message.round == self.machine.round_number and not self.machine.is_assembled():
            self._assembled.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.machine.deadlines.heartbeat_s):
                    await self._assembled.wait()
            ranges = await self._given(channel, message)
        return CoordinatorToPeerLease(ranges=to_wire(ranges))

    async def _given(self, channel: Channel, message: PeerToCoordinatorDrive) -> Ranges:
        async with self.small_event(channel) as peer:
            return self.machine.drive(peer, message, time.monotonic())

    def look_whether_assembled(self) -> None:
        """Somebody in a stage has said how it is."""
        if not self._assembled.is_set() and self.machine.is_assembled():
            self._assembled.set()


class StageHandlers(ScopeHandlers[StageScope]):
    """Answers of one stage of a pipeline run."""

    def __init__(self, run: PipelineHandlers, machine: StageScope) -> None:
        self._run = run
        super().__init__(run.service, machine, machine.scope)

    def requests(self) -> dict[type[Message], Handler]:
        return super().requests() | {
            PeerToCoordinatorClaim: self._claim,
            PeerToCoordinatorRelease: self._release,
            PeerToCoordinatorRoundReady: lambda channel, message: _ready(self, channel, message),
            PeerToCoordinatorRoundReport: lambda channel, message: _report(self, channel, message),
            PeerToCoordinatorShowVerdict: self._shown,
        }

    def heard(self) -> None:
        self._run.look_whether_assembled()
        self.go_on_if_complete(self.machine.is_batch_done())

    async def entry_of(self, peer: str, channel: Channel, message: PeerToCoordinatorJoinRun) -> RosterEntry:
        """As it is known in the run."""
        member = self._run.machine.membership.members.get(peer)
        if member is None or member.entry.certificate.curve_key != channel.remote_key:
            raise NotAdmitted("not a member of this run (any more): join it before its stages")
        return member.entry

    def joining(self, channel: Channel, message: PeerToCoordinatorJoinRun) -> AbstractContextManager[str]:
        """Only members of the run do, so that has been asked already."""
        return nullcontext(verify_certificate(message.certificate))

    def admit(self, entry: RosterEntry, message: PeerToCoordinatorJoinRun, network: str) -> None:
        self._run.machine.join_stage(self.scope, entry, message.device, time.monotonic())

    def describe(self, peer: str, message: PeerToCoordinatorDescribeModel) -> None:
        self._run.machine.describe_stage(self.scope, peer, message)

    async def _claim(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorClaim)
        async with self.small_event(channel) as peer:
            ranges = self.machine.claim(peer, message, time.monotonic())
        return CoordinatorToPeerClaimed(ranges=to_wire(ranges))

    async def _release(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRelease)
        async with self.small_event(channel) as peer:
            self.machine.release(peer, message, time.monotonic())
        return Acknowledged()

    async def _shown(self, channel: Channel, message: Message) -> Message:
        """Those of the other stages that belong to it are not known, so it cannot be taken over."""
        assert isinstance(message, PeerToCoordinatorShowVerdict)
        return await self.shown(channel, message, lambda verdict: is_known(self.machine, verdict))


# The program ------------------------------------------------------------------------------------------------

_TICK_S = 0.1
_STOPS = "the coordinator cannot go on from its journal, and stops"


class CoordinatorService:
    """Answers the members of one run. Make it with ``serve``; ``wait`` raises when the journal fails."""

    def __init__(
        self, run_toml: str, run: RunFile, identity: Identity, node: Node, journal: Journal, epoch: int
    ) -> None:
        self.identity = identity
        self.node = node
        self.run_toml = run_toml
        self.journal = journal
        self.certificate = identity.certify(node.control.keys)
        self.lock = asyncio.Lock()
        self.history = HistoryReader(journal)
        self._changed = asyncio.Event()
        self._may_plan = asyncio.Event()
        self._announced = -1
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observers: list[Callable[[JournalEvent], None]] = []
        now_s = time.monotonic()
        self.machine: PlainRun | PipelineRun
        self.handlers: list[ScopeHandlers[Any]]
        """By scope."""
        if run.pipeline is None:
            self.machine = PlainRun(run, identity.sign, now_s, epoch)
            self.handlers = [RunHandlers(self, self.machine, 0)]
        else:
            self.machine = PipelineRun(run, identity.sign, now_s, epoch)
            self.handlers = [PipelineHandlers(self, self.machine, 0)]
        self.machine.replay(journal.read(0), time.monotonic())
        self._next_index = journal.next_index
        self.machine.begin()
        node.control.guard.is_member = lambda key: self.machine.membership.holder(key) is not None
        self._set_clock()
        self._open_stages()

    def _open_stages(self) -> None:
        """A pipeline's stages, once they are in the journal."""
        run = self.handlers[0]
        if isinstance(run, PipelineHandlers):
            self.handlers += [StageHandlers(run, stage) for stage in run.machine.stages[len(self.handlers) - 1 :]]

    @classmethod
    @asynccontextmanager
    async def serve(
        cls, run_toml: str, run: RunFile, identity: Identity, address: tuple[str, int], journal: Journal, epoch: int
    ) -> AsyncIterator[CoordinatorService]:
        """Listen on ``address`` until the context ends. ``epoch``: of the lease on ``journal``."""

        async def admit(key: bytes) -> bool:
            return True  # strangers may ask to join; every other handler looks the key up

        async with Node.open(identity.coordinator_keys(), address[0], (address[1], None), admit) as node:
            service = cls(run_toml, run, identity, node, journal, epoch)
            async with task_scope() as tasks:
                loops = [tasks.create_task(service._tick()), tasks.create_task(service._push())]
                if isinstance(service.machine, PipelineRun):
                    loops.append(tasks.create_task(service._plan(service.machine, planner_of(run))))
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

    def observe(self, observer: Callable[[JournalEvent], None]) -> None:
        """Call ``observer`` with every event once it is in the journal."""
        self._observers.append(observer)

    # Events, one at a time --------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Journal first, then tell. A coordinator that cannot journal must not go on.

        Members hear ``DeadlineExceeded`` then, as if it were gone already: they go on without it until it is back."""
        if self._broken.done():  # events were lost with it: what the machine says now may not be in the journal
            raise DeadlineExceeded(_STOPS)
        events = self.machine.take_events()
        if events:
            try:
                # Never cut short: the journal is closed next.
                await in_thread(self.journal.append, self._next_index, events)
                self._next_index += 1
            except StorageError as error:
                if not self._broken.done():
                    self._broken.set_exception(error)
                raise DeadlineExceeded(_STOPS) from error
            for event in events:
                for observer in self._observers:
                    observer(event)
        self._open_stages()
        self._may_plan.set()
        announcements = sum(one.machine.announcements for one in self.handlers)
        if announcements != self._announced:
            self._announced = announcements
            self._changed.set()
            for one in self.handlers:
                one.forget_those_that_left()
        if verdicts_in(events) and self.journal.wants_snapshot and (snapshot := self.machine.snapshot()) is not None:
            await in_thread(self.journal.compact, snapshot)  # nobody waits for us when a round has just begun

    def is_outdated(self, shown: Verdict) -> None:
        """A member has a verdict of ours that the journal lacks: nothing may be decided from it any more."""
        if not self._broken.done():
            self._broken.set_exception(
                stale_journal_error(self.journal.location, shown.round, self.machine.round_number)
            )

    async def _tick(self) -> None:
        while not self._broken.done():
            async with self.lock:
                self._set_clock()
                self.machine.tick(time.monotonic())
                with suppress(DeadlineExceeded):
                    await self.flush()
            await asyncio.sleep(_TICK_S)

    async def _plan(self, machine: PipelineRun, planner: Planner) -> None:
        """Who gets which stages: worked out in a thread, while everybody is answered."""
        while True:
            await self._may_plan.wait()
            self._may_plan.clear()
            async with self.lock:
                asked = machine.plan_request(time.monotonic())
            if asked is None:
                continue
            plan = await in_thread(asked.plan, planner)
            async with self.lock:
                self._set_clock()
                machine.take_plan(asked, plan, time.monotonic())
                with suppress(DeadlineExceeded):
                    await self.flush()

    def _set_clock(self) -> None:
        """Again and again: the one clock stands while the machine sleeps, the other one is set by people."""
        self.machine.unix_offset_s = time.time() - time.monotonic()

    async def _push(self) -> None:
        """Tell everybody, at once when the round goes on.

        Who came or went can wait as long as telling it takes: not each of a thousand joins costs a thousand rosters."""
        loop = asyncio.get_running_loop()
        told: list[tuple[int, str, int]] = []
        pause_until_s = 0.0
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._moments() == told and loop.time() < pause_until_s:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(pause_until_s):
                        await self._changed.wait()
                self._changed.clear()
            told, start_s = self._moments(), loop.time()
            for one in list(self.handlers):
                for peer, member in list(one.machine.membership.members.items()):
                    channel = self.node.control.incoming(member.entry.certificate.curve_key)
                    if member.alive and channel is not None and one.is_due(peer, member):
                        await self.notify(channel, one.view(peer), one.scope)
            pause_until_s = 2 * loop.time() - start_s

    def _moments(self) -> list[tuple[int, str, int]]:
        """What members have to hear of at once."""
        return [one.machine.moment for one in self.handlers]

    async def notify(self, channel: Channel, message: Message, scope: int) -> None:
        try:
            async with asyncio.timeout(1.0):
                await channel.notify(message, scope)
        except (LinkError, TimeoutError) as error:
            log.debug("could not tell %s: %s", channel.label, error)


def _addresses_of(channel: Channel, message: PeerToCoordinatorJoinRun) -> tuple[Address, ...]:
    """The ways in which a joiner can be reached, each checked. Raises ``NotAdmitted``."""
    observed = plain_host(channel.remote_host)
    is_called = message.role != "observer"
    return tuple(
        address.model_copy(update={"host": _host_of(address.host if is_called else "", observed)})
        for address in message.addresses
    )


def _host_of(named: str, observed: str) -> str:
    """The host that a joiner names, if it may name it, or the one that it comes from. Raises ``NotAdmitted``.

    A name is never looked up here: whoever holds its zone decides how long that takes."""
    if not named:
        return observed
    named = plain_host(named)
    if may_name(named, observed):
        return named
    raise NotAdmitted(
        f"this machine cannot be known as {named}, as it comes from {observed}: that must be an address, and one that "
        "is not public must be the one that it comes from. Leave out --advertise, or give it a public address"
    )
