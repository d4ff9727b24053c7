"""Whole pipelines on a virtual clock: engines of peers, a network with faults, and gradients that are only counted.

``Simulation`` has the clock, the network and the faults; ``SimulatedPeer`` executes one engine's effects; the
coordinator is in ``ledger.py``. A tensor is its own description, so that a wrong one is seen where it is used; a
stage's accumulated gradient is a counter of the samples in it. Everything follows from the seed.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count as numbers
from typing import Any

from tests.swarm.pipeline.ledger import Ledger

from shoal.swarm.pipeline.engine.effects import (
    Answer,
    AskToDrive,
    Claim,
    Compute,
    ComputeBackward,
    ComputeForward,
    Drop,
    DropRound,
    Effect,
    Fetch,
    MicroBatch,
    MicroBatchDone,
    PeerNote,
    Release,
    Reply,
    Send,
    TensorOffer,
)
from shoal.swarm.pipeline.engine.engine import EngineSettings, StageEngine, StageSpan
from shoal.swarm.pipeline.engine.routing import Router

Tensor = tuple[str, MicroBatch, int]
"""("activation", whose, the stage that it is the input of) or ("gradient", whose, the stage whose input's it is)."""


@dataclass(frozen=True)
class Speed:
    """Seconds of one stage for one micro-batch."""

    forward_s: float = 1.0
    backward_s: float = 2.0


@dataclass(frozen=True)
class Network:
    """Delays of one way are drawn evenly, so messages overtake each other. ``lost``, ``doubled``: of all messages
    between peers, and of all answers. What goes to the coordinator gets there in its order, as over one connection."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    transfer_s: tuple[float, float] = (0.0, 0.0)
    lost: float = 0.0
    doubled: float = 0.0
    broken_transfers: float = 0.0


@dataclass(frozen=True)
class World:
    """``spans``: first and last stage of every peer. ``heartbeat_s``: how often peers report, and tick.
    ``predictions``: the rate that the plan has of a peer, in true ones; 1 where nothing else is said, 0: none."""

    stages: int
    spans: dict[str, tuple[int, int]]
    batch: int = 24
    micro_batch: int = 2
    max_in_flight: int = 4
    rounds: int = 1
    lease_samples: int = 10**9
    speeds: dict[str, Speed] = field(default_factory=dict)
    predictions: dict[str, float] = field(default_factory=dict)
    network: Network = Network()
    patience_s: float = 30.0
    request_s: float = 6.0
    heartbeat_s: float = 5.0
    retry_s: float = 2.0
    averaging_s: float = 3.0

    def speed_of(self, peer: str) -> Speed:
        return self.speeds.get(peer, Speed())


Point = Callable[["Simulation", str], bool]


@dataclass
class Fault:
    """``kill`` is SIGKILL, with a new process after ``back_s`` (None: never); ``freeze`` SIGSTOP until then. It strikes
    ``peer`` at ``at_s``, or the first time that ``point`` holds after something happened."""

    kind: str
    peer: str
    back_s: float | None
    at_s: float | None = None
    point: Point | None = None
    is_past: bool = False


class SimulatedPeer:
    """One process: an engine, what it keeps, and one computation at a time."""

    def __init__(self, simulation: Simulation, name: str, process: int) -> None:
        world = simulation.world
        first, last = world.spans[name]
        self.simulation, self.name, self.process = simulation, name, process
        self.router = simulation.make_router(name)
        settings = EngineSettings(world.stages, world.micro_batch, world.max_in_flight, world.retry_s, world.patience_s)
        self.engine = StageEngine(StageSpan(first, last), settings, self.router, first_number=process * 10**6)
        self.span = range(first, last + 1)
        self.is_dead = self.is_frozen = False
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.tensors: dict[int, dict[str, Tensor]] = {}
        self.accumulated: dict[int, Counter[int]] = {stage: Counter() for stage in self.span}
        self.computing: Compute | None = None
        self.computing_round_dropped = False
        self.busy_s = 0.0
        self.order: list[Compute] = []

    # What happens to it ---------------------------------------------------------------------------------------

    def do(self, what: Callable[..., None], *arguments: Any) -> None:
        """Now; after it has been woken; or never."""
        if self.is_dead:
            return
        if self.is_frozen:
            self.waiting.append((what, arguments))
            return
        what(*arguments)
        self.simulation.look_at(self.name)

    def event(self, method: str, *arguments: Any) -> None:
        """One event of the engine, and its effects."""
        effects = getattr(self.engine, method)(*arguments, self.simulation.now_s)
        self.execute(effects)

    def receive_offer(self, offer: TensorOffer, reply: Callable[[Answer], None]) -> None:
        effects = self.engine.offered(offer, self.simulation.now_s)
        first = effects[0]
        assert isinstance(first, Reply)
        assert first.offer == offer
        reply(first.answer)
        self.execute(effects[1:])

    def lost(self) -> None:
        """The coordinator gave up on us: begin anew, and only then join again."""
        self.event("round_over")
        self.simulation.to_coordinator(self, "join")

    def tick(self) -> None:
        self.event("tick")
        self.simulation.to_coordinator(self, "heartbeat", {s: self.engine.counted(s) for s in self.span})

    # What it does ---------------------------------------------------------------------------------------------

    def execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    kept = self.tensors[effect.number][effect.kind]
                    assert kept[:2] == (effect.kind, effect.micro_batch)
                    self.simulation.send(self, effect)
                case PeerNote():
                    self.simulation.note(self, effect)
                case Fetch():
                    self.tensors.setdefault(effect.job, {})
                    self.simulation.fetch(self, effect)
                case Claim() | Release() | AskToDrive():
                    self.simulation.to_coordinator(self, type(effect).__name__, effect)
                case ComputeForward() | ComputeBackward():
                    self._compute(effect)
                case Drop():
                    assert self.tensors.pop(effect.job, None) is not None, "dropped twice"
                case DropRound():
                    self.tensors.clear()
                    self.accumulated = {stage: Counter() for stage in self.span}
                    self.computing_round_dropped = True
                case MicroBatchDone():
                    self.simulation.done[effect.micro_batch] += 1
                case Reply():
                    raise AssertionError("an answer that nobody asked for")
        self.check()

    def check(self) -> None:
        """What must hold after every event."""
        limit = self.simulation.world.max_in_flight
        assert self.engine.kept_activations <= limit
        assert len(self.engine._outbox) <= limit
        assert len(self.tensors) == self.engine.kept_activations + len(self.engine._outbox)
        counted = {sample for stage in self.span for a, b in self.engine.counted(stage) for sample in range(a, b)}
        assert all(set(samples) <= counted for samples in self.accumulated.values())

    def _compute(self, compute: Compute) -> None:
        assert self.computing is None, "one computation at a time"
        kept = self.tensors.setdefault(compute.job, {}) if compute.from_stage == 0 else self.tensors[compute.job]
        self.computing, self.computing_round_dropped = compute, False
        self.order.append(compute)
        stages = self.span.stop - compute.from_stage
        speed = self.simulation.world.speed_of(self.name)
        if isinstance(compute, ComputeForward):
            assert compute.from_stage == 0 or kept["input"] == ("activation", compute.micro_batch, compute.from_stage)
            took_s = speed.forward_s * stages
        else:
            is_last = self.engine.is_last
            assert is_last or kept["behind"] == ("gradient", compute.micro_batch, self.span.stop)
            took_s = speed.backward_s * stages
        self.busy_s += took_s
        self.simulation.after(took_s, self.do, self._computed, compute)

    def _computed(self, compute: Compute) -> None:
        self.computing = None
        self.simulation.finished_s = self.simulation.now_s
        micro_batch, stages = compute.micro_batch, range(compute.from_stage, self.span.stop)
        if isinstance(compute, ComputeForward):
            self.simulation.computed.update(("forward", micro_batch, stage) for stage in stages)
            made = {"activation": ("activation", micro_batch, self.span.stop)}
        else:
            self.simulation.computed.update(("backward", micro_batch, stage) for stage in stages)
            made = {"gradient": ("gradient", micro_batch, compute.from_stage)}
            if not self.computing_round_dropped:
                for stage in compute.accumulate:
                    self.accumulated[stage].update(range(micro_batch.start, micro_batch.stop))
        if compute.job in self.tensors and not self.computing_round_dropped:
            self.tensors[compute.job] = made
        self.event("computed", compute)


class Simulation:
    """``run`` it, then look at ``commits`` (virtual moments), ``finished_s`` (the last computation's end), ``computed``
    and the peers."""

    def __init__(
        self,
        world: World,
        seed: int = 0,
        faults: list[Fault] | None = None,
        make_router: Callable[[str], Any] | None = None,
    ) -> None:
        self.world = world
        self.now_s = self.finished_s = 0.0
        self.events = 0
        self.random = random.Random(seed)
        self.make_router = make_router or (lambda name: Router(name, world.patience_s))
        self.computed: Counter[tuple[str, MicroBatch, int]] = Counter()
        self.done: Counter[MicroBatch] = Counter()
        self.commits: list[float] = []
        self.faults = faults or []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = numbers()
        self._processes = numbers(1)
        self._arrived_s: dict[tuple[int, bool], float] = {}
        self.peers: dict[str, SimulatedPeer] = {}
        self.coordinator = Ledger(self)
        for name in world.spans:
            self.start(name)
        for fault in self.faults:
            if fault.at_s is not None:
                self.after(fault.at_s, self.strike, fault)
        self.coordinator.begin()

    # Clock ----------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._numbers), what, arguments))

    def run(self, until_s: float = 10_000.0) -> Simulation:
        """Until all rounds are committed. Progress must be made within ``until_s`` of virtual time."""
        before_s, at_once = -1.0, 0
        while len(self.commits) < self.world.rounds:
            self.now_s, _, what, arguments = heapq.heappop(self._heap)
            at_once = at_once + 1 if self.now_s == before_s else 0
            before_s = self.now_s
            assert at_once < 10_000, f"{what} {arguments} goes round in circles"
            assert self.now_s <= until_s, f"no verdict within {until_s} s: {self.coordinator.outlook()}"
            self.events += 1
            what(*arguments)
        return self

    # Peers and their ends -------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        peer = self.peers[name] = SimulatedPeer(self, name, next(self._processes))
        self.to_coordinator(peer, "join")
        self._tick(peer)

    def _tick(self, peer: SimulatedPeer) -> None:
        if not peer.is_dead:
            if not peer.is_frozen:
                peer.do(peer.tick)
            self.after(self.world.heartbeat_s, self._tick, peer)

    def look_at(self, name: str) -> None:
        """Whether something is to strike now."""
        for fault in self.faults:
            if fault.peer == name and not fault.is_past and fault.point is not None and fault.point(self, name):
                self.strike(fault)

    def strike(self, fault: Fault) -> None:
        peer = self.peers[fault.peer]
        fault.is_past = True
        if peer.is_dead or peer.is_frozen:
            return
        if fault.kind == "kill":
            peer.is_dead = True
            if fault.back_s is not None:
                self.after(fault.back_s, self.start, fault.peer)
        else:
            peer.is_frozen = True
            assert fault.back_s is not None
            self.after(fault.back_s, self._wake, peer)

    def _wake(self, peer: SimulatedPeer) -> None:
        peer.is_frozen = False
        waiting, peer.waiting = peer.waiting, []
        for what, arguments in waiting:
            peer.do(what, *arguments)

    # Network --------------------------------------------------------------------------------------------------

    def _delay_s(self) -> float:
        return self.random.uniform(*self.world.network.delay_s)

    def _ways(self) -> list[float]:
        """The delays with which one message arrives: mostly one."""
        network = self.world.network
        if network.lost and self.random.random() < network.lost:
            return []
        copies = 2 if network.doubled and self.random.random() < network.doubled else 1
        return [self._delay_s() for _ in range(copies)]

    def send(self, sender: SimulatedPeer, send: Send) -> None:
        """A request: answered, or failed after a while; a late answer is too late."""
        is_open = [True]

        def end(method: str, *arguments: Any) -> None:
            if is_open[0]:
                is_open[0] = False
                sender.event(method, send, *arguments)

        def reply(answer: Answer) -> None:
            for delay_s in self._ways():
                if answer == "accepted":
                    self.after(delay_s, is_open.__setitem__, 0, False)
                else:
                    self.after(delay_s, sender.do, end, "refused", answer)

        offer = TensorOffer(send.kind, sender.name, send.micro_batch, send.stage, send.attempt, send.number)
        receiver = self.peers[send.peer]
        for delay_s in self._ways():
            self.after(delay_s, receiver.do, receiver.receive_offer, offer, reply)
        self.after(self.world.request_s, sender.do, end, "send_failed")

    def note(self, sender: SimulatedPeer, note: PeerNote) -> None:
        receiver = self.peers[note.peer]
        arriving = PeerNote(note.kind, sender.name, note.micro_batch, note.stage, note.attempt)
        for delay_s in self._ways():
            self.after(delay_s, receiver.do, receiver.event, "noted", arriving)

    def fetch(self, receiver: SimulatedPeer, fetch: Fetch, began_s: float | None = None) -> None:
        network, began_s = self.world.network, self.now_s if began_s is None else began_s
        took_s = self._delay_s() + self.random.uniform(*network.transfer_s)
        self.after(took_s, self._fetched, receiver, fetch, began_s)

    def _fetched(self, receiver: SimulatedPeer, fetch: Fetch, began_s: float) -> None:
        source, network = self.peers[fetch.peer], self.world.network
        if source.is_frozen and not source.is_dead and self.now_s < began_s + self.world.request_s:
            self.after(1.0, self._fetched, receiver, fetch, began_s)
            return
        tensor = source.tensors.get(fetch.number, {}).get(fetch.kind)
        is_broken = network.broken_transfers and self.random.random() < network.broken_transfers
        if source.is_dead or source.is_frozen or tensor is None or is_broken:
            receiver.do(receiver.event, "fetch_failed", fetch)
        else:
            receiver.do(self._arrive, receiver, fetch, tensor)

    def _arrive(self, receiver: SimulatedPeer, fetch: Fetch, tensor: Tensor) -> None:
        stage = fetch.stage + (fetch.kind == "gradient")
        assert tensor == (fetch.kind, fetch.micro_batch, stage), "not the tensor that was offered"
        if fetch.job in receiver.tensors:
            receiver.tensors[fetch.job]["input" if fetch.kind == "activation" else "behind"] = tensor
        receiver.event("tensor_arrived", fetch)

    # To and from the coordinator: in order, and surely -----------------------------------------------------------

    def _in_order(self, peer: SimulatedPeer, is_up: bool, what: Callable[..., None], *arguments: Any) -> None:
        key = (peer.process, is_up)
        at_s = max(self.now_s + self._delay_s(), self._arrived_s.get(key, 0.0))
        self._arrived_s[key] = at_s
        self.after(at_s - self.now_s, what, *arguments)

    def to_coordinator(self, peer: SimulatedPeer, kind: str, content: Any = None) -> None:
        self._in_order(peer, True, self.coordinator.hear, peer, kind, content)

    def from_coordinator(self, peer: SimulatedPeer, method: str, *arguments: Any) -> None:
        self._in_order(peer, False, peer.do, peer.event, method, *arguments)

    def tell_lost(self, peer: SimulatedPeer) -> None:
        self._in_order(peer, False, peer.do, peer.lost)
