"""A member in a process of its own that takes part in rounds as any does; only its contributions are given.

Samples are leased, for weights are their tokens. It waits until the announced closing is over, which is ahead by
design; then the clock starts, and with it ready, plan, exchange, report, verdict and the decoded mean.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection

import torch
from pacing import Lap, Pace
from round_case import Case
from shaped_links import Site, enter
from torch import Tensor

from shoal.compression.range_reader import TensorReader
from shoal.peer.member.member import LocalMember
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.aio import task_scope
from shoal.swarm.averaging import contribution
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.merkle import path_bytes
from shoal.swarm.averaging.outcome import Committed, RoundOffer
from shoal.swarm.averaging.results import RoundMean
from shoal.swarm.client.coordinator_client import CoordinatorClient, MemberInfo
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerModelAccepted,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRoundReport,
)
from shoal.swarm.protocol.rounds import RoundPlan, RunView
from shoal.swarm.protocol.types import Blob, DeviceInfo, Message, SampleRange, TensorSpec
from shoal.swarm.transport.bulk.link import ChunkSink
from shoal.swarm.transport.node import Node

_PROBE_STEP = 4099
"""Every so manieth value of a mean is checked."""


def run_peer(pipe: Connection, invite: str, case: Case, number: int, site: Site | None) -> None:
    """One member's rounds; ``site``: the namespace that it lives in."""
    if site is not None:
        enter(site.namespace)
    torch.set_num_threads(1)
    if case.uncommitted:
        _forgo_commitments()
    address = site.address if site is not None else case.loopback_address(number)
    asyncio.run(_live(Pace(pipe), Invite.parse(invite), case, number, address))


def _forgo_commitments() -> None:
    """Round as it would be without commitments, but for the bytes of the paths."""

    def unchecked(grid: LeafGrid, root: bytes, start: int, stop: int, data: memoryview) -> memoryview:
        leaves = grid.within(start, stop)
        return data[: data.nbytes - path_bytes(grid.leaves, leaves.start, leaves.stop)]

    def hash_nothing(packed: object) -> bytes:
        return bytes(32)

    def check_nothing(averager: Averager, plan: RoundPlan) -> str:
        return ""

    contribution.leaf_digest = hash_nothing  # type: ignore[attr-defined]
    LeafGrid.checked = unchecked  # type: ignore[assignment, method-assign]
    Averager._made_up = check_nothing  # type: ignore[assignment, method-assign]


class _Client(CoordinatorClient):
    """Remembers when the plan came, when the report of the exchange went, and when the verdict came."""

    bandwidth_bps: float | None = None
    plan_s = held_s = verdict_s = 0.0

    async def ask_view(self, message: Message) -> RunView:
        if isinstance(message, PeerToCoordinatorRoundReport):
            self.held_s = time.monotonic()
        return await super().ask_view(message)

    async def heartbeat(self, heartbeat: PeerToCoordinatorHeartbeat) -> None:
        if self.bandwidth_bps is not None:
            heartbeat = heartbeat.model_copy(update={"bandwidth_bps": self.bandwidth_bps})
        await super().heartbeat(heartbeat)

    async def see(self, number: int) -> None:
        """Until that round has ended."""
        await self.wait_for(lambda view: view.round != number or view.plan is not None)
        self.plan_s = time.monotonic()
        await self.wait_for(lambda view: view.round != number)
        self.verdict_s = time.monotonic()


class _Node(Node):
    """Knows whom it has fetched from."""

    partners: set[str]

    def fetch(
        self, peer: str, blob: Blob, chunks: range, sink: ChunkSink, progress_s: float
    ) -> AsyncGenerator[int, None]:
        self.partners.add(peer)
        return super().fetch(peer, blob, chunks, sink, progress_s)


async def _live(pace: Pace, invite: Invite, case: Case, number: int, address: str) -> None:
    identity, keys = Identity.generate(), CurveKeys.fresh()
    client: _Client | None = None

    async def admit(key: bytes) -> bool:
        return client is not None and await client.admit(key)

    async with _Node.open(keys, address, (0, 0), admit) as node:
        assert isinstance(node, _Node)
        node.partners = set()
        device = DeviceInfo(kind="cpu", name="none", memory_bytes=0)
        client = _Client(node, identity, keys, invite, MemberInfo(f"peer-{number}", "trainer", device, host=address))
        client.bandwidth_bps = case.bandwidths_bps[number] if case.bandwidths_bps else None
        async with LocalMember.joined(client) as member, task_scope() as tasks:
            peer = _Peer(member, client, node, pace, case)
            await peer.prepare()
            for _ in range(1 + case.rounds):
                await peer.take_part(tasks)


class _Peer:
    def __init__(self, member: LocalMember, client: _Client, node: _Node, pace: Pace, case: Case) -> None:
        self._member, self._client, self._node, self._pace, self._case = member, client, node, pace, case

    async def prepare(self) -> None:
        """As a member does when it joins; its kernels are compiled before anything counts."""
        layout = (TensorSpec(name="values", shape=(self._case.elements,)),)
        model = PeerToCoordinatorDescribeModel(layout=layout, corpus_digest=None, tokens_per_sample=1)
        await self._client.ask(model, CoordinatorToPeerModelAccepted)
        self._member.prepare_averaging(layout)
        for thread in threading.enumerate():
            if thread.name.endswith("-kernels"):
                await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self._pace.introduce, self._client.peer)
        self._hold(0)

    def _hold(self, version: int) -> None:
        """Stands for the state that everybody has at this anchor version."""
        self._member.hold_state(AnchorState.of(torch.zeros(1, 1), version))

    async def _work(self) -> tuple[SampleRange, ...]:
        """Lease one sample, say that it is done, and wait for the end of the announced closing."""
        client, member = self._client, self._member
        number = (await client.wait_for(lambda view: view.phase == "training")).round
        member.progress.round, member.progress.tokens_done = number, 0
        await member.send_heartbeat()
        while not (ranges := await member.lease(1, [])):
            await member.wait_for_change(client.deadlines.heartbeat_s / 4)
        member.progress.tokens_done = 1
        await member.send_heartbeat()
        view = await client.wait_for(lambda view: view.phase == "closing")
        assert view.round == number, (view.round, number)
        closes_at_s = client.closes_at_s
        assert closes_at_s is not None
        await asyncio.sleep(closes_at_s - asyncio.get_running_loop().time())
        return ranges

    async def take_part(self, tasks: asyncio.TaskGroup) -> None:
        client, member, state = self._client, self._member, self._member.state
        self._node.partners.clear()  # some are asked before the clock starts
        ranges, number = await self._work(), client.view.round
        values = torch.randn(self._case.elements, generator=torch.Generator().manual_seed(number)) * self._case.size
        expected = values[::_PROBE_STEP].clone()
        assert state is not None
        reader = TensorReader(values)
        offer = RoundOffer(number, state.version, state.digest, reader, len(ranges), ranges, None)
        start_s = await asyncio.to_thread(self._pace.start)
        sent, received = self._node.meter.sent_bytes, self._node.meter.received_bytes
        await asyncio.sleep(start_s - time.monotonic())
        seen = tasks.create_task(client.see(number))
        outcome = await member.averager.average(offer)
        assert isinstance(outcome, Committed), outcome
        probed = await asyncio.to_thread(_decoded, outcome.mean)
        end_s = time.monotonic()
        cpu_seconds, peak_bytes = await asyncio.to_thread(self._pace.done)
        await seen
        assert outcome.included
        assert None not in outcome.verdict.digests, "each part has a mean"
        _check(probed, expected, self._case.tolerance * self._case.size)
        lap = Lap(
            end_s=end_s - start_s,
            cpu_s=cpu_seconds,
            sent_bytes=self._node.meter.sent_bytes - sent,
            received_bytes=self._node.meter.received_bytes - received,
            peak_bytes=peak_bytes,
            in_all_bytes=self._pace.in_all_bytes,
            plan_s=client.plan_s - start_s,
            held_s=client.held_s - start_s,
            verdict_s=client.verdict_s - start_s,
            partners=len(self._node.partners),
        )
        self._pace.report(lap)
        self._hold(outcome.verdict.anchor_version)


def _decoded(mean: RoundMean) -> Tensor:
    """Decode the whole mean piece by piece, as members do, and return every so manieth value."""
    probed = [values[-start % _PROBE_STEP :: _PROBE_STEP].clone() for start, _, values in mean.pieces()]
    return torch.cat(probed)


def _check(mean: Tensor, expected: Tensor, tolerance: float) -> None:
    """Everybody gave the same values, so their mean is those."""
    worst = float((mean - expected).abs().max())
    assert worst <= tolerance, f"the mean is off by {worst}"
