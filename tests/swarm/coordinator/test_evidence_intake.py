"""Evidence comes in pieces, within bounds, and whoever shows what proves nothing is not heard for a while."""

from contextlib import suppress

import pytest

from shoal.swarm.coordinator import evidence_intake
from shoal.swarm.coordinator.evidence_intake import EvidenceIntake, is_whole
from shoal.swarm.errors import TryLater, WireError
from shoal.swarm.protocol.evidence import evidence_id
from shoal.swarm.protocol.messages import PeerToCoordinatorShowEvidence

DATA = bytes(range(250))


def pieces(data: bytes = DATA, step: int = 100) -> list[PeerToCoordinatorShowEvidence]:
    return [
        PeerToCoordinatorShowEvidence(
            evidence=evidence_id(data), size_bytes=len(data), start=start, data=data[start : start + step]
        )
        for start in range(0, len(data), step)
    ]


def test_pieces_are_put_together() -> None:
    intake = EvidenceIntake(10.0)
    assert [intake.add("a", one, 0.0) for one in pieces()] == [None, None, DATA]
    assert is_whole(DATA, evidence_id(DATA))
    assert not is_whole(DATA[:-1], evidence_id(DATA))


def test_a_repeated_piece_counts_once() -> None:
    """Members repeat what was not answered."""
    intake, (first, second, third) = EvidenceIntake(10.0), pieces()
    found = [intake.add("a", one, 0.0) for one in (first, first, second, first, second, third)]
    assert found == [None] * 5 + [DATA]


def test_members_do_not_mix() -> None:
    intake, other = EvidenceIntake(10.0), bytes(reversed(DATA))
    for one, two in zip(pieces()[:2], pieces(other)[:2], strict=True):
        intake.add("a", one, 0.0)
        intake.add("b", two, 0.0)
    assert intake.add("b", pieces(other)[2], 0.0) == other
    assert intake.add("a", pieces()[2], 0.0) == DATA


def test_pieces_without_those_before_them_are_refused() -> None:
    intake, (first, second, third) = EvidenceIntake(10.0), pieces()
    with pytest.raises(WireError):
        intake.add("a", second, 0.0)
    intake.add("a", first, 0.0)
    with pytest.raises(WireError):
        intake.add("a", third, 0.0)
    with pytest.raises(WireError):
        intake.add("a", second.model_copy(update={"size_bytes": 1000}), 0.0)


def test_evidence_is_no_longer_than_it_says() -> None:
    intake, (first, *_) = EvidenceIntake(10.0), pieces()
    intake.add("a", first, 0.0)
    last = first.model_copy(update={"start": 100, "data": bytes(1000)})
    with pytest.raises(WireError):
        intake.add("a", last, 0.0)


def test_memory_is_bounded_and_stale_evidence_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_intake, "_MAX_BYTES", 250)
    intake = EvidenceIntake(10.0)
    for peer in ("a", "b"):
        intake.add(peer, pieces()[0], 0.0)
    with pytest.raises(TryLater):
        intake.add("c", pieces()[0], 5.0)
    intake.add("b", pieces()[1].model_copy(update={"data": DATA[100:101]}), 9.0)
    assert intake.add("c", pieces()[0], 11.0) is None, "the first one's is gone"
    with pytest.raises(TryLater, match="changed nothing"):
        intake.add("a", pieces()[0], 11.0)


def test_two_members_do_not_hold_the_memory_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves its evidence for other, again and again, before it is stale."""
    monkeypatch.setattr(evidence_intake, "_MAX_BYTES", 250)
    intake, now_s, taken = EvidenceIntake(10.0), 0.0, 0
    for number in range(20):
        for peer in ("a", "b"):
            with suppress(TryLater):
                intake.add(peer, pieces(bytes([number]) * 250)[0], now_s)
        now_s += 5.0
        with suppress(TryLater):
            taken += intake.add("c", pieces()[0], now_s) is None
    assert taken


def test_evidence_that_is_left_for_other_counts_as_one_that_proves_nothing() -> None:
    intake, other = EvidenceIntake(10.0), pieces(bytes(250))
    intake.add("a", pieces()[0], 0.0)
    with pytest.raises(TryLater, match="not shown the whole"):
        intake.add("a", other[0], 1.0)
    with pytest.raises(TryLater, match="in 599 s"):
        intake.add("a", other[0], 2.0)
    assert intake.add("a", other[0], 601.0) is None


def test_bars_are_kept_of_the_newest_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_intake, "_MAX_BARRED", 2)
    intake = EvidenceIntake(10.0)
    for peer in ("a", "b", "a", "c"):
        intake.conclude(peer, bytes(32), "void", 0.0)
    assert intake.add("b", pieces()[0], 0.0) is None
    for peer in ("a", "c"):
        with pytest.raises(TryLater):
            intake.add(peer, pieces()[0], 0.0)


def test_single_bytes_now_and_then_do_not_hold_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_intake, "_MAX_BYTES", 110)
    intake, (first, *_) = EvidenceIntake(10.0), pieces()
    intake.add("a", first, 0.0)
    for moment in range(3):
        byte = first.model_copy(update={"start": 100 + moment, "data": DATA[100 + moment : 101 + moment]})
        intake.add("a", byte, 9.0 * moment)
    assert intake.add("b", first, 20.0) is None


def test_whoever_proves_nothing_is_barred_for_ever_longer() -> None:
    intake, now_s = EvidenceIntake(10.0), 0.0
    for waits_s in (600.0, 1200.0, 2400.0):
        intake.add("a", pieces()[0], now_s)
        intake.conclude("a", evidence_id(DATA), "void", now_s)
        with pytest.raises(TryLater):
            intake.add("a", pieces()[0], now_s + waits_s - 1.0)
        intake.add("b", pieces()[0], now_s)
        now_s += waits_s
    assert intake.judged("other", evidence_id(DATA)) is None, "others may show it, whole and where it belongs"


def test_whoever_is_right_is_heard_again() -> None:
    intake = EvidenceIntake(10.0)
    intake.conclude("a", evidence_id(DATA), "guilty", 0.0)
    assert intake.judged("other", evidence_id(DATA)) == "guilty"
    assert intake.add("a", pieces()[0], 0.0) is None


def test_whoever_shows_what_is_known_is_heard_a_minute_later() -> None:
    intake = EvidenceIntake(10.0)
    for moment_s in (0.0, 60.0):
        intake.conclude("a", evidence_id(DATA), "guilty", moment_s, is_news=False)
        with pytest.raises(TryLater):
            intake.add("a", pieces()[0], moment_s + 59.0)
    assert intake.add("a", pieces()[0], 120.0) is None
