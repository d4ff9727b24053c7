"""Tests of pipeline/training: all stages of one peer close and conclude their rounds together."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.peer.pipeline.training import SpanTraining
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.errors import NotAdmitted

TAKEN = (-1, False)


class FakeReplica:
    """``ends``: the round after ``conclude``, and whether the work outlived it."""

    def __init__(self, log: list[str], name: str, round_number: int, ends: tuple[int, bool], *, offers: bool = True):
        self.round, self.clock = round_number, PhaseClock()
        self._log, self._name, self._ends, self._offers = log, name, ends, offers

    def begin_exchange(self) -> bool:
        self._log.append(f"{self._name} offers")
        return self._offers

    def conclude_round(self) -> bool:
        self._log.append(f"{self._name} concludes")
        if self._ends == TAKEN:
            raise NotAdmitted("it is not ours any more")
        self.round, kept = self._ends
        return kept

    def resync(self, reason: str) -> None:
        self._log.append(f"{self._name} starts afresh")


def end(*ends: tuple[int, bool], rounds: tuple[int, ...] = (), offers: bool = True) -> tuple[bool, list[str]]:
    """Of stages a, b, …; whether the round goes on, and what was done."""
    log: list[str] = []
    training: Any = SpanTraining.__new__(SpanTraining)
    rounds = rounds or (5,) * len(ends)
    training.replicas = {
        number: FakeReplica(log, "abc"[number], rounds[number], one, offers=offers or number > 0)
        for number, one in enumerate(ends)
    }
    training._finished = []
    return training.close_round(), log


def test_all_stages_offer_before_any_concludes() -> None:
    goes_on, log = end((6, True), (6, True))
    assert not goes_on
    assert log == ["a offers", "b offers", "a concludes", "b concludes"]


def test_a_reopened_round_goes_on_with_its_work() -> None:
    goes_on, log = end((5, True), (5, True))
    assert goes_on
    assert not [one for one in log if "afresh" in one]


def test_work_that_one_stage_has_lost_is_given_back_by_the_others() -> None:
    goes_on, log = end((5, True), (7, False))
    assert not goes_on
    assert log[-1] == "a starts afresh"


def test_a_stage_that_could_not_offer_takes_the_others_with_it() -> None:
    goes_on, log = end((5, True), (5, True), offers=False)
    assert not goes_on
    assert "b starts afresh" in log
    assert "a concludes" not in log


@pytest.mark.parametrize("lost", [True, False])
def test_a_stage_that_lags_behind_catches_up_alone(lost: bool) -> None:
    goes_on, log = end((6, not lost), (9, True), rounds=(5, 6))
    assert not goes_on
    assert log == ["a offers", "a concludes"]


def test_what_is_of_no_use_is_begun_anew_in_all_stages() -> None:
    training: Any = SpanTraining.__new__(SpanTraining)
    begun: list[str] = []
    training.replicas = {stage: SimpleNamespace(recover_from_divergence=begun.append) for stage in range(2)}
    training._finished = []
    training.recover_from_divergence("not a number")
    assert begun == ["not a number"] * 2


def test_a_stage_that_was_taken_away_does_not_keep_the_others_from_their_verdicts() -> None:
    training: Any = SpanTraining.__new__(SpanTraining)
    log: list[str] = []
    training.replicas = {0: FakeReplica(log, "a", 5, TAKEN), 1: FakeReplica(log, "b", 5, (6, True))}
    with pytest.raises(NotAdmitted):
        training.close_round()
    assert log == ["a offers", "b offers", "a concludes", "b concludes"]
