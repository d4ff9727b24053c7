"""Evidence as members show it to a coordinator: an expulsion that stands in the journal, or nothing at all."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.audits import ELEMENTS, HOST, MEMBERS, committed_round
from tests.fakes.virtual_clock import run_virtual
from tests.swarm.coordinator.world import CPU, entry, heartbeat

from shoal.swarm.coordinator.events import JournalEvent, MemberExpelled
from shoal.swarm.coordinator.local_journal import LocalJournal, evidence_path
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import NotAdmitted, Removed, TryLater, WireError
from shoal.swarm.protocol.evidence import evidence_id
from shoal.swarm.protocol.messages import (
    EVIDENCE_PIECE_BYTES,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorShowEvidence,
)
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import TensorSpec

TOML = '[run]\nname = "tiny"\n[recipe]\nname = "own"\n[access]\nadmission = "open"\n[round]\ntokens = 100000\n'
RUN = parse_run_file(TOML)
MODEL = PeerToCoordinatorDescribeModel(
    layout=(TensorSpec(name="w", shape=(ELEMENTS,)),), corpus_digest=b"c" * 32, tokens_per_sample=10, samples=64
)
LIAR = MEMBERS[1].peer_id


def evidence_of(liar: int | None) -> bytes:
    async def main() -> bytes:
        return await (await committed_round(liar=liar, run_hash=RUN.hash)).evidence(1, 2)

    return run_virtual(main())


GUILTY, INNOCENT = evidence_of(1), evidence_of(None)


def serving(
    folder: Path, test: Callable[[CoordinatorService, LocalJournal], Coroutine[Any, Any, None]]
) -> list[JournalEvent]:
    """Run a test with a coordinator that has two members and an observer; return what it has journaled."""

    async def main() -> list[JournalEvent]:
        journal = LocalJournal(folder, RUN.hash, TOML)
        try:
            async with CoordinatorService.serve(TOML, RUN, HOST, ("127.0.0.1", 0), journal, journal.lease()) as service:
                for number in (1, 2):
                    service.scope.admission.join(entry(number), CPU, service.run.log.now_s)
                    service.handlers[0].rounds.describe_model(entry(number).peer, MODEL)  # type: ignore[union-attr]
                    service.scope.heartbeat(entry(number).peer, heartbeat(), service.run.log.now_s)
                service.scope.admission.join(entry(3, role="observer"), CPU, service.run.log.now_s)
                await test(service, journal)
            return journal.read(0)
        finally:
            journal.close()

    return asyncio.run(main())


async def show(service: CoordinatorService, number: int, data: bytes, size: int = EVIDENCE_PIECE_BYTES) -> str:
    """Show evidence as this member; returns the last receipt's judgement."""
    channel: Any = SimpleNamespace(remote_key=entry(number).certificate.curve_key)
    judgement = ""
    for start in range(0, len(data), size):
        message = PeerToCoordinatorShowEvidence(
            evidence=evidence_id(data), size_bytes=len(data), start=start, data=data[start : start + size]
        )
        receipt: Any = await service.handlers[0]._show_evidence(channel, message)
        assert receipt.evidence == evidence_id(data)
        judgement = receipt.judgement
        assert judgement == "incomplete" or start + size >= len(data)
    return str(judgement)


def test_a_proven_liar_is_expelled_once_and_stays_out(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        assert await show(service, 1, GUILTY, 5000) == "guilty"
        assert await show(service, 2, GUILTY) == "guilty", "the other member has found it, too"
        assert evidence_path(tmp_path, evidence_id(GUILTY).hex()).read_bytes() == GUILTY
        with pytest.raises(Removed, match="expelled from the run for a wrong mean in round 3"):
            service.scope.admission.access_list.refuse_banned(LIAR, "")
        (record,) = [one for one in journal.access_records(0, 100) if one.kind == "expelled"]
        assert (record.peer, record.evidence, record.accuser) == (LIAR, evidence_id(GUILTY), entry(1).peer)

    events = serving(tmp_path, test)
    (expelled,) = [one for one in events if isinstance(one, MemberExpelled)]
    assert (expelled.peer, expelled.accuser, expelled.round) == (LIAR, entry(1).peer, 3)

    async def again(service: CoordinatorService, journal: LocalJournal) -> None:
        with pytest.raises(Removed, match="expelled"):
            service.scope.admission.access_list.refuse_banned(LIAR, "")

    serving(tmp_path, again)


def test_a_judgement_is_repeated_for_who_has_not_heard_it(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        channel: Any = SimpleNamespace(remote_key=entry(1).certificate.curve_key)
        whole = PeerToCoordinatorShowEvidence(
            evidence=evidence_id(GUILTY), size_bytes=len(GUILTY), start=0, data=GUILTY
        )
        answers: list[Any] = await asyncio.gather(
            *(service.handlers[0]._show_evidence(channel, whole) for _ in range(3))
        )
        assert [one.judgement for one in answers] == ["guilty"] * 3

    assert sum(isinstance(one, MemberExpelled) for one in serving(tmp_path, test)) == 1


@pytest.mark.parametrize(
    ("data", "word"),
    [(INNOCENT, "innocent"), (GUILTY[:-1] + bytes([GUILTY[-1] ^ 1]), "void"), (b"he did it", "void")],
    ids=["of an honest owner", "forged", "none"],
)
def test_an_accusation_that_proves_nothing_changes_nothing(tmp_path: Path, data: bytes, word: str) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        assert await show(service, 1, data) == word
        with pytest.raises(TryLater):
            await show(service, 1, GUILTY)
        service.scope.admission.access_list.refuse_banned(LIAR, "")

    assert not [one for one in serving(tmp_path, test) if isinstance(one, MemberExpelled)]
    assert list(tmp_path.glob("*.evidence")) == []


def test_evidence_under_another_name_is_void(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        channel: Any = SimpleNamespace(remote_key=entry(1).certificate.curve_key)
        message = PeerToCoordinatorShowEvidence(evidence=bytes(32), size_bytes=len(GUILTY), start=0, data=GUILTY)
        receipt: Any = await service.handlers[0]._show_evidence(channel, message)
        assert receipt.judgement == "void"

    assert not [one for one in serving(tmp_path, test) if isinstance(one, MemberExpelled)]


def test_observers_and_strangers_are_not_heard(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        for number in (3, 4):
            with pytest.raises(NotAdmitted):
                await show(service, number, GUILTY)
        channel: Any = SimpleNamespace(remote_key=entry(1).certificate.curve_key)
        late = PeerToCoordinatorShowEvidence(evidence=bytes(32), size_bytes=100, start=50, data=bytes(50))
        with pytest.raises(WireError):
            await service.handlers[0]._show_evidence(channel, late)

    assert not [one for one in serving(tmp_path, test) if isinstance(one, MemberExpelled)]
