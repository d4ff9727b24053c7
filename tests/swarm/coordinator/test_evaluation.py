"""Evaluations of the model: whose count, how they are compared, and when they end the run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError
from tests.fakes.memory_coordinator import identity
from tests.swarm.coordinator.test_trust import TURN_S, UnevenWorld
from tests.swarm.coordinator.test_work_review import ReviewedWorld
from tests.swarm.coordinator.world import run_file

from shoal.swarm.coordinator import evaluation_book
from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.access_trail import AccessTrail
from shoal.swarm.coordinator.evaluation_book import TOLERANCE, EvaluationBook, same_loss, stop_reason
from shoal.swarm.errors import NotAdmitted, StaleWork, TryLater, WireError
from shoal.swarm.protocol.evaluations import (
    MAX_EVALUATORS,
    MAX_SAMPLED,
    Evaluation,
    HeldOutFigure,
    SignedEvaluation,
    SourceLoss,
    TextSample,
    check_evaluations,
    plain_line,
    plain_text,
)
from shoal.swarm.protocol.run_file import EvaluationSection, RunFile, StopSection, parse_run_file


def stopping_run(validators: int = 2, **stop: Any) -> RunFile:
    run = run_file()
    return run.model_copy(
        update={
            "run": run.run.model_copy(update={"stop_when": StopSection(**stop) if stop else None}),
            "evaluation": EvaluationSection(validators=validators),
        }
    )


class EvaluatedWorld(ReviewedWorld):
    """Three members, and validators with invites of their own."""

    def __init__(self, validators: int = 2, **stop: Any) -> None:
        UnevenWorld.__init__(self, stopping_run(validators, **stop), [4, 4, 4])
        self.go_on(2)
        self.peers = [self.validator(9), self.validator(10)]

    def until_agreed(self) -> None:
        while self.scope.agreed_digest is None:
            for number in self.speeds:
                self.behave(self.workers[number])
            self.tick(TURN_S)

    def signed_evaluation(self, loss: float | None, number: int = 9, **changes: Any) -> SignedEvaluation:
        if not self.scope.has_ended:
            self.until_agreed()
        scope = self.scope
        found = Evaluation(
            version=scope.anchor_version, state_digest=scope.agreed_digest or bytes(32), loss=loss, samples=64
        ).model_copy(update=changes)
        who = identity(number)
        signature = who.sign(found.signed_bytes(scope.run.hash))
        return SignedEvaluation(evaluation=found, validator_key=who.public_key, signature=signature)

    def evaluate(self, loss: float | None, number: int = 9, **changes: Any) -> None:
        self.review.evaluated(identity(number).peer_id, self.signed_evaluation(loss, number, **changes))
        self.settle()

    @property
    def figures(self) -> tuple[HeldOutFigure, ...]:
        return self.scope.status(self.now_s).evaluation.figures

    def count(self, kind: type[ev.JournalEvent]) -> int:
        return sum(isinstance(one, kind) for one in self.events)


@pytest.fixture
def world() -> EvaluatedWorld:
    return EvaluatedWorld()


def test_one_validator_makes_a_claim_and_two_agree_or_do_not(world: EvaluatedWorld) -> None:
    world.evaluate(3.0)
    (figure,) = world.figures
    assert (figure.standing, figure.loss, figure.counts) == ("claim", 3.0, False)
    world.evaluate(3.0 * (1 + TOLERANCE / 2), 10)
    (figure,) = world.figures
    assert (figure.standing, figure.loss, figure.counts) == ("agreed", 3.0, True)
    assert [one.validator for one in figure.claims] == world.peers
    world.go_on(1)
    world.evaluate(2.9)
    world.evaluate(2.9 * (1 + 2 * TOLERANCE), 10, accuracy=0.5)
    assert (world.figures[1].standing, world.figures[1].loss, world.figures[1].counts) == ("disputed", None, False)
    assert world.figures[1].accuracy is None, "nothing of a disputed version is used"


def test_two_that_measure_no_number_agree(world: EvaluatedWorld) -> None:
    world.evaluate(None)
    world.evaluate(None, 10)
    assert (world.figures[0].standing, world.figures[0].loss) == ("agreed", None)
    assert not same_loss(None, 3.0)


def test_most_of_three_are_believed(world: EvaluatedWorld) -> None:
    world.validator(11)
    for number, loss in ((9, 9.0), (10, 3.0), (11, 3.0)):
        world.evaluate(loss, number)
    assert (world.figures[0].standing, world.figures[0].loss, world.figures[0].counts) == ("agreed", 3.0, True)


def test_two_identities_of_one_invite_are_one_witness() -> None:
    world = EvaluatedWorld()
    token = world.invite().token
    for number in (11, 12):
        world.come_as(number, token)
        world.evaluate(9.0, number)
    world.evaluate(3.0)
    world.evaluate(3.0, 10)
    assert [one.loss for one in world.figures[0].claims] == [9.0, 3.0, 3.0]
    assert (world.figures[0].standing, world.figures[0].loss, world.figures[0].counts) == ("agreed", 3.0, True)


def test_what_is_refused(world: EvaluatedWorld) -> None:
    peer, scope = world.peers[0], world.scope
    others = world.signed_evaluation(3.0, 10)
    with pytest.raises(WireError, match="signed"):
        world.review.evaluated(peer, others)
    mine = world.signed_evaluation(3.0)
    forged = mine.model_copy(update={"evaluation": mine.evaluation.model_copy(update={"loss": 1.0})})
    with pytest.raises(WireError, match="signed"):
        world.review.evaluated(peer, forged)
    for_another_run = identity(9).sign(mine.evaluation.signed_bytes(bytes(32)))
    with pytest.raises(WireError, match="for this run"):
        world.review.evaluated(peer, mine.model_copy(update={"signature": for_another_run}))
    with pytest.raises(StaleWork):
        world.evaluate(3.0, state_digest=b"x" * 32)
    with pytest.raises(StaleWork):
        world.evaluate(3.0, version=scope.anchor_version + 1)
    with pytest.raises(StaleWork):
        world.evaluate(3.0, version=2**60)
    with pytest.raises(NotAdmitted):
        world.review.evaluated(world.workers[0].peer, mine)
    assert world.count(ev.ModelEvaluated) == 0


def test_a_version_whose_state_is_not_agreed_on_waits(world: EvaluatedWorld) -> None:
    signed = world.signed_evaluation(3.0)
    world.scope.agreed_digest = None
    with pytest.raises(TryLater):
        world.review.evaluated(world.peers[0], signed)


def test_each_version_is_reported_once_and_in_order(world: EvaluatedWorld) -> None:
    old = world.signed_evaluation(3.0)
    world.evaluate(3.0)
    world.evaluate(1.0)
    assert world.count(ev.ModelEvaluated) == 1
    world.go_on(1)
    world.evaluate(2.9)
    world.review.evaluated(world.peers[0], old)
    assert world.count(ev.ModelEvaluated) == 2
    assert [one.version for one in world.figures] == [2, 3]


def test_an_earlier_version_is_known_by_its_verdict(world: EvaluatedWorld) -> None:
    signed = world.signed_evaluation(3.0)
    world.go_on(2)
    world.review.evaluated(world.peers[0], signed)
    tokens = sum(one.verdict.tokens for one in world.verdicts[:2])
    assert (world.figures[0].version, world.figures[0].tokens) == (2, tokens)


def test_only_so_many_validators_of_a_version() -> None:
    book = EvaluationBook()
    for number in range(MAX_EVALUATORS):
        book.take(event(1, 3.0, by="abcdefgh"[number] * 16))
    assert not book.may_take("z" * 16, "z" * 8, 1)
    assert book.may_take("z" * 16, "z" * 8, 2)


def test_rounds_that_are_undone_take_their_figures_along() -> None:
    book = EvaluationBook()
    for version in (1, 2, 3):
        book.take(event(version, 3.0))
    book.undo(1)
    assert [one.version for one in book.versions] == [1]
    assert book.may_take("a" * 16, "z" * 8, 2), "the version is made anew"


def event(
    version: int, loss: float | None, by: str = "a" * 16, texts: tuple[TextSample, ...] = ()
) -> ev.ModelEvaluated:
    found = Evaluation(version=version, state_digest=bytes(32), loss=loss, samples=1, texts=texts)
    signed = SignedEvaluation(evaluation=found, validator_key=bytes(32), signature=bytes(64))
    return ev.ModelEvaluated(by=by, round=version, tokens=version, at_s=1.0, signed=signed)


def test_texts_of_new_and_of_some_old_versions_are_kept() -> None:
    book = EvaluationBook()
    for version in range(1, 101):
        book.take(event(version, 3.0, texts=(TextSample(prompt="", text=f"text {version}"),)))
    shown = [one.version for one in book.status(1).texts]
    assert len(shown) == MAX_SAMPLED
    assert shown[-8:] == list(range(93, 101))
    assert shown[0] == 1
    restored = EvaluationBook()
    restored.restore(book.kept())
    assert restored.status(1) == book.status(1)


def test_a_long_history_keeps_its_best_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_book, "_KEPT", 64)
    book = EvaluationBook()
    for version in range(200):
        book.take(event(version, 1.0 if version == 7 else 3.0))
    kept = [one.version for one in book.versions]
    assert len(kept) <= 64
    assert 7 in kept
    assert kept[-32:] == list(range(168, 200))


def test_old_versions_that_were_thinned_out_are_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_book, "_KEPT", 64)
    book = EvaluationBook()
    for version in range(100):
        book.take(event(version, 3.0))
    gone = sorted(set(range(100)) - {one.version for one in book.versions})
    assert gone
    assert not any(book.may_take("z" * 16, "z" * 8, version) for version in gone)
    assert all(book.may_take("z" * 16, "z" * 8, version) for version in range(68, 101))


# The end of a run -------------------------------------------------------------------------------------------


def figures(losses: list[float | None], *, counts: bool = True) -> list[HeldOutFigure]:
    book = EvaluationBook()
    for version, loss in enumerate(losses, 1):
        book.take(event(version, loss))
    return book.figures(1 if counts else 2)


@pytest.mark.parametrize(
    ("stop", "losses", "ends"),
    [
        ({"held_out_loss": 2.5}, [3.0, 2.6], False),
        ({"held_out_loss": 2.5}, [3.0, 2.5], True),
        ({"held_out_loss": 2.5}, [2.4, 2.6], False),  # it has risen again: the newest figure decides
        ({"patience": 2}, [3.0, 2.9, 3.0], False),
        ({"patience": 2}, [3.0, 2.9, 3.0, 2.95], True),
        ({"patience": 2}, [3.0, 2.9, 3.0, 2.85], False),
        ({"patience": 2, "min_improvement": 0.1}, [3.0, 2.95, 2.92], True),
        ({"patience": 2, "min_improvement": 0.1}, [3.0, 2.95, 2.85], False),
        ({"patience": 2}, [3.0, None, None], False),  # no number says nothing here: the trend names it
        ({"patience": 1}, [], False),
    ],
)
def test_when_figures_end_a_run(stop: dict[str, Any], losses: list[float | None], ends: bool) -> None:
    assert bool(stop_reason(StopSection(**stop), figures(losses))) == ends
    assert not stop_reason(StopSection(**stop), figures(losses, counts=False))


def test_a_run_stops_by_a_decision_in_the_journal() -> None:
    world = EvaluatedWorld(held_out_loss=2.5)
    world.evaluate(2.4)
    assert not world.scope.stopping, "the claim of one validator ends nothing"
    world.evaluate(2.4, 10)
    assert "held-out loss of version 2 is 2.4" in world.scope.stopping
    assert world.scope.status(world.now_s).stopping == world.scope.stopping
    assert world.replayed(world.journal).scope.stopping == world.scope.stopping
    before = world.scope.round.number
    world.go_on(1)
    assert world.scope.has_ended
    assert world.verdicts[-1].verdict.round == before, "the open round was the last one"
    assert world.verdicts[-1].verdict.committed
    assert world.replayed(world.journal).scope.has_ended
    status = world.scope.status(world.now_s)
    assert world.replayed(world.short).scope.status(world.now_s).evaluation == status.evaluation


def test_a_host_that_trusts_each_validator() -> None:
    world = EvaluatedWorld(validators=1, held_out_loss=2.5)
    world.evaluate(2.4)
    assert world.scope.stopping
    assert world.figures[0].standing == "claim"


def test_where_there_are_two_validators_none_ends_the_run_or_warns_alone() -> None:
    world = EvaluatedWorld(1, held_out_loss=2.5)
    world.evaluate(3.0)
    world.evaluate(3.0, 10)
    world.go_on(1)
    world.evaluate(2.4)
    assert not world.scope.stopping, "the other one has not spoken yet"
    world.evaluate(2.4, 10)
    assert "2.4" in world.scope.stopping

    world = EvaluatedWorld()
    world.evaluate(3.0)
    world.evaluate(3.0, 10)
    world.go_on(1)
    world.evaluate(None)
    assert world.scope.trend().kind == ""
    world.evaluate(None, 10)
    assert world.scope.trend().kind == "not finite"
    assert "as the only validator says" not in world.scope.trend().text


def test_a_run_s_only_validator_warns_by_its_own_word(world: EvaluatedWorld) -> None:
    world.evaluate(None)
    assert world.scope.trend().kind == "not finite"
    assert "as the only validator says" in world.scope.trend().text


def test_a_validator_that_has_gone_is_not_waited_for() -> None:
    book = EvaluationBook()
    for number in range(1, 11):
        book.take(event(number, 3.0))
        if number == 1:
            book.take(event(number, 3.0, by="b" * 16).model_copy(update={"invite": "b" * 16}))
            assert book.witnesses == 2
    assert book.witnesses == 1
    assert [one.counts for one in book.figures(1)] == [True] * 10


def test_a_disagreement_ends_nothing_and_is_told() -> None:
    world = EvaluatedWorld(validators=1, held_out_loss=2.5)
    world.evaluate(2.6)
    world.evaluate(2.4, 10)
    assert not world.scope.stopping
    (told,) = [one.figure for one in world.events if isinstance(one, ev.FigureTaken)][-1:]
    assert told.standing == "disputed"


def test_a_run_file_that_cannot_stop_so_is_refused() -> None:
    toml = '[run]\nname = "a"\n[run.stop_when]\n{}\n[recipe]\nname = "{}"\n[round]\ntokens = 10\n'
    assert parse_run_file(toml.format("patience = 3", "gpt")).run.stop_when == StopSection(patience=3)
    with pytest.raises(Exception, match="held_out_loss, patience or both"):
        parse_run_file(toml.format("min_improvement = 0.1", "gpt"))
    with pytest.raises(Exception, match="needs validators"):
        parse_run_file(toml.format("patience = 3", "own"))
    with pytest.raises(Exception, match="plain text"):
        parse_run_file(toml.format("patience = 3", "gpt") + '[evaluation]\nprompts = ["\\u001b[31m"]\n')


# Records ----------------------------------------------------------------------------------------------------


def test_hostile_sizes_and_characters_are_refused() -> None:
    for fields in (
        {"texts": (TextSample(prompt="", text="x"),) * 5},
        {"sources": (SourceLoss(name="x", loss=1.0, samples=1),) * 17},
        {"accuracy": 1.5},
        {"loss": float("nan")},
        {"samples": 0},
        {"took_s": -1.0},
    ):
        content = {"version": 1, "state_digest": bytes(32), "loss": 1.0, "samples": 1} | fields
        with pytest.raises(ValidationError):
            Evaluation.model_validate(
                {key: tuple(one) if isinstance(one, list) else one for key, one in content.items()}
            )
    for name in ("a\nb", "a\u2028b", "a\x0bb", "\x1b", "", "x" * 65):
        with pytest.raises(ValidationError):
            SourceLoss(name=name, loss=1.0, samples=1)
    assert plain_line("a\nb\x1b\r\nc", 64) == "a b c"
    for text in ("x" * 1001, "a\x1b[2Jb", "a\u202eb", "a\rb", "\x00"):
        with pytest.raises(ValidationError):
            TextSample(prompt="", text=text)
    assert plain_text("a\x1b[2J\u202eb\nc\x00\ud800", 1000) == "a[2Jb\nc"


def test_readers_check_what_validators_have_signed(world: EvaluatedWorld) -> None:
    world.evaluate(3.0)
    world.evaluate(3.0, 10)
    status, run_hash = world.scope.status(world.now_s).evaluation, world.scope.run.hash
    check_evaluations(status, run_hash)
    (figure,) = status.figures
    lower = tuple(one.model_copy(update={"loss": 1.0}) for one in figure.claims)
    lied = status.model_copy(update={"figures": (figure.model_copy(update={"claims": lower}),)})
    with pytest.raises(WireError, match="did not sign"):
        check_evaluations(lied, run_hash)
    with pytest.raises(WireError, match="did not sign"):
        check_evaluations(status, bytes(32))
    with pytest.raises(WireError, match="did not sign"):
        check_evaluations(status.model_copy(update={"newest": ()}), run_hash)


def test_the_trail_has_them_as_signed(world: EvaluatedWorld) -> None:
    world.evaluate(3.0)
    trail = AccessTrail(world.scope.run.hash, identity(77).sign, None)
    made = trail.records([one for one in world.events if isinstance(one, ev.ModelEvaluated)], Counter(), 1.0)
    (record,) = [one.record for one in made]
    assert (record.kind, record.peer, record.round) == ("evaluated", world.peers[0], world.figures[0].round)
    assert record.evaluation is not None
    assert record.evaluation.is_signed(world.scope.run.hash)
