"""Tests of bandwidth: estimates from the reports of rounds."""

import pytest
from tests.swarm.coordinator import world as worlds
from tests.swarm.coordinator.test_round_rules import PLAN, some_plan
from tests.swarm.coordinator.world import MODEL, World, peer_name, report, run_file

from shoal.swarm.averaging.traffic import Traffic
from shoal.swarm.coordinator.bandwidth import Bandwidths, sent_at_least
from shoal.swarm.coordinator.round_plan import PlanRules, lay_out
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import PlanMember, RoundPlan
from shoal.swarm.protocol.run_file import make_format_map
from shoal.swarm.protocol.types import Delivery


def cut(plan: RoundPlan, *chunks: int) -> RoundPlan:
    """With parts of so many chunks: of the first members, in their order."""
    parts = [
        one.model_copy(update={"start": 4096 * sum(chunks[:at]), "stop": 4096 * sum(chunks[: at + 1])})
        for at, one in enumerate(plan.parts[: len(chunks)])
    ]
    return RoundPlan.model_validate(plan.model_dump() | {"chunk_elements": 4096, "parts": tuple(parts)})


FIVE, THREE = cut(some_plan(dict.fromkeys(range(5), 10)), 1, 1, 1, 1, 1), cut(PLAN, 1, 1, 1)
A, B, C, D, E = (peer_name(number) for number in range(5))
CLAIMS = dict.fromkeys([A, B, C, D, E], 1e9)


def said(plan: RoundPlan, rates: dict[int, dict[int, float]]) -> dict[str, PeerToCoordinatorRoundReport]:
    """The reports of a round: ``rates[witness][member]``."""
    return {
        plan.members[witness].peer: report(plan).model_copy(
            update={"deliveries": tuple(Delivery(member=member, bps=bps) for member, bps in seen.items())}
        )
        for witness, seen in rates.items()
    }


def everybody(plan: RoundPlan, links_bps: dict[int, float]) -> dict[str, PeerToCoordinatorRoundReport]:
    """All see each other as they are: each link serves all at once, and is done with all at one moment."""
    traffic, members = Traffic(plan), range(len(plan.members))
    shares = {one: traffic.shares(one) for one in members}
    return said(plan, {to: {one: links_bps[one] * shares[one][to] for one in members if one != to} for to in members})


def test_every_member_of_the_plan_owns_here() -> None:
    assert sorted({part.owner for part in FIVE.parts}) == list(range(5))
    assert sorted({part.owner for part in THREE.parts}) == [0, 1, 2]


def test_who_owns_little_and_has_little_to_send_to_some_is_no_slower_for_it() -> None:
    """Or whoever is once taken to be slow would be for good: it serves all owners alike, who serve it with less."""
    plan = cut(FIVE, 4, 4, 4, 1)
    bandwidths = Bandwidths()
    bandwidths.learn(plan, everybody(plan, dict.fromkeys(range(5), 1e8)))
    assert bandwidths.believed(dict.fromkeys([A, B, C, D, E], 0.0)) == pytest.approx(
        dict.fromkeys([A, B, C, D, E], 1e8)
    )


def test_a_liar_gets_what_it_delivered() -> None:
    bandwidths = Bandwidths()
    bandwidths.learn(FIVE, everybody(FIVE, {0: 1e8, 1: 1e8, 2: 1e8, 3: 1e8, 4: 2e7}))
    claims = dict.fromkeys([A, B, C, D], 1e8) | {E: 1e10}
    assert bandwidths.believed(claims) == pytest.approx(dict.fromkeys([A, B, C, D], 1e8) | {E: 2e7})


def test_a_member_may_claim_less() -> None:
    bandwidths = Bandwidths()
    bandwidths.learn(FIVE, everybody(FIVE, dict.fromkeys(range(5), 1e8)))
    assert bandwidths.believed({A: 1.0, B: 1e9, C: 0.0}) == pytest.approx({A: 1.0, B: 1e8, C: 1e8})


def test_one_of_two_witnesses_is_not_believed_alone_where_nothing_is_claimed() -> None:
    bandwidths = Bandwidths()
    for _ in range(3):
        bandwidths.learn(THREE, said(THREE, {0: {1: 50.0, 2: 1e9}, 1: {0: 50.0, 2: 50.0}, 2: {0: 50.0, 1: 50.0}}))
    assert bandwidths.believed({A: 100.0, B: 100.0, C: 0.0}) == dict.fromkeys([A, B, C], 100.0)
    assert bandwidths.believed({A: 100.0, B: 100.0, C: 150.0})[C] == 150.0, "the slower witness may be slow itself"


def test_a_link_that_has_become_slow_is_found_out_within_two_rounds_and_one_odd_round_changes_nothing() -> None:
    bandwidths = Bandwidths()
    usual, slow = dict.fromkeys(range(5), 1e8), dict.fromkeys(range(4), 1e8) | {4: 1e7}
    for _ in range(5):
        bandwidths.learn(FIVE, everybody(FIVE, usual))
    bandwidths.learn(FIVE, everybody(FIVE, slow))
    assert bandwidths.believed(CLAIMS)[E] == pytest.approx(1e8)
    bandwidths.learn(FIVE, everybody(FIVE, slow))
    assert bandwidths.believed(CLAIMS)[E] == pytest.approx(1e7)
    assert bandwidths.believed(CLAIMS)[A] == pytest.approx(1e8)


def test_a_newcomer_that_is_slow_is_found_out_in_its_first_round() -> None:
    bandwidths = Bandwidths()
    bandwidths.learn(FIVE, everybody(FIVE, dict.fromkeys(range(4), 1e8) | {4: 1e7}))
    assert bandwidths.believed(CLAIMS)[E] == pytest.approx(1e7)
    bandwidths.learn(FIVE, everybody(FIVE, dict.fromkeys(range(5), 1e8)))
    assert bandwidths.believed(CLAIMS)[E] == pytest.approx(1e7), "of two rounds the worse"


def test_a_first_round_that_opened_the_links_makes_nobody_slow() -> None:
    bandwidths = Bandwidths()
    bandwidths.learn(FIVE, everybody(FIVE, dict.fromkeys(range(4), 9e7) | {4: 5e7}))
    assert bandwidths.believed(CLAIMS)[E] == pytest.approx(9e7)
    bandwidths.learn(FIVE, everybody(FIVE, dict.fromkeys(range(4), 9e7) | {4: 5e7}))
    assert bandwidths.believed(CLAIMS)[E] == pytest.approx(5e7), "but twice is no accident"


def test_no_link_is_slower_than_what_went_over_it() -> None:
    bandwidths = Bandwidths()
    slow, everyone = everybody(FIVE, dict.fromkeys(range(5), 1e7)), [A, B, C, D, E]
    bandwidths.learn(FIVE, slow, dict.fromkeys(everyone, 5e6) | {E: 1e8})
    assert bandwidths.believed(CLAIMS) == pytest.approx(dict.fromkeys(everyone[:4], 1e7) | {E: 1e8})
    assert bandwidths.believed(CLAIMS | {E: 2e7})[E] == pytest.approx(2e7), "it may claim less"
    bandwidths.learn(FIVE, slow, dict.fromkeys(everyone, 1e8))
    assert bandwidths.believed(CLAIMS) == pytest.approx(dict.fromkeys(everyone, 1e8)), "of two rounds the better"
    bandwidths.learn(FIVE, slow, dict.fromkeys(everyone, 2e7))
    bandwidths.learn(FIVE, slow, dict.fromkeys(everyone, 2e7))
    assert bandwidths.believed(CLAIMS)[A] == pytest.approx(2e7), "and of three the middle one"
    bandwidths.learn(FIVE, slow)
    assert bandwidths.believed(CLAIMS)[A] == pytest.approx(2e7), "one round that says nothing of it changes nothing"
    bandwidths.learn(FIVE, slow)
    assert bandwidths.believed(CLAIMS)[A] == pytest.approx(1e7), "but a link that rounds fail over is not what it was"


MANY = cut(some_plan(dict.fromkeys(range(4), 10)), *[1024] * 4)
"""4 Mi elements a part."""

ALL_WELL = {worker.peer: report(MANY) for worker in MANY.members}
INT8 = make_format_map("int8", ())


def test_what_a_round_moved_everybody_must_have_sent() -> None:
    assert MANY.parts[-1].stop == 2**24
    size = INT8.contribution(0, 2**24).packed_bytes(2**24)
    # Three quarters of the vector to the other owners, and its own quarter's mean to three.
    assert sent_at_least(MANY, ALL_WELL, INT8, 2.0) == pytest.approx(dict.fromkeys([A, B, C, D], 8 * size * 1.5 / 2.0))
    plan = cut(MANY, 1024, 1024, 1024)
    least = sent_at_least(plan, {one.peer: report(plan) for one in plan.members}, INT8, 1.0)
    owners = {plan.members[part.owner].peer for part in plan.parts}
    (idle,) = least.keys() - owners
    for owner in owners:
        assert least[idle] == pytest.approx(least[owner] * 3 / 5), "who owns nothing sends only what it contributes"


def test_where_means_are_packed_larger_nobody_must_have_sent_more_than_contributions() -> None:
    sparse = make_format_map("topk", ())
    assert sparse.contribution(0, 2**24).packed_bytes(2**24) < sparse.result(0, 2**24, 4).packed_bytes(2**24)
    large = cut(some_plan(dict.fromkeys(range(4), 10)), *[65536] * 4)
    said_well = {one.peer: report(large) for one in large.members}
    size = sparse.contribution(0, 2**30).packed_bytes(2**30)
    assert sent_at_least(large, said_well, sparse, 2.0) == pytest.approx(
        dict.fromkeys([A, B, C, D], 8 * size * 1.5 / 2.0)
    )


def test_of_a_round_in_which_anything_is_missing_nobody_must_have_sent_anything() -> None:
    one = ALL_WELL[A]
    for changed in (
        one.model_copy(update={"dropped": (1,)}),
        one.model_copy(update={"failed": (1,)}),
        report(MANY, missing=(2,)),
    ):
        assert sent_at_least(MANY, ALL_WELL | {A: changed}, INT8, 2.0) == {}
    assert sent_at_least(MANY, {A: one, B: one, C: one}, INT8, 2.0) == {}
    assert sent_at_least(MANY, ALL_WELL, INT8, 0.0) == {}
    alone = some_plan({0: 10})
    assert sent_at_least(alone, {A: report(alone)}, INT8, 1e-9) == {}


def test_a_little_says_nothing_of_a_link() -> None:
    assert sent_at_least(FIVE, {one.peer: report(FIVE) for one in FIVE.members}, INT8, 1e-9) == {}


def test_a_minority_of_witnesses_changes_nothing() -> None:
    honest = {0: {1: 9.0, 2: 9.0, 3: 9.0, 4: 2.0}, 1: {0: 9.0, 2: 9.0, 3: 9.0, 4: 2.0}}
    honest |= {2: {0: 9.0, 1: 9.0, 3: 9.0, 4: 2.0}}
    friends = {3: {0: 1.0, 1: 1.0, 2: 1.0, 4: 1e9}, 4: {0: 1.0, 1: 1.0, 2: 1.0, 3: 1e9, 4: 1e9}}
    bandwidths = Bandwidths()
    bandwidths.learn(FIVE, said(FIVE, honest | friends))
    assert bandwidths.believed(CLAIMS) == {A: 36.0, B: 36.0, C: 36.0, D: 36.0, E: 8.0}


def test_who_is_slow_itself_does_not_make_the_others_look_slow() -> None:
    bandwidths = Bandwidths()
    bandwidths.learn(THREE, said(THREE, {0: {1: 9.0, 2: 1.0}, 1: {0: 9.0, 2: 1.0}, 2: {0: 1.0, 1: 1.0}}))
    assert bandwidths.believed({A: 1e9, B: 1e9, C: 1e9}) == {A: 18.0, B: 18.0, C: 2.0}


def test_one_witness_is_not_enough_where_there_could_be_two() -> None:
    bandwidths = Bandwidths()
    bandwidths.learn(FIVE, said(FIVE, {0: {1: 1.0}}))
    assert bandwidths.believed(CLAIMS) == CLAIMS
    two = some_plan({0: 10, 1: 10})
    bandwidths.learn(two, said(two, {0: {1: 5.0}, 1: {0: 7.0}}))
    assert bandwidths.believed({A: 1e9, B: 1e9}) == {A: 7.0, B: 5.0}


def test_before_anybody_has_seen_anything_no_claim_counts_for_more_than_the_usual() -> None:
    bandwidths = Bandwidths()
    assert bandwidths.believed({A: 1e8, B: 1e8, C: 1e10}) == dict.fromkeys([A, B, C], 1e8)
    assert bandwidths.believed({A: 1e8, B: 1e8, C: 1e6, D: 0.0}) == {A: 1e8, B: 1e8, C: 1e6, D: 0.0}
    assert bandwidths.believed({A: 0.0}) == {A: 0.0}
    assert bandwidths.believed({}) == {}


def test_a_newcomer_starts_with_its_probe_but_not_above_what_the_others_have_shown() -> None:
    bandwidths = Bandwidths()
    bandwidths.learn(THREE, everybody(THREE, {0: 1e8, 1: 1e8, 2: 1e7}))
    believed = bandwidths.believed({A: 1e9, B: 1e9, C: 1e9, D: 1e10, E: 3e7})
    assert believed == pytest.approx({A: 1e8, B: 1e8, C: 1e7, D: 1e8, E: 3e7})


def test_in_a_grid_the_row_reducers_of_its_row_are_the_witnesses() -> None:
    layout = lay_out(2**20, [None] * 16, [True] * 16, PlanRules(4, 1))
    members = tuple(PlanMember(peer=peer_name(one), weight_tokens=1, row=layout.row_of[one]) for one in range(16))
    plan = FIVE.model_copy(update={"members": members, "parts": layout.parts, "columns": layout.columns})
    row_reducers = {column[layout.row_of[0]] for column in layout.columns} - {0}
    assert len(row_reducers) == 3
    strangers = set(range(1, 16)) - row_reducers
    bandwidths = Bandwidths()
    bandwidths.learn(plan, said(plan, {one: {0: 1e9} for one in strangers}))
    assert bandwidths.believed({A: 1e12}) == {A: 1e12}
    bandwidths.learn(plan, said(plan, {one: {0: 5.0 if one in row_reducers else 1e9} for one in range(1, 16)}))
    # 8 of the 30 sixteenths of the vector that it sends: contributions, and means of its own column.
    assert bandwidths.believed({A: 1e12}) == {A: 5.0 * 30 / 8}


# In the machine -----------------------------------------------------------------------------------------------


def shares(world: World, claims: dict[int, float], links_bps: dict[int, float], took_s: float = 0.0) -> list[int]:
    """A round in which everybody claims and delivers so much, after so long; the elements that each member owned."""
    workers = world.workers[: len(claims)]
    while world.scope.round.phase != "averaging":
        for number, worker in enumerate(workers):
            world.behave(worker)
            world.beat(worker, bandwidth_bps=claims[number])
        world.tick(0.25)
    plan = world.scope.round.plan
    assert plan is not None
    reports = everybody(plan, links_bps)
    for _ in range(round(took_s / 0.25)):
        for worker in workers:
            world.beat(worker)
        world.tick(0.25)
    for worker in workers:
        world.scope.report(worker.peer, reports[worker.peer], world.now_s)
    world.tick(0.25)
    assert world.scope.round.plan is None
    owned = [0] * len(workers)
    for part in plan.parts:
        owned[part.owner] += part.stop - part.start
    return owned


def test_parts_follow_what_was_delivered_and_not_what_is_claimed() -> None:
    world = World(run_file(), members=4)
    claims, links = {0: 1e8, 1: 1e8, 2: 1e8, 3: 1e10}, {0: 1e8, 1: 1e8, 2: 1e8, 3: 1e7}
    first = shares(world, claims, links)
    assert first[3] <= max(first[:3]), "nobody has seen anything: a boast gives nothing"
    second = shares(world, claims, links)
    assert second[3] == 0 < min(second[:3])


def test_links_are_as_fast_as_rounds_show_whatever_their_witnesses_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first contribution that is ready to the last report: the second round is planned by the first."""
    large = MODEL.model_copy(update={"layout": (MODEL.layout[0].model_copy(update={"shape": (1000, 20_000)}),)})
    monkeypatch.setattr(worlds, "MODEL", large)
    world = World(run_file(), members=4)
    claims, links = dict.fromkeys(range(4), 1e10), dict.fromkeys(range(4), 1e7)
    shares(world, claims, links, took_s=1.5)
    shares(world, claims, links, took_s=1.5)
    size = INT8.contribution(0, 20_000_000).packed_bytes(20_000_000)
    for worker in world.workers[:4]:
        believed = world.scope.membership.members[worker.peer].bandwidth_bps
        assert believed == pytest.approx(8 * size * 1.5 / 1.5, rel=0.4), "a tick or two more than that"
        assert believed <= 8 * size * 1.5 / 1.5


def test_deliveries_of_nobody_are_refused() -> None:
    world = World(run_file(), members=2)
    while world.scope.round.phase != "averaging":
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    plan = world.scope.round.plan
    assert plan is not None
    wrong = report(plan).model_copy(update={"deliveries": (Delivery(member=2, bps=1.0),)})
    with pytest.raises(WireError):
        world.scope.report(world.workers[0].peer, wrong, world.now_s)


def test_links_that_are_alike_count_as_equal_and_others_do_not() -> None:
    claims = {"a": 100.0, "b": 90.0, "c": 80.0, "d": 60.0, "e": 10.0, "f": 0.0, "g": 9.0}
    believed = Bandwidths().believed(claims)
    assert len({believed[peer] for peer in "abc"}) == 1
    assert believed["d"] == 60.0
    assert believed["e"] == believed["g"] == 9.0
    assert believed["f"] == 0.0


def test_beyond_what_processors_keep_up_with_no_link_is_faster_than_another() -> None:
    """Or whoever had more to do would show more, and be given more again."""
    bandwidths = Bandwidths()
    bandwidths.learn(FIVE, everybody(FIVE, {0: 6e8, 1: 4e9, 2: 9e8, 3: 4.5e8, 4: 1e8}))
    believed = bandwidths.believed(dict.fromkeys([A, B, C, D, E], 0.0))
    assert believed[A] == believed[B] == believed[C] == believed[D] > believed[E] == pytest.approx(1e8)
