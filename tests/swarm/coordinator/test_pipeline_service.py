"""A pipeline's coordinator over real sockets: the run and its stages on one connection, one journal for all of them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.fakes.hosts import serve
from tests.swarm.coordinator.pipeline_world import initial, model
from tests.swarm.coordinator.world import CPU, TOKENS_PER_SAMPLE, heartbeat, report
from tests.swarm.network import HOST, LONG_S, Member
from tests.swarm.transport.test_node import run

from shoal.swarm.coordinator import service as service_module
from shoal.swarm.coordinator.events import JournalEvent, verdicts_in
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.placement import Planner, planner_of
from shoal.swarm.coordinator.round_rules import Judgement
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import DeadlineExceeded, NotAdmitted, StorageError, WireError
from shoal.swarm.pipeline.planner.model import Infeasible, StagePlan
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerClaimed,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    CoordinatorToPeerStatus,
    CoordinatorToPeerVerdicts,
    CoordinatorToPeerView,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDrive,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorGetVerdicts,
    PeerToCoordinatorJoinRun,
    PeerToCoordinatorRelease,
    PeerToCoordinatorRoundReady,
    PeerToCoordinatorShowCapability,
    PeerToCoordinatorShowVerdict,
)
from shoal.swarm.protocol.rounds import RoundPlan, RunView
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.statements import ContributionStatement, RoundName
from shoal.swarm.protocol.types import Address, Capability, LayerSize, Message, SampleRange
from shoal.swarm.protocol.verdict_chain import chain_hash, check_verdict, genesis, signed_bytes
from shoal.swarm.sample_ranges import count, from_wire
from shoal.swarm.transport.channel import Channel

TOML = """
algorithm = "virtual_batch"
[run]
name = "deep"
[recipe]
name = "own"
[pipeline]
stages = 2
micro_batch = 2
[access]
admission = "open"
[round]
tokens = 80
patience_s = 60
"""
SAMPLES = 8
LAYERS = tuple(LayerSize(parameters_bytes=4000, activation_bytes=100, kept_bytes=100) for _ in range(4))
HOST_IDENTITY = Identity.generate()

M = TypeVar("M", bound=Message)


class Written(LocalJournal):
    """Notes every write."""

    def __init__(self, folder: Path, run_hash: bytes, run_toml: str) -> None:
        super().__init__(folder, run_hash, run_toml)
        self.written: list[Sequence[JournalEvent]] = []

    def append(self, expected_index: int, events: Sequence[JournalEvent]) -> None:
        super().append(expected_index, events)
        self.written.append(events)


class Peer:
    """Asks the coordinator by hand; in each stage that it holds it does all that it is granted."""

    def __init__(self, member: Member, service: CoordinatorService) -> None:
        self.member = member
        member.node.host_key = service.node.control.keys.public  # it dials back
        self.channel: Channel = member.node.control.dial(
            HOST, service.node.control_port, service.node.control.keys.public
        )
        self.channel.run = service.name
        self.done: dict[int, tuple[SampleRange, ...]] = {}
        self.plans: dict[int, RoundPlan] = {}
        """The newest plan by scope, which comes as a notice."""
        for scope in (1, 2):
            member.node.control.handle(CoordinatorToPeerView, partial(self.take_view, scope), scope)

    async def take_view(self, scope: int, channel: Channel, message: Message) -> None:
        assert isinstance(message, CoordinatorToPeerView)
        if message.view.plan is not None:
            self.plans[scope] = message.view.plan

    async def ask(self, message: Message, reply: type[M], scope: int = 0) -> M:
        return await self.channel.request(message, reply, LONG_S, scope)

    async def join(self, scope: int = 0) -> RunView:
        entry = self.member.entry()
        knock = PeerToCoordinatorJoinRun(
            run="deep",
            certificate=entry.certificate,
            name="a peer",
            role="trainer",
            device=CPU,
            addresses=(Address(**entry.address.model_dump()),),
        )
        return (await self.ask(knock, CoordinatorToPeerJoinAccepted, scope)).view

    async def show(self) -> None:
        able = Capability(host_bytes=10**9, device_bytes=None, layer_s=(0.1,) * 4, bandwidth_bps=1e9, rtt_s=0.001)
        await self.ask(PeerToCoordinatorShowCapability(capability=able, layers=LAYERS), Acknowledged)

    async def beat(self, scope: int = 0) -> RunView:
        done = count(from_wire(self.done.get(scope, ()))) * TOKENS_PER_SAMPLE
        said = heartbeat(anchor_version=None, state_digest=None)
        if scope:
            said = heartbeat(state_digest=initial(scope - 1), tokens_done=done)
        return (await self.ask(said, CoordinatorToPeerView, scope)).view

    async def cut(self) -> RunView:
        """The run's view once there are stages."""
        async with asyncio.timeout(LONG_S):
            while (view := await self.beat()).pipeline is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return view

    async def enter(self, scope: int) -> None:
        await self.join(scope)
        await self.ask(model(scope - 1), CoordinatorToPeerModelAccepted, scope)
        await self.beat(scope)

    async def claim(self, scope: int, ranges: tuple[SampleRange, ...]) -> tuple[SampleRange, ...]:
        claim = PeerToCoordinatorClaim(round=0, ranges=ranges)
        granted = (await self.ask(claim, CoordinatorToPeerClaimed, scope)).ranges
        self.done[scope] = granted
        return granted

    async def until(self, phase: str, scope: int) -> RunView:
        async with asyncio.timeout(LONG_S):
            while (view := await self.beat(scope)).phase != phase:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return view

    async def plan(self, scope: int) -> RoundPlan:
        """The open round's plan, which is told again to who does not name it."""
        async with asyncio.timeout(LONG_S):
            while scope not in self.plans:
                await self.beat(scope)
                await asyncio.sleep(0.02)
        return self.plans[scope]


@run
async def test_a_round_of_two_stages_and_a_restart(tmp_path: Path) -> None:
    file = parse_run_file(TOML)
    member, identity = Member(), HOST_IDENTITY
    member.allowed.add(identity.coordinator_keys().public)
    await member.start()
    journal = Written(tmp_path, file.hash, TOML)
    async with serve(TOML, file, identity, (HOST, 0), journal, journal.lease()) as service:
        peer = Peer(member, service)
        assert (await peer.join()).pipeline is None
        with pytest.raises(WireError, match=r"in scope 1"):
            await peer.join(1)
        await peer.show()
        view = (await peer.cut()).pipeline
        assert view is not None
        assert len(view.boundaries) == 3
        assert [(span.peer, span.first, span.last) for span in view.spans] == [(member.peer, 0, 1)]
        with pytest.raises(NotAdmitted):
            await peer.beat(1)
        for scope in (1, 2):
            await peer.enter(scope)
        drive = PeerToCoordinatorDrive(round=0, samples=100, done=())
        lease = await peer.ask(drive, CoordinatorToPeerLease)
        assert count(from_wire(lease.ranges)) == SAMPLES
        for scope in (1, 2):
            assert await peer.claim(scope, lease.ranges) == lease.ranges
        release = PeerToCoordinatorRelease(round=0, ranges=lease.ranges[:1])
        await peer.ask(release, Acknowledged, 2)
        status = await peer.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
        assert [one.queue for one in status.stages] == [SAMPLES, SAMPLES - 2]
    journal.close()

    journal = Written(tmp_path, file.hash, TOML)
    async with serve(TOML, file, identity, (HOST, 0), journal, journal.lease()) as service:
        peer = Peer(member, service)
        for scope in (1, 2):  # what was not released is this peer's still
            await peer.beat(scope)
            assert await peer.claim(scope, lease.ranges) == lease.ranges
            await peer.beat(scope)
        await peer.until("closing", 2)
        for scope in (1, 2):
            ready = PeerToCoordinatorRoundReady(
                round=0,
                anchor_version=0,
                state_digest=initial(scope - 1),
                weight_tokens=SAMPLES * TOKENS_PER_SAMPLE,
                ranges=lease.ranges,
                loss=None,
            )
            statement = ContributionStatement.of_ready(RoundName(file.hash, scope - 1, 0), ready)
            signed = ready.model_copy(update={"signature": member.identity.sign(statement.bytes_to_sign())})
            view = (await peer.ask(signed, CoordinatorToPeerView, scope)).view
        assert view.phase == "averaging", "planned with the last one that was ready"
        plans = [await peer.plan(scope) for scope in (1, 2)]
        for scope, plan in enumerate(plans, 1):
            view = (await peer.ask(report(plan), CoordinatorToPeerView, scope)).view
        assert (view.round, view.anchor_version) == (1, 1)
        verdicts = []
        for scope in (1, 2):
            page = await peer.ask(PeerToCoordinatorGetVerdicts(first=0), CoordinatorToPeerVerdicts, scope)
            (verdict,) = page.verdicts
            check_verdict(verdict, identity.public_key)
            assert verdict.previous_chain == genesis(file.hash, scope)
            assert verdict.plan == plans[scope - 1]
            await peer.ask(PeerToCoordinatorShowVerdict(verdict=verdict), Acknowledged, scope)
            verdicts.append(verdict)
            ask = PeerToCoordinatorGetVerdicts(first=0, stage=scope - 1)  # also who does not hold the stage may
            assert (await peer.ask(ask, CoordinatorToPeerVerdicts)).verdicts == (verdict,)
        assert verdicts[0].together == verdicts[1].together is not None
        given = [scope for events in journal.written for scope in [list(verdicts_in(events))] if scope]
        assert given == [[1, 2]], "in one write"
    journal.close()
    await member.stop()


@asynccontextmanager
async def cut_run(folder: Path) -> AsyncIterator[tuple[CoordinatorService, Peer]]:
    """A run that is cut for its one peer, which is in the first stage."""
    file, member = parse_run_file(TOML), Member()
    member.allowed.add(HOST_IDENTITY.coordinator_keys().public)
    await member.start()
    journal = Written(folder, file.hash, TOML)
    try:
        async with serve(TOML, file, HOST_IDENTITY, (HOST, 0), journal, journal.lease()) as service:
            peer = Peer(member, service)
            await peer.join()
            await peer.show()
            await peer.cut()
            await peer.enter(1)
            yield service, peer
    finally:
        journal.close()
        await member.stop()


@run
async def test_a_verdict_that_the_journal_lacks_stops_the_coordinator(tmp_path: Path) -> None:
    async with cut_run(tmp_path) as (service, peer):
        lost = service.handlers[1].scope.verdict_of(Judgement(reason="in a journal that is lost"))
        chain = chain_hash(lost.verdict)
        signature = HOST_IDENTITY.sign(signed_bytes(chain))
        verdict = lost.verdict.model_copy(update={"chain": chain, "signature": signature})
        with pytest.raises(DeadlineExceeded):
            await peer.ask(PeerToCoordinatorShowVerdict(verdict=verdict), Acknowledged, 1)
        with pytest.raises(StorageError, match="outdated copy"):
            await service.wait(asyncio.Event())


@run
async def test_everybody_is_answered_while_the_planner_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = parse_run_file(TOML)
    begun, released = threading.Event(), threading.Event()
    released.set()

    def planner_that_waits(file: RunFile) -> Planner:
        inner = planner_of(file)

        def plan(*question: Any) -> StagePlan | Infeasible:
            begun.set()
            assert released.wait(LONG_S)
            return inner(*question)

        return plan

    monkeypatch.setattr(service_module, "planner_of", planner_that_waits)
    first, second = Member(), Member()
    for member in (first, second):
        member.allowed.add(HOST_IDENTITY.coordinator_keys().public)
        await member.start()
    journal = Written(tmp_path, file.hash, TOML)
    try:
        async with serve(TOML, file, HOST_IDENTITY, (HOST, 0), journal, journal.lease()) as service:
            one, two = Peer(first, service), Peer(second, service)
            await one.join()
            await one.show()
            await one.cut()
            for scope in (1, 2):
                await one.enter(scope)
            begun.clear()
            released.clear()
            await two.join()
            await two.show()
            assert await asyncio.to_thread(begun.wait, LONG_S)
            lease = await one.ask(PeerToCoordinatorDrive(round=0, samples=2, done=()), CoordinatorToPeerLease)
            assert count(from_wire(lease.ranges)) == 2
            assert await one.claim(1, lease.ranges) == lease.ranges
            view = (await two.beat()).pipeline
            assert view is not None
            assert [span.peer for span in view.spans] == [first.peer]
            released.set()
            async with asyncio.timeout(LONG_S):
                while len(view.spans) < 2:
                    view = (await two.beat()).pipeline
                    assert view is not None
    finally:
        released.set()
        journal.close()
        await first.stop()
        await second.stop()


@run
async def test_a_round_goes_on_with_who_was_awaited_and_not_with_the_next_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_TICK_S", LONG_S)
    async with cut_run(tmp_path) as (service, peer):
        drive = PeerToCoordinatorDrive(round=0, samples=100, done=())
        early = asyncio.create_task(peer.ask(drive, CoordinatorToPeerLease))
        assert await peer.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
        assert not early.done(), "nobody is in the last stage yet"
        await peer.enter(2)
        async with asyncio.timeout(service.scope.deadlines.heartbeat_s / 2):
            lease = await early
        assert count(from_wire(lease.ranges)) == SAMPLES
        await peer.claim(1, lease.ranges)
        assert (await peer.beat(1)).phase == "training"
        await peer.claim(2, lease.ranges)
        assert (await peer.beat(2)).phase == "closing"
