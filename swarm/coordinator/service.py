"""The coordinator as a program: sockets, a clock and the journal around the pure machine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from shoal.swarm.coordinator.door import Door
from shoal.swarm.coordinator.doors import PipelineDoor, RunDoor, StageDoor
from shoal.swarm.coordinator.events import Fact, verdicts_in
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.coordinator.machine import RunMachine
from shoal.swarm.coordinator.pipeline import PipelineMachine
from shoal.swarm.coordinator.pipeline_planner import planner_of
from shoal.swarm.coordinator.pipeline_question import Planner
from shoal.swarm.errors import DeadlineExceeded, LinkError, StorageError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import Message, Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.tasks import task_scope
from shoal.swarm.transport.control import Channel
from shoal.swarm.transport.links import in_thread
from shoal.swarm.transport.transport import Node

log = logging.getLogger(__name__)

_TICK_S = 0.1
_STOPS = "the coordinator cannot go on from its journal, and stops"


class CoordinatorService:
    """Answers the members of one run. Make it with ``serve``; ``wait`` raises when the journal fails."""

    def __init__(self, run_toml: str, run: RunFile, identity: Identity, node: Node, journal: Journal) -> None:
        self.identity = identity
        self.node = node
        self.run_toml = run_toml
        self.journal = journal
        self.certificate = identity.certify(node.control.keys)
        self.lock = asyncio.Lock()
        self.reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._may_plan = asyncio.Event()
        self._announced = -1
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._observers: list[Callable[[Fact], None]] = []
        now_s, epoch = time.monotonic(), time.time_ns()
        self.machine: RunMachine | PipelineMachine
        self.doors: list[Door[Any]]
        """By scope."""
        if run.pipeline is None:
            self.machine = RunMachine(run, identity.sign, now_s, epoch)
            self.doors = [RunDoor(self, self.machine, 0)]
        else:
            self.machine = PipelineMachine(run, identity.sign, now_s, epoch)
            self.doors = [PipelineDoor(self, self.machine, 0)]
        self.machine.replay(journal.read(), time.monotonic())
        self.machine.begin()
        node.control.guard.is_member = lambda key: self.machine.membership.holder(key) is not None
        self._set_clock()
        self._open_stages()

    def _open_stages(self) -> None:
        """A pipeline's stages, once they are in the journal."""
        run = self.doors[0]
        if isinstance(run, PipelineDoor):
            self.doors += [StageDoor(run, stage) for stage in run.machine.stages[len(self.doors) - 1 :]]

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
                if isinstance(service.machine, PipelineMachine):
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

    def observe(self, observer: Callable[[Fact], None]) -> None:
        """Call ``observer`` with every fact once it is in the journal."""
        self._observers.append(observer)

    # Events, one at a time --------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Journal first, then tell. A coordinator that cannot journal must not go on.

        Members hear ``DeadlineExceeded`` then, as if it were gone already: they go on without it until it is back."""
        if self._broken.done():  # facts were lost with it: what the machine says now may not be in the journal
            raise DeadlineExceeded(_STOPS)
        facts = self.machine.take_facts()
        if facts:
            try:
                await in_thread(self.journal.write, facts)  # never cut short: the journal is closed next
            except StorageError as error:
                if not self._broken.done():
                    self._broken.set_exception(error)
                raise DeadlineExceeded(_STOPS) from error
            for fact in facts:
                for observer in self._observers:
                    observer(fact)
        self._open_stages()
        self._may_plan.set()
        announcements = sum(door.machine.announcements for door in self.doors)
        if announcements != self._announced:
            self._announced = announcements
            self._changed.set()
            for door in self.doors:
                door.forget_those_that_left()
        if verdicts_in(facts) and self.journal.has_grown and (snapshot := self.machine.snapshot()) is not None:
            await in_thread(self.journal.compact, snapshot)  # nobody waits for us when a round has just begun

    def is_outdated(self, shown: Verdict) -> None:
        """A member has a verdict of ours that the journal lacks: nothing may be decided from it any more."""
        if not self._broken.done():
            self._broken.set_exception(self.journal.is_outdated(shown.round))

    async def _tick(self) -> None:
        while not self._broken.done():
            async with self.lock:
                self._set_clock()
                self.machine.tick(time.monotonic())
                with suppress(DeadlineExceeded):
                    await self.flush()
            await asyncio.sleep(_TICK_S)

    async def _plan(self, machine: PipelineMachine, planner: Planner) -> None:
        """Who gets which stages: worked out in a thread, while everybody is answered."""
        while True:
            await self._may_plan.wait()
            self._may_plan.clear()
            async with self.lock:
                asked = machine.plan_question(time.monotonic())
            if asked is None:
                continue
            plan = await in_thread(asked.answer, planner)
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
            for door in list(self.doors):
                for peer, member in list(door.machine.membership.members.items()):
                    channel = self.node.control.incoming(member.entry.certificate.curve_key)
                    if member.alive and channel is not None and door.is_due(peer, member):
                        await self.notify(channel, door.view(peer), door.scope)
            pause_until_s = 2 * loop.time() - start_s

    def _moments(self) -> list[tuple[int, str, int]]:
        """What members have to hear of at once."""
        return [door.machine.moment for door in self.doors]

    async def notify(self, channel: Channel, message: Message, scope: int) -> None:
        try:
            async with asyncio.timeout(1.0):
                await channel.notify(message, scope)
        except (LinkError, TimeoutError) as error:
            log.debug("could not tell %s: %s", channel.label, error)
