"""Tests of session: when it resyncs, and how it ends when its last steps fail."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.peer.member.connection import RunConnection
from shoal.peer.member.member import Progress
from shoal.peer.network_thread import Interrupted
from shoal.peer.session import Readiness, Session, StepTimer
from shoal.peer.training.data import LeasedSamples
from shoal.swarm.errors import Diverged, StorageError, UserError
from shoal.swarm.protocol.run_file import parse_run_file

NOTHING_AMENDED = SimpleNamespace(look_at_amendments=lambda: None)


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


class Loop:
    """A session whose replica takes no steps and which always has leases. ``stepped``: (samples, factor) of steps."""

    def __init__(self, toml: str = "", recipe: dict[str, Any] | None = None) -> None:
        self.run = parse_run_file(f"{toml}\n[run]\nname = 'r'\n[recipe]\nname = 'own'\n[round]\ntokens = 64\n")
        self.samples = LeasedSamples(1)
        self.steps: list[tuple[int, float]] = []
        self.asked: list[int] = []
        self.resyncs = 0
        replica = SimpleNamespace(samples=self.samples, tokens_per_sample=1, recipe_config=recipe)
        replica.verdict_is_known, replica.exchanging, replica.round = False, False, 0
        replica.step, replica.describe = (lambda *step: self.steps.append(step)), lambda data: None
        session: Any = Session.__new__(Session)
        session._connection = NOTHING_AMENDED
        session._network, session._stopping = SimpleNamespace(failure=None), False
        session._timer, session._schedule_is_watched = StepTimer(), False
        session._replica_or_none, session.run_file = replica, self.run
        self.view = SimpleNamespace(round=0, phase="training", must_resync=False, tokens_committed=0, tokens_in_round=0)
        deadlines = SimpleNamespace(lease_s=1.0, first_step_s=1.0)
        client = SimpleNamespace(view=self.view, closes_at_s=None, deadlines=deadlines, coordinator_is_away=False)
        client.run_now = self.run
        session._member = SimpleNamespace(client=client, rejoined=False, progress=Progress())
        session.fetch_lease = session._lease = self._lease
        session.options = SimpleNamespace(role="trainer")
        self.session: Session = session
        self.leases = 8

    def _lease(self, samples: int) -> None:
        self.asked.append(samples)
        start = 16 * (len(self.asked) - 1)
        if len(self.asked) <= self.leases:
            self.samples.add_lease(start, start + 16)


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
