"""Several runs on one port: each caller gets its own, and one run's failure or flood is not another's."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.swarm.coordinator.world import CPU
from tests.swarm.network import HOST, LONG_S, Member, run

from shoal.swarm.coordinator.events import JournalEvent
from shoal.swarm.coordinator.front import CoordinatorFront
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import DeadlineExceeded, NotAdmitted, StorageError, TryLater, UnknownRun, UserError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerRun,
    CoordinatorToPeerStatus,
    PeerToCoordinatorGetRun,
    PeerToCoordinatorGetStatus,
    PeerToCoordinatorJoinRun,
)
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import Address
from shoal.swarm.transport.channel import Channel

NAMES = ("reef", "kelp")
JOINS_A_MINUTE = 3


class Journal(LocalJournal):
    """A journal whose disk can fail, or whatever it is on."""

    failure: Exception | None = None

    def append(self, expected_index: int, events: list[JournalEvent]) -> None:  # type: ignore[override]
        if self.failure is not None:
            raise self.failure
        super().append(expected_index, events)


def toml(name: str) -> str:
    access = f'[access]\nadmission = "open"\njoins_per_minute = {JOINS_A_MINUTE}\njoins_per_minute_per_network = 3\n'
    return f'[run]\nname = "{name}"\n[recipe]\nname = "own"\n{access}[round]\ntokens = 100000\n'


class Hosted:
    """Two runs, each with identity and journal."""

    def __init__(self, front: CoordinatorFront, folder: Path) -> None:
        self.front = front
        self.identities = {name: Identity.generate() for name in NAMES}
        self.journals: dict[str, Journal] = {}
        self.services: dict[str, CoordinatorService] = {}
        self._folder = folder
        self._stacks: dict[str, AsyncExitStack] = {}

    async def begin(self, name: str) -> None:
        file, stack = parse_run_file(toml(name)), AsyncExitStack()
        journal = self.journals[name] = Journal(self._folder / name, file.hash, toml(name))
        stack.callback(journal.close)
        serving = self.front.serving(toml(name), file, self.identities[name], journal, journal.lease())
        self.services[name] = await stack.enter_async_context(serving)
        self._stacks[name] = stack

    async def end(self, name: str) -> None:
        await self._stacks.pop(name).aclose()

    async def end_all(self) -> None:
        for name in list(self._stacks):
            await self.end(name)


@asynccontextmanager
async def hosting(folder: Path) -> AsyncIterator[Hosted]:
    async with CoordinatorFront.open(CurveKeys.fresh(), (HOST, 0), NAMES) as front:
        hosted = Hosted(front, folder)
        try:
            for name in NAMES:
                await hosted.begin(name)
            yield hosted
        finally:
            await hosted.end_all()


class Caller:
    """A stranger or member with one connection to a run."""

    def __init__(self, hosted: Hosted, name: str) -> None:
        self.hosted, self.name, self.member = hosted, name, Member()

    async def __aenter__(self) -> "Caller":
        control = self.hosted.front.node.control
        self.member.allowed.add(control.keys.public)
        await self.member.start()
        self.channel: Channel = self.member.node.control.dial(HOST, control.guard.port, control.keys.public)
        self.channel.run = self.name
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.member.stop()

    async def ask(self, message: Any, reply: Any) -> Any:
        return await self.channel.request(message, reply, LONG_S)

    async def run_file(self) -> Any:
        return await self.ask(PeerToCoordinatorGetRun(run=self.name), CoordinatorToPeerRun)

    async def join(self) -> Any:
        entry = self.member.entry()
        knock = PeerToCoordinatorJoinRun(
            run=self.name,
            certificate=entry.certificate,
            name="a peer",
            role="observer",
            device=CPU,
            addresses=(Address(**entry.address.model_dump()),),
        )
        return await self.ask(knock, CoordinatorToPeerJoinAccepted)

    async def status(self) -> Any:
        return await self.ask(PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)


@run
async def test_each_caller_gets_the_run_that_it_names(tmp_path: Path) -> None:
    async with hosting(tmp_path) as hosted, Caller(hosted, "reef") as one, Caller(hosted, "kelp") as other:
        keys = hosted.front.node.control.keys
        for caller in (one, other):
            answer = await caller.run_file()
            assert answer.run_hash == parse_run_file(toml(caller.name)).hash
            assert answer.coordinator == hosted.identities[caller.name].certify(keys)
            assert (await caller.join()).run_hash == answer.run_hash
        for name, caller in (("reef", one), ("kelp", other)):
            assert list(hosted.services[name].scope.membership.members) == [caller.member.peer]
        one.channel.run = "kelp"  # a member of one run is a stranger in the other
        with pytest.raises(NotAdmitted):
            await one.status()


@run
async def test_other_names_are_refused_and_those_that_are_hosted_named(tmp_path: Path) -> None:
    async with hosting(tmp_path) as hosted:
        for name in ("", "lagoon"):
            async with Caller(hosted, name) as caller:
                with pytest.raises(UnknownRun, match="'reef', 'kelp'"):
                    await caller.run_file()
        async with Caller(hosted, "reef") as caller:
            with pytest.raises(UnknownRun):
                await caller.ask(PeerToCoordinatorGetRun(run="kelp"), CoordinatorToPeerRun)


@pytest.mark.parametrize(
    "failure", [StorageError("the disk is full"), UserError("the password was changed"), RuntimeError("a fault")]
)
@run
async def test_a_journal_that_fails_ends_its_own_run_which_goes_on_later(tmp_path: Path, failure: Exception) -> None:
    async with hosting(tmp_path) as hosted, Caller(hosted, "reef") as one, Caller(hosted, "kelp") as other:
        await one.join()
        await other.join()
        service = hosted.services["reef"]
        hosted.journals["reef"].failure = failure
        async with service.lock:
            service.host_commands._scope.admission.ban(one.member.peer, "", "")
            with pytest.raises(DeadlineExceeded):
                await service.flush()
            for telling in (
                service._settle,
                service.flush,
            ):  # whatever was decided is in no journal: nobody hears of it
                with pytest.raises(DeadlineExceeded):
                    await telling()
        with pytest.raises(type(failure)):
            await service.wait(asyncio.Event())
        assert await other.status()
        await hosted.end("reef")
        with pytest.raises(DeadlineExceeded, match="not running at the moment"):  # members wait for it
            await one.run_file()
        assert await other.status()
        await hosted.begin("reef")
        assert await one.run_file()
        stop = asyncio.Event()
        stop.set()
        await hosted.services["kelp"].wait(stop)  # nothing is wrong there


@run
async def test_others_are_answered_while_a_long_journal_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosting(tmp_path) as hosted, Caller(hosted, "kelp") as other:
        await other.join()
        await hosted.end("reef")
        was_answered = threading.Event()
        read = Journal.read

        def slow_read(journal: Journal, from_index: int = 0) -> list[JournalEvent]:
            assert was_answered.wait(LONG_S), "nobody was answered meanwhile"
            return read(journal, from_index)

        monkeypatch.setattr(Journal, "read", slow_read)
        beginning = asyncio.create_task(hosted.begin("reef"))
        await asyncio.sleep(0)
        assert await other.status()
        was_answered.set()
        await beginning
        assert hosted.services["reef"].scope.round_number == 0


@run
async def test_a_handler_that_fails_ends_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosting(tmp_path) as hosted, Caller(hosted, "reef") as one, Caller(hosted, "kelp") as other:
        await one.join()
        await other.join()

        def fail(now_s: float) -> None:
            raise AssertionError("a fault, for the test")

        monkeypatch.setattr(hosted.services["reef"].scope, "status", fail)
        with pytest.raises(DeadlineExceeded):
            await one.status()
        with pytest.raises(AssertionError, match="for the test"):
            await hosted.services["reef"].wait(asyncio.Event())
        assert await other.status()


@run
async def test_a_flood_of_joins_on_one_run_keeps_nobody_out_of_the_other(tmp_path: Path) -> None:
    async with hosting(tmp_path) as hosted:
        refused = 0
        for _ in range(JOINS_A_MINUTE + 3):
            async with Caller(hosted, "reef") as caller:
                try:
                    await caller.join()
                except TryLater:
                    refused += 1
        assert refused >= 3
        async with Caller(hosted, "kelp") as caller:
            assert await caller.join()


@run
async def test_requests_that_hang_in_one_run_leave_handlers_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.swarm.transport.control.MAX_HANDLERS_PER_RUN", 2)
    async with hosting(tmp_path) as hosted, AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(Caller(hosted, "reef")) for _ in range(3)]
        other = await stack.enter_async_context(Caller(hosted, "kelp"))
        for caller in (*callers, other):
            await caller.join()
        async with hosted.services["reef"].lock:
            asking = [caller.channel.request(*STATUS, 1.0) for caller in callers]
            answers = await asyncio.gather(other.status(), *asking, return_exceptions=True)
            assert isinstance(answers[0], CoordinatorToPeerStatus)
            assert all(isinstance(answer, DeadlineExceeded) for answer in answers[1:])
            assert hosted.front.node.control._handlers_of_run["reef"] == 2


STATUS = (PeerToCoordinatorGetStatus(), CoordinatorToPeerStatus)
