"""Tests of pipeline/runner: several peers in one process, with real engines and layers and a fake coordinator.

All claims are granted to who asks first; a batch is given out to whoever drives. The gradients that count are compared
with those of the whole model on the whole batch.
"""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.virtual_clock import now_s, run_virtual
from tests.peer.devices import CPU, devices
from tests.peer.layered_models import gpt
from torch import Tensor

from shoal.compression.range_reader import whole_vector
from shoal.compression.registry import get_codec
from shoal.peer.member.member import Progress
from shoal.peer.member.round_deadline import Attention
from shoal.peer.pipeline.compute import ComputeSettings, HeldStage
from shoal.peer.pipeline.mailbox import StageShapes
from shoal.peer.pipeline.runner import StageRunner
from shoal.peer.pipeline.tensor_io import ComputedTensor, Staging
from shoal.peer.pipeline.training import ComputeResult, RepeatedTensors, RepeatTask, SpanTraining, TrainingSamples
from shoal.peer.pipeline.work_checks import CheckSettings
from shoal.peer.training.algorithms import AccumulatedGradient
from shoal.peer.training.data import SampleOrder
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import Busy, StaleWork, Unreachable, WireError
from shoal.swarm.pipeline.engine.effects import ComputeBackward, ComputeForward
from shoal.swarm.pipeline.engine.engine import EngineSettings, StageEngine, StageSpan
from shoal.swarm.pipeline.engine.routing import Router
from shoal.swarm.pipeline.engine.work_checks import tolerance
from shoal.swarm.protocol.messages import (
    Acknowledged,
    CoordinatorToPeerClaimed,
    CoordinatorToPeerLease,
    PeerToCoordinatorAccuseReplica,
    PeerToCoordinatorClaim,
    PeerToCoordinatorDrive,
    PeerToCoordinatorRelease,
    PeerToPeerOfferTensor,
    PeerToPeerRepeatWork,
    PeerToPeerWorkRepeated,
)
from shoal.swarm.protocol.types import Message, TensorForm
from shoal.swarm.sample_ranges import Ranges, from_wire, merge, overlap, subtract, to_wire

A, B, C, D, E, F, G, H, J = (letter * 16 for letter in "abcdefghj")
BOUNDARIES = (0, 2, 4, 6)
STAGES = 3
MICRO_BATCH = 2
BATCH = 12
PATIENCE_S = 6.0
STEP_S = 0.05
ROUND = 0

RECIPE = gpt()
LAYERED = RECIPE.layers(seed=5)
DATA = RECIPE.training_data()
ORDER = SampleOrder(len(DATA), 5)


class Coordinator:
    """``missing``: of the batch, what nobody has in that stage; ``driven``: what is being driven, by peer."""

    def __init__(self, spans: dict[str, tuple[int, int]]) -> None:
        self.spans = dict(spans)
        self.dead: set[str] = set()
        self.held: list[dict[str, Ranges]] = [{} for _ in range(STAGES)]
        self.driven: dict[str, Ranges] = {}
        self.accusations: list[tuple[str, PeerToCoordinatorAccuseReplica]] = []
        self.watchers: list[asyncio.Event] = []

    def view(self) -> Any:
        spans = [
            SimpleNamespace(peer=peer, first=a, last=b, rate=1.0, recomputes=False)
            for peer, (a, b) in sorted(self.spans.items())
        ]
        pipeline = SimpleNamespace(boundaries=BOUNDARIES, spans=spans)
        return SimpleNamespace(pipeline=pipeline, round=ROUND, phase="training", must_resync=False)

    def claim(self, peer: str, stage: int, ranges: Ranges) -> Ranges:
        others = merge(one for other, held in self.held[stage].items() if other != peer for one in held)
        granted = [one for one in ranges if not overlap([one], others)]
        self.held[stage][peer] = merge([*subtract(self.held[stage].get(peer, []), merge(granted)), *granted])
        return granted

    def drive(self, peer: str, ask: PeerToCoordinatorDrive) -> Ranges:
        mine = subtract(self.driven.get(peer, []), merge(from_wire(ask.done)))
        elsewhere = merge(one for other, held in self.driven.items() if other != peer for one in held)
        missing = merge(
            (at, at + MICRO_BATCH)
            for at in range(0, BATCH, MICRO_BATCH)
            if any(not any(overlap([(at, at + MICRO_BATCH)], held) for held in stage.values()) for stage in self.held)
        )
        free = subtract(subtract(missing, mine), elsewhere)
        for start, stop in free:
            for at in range(start, stop, MICRO_BATCH):
                if sum(b - a for a, b in mine) < ask.samples:
                    mine = merge([*mine, (at, at + MICRO_BATCH)])
        self.driven[peer] = mine
        return mine

    def kill(self, peer: str) -> None:
        self.dead.add(peer)
        del self.spans[peer]
        self.driven.pop(peer, None)
        for stage in self.held:
            stage.pop(peer, None)
        for watcher in self.watchers:
            watcher.set()


class Client:
    """Of one scope of one peer."""

    deadlines = Deadlines(PATIENCE_S)

    def __init__(self, coordinator: Coordinator, peer: str, scope: int) -> None:
        self.peer, self._scope, self._coordinator = peer, scope, coordinator
        self._changed = asyncio.Event()
        coordinator.watchers.append(self._changed)

    @property
    def view(self) -> Any:
        return self._coordinator.view()

    async def wait_for(self, predicate: Callable[[Any], bool], timeout_s: float | None = None) -> Any:
        await self._changed.wait()
        self._changed.clear()
        return self.view

    async def ask(self, message: Message, reply: type[Message]) -> Message:
        await asyncio.sleep(0.01)
        match message:
            case PeerToCoordinatorClaim():
                granted = self._coordinator.claim(self.peer, self._scope - 1, from_wire(message.ranges))
                return CoordinatorToPeerClaimed(ranges=to_wire(granted))
            case PeerToCoordinatorDrive():
                return CoordinatorToPeerLease(ranges=to_wire(self._coordinator.drive(self.peer, message)))
            case PeerToCoordinatorAccuseReplica():
                self._coordinator.accusations.append((self.peer, message))
            case PeerToCoordinatorRelease():
                held = self._coordinator.held[self._scope - 1]
                held[self.peer] = subtract(held.get(self.peer, []), merge(from_wire(message.ranges)))
        return Acknowledged()


class Node:
    """A memory endpoint with control messages: ``nodes`` answers for all peers."""

    def __init__(self, network: MemoryNetwork, nodes: dict[str, "Node"], coordinator: Coordinator, peer: str) -> None:
        self._endpoint: Any = network.endpoint(peer)
        self._nodes, self._coordinator, self._peer = nodes, coordinator, peer
        self._handlers: dict[tuple[int, type[Message]], Any] = {}
        self.control = SimpleNamespace(handle=self._handle)
        nodes[peer] = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    def _handle(self, kind: type[Message], handler: Any, scope: int = 0) -> None:
        self._handlers[scope, kind] = handler

    def processes(self) -> dict[str, bytes]:
        return {peer: peer.encode() for peer in self._coordinator.spans}

    def peer_with(self, key: bytes) -> str:
        return key.decode()

    async def ask(self, peer: str, message: Message, reply: type[Message], wait_s: float, scope: int = 0) -> Message:
        await asyncio.sleep(0.005)
        other = self._nodes[peer]
        if peer in self._coordinator.dead or self._peer in self._coordinator.dead:
            raise Unreachable("dead, for the test")
        handler = other._handlers.get((scope, type(message)))
        if handler is None:
            raise WireError("not for this side")
        answer: Message = await handler(SimpleNamespace(remote_key=self._peer.encode()), message)
        return answer


class FakeReplica:
    """What counts in a stage."""

    tokens_per_sample = 1
    round = ROUND

    def __init__(self, vector: ParameterVector) -> None:
        self.work, self.clock = AccumulatedGradient(vector), PhaseClock()
        self.ranges: Ranges = []

    def count_trained(self, start: int, stop: int, loss: Tensor | None) -> None:
        assert not overlap(self.ranges, [(start, stop)]), "counted twice"
        self.ranges = merge([*self.ranges, (start, stop)])


class Peer:
    """``computed`` is called before each of its computations."""

    def __init__(
        self, coordinator: Coordinator, node: Node, name: str, device: torch.device, share: float = 0.0
    ) -> None:
        first, last = coordinator.spans[name]
        self.name, self.coordinator = name, coordinator
        self.computed: Callable[[Any], None] = lambda task: None
        self.lie: Callable[[ComputeResult], ComputeResult] = lambda made: made
        self.repeats: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.hangs = self.may_look_up = False
        self.looked_up: asyncio.Queue[str] = asyncio.Queue()
        members = [
            SimpleNamespace(
                client=Client(coordinator, name, scope),
                rejoined=False,
                node=node,
                request_heartbeat=lambda: None,
                progress=Progress(),
            )
            for scope in range(STAGES + 1)
        ]
        stages = {stage: members[stage + 1] for stage in range(first, last + 1)}
        self.progress: Progress = members[0].progress
        everybody: Any = SimpleNamespace(run=members[0], stages=stages)
        samples = TrainingSamples(RECIPE, DATA, ORDER)
        shapes = self.shapes = StageShapes.of(RECIPE, LAYERED, BOUNDARIES, DATA.batch([0]), MICRO_BATCH)
        self.node = node
        self.replicas: dict[int, Any] = {}
        held = []
        for stage in stages:
            model = LAYERED.build(BOUNDARIES[stage], BOUNDARIES[stage + 1]).to(device)
            self.replicas[stage] = FakeReplica(ParameterVector(model))
            self.model = model
            held.append(HeldStage(stage, BOUNDARIES[stage], model, self.replicas[stage].work))
        settings = {stage: ComputeSettings(device, max_in_flight=3) for stage in stages}
        self.took: list[tuple[int, float]] = []

        def took(stage: int, seconds: float) -> None:
            self.took.append((stage, seconds))

        self.training = SpanTraining(held, self.replicas, samples, settings, took, is_last=last == STAGES - 1)
        engine = StageEngine(
            StageSpan(first, last),
            EngineSettings(STAGES, MICRO_BATCH, 3, 0.25, PATIENCE_S),
            Router(name, PATIENCE_S),
            0,
        )
        self.staging = Staging(device, get_codec("float32"))
        checks = CheckSettings(share, tolerance("float32", 0.0), STAGES, random.Random(name))
        self.runner = StageRunner(everybody, engine, shapes, self.staging, checks)

    async def live(self) -> None:
        """What the training thread does, until the test cancels it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.runner.run())
            await asyncio.sleep(0)
            await self.runner.open_round(ROUND)
            made: ComputeResult | None = None
            while True:
                task = self.runner.take_ready_task(made)
                self.runner.wake()
                if task is None:
                    task = await self.runner.next_task()
                if isinstance(task, Attention):
                    assert self.may_look_up
                    self.looked_up.put_nowait(task)
                    return
                await asyncio.sleep(STEP_S)
                self.computed(task)
                if self.hangs or self.name in self.coordinator.dead:
                    await asyncio.Event().wait()
                with self.staging.computing():
                    made = self._repeat(task) if isinstance(task, RepeatTask) else self.training.execute(task)
                if made is not None:
                    made = self.lie(made)

    def _repeat(self, task: RepeatTask) -> None:
        """Compute another's micro-batch again, and change the result as the test says."""
        inner: Future[RepeatedTensors] = Future()
        self.training.execute(replace(task, done=inner))
        if (error := inner.exception()) is not None:
            task.done.set_exception(error)
            return
        made = inner.result()
        tensors = {
            name: one if one is None else ComputedTensor.on_current_stream(self.repeats(one.tensor))
            for name, one in (("output", made.output), ("gradient", made.gradient))
        }
        task.done.set_result(replace(made, **tensors))


@asynccontextmanager
async def pipeline(
    spans: dict[str, tuple[int, int]], device: torch.device = CPU, share: float = 0.0
) -> AsyncIterator[tuple[Coordinator, MemoryNetwork, dict[str, Peer]]]:
    coordinator, network, nodes = Coordinator(spans), MemoryNetwork(), {}
    for name in spans:
        Node(network, nodes, coordinator, name)
    peers = {name: Peer(coordinator, nodes[name], name, device, share) for name in spans}
    async with asyncio.TaskGroup() as tasks:
        living = [tasks.create_task(peer.live()) for peer in peers.values()]
        yield coordinator, network, peers
        for task in living:
            task.cancel()


def counted(peers: dict[str, Peer], coordinator: Coordinator, stage: int) -> Ranges:
    live = [peer for name, peer in peers.items() if name not in coordinator.dead and stage in peer.replicas]
    return sorted(one for peer in live for one in peer.replicas[stage].ranges)


async def whole_batch(peers: dict[str, Peer], coordinator: Coordinator) -> None:
    """Until every sample counts in every stage, of the living."""
    for _ in range(100_000):
        if all(merge(counted(peers, coordinator, stage)) == [(0, BATCH)] for stage in range(STAGES)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError([counted(peers, coordinator, stage) for stage in range(STAGES)])


def check_gradient(peers: dict[str, Peer], coordinator: Coordinator, device: torch.device = CPU) -> None:
    """The weighted mean over the living replicas of each stage is the whole model's gradient of the whole batch."""
    model = RECIPE.build_model(5).to(device)
    RECIPE.loss(model, DATA.batch(ORDER.indices(0, BATCH)).to(device)).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([one.grad.reshape(-1).cpu() for one in model.parameters() if one.grad is not None])
    found = []
    for stage in range(STAGES):
        replicas = [
            peer.replicas[stage]
            for name, peer in peers.items()
            if name not in coordinator.dead and stage in peer.replicas and peer.replicas[stage].ranges
        ]
        empty = torch.zeros(
            sum(one.elements for layer in range(*BOUNDARIES[stage : stage + 2]) for one in LAYERED.layouts[layer])
        )
        total = sum(
            whole_vector(one.work.contribution(empty)) * sum(stop - start for start, stop in one.ranges)
            for one in replicas
        )
        found.append(total / BATCH)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-6)


SPANS = {
    "a chain": {A: (0, 0), B: (1, 1), C: (2, 2)},
    "replicas everywhere": {A: (0, 0), B: (1, 1), C: (2, 2), D: (0, 0), E: (1, 1)},
    "spans of several stages": {A: (0, 1), B: (2, 2), C: (0, 2), D: (1, 2)},
    "one peer": {A: (0, 2)},
    "three everywhere": {
        A: (0, 0),
        B: (0, 0),
        C: (0, 0),
        D: (1, 1),
        E: (1, 1),
        F: (1, 1),
        G: (2, 2),
        H: (2, 2),
        J: (2, 2),
    },
}


@pytest.mark.parametrize("kind", SPANS)
@devices
def test_the_gradient_is_that_of_the_whole_model(kind: str, device: torch.device) -> None:
    async def main() -> None:
        async with pipeline(SPANS[kind], device) as (coordinator, _, peers):
            await whole_batch(peers, coordinator)
            check_gradient(peers, coordinator, device)
            assert {peer.runner.in_flight for peer in peers.values()} == {0}
            told = [peer.progress.activity for peer in peers.values()]
            assert told == ["idle"] * len(peers), "nothing is left to do"
            for peer in peers.values():
                counts = sum(stop - start for start, stop in peer.replicas[max(peer.replicas)].ranges) / MICRO_BATCH
                assert len(peer.took) == counts, "each is timed once"
                assert all(stage in peer.replicas and seconds > 0 for stage, seconds in peer.took)

    run_virtual(main())


@pytest.mark.parametrize(("kind", "culprit"), [("activation", A), ("gradient", C)])
def test_what_is_not_finite_is_said_and_offered_to_nobody(kind: str, culprit: str) -> None:
    """It would be the same each time that it is tried."""

    async def main() -> None:
        async with pipeline(SPANS["a chain"]) as (_, _, peers):
            peer = peers[culprit]
            peer.may_look_up = True
            with torch.no_grad():
                for parameter in peer.model.parameters():
                    parameter.fill_(math.nan)
            async with asyncio.timeout(60.0):
                assert await peer.looked_up.get() is Attention.DIVERGED
            assert peer.runner.trouble.startswith(f"the {kind} of a micro-batch cannot be sent")
            await peer.runner.end_round()
            assert peer.runner.trouble == ""

    run_virtual(main())


def scaled(kind: type[Any]) -> Callable[[ComputeResult], ComputeResult]:
    """Sends results of one kind that are much too large."""

    def lie(made: ComputeResult) -> ComputeResult:
        if made.tensor is None or not isinstance(made.compute, kind):
            return made
        return replace(made, tensor=ComputedTensor.on_current_stream(made.tensor.tensor * 1e12))

    return lie


@pytest.mark.parametrize("kind", [ComputeForward, ComputeBackward])
def test_what_a_replica_sends_too_large_is_computed_by_another_one(kind: type[Any]) -> None:
    async def main() -> None:
        async with pipeline(SPANS["replicas everywhere"]) as (coordinator, _, peers):
            peers[E].lie = scaled(kind)
            await whole_batch(peers, coordinator)
            check_gradient(peers, coordinator)

    run_virtual(main())


@pytest.mark.parametrize("kind", [ComputeForward, ComputeBackward])
def test_who_gets_it_from_the_only_replica_does_without_it_and_accuses_it(kind: type[Any]) -> None:
    async def main() -> None:
        async with pipeline(SPANS["a chain"]) as (coordinator, _, peers):
            peers[B].lie = scaled(kind)
            await asyncio.sleep(60.0)
            accuser = C if kind is ComputeForward else A
            assert [(by, one.accused, one.stage) for by, one in coordinator.accusations] == [(accuser, B, 1)]
            assert counted(peers, coordinator, 2 if accuser == C else 0) == [], "and nobody ends"

    run_virtual(main())


@pytest.mark.parametrize("kind", SPANS)
def test_honest_replicas_agree(kind: str) -> None:
    async def main() -> None:
        async with pipeline(SPANS[kind], share=1.0) as (coordinator, _, peers):
            await whole_batch(peers, coordinator)
            check_gradient(peers, coordinator)
            assert coordinator.accusations == []

    run_virtual(main())


def flipped(made: Tensor) -> Tensor:
    return -made


def shuffled(made: Tensor) -> Tensor:
    """Random values of the same norm."""
    other = torch.randn(made.shape, generator=torch.Generator().manual_seed(1)).to(made.device)
    return other * (made.norm() / other.norm())


def doubled(made: Tensor) -> Tensor:
    return 2 * made


def wrong(kind: type[Any], values: Callable[[Tensor], Tensor]) -> Callable[[ComputeResult], ComputeResult]:
    """Sends other values of the usual size."""

    def lie(made: ComputeResult) -> ComputeResult:
        if made.tensor is None or not isinstance(made.compute, kind):
            return made
        return replace(made, tensor=ComputedTensor.on_current_stream(values(made.tensor.tensor)))

    return lie


@pytest.mark.parametrize("values", [flipped, shuffled, doubled])
@pytest.mark.parametrize(
    ("liar", "kind", "accusers"),
    [
        (A, ComputeForward, {D, E, F}),
        (D, ComputeForward, {A, B, C}),
        (D, ComputeBackward, {A, B, C}),
        (G, ComputeBackward, {D, E, F}),
    ],
)
def test_wrong_values_of_usual_size_are_found_and_used_by_nobody(
    liar: str, kind: type[Any], accusers: set[str], values: Callable[[Tensor], Tensor]
) -> None:
    async def main() -> None:
        async with pipeline(SPANS["three everywhere"], share=1.0) as (coordinator, _, peers):
            peers[liar].lie = wrong(kind, values)
            await whole_batch(peers, coordinator)
            assert {one.accused for _, one in coordinator.accusations} == {liar}
            assert {by for by, _ in coordinator.accusations} <= accusers

    run_virtual(main())


def test_nobody_is_accused_where_nobody_can_say_who_is_wrong() -> None:
    async def main() -> None:
        async with pipeline(SPANS["replicas everywhere"], share=1.0) as (coordinator, _, peers):
            peers[E].lie = wrong(ComputeBackward, flipped)
            peers[E].repeats = flipped
            await asyncio.sleep(60.0)
            assert coordinator.accusations == []
            backwards = sum(peers[name].training.backwards for name in (A, D))
            assert backwards < BATCH / MICRO_BATCH, "what is disputed is not used, unless no witness had room"

    run_virtual(main())


def test_who_lies_when_it_computes_again_is_found_out() -> None:
    async def main() -> None:
        async with pipeline(SPANS["three everywhere"], share=1.0) as (coordinator, _, peers):
            peers[E].repeats = flipped
            await whole_batch(peers, coordinator)
            check_gradient(peers, coordinator)
            assert {one.accused for _, one in coordinator.accusations} == {E}

    run_virtual(main())


@pytest.mark.parametrize("before", [set(), {H}])
def test_who_shows_other_bytes_than_it_sent_needs_two_witnesses(before: set[str]) -> None:
    """``before``: has been contradicted by it already."""

    async def main() -> None:
        spans = {A: (0, 0), B: (1, 1), C: (1, 1), G: (2, 2)}
        async with pipeline(spans, share=1.0) as (coordinator, _, peers):
            real = peers[B].node.publish

            def publish(blob: Any, source: Any) -> None:
                if blob.kind == "returned":
                    source = replace(source, data=memoryview(bytes(len(source.data))))
                real(blob, source)

            peers[B].node.publish = publish  # type: ignore[attr-defined]
            peers[A].runner._checker._contradictors = {B: set(before)}
            await whole_batch(peers, coordinator)
            assert {one.accused for _, one in coordinator.accusations} == ({B} if before else set())

    run_virtual(main())


def test_targets_that_were_changed_on_the_way_are_found() -> None:
    async def main() -> None:
        async with pipeline(SPANS["three everywhere"], share=1.0) as (coordinator, _, peers):
            peers[D].lie = lambda made: replace(made, targets=None if made.targets is None else 1 - made.targets % 2)
            await whole_batch(peers, coordinator)
            assert {one.accused for _, one in coordinator.accusations} == {D}

    run_virtual(main())


def test_others_cannot_make_a_peer_compute_without_end() -> None:
    async def main() -> None:
        async with pipeline(SPANS["a chain"]) as (coordinator, _, peers):
            await whole_batch(peers, coordinator)
            request = PeerToPeerRepeatWork(
                round=ROUND, start=0, stop=2, stage=0, last=0, number=0, backward=False, seed=bytes(16)
            )
            for _ in range(4):
                await peers[B].node.ask(A, request, PeerToPeerWorkRepeated, 10.0)
            with pytest.raises(Busy, match="enough"):
                await peers[B].node.ask(A, request, PeerToPeerWorkRepeated, 10.0)
            for change, error in (
                ({"round": ROUND + 1}, StaleWork),
                ({"stage": 1, "last": 1}, StaleWork),
                ({"stop": 100}, WireError),
            ):
                with pytest.raises(error):
                    await peers[B].node.ask(A, request.model_copy(update=change), PeerToPeerWorkRepeated, 10.0)
            with pytest.raises(Busy, match="does not hold stage 1"):
                await peers[C].node.ask(A, request, PeerToPeerWorkRepeated, 10.0)

    run_virtual(main())


def test_work_that_overflows_when_it_is_computed_again_is_the_askers_fault() -> None:
    async def main() -> None:
        async with pipeline(SPANS["a chain"]) as (coordinator, _, peers):
            await whole_batch(peers, coordinator)
            peers[A].repeats = lambda made: made * float("inf")
            request = PeerToPeerRepeatWork(
                round=ROUND, start=0, stop=2, stage=0, last=0, number=0, backward=False, seed=bytes(16)
            )
            with pytest.raises(WireError, match="cannot be packed"):
                await peers[B].node.ask(A, request, PeerToPeerWorkRepeated, 10.0)

    run_virtual(main())


def test_without_checks_wrong_values_of_usual_size_are_used() -> None:
    async def main() -> None:
        async with pipeline(SPANS["three everywhere"]) as (coordinator, _, peers):
            peers[G].lie = wrong(ComputeBackward, flipped)
            await whole_batch(peers, coordinator)
            with pytest.raises(AssertionError, match="not close"):
                check_gradient(peers, coordinator)

    run_virtual(main())


def offer_to(peer: Peer, stage: int, number: int = 7) -> PeerToPeerOfferTensor:
    """An activation's offer as the stage before makes it."""
    targets = peer.shapes.targets
    shape = (MICRO_BATCH, *peer.shapes.inputs[stage])
    return PeerToPeerOfferTensor(
        kind="activation",
        round=ROUND,
        start=0,
        stop=MICRO_BATCH,
        attempt=1,
        shape=shape,
        dtype="float32",
        size_bytes=4 * math.prod(shape),
        number=number,
        targets=TensorForm(shape=(MICRO_BATCH, *targets.shape), dtype=targets.dtype),
    )


@pytest.mark.parametrize(("sender", "is_taken"), [(A, True), (C, False)])
def test_an_activation_comes_only_from_who_holds_the_stage_before(sender: str, is_taken: bool) -> None:
    async def main() -> None:
        async with pipeline(SPANS["a chain"]) as (_, _, peers):
            peers[A].hangs = True  # it drives nothing itself
            await asyncio.sleep(1.0)
            asked = peers[sender].node.ask(B, offer_to(peers[B], 1), Acknowledged, 1.0, 2)
            if is_taken:
                await asked
            else:
                with pytest.raises(Busy, match="does not hold stage 0"):
                    await asked

    run_virtual(main())


@pytest.mark.parametrize("victim", [A, B, E])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_a_replica_dies_and_every_sample_counts_once(victim: str, nth: int) -> None:
    spans = SPANS["replicas everywhere"]

    async def main() -> None:
        async with pipeline(spans) as (coordinator, network, peers):
            seen = 0

            def die(task: Any) -> None:
                nonlocal seen
                seen += 1
                if seen == nth:
                    network.kill(victim)
                    coordinator.kill(victim)

            peers[victim].computed = die
            await whole_batch(peers, coordinator)
            check_gradient(peers, coordinator)
            assert victim in coordinator.dead

    run_virtual(main())


def test_who_hangs_says_that_it_has_work_and_those_who_wait_for_it_do_not() -> None:
    async def main() -> None:
        async with pipeline(SPANS["a chain"]) as (_, _, peers):
            while not peers[C].progress.has_work:  # noqa: ASYNC110
                await asyncio.sleep(STEP_S / 4)
            peers[B].hangs = True
            await asyncio.sleep(10 * PATIENCE_S)
            assert {name: peer.progress.has_work for name, peer in peers.items()} == {A: False, B: True, C: False}

    run_virtual(main())


def test_whoever_is_told_that_there_is_no_room_does_not_wait_for_an_answer() -> None:
    async def main() -> None:
        spans = {A: (0, 0), D: (0, 0), B: (1, 1), C: (2, 2)}
        async with pipeline(spans) as (coordinator, _, peers):
            await whole_batch(peers, coordinator)
            check_gradient(peers, coordinator)
            assert now_s() < PATIENCE_S / 2, "nothing was overdue"

    run_virtual(main())
