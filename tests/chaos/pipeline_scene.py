"""A pipeline run in one process: the real coordinator and real peers, a training thread each, on a virtual clock."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from tests.chaos import small_model
from tests.chaos.small_model import SmallRecipe
from tests.fakes.hosts import serve
from tests.fakes.memory_coordinator import identity
from tests.fakes.memory_network import Step
from tests.fakes.memory_nodes import HOST, MemoryNodes
from tests.fakes.processes import context_of, current_process, run_processes, the_loop
from tests.fakes.training_threads import SharedLoop, TrainingThread
from tests.fakes.virtual_clock import until

from shoal.peer.member import connection
from shoal.peer.member.connection import RunConnection
from shoal.peer.member.replica import TrainingReplica
from shoal.peer.options import SessionOptions
from shoal.peer.pipeline import peer as pipeline_peer
from shoal.peer.pipeline.peer import PipelinePeer
from shoal.peer.pipeline.span import HeldSpan
from shoal.peer.pipeline.training import SpanTraining
from shoal.peer.training.device import MemoryLimits
from shoal.swarm.coordinator import service
from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.pipeline_run import PipelineRun
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import Address
from shoal.swarm.protocol.wire import Envelope
from shoal.swarm.transport.node import Node

STAGES, ROUNDS, BATCH, MICRO = 3, 4, 16, 2
PATIENCE_S = 6.0
COMPUTE_S = 0.4
HOST_PROCESS = "host"

TOML = f"""
algorithm = "virtual_batch"
averaging.codec = "float32"
[run]
name = "reef"
seed = {small_model.SEED}
rounds = {ROUNDS}
[recipe]
name = "own"
[pipeline]
stages = {STAGES}
micro_batch = {MICRO}
activations = "float32"
max_in_flight = 3
[inner]
precision = "float32"
[outer]
optimizer = "adamw"
lr = 2e-3
weight_decay = 0.01
[access]
admission = "open"
[round]
tokens = {BATCH}
max_s = 300
patience_s = {PATIENCE_S}
"""


class Peer:
    """One process of one identity. ``events``: what it told; ``held``: the span that it is in, or was in last."""

    def __init__(self, scene: "Scene", number: int, layers: int, lives: int = 0) -> None:
        self.scene, self.number, self.layers, self.lives = scene, number, layers, lives
        self.process = f"peer{number}" + f" again {lives}" * bool(lives)
        self.id = identity(number + 1).peer_id
        self.events: list[dict[str, Any]] = []
        self.held: HeldSpan | None = None
        self.is_dead = False
        self.thread = TrainingThread(self.process, self._live)

    @property
    def span(self) -> tuple[int, int] | None:
        """The span that the peer believes to hold."""
        return (self.held.span.first, self.held.span.last) if self.held is not None else None

    @property
    def round(self) -> int:
        return self.held.training.round if self.held is not None else -1

    def happened(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]

    def _live(self) -> None:
        """Run the peer as ``shoal join`` does."""
        folder = self.scene.folder / f"peer{self.number}"
        folder.mkdir(exist_ok=True)
        options = SessionOptions(
            identity=Path(str(self.number + 1)),
            state=folder,
            name=f"peer{self.number}",
            bind=(HOST, 0),
            on_event=self.events.append,
        )
        joined = RunConnection(str(self.scene.invite), options, "cpu")
        limits = MemoryLimits(small_model.memory_bytes(joined.run_file, self.layers))
        with PipelinePeer(joined, SmallRecipe(), torch.device("cpu"), limits) as peer:
            peer.train()


Moment = Callable[[Peer, str, int], None]
"""A peer comes to a step of a round."""


class Scene:
    """``peers``: all processes there were; ``on_step``: called at each step that somebody comes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = the_loop()
        self.nodes = MemoryNodes(self.loop)
        self.peers: list[Peer] = []
        self.events: list[JournalEvent] = []
        self.on_step: Moment = lambda peer, step, number: None
        self.invite: Invite
        self.service: CoordinatorService

    @property
    def machine(self) -> PipelineRun:
        machine = self.service.run
        assert isinstance(machine, PipelineRun)
        return machine

    @property
    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers if not peer.is_dead]

    def start(self, number: int, layers: int = 2) -> Peer:
        """Join; the same number again: the same command."""
        lives = sum(peer.number == number for peer in self.peers)
        peer = Peer(self, number, layers, lives)
        self.peers.append(peer)
        return peer

    def of_process(self, process: str) -> Peer | None:
        return next((peer for peer in self.peers if peer.process == process), None)

    # Faults -------------------------------------------------------------------------------------------------

    def kill(self, peer: Peer) -> None:
        peer.is_dead = True
        self.nodes.kill(peer.process)

    def stop(self, peer: Peer, for_s: float) -> None:
        self.loop.stop_process(peer.process)
        self.later(for_s, lambda: None if peer.is_dead else self.loop.resume_process(peer.process))

    def later(self, after_s: float, act: Callable[[], object]) -> None:
        self.loop.call_later(after_s, act, context=context_of(""))

    # Steps --------------------------------------------------------------------------------------------------

    def came_to(self, step: str, number: int) -> None:
        """In a training thread. Who was stopped or killed there goes no further."""
        peer = self.of_process(current_process())
        assert peer is not None
        self.on_step(peer, step, number)
        TrainingThread.current().wait_if_stopped()

    def heard(self, sender: str, receiver: str, envelope: Envelope) -> None:
        """Called when a message is about to be handled."""
        name = type(envelope.message).__name__
        for process, way in ((sender, "said"), (receiver, "heard")):
            if (peer := self.of_process(process)) is not None:
                self.on_step(peer, f"{way} {name}", getattr(envelope.message, "round", peer.round))

    async def on_chunk(self, step: Step, payload: bytes) -> bytes:
        for process, way in ((step.holder, "sends"), (step.to, "gets")):
            if (peer := self.of_process(process)) is not None:
                self.on_step(peer, f"{way} {step.blob.kind}", peer.round)
        await asyncio.sleep(0)  # whoever was stopped just now goes no further
        return payload


@contextmanager
def _patched(scene: Scene) -> Iterator[None]:
    loop = the_loop()
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time, time_ns=lambda: 1 + int(1e9 * loop.time()))
    compute = {step: getattr(SpanTraining, step) for step in ("_forward", "_backward")}
    enter, go_on = HeldSpan.enter, TrainingReplica._go_on

    def computing(step: str) -> Callable[[Any, Any], Any]:
        def do(self: SpanTraining, task: Any) -> Any:
            number = task.compute.micro_batch.round
            TrainingThread.current().sleep(COMPUTE_S)
            scene.came_to(f"before{step}", number)
            made = compute[step](self, task)
            scene.came_to(f"after{step}", number)
            return made

        return do

    def entered(*arguments: Any) -> HeldSpan:
        held = enter(*arguments)
        peer = scene.of_process(current_process())
        assert peer is not None
        peer.held = held
        return held

    def applied(self: TrainingReplica, outcome: Any) -> None:
        scene.came_to("applying", outcome.verdict.round)
        go_on(self, outcome)

    patches = [
        mock.patch.object(Node, "open", scene.nodes.opener),
        mock.patch.object(connection, "NetworkThread", SharedLoop),
        mock.patch.object(Identity, "load_or_create", lambda path: identity(int(path.name))),
        mock.patch.object(pipeline_peer, "layered_recipe", lambda recipe, run: recipe),
        mock.patch.object(pipeline_peer, "profile_model", small_model.measured),
        mock.patch.object(HeldSpan, "enter", entered),
        mock.patch.object(TrainingReplica, "_go_on", applied),
        *[mock.patch.object(SpanTraining, step, computing(step)) for step in compute],
        mock.patch.object(service, "time", clock),
    ]
    for patch in patches:
        patch.start()
    scene.nodes.watch.append(scene.heard)
    scene.nodes.chunks.faults.append(scene.on_chunk)
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Scene]:
    """A coordinator that waits for peers."""
    scene = Scene(folder)
    with _patched(scene):
        run = parse_run_file(TOML)
        journal = LocalJournal(folder / "host", run.hash, TOML)
        epoch = journal.lease()
        host, over = identity(1000), asyncio.Event()
        started: asyncio.Future[CoordinatorService] = asyncio.get_running_loop().create_future()

        async def hosted() -> None:
            async with serve(TOML, run, host, (HOST, 0), journal, epoch) as serving:
                serving.observe(scene.events.append)
                started.set_result(serving)
                await serving.wait(over)

        hosting = asyncio.create_task(hosted(), context=context_of(HOST_PROCESS))
        await asyncio.wait([hosting, started], return_when=asyncio.FIRST_COMPLETED)
        if hosting.done():
            hosting.result()
        scene.service = started.result()
        node = scene.service.node
        scene.invite = Invite(
            (Address(host=HOST, control_port=node.control_port),), run.run.name, node.control.keys.public, run.hash
        )
        try:
            yield scene
        finally:
            for peer in scene.peers:
                peer.thread.end()
                scene.loop.resume_process(peer.process)
            over.set()
            await hosting
            journal.close()


async def until_over(scene: Scene) -> None:
    """The run has ended, and everybody who lives has left."""
    await until(lambda: scene.machine.has_ended, 0.1)
    await until(lambda: all(peer.thread.is_over for peer in scene.alive), 0.1)


def play(folder: Path, act: Callable[[Scene], Awaitable[None]], horizon_s: float = 600.0) -> None:
    """``act``: a coroutine function that has the run to itself until it returns."""

    async def main() -> None:
        async with staged(folder) as scene:
            await act(scene)

    run_processes(main(), horizon_s)
