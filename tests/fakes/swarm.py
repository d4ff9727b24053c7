"""A whole run on the virtual clock: a coordinator and members that contribute what a test tells them to."""

import asyncio
import copy
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.fakes.memory_coordinator import MemoryCoordinator, curve_keys, identity, make_client
from tests.fakes.memory_network import MemoryNetwork
from torch import Tensor

from shoal.compression.codec_map import CodecMap
from shoal.compression.range_reader import TensorReader
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.outcome import Aborted, Committed, RoundOffer, RoundOutcome
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.errors import LinkError, NotAdmitted
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerLease,
    CoordinatorToPeerModelAccepted,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorHeartbeat,
    PeerToCoordinatorRequestLease,
)
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.types import KeptState, PathReport, Role, TensorSpec
from shoal.swarm.sample_ranges import Ranges, count, merge, to_wire
from shoal.swarm.transport.node import ScopedEndpoint

PATIENCE_S = 6.0
TASKS_OF_A_MEMBER = 3
"""That live as long as it does: it, its heartbeats, its lookout."""


def run_toml(
    tokens: int,
    codec: str = "float32",
    algorithm: str = "diloco",
    max_s: float = 600.0,
    group_size: int = 32,
    seed: int = 0,
    overlap: bool = False,
    robust: str = "none",
) -> str:
    """``robust = "none"``: contributions here are any numbers, and their means are checked to the last one."""
    return (
        f'algorithm = "{algorithm}"\n[averaging]\ncodec = "{codec}"\ngroup_size = {group_size}\n'
        f'robust = "{robust}"\n'
        f"overlap = {str(overlap).lower()}\n"
        f'[run]\nname = "test"\nseed = {seed}\n[recipe]\nname = "own"\n'
        f"[inner]\nbatch_samples = 1\n[round]\ntokens = {tokens}\nmax_s = {max_s}\npatience_s = {PATIENCE_S}\n"
    )


class SimMember:
    """Plain gradient descent with step 1 from an anchor of zeros; one sample is one token. ``processes_before``: how
    many of the same identity there were, each with a transport key of its own. ``ports``: the coordinator's, as the
    invite names them; ``role``, ``token``: as which it joins, and by which invite."""

    processes_before = 0
    role: Role = "trainer"
    token = b""
    ports: tuple[int, ...] = (1,)

    def __init__(self, swarm: "Swarm", number: int, latency_s: float) -> None:
        self.identity, keys = identity(number), curve_keys(number + 50 * self.processes_before)
        self.endpoint: Any = swarm.network.endpoint(self.identity.peer_id)
        self.client, self.channel = make_client(
            swarm.coordinator, self.endpoint, self.identity, keys, latency_s, self.ports, self.role, self.token
        )
        self.endpoint.key = keys.public
        self._begin(swarm)

    def in_scope(self, swarm: "Swarm") -> "SimMember":
        """Return the same process as a member of another scope."""
        scope, other = swarm.coordinator.scope, copy.copy(self)
        other.client, other.endpoint = self.client.in_scope(scope), ScopedEndpoint(self.endpoint, scope)
        other._begin(swarm)
        swarm.members.append(other)
        return other

    def _begin(self, swarm: "Swarm") -> None:
        self.swarm = swarm
        self.elements = swarm.elements
        self.anchor, self.version = torch.zeros(self.elements), 0
        self.round = 0
        self.done: Ranges = []
        self.averager: Averager
        self.task: asyncio.Task[None] | None = None
        self.rejoined = False
        self.bandwidth_bps = 1e9
        self.holds = True
        """Whether it has the run's state; else it tells what it has ``kept``."""
        self.kept: tuple[KeptState, ...] = ()
        self.diverged: KeptState | None = None
        self.paths: tuple[PathReport, ...] = ()

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    @property
    def view(self) -> RunView:
        return self.client.view

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.anchor.numpy().tobytes() + bytes([self.version])).digest()

    async def join(self, tasks: asyncio.TaskGroup) -> None:
        await self.client.join()
        layout = (TensorSpec(name="w", shape=(self.elements,)),)
        model = PeerToCoordinatorDescribeModel(layout=layout, corpus_digest=bytes(32), tokens_per_sample=1)
        await self.client.ask(model, CoordinatorToPeerModelAccepted)
        self.averager = await self._make_averager(tasks)
        self.averager.clock = PhaseClock(asyncio.get_running_loop().time)
        self.round = self.view.round
        await self.beat()
        self.task = tasks.create_task(self._live())

    async def _make_averager(self, tasks: asyncio.TaskGroup) -> Averager:
        codec_map = CodecMap(self.client.run_file.format_map([("w", (self.elements,))]))
        return Averager(self.client, self.endpoint, codec_map, self.elements)

    def die(self) -> None:
        """Die as by ``kill -9``: no goodbye, no bytes, no answers."""
        self.channel.open = False
        self.swarm.network.kill(self.peer)
        assert self.task is not None
        self.task.cancel()

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beats())
            tasks.create_task(self.averager.prefetch_manager.run())

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self.client.deadlines.heartbeat_s)
            with suppress(LinkError):
                await self.beat()

    async def beat(self) -> None:
        heartbeat = PeerToCoordinatorHeartbeat(
            round=self.round,
            activity="",
            anchor_version=self.version if self.holds else None,
            state_digest=self.digest if self.holds else None,
            kept=() if self.holds else self.kept,
            diverged=self.diverged,
            tokens_done=count(self.done),
            tokens_per_s=0.0,
            step_s=0.0,
            loss=None,
            chunks_moved=self.averager.chunks_moved,
            bytes_sent=0,
            bytes_received=0,
            bandwidth_bps=self.bandwidth_bps,
            roster_version=0,
            paths=self.paths,
            phase=self.averager.clock.phase,
        )
        try:
            await self.client.heartbeat(heartbeat)
        except NotAdmitted:
            await self.client.join()
            self.rejoined = True

    async def work(self, samples: int) -> None:
        """Lease and do that many samples, or what there is time for."""
        while samples and self.view.round == self.round and self.view.phase in ("waiting", "training"):
            ask = PeerToCoordinatorRequestLease(round=self.round, samples=samples, tokens_done=count(self.done))
            answer = await self.client.ask(ask, CoordinatorToPeerLease)
            if not answer.ranges:
                await asyncio.sleep(0.2)
                continue
            taken = [(one.start, one.stop) for one in answer.ranges]
            samples -= count(taken)
            self.done = merge([*self.done, *taken])
            await self.beat()

    def offer(self, contribution: Tensor) -> RoundOffer:
        return RoundOffer(
            round=self.round,
            anchor_version=self.version,
            state_digest=self.digest,
            contribution=TensorReader(contribution.clone()),
            weight_tokens=count(self.done),
            ranges=to_wire(self.done),
            loss=None,
        )

    async def until_due(self) -> None:
        await self.client.wait_for(lambda view: view.round != self.round or view.phase in ("closing", "averaging"))
        closes_at_s = self.client.closes_at_s
        if self.view.round == self.round and self.view.phase == "closing" and closes_at_s is not None:
            await asyncio.sleep(max(0.0, closes_at_s - asyncio.get_running_loop().time()))

    async def average(self, contribution: Tensor) -> RoundOutcome:
        """Bring ``contribution`` to the round's end and act on the outcome."""
        await self.until_due()
        outcome = await self.averager.average(self.offer(contribution))
        match outcome:
            case Committed():
                self.apply(outcome.mean.whole())
                self.version = outcome.verdict.anchor_version
                if outcome.included:
                    self.done = []
                self.round = outcome.verdict.round + 1
            case Aborted():
                if outcome.is_spent:
                    self.done = []
                if outcome.verdict is not None:
                    self.round = outcome.verdict.round + 1
        return outcome

    def apply(self, mean: Tensor) -> None:
        """Make the outer step."""
        self.anchor = self.anchor - mean

    async def play(self, contribution: Tensor, samples: int) -> RoundOutcome:
        """Work and average, again for as long as the round reopens."""
        await self.work(samples)
        while True:
            outcome = await self.average(contribution)
            if not (isinstance(outcome, Aborted) and outcome.verdict is None):
                return outcome


@dataclass
class Swarm:
    coordinator: MemoryCoordinator
    network: MemoryNetwork
    elements: int
    members: list[SimMember] = field(default_factory=list)

    def __getitem__(self, index: int) -> SimMember:
        """Return a member by the order of peer ids, which is the order of plans."""
        return sorted(self.members, key=lambda member: member.peer)[index]

    async def own_nothing(self, *slow: SimMember) -> None:
        """Have these members own no parts from the next plan on."""
        for member in slow:
            member.bandwidth_bps = 1.0
            await member.beat()

    def index(self, member: SimMember) -> int:
        return sorted(one.peer for one in self.members).index(member.peer)


@asynccontextmanager
async def swarm(
    members: int,
    toml: str,
    elements: int,
    network: MemoryNetwork | None = None,
    latency_s: float = 0.01,
    make: Callable[["Swarm", int, float], SimMember] = SimMember,
) -> AsyncIterator[Swarm]:
    """Run a coordinator with members that have all joined and hold the anchor."""
    coordinator = MemoryCoordinator(toml)
    made = Swarm(coordinator, network or MemoryNetwork(), elements)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(coordinator.serve())]
        try:
            for number in range(members):
                member = make(made, number + 1, latency_s * (1 + number))
                made.members.append(member)
                await member.join(tasks)
            yield made
        finally:
            background += [member.task for member in made.members if member.task is not None]
            for task in background:
                task.cancel()


async def together(*plays: Coroutine[Any, Any, RoundOutcome]) -> list[RoundOutcome]:
    """Run all at once; return their outcomes in order."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(play) for play in plays]
    return [task.result() for task in running]
