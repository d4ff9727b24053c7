"""A member of an amended run: steps of finished rounds, local learning rates, and what it is told and asked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.outer_steps import TensorMean
from tests.peer.checkpoints.making import verdict_chain

from shoal.peer.history.catch_up import next_state
from shoal.peer.member.connection import RunConnection
from shoal.peer.options import SessionOptions
from shoal.peer.session import Session
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import RunAmended, RunChanged
from shoal.swarm.protocol.amendments import amended, changes_at
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import Amendment, Changes, TensorSpec

TEXT = '[run]\nname = "x"\nrounds = 9\n[recipe]\nname = "gpt"\n[inner]\nlr = 0.5\n[round]\ntokens = 100\n'
RUN = parse_run_file(TEXT)


LAYOUT = [TensorSpec(name="w", shape=(2, 2)), TensorSpec(name="b", shape=(2,))]


def step(run: RunFile, changes: Changes, tokens: int = 100) -> torch.Tensor:
    state = AnchorState.make(torch.arange(6.0), torch.full((run.outer.slots, 6), 0.25), 3)
    changed = {"anchor_version": 4, "amended": changes, "tokens": tokens, "tokens_total": tokens}
    verdict = verdict_chain(1)[-1].model_copy(update=changed)
    return next_state(state, TensorMean(torch.full((6,), 0.5)), verdict, run, LAYOUT).values


def test_a_round_s_step_is_by_the_settings_in_its_verdict() -> None:
    """Whoever has the verdict takes the same step: members at the time, late joiners and replays."""
    plain, halved = step(RUN, ()), step(RUN, (("outer.lr", "0.35"),))
    assert torch.equal(halved, step(parse_run_file(TEXT + "[outer]\nlr = 0.35\n"), ()))
    assert not torch.equal(plain[0], halved[0])


def test_a_round_of_more_tokens_is_a_larger_step_where_the_run_says_so() -> None:
    """By the tokens in the verdict, which is signed: nobody counts anything."""
    scaled = TEXT + '[outer]\noptimizer = "lars"\n[schedule]\nscaling = "sqrt"\nreference_tokens = 100\n'
    run = parse_run_file('algorithm = "virtual_batch"\n' + scaled.replace("[inner]\nlr = 0.5\n", ""))
    once, doubled = step(run, ()), step(run, (), tokens=400)
    buffer = 0.9 * 0.25
    torch.testing.assert_close(doubled[1] - buffer, 2 * (once[1] - buffer))


def test_a_step_by_layers_has_a_rate_for_each() -> None:
    run = parse_run_file('algorithm = "virtual_batch"\n' + TEXT + '[outer]\noptimizer = "lars"\nlr = 1.0\n')
    after = step(run, ())
    local = 0.001 * float(torch.arange(4.0).norm() / torch.full((4,), 0.5).norm())
    expected = torch.tensor([local * 0.5] * 4 + [0.5] * 2) + 0.9 * 0.25
    torch.testing.assert_close(after[1], expected)
    torch.testing.assert_close(after[0], torch.arange(6.0) - expected)


def test_a_host_cannot_put_just_anything_into_a_verdict() -> None:
    for changes in ((("outer.momentum", "0.5"),), (("outer.lr", "-1"),)):
        with pytest.raises(RunChanged, match="no host may"):
            step(RUN, changes)


class Client:
    """A member's side of the coordinator, with a view that tests set."""

    def __init__(self) -> None:
        self.run_file = RUN
        self.view = SimpleNamespace(round=0, amendments=(), tokens_committed=0, tokens_in_round=0)

    @property
    def run_now(self) -> RunFile:
        return amended(RUN, changes_at(self.view.amendments, self.view.round))


def connection(client: Client, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A connection with that client, and the events that it has reported."""
    told: list[dict[str, Any]] = []
    made = object.__new__(RunConnection)
    made.members = SimpleNamespace(run=SimpleNamespace(client=client))  # type: ignore[assignment]
    made.options, made.run_file, made._amendments = SessionOptions(on_event=told.append, **options), RUN, ()
    return made, told


def test_a_member_tells_of_each_amendment_once() -> None:
    client = Client()
    one, told = connection(client)
    one.look_at_amendments()
    client.view.amendments = (Amendment(at_round=3, key="outer.lr", value="0.5"),)
    for _ in range(2):
        one.look_at_amendments()
    client.view.amendments += (Amendment(at_round=5, key="card.title", value='"Reefs"'),)
    one.look_at_amendments()
    assert [(event["round"], event["changes"]) for event in told] == [
        (3, {"outer.lr": "0.5"}),
        (5, {"card.title": '"Reefs"'}),
    ]


def test_a_longer_run_needs_consent_from_the_round_on_in_which_it_is_longer() -> None:
    client = Client()
    client.view.amendments = (Amendment(at_round=5, key="run.rounds", value="20"),)
    strict, _ = connection(client)
    willing, _ = connection(client, accept_amendments=True)
    strict.look_at_amendments()
    client.view.round = 5
    with pytest.raises(RunAmended, match="--accept-amendments") as refused:
        strict.look_at_amendments()
    assert refused.value.exit_code == 59
    willing.look_at_amendments()


def test_who_has_agreed_to_a_later_end_is_asked_again_about_a_still_later_one() -> None:
    client = Client()
    client.view.amendments = (Amendment(at_round=1, key="run.rounds", value="20"),)
    client.view.round = 1
    with pytest.raises(RunAmended) as refused:
        connection(client)[0].look_at_amendments()
    assert dict(refused.value.ends)["run.rounds"] == "20"
    agreed, _ = connection(client, agreed_ends=refused.value.ends)
    agreed.look_at_amendments()
    for later in ("21", "null"):
        client.view.amendments = (Amendment(at_round=1, key="run.rounds", value=later),)
        with pytest.raises(RunAmended):
            agreed.look_at_amendments()


def test_local_learning_rates_follow() -> None:
    client = Client()
    session = object.__new__(Session)
    session._network = SimpleNamespace(failure=None)  # type: ignore[assignment]
    session._member = SimpleNamespace(client=client)  # type: ignore[assignment]
    session.run_file, session._schedule_is_watched = RUN, False
    client.view.amendments = (
        Amendment(at_round=2, key="inner.lr", value="0.25"),
        Amendment(at_round=2, key="run.tokens", value="1000"),
        Amendment(at_round=2, key="schedule.kind", value='"linear"'),
    )
    client.view.tokens_committed = 500
    assert session.lr_factor == 1.0
    client.view.round = 2
    assert session.lr_factor == pytest.approx(0.5 * (0.1 + 0.9 * 0.5)), "half the rate, in the middle of the line"
