"""The kinds of scopes that members talk to: a run without stages, a pipeline run, and each of its stages."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

from shoal.swarm.coordinator.door import Door, Handler
from shoal.swarm.coordinator.leases import Ranges, to_wire
from shoal.swarm.coordinator.machine import RunMachine
from shoal.swarm.coordinator.outdated import is_known
from shoal.swarm.coordinator.pipeline import PipelineMachine
from shoal.swarm.coordinator.pipeline_stage import StageMachine
from shoal.swarm.errors import NotAdmitted
from shoal.swarm.protocol.identity import verify_certificate
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerClaimed,
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    Message,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorDrive,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorRelease,
    PeerToCoordinatorRequestLease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorRoundReport,
    PeerToCoordinatorShowCapability,
    PeerToCoordinatorShowVerdict,
    RosterEntry,
)
from shoal.swarm.transport.control import Channel

if TYPE_CHECKING:
    from shoal.swarm.coordinator.service import CoordinatorService


async def _ready(door: Door[RunMachine] | Door[StageMachine], channel: Channel, message: Message) -> Message:
    assert isinstance(message, PeerToCoordinatorRoundReady)
    async with door.event(channel) as peer:
        door.machine.ready(peer, message, time.monotonic())
        door.go_on_if_complete(door.machine.is_complete())
    return door.view(peer)


async def _report(door: Door[RunMachine] | Door[StageMachine], channel: Channel, message: Message) -> Message:
    assert isinstance(message, PeerToCoordinatorRoundReport)
    async with door.event(channel) as peer:
        door.machine.report(peer, message, time.monotonic())
        door.go_on_if_complete(door.machine.is_complete())
    return door.view(peer)


class RunDoor(Door[RunMachine]):
    """Of a run that is one scope."""

    def requests(self) -> dict[type[Message], Handler]:
        return super().requests() | {
            PeerToCoordinatorDescribeModel: self._describe,
            PeerToCoordinatorRequestLease: self._lease,
            PeerToCoordinatorRoundReady: lambda channel, message: _ready(self, channel, message),
            PeerToCoordinatorRoundReport: lambda channel, message: _report(self, channel, message),
            PeerToCoordinatorShowVerdict: self._shown,
        }

    async def _describe(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorDescribeModel)
        async with self.event(channel) as peer:
            self.machine.describe_model(peer, message)
        return CoordinatorToPeerModelAccepted()

    async def _lease(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorRequestLease)
        async with self.small_event(channel) as peer:
            ranges = self.machine.request_lease(peer, message, time.monotonic())
        return CoordinatorToPeerLease(ranges=to_wire(ranges))

    async def _shown(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorShowVerdict)
        return await self.shown(channel, message, lambda verdict: self.machine.take_over(verdict, time.monotonic()))


class PipelineDoor(Door[PipelineMachine]):
    """Of a pipeline run: its peers, what they can do and what they drive."""

    def __init__(self, service: CoordinatorService, machine: PipelineMachine, scope: int) -> None:
        super().__init__(service, machine, scope)
        self._assembled = asyncio.Event()
        self._assembled.set()

    def requests(self) -> dict[type[Message], Handler]:
        return super().requests() | {
            PeerToCoordinatorDescribeModel: self._describe,
            PeerToCoordinatorShowCapability: self._capability,
            PeerToCoordinatorDrive: self._drive,
        }

    async def _describe(self, channel: Channel, message: Message) -> Message:
        """Of the whole model; whoever cannot tell of it tells of its stages only."""
        assert isinstance(message, PeerToCoordinatorDescribeModel)
        async with self.event(channel) as peer:
            self.machine.describe_model(peer, message)
        return CoordinatorToPeerModelAccepted()

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


class StageDoor(Door[StageMachine]):
    """Of one stage of a pipeline run."""

    def __init__(self, run: PipelineDoor, machine: StageMachine) -> None:
        self._run = run
        super().__init__(run.service, machine, machine.scope)

    def requests(self) -> dict[type[Message], Handler]:
        return super().requests() | {
            PeerToCoordinatorDescribeModel: self._describe,
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

    async def _describe(self, channel: Channel, message: Message) -> Message:
        assert isinstance(message, PeerToCoordinatorDescribeModel)
        async with self.event(channel) as peer:
            self._run.machine.describe_stage(self.scope, peer, message)
        return CoordinatorToPeerModelAccepted()

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
