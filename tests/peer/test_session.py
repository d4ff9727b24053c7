"""Tests of session: when it resyncs, and how it ends when its last steps fail."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.peer.memory_session import NOTHING_AMENDED, Loop

from shoal.peer.member.connection import RunConnection
from shoal.peer.network_thread import Interrupted
from shoal.peer.session import Readiness, Session, StepTimer
from shoal.swarm.errors import Diverged, StorageError, UserError


def test_threads_end_although_the_last_checkpoint_fails() -> None:
    def fail() -> None:
        raise RuntimeError("for the test")

    ended: list[str] = []
    connection: Any = RunConnection.__new__(RunConnection)
    connection.network = SimpleNamespace(failure=None, stop=lambda: ended.append("network"))
    finishing = SimpleNamespace(finish=lambda: ended.append("finish"))
    copies: Any = SimpleNamespace(
        failure=None, resource=finishing, post=lambda call: call(), stop=lambda: ended.append("copies")
    )
    connection._copies = [copies]
    session: Any = Session.__new__(Session)
    session._connection, session._network = connection, connection.network
    session._replica_or_none = SimpleNamespace(save_checkpoint=fail)
    with pytest.raises(RuntimeError, match="for the test"):
        session.close()
    assert ended == ["network", "finish", "copies"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Diverged("host a new one"), ("diverged", "host a new one")),
        (StorageError("/home/somebody/secret: full"), ("failed", "StorageError; its own output says more")),
        (KeyboardInterrupt(), ("done", "")),
        (None, ("done", "")),
    ],
)
def test_others_are_told_why_a_session_ends(error: BaseException | None, said: tuple[str, str]) -> None:
    connection: Any = RunConnection.__new__(RunConnection)
    client = SimpleNamespace(farewell=("done", ""))
    connection.members = SimpleNamespace(run=SimpleNamespace(client=client))
    connection.network = SimpleNamespace(post=lambda call: call(), stop=lambda: None)
    connection._copies = []
    session: Any = Session.__new__(Session)
    session._connection, session._replica_or_none = connection, None
    session.__exit__(type(error) if error else None, error, None)
    assert client.farewell == said


@pytest.mark.parametrize("phase", ["training", "closing", "averaging"])
def test_a_session_whose_state_is_not_the_runs_starts_afresh(phase: str) -> None:
    reasons: list[str] = []
    session: Any = Session.__new__(Session)
    session._connection = NOTHING_AMENDED
    session._network, session._stopping, session._timer = SimpleNamespace(failure=None), False, StepTimer()
    session._replica_or_none = SimpleNamespace(verdict_is_known=False, exchanging=False, round=3, resync=reasons.append)
    view = SimpleNamespace(round=3, phase=phase, must_resync=True)
    session._member = SimpleNamespace(client=SimpleNamespace(view=view, closes_at_s=None), rejoined=False)
    assert session.settle() is Readiness.NOT_YET
    assert reasons == ["its state is not the run's"]


def test_a_session_that_is_stopped_while_it_resyncs_ends_its_loop() -> None:
    def stop(reason: str) -> None:
        session.request_stop()
        raise Interrupted

    session: Any = Session.__new__(Session)
    session._connection = NOTHING_AMENDED
    session._network = SimpleNamespace(failure=None, interrupt=lambda: None)
    session._stopping, session._timer = False, StepTimer()
    session._replica_or_none = SimpleNamespace(verdict_is_known=False, exchanging=False, round=3, resync=stop)
    view = SimpleNamespace(round=3, phase="training", must_resync=True)
    session._member = SimpleNamespace(client=SimpleNamespace(view=view, closes_at_s=None), rejoined=False)
    assert session.settle() is Readiness.OVER


# Loops of one's own -------------------------------------------------------------------------------------------

BATCHES = "inner.batch_samples = 4"


def test_a_loop_may_accumulate_over_batches_and_fetch_ahead() -> None:
    loop = Loop(BATCHES)
    batches = loop.session.batches(range(1000))
    taken = [next(batches) for _ in range(5)]
    assert [len(one) for one in taken] == [4] * 5
    loop.session.stepped(8, torch.tensor(2.0))
    loop.session.stepped(8, 4.0)
    assert (loop.samples.in_hand, loop.samples.in_round, loop.samples.mean_loss()) == (4, 16, 3.0)
    assert loop.steps == [], "the loop has stepped itself"
    loop.session.step(torch.tensor(1.0))
    assert loop.steps == [(4, 1.0)]
    assert loop.samples.undone() == [(20, 32)]


def test_a_loader_leases_ahead_only_if_nothing_goes_before_local_work() -> None:
    loop = Loop(BATCHES)
    batches = loop.session.loader(range(1000), batch_size=8)
    for _ in range(4):
        assert len(next(batches)) == 8
        loop.session.stepped(8, 1.0)
    assert (len(loop.asked), loop.samples.in_round) == (2, 32)
    client: Any = loop.session._member.client
    client.coordinator_is_away = True
    loop.session._lease_at_once(8)
    client.coordinator_is_away = False
    loop.view.must_resync = True
    loop.session._lease_at_once(8)
    assert len(loop.asked) == 2
    loop.view.must_resync = False
    loop.session._lease_at_once(8)
    assert len(loop.asked) == 3
    assert loop.asked[2] >= 8


def test_a_loop_may_count_steps_by_batches() -> None:
    loop = Loop(BATCHES)
    batches = loop.session.loader(range(1000), batch_size=12)
    sizes = [len(next(batches)) for _ in range(2)]
    assert sizes == [12, 12]
    loop.session.stepped_batches(2, 3.0)
    assert (loop.samples.in_round, loop.samples.in_hand) == (24, 0)
    next(batches)
    with pytest.raises(UserError, match="has stepped with 2 batches and took 1 of this session"):
        loop.session.stepped_batches(2, 3.0)


def test_leases_count_the_samples_of_a_loops_own_data() -> None:
    loop = Loop(BATCHES)
    for number, word in enumerate(loop.session.counted(iter("abc"), 8), 1):
        assert word == "abc"[number - 1]
        loop.session.stepped_batches(1, 1.0)
        assert loop.samples.in_round == 8 * number
    loop.session.request_stop()
    assert list(loop.session.counted(iter("abc"), 8)) == [], "the run is over"


@pytest.mark.parametrize("overlap", [False, True])
def test_an_evaluation_does_not_keep_a_round_waiting(overlap: bool) -> None:
    """Work is offered in its midst, once; the model changes after it, or with overlap when that does no harm."""
    loop = Loop(f"{BATCHES}\naveraging.overlap = {str(overlap).lower()}")
    replica, did = loop.session._replica, []

    def note(word: str, exchanging: bool) -> bool:
        did.append(word)
        replica.exchanging = exchanging  # type: ignore[misc]
        return True

    replica.begin_exchange = lambda: note("offered", True)  # type: ignore[method-assign]
    replica.conclude_round = lambda: note("concluded", False)  # type: ignore[method-assign]
    loop.session.offer_if_due()
    loop.session.conclude()
    assert did == [], "no round is due"
    loop.view.phase = "averaging"
    for _ in range(3):
        loop.session.offer_if_due()
    assert did == ["offered"]
    loop.session.conclude()
    assert did == (["offered"] if overlap else ["offered", "concluded"])


def test_a_loop_that_never_steps_is_told() -> None:
    loop = Loop(BATCHES)
    loop.leases = 1000
    with pytest.raises(UserError, match=r"call session\.step\(loss\) after each batch, or session\.stepped"):
        for _ in loop.session.batches(range(1000)):
            pass


def test_a_virtual_batch_that_waits_for_its_own_loop_says_so() -> None:
    loop = Loop(f"algorithm = 'virtual_batch'\n{BATCHES}")
    loop.leases = 1
    with pytest.raises(UserError, match="the round waits for 16 samples that this loop has taken"):
        for _ in loop.session.batches(range(1000)):
            pass


def test_a_virtual_batch_has_no_steps_of_the_loop() -> None:
    loop = Loop(f"algorithm = 'virtual_batch'\n{BATCHES}")
    next(loop.session.batches(range(1000)))
    with pytest.raises(UserError, match=r"virtual_batch has none: .* call session\.step\(loss\)"):
        loop.session.stepped(4, 1.0)
    loop.session.step(torch.tensor(1.0))
    assert loop.samples.in_round == 4


def test_own_loops_can_follow_the_runs_schedule_or_are_told_that_they_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = f"{BATCHES}\nschedule.warmup_tokens = 100"
    for follows in (True, False):
        caplog.clear()
        loop = Loop(schedule)
        batches = loop.session.batches(range(1000))
        loop.view.tokens_committed = 40
        loop.view.tokens_in_round = 10
        for _ in range(2):
            next(batches)
            if follows:
                assert loop.session.lr_factor == pytest.approx(0.505)
            loop.session.stepped(4, 1.0)
        warned = [one.message for one in caplog.records if "[schedule] has no effect" in one.message]
        assert len(warned) == (0 if follows else 1)


def test_settings_without_effect_are_named_to_own_loops(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(f"{BATCHES}\ninner.clip_norm = 1.0\ninner.lr = 1e-3")
    session: Any = loop.session
    session._warn_of_unused_settings(None)
    assert "inner.lr, inner.clip_norm of the run file has no effect" in caplog.text
    caplog.clear()
    Loop(BATCHES).session._warn_of_unused_settings(None)
    assert not caplog.records
    virtual: Any = Loop("algorithm = 'virtual_batch'").session
    virtual._warn_of_unused_settings(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    assert "the inner_optimizer has no effect" in caplog.text


def test_the_speed_of_steps_leaves_out_what_the_loop_waits_for() -> None:
    now_s = 0.0
    timer = StepTimer(lambda: now_s)
    timer.start()
    now_s = 1.0
    timer.pause()
    now_s = 50.0
    timer.start()
    timer.start()
    now_s = 51.0
    timer.stop(10, goes_on=True)
    assert (timer.step_s, timer.tokens_per_s) == (2.0, 5.0)
    now_s = 53.0
    timer.stop(10)
    assert (timer.step_s, timer.tokens_per_s) == (2.0, 5.0)
    now_s = 99.0
    timer.stop(10)
    assert timer.step_s == 2.0, "no step was begun"
