from typing import Any

import pytest
from tests.swarm.coordinator.world import CPU, INITIAL, entry, part_digest, peer_name, report

from shoal.swarm.coordinator.events import MemberJoined, MemberLost
from shoal.swarm.coordinator.membership import Member, Membership
from shoal.swarm.coordinator.round_plan import PlanRules, plan_round
from shoal.swarm.coordinator.round_rules import Goal, Work, closing_moment, judge, makers_of, weighted_mean
from shoal.swarm.coordinator.trust import weightiest
from shoal.swarm.deadlines import Deadlines, Delays
from shoal.swarm.protocol.messages import MadePart, PeerToCoordinatorRoundReady, PeerToCoordinatorRoundReport
from shoal.swarm.protocol.rounds import RoundPlan

DEADLINES = Deadlines(30.0)
"""Heartbeats every 5 s, closings announced 10 s ahead."""

GOAL = Goal(1000, 100.0, exact=False)
EXACT = Goal(1000, 100.0, exact=True)


def work(done: int, speed: float, step_s: float = 0.1, heard_s: float = 0.0, leased: int = 10**6) -> Work:
    return Work(done, speed, step_s, heard_s, leased)


def closes(goal: Goal, now_s: float, *works: Work) -> float | None:
    return closing_moment(0.0, goal, works, now_s, DEADLINES)


# Closing ------------------------------------------------------------------------------------------------


def test_nothing_is_announced_early() -> None:
    assert closes(GOAL, 0.0, work(0, 10.0)) is None
    assert closes(GOAL, 20.0, work(790, 10.0, heard_s=20.0)) is None


def test_announced_ahead_where_all_together_reach_the_goal() -> None:
    assert closes(GOAL, 20.0, work(500, 10.0, heard_s=20.0), work(300, 15.0, heard_s=20.0)) == pytest.approx(28.0)


def test_extrapolates_from_the_last_heartbeat_but_not_for_ever() -> None:
    assert closes(GOAL, 22.0, work(880, 10.0, heard_s=20.0)) == pytest.approx(32.0)
    assert closes(GOAL, 60.0, work(800, 10.0, heard_s=20.0)) is None


def test_never_in_the_past_and_with_time_to_hear_of_it() -> None:
    assert closes(GOAL, 20.0, work(5000, 10.0, heard_s=20.0)) == 25.0
    assert closes(GOAL, 500.0, work(0, 0.0, heard_s=500.0)) == 505.0


def test_at_the_limit_whatever_is_done() -> None:
    assert closes(GOAL, 89.0, work(0, 0.0, heard_s=89.0)) is None
    assert closes(GOAL, 91.0, work(0, 0.0, heard_s=91.0)) == 100.0


def test_a_call_waits_for_all_members_whatever_one_says() -> None:
    everybody = Goal(2, 100.0, exact=False, everybody=True)
    assert closes(everybody, 10.0, work(50, 0.0, heard_s=10.0), work(0, 0.0, heard_s=10.0)) is None
    assert closes(everybody, 10.0, work(50, 0.0, heard_s=10.0), work(1, 0.0, heard_s=10.0)) == 10.0
    assert closes(everybody, 99.0, work(50, 0.0, heard_s=99.0)) == 100.0


def test_speed_zero() -> None:
    assert closes(GOAL, 10.0, work(1000, 0.0, heard_s=10.0)) == 15.0
    assert closes(GOAL, 10.0, work(999, 0.0, heard_s=10.0)) is None


def test_slow_steps_are_announced_earlier_but_not_beyond_patience() -> None:
    assert closes(GOAL, 20.0, work(800, 10.0, heard_s=20.0)) is None
    assert closes(GOAL, 20.0, work(800, 10.0, step_s=25.0, heard_s=20.0)) == pytest.approx(40.0)
    assert closes(GOAL, 20.0, work(0, 10.0, step_s=1e9, heard_s=20.0)) is None


def test_boasting_without_leases_closes_nothing() -> None:
    assert closes(GOAL, 20.0, work(2**62, 1e18, heard_s=19.0, leased=0)) is None
    assert closes(GOAL, 20.0, work(2**62, 1e18, heard_s=19.0, leased=400)) is None
    assert closes(EXACT, 20.0, work(2**62, 1e18, heard_s=19.0, leased=999)) is None


def test_tiny_speeds_do_not_overflow() -> None:
    assert closes(GOAL, 20.0, work(0, 5e-324, heard_s=20.0)) is None


def test_nobody_trained_before_the_round_was_opened() -> None:
    late = work(900, 50.0, heard_s=96.0)
    assert closing_moment(99.0, GOAL, [late], 100.0, DEADLINES) == pytest.approx(105.0)
    assert late.tokens_at(100.0, 99.0) == 950.0
    assert late.tokens_at(100.0, 0.0) == 1100.0


def test_exact_rounds_close_when_all_is_done_and_not_before() -> None:
    assert closes(EXACT, 20.0, work(999, 1000.0, heard_s=20.0)) is None
    assert closes(EXACT, 20.0, work(600, 0.0), work(400, 0.0)) == 20.0
    assert closes(EXACT, 95.0, work(999, 1.0, heard_s=95.0)) == 100.0
    assert closes(EXACT, 120.0, work(999, 1.0, heard_s=120.0)) == 120.0


# Plans --------------------------------------------------------------------------------------------------


def ready(tokens: int, digest: bytes = INITIAL) -> PeerToCoordinatorRoundReady:
    return PeerToCoordinatorRoundReady(
        round=3, anchor_version=2, state_digest=digest, weight_tokens=tokens, ranges=(), loss=None
    )


def plan(
    weights: dict[int, int], digests: dict[int, bytes] | None = None, members: dict[int, Member] | None = None
) -> RoundPlan | None:
    everybody = members or {number: Member(entry(number), CPU, 0.0) for number in weights}
    says = {
        peer_name(number): ready(tokens, (digests or {}).get(number, INITIAL)) for number, tokens in weights.items()
    }
    return plan_round(
        3, (2, INITIAL), 50_000, says, {peer_name(number): one for number, one in everybody.items()}, PlanRules(32, 0)
    )


def some_plan(weights: dict[int, int]) -> RoundPlan:
    made = plan(weights)
    assert made is not None
    return made


def test_a_plan_orders_by_peer_and_tiles() -> None:
    made = some_plan({2: 30, 0: 10, 1: 20})
    assert [one.peer for one in made.members] == [peer_name(number) for number in range(3)]
    assert [one.weight_tokens for one in made.members] == [10, 20, 30]
    assert (made.round, made.anchor_version, made.state_digest) == (3, 2, INITIAL)
    assert made.parts[0].start == 0
    assert made.parts[-1].stop == 50_000


def test_one_member_alone() -> None:
    made = some_plan({5: 1})
    assert [(one.owner, one.start, one.stop) for one in made.parts] == [(0, 0, 50_000)]


def test_without_work_no_plan() -> None:
    assert plan({}) is None
    assert plan({0: 0, 1: 0}) is None


def test_only_those_with_work_that_are_still_here() -> None:
    members = {0: Member(entry(0), CPU, 0.0), 1: Member(entry(1), CPU, 0.0)}
    made = plan({0: 5, 1: 0, 2: 7}, members=members)
    assert made is not None
    assert [one.peer for one in made.members] == [peer_name(0)]


def test_only_members_with_the_agreed_state_are_planned() -> None:
    other = b"o" * 32
    made = plan({0: 1, 1: 1, 2: 1, 3: 0, 4: 0}, {0: other, 3: other, 4: other})
    assert made is not None
    assert made.state_digest == INITIAL
    assert [one.peer for one in made.members] == [peer_name(1), peer_name(2)]


def test_the_state_is_what_most_of_the_work_says_and_of_equals_the_smallest_digest() -> None:
    def agreed(*digests: bytes | None, rounds: tuple[int, ...] = (), credit: tuple[int, ...] = ()) -> bytes | None:
        members = {peer_name(number): Member(entry(number), CPU, 0.0) for number in range(len(digests))}
        for member, earned in zip(members.values(), credit, strict=False):
            member.credit, member.has_credit = earned, True
        for member, done in zip(members.values(), rounds, strict=False):
            member.rounds_committed, member.credit = done, 10**9 // done
        return weightiest(dict(zip(members, digests, strict=True)), members)

    assert agreed(b"b", b"a", b"a", b"b") == b"a"
    assert agreed(b"b", b"b", b"a") == b"b"
    assert agreed(None, b"a", None) == b"a"
    assert agreed(None) is None
    assert agreed(b"b", b"a", b"a", b"a", credit=(96, 1, 1, 1)) == b"b"
    assert agreed(b"b", b"a", b"a", credit=(2, 1, 1)) == b"a", "as much work, and more of them"
    assert agreed(b"b", b"a", rounds=(2, 3)) == b"a", "claims of a first round prove nothing"


@pytest.mark.parametrize("fault", ["unreachable", "fails"])
def test_who_cannot_deliver_owns_nothing(fault: str) -> None:
    members = {number: Member(entry(number), CPU, 0.0) for number in range(3)}
    if fault == "unreachable":
        members[1].entry = entry(1, reachable=False)
    else:
        members[1].fail()
    made = plan({0: 1, 1: 1, 2: 1}, members=members)
    assert made is not None
    assert {one.owner for one in made.parts} == {0, 2}
    assert len(made.members) == 3


def test_where_all_owners_have_failed_those_own_that_can_be_reached() -> None:
    members = {number: Member(entry(number), CPU, 0.0, barred_rounds=1) for number in range(3)}
    members |= {3: Member(entry(3, reachable=False), CPU, 0.0), 4: Member(entry(4, role="contributor"), CPU, 0.0)}
    made = plan(dict.fromkeys(members, 1), members=members)
    assert made is not None
    assert {one.owner for one in made.parts} == {0, 1, 2}
    assert all({one.owner, *one.stand_ins} == {0, 1, 2} for one in made.parts)


def test_whoever_fails_again_owns_nothing_for_longer() -> None:
    member, pauses = Member(entry(0), CPU, 0.0), []
    for _ in range(12):
        member.fail()
        pauses.append(member.barred_rounds)
        member.enter_round(False)
        assert member.barred_rounds == pauses[-1], "only rounds that it was part of count"
        while not member.can_own:
            member.enter_round(True)
    assert pauses == [4, 8, 16, 32] + [64] * 8


def test_losses_are_weighted_and_stay_between_them() -> None:
    assert weighted_mean([(1.0, 1), (2.0, 3)]) == pytest.approx(1.75)
    assert weighted_mean([]) is None
    assert weighted_mean([(1e30, 3), (1e30, 7), (1e30, 2**62)]) == 1e30


# Verdicts -----------------------------------------------------------------------------------------------

PLAN = some_plan({0: 10, 1: 20, 2: 30})
A, B, C = (peer_name(number) for number in range(3))


def test_waits_for_everybody() -> None:
    reports = {A: report(PLAN), B: report(PLAN)}
    assert judge(PLAN, reports, {A, B, C}, overdue=False, enough=False) is None


class _Counted(tuple[bytes | None, ...]):
    """Digests of a report that notes how often one of them was looked at."""

    looked = 0

    def __getitem__(self, index: object) -> Any:
        _Counted.looked += 1
        return super().__getitem__(index)  # type: ignore[index]


def test_reports_are_counted_only_when_that_can_end_the_round() -> None:
    def looks(reports: dict[str, tuple[int, ...]], *, enough: bool) -> int:
        _Counted.looked = 0
        said = {peer: report(PLAN, missing=missing) for peer, missing in reports.items()}
        counted = {peer: one.model_copy(update={"digests": _Counted(one.digests)}) for peer, one in said.items()}
        assert judge(PLAN, counted, {A, B, C}, overdue=False, enough=enough) is None
        return _Counted.looked

    assert looks({A: (), B: ()}, enough=False) == 0, "it is too early whatever they say"
    assert looks({A: (), B: (0,)}, enough=True) == 2, "one part that is not safe yet is enough to go on waiting"


def test_committed_when_all_have_all() -> None:
    judgement = judge(PLAN, {one: report(PLAN) for one in (A, B, C)}, {A, B, C}, overdue=False, enough=False)
    assert judgement is not None
    assert judgement.committed
    assert judgement.digests == tuple(part_digest(PLAN, index) for index in range(3))


def test_who_only_lacks_what_others_hold_is_not_waited_for_long() -> None:
    reports = {A: report(PLAN), B: report(PLAN)}
    assert judge(PLAN, reports, {A, B, C}, overdue=False, enough=True)
    reports = {A: report(PLAN), B: report(PLAN, missing=(1,))}
    assert judge(PLAN, reports, {A, B, C}, overdue=False, enough=True) is None


def test_a_part_that_one_of_several_holds_is_not_safe() -> None:
    reports = {A: report(PLAN), B: report(PLAN, missing=(0,)), C: report(PLAN, missing=(0, 1))}
    judgement = judge(PLAN, reports, {A, B, C}, overdue=False, enough=False)
    assert judgement is not None
    assert judgement.committed
    assert judgement.digests == (None, part_digest(PLAN, 1), part_digest(PLAN, 2))
    assert judgement.failed == (A,)


def test_a_round_that_has_to_be_whole_is_not_committed_in_part() -> None:
    reports = {A: report(PLAN), B: report(PLAN, missing=(0,)), C: report(PLAN, missing=(0, 1))}
    judgement = judge(PLAN, reports, {A, B, C}, overdue=False, enough=False, whole=True)
    assert judgement is not None
    assert not judgement.committed
    assert judgement.reason == "1 of 3 parts did not arrive; a link was slow"
    assert judgement.failed == (A,)


def test_the_last_survivor_is_enough() -> None:
    judgement = judge(PLAN, {C: report(PLAN)}, {C}, overdue=False, enough=False)
    assert judgement is not None
    assert judgement.committed


def test_the_dead_hold_nothing() -> None:
    reports = {A: report(PLAN), B: report(PLAN, missing=(1,)), C: report(PLAN, missing=(0, 1, 2))}
    judgement = judge(PLAN, reports, {B, C}, overdue=False, enough=False)
    assert judgement is not None
    assert not judgement.committed, "C holds nothing, and what only B holds is not safe"
    nobody = judge(PLAN, reports, set(), overdue=False, enough=False)
    assert nobody is not None
    assert nobody.reason.startswith("3 of 3 parts")


def test_overdue() -> None:
    judgement = judge(PLAN, {A: report(PLAN)}, {A, B, C}, overdue=True, enough=False)
    assert judgement is not None
    assert judgement.failed == (), "one that says it holds everything accuses nobody"
    assert judgement.missing == (B, C)
    assert judge(PLAN, {A: report(PLAN), B: report(PLAN)}, {A, B, C}, overdue=True, enough=False)


def test_of_different_bytes_those_are_committed_that_most_hold() -> None:
    five = [peer_name(number) for number in range(5)]
    whole = some_plan(dict.fromkeys(range(5), 10))

    def judged(*odd: str) -> tuple[str, ...]:
        reports = {peer: report(whole, wrong=(1,) if peer in odd else ()) for peer in five}
        judgement = judge(whole, reports, five, overdue=False, enough=False)
        assert judgement is not None
        others = [one for index, one in enumerate(judgement.digests) if index != 1]
        assert others == [part_digest(whole, index) for index in range(5) if index != 1]
        assert judgement.digests[1] == (part_digest(whole, 1) if len(odd) < 3 else b"w" * 32)
        return judgement.failed

    owner = whole.members[whole.parts[1].owner].peer
    others = [peer for peer in five if peer != owner]
    assert judged(*others[:1]) == (), "one may have made them up"
    assert judged(*others[:2]) == (), "so may two"
    assert judged(*others[:3]) == (owner,), "three of the other four have other bytes than the owner of that part"


def test_an_owner_that_two_could_not_get_its_part_from_has_failed() -> None:
    def judged(*accusers: str) -> tuple[str, ...]:
        reports = {
            peer: report(PLAN).model_copy(update={"failed": (0,) if peer in accusers else ()}) for peer in (A, B, C)
        }
        judgement = judge(PLAN, reports, {A, B, C}, overdue=False, enough=False)
        assert judgement is not None
        assert judgement.committed
        return judgement.failed

    assert judged() == ()
    assert judged(B) == ()
    assert judged(B, C) == (A,)
    reports = {A: report(PLAN).model_copy(update={"failed": (1,)}), B: report(PLAN)}
    judgement = judge(PLAN, reports, {A, B, C}, overdue=True, enough=True)
    assert judgement is not None
    assert judgement.failed == (), "not either when a third one is silent"


def test_in_a_grid_most_of_a_row_or_of_a_column_put_a_row_reducer_out_while_nobody_has_credit() -> None:
    everybody = {peer_name(number): Member(entry(number), CPU, 0.0) for number in range(16)}
    says = dict.fromkeys(everybody, ready(10, INITIAL))
    whole = plan_round(3, (2, INITIAL), 2_000_000, says, everybody, PlanRules(4, 0))
    assert whole is not None
    peers = [member.peer for member in whole.members]
    accused = whole.columns[0][0]
    column = {peers[one] for one in whole.columns[0]} - {peers[accused]}
    row = {one.peer for one in whole.members if one.row == whole.members[accused].row} - {peers[accused]}
    others = set(peers) - row - column - {peers[accused]}
    assert (len(column), len(row)) == (3, 3)

    def judged(accusers: set[str]) -> tuple[str, ...]:
        reports = {
            peer: report(whole).model_copy(update={"failed": (accused,) if peer in accusers else ()}) for peer in peers
        }
        judgement = judge(whole, reports, peers, overdue=False, enough=False)
        assert judgement is not None
        return judgement.failed

    assert judged(others) == (), "they get nothing from it"
    assert judged({min(column)}) == ()
    assert judged(set(sorted(column)[:2])) == (peers[accused],)
    assert judged(set(sorted(row)[:2])) == (peers[accused],)


def test_different_bytes_that_one_holds_each_are_void() -> None:
    reports = {A: report(PLAN), B: report(PLAN, wrong=(1,))}
    assert judge(PLAN, reports, {A, B, C}, overdue=False, enough=False) is None, "C may decide it"
    judgement = judge(PLAN, reports, {A, B}, overdue=False, enough=False)
    assert judgement is not None
    assert judgement.digests == (part_digest(PLAN, 0), None, part_digest(PLAN, 2))


# How long to wait ---------------------------------------------------------------------------------------


def test_little_is_known_at_first() -> None:
    delays = Delays(DEADLINES.ready_s)
    for _ in range(7):
        delays.saw(0.1)
        assert delays.wait_s == DEADLINES.ready_s
    delays.saw(0.1)
    assert delays.wait_s == pytest.approx(10.1)


def test_one_straggler_does_not_make_everybody_wait() -> None:
    delays = Delays(DEADLINES.ready_s)
    for seconds in [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 29.0]:
        delays.saw(seconds)
    assert delays.wait_s == pytest.approx(10.0 + 2.0 + 4 * 1.0)


def test_it_follows_what_rounds_take_now_and_never_exceeds_the_patience() -> None:
    delays = Delays(DEADLINES.ready_s)
    for _ in range(300):
        delays.saw(25.0)
    assert delays.wait_s == DEADLINES.ready_s
    for _ in range(300):
        delays.saw(-1.0)
    assert delays.wait_s == pytest.approx(10.0)


# Membership ---------------------------------------------------------------------------------------------


def test_deadlines_of_silence() -> None:
    members = Membership()
    for number in range(2):
        members.join(MemberJoined(entry=entry(number), device=CPU), 10.0 * number, 0)
    assert members.silent(30.0, 30.0) == []
    assert members.silent(31.0, 30.0) == [A]
    members.lose(MemberLost(peer=A, reason="silent"))
    assert members.silent(99.0, 30.0) == [B]
    assert [one.peer for one in members.roster()] == [B]
    assert members.roster_version == 3


def test_the_maker_of_a_part_is_who_has_signed_for_its_committed_bytes() -> None:
    part, digests = PLAN.parts[0], report(PLAN).digests
    peers = [PLAN.members[one].peer for one in (part.owner, *part.stand_ins)]

    def signed(by: str, wrong: tuple[int, ...] = ()) -> PeerToCoordinatorRoundReport:
        made = MadePart(part=0, chunks=((0, 1),), signature=by.encode() * 4)
        return report(PLAN, wrong=wrong).model_copy(update={"made": (made,)})

    def maker(*reports: PeerToCoordinatorRoundReport, committed: tuple[bytes | None, ...] = digests) -> bytes | None:
        first, *others = makers_of(PLAN, dict(zip(peers, reports, strict=False)), committed)
        assert others == [None] * (len(PLAN.parts) - 1)
        assert first is None or PLAN.members[first.member].peer.encode() * 4 == first.signature
        return None if first is None else first.signature[:16]

    owner, stand_in = (signed(peer) for peer in peers[:2])
    assert maker(owner, stand_in) == peers[0].encode()
    assert maker(report(PLAN), stand_in) == peers[1].encode()
    assert maker(signed(peers[0], wrong=(0,)), stand_in) == peers[1].encode(), "it has signed for other bytes"
    assert maker(report(PLAN)) is None
    assert maker(owner, stand_in, committed=(None, *digests[1:])) is None
