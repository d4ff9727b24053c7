from typing import Any

import pytest
from tests.swarm.coordinator.world import (
    CPU,
    INITIAL,
    MODEL,
    TOKENS_PER_SAMPLE,
    World,
    entry,
    heartbeat,
    next_state,
    peer_name,
    report,
    run_file,
)

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.model_check import first_difference
from shoal.swarm.errors import (
    CorpusError,
    ModelMismatch,
    NotAdmitted,
    RunEnded,
    StaleWork,
    Superseded,
    TryLater,
    WireError,
)
from shoal.swarm.protocol.messages import PeerToCoordinatorRequestLease
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import MAX_TROUBLE, SampleRange, TensorSpec
from shoal.swarm.sample_ranges import merge, overlap, to_wire


def until(world: World, phase: str, members: int = 2, within_s: float = 60.0) -> None:
    """Everybody behaves until the machine is in that phase."""
    deadline_s = world.now_s + within_s
    while world.scope.round.phase != phase:
        assert world.now_s < deadline_s, f"still {world.scope.round.phase}"
        for worker in world.workers[:members]:
            world.behave(worker)
        world.tick(0.25)


def averaging(world: World, members: int = 2) -> RoundPlan:
    until(world, "averaging", members)
    assert world.scope.round.plan is not None
    return world.scope.round.plan


def lost(world: World) -> list[tuple[str, str]]:
    return [(event.peer, event.reason) for event in world.events if isinstance(event, ev.MemberLost)]


def work(world: World, number: int, samples: int) -> None:
    """Lease and train exactly so many."""
    worker = world.workers[number]
    world.take(worker, world.ask(worker, samples))
    while worker.left:
        world.train(worker)
    world.beat(worker)


# Joining ------------------------------------------------------------------------------------------------


def test_a_round_from_the_beginning() -> None:
    world = World(run_file(), 2)
    assert world.scope.round.phase == "training"
    plan = averaging(world)
    until(world, "training")
    verdict = world.verdicts[-1].verdict
    assert verdict.committed
    assert verdict.plan == plan
    assert verdict.loss == 2.5
    assert world.scope.anchor_version == 1
    assert world.scope.tokens_committed == verdict.tokens > 0


def test_the_same_process_joins_twice() -> None:
    world = World(run_file(), 1)
    work(world, 0, 4)
    world.scope.admission.join(entry(0, world.workers[0].key), CPU, world.now_s)
    assert world.scope.leases.held == {peer_name(0): [(0, 4)]}
    assert lost(world) == []


def test_a_new_process_takes_the_place_and_the_work_is_free_again() -> None:
    world = World(run_file(), 1)
    work(world, 0, 4)
    old = entry(0, world.workers[0].key).certificate.curve_key
    world.join(world.workers[0])
    assert lost(world) == [(peer_name(0), "joined again")]
    assert world.scope.leases.pool == [(0, 4)]
    with pytest.raises(Superseded, match="another process"):
        world.scope.admission.require_member(old)


def test_observers_are_seen_by_members_but_by_nobody_else() -> None:
    world = World(run_file(), 1)
    before = len(world.journal), world.scope.membership.roster_version
    world.scope.admission.join(entry(7, 5, "observer"), CPU, world.now_s)
    world.settle()
    view = world.view(world.workers[7])
    assert view.members == 1
    assert [one.role for one in view.roster or ()] == ["trainer", "observer"]
    assert view.roster_version > before[1]
    assert len(world.scope.status(world.now_s).members) == 1
    with pytest.raises(NotAdmitted):
        world.scope.describe_model(peer_name(7), MODEL)
    ask = PeerToCoordinatorRequestLease(round=0, samples=4, tokens_done=0)
    world.beat(world.workers[7], anchor_version=0, state_digest=INITIAL)
    assert world.scope.leasing.request(peer_name(7), ask, world.now_s) == []
    for _ in range(20):
        world.beat(world.workers[0])
        world.tick(0.25)
    assert peer_name(7) not in world.scope.membership.members
    assert not any("MemberJoined" in str(one) for one in world.journal[before[0] :])


def test_an_observer_alone_opens_no_round_and_is_waited_for_by_nobody() -> None:
    world = World(run_file())
    world.scope.admission.join(entry(7, 5, "observer"), CPU, world.now_s)
    world.beat(world.workers[7], anchor_version=0, state_digest=INITIAL)
    assert world.scope.round.phase == "waiting"
    assert world.scope.agreed_digest is None


def test_a_trainers_identity_does_not_observe() -> None:
    world = World(run_file(), 1)
    with pytest.raises(NotAdmitted, match="another identity"):
        world.scope.admission.join(entry(0, 99, "observer"), CPU, world.now_s)
    world.leave(world.workers[0])
    with pytest.raises(NotAdmitted, match="another identity"):
        world.scope.admission.join(entry(0, 99, "observer"), CPU, world.now_s)


def test_a_full_run() -> None:
    world = World(run_file(), 1)
    world.scope.membership.places = 40
    for number in range(39):
        name = (
            "x" * 14
            + "abcdefghijklmnopqrstuvwxyz234567"[number // 32]
            + "abcdefghijklmnopqrstuvwxyz234567"[number % 32]
        )
        other = entry(9, 100 + number).model_copy(update={"peer": name})
        world.scope.admission.join(other, CPU, world.now_s)
    with pytest.raises(TryLater, match="full"):
        world.scope.admission.join(entry(1, 1), CPU, world.now_s)
    world.scope.admission.join(entry(2, 1, "observer"), CPU, world.now_s)
    assert len(world.view(world.workers[0]).roster or ()) == 40 + 1
    world.leave(world.workers[0])
    world.scope.admission.join(entry(1, 1), CPU, world.now_s)


def test_many_have_come_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.swarm.coordinator.membership.MAX_STATUSES", 1100)
    world = World(run_file(), 1)
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    for number in range(1100 + 10):
        name = "x" * 13 + letters[number // 1024] + letters[number // 32 % 32] + letters[number % 32]
        other = entry(9, 100 + number).model_copy(update={"peer": name})
        world.scope.admission.join(other, CPU, world.now_s)
        world.scope.membership.members[name].rounds_committed = 1
        world.scope.admission.leave(name, "", world.now_s)
    world.machine.log.take()
    members = world.scope.status(world.now_s).members
    assert len(members) == 1100
    assert [one.peer for one in members if one.alive] == [peer_name(0)]


def test_who_joins_and_leaves_costs_nothing_for_those_that_are_gone() -> None:
    world = World(run_file(), 3)
    membership = world.scope.membership

    class Watched(dict[str, Any]):
        looked = 0

        def items(self) -> Any:
            Watched.looked += 1
            return super().items()

        def values(self) -> Any:
            Watched.looked += 1
            return super().values()

        def __iter__(self) -> Any:
            Watched.looked += 1
            return super().__iter__()

    membership.members = Watched(membership.members)
    other = entry(9, 100)
    world.scope.admission.join(other, CPU, world.now_s)
    assert other in membership.roster()
    assert membership.holder(other.certificate.curve_key) == other.peer
    world.scope.admission.lose_silent(world.now_s)
    world.scope.admission.lose_idle(world.now_s)
    world.scope.admission.leave(other.peer, "", world.now_s)
    assert other not in membership.roster()
    assert Watched.looked == 0


def test_of_those_who_left_no_trace_the_last_ones_are_remembered() -> None:
    world = World(run_file(), 2)
    for number in range(320):
        peer = (
            "x" * 14
            + "abcdefghijklmnopqrstuvwxyz234567"[number // 32]
            + "abcdefghijklmnopqrstuvwxyz234567"[number % 32]
        )
        world.scope.admission.join(entry(9, 100 + number).model_copy(update={"peer": peer}), CPU, world.now_s)
        world.scope.heartbeat(peer, heartbeat(bytes_sent=1), world.now_s)
        if number == 0:
            world.scope.membership.members[peer].tokens_committed = 1
            first = peer
        world.scope.admission.leave(peer, "", world.now_s)
    members = world.scope.membership.members
    assert len(members) == 2 + 1 + 256
    assert first in members
    assert peer in members
    assert len(world.scope.admission.sent_bytes._reported) <= len(members)


# Models -------------------------------------------------------------------------------------------------


def test_the_first_peers_model_is_the_runs() -> None:
    world = World(run_file(), 2)
    wider = MODEL.model_copy(update={"layout": (TensorSpec(name="w", shape=(100, 501)),)})
    expected = r"this model is not the run's: parameter 0 is w \[100, 501\] here, w \[100, 500\] in the run"
    with pytest.raises(ModelMismatch, match=expected):
        world.scope.describe_model(peer_name(1), wider)
    with pytest.raises(ModelMismatch, match="takes 11 tokens a sample, the run's 10"):
        world.scope.describe_model(peer_name(1), MODEL.model_copy(update={"tokens_per_sample": 11}))
    with pytest.raises(CorpusError) as refusal:
        world.scope.describe_model(peer_name(1), MODEL.model_copy(update={"corpus_digest": b"d" * 32}))
    assert "data differs from the run's" in str(refusal.value)
    assert 'data.source = "text:GLOB"' in str(refusal.value)


def test_the_data_may_come_later() -> None:
    world = World(run_file())
    world.scope.admission.join(entry(0, 1), CPU, world.now_s)
    unknown = MODEL.model_copy(update={"corpus_digest": None})
    world.scope.describe_model(peer_name(0), unknown)
    world.scope.describe_model(peer_name(0), MODEL)
    world.scope.describe_model(peer_name(0), unknown)
    assert world.scope.model == MODEL
    with pytest.raises(CorpusError):
        world.scope.describe_model(peer_name(0), MODEL.model_copy(update={"corpus_digest": b"d" * 32}))


@pytest.mark.parametrize("shape", [(0, 5), (2**30, 2**30)])
def test_models_of_no_or_absurd_size(shape: tuple[int, int]) -> None:
    world = World(run_file())
    world.scope.admission.join(entry(0, 1), CPU, world.now_s)
    spec = TensorSpec(name="w", shape=shape)
    with pytest.raises(ModelMismatch, match="parameters"):
        world.scope.describe_model(peer_name(0), MODEL.model_copy(update={"layout": (spec,)}))


def test_first_difference() -> None:
    one, two = (TensorSpec(name=name, shape=(2,)) for name in "ab")
    assert first_difference((one, two), (one, two)) == ""
    assert first_difference((one, two), (one,)) == "it has 1 parameters here, 2 in the run"
    assert first_difference((one,), (one, two)) == "it has 2 parameters here, 1 in the run"
    other = two.model_copy(update={"shape": (3,)})
    assert first_difference((one, two), (one, other)) == "parameter 1 is b [3] here, b [2] in the run"


# States -------------------------------------------------------------------------------------------------


def test_the_first_state_is_the_runs_and_others_must_resync() -> None:
    world = World(run_file(), 1)
    assert world.scope.agreed_digest == INITIAL
    world.join(world.workers[1])
    world.beat(world.workers[1], anchor_version=0, state_digest=b"o" * 32)
    assert world.scope.agreed_digest == INITIAL
    assert world.view(world.workers[1]).must_resync
    assert not world.view(world.workers[0]).must_resync
    assert world.view(world.workers[1]).state_digest == INITIAL
    assert world.ask(world.workers[1], 4) == []


def test_a_first_state_that_nobody_has_any_more_gives_way() -> None:
    world = World(run_file(), 1)
    world.join(world.workers[1])
    world.beat(world.workers[1], anchor_version=0, state_digest=b"o" * 32)
    world.leave(world.workers[0])
    world.beat(world.workers[1], anchor_version=0, state_digest=b"o" * 32)
    assert world.scope.agreed_digest == b"o" * 32
    assert not world.view(world.workers[1]).must_resync


def test_who_tells_of_another_state_than_the_agreed_one_does_not_change_it() -> None:
    world = World(run_file(), 2)
    until(world, "averaging")
    until(world, "training")
    until(world, "closing")
    newcomer, two_faced = world.workers[:2]
    assert world.scope.agreed_digest == next_state(INITIAL)
    world.leave(newcomer)
    world.ready(two_faced)
    world.beat(two_faced, state_digest=b"o" * 32)
    world.join(newcomer)
    world.sync(newcomer)
    assert world.scope.agreed_digest == newcomer.digest == next_state(INITIAL)
    assert world.view(two_faced).must_resync


def test_work_on_another_state_is_refused() -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    with pytest.raises(StaleWork, match="state is not the run's"):
        world.ready(world.workers[0], state_digest=b"o" * 32)
    with pytest.raises(StaleWork):
        world.ready(world.workers[0], anchor_version=1)


def test_after_a_round_most_holders_say_which_state() -> None:
    world = World(run_file(), 3)
    until(world, "averaging", 3)
    until(world, "training", 3)
    assert world.scope.agreed_digest is None
    for worker in world.workers[:3]:
        world.conclude(worker)
        world.beat(worker)
    world.beat(world.workers[0], state_digest=b"o" * 32)
    assert world.scope.agreed_digest == next_state(INITIAL)


# Leases -------------------------------------------------------------------------------------------------


def test_leases_are_disjoint_and_come_back() -> None:
    world = World(run_file(), 2)
    assert world.ask(world.workers[0], 4) == [(0, 4)]
    assert world.ask(world.workers[1], 4) == [(4, 8)]
    world.leave(world.workers[0])
    work(world, 1, 1)
    assert world.ask(world.workers[1], 6) == [(0, 4), (8, 10)]


def test_a_repeated_request_gets_the_same_samples_even_from_a_restarted_coordinator() -> None:
    world = World(run_file(), 1)
    first = world.ask(world.workers[0], 4)
    assert world.repeat_ask(world.workers[0]) == first
    world.restart()
    world.beat(world.workers[0])
    assert world.repeat_ask(world.workers[0]) == first
    assert world.scope.leases.outstanding() == 4
    world.take(world.workers[0], first)
    world.train(world.workers[0])
    assert world.ask(world.workers[0], 4) != first


def test_a_repeated_request_is_answered_after_the_verdict_too() -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    worker = world.workers[0]
    before = world.scope.leasing.answered[worker.peer]
    worker.last_ask = PeerToCoordinatorRequestLease(round=0, samples=6, tokens_done=before.tokens_done)
    answer = [(one.start, one.stop) for one in before.ranges]
    assert world.repeat_ask(worker) == answer
    until(world, "averaging")
    until(world, "training")
    world.restart()
    expected = answer if world.scope.leases.holds(worker.peer, answer) else []
    assert world.repeat_ask(worker) == expected


def test_a_loop_that_fetches_ahead_gets_other_samples_each_time() -> None:
    """It asks again before it has trained; what it has says that the answer before was not lost."""
    world = World(run_file(), 1)
    worker = world.workers[0]
    first = world.ask(worker, 4)
    assert worker.last_ask is not None
    undone = to_wire(first)
    worker.last_ask = worker.last_ask.model_copy(update={"undone": undone})
    second = world.repeat_ask(worker)
    assert not overlap(first, second)
    assert world.repeat_ask(worker) == second, "a repeated request"
    world.restart()
    world.beat(worker)
    assert world.repeat_ask(worker) == second
    assert world.scope.leases.outstanding() == 8
    both = to_wire(merge([*first, *second]))
    worker.last_ask = worker.last_ask.model_copy(update={"undone": both})
    assert not overlap(world.repeat_ask(worker), merge([*first, *second]))


def test_samples_that_a_peer_does_not_hold_are_no_reason_for_another_answer() -> None:
    world = World(run_file(), 2)
    one, other = world.workers[:2]
    mine, theirs = world.ask(one, 4), world.ask(other, 4)
    held = dict(world.scope.leases.held)
    for claimed in (to_wire(theirs), to_wire([(10**6, 10**6 + 4)]), to_wire([*theirs, *theirs])):
        assert one.last_ask is not None
        one.last_ask = one.last_ask.model_copy(update={"undone": claimed})
        assert world.repeat_ask(one) == mine
    assert world.scope.leases.held == held


def test_a_new_process_does_not_get_the_answer_of_the_one_before() -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    worker = world.workers[1]
    while worker.left:  # or some of it would go back at once
        world.train(worker)
    averaging(world)
    before = world.scope.leasing.answered[worker.peer]
    world.join(worker)
    assert world.scope.leases.holds(worker.peer, [(one.start, one.stop) for one in before.ranges])
    worker.last_ask = PeerToCoordinatorRequestLease(round=0, samples=6, tokens_done=before.tokens_done)
    assert world.repeat_ask(worker) == []


def test_no_leases_without_state_model_or_round() -> None:
    world = World(run_file())
    ask = PeerToCoordinatorRequestLease(round=0, samples=4, tokens_done=0)
    world.scope.admission.join(entry(0, 1), CPU, world.now_s)
    assert world.scope.leasing.request(peer_name(0), ask, world.now_s) == []
    world.scope.heartbeat(peer_name(0), heartbeat(), world.now_s)
    assert world.scope.leasing.request(peer_name(0), ask, world.now_s) == []
    world.scope.describe_model(peer_name(0), MODEL)
    late = ask.model_copy(update={"round": 1})
    assert world.scope.leasing.request(peer_name(0), late, world.now_s) == []
    assert world.scope.leasing.request(peer_name(0), ask, world.now_s) == [(0, 4)]


def test_nobody_hoards_the_sequence() -> None:
    world = World(run_file(), 1)
    for tokens_done in range(5):
        world.workers[0].last_ask = PeerToCoordinatorRequestLease(round=0, samples=2**31, tokens_done=tokens_done)
        world.repeat_ask(world.workers[0])
    assert world.scope.leases.outstanding() == 64 * 20


def test_guided_sizes_of_an_exact_round() -> None:
    world = World(run_file("virtual_batch", tokens=1000), 2)
    sizes = []
    while True:
        worker = world.workers[len(sizes) % 2]
        ranges = world.ask(worker, 1000)
        if not ranges:
            break
        world.take(worker, ranges)
        sizes.append(sum(stop - start for start, stop in ranges))
        world.train(worker, 1)
    assert sizes[:4] == [25, 19, 14, 11]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 100
    assert min(sizes[:-1]) == 2, "batches, but for the last"


def test_boasting_does_not_close_the_round() -> None:
    world = World(run_file(), 2)
    world.beat(world.workers[0], tokens_done=2**62, tokens_per_s=1e18)
    world.beat(world.workers[1], tokens_done=2**62, tokens_per_s=1e18)
    world.tick(0.25)
    assert world.scope.round.phase == "training"
    assert world.view(world.workers[0]).tokens_in_round == 0


def test_a_view_counts_what_is_credible() -> None:
    world = World(run_file(), 2)
    work(world, 0, 4)
    world.beat(world.workers[1], tokens_done=2**62)
    view, status = world.view(world.workers[0]), world.scope.status(world.now_s)
    assert view.tokens_in_round == status.tokens_in_round == 4 * TOKENS_PER_SAMPLE


def test_work_of_an_earlier_round_may_be_committed_already() -> None:
    world = World(run_file(), 1)
    work(world, 0, 4)
    world.beat(world.workers[0])
    assert world.view(world.workers[0]).tokens_in_round == 40
    world.beat(world.workers[0], round=5)
    assert world.view(world.workers[0]).tokens_in_round == 0


# Ready --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "error"),
    [
        ({"weight_tokens": 1}, WireError),
        ({"ranges": (SampleRange(start=900, stop=901),), "weight_tokens": 10}, StaleWork),
        ({"ranges": (SampleRange(start=5, stop=5),), "weight_tokens": 0}, WireError),
        ({"ranges": (SampleRange(start=9, stop=5),), "weight_tokens": 0}, WireError),
    ],
)
def test_unfit_contributions(claims: dict[str, Any], error: type[Exception]) -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    with pytest.raises(error):
        world.ready(world.workers[0], **claims)
    assert world.workers[0].peer not in world.scope.round.ready


def test_a_sample_counts_once_in_a_contribution() -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    done = tuple(SampleRange(start=start, stop=stop) for start, stop in world.workers[0].done)
    with pytest.raises(WireError, match="overlap"):
        world.ready(world.workers[0], ranges=done * 2, weight_tokens=2 * world.workers[0].tokens_done)


def test_ready_counts_only_while_the_round_closes() -> None:
    world = World(run_file(), 2)
    work(world, 0, 4)
    world.ready(world.workers[0])
    assert world.scope.round.ready == {}, "it may train on before the round closes"
    world.ready(world.workers[0], round=5)
    assert world.scope.round.ready == {}


def test_who_joins_while_closing_takes_part_in_time() -> None:
    world = World(run_file(), 1)
    until(world, "closing", 1)
    world.join(world.workers[1])
    world.sync(world.workers[1])
    assert world.scope.round.closes_s > world.now_s
    work(world, 1, 4)
    world.ready(world.workers[1])
    assert world.ask(world.workers[1], 4) == [], "it has said that it is done"
    plan = averaging(world, 1)
    assert [one.weight_tokens for one in plan.members if one.peer == peer_name(1)] == [4 * TOKENS_PER_SAMPLE]


def test_who_joins_after_the_closing_is_not_waited_for() -> None:
    world = World(run_file(), 1)
    until(world, "closing", 1)
    world.join(world.workers[1])
    world.sync(world.workers[1])
    while world.now_s < world.scope.round.closes_s:
        world.beat(world.workers[0])
        world.tick(0.25)
    assert world.scope.round.phase == "closing"
    assert world.ask(world.workers[1], 4) == []
    plan = averaging(world, 1)
    assert [one.peer for one in plan.members] == [peer_name(0)]


def test_who_is_silent_at_the_closing_is_waited_for_and_then_left_out() -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    while world.scope.round.phase == "closing":
        assert world.now_s < world.scope.round.closes_s + world.scope.deadlines.ready_s + 0.5
        world.behave(world.workers[0])
        world.beat(world.workers[1])
        world.tick(0.25)
    plan = world.scope.round.plan
    assert plan is not None
    assert [one.peer for one in plan.members] == [peer_name(0)]
    assert world.now_s >= world.scope.round.closes_s + world.scope.deadlines.ready_s


def test_where_all_have_been_prompt_a_straggler_is_not_waited_for_long() -> None:
    world = World(run_file(), 3)
    while len(world.verdicts) < 4:
        averaging(world, 3)
        for worker in world.workers[:3]:
            world.report(worker)
    until(world, "closing", 3)
    closes_s, ready_s = world.scope.round.closes_s, world.scope.deadlines.ready_s
    while world.scope.round.phase == "closing":
        for worker in world.workers[:2]:
            world.behave(worker)
        world.beat(world.workers[2])
        world.tick(0.25)
    plan = world.scope.round.plan
    assert plan is not None
    assert [one.peer for one in plan.members] == [peer_name(0), peer_name(1)]
    assert ready_s / 3 <= world.now_s - closes_s < 2 * ready_s / 3


def test_a_round_without_any_work_is_aborted() -> None:
    world = World(run_file(max_s=5.0), 1)
    while not world.verdicts:
        world.beat(world.workers[0], tokens_per_s=0.0)
        if world.scope.round.phase == "closing":
            world.ready(world.workers[0])
        world.tick(0.25)
    assert world.verdicts[0].verdict.reason == "nobody had anything to contribute"
    assert world.scope.round.phase == "training"


def test_all_members_gone_while_closing() -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    for worker in world.workers[:2]:
        world.leave(worker)
    assert world.scope.round.phase == "waiting"
    assert world.scope.leases.held == {}
    until(world, "averaging", 1)


# Averaging ----------------------------------------------------------------------------------------------


def test_the_dead_come_back_with_nothing_but_their_samples_stay_committed() -> None:
    world = World(run_file(), 2)
    plan = averaging(world)
    tokens = sum(one.weight_tokens for one in plan.members)
    world.leave(world.workers[1])
    world.join(world.workers[1])
    world.report(world.workers[1])
    assert world.scope.round.reports == {}, "its new process has no part in the exchange"
    world.report(world.workers[0])
    assert world.verdicts[0].verdict.tokens == tokens
    assert world.verdicts[0].lost == ()


def test_the_dead_whose_chunks_are_missing_lose_their_samples() -> None:
    world = World(run_file(), 2)
    plan = averaging(world)
    world.leave(world.workers[1])
    world.report(world.workers[0], dropped=(1,))
    assert world.verdicts[0].lost == (peer_name(1),)
    assert world.verdicts[0].verdict.tokens == plan.members[0].weight_tokens
    assert world.scope.leases.pool != []
    assert peer_name(1) not in world.scope.leases.held


def test_a_living_member_that_was_dropped_keeps_its_samples() -> None:
    world = World(run_file(), 2)
    plan = averaging(world)
    world.report(world.workers[0], dropped=(1,))
    world.report(world.workers[1])
    assert world.verdicts[0].lost == ()
    assert world.verdicts[0].verdict.tokens == sum(one.weight_tokens for one in plan.members)


def test_an_owner_that_does_not_deliver_owns_nothing_next_time() -> None:
    world = World(run_file(), 3)
    plan = averaging(world, 3)
    owned = [index for index, part in enumerate(plan.parts) if part.owner == 2]
    for worker in world.workers[:2]:
        world.report(worker, missing=tuple(owned))
    world.report(world.workers[2])
    verdict = world.verdicts[0].verdict
    assert [digest is None for digest in verdict.digests] == [part.owner == 2 for part in plan.parts]
    again = averaging(world, 3)
    assert {part.owner for part in again.parts} == {0, 1}
    world.restart()
    until(world, "training", 3)
    for _ in range(3):
        assert not world.scope.membership.members[peer_name(2)].can_own
        averaging(world, 3)
        until(world, "training", 3)
    assert {part.owner for part in averaging(world, 3).parts} == {0, 1, 2}, "after four committed rounds"


def test_a_failed_owner_that_joins_again_owns_nothing_either() -> None:
    world = World(run_file(), 2)
    world.scope.membership.members[peer_name(1)].fail()
    world.join(world.workers[1])
    assert not world.scope.membership.members[peer_name(1)].can_own


def test_one_member_that_reports_other_bytes_takes_no_others_parts_away() -> None:
    world = World(run_file(), 5)
    plan = averaging(world, 5)
    for worker in world.workers[:4]:
        world.report(worker)
    world.report(world.workers[4], wrong=tuple(range(len(plan.parts))))
    assert world.verdicts[0].verdict.committed
    can_own = [world.scope.membership.members[one.peer].can_own for one in world.workers[:5]]
    assert can_own == [True] * 4 + [False], "of its own part it alone has those bytes"


def test_a_report_that_is_repeated_holds_off_no_verdict() -> None:
    world = World(run_file(), 4)
    plan, began_s = averaging(world, 4), world.now_s
    for worker in world.workers[:2]:
        world.report(worker)
    while not world.verdicts:
        assert world.now_s < began_s + 20 * world.run.round.patience_s
        for worker in world.workers[:4]:
            world.beat(worker)
        world.scope.report(world.workers[2].peer, report(plan), world.now_s)
        world.tick(0.25)


def test_a_later_report_takes_the_place_of_the_first() -> None:
    world = World(run_file(), 2)
    averaging(world)
    world.report(world.workers[0], missing=(0,))
    world.report(world.workers[0])
    world.report(world.workers[1])
    assert None not in world.verdicts[0].verdict.digests


@pytest.mark.parametrize("odd", [{"wrong": (0,)}, {"missing": (0,)}, {}], ids=["other", "fewer", "the same"])
def test_what_one_says_against_those_who_hold_the_committed_bytes_loses_no_work(odd: dict[str, Any]) -> None:
    world = World(run_file(), 4)
    averaging(world, 4)
    for worker in world.workers[:2]:
        world.report(worker)
    plan = world.scope.round.plan
    assert plan is not None
    world.scope.report(world.workers[2].peer, report(plan, dropped=(3,), **odd), world.now_s)
    world.leave(world.workers[3])
    assert world.verdicts[0].verdict.committed
    assert world.verdicts[0].lost == ()


def test_where_nobody_holds_all_committed_bytes_everybody_is_believed() -> None:
    world = World(run_file(), 4)
    plan = averaging(world, 4)
    assert len(plan.parts) >= 3
    for number in range(3):
        dropped = (3,) if number == 0 else ()
        world.scope.report(world.workers[number].peer, report(plan, missing=(number,), dropped=dropped), world.now_s)
    world.leave(world.workers[3])
    assert None not in world.verdicts[0].verdict.digests
    assert world.verdicts[0].lost == (peer_name(3),)


@pytest.mark.parametrize(
    "fields",
    [{"digests": (None,)}, {"dropped": (2,)}],
)
def test_reports_that_do_not_fit(fields: dict[str, Any]) -> None:
    world = World(run_file(), 2)
    plan = averaging(world)
    with pytest.raises(WireError, match="does not fit"):
        world.scope.report(peer_name(0), report(plan).model_copy(update=fields), world.now_s)


def test_reports_of_other_rounds_and_strangers_are_ignored() -> None:
    world = World(run_file(), 2)
    plan = averaging(world)
    world.join(world.workers[2])
    world.scope.report(peer_name(2), report(plan), world.now_s)
    world.scope.report(peer_name(0), report(plan).model_copy(update={"round": 9}), world.now_s)
    assert world.scope.round.reports == {}


@pytest.mark.parametrize("reported", [1, 2])
def test_endless_progress_does_not_put_off_the_verdict_for_ever(reported: int) -> None:
    world = World(run_file(), 3)
    averaging(world, 3)
    for worker in world.workers[:reported]:
        world.report(worker)
    began_s, moved = world.now_s, 0
    while not world.verdicts:
        moved += 1
        for worker in world.workers[:3]:
            world.beat(worker, chunks_moved=moved)
        world.tick(0.5)
        assert world.now_s < began_s + 60
    assert world.verdicts[0].verdict.committed == (reported == 2)
    if reported == 2:
        assert world.now_s < began_s + world.scope.deadlines.ready_s + 1


def test_progress_puts_off_the_verdict() -> None:
    world = World(run_file(), 2)
    averaging(world)
    for moved in range(1, 5):
        for _ in range(22):
            for worker in world.workers[:2]:
                world.beat(worker, chunks_moved=moved)
            world.tick(0.5)
    assert world.verdicts == []


# Exact rounds -------------------------------------------------------------------------------------------


def test_exactly_the_goal_round_after_round() -> None:
    world = World(run_file("virtual_batch", tokens=130), 3)
    while len(world.verdicts) < 4:
        until(world, "averaging", 3)
        until(world, "training", 3)
    assert [one.verdict.tokens for one in world.verdicts] == [130] * 4


def test_lost_samples_reopen_the_round() -> None:
    world = World(run_file("virtual_batch"), 3)
    until(world, "closing", 3)
    world.leave(world.workers[2])
    until(world, "averaging", 2)
    assert [event.round for event in world.events if isinstance(event, ev.RoundReopened)] == [0]
    plan = world.scope.round.plan
    assert plan is not None
    assert sum(one.weight_tokens for one in plan.members) == world.run.round.tokens


def test_a_member_that_keeps_samples_and_does_not_answer_loses_them() -> None:
    world = World(run_file("virtual_batch"), 2)
    hoarder = world.workers[1]
    for tokens_done in range(40):
        hoarder.last_ask = PeerToCoordinatorRequestLease(round=0, samples=100, tokens_done=tokens_done)
        world.repeat_ask(hoarder)
    assert world.scope.leases.outstanding() == 20
    began_s = world.now_s
    while not (world.verdicts and world.verdicts[-1].verdict.tokens == 200):
        assert world.now_s < began_s + 80
        world.behave(world.workers[0])
        if world.admitted(hoarder):
            world.beat(hoarder, tokens_done=200)
        world.tick(0.25)
    assert (hoarder.peer, "kept samples from the others") in lost(world)


def test_what_is_there_at_the_limit_is_averaged() -> None:
    world = World(run_file("virtual_batch", tokens=10_000, max_s=10.0), 2)
    began_s = world.now_s
    averaging(world)
    assert began_s + 10 <= world.now_s < began_s + 11
    assert lost(world) == []


# The end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"run_rounds": 2}, {"run_tokens": 300}])
def test_a_run_ends(limit: dict[str, int]) -> None:
    world = World(run_file("virtual_batch", **limit), 2)
    until(world, "ended")
    assert len(world.verdicts) == 2
    with pytest.raises(RunEnded, match="`shoal export`"):
        world.scope.admission.join(entry(5, 5), CPU, world.now_s)
    world.scope.admission.join(entry(6, 5, "observer"), CPU, world.now_s)
    world.restart()
    assert world.scope.round.phase == "ended"
    assert world.ask(world.workers[0], 4) == []
    world.ready(world.workers[0])
    world.pass_time(20)
    assert len(world.verdicts) == 2


def test_the_last_round_closes_with_the_run() -> None:
    world = World(run_file(tokens=10**6, run_max_s=30.0), 2)
    began_s = world.now_s
    until(world, "ended")
    assert began_s + 30 <= world.now_s < began_s + 34
    assert [one.verdict.committed for one in world.verdicts] == [True, True]


@pytest.mark.parametrize("members", ["nobody", "unsynced", "hung"])
def test_a_runs_time_is_over_whoever_is_there(members: str) -> None:
    world = World(run_file(run_max_s=10.0), 0 if members == "nobody" else 1)
    began_s = world.now_s
    while world.scope.round.phase != "ended":
        assert world.now_s < began_s + 20
        if members != "nobody":
            world.beat(world.workers[0], anchor_version=None if members == "unsynced" else 0)
        world.tick(0.25)
    assert world.now_s >= began_s + 10


def test_the_time_that_the_coordinator_is_away_does_not_count() -> None:
    world = World(run_file("virtual_batch", run_max_s=1000.0), 2)
    until(world, "averaging")
    until(world, "training")
    elapsed_s = world.verdicts[-1].elapsed_s
    assert elapsed_s > 0
    world.now_s += 5000
    world.restart()
    assert world.scope.elapsed_s(world.now_s) == elapsed_s


# Silence and restarts -----------------------------------------------------------------------------------


def test_the_silent_are_lost() -> None:
    world = World(run_file(), 2)
    work(world, 1, 4)
    for _ in range(14):
        world.beat(world.workers[0])
        world.tick(0.25)
    assert lost(world) == [(peer_name(1), "silent")]
    assert world.scope.leases.pool == [(0, 4)]


def test_nobody_is_late_because_the_coordinator_stood_still() -> None:
    world = World(run_file(), 2)
    until(world, "closing")
    closes_s = world.scope.round.closes_s
    world.tick(100.0)
    assert lost(world) == []
    assert world.scope.round.closes_s == closes_s + 100.0
    plan = averaging(world)
    assert len(plan.members) == 2
    world.tick(100.0)
    assert world.verdicts == []


@pytest.mark.parametrize("phase", ["training", "closing", "averaging"])
@pytest.mark.parametrize("algorithm", ["diloco", "virtual_batch"])
def test_a_restart_in_each_phase(algorithm: str, phase: str) -> None:
    world = World(run_file(algorithm), 2)
    until(world, phase)
    if phase == "training":
        work(world, 0, 4)
    version = world.scope.membership.roster_version
    world.now_s += 1000
    world.restart()
    assert world.scope.membership.roster_version > version
    assert world.scope.round.opened_s == world.now_s, "it was not open while nobody could train for it"
    until(world, "averaging")
    until(world, "training")
    assert world.verdicts[0].verdict.committed
    assert len(world.verdicts[0].verdict.plan.members if world.verdicts[0].verdict.plan else ()) == 2
    assert lost(world) == []


def test_a_reopened_round_keeps_its_limit() -> None:
    world = World(run_file("virtual_batch"), 3)
    until(world, "closing", 3)
    opened_s = world.scope.round.opened_s
    world.leave(world.workers[2])
    while not any(isinstance(event, ev.RoundReopened) for event in world.events):
        world.behave(world.workers[0])
        world.behave(world.workers[1])
        world.tick(0.25)
    assert world.scope.round.opened_s == opened_s


# Views --------------------------------------------------------------------------------------------------


def test_what_a_view_says() -> None:
    world = World(run_file(), 2)
    view = world.view(world.workers[0])
    assert (view.epoch, view.round, view.anchor_version, view.phase) == (world.machine.log.epoch, 0, 0, "training")
    assert (view.members, view.plan, view.verdict, view.closes_in_s) == (2, None, None, None)
    assert view.state_digest == INITIAL
    assert [one.peer for one in view.roster or ()] == [peer_name(0), peer_name(1)]
    again = world.scope.view(peer_name(0), world.now_s, view.roster_version)
    assert again.roster is None
    assert again.sequence == view.sequence
    until(world, "closing")
    closing = world.view(world.workers[0])
    assert closing.sequence > view.sequence
    assert closing.closes_in_s is not None
    assert closing.closes_in_s == max(0.0, world.scope.round.closes_s - world.now_s)
    plan = averaging(world)
    assert world.view(world.workers[0]).plan == plan
    assert world.view(world.workers[0]).closes_in_s is None
    until(world, "training")
    after = world.view(world.workers[0])
    assert after.verdict == world.verdicts[-1].verdict
    assert after.plan is None
    assert after.tokens_committed == world.verdicts[-1].verdict.tokens


def test_what_the_status_says() -> None:
    world = World(run_file("virtual_batch"), 3)
    until(world, "averaging", 3)
    until(world, "training", 3)
    world.leave(world.workers[2])
    status = world.scope.status(world.now_s)
    assert (status.run, status.run_hash, status.round) == ("test", world.run.hash, 1)
    assert (status.rounds_committed, status.rounds_aborted, status.anchor_version) == (1, 0, 1)
    assert (status.tokens_committed, status.loss, status.chain) == (200, 2.5, world.scope.chain)
    assert [one.alive for one in status.members] == [True, True, False]
    assert status.members[2].activity == "gone"
    assert sum(one.tokens_committed for one in status.members) == 200
    assert sum(one.share for one in status.members) == pytest.approx(1.0)
    assert status.elapsed_s == world.scope.elapsed_s(world.now_s)


def test_the_status_says_how_far_the_run_is_and_how_fast_over_wall_time() -> None:
    world = World(run_file("virtual_batch", run_rounds=4), 2)
    assert world.scope.status(world.now_s).progress.tokens_per_s == 0.0
    for _ in range(3):
        until(world, "averaging")
        until(world, "training")
    status = world.scope.status(world.now_s)
    took_s = world.verdicts[-1].verdict.ended_s - world.verdicts[-2].verdict.ended_s
    assert status.progress.share == 0.75
    assert status.progress.tokens_per_s == pytest.approx(world.verdicts[-1].verdict.tokens / took_s, rel=0.3)
    assert status.progress.left_s == pytest.approx(status.round_tokens / status.progress.tokens_per_s)
    speeds = [one.steady_tokens_per_s for one in status.members]
    assert sum(speeds) == pytest.approx(world.verdicts[-1].verdict.tokens / took_s)


def test_the_status_of_an_ended_run_stands_still() -> None:
    world = World(run_file("virtual_batch", run_rounds=1), 2)
    until(world, "ended")
    before = world.scope.status(world.now_s)
    world.now_s += 500.0
    after = world.scope.status(world.now_s)
    assert after.elapsed_s == before.elapsed_s > 0.0
    assert (after.progress.share, after.progress.left_s, after.progress.tokens_per_s) == (1.0, None, 0.0)


def test_members_are_told_what_the_run_waits_for() -> None:
    world = World(run_file("virtual_batch"), 2)
    until(world, "averaging")
    until(world, "training")
    assert world.view(world.workers[0]).waits_for == ""
    first, second = world.workers[:2]
    for worker in (first, second):
        world.beat(worker, anchor_version=None, state_digest=None)
    assert world.view(first).waits_for == "", "that may pass by itself"
    world.now_s += 2 * world.scope.deadlines.heartbeat_s
    assert "nobody here holds version 1" in world.view(first).waits_for


def test_the_status_says_why_somebody_left_until_it_comes_back() -> None:
    world = World(run_file(), 3)
    until(world, "training", 3)
    stopped, other = world.workers[1], world.workers[2]
    world.scope.admission.leave(stopped.peer, "diverged", world.now_s, "lower the learning rate")
    stopped.running = False
    world.leave(other)

    def told() -> list[tuple[str, str]]:
        members = {one.peer: one for one in world.scope.status(world.now_s).members}
        return [(members[one.peer].left, members[one.peer].trouble) for one in world.workers[:3]]

    expected = [("", ""), ("diverged", "lower the learning rate"), ("done", "")]
    assert told() == expected
    world.revive()
    assert told() == expected
    world.join(stopped)
    assert told() == [("", ""), ("", ""), ("done", "")]


def test_a_status_has_room_for_the_troubles_of_some_only() -> None:
    world = World(run_file(), 0)
    for number in range(70):
        peer = f"peer{chr(ord('a') + number % 26) * 6}{chr(ord('a') + number // 26) * 6}"
        world.scope.admission.join(entry(0, number).model_copy(update={"peer": peer}), CPU, world.now_s)
        world.scope.admission.leave(peer, "failed", world.now_s, "x" * MAX_TROUBLE)
    members = world.scope.status(world.now_s).members
    assert [len(one.trouble) for one in members] == [MAX_TROUBLE] * 64 + [0] * 6
    assert {one.left for one in members} == {"failed"}


def test_roster_versions_go_on_from_the_epoch() -> None:
    world = World(run_file(), 1)
    for _ in range(5):
        world.scope.admission.join(entry(7, world.scope.membership.roster_version, "observer"), CPU, world.now_s)
    version = world.scope.membership.roster_version
    world.revive()
    assert world.scope.membership.roster_version > version
