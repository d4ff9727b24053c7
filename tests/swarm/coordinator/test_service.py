"""The coordinator's program, called as its sockets would call it."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.hosts import serve
from tests.swarm.coordinator.world import CPU, MODEL, entry, heartbeat

from shoal.swarm.coordinator.events import JournalEvent, LeaseGranted
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.coordinator.service import CoordinatorService, _host_of
from shoal.swarm.errors import DeadlineExceeded, NotAdmitted, StorageError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import (
    CoordinatorToPeerLease,
    PeerToCoordinatorLeave,
    PeerToCoordinatorRequestLease,
)
from shoal.swarm.protocol.rounds import Part, PlanMember, RoundPlan, RunView
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.statements import plan_digest

TOML = '[run]\nname = "tiny"\n[recipe]\nname = "own"\n[access]\nadmission = "open"\n[round]\ntokens = 100000\n'
MEMBERS = 20


class _Journal(LocalJournal):
    """Notes every write; fails once it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, parse_run_file(TOML).hash, TOML)
        self.writes: list[Sequence[JournalEvent]] = []
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.waits = threading.Event()

    def append(self, expected_index: int, events: Sequence[JournalEvent]) -> None:
        if self.fails:
            raise StorageError("the disk is full")
        if not self.goes_on.is_set():
            self.waits.set()
            self.goes_on.wait()
        super().append(expected_index, events)
        self.writes.append(events)


async def leases(service: CoordinatorService, members: Sequence[int]) -> list[Any]:
    """What each of them is answered: a lease, or the error."""

    async def one(number: int) -> Any:
        channel: Any = SimpleNamespace(remote_key=entry(number).certificate.curve_key)
        return await service.handlers[0]._lease(
            channel, PeerToCoordinatorRequestLease(round=0, samples=2, tokens_done=0)
        )

    return await asyncio.gather(*(one(number) for number in members), return_exceptions=True)


def serve_members(journal: _Journal) -> Any:
    return serve(TOML, parse_run_file(TOML), Identity.generate(), ("127.0.0.1", 0), journal, journal.lease())


def admit(service: CoordinatorService) -> None:
    for number in range(MEMBERS):
        service.scope.admission.join(entry(number), CPU, service.run.log.now_s)
        service.scope.describe_model(entry(number).peer, MODEL)
        service.scope.heartbeat(entry(number).peer, heartbeat(), service.run.log.now_s)


def granted(events: Sequence[JournalEvent]) -> int:
    return sum(isinstance(event, LeaseGranted) for event in events)


def test_leases_that_are_asked_for_together_are_written_together_and_before_they_are_given(tmp_path: Path) -> None:
    async def main() -> None:
        journal = _Journal(tmp_path)
        async with serve_members(journal) as service:
            admit(service)
            answers = await leases(service, range(MEMBERS))
            assert all(isinstance(one, CoordinatorToPeerLease) and one.ranges for one in answers)
            assert sum(map(granted, journal.writes)) == MEMBERS
            assert len([events for events in journal.writes if granted(events)]) <= 3
            assert granted(journal.read()) == MEMBERS
        journal.close()

    asyncio.run(main())


def test_no_lease_is_given_that_could_not_be_written(tmp_path: Path) -> None:
    async def main() -> None:
        journal = _Journal(tmp_path)
        async with serve_members(journal) as service:
            admit(service)
            journal.fails = True
            for _ in range(2):  # the second time the machine knows them already
                answers = await leases(service, range(MEMBERS))
                assert [type(one) for one in answers] == [DeadlineExceeded] * MEMBERS
            with pytest.raises(StorageError):
                await service.wait(asyncio.Event())
        journal.close()

    asyncio.run(main())


def test_a_request_that_is_cut_short_while_it_is_journaled_leaves_the_journal_in_order(tmp_path: Path) -> None:
    """As when the coordinator stops: the transaction is written, and the next one comes after it."""

    async def main() -> None:
        journal = _Journal(tmp_path)
        async with serve_members(journal) as service:
            admit(service)
            await leases(service, range(1))
            journal.goes_on.clear()
            cut_short = asyncio.create_task(leases(service, range(1, 2)))
            await asyncio.to_thread(journal.waits.wait)
            cut_short.cancel()
            await asyncio.sleep(0.01)
            journal.goes_on.set()
            await asyncio.wait([cut_short])
            (answer,) = await leases(service, range(2, 3))
            assert isinstance(answer, CoordinatorToPeerLease)
            assert granted(journal.read()) == 3
        journal.close()

    asyncio.run(main())


def test_nothing_is_kept_of_observers_that_have_left(tmp_path: Path) -> None:
    async def main() -> None:
        journal = _Journal(tmp_path)
        async with serve_members(journal) as service:
            admit(service)
            for number in range(MEMBERS, MEMBERS + 3):
                observer = entry(number, role="observer")
                service.scope.admission.join(observer, CPU, service.run.log.now_s)
                channel: Any = SimpleNamespace(remote_key=observer.certificate.curve_key)
                await service.handlers[0]._heartbeat(channel, heartbeat())
                assert observer.peer in service.handlers[0].known
                await service.handlers[0]._leave(channel, PeerToCoordinatorLeave(reason="observed"))
            assert service.handlers[0].known.keys() <= service.scope.membership.members.keys()
            assert len(service.scope.admission.sent_bytes._reported) == MEMBERS
        journal.close()

    asyncio.run(main())


def test_a_plan_is_sent_once_while_it_is_on_its_way_and_again_to_a_member_that_does_not_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        journal = _Journal(tmp_path)
        async with serve_members(journal) as service:
            admit(service)
            monkeypatch.setattr(service.run, "tick", lambda now_s: None)
            scope: Any = service.scope
            plan = RoundPlan(
                round=0,
                anchor_version=0,
                state_digest=bytes(32),
                chunk_elements=8,
                members=(PlanMember(peer=entry(0).peer, weight_tokens=1),),
                parts=(Part(owner=0, start=0, stop=8),),
            )
            scope.round.plan, scope.round.phase = plan, "averaging"
            notices: list[Any] = []

            async def notify(message: Any, scope: int) -> None:
                notices.append(message)

            channel: Any = SimpleNamespace(remote_key=entry(0).certificate.curve_key, notify=notify)
            handlers, now_s = service.handlers[0], [1000.0]
            monkeypatch.setattr("shoal.swarm.coordinator.service.time.monotonic", lambda: now_s[0])

            async def told(**knows: Any) -> list[RunView]:
                """Views before the answer, which has no plan of its own."""
                notices.clear()
                answer: Any = await handlers._heartbeat(channel, heartbeat().model_copy(update=knows))
                assert (answer.view.plan, answer.view.plan_digest) == (None, plan_digest(plan))
                assert [one.view.model_copy(update={"plan": None}) for one in notices] == [answer.view] * len(notices)
                return [one.view for one in notices]

            assert [one.plan for one in await told()] == [plan]
            assert await told() == [], "it was sent a moment ago"
            now_s[0] += scope.deadlines.heartbeat_s
            assert [one.plan for one in await told(plan_digest=bytes(32))] == [plan], "it may have got lost"
            now_s[0] += 0.9 * scope.deadlines.heartbeat_s
            assert await told() == [], "what takes longer is on its way: others would wait for repeats"
            now_s[0] += 0.2 * scope.deadlines.heartbeat_s
            assert [one.plan for one in await told()] == [plan]
            now_s[0] += 2 * scope.deadlines.heartbeat_s
            assert await told(plan_digest=plan_digest(plan)) == []
        journal.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "known_as"),
    [("", "198.51.100.7"), ("198.51.100.7", "198.51.100.7"), ("93.184.216.34", "93.184.216.34")],
)
def test_the_address_of_a_member_is_the_one_that_it_names_or_comes_from(host: str, known_as: str) -> None:
    assert _host_of(host, "198.51.100.7") == known_as


@pytest.mark.parametrize("host", ["slow.example.com", "localhost", "10.0.0.1", "127.0.0.1"])
def test_names_are_not_looked_up_and_private_addresses_not_taken(host: str) -> None:
    """Who names a host decides how long it takes to look that up."""
    with pytest.raises(NotAdmitted, match="must be an address"):
        _host_of(host, "198.51.100.7")
