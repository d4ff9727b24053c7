"""How far one member may move the mean, and what is remembered of it."""

from itertools import pairwise

import pytest
from tests.swarm.coordinator.test_round_scope import averaging, until
from tests.swarm.coordinator.world import CPU, World, claim, entry, run_file

from shoal.swarm.averaging.norm_claims import pack, total_norm
from shoal.swarm.coordinator.influence import (
    REMEMBERED_ROUNDS,
    ROUND_SLACK,
    SLACK,
    factor_of,
    factors_of,
    is_unusual,
    next_rho,
    norm_bound,
    suspects_of,
    usual_loss,
)
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.rollback import CommittedRound
from shoal.swarm.coordinator.trust import (
    CREDIT_ROUNDS,
    earn_credit,
    established,
    uncounted_tokens,
    weighted_median,
)
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.rounds import PlanMember, RoundPlan
from shoal.swarm.protocol.run_file import RunFile

PEER = "peeraaaaaaaaaaaa"


def done(level: float, rho: float, loss: float | None = None) -> CommittedRound:
    return CommittedRound(0, bytes(32), 1, 1.0, (), level, rho, loss)


def rhos(levels: list[float]) -> list[float]:
    past: list[CommittedRound] = []
    for level in levels:
        past.append(done(level, next_rho(past, level)))
    return [one.rho for one in past]


def member(weight: int, norm: float, carried: int = 0, last: int = 0) -> PlanMember:
    norms = pack([norm])
    return PlanMember(peer=PEER, weight_tokens=weight, norms=norms, carried_tokens=carried, last_tokens=last)


def test_the_first_round_sets_what_is_usual() -> None:
    assert rhos([3.0]) == [3.0]
    assert next_rho([], 0.0) == 0.0, "nobody has claimed anything"
    assert next_rho([done(3.0, 3.0)], 0.0) == 3.0, "a round without claims changes nothing"
    assert next_rho([done(0.0, 0.0)], 2.0) == 2.0


def test_a_first_round_that_claims_next_to_nothing_bounds_nobody_for_long() -> None:
    for low in (1e-38, 1e-3):
        assert rhos([low, 1.0, 1.0, 1.0]) == pytest.approx([low, 2 * low, 4 * low, 1.0])
    assert rhos([1e30, 1.0, 1.0, 1.0])[2:] == [1.0, 1.0], "nor does one that claims much free anybody"


def test_a_warm_up_is_followed_at_once_but_no_more_than_twofold_a_round() -> None:
    assert rhos([1.0, 100.0, 100.0]) == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("rounds", [20, 40, 100, 1000])
def test_a_linear_warm_up_bounds_nobody(rounds: int) -> None:
    """From a hundredth of the learning rate, as the schedule has it: norms grow with it."""
    levels = [0.01 + 0.99 * (at + 0.5) / rounds for at in range(rounds)]
    assert all(level <= 2.6 * rho for level, rho in zip(levels, rhos(levels), strict=True))


def test_later_what_is_usual_is_a_median_that_rises_by_a_tenth_at_most() -> None:
    settled = [1.0] * (REMEMBERED_ROUNDS + 5)
    assert rhos([*settled, 1e9, 1e9])[-2:] == [1.0, 1.0], "some rounds do not move a median"
    risen = rhos([*settled, *[100.0] * 40])
    assert all(after <= 1.1 * before * (1 + 1e-12) for before, after in pairwise(risen[REMEMBERED_ROUNDS:]))
    assert risen[-1] > 2.0
    assert rhos([*settled, *[0.1] * 40])[-1] == pytest.approx(0.1), "it falls as it falls"


def test_a_heavy_contribution_may_be_longer_but_less_than_in_proportion() -> None:
    light, heavy = norm_bound(member(100, 0), 1.0, 0.6), norm_bound(member(2000, 0), 1.0, 0.6)
    assert 20**0.5 < heavy / light < 20
    assert light == pytest.approx(SLACK * 100**0.6)
    assert norm_bound(member(100, 0), 0.0, 0.6) == float("inf")


def test_a_factor_makes_a_contribution_as_long_as_it_may_be() -> None:
    one = member(100, 1e30)
    assert total_norm(one.norms) * factor_of(one, 2.0, 0.6) == pytest.approx(norm_bound(one, 2.0, 0.6))
    assert is_unusual(one, 2.0, 0.6)
    assert factor_of(member(100, SLACK * 2 * 100**0.6 * 0.99), 2.0, 0.6) == 1.0


def test_what_was_left_out_before_comes_on_top_and_no_more_than_once() -> None:
    plain = norm_bound(member(100, 0), 1.0, 0.6)
    assert norm_bound(member(100, 0, carried=50), 1.0, 0.6) == pytest.approx(1.5 * plain)
    assert norm_bound(member(100, 0, carried=10**9), 1.0, 0.6) == pytest.approx(2 * plain)


@pytest.mark.parametrize("power", [0.6, -0.25])
def test_whoever_does_less_than_before_moves_the_sum_as_far_as_then_and_no_further(power: float) -> None:
    then = 1000 * norm_bound(member(1000, 0), 1.0, power)
    for weight in (500, 50, 1):
        now = norm_bound(member(weight, 0, last=1000), 1.0, power)
        assert weight * now == pytest.approx(then)
        assert now >= norm_bound(member(weight, 0), 1.0, power)
    for last in (0, 10, 1000):
        assert norm_bound(member(1000, 0, last=last), 1.0, power) == norm_bound(member(1000, 0), 1.0, power)
    rest = then / SLACK / 1000
    assert factor_of(member(50, rest * 1000 / 50, last=1000), 1.0, power) == 1.0, "what the last encoding lost"


def test_the_weight_of_the_last_committed_contribution_is_kept() -> None:
    world = playing(run_file(), (1.0, 1.0))
    plan = plays(world, 1, 2)
    weights = {one.peer: one.last_tokens for one in plan.members}
    assert all(weights.values())
    assert weights == {one.peer: one.weight_tokens for one in world.verdicts[0].verdict.plan.members}  # type: ignore[union-attr]
    until(world, "training", 2)
    weights = {one.peer: one.weight_tokens for one in plan.members}
    world.restart()
    world.join(world.workers[0])
    assert {peer: one.last_tokens for peer, one in world.scope.membership.members.items()} == weights


def test_a_weighted_median_is_not_moved_by_who_weighs_little() -> None:
    assert weighted_median([(1e30, 2), (1.0, 49), (2.0, 49)]) == 2.0
    assert weighted_median([(1e30, 50), (1.0, 50)]) == 1.0
    assert weighted_median([]) == 0.0


@pytest.mark.parametrize(
    ("losses", "loss", "usual"),
    [
        ([3.0, 3.0, 3.0], 31_138.0, 3.0),
        ([3.0, 3.0, 3.0], 5.9, None),
        ([3.0, 3.0, 3.0, 40.0], 30.0, None),  # it falls again
        ([3.0, 3.0], 1e9, None),
        ([-3.0, -3.0, -3.0], 1.0, -3.0),
        ([-3.0, -3.0, -3.0], -1.0, None),
        ([3.0, 3.0, 3.0], None, None),
    ],
)
def test_a_loss_far_above_the_usual_one_is_noticed(
    losses: list[float], loss: float | None, usual: float | None
) -> None:
    assert usual_loss([done(1.0, 1.0, one) for one in losses], loss) == usual


# In a run ---------------------------------------------------------------------------------------------------


def playing(run: RunFile, norms: tuple[float, ...]) -> World:
    world = World(run, len(norms))
    for worker, norm in zip(world.workers, norms, strict=False):
        worker.norm = norm
    return world


def plays(world: World, rounds: int, members: int) -> RoundPlan:
    """So many committed rounds, and the next one's plan."""
    for _ in range(rounds):
        averaging(world, members)
        until(world, "training", members)
    return averaging(world, members)


def test_a_claim_that_does_not_fit_the_model_is_refused() -> None:
    world = World(run_file(), 1)
    until(world, "closing", 1)
    for norms in (claim(1.0)[:-1], claim(1.0)[:-2], claim(1.0) + b"xx"):
        with pytest.raises(WireError, match="one for each range"):
            world.ready(world.workers[0], norms=norms)
    world.ready(world.workers[0], norms=claim(1.0))


def test_the_plan_bounds_who_claims_too_much_and_nobody_else() -> None:
    world = playing(run_file(), (1.0, 1.0, 1.0, 1e30))
    plan = averaging(world, 4)
    assert plan.rho == pytest.approx(1.0 / plan.members[0].weight_tokens ** 0.6, rel=0.5)
    assert [one.factor < 1 for one in plan.members] == [False, False, False, True]
    assert plan.members[0].norms == claim(1.0)
    liar = plan.members[3]
    assert total_norm(liar.norms) * liar.factor <= norm_bound(liar, plan.rho, 0.6) * 1.001
    until(world, "training", 4)
    shown = {one.name: one.unusual for one in world.scope.status(world.now_s).members}
    assert shown == {"name 0": 0, "name 1": 0, "name 2": 0, "name 3": 1}
    assert [bool(world.scope.membership.members[one.peer].credit) for one in world.workers[:4]] == [True] * 3 + [False]
    world.restart()
    assert world.scope.membership.members[world.workers[3].peer].unusual_rounds == 1


def test_a_run_may_do_without_bounds_and_still_knows_who_would_have_been_above() -> None:
    run = run_file()
    run = run.model_copy(update={"averaging": run.averaging.model_copy(update={"robust": "none"})})
    world = playing(run, (1.0, 1.0, 1.0, 1e30))
    plan = averaging(world, 4)
    assert plan.rho > 0
    assert [one.factor for one in plan.members] == [1.0] * 4
    until(world, "training", 4)
    assert world.scope.history.rounds[0].suspects == (world.workers[3].peer,)


@pytest.mark.parametrize("robust", ["clip", "trimmed"])
def test_robust_means_keep_the_bound_and_stand_in_the_plan(robust: str) -> None:
    run = run_file()
    run = run.model_copy(update={"averaging": run.averaging.model_copy(update={"robust": robust})})
    plan = averaging(playing(run, (1.0, 1.0, 1.0, 1e30)), 4)
    assert plan.mean == robust
    assert sum(one.factor < 1e-20 for one in plan.members) == 1
    for one in plan.members:
        usual = norm_bound(one, 1.0, 0.6) / SLACK if robust == "clip" else 1.0
        assert one.usual_norm == pytest.approx(usual)


def test_newcomers_set_nothing_where_others_have_a_record() -> None:
    world = playing(run_file(), (1.0, 1.0))
    plays(world, CREDIT_ROUNDS, 2)
    until(world, "training")
    before = world.scope.history.rounds[-1].rho
    for worker in world.workers[2:6]:
        worker.norm = 1e6
        world.join(worker)
        world.sync(worker)
    plan = plays(world, 1, 6)
    newcomers = {worker.peer for worker in world.workers[2:6]} & {one.peer for one in plan.members}
    assert newcomers, "as many as a fifth of the round's samples is enough for"
    assert len(plan.members) == 2 + len(newcomers)
    assert plan.rho <= 10 * before, "theirs is a millionfold; a round of less work moves it somewhat"
    assert {one.peer for one in plan.members if one.factor < 1} == newcomers
    assert set(suspects_of(plan, world.scope.membership.members, 0.6)) == newcomers


def test_what_a_round_left_out_raises_the_next_bound() -> None:
    world = playing(run_file(), (1.0, 1.0, 1.0))
    plan = averaging(world, 3)
    for worker in world.workers[:3]:
        world.report(worker, dropped=(2,))
    members = world.scope.membership.members
    carried = [members[worker.peer].carried_tokens for worker in world.workers[:3]]
    assert carried == [0, 0, plan.members[2].weight_tokens]
    assert [members[worker.peer].credit > 0 for worker in world.workers[:3]] == [True, True, False]
    for worker in world.workers[:3]:
        world.conclude(worker)
    world.restart()
    plan = averaging(world, 3)
    assert [one.carried_tokens > 0 for one in plan.members] == [False, False, True]
    until(world, "training", 3)
    assert members is not world.scope.membership.members
    assert [one.carried_tokens for one in world.scope.membership.members.values()] == [0, 0, 0]


def test_what_is_usual_survives_a_restart_and_a_compaction() -> None:
    world = playing(run_file(), (1.0, 2.0, 3.0))
    plays(world, 3, 3)
    until(world, "training", 3)
    before = [(one.level, one.rho, one.loss, one.suspects) for one in world.scope.history.rounds]
    assert all(level > 0 and rho > 0 and loss == 2.5 for level, rho, loss, _ in before)
    world.restart()
    assert [(one.level, one.rho, one.loss, one.suspects) for one in world.scope.history.rounds] == before


# Members that are not established ---------------------------------------------------------------------------


def test_members_that_come_after_the_first_rounds_weigh_a_fifth_together_until_they_are_established() -> None:
    world = playing(run_file(), (1.0, 1.0))
    first = plays(world, 1, 2)
    assert [one.uncounted for one in first.members] == [0, 0], "where a run begins nobody is cut"
    until(world, "training", 2)
    for worker in world.workers[2:6]:
        worker.norm = 1.0
        world.join(worker)
        world.sync(worker)
    plan = averaging(world, 6)
    weight = {one.peer: one.weight for one in plan.members}
    others = sum(weight[worker.peer] for worker in world.workers[2:6])
    assert 0 < others <= 0.2 * sum(weight.values()) < sum(one.weight_tokens for one in plan.members)
    assert all(weight[worker.peer] for worker in world.workers[2:6]), "each has some"
    until(world, "training", 6)
    assert [one.uncounted for one in averaging(world, 6).members] == [0] * 6, "they have brought work by now"


def test_bad_scores_make_nobody_established_before_there_is_credit() -> None:
    members = {name: Member(entry(0), CPU, 0.0) for name in ("good", "liar", "new")}
    tokens = dict.fromkeys(members, 100)
    assert not established(members, tokens)
    assert not uncounted_tokens(members, tokens)
    earn_credit(members, {"good": 100, "liar": 100}, 200)
    assert set(established(members, tokens)) == {"good", "liar"}
    members["liar"].work = members["liar"].work.model_copy(update={"bad": 1})
    assert established(members, tokens) == {"good": 100}
    uncounted = uncounted_tokens(members, tokens)
    assert [100 - uncounted.get(name, 0) for name in members] == [100, 12, 12]
    uncounted = uncounted_tokens(members, tokens, {"liar"})
    assert [100 - uncounted.get(name, 0) for name in members] == [100, 1, 25], "what is no use has no share in it"
    many = {"good": 100, **{f"sybil {one}": 100 for one in range(40)}}
    members |= {name: Member(entry(0), CPU, 0.0) for name in many if name not in members}
    cut = uncounted_tokens(members, many)
    assert {many[name] - cut[name] for name in many if name != "good"} == {1}, "each has a token, whatever the share"
    earn_credit(members, {"good": 100, "liar": 100}, 200)
    earned = dict.fromkeys(("good", "liar"), 100)
    for _ in range(CREDIT_ROUNDS):
        earn_credit(members, earned, 200)
    assert set(established(members, tokens)) == {"good", "liar"}, "with credit one bad score changes nothing"


def test_the_bound_of_a_round_is_narrower_and_gradients_have_none() -> None:
    planned = [member(100, norm) for norm in (1, 1, 1.4, 3)]
    rho = level = 1.0 / 100**0.6
    assert factors_of(planned, rho, level, 0.6) == pytest.approx([1, 1, 1, ROUND_SLACK / 3], rel=0.01)
    assert factors_of(planned, rho / 4, level, 0.6)[:2] == [1, 1]
    assert factors_of(planned, rho / 8, level, 0.6)[:2] == pytest.approx([0.5, 0.5], rel=0.01), "nor what went before"
    assert factors_of(planned[2:], rho, level, 0.6) == [1.0, 1.0], "two do not make anything usual"
    assert factors_of(planned, 100**0.25, 100**0.25, -0.25) == [1.0] * 4


def test_a_short_round_after_a_long_one_is_no_empty_work() -> None:
    assert not is_unusual(member(20, 20**0.6, last=1000), 1.0, 0.6)
    assert is_unusual(member(20, 20**0.6 / 60, last=1000), 1.0, 0.6)


def test_nobody_is_suspended_for_norms_that_the_run_does_not_limit() -> None:
    run = run_file()
    run = run.model_copy(update={"averaging": run.averaging.model_copy(update={"robust": "none"})})
    world = playing(run, (1.0, 1.0, 1.0, 1e6))
    plays(world, CREDIT_ROUNDS + 2, 4)
    assert world.scope.membership.members[world.workers[3].peer].unusual_rounds > CREDIT_ROUNDS
    assert not world.scope.is_suspended(world.workers[3].peer)


@pytest.mark.parametrize("norm", [1e6, 1e-6])
def test_who_claims_what_is_no_use_in_every_round_is_suspended_once_others_have_credit(norm: float) -> None:
    world = playing(run_file(), (1.0, 1.0, 1.0, norm))
    useless = world.workers[3].peer
    plan = plays(world, CREDIT_ROUNDS - 2, 4)
    assert [one.weight == 1 for one in plan.members] == [False, False, False, True]
    assert not world.scope.is_suspended(useless), "nobody has credit, so most may be liars"
    until(world, "training", 4)
    plays(world, 2, 4)
    until(world, "training", 3)
    assert world.scope.is_suspended(useless)
    assert not any(world.scope.is_suspended(worker.peer) for worker in world.workers[:3])
    assert useless not in {one.peer for one in averaging(world, 3).members}
    world.restart()
    assert world.scope.is_suspended(useless)
