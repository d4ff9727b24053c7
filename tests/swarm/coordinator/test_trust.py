"""What members may do before they have credit and after; simulated runs on a virtual clock, and the rules alone."""

from __future__ import annotations

import itertools

import pytest
from tests.swarm.coordinator.test_round_rules import PLAN, A, B, C, plan
from tests.swarm.coordinator.world import CPU, TOKENS_PER_SAMPLE, Worker, World, entry, peer_name, report, run_file

from shoal.swarm.averaging.chunk_header import holders
from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator import trust
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.round_rules import Judgement, Round, judge, lost_work
from shoal.swarm.coordinator.trust import (
    CREDIT_ROUNDS,
    DETOUR_ROUNDS,
    NEWCOMERS_SHARE,
    Accusations,
    LeaseClock,
    Punctuality,
    accusations_of,
    outvotes,
    owners,
)
from shoal.swarm.protocol.messages import PeerToCoordinatorRequestLease, PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.sample_ranges import count

TURN_S = 0.25
ROUND_S = 5.0
SOON = CREDIT_ROUNDS + 2


class UnevenWorld(World):
    """Members train ``speeds`` samples a turn each; some of them only say that they have."""

    def __init__(self, run: RunFile, speeds: list[int]) -> None:
        self.speeds = dict(enumerate(speeds))
        super().__init__(run, len(speeds))

    def work(self, worker: Worker) -> None:
        left = self.speeds[worker.number]
        # As members do: a lease that lasts for a while.
        a_lease = int(max(2, left * self.scope.deadlines.lease_s / TURN_S))
        while left > 0:
            if not worker.left:
                self.take(worker, self.ask(worker, a_lease))
            before = count(worker.done) + count(worker.ahead)
            self.train(worker, left)
            done = count(worker.done) + count(worker.ahead) - before
            if not done:
                return
            left -= done

    def come(self, number: int, speed: int) -> Worker:
        worker = self.workers[number]
        self.speeds[number] = speed
        self.join(worker)
        self.sync(worker)
        return worker

    def until_planned(self) -> None:
        while self.scope.round.plan is None:
            for number in self.speeds:
                self.behave(self.workers[number])
            self.tick(TURN_S)

    def go_on(self, rounds: int) -> list[Verdict]:
        """So many verdicts more."""
        last = len(self.verdicts) + rounds
        while len(self.verdicts) < last:
            for number in self.speeds:
                self.behave(self.workers[number])
            self.tick(TURN_S)
        return [one.verdict for one in self.verdicts[-rounds:]]


def share(verdicts: list[Verdict], *numbers: int) -> float:
    """Of all committed tokens."""
    weights = [one for verdict in verdicts if verdict.plan for one in verdict.plan.members]
    mine = {peer_name(number) for number in numbers}
    return sum(one.weight_tokens for one in weights if one.peer in mine) / sum(one.weight_tokens for one in weights)


def timed(**more: float) -> RunFile:
    """Rounds that end after a time."""
    return run_file(**{"tokens": 10**9, "max_s": ROUND_S, "patience_s": 3.0, **more})


# Leases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "overlap"),
    [
        ([2, 8], True),
        pytest.param([2, 40], False, marks=pytest.mark.matrix),
        pytest.param([2, 8], False, marks=pytest.mark.matrix),
        pytest.param([2, 40], True, marks=pytest.mark.matrix),
        pytest.param([2, 2, 2, 40], False, marks=pytest.mark.matrix),
        pytest.param([2, 2, 2, 40], True, marks=pytest.mark.matrix),
    ],
)
def test_uneven_members_keep_their_shares(monkeypatch: pytest.MonkeyPatch, speeds: list[int], overlap: bool) -> None:
    def played() -> list[Verdict]:
        world = UnevenWorld(timed(overlap=overlap), speeds)
        return [one for one in world.go_on(60) if one.round > SOON]

    bounded = played()
    monkeypatch.setattr(trust, "CREDIT_ROUNDS", 10**9)
    free = played()
    assert all(one.committed for one in bounded)
    assert sum(one.tokens for one in bounded) == pytest.approx(sum(one.tokens for one in free), rel=0.005)
    for number, speed in enumerate(speeds):
        assert share(bounded, number) == pytest.approx(speed / sum(speeds), rel=0.05)


@pytest.mark.parametrize("algorithm", ["diloco", pytest.param("virtual_batch", marks=pytest.mark.matrix)])
def test_uneven_members_of_rounds_with_a_goal_are_no_slower(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    def lasted_s() -> float:
        world = UnevenWorld(run_file(algorithm, tokens=2000, max_s=60.0), [2, 8, 40])
        ended = world.go_on(50)
        assert all(one.committed for one in ended)
        return ended[-1].ended_s - ended[SOON].ended_s

    bounded_s = lasted_s()
    monkeypatch.setattr(trust, "CREDIT_ROUNDS", 10**9)
    assert bounded_s <= 1.02 * lasted_s()


def test_an_identity_that_does_no_work_gets_a_newcomers_share_and_then_twice_as_much_a_round() -> None:
    world = UnevenWorld(timed(), [4, 4])
    world.go_on(SOON)
    fresh = world.scope.leases.fresh
    world.come(2, 10**6)
    new = world.go_on(CREDIT_ROUNDS)
    assert share(new, 2) <= 1.1 * NEWCOMERS_SHARE
    assert all(share([one], 2) <= 1.25 * NEWCOMERS_SHARE for one in new)
    used = world.scope.leases.fresh - fresh
    assert used * TOKENS_PER_SAMPLE <= 1.25 * sum(one.tokens for one in new)
    pace_tps = world.scope.membership.members[peer_name(2)].pace_tps
    world.go_on(3)
    assert world.scope.membership.members[peer_name(2)].pace_tps <= 2.0**3 * pace_tps


def test_many_identities_share_what_one_would_get() -> None:
    world = UnevenWorld(timed(), [8, 8])
    world.go_on(SOON)
    for number in range(2, 8):
        world.come(number, 10**6)
    new = world.go_on(CREDIT_ROUNDS)
    assert share(new, *range(2, 8)) <= 1.1 * NEWCOMERS_SHARE
    assert all(share(new, number) > 0 for number in range(2, 8)), "none takes it all"


def test_a_fast_newcomer_has_its_share_after_a_while() -> None:
    world = UnevenWorld(timed(), [2, 2, 2])
    world.go_on(SOON)
    world.come(3, 40)
    shares = [share([one], 3) for one in world.go_on(30)]
    print([f"{one:.0%}" for one in shares])
    assert max(shares[:CREDIT_ROUNDS]) <= 1.25 * NEWCOMERS_SHARE
    assert all(one == pytest.approx(40 / 46, rel=0.02) for one in shares[20:])


def test_a_newcomer_like_the_others_is_not_slowed_down() -> None:
    world = UnevenWorld(timed(), [8] * 5)
    world.go_on(SOON)
    world.come(5, 8)
    shares = [share([one], 5) for one in world.go_on(10)]
    assert all(one == pytest.approx(1 / 6, rel=0.1) for one in shares[1:])


def test_a_batch_that_has_to_be_whole_is_filled_when_those_with_a_record_do_nothing() -> None:
    world = UnevenWorld(run_file("virtual_batch", tokens=400, max_s=20.0), [2])
    world.go_on(SOON)
    for number in (1, 2):
        world.come(number, 2)
    assert share(world.go_on(1), 1, 2) < 0.5, "beside one with credit"
    world.speeds[0] = 0  # it is there, and holds the state, and asks for nothing
    assert all(one.committed and one.tokens == 400 for one in world.go_on(3))


def test_while_nobody_has_a_record_there_is_no_limit() -> None:
    world = UnevenWorld(timed(), [2, 2, 1000])
    assert share(world.go_on(3), 2) > 0.95


def test_after_a_restart_everybody_goes_on() -> None:
    world = UnevenWorld(timed(), [4, 40])
    world.go_on(SOON)
    before = world.go_on(5)
    for _ in range(int(ROUND_S / TURN_S / 2)):  # in the middle of a round
        for number in world.speeds:
            world.behave(world.workers[number])
        world.tick(TURN_S)
    world.restart()
    after = world.go_on(5)
    assert sum(one.tokens for one in after) >= 0.95 * sum(one.tokens for one in before)


def test_time_counts_from_the_first_lease_on_and_no_longer_than_two_rounds() -> None:
    clock = LeaseClock()
    clock.start("a", 100.0, 0, 10.0)
    clock.start("a", 105.0, 0, 10.0)
    assert clock.worked_s("a", 110.0) == 10.0
    assert clock.worked_s("b", 110.0) == 0.0
    clock.offer("a", 110.0)
    clock.end_round(["b"], 100.0)
    assert clock.worked_s("a", 112.0) == 12.0, "its contribution was left out: it still works on it"
    clock.offer("a", 115.0)
    clock.end_round(["a"], 111.0)
    assert clock.worked_s("a", 116.0) == 1.0
    clock.end_round([], 120.0)
    assert clock.worked_s("a", 130.0) == 10.0, "who did nothing for long has not worked all that time"
    clock.lose("a")
    clock.start("a", 140.0, 50, 10.0)
    assert clock.worked_s("a", 140.0) == 5.0, "after a restart, what it holds counts as worked for"


def test_one_that_keeps_all_that_newcomers_may_hold_keeps_no_others_out() -> None:
    world = UnevenWorld(timed(), [8, 8])
    world.go_on(SOON)
    hoarder = world.workers[2]
    world.join(hoarder)
    world.sync(hoarder)
    moved = itertools.count(1)

    def pass_rounds(rounds: int) -> None:
        last = len(world.verdicts) + rounds
        while len(world.verdicts) < last:
            for number in world.speeds:
                world.behave(world.workers[number])
            hoarder.round, hoarder.version = world.scope.round.number, world.scope.anchor_version
            hoarder.digest = world.scope.agreed_digest or hoarder.digest
            world.beat(hoarder, chunks_moved=next(moved))
            if world.scope.round.phase == "training":
                ask = PeerToCoordinatorRequestLease(samples=10**6, round=hoarder.round, tokens_done=next(moved))
                world.scope.leasing.request(hoarder.peer, ask, world.now_s)
                world.settle()
            world.tick(TURN_S)

    pass_rounds(4)
    assert world.scope.leases.held[hoarder.peer]
    world.come(3, 8)
    pass_rounds(CREDIT_ROUNDS + 4)
    assert world.scope.membership.members[D].has_credit


# Accusations ------------------------------------------------------------------------------------------------

CREDITED = {A: 100, B: 100}
D = peer_name(3)


@pytest.mark.parametrize(
    ("accusers", "work", "enough"),
    [
        ({C, D}, {}, True),
        ({A, C}, {}, False),
        ({C, peer_name(4), peer_name(5)}, {}, False),
        ({C}, {}, False),
        ({C, D}, CREDITED, False),
        ({B}, CREDITED, False),
        ({B, C}, CREDITED, False),
        ({B, C}, {A: 1, B: 100, D: 200}, False),
        ({B, C}, {A: 10**6, B: 101, D: 100}, False),
        ({B, C}, {A: 90, B: 5, C: 5}, False),
        ({B, C}, {A: 100, B: 201, D: 100}, True),
        ({C, D}, {A: 100}, False),
    ],
)
def test_accusers_need_most_of_the_recorded_work_and_to_be_two(
    accusers: set[str], work: dict[str, int], enough: bool
) -> None:
    assert outvotes(accusers, A, [A, B, C, D], work) is enough


def test_of_two_members_each_is_the_only_witness() -> None:
    assert not outvotes({B}, A, [A, B], CREDITED), "one word against the other: they do without each other"
    assert outvotes({B}, A, [A, B], {A: 100, B: 101})
    assert not outvotes({B}, A, [A, B], {}), "nor while nobody has credit"
    assert not outvotes({B}, A, [A, B], {A: 1})


@pytest.mark.parametrize(("members", "needed"), [(3, 2), (4, 2), (5, 3), (23, 12)])
def test_while_nobody_has_credit_most_of_the_others_have_to_accuse(members: int, needed: int) -> None:
    present = [f"member {number}" for number in range(members)]
    assert not outvotes(present[1:needed], present[0], present, {})
    assert outvotes(present[1 : needed + 1], present[0], present, {})


def said(**reports: PeerToCoordinatorRoundReport) -> dict[str, PeerToCoordinatorRoundReport]:
    names = {"a": A, "b": B, "c": C, "d": D}
    return {names[name]: one for name, one in reports.items()}


def judged(reports: dict[str, PeerToCoordinatorRoundReport], work: dict[str, int]) -> Judgement:
    judgement = judge(PLAN, reports, {A, B, C}, overdue=True, enough=True, work=work)
    assert judgement is not None
    return judgement


def says(**fields: tuple[int, ...]) -> PeerToCoordinatorRoundReport:
    return report(PLAN).model_copy(update=fields)


def test_newcomers_do_not_put_an_owner_out() -> None:
    lies = says(failed=(0, 1), undelivered=(0, 1))
    alone = judged(said(a=says(), b=lies, c=lies), {A: 100})
    assert alone.committed
    assert (alone.failed, alone.missing) == ((), ())
    assert alone.accused_by == {B: {A, B}, C: {A, B}}
    assert A in judged(said(a=says(), b=lies, c=lies), {}).failed, "while nobody has credit, two are enough"
    assert A in judged(said(a=says(), b=lies, c=lies), {A: 100, B: 101}).failed
    assert A not in judged(said(a=says(), b=lies, c=lies), {A: 90, B: 5, C: 5}).failed


def test_newcomers_do_not_decide_on_bytes() -> None:
    wrong = report(PLAN, wrong=(0, 1, 2))
    mine = judged(said(a=report(PLAN), b=wrong, c=wrong), {A: 100})
    assert mine.digests == report(PLAN).digests
    assert A not in mine.failed
    both = judge(
        PLAN, said(a=report(PLAN), b=report(PLAN), c=wrong), {A, B, C}, overdue=True, enough=True, work={A: 1, B: 1}
    )
    assert both is not None
    assert both.digests == report(PLAN).digests
    assert both.failed == (C,), "against an owner its own other bytes count, not those that it says it got"


def test_newcomers_bytes_are_not_committed_before_one_with_a_record_has_reported() -> None:
    early = said(b=report(PLAN), c=report(PLAN))
    assert judge(PLAN, early, {A, B, C}, overdue=False, enough=True, work={A: 5}) is None
    assert judge(PLAN, early, {A, B, C}, overdue=False, enough=True, work={B: 5})
    late = judge(PLAN, early, {A, B, C}, overdue=True, enough=True, work={A: 5})
    assert late is not None
    assert not late.committed, "not either when it does not report at all"
    assert late.missing == (A,), "and is left out, if that happens again"


@pytest.mark.parametrize("others", [1, 2])
def test_beside_a_single_member_with_a_record_newcomers_stop_no_round(others: int) -> None:
    live = [A, B, C][: 1 + others]
    for lies in ({}, {B: report(PLAN, wrong=(0, 1, 2))}):
        ended = judge(PLAN, {A: report(PLAN), **lies}, live, overdue=True, enough=True, work={A: 5})
        assert ended is not None
        assert ended.digests == report(PLAN).digests
        assert ended.missing == tuple(peer for peer in live[1:] if peer not in lies), "who does not report either"


def test_bytes_are_committed_that_most_of_the_recorded_work_holds() -> None:
    right, wrong = report(PLAN), report(PLAN, wrong=(0, 1, 2))

    def digests(work: dict[str, int], **reports: PeerToCoordinatorRoundReport) -> tuple[bytes | None, ...]:
        ended = judge(PLAN, said(**reports), {A, B, C}, overdue=True, enough=True, work=work)
        assert ended is not None
        return ended.digests

    assert digests({A: 98, B: 1, C: 1}, b=wrong, c=wrong) == ()
    assert digests({A: 98, B: 1, C: 1}, a=right, b=wrong, c=wrong) == (), "one of three is not safe"
    assert digests({A: 98, B: 1, C: 1}, a=right, b=right, c=wrong) == right.digests
    assert digests({A: 1, B: 1}, a=right, b=right) == right.digests


def test_chunks_that_newcomers_move_take_nothing_from_the_others_patience() -> None:
    world = UnevenWorld(timed(), [8, 8])
    world.go_on(SOON)
    world.come(2, 8)
    world.come(3, 8)
    world.go_on(1)
    world.until_planned()
    liars, moved = world.workers[2:4], itertools.count(1)
    left = world.scope.round.moves_left
    while left[liars[0].peer]:
        world.beat(liars[0], chunks_moved=next(moved))
    for worker in liars:
        parts = world.scope.round.plan.parts if world.scope.round.plan else ()
        world.report(worker, wrong=tuple(range(len(parts))))
    number, until_s = world.scope.round.number, world.now_s + 2 * world.scope.deadlines.report_s
    while world.now_s < until_s:
        assert world.scope.round.number == number
        done = int(world.now_s)
        for worker in world.workers[:2]:
            world.beat(worker, chunks_moved=done)
        for worker in liars:
            world.beat(worker, chunks_moved=next(moved))
        world.tick(TURN_S)
    for worker in world.workers[:2]:
        world.report(worker)
    verdict = world.verdicts[-1].verdict
    assert verdict.round == number
    assert verdict.plan is not None
    assert verdict.digests == report(verdict.plan).digests


def test_an_owner_whose_part_nobody_gets_is_put_out() -> None:
    lacks = report(PLAN, missing=(0,))
    assert judged(said(a=report(PLAN), b=lacks, c=lacks), {A: 1000, B: 10, C: 10}).failed == ()
    assert judged(said(a=report(PLAN), b=lacks, c=lacks), {A: 10, B: 10, C: 10}).failed == (A,)
    assert judged(said(a=report(PLAN), b=lacks, c=lacks), {A: 1000}).failed == ()


def test_whose_contribution_most_owners_lack_is_missing() -> None:
    got = says(undelivered=(2,))
    assert {one.owner for one in PLAN.parts} == {0, 1, 2}
    for work in ({}, CREDITED, {A: 3, B: 3, C: 5}):
        assert judged(said(a=got, b=got, c=says()), work).missing == (C,)
        assert judged(said(a=got, b=says(), c=says()), work).missing == (), "one owner alone may lie"
    assert judged(said(a=says(undelivered=(1,)), b=says(), c=says(undelivered=(1,))), {A: 9, B: 9, C: 1}).missing == (
        B,
    )
    assert judged(said(a=got, b=got, c=says()), {A: 5, B: 5, C: 90}).missing == ()
    only = judge(PLAN, said(a=got, b=got), {A, B}, overdue=True, enough=True, work=CREDITED)
    assert only is not None
    assert only.missing == (), "it is gone"


def test_an_accusation_is_a_detour_for_a_while() -> None:
    accusations = Accusations()
    accusations.take(accusations_of(5, {C: {A, C}, D: {peer_name(7)}}), 5)
    made = accusations.into(PLAN)
    assert [member.detours for member in made.members] == [(), (), (0,)]
    (part, *_) = [one for one in made.parts if one.owner == 0]
    assert holders(made, part, 1)[0] == 0
    assert holders(made, part, 2) == [1, 0, 2]
    assert holders(PLAN, part, 2)[0] == 0
    accusations.take((), 5 + DETOUR_ROUNDS - 1)
    assert accusations.into(PLAN) != PLAN
    accusations.take((), 5 + DETOUR_ROUNDS)
    assert accusations.into(PLAN) is PLAN


def test_who_accuses_everybody_is_not_written_down_at_length() -> None:
    assert len(accusations_of(1, {A: {peer_name(number) for number in range(1, 32)}})) == 16


def test_accusations_outlive_the_coordinator() -> None:
    world = UnevenWorld(timed(), [4, 4, 4])
    world.go_on(SOON)
    world.until_planned()
    assert world.scope.round.plan is not None
    lies = report(world.scope.round.plan).model_copy(update={"failed": (0,)})
    for worker in world.workers[:2]:
        world.report(worker)
    world.scope.report(world.workers[2].peer, lies, world.now_s)
    (verdict,) = [one for one in world.verdicts if one.accusations] or [world.go_on(1) and world.verdicts[SOON]]
    assert verdict.accusations == (ev.Accusation(by=C, of=A, round=SOON),)
    world.restart()
    (next_one, *_) = world.go_on(1)
    assert next_one.plan is not None
    assert next_one.plan.members[2].detours == (0,)


# Owners -----------------------------------------------------------------------------------------------------


def known(*credit: int, barred: tuple[int, ...] = (), reachable: bool = True) -> dict[str, Member]:
    return {
        peer_name(number): Member(
            entry(number, reachable=reachable or number > 1),
            CPU,
            0.0,
            credit=of or number,
            has_credit=of > 0,
            barred_rounds=int(number in barred),
        )
        for number, of in enumerate(credit)
    }


@pytest.mark.parametrize(
    ("members", "least", "who"),
    [
        (known(9, 9, 0, 0), 1, [0, 1]),
        (known(0, 0, 0, 0), 1, [0, 1, 2, 3]),
        (known(9, 9, 0, 0, barred=(0,)), 1, [1]),
        (known(9, 9, 0, 0, barred=(0, 1)), 1, [0, 1]),
        (known(9, 9, 0, 0, reachable=False), 1, [2, 3]),
        (known(9, 0, 0, 0, 0), 3, [0, 3, 4]),
    ],
)
def test_members_with_a_record_own_the_model(members: dict[str, Member], least: int, who: list[int]) -> None:
    assert [number for number, one in enumerate(owners(members, list(members), least)) if one] == who


def test_newcomers_stand_in_for_owners() -> None:
    members = dict(enumerate(known(9, 0, 0).values()))
    made = plan({0: 1, 1: 1, 2: 1}, members=members)
    assert made is not None
    assert {(one.owner, one.stand_ins) for one in made.parts} == {(0, (1, 2))}


def test_a_few_with_little_work_do_not_decide_on_the_state() -> None:
    world = UnevenWorld(timed(), [40, 40])
    world.go_on(SOON)
    for number in (2, 3, 4):
        world.come(number, 2)
    world.go_on(CREDIT_ROUNDS + 3)
    assert len(world.scope.membership.with_credit()) == 5
    world.until_planned()
    version = world.scope.anchor_version
    while world.scope.anchor_version == version:
        for worker in world.workers[:5]:
            world.report(worker)
    for number, worker in enumerate(world.workers[:5]):
        world.conclude(worker)
        if number >= 2:
            worker.digest = b"e" * 32
        world.beat(worker)
    assert world.scope.agreed_digest == world.workers[0].digest
    assert [number for number in range(5) if world.view(world.workers[number]).must_resync] == [2, 3, 4]
    world.until_planned()
    assert world.scope.round.plan is not None
    assert world.scope.round.plan.state_digest == world.workers[0].digest
    assert {worker.digest for worker in world.workers[:5]} == {world.workers[0].digest}, "all others have resynced"


def test_who_is_put_out_of_office_is_not_back_by_joining_again() -> None:
    world = UnevenWorld(timed(), [8, 8])
    world.go_on(1)
    member = world.scope.membership.members[B]
    member.fail()
    member.fail()
    world.join(world.workers[1])
    member = world.scope.membership.members[B]
    assert (member.barred_rounds, member.failures, member.can_own) == (8, 2, False)


# Who does not deliver -----------------------------------------------------------------------------------------


def test_left_out_for_ever_longer_until_it_delivers() -> None:
    member, absences, number = Member(entry(0), CPU, 0.0), [], 10
    member.miss(number)
    assert member.out_until == 0
    for _ in range(8):
        number += 1
        member.miss(number)
        absences.append(member.out_until - number - 1)
        number = member.out_until - 1
    assert absences == [2, 4, 8, 16, 32, 64, 64, 64]
    for _ in range(8):
        member.deliver()
    before = member.out_until
    for missed in (number, number + 2):
        member.miss(missed)
        assert member.out_until == before, "two rounds in a row"
        member.deliver()
    member.miss(number + 4)
    member.miss(number + 5)
    assert member.out_until == number + 6 + 2


class WithholdingWorld(UnevenWorld):
    """The last member's contribution never comes."""

    def report(self, worker: Worker, **faults: tuple[int, ...]) -> None:
        plan, liar = self.scope.round.plan, self.workers[2].peer
        assert plan is not None
        missing = tuple(index for index, one in enumerate(plan.members) if one.peer == liar != worker.peer)
        said = report(plan).model_copy(update={"undelivered": missing})
        self.scope.report(worker.peer, said, self.now_s)
        self.machine.tick(self.now_s)
        self.settle()


def test_who_never_delivers_is_left_out_and_gets_no_samples_meanwhile() -> None:
    world = WithholdingWorld(timed(), [4, 4, 4])
    rounds, restarts = [], 0
    while len(world.verdicts) < 24:
        rounds += world.go_on(1)
        assert rounds[-1].plan is not None
        member = world.scope.membership.members[C]
        if world.scope.round.number < member.out_until:
            assert world.ask(world.workers[2], 6) == []
            world.restart(compact=bool(restarts % 2))
            restarts += 1
    planned = [C in [one.peer for one in verdict.plan.members] for verdict in rounds if verdict.plan]
    assert [number for number, one in enumerate(planned) if one] == [0, 1, 4, 9, 18]
    members = world.scope.membership.members
    assert [(members[peer].credit_rounds > 0, members[peer].has_credit) for peer in (A, C)] == [
        (True, True),
        (False, False),
    ], "what was planned and not delivered earns nothing"
    assert all(one.committed for one in rounds)


def test_a_batch_is_whole_without_who_never_delivers() -> None:
    world = WithholdingWorld(run_file("virtual_batch", tokens=240, max_s=60.0), [4, 4, 4])
    rounds = world.go_on(16)
    assert all(one.committed and one.tokens == 240 for one in rounds)
    assert all(after.ended_s - before.ended_s < 15.0 for before, after in itertools.pairwise(rounds))
    assert sum(C in [one.peer for one in verdict.plan.members] for verdict in rounds if verdict.plan) == 4
    world.until_planned()
    for worker in world.workers[:3]:
        assert world.scope.round.plan is not None
        world.scope.report(worker.peer, report(world.scope.round.plan, missing=(0,)), world.now_s)
    world.tick(TURN_S)
    assert all(one.committed for one in world.go_on(4)), "an aborted round changes nothing"


def test_who_is_never_ready_is_soon_waited_for_no_more() -> None:
    world = UnevenWorld(timed(max_s=2.0), [4, 4, 4])
    world.go_on(SOON)
    silent = world.workers[2]
    took_s: list[float] = []
    for _ in range(12):
        before_s = world.now_s
        ended = len(world.verdicts)
        while len(world.verdicts) == ended:
            for number in (0, 1):
                world.behave(world.workers[number])
            silent.round = world.scope.round.number
            silent.version, silent.digest = world.workers[0].version, world.workers[0].digest
            world.beat(silent)
            if world.scope.round.phase == "training" and not world.scope.leases.held.get(C):
                world.ask(silent, 2)
            world.tick(TURN_S)
        took_s.append(world.now_s - before_s)
    usual_s = min(took_s)
    assert sum(one > usual_s + TURN_S for one in took_s) <= 4, took_s
    assert sum(one > usual_s + TURN_S for one in took_s[:2]) >= 1, took_s


def test_one_that_is_ready_again_is_waited_for_again() -> None:
    punctual = Punctuality()
    for number in (1, 2):
        assert punctual.is_awaited(A, number)
        punctual.saw(number, [B], [A])
    assert [punctual.is_awaited(A, number) for number in range(3, 7)] == [False, False, True, True]
    punctual.saw(5, [B], [A])
    assert [number for number in range(6, 12) if punctual.is_awaited(A, number)] == [10, 11]
    for number in range(10, 13):
        punctual.saw(number, [A, B], [])
    punctual.saw(13, [B], [A])
    assert punctual.is_awaited(A, 14)


def test_punctual_members_and_forgotten_ones_take_no_memory() -> None:
    punctual = Punctuality()
    for number in range(1, 4):
        punctual.saw(number, [B], [A])
    assert A in punctual._in_vain
    assert B not in punctual._in_vain
    for number in range(4, 40):
        punctual.saw(number, [A, B], [])
    assert (punctual._in_vain, punctual._until) == ({}, {})
    punctual.saw(41, [], [A])
    punctual.saw(42, [], [A])
    punctual.forget(A)
    assert (punctual._in_vain, punctual._until) == ({}, {})


def test_who_keeps_samples_of_whole_batches_costs_few_of_them_a_patience() -> None:
    world = UnevenWorld(run_file("virtual_batch", tokens=400, max_s=60.0), [4, 4])
    world.go_on(SOON)
    hoarder, moved, lost = world.workers[2], itertools.count(1), 0
    last = len(world.verdicts) + 24
    while len(world.verdicts) < last:
        for number in world.speeds:
            world.behave(world.workers[number])
        if not world.admitted(hoarder):
            world.join(hoarder)
            world.sync(hoarder)
            lost += 1
        hoarder.round, hoarder.version = world.scope.round.number, world.scope.anchor_version
        hoarder.digest = world.scope.agreed_digest or hoarder.digest
        held = count(world.scope.leases.held.get(hoarder.peer, [])) * TOKENS_PER_SAMPLE
        world.beat(hoarder, chunks_moved=next(moved), tokens_done=held)
        if world.scope.round.phase == "training":
            world.ask(hoarder, 10**6)
        world.tick(TURN_S)
    assert lost <= 6, lost
    member = world.scope.membership.members[hoarder.peer]
    assert member.absences
    world.restart()


def test_in_what_newcomers_say_to_lack_of_committed_bytes_nobody_is_lost() -> None:
    ended = Round(PLAN.round, plan=PLAN, orphans={A})
    right = report(PLAN)
    ended.reports = said(a=right, b=report(PLAN, dropped=(0,)), c=report(PLAN, dropped=(0,)))
    assert lost_work(ended, right.digests) == (A,), "two say so, and nobody has credit"
    assert lost_work(ended, right.digests, {A: 5}) == ()
    assert lost_work(ended, right.digests, {A: 5, B: 6}) == (A,)
