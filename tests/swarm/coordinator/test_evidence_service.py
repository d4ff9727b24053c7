"""Evidence as members show it to a coordinator: an expulsion that stands in the journal, or nothing at all."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.hearings import GUILTY, INNOCENT, LIAR, evidence_of, negate, serving, show
from tests.swarm.coordinator.world import entry

from shoal.swarm.coordinator.events import MeanDisproved, MemberExpelled
from shoal.swarm.coordinator.local_journal import LocalJournal, evidence_path
from shoal.swarm.coordinator.rollback import CommittedRound
from shoal.swarm.coordinator.service import CoordinatorService
from shoal.swarm.errors import NotAdmitted, Removed, TryLater, WireError
from shoal.swarm.protocol.evidence import evidence_id
from shoal.swarm.protocol.messages import AllowPeer, PeerToCoordinatorShowEvidence

MORE = evidence_of(1, chunk=3)


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
        assert await show(service, 1, data) == word, "whoever has not heard it asks again"
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


def test_nobody_makes_anothers_evidence_void_by_its_name(tmp_path: Path) -> None:
    """A liar knows the evidence against itself as soon as there is any."""

    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        channel: Any = SimpleNamespace(remote_key=entry(1).certificate.curve_key)
        message = PeerToCoordinatorShowEvidence(evidence=evidence_id(GUILTY), size_bytes=1, start=0, data=b"x")
        await service.handlers[0]._show_evidence(channel, message)
        assert await show(service, 2, GUILTY) == "guilty"

    assert [one.peer for one in serving(tmp_path, test) if isinstance(one, MemberExpelled)] == [LIAR]


def test_more_evidence_about_an_expelled_member_is_not_kept(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        assert await show(service, 1, GUILTY) == "guilty"
        assert await show(service, 2, MORE) == "guilty"
        with pytest.raises(TryLater, match="in 60 s"):  # or a friend of it would have its lies judged without end
            await show(service, 2, FAR)

    assert sum(isinstance(one, MemberExpelled) for one in serving(tmp_path, test)) == 1
    assert [one.name for one in tmp_path.glob("*.evidence")] == [f"{evidence_id(GUILTY).hex()}.evidence"]


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


FAR = evidence_of(1, 3, negate)
"""Of the same round and maker as ``GUILTY``, and beyond the bound."""


def undone(service: CoordinatorService) -> list[tuple[int, bytes]]:
    rounds = service.handlers[0].rounds
    assert rounds is not None
    return [] if rounds.disproved is None else [(rounds.disproved.round, rounds.disproved.evidence)]


def has_committed(service: CoordinatorService, rounds: int) -> None:
    """So many rounds are committed, the newest one with the number that the evidence is of."""
    scope = service.handlers[0].rounds
    assert scope is not None
    scope.history.rounds += [
        CommittedRound(4 - rounds + at, bytes([at]) * 32, 10, 1.0, ((10 * at, 10 * at + 10),)) for at in range(rounds)
    ]


def test_a_mean_beyond_the_bound_makes_the_run_go_back(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        has_committed(service, 2)
        assert await show(service, 1, FAR) == "guilty"
        assert undone(service) == [(3, evidence_id(FAR))]
        kinds = [one.kind for one in journal.access_records(0, 100)]
        assert kinds[-3:] == ["expelled", "mean disproved", "left"] or kinds[-2:] == ["expelled", "mean disproved"]
        record = next(one for one in journal.access_records(0, 100) if one.kind == "mean disproved")
        assert (record.peer, record.evidence, record.round) == (LIAR, evidence_id(FAR), 3)
        assert record.excess > 1.0

    (event,) = [one for one in serving(tmp_path, test) if isinstance(one, MeanDisproved)]
    assert (event.version, event.maker, event.accuser) == (1, LIAR, entry(1).peer)


def test_a_friend_that_shows_a_smaller_lie_first_protects_no_liar(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        has_committed(service, 2)
        assert await show(service, 1, GUILTY) == "guilty"
        assert undone(service) == []
        assert await show(service, 2, FAR) == "guilty"
        assert undone(service) == [(3, evidence_id(FAR))]
        assert evidence_path(tmp_path, evidence_id(FAR).hex()).exists()

    events = serving(tmp_path, test)
    assert sum(isinstance(one, MemberExpelled) for one in events) == 1
    assert sum(isinstance(one, MeanDisproved) for one in events) == 1


def test_of_a_round_that_is_not_in_the_state_nothing_is_undone(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        assert await show(service, 1, FAR) == "guilty"
        assert undone(service) == []

    assert not [one for one in serving(tmp_path, test) if isinstance(one, MeanDisproved)]


def test_whom_the_host_has_allowed_again_is_not_expelled_for_the_same(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        has_committed(service, 2)
        assert await show(service, 1, GUILTY) == "guilty"
        service.handlers[0].rounds.round.number = 4  # type: ignore[union-attr]
        service.host_commands.answer(AllowPeer(peer=LIAR))
        assert await show(service, 1, MORE) == "guilty"
        assert await show(service, 2, FAR) == "guilty"
        service.scope.admission.access_list.refuse_banned(LIAR, "")
        assert undone(service) == []

    assert sum(isinstance(one, MemberExpelled) for one in serving(tmp_path, test)) == 1


def test_a_liar_that_alone_has_credit_is_accused_by_others(tmp_path: Path) -> None:
    async def test(service: CoordinatorService, journal: LocalJournal) -> None:
        members = service.handlers[0].rounds.membership  # type: ignore[union-attr]
        members.members[entry(2).peer].has_credit = True
        members._states += 1
        assert await show(service, 1, GUILTY) == "guilty"

    assert [one.peer for one in serving(tmp_path, test) if isinstance(one, MemberExpelled)] == [LIAR]
