"""Which replica a micro-batch goes to: shares, bans and time-outs, on a virtual clock."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.swarm.pipeline.flow import Flow, Replica, steady
from tests.swarm.pipeline.router_views import view, wake_s, way

from shoal.swarm.pipeline.engine.routing import Router

PATIENCE_S = 12.0


def router(*peers: str) -> Router:
    made: Router = Router("me", PATIENCE_S)
    made.set_replicas(1, dict.fromkeys(peers, 1.0), 0.0)
    return made


# Shares ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("senders", [1, 3])
@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_shares_are_as_the_speeds(senders: int, delay_s: float) -> None:
    flow = Flow({"slow": steady(1), "fast": steady(4)}, senders, window=8, delay_s=delay_s)
    flow.run(100)
    assert flow.shares(20) == pytest.approx({"slow": 0.2, "fast": 0.8}, abs=0.02)
    assert flow.rate(20) > 0.98 * 5
    for sender in flow.routers:
        assert flow.shares(20, sender)["slow"] == pytest.approx(0.2, abs=0.03)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=5), st.integers(1, 3), st.sampled_from([0.0, 0.02, 0.1]))
def test_any_replicas_are_kept_busy_by_whoever_has_enough_under_way(
    rates: list[int], senders: int, delay_s: float
) -> None:
    replicas = {f"r{i}": steady(rate) for i, rate in enumerate(rates)}
    # Enough to cover the delay, and one more for each replica.
    flow = Flow(replicas, senders, window=2 * len(rates) + int(delay_s * sum(rates)) + 1, delay_s=delay_s)
    flow.run(40)
    assert flow.rate(15) > 0.95 * sum(rates)
    expected = {f"r{i}": rate / sum(rates) for i, rate in enumerate(rates)}
    assert flow.shares(15) == pytest.approx(expected, abs=0.03)


def test_a_wrong_plan_is_outgrown() -> None:
    flow = Flow({"slow": steady(1), "fast": steady(4)}, window=8, prior={"slow": 40.0, "fast": 10.0})
    flow.run(60)
    assert flow.shares(10) == pytest.approx({"slow": 0.2, "fast": 0.8}, abs=0.03)


def test_planned_speeds_are_followed_from_the_first_micro_batch_on() -> None:
    made: Router = Router("me", PATIENCE_S)
    made.set_replicas(1, {"slow": 1.0, "fast": 4.0}, 0.0)
    picked = []
    for key in range(10):
        peer = made.pick(1, 0.0)
        assert peer is not None
        made.sent(peer, key, 0.0)
        picked.append(peer)
    assert picked.count("slow") == 2
    assert "slow" in picked[:5], "turns are interleaved"
    assert "slow" in picked[5:], "turns are interleaved"


def test_the_first_twenty_micro_batches_go_as_planned() -> None:
    """Before and while the first ones come back; without a plan the slow one gets more of them."""
    rates = {"slow": 1.0, "fast": 4.0}
    replicas = {peer: steady(rate) for peer, rate in rates.items()}
    found = {}
    for name, prior in {"planned": rates, "unplanned": {}}.items():
        flow = Flow(replicas, window=8, prior=prior)
        flow.run(10)
        found[name] = [peer for _, peer in flow.picked[:20]].count("slow")
        for replica in replicas.values():
            replica.free_s, replica.held = 0.0, 0
    assert found["planned"] == 4
    assert found["unplanned"] > 4


def test_a_planned_newcomer_gets_its_share_though_others_send_to_it_too() -> None:
    """The plan's rate is what a replica does for everybody; what was measured of the others is one sender's part."""
    flow = Flow({"a": steady(4), "b": steady(4)}, senders=8, window=2, prior={"a": 4.0, "b": 4.0})
    flow.run(60)
    flow.replicas["new"] = steady(4)
    for made in flow.routers.values():
        made.set_replicas(1, {"a": 4.0, "b": 4.0, "new": 4.0}, 60)
    flow.run(120)
    first = [peer for at_s, peer in flow.picked if at_s > 60][:24]
    assert 6 <= first.count("new") <= 12
    assert flow.shares(70)["new"] == pytest.approx(1 / 3, abs=0.03)


def test_far_links_share_too_though_nothing_saturates_them() -> None:
    flow = Flow({"a": steady(100), "b": steady(100)}, delay_s=5.0, prior={"a": 3.0, "b": 1.0})
    flow.run(200)
    assert flow.shares(50) == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.05)


def test_the_slowest_is_not_starved() -> None:
    flow = Flow({"slow": steady(0.1), "a": steady(5), "b": steady(5)}, window=8, patience_s=60)
    flow.run(200)
    assert flow.shares()["slow"] == pytest.approx(0.1 / 10.1, rel=0.3)


def test_a_slowed_replica_loses_its_share_within_a_few_micro_batches() -> None:
    slowed = Replica(lambda now_s: 0.25 if now_s < 50 else 2.5)
    flow = Flow({"slowed": slowed, "steady": steady(4)}, window=6)
    flow.run(80)
    before = [peer for at_s, peer in flow.picked if 20 < at_s <= 50]
    assert before.count("slowed") / len(before) == pytest.approx(0.5, abs=0.03)
    at_once = [peer for at_s, peer in flow.picked if 50 < at_s <= 53]
    assert at_once.count("slowed") <= 2, "a few micro-batches"
    after = [peer for at_s, peer in flow.picked if at_s > 53]
    assert after.count("slowed") / len(after) < 0.13
    assert flow.rate(55) > 0.9 * 4.4


def test_one_that_is_fast_again_gets_its_share_again() -> None:
    slowed = Replica(lambda now_s: 2.5 if 50 <= now_s < 80 else 0.25)
    flow = Flow({"slowed": slowed, "steady": steady(4)}, window=6)
    flow.run(140)
    assert flow.shares(110)["slowed"] == pytest.approx(0.5, abs=0.05)


def test_a_dead_replica_gets_nothing_and_what_it_had_is_named() -> None:
    flow = Flow({"dead": steady(4), "steady": steady(4)}, window=6)
    flow.run(20)
    had = view(flow.routers["s0"], 1, 20)["dead"].queue
    assert had
    flow.kill("dead")
    assert flow.free["s0"] == had, "as many may be sent again"
    before = len(flow.picked)
    flow.run(60)
    assert {peer for _, peer in flow.picked[before:]} == {"steady"}
    assert flow.rate(25) > 0.95 * 4


def test_a_newcomer_gets_its_share_and_no_more() -> None:
    flow = Flow({"old": steady(4)}, window=6)
    flow.run(50)
    flow.replicas["new"] = steady(4)
    flow.routers["s0"].set_replicas(1, dict.fromkeys(flow.replicas), 50)
    flow.run(100)
    first = [peer for at_s, peer in flow.picked if at_s >= 50][:12]
    assert 4 <= first.count("new") <= 8
    assert flow.shares(55)["new"] == pytest.approx(0.5, abs=0.03)


def test_who_was_passed_over_saves_up_no_turns() -> None:
    # Full for 40 s, it has its share afterwards, and not all that it missed.
    full = Replica(lambda now_s: 0.25, places=0)
    flow = Flow({"full": full, "open": steady(4)}, window=6)
    flow.run(40)
    assert view(flow.routers["s0"], 1, 40)["full"].standing == "trusted", "full is not ill"
    assert flow.rate(5) > 0.95 * 4
    full.places = 6
    flow.run(80)
    after = [peer for at_s, peer in flow.picked if at_s > 43][:20]
    assert 7 <= after.count("full") <= 13


def test_full_replicas_are_kept_busy() -> None:
    replicas = {name: Replica(lambda now_s: 0.25, places=2) for name in "ab"}
    flow = Flow(replicas, senders=3, window=4, delay_s=0.05)
    flow.run(100)
    assert flow.rate(20) > 0.9 * 8
    for sender in flow.routers:
        seen = view(flow.routers[sender], 1, 100)
        assert {one.standing for one in seen.values()} == {"trusted"}


def test_the_same_events_give_the_same_choices() -> None:
    picked = []
    for _ in range(2):
        flow = Flow({"a": steady(3), "b": steady(2), "c": steady(5)}, senders=2, delay_s=0.1)
        flow.run(30)
        picked.append(flow.picked)
    assert picked[0] == picked[1]


def test_senders_begin_at_different_replicas() -> None:
    first = set()
    for number in range(20):
        made: Router = Router(f"sender {number}", PATIENCE_S)
        made.set_replicas(1, dict.fromkeys("abcd", 1.0), 0.0)
        first.add(made.pick(1, 0.0))
    assert first == set("abcd")


# Bans and probation ------------------------------------------------------------------------------------------


def test_one_failure_is_probation_and_a_second_one_a_ban_that_doubles() -> None:
    assert bans_in_patiences(router("a", "b"), avoid={"b"}) == [1, 2, 4, 8, 16, 32, 32, 32]


def test_a_stage_whose_replicas_are_all_banned_tries_each_again_after_the_patience() -> None:
    assert bans_in_patiences(router("a"), avoid=set()) == [1] * 8
    made = router("a", "b")
    for key in range(4):
        made.sent("b", key, 0.0)
        made.failed("b", key, 0.0)
    assert view(made, 1, 0.0)["b"].standing == "banned"
    assert bans_in_patiences(made, avoid={"b"}) == [1, 2, 4, 8, 16, 32, 32, 32], "b is let out, and free again"


def bans_in_patiences(made: Router, avoid: set[str]) -> list[float]:
    """How long each of eight bans of a lasts, of which each begins with its first micro-batch after the one before."""
    now_s, key = 0.0, 100
    made.sent("a", key, now_s)
    made.failed("a", key, now_s)
    assert view(made, 1, now_s)["a"].standing == "probation"
    bans_s = []
    for _ in range(8):
        key += 1
        assert made.pick(1, now_s, avoid) == "a"
        made.sent("a", key, now_s)
        assert made.pick(1, now_s, avoid) is None, "one at a time on probation"
        made.failed("a", key, now_s)
        assert view(made, 1, now_s)["a"].standing == "banned"
        assert made.pick(1, now_s, avoid) is None
        ends_s = wake_s(made, now_s)
        assert ends_s is not None
        assert made.pick(1, ends_s - 0.001, avoid) is None
        bans_s.append((ends_s - now_s) / PATIENCE_S)
        now_s = ends_s
    return bans_s


def test_who_delivers_on_probation_is_trusted_and_in_time_forgiven() -> None:
    made, now_s = router("a", "b"), 0.0
    for key in range(3):
        made.sent("a", key, now_s)
        made.failed("a", key, now_s)
        now_s = wake_s(made, now_s) or now_s
    assert now_s == PATIENCE_S + 2 * PATIENCE_S, "the ban, and the second one, twice as long"
    for key in range(10, 18):
        assert view(made, 1, now_s)["a"].standing == ("trusted" if key > 10 else "probation")
        made.sent("a", key, now_s)
        assert made.finished("a", key, now_s + 1)
        now_s += 1
    for key in (20, 21):
        made.sent("a", key, now_s)
        made.failed("a", key, now_s)
    assert wake_s(made, now_s) == now_s + PATIENCE_S, "after eight in a row it begins with a short ban again"


def test_what_failed_together_is_one_failure() -> None:
    made = router("a")
    for key in range(4):
        made.sent("a", key, 0.0)
    for key in range(4):
        made.failed("a", key, 5.0)
    assert view(made, 1, 5.0)["a"].standing == "probation"


def test_a_replica_that_hangs_is_banned_and_comes_back() -> None:
    hangs = Replica(lambda now_s: None if 30 <= now_s < 60 else 0.25)
    flow = Flow({"hangs": hangs, "steady": steady(4)}, window=6)
    flow.run(55)
    assert view(flow.routers["s0"], 1, 55)["hangs"].standing == "banned"
    assert hangs.dropped <= 6, "the window once, and single ones on probation"
    assert [peer for at_s, peer in flow.picked if 45 < at_s <= 55].count("hangs") <= 1
    assert flow.rate(45) > 0.8 * 4
    flow.run(140)
    assert view(flow.routers["s0"], 1, 140)["hangs"].standing == "trusted"
    assert flow.shares(110)["hangs"] == pytest.approx(0.5, abs=0.05)


def test_leaving_the_stage_heals_nobody_but_dying_is_forgotten() -> None:
    made = router("a", "b")
    for key in range(2):
        made.sent("a", key, 0.0)
        made.failed("a", key, 0.0)
    made.set_replicas(1, {"b": None}, 1.0)
    made.set_replicas(1, {"a": None, "b": None}, 2.0)
    assert view(made, 1, 2.0)["a"].standing == "banned"
    made.retire("a")
    made.set_replicas(1, {"a": None, "b": None}, 3.0)
    assert view(made, 1, 3.0)["a"].standing == "trusted"


def test_failures_count_against_the_estimate() -> None:
    made, now_s = router("a"), 0.0
    for key in range(8):
        made.sent("a", key, now_s)
        now_s += 1
        made.finished("a", key, now_s)
    made.sent("a", 8, now_s)
    made.failed("a", 8, now_s)  # the link broke at once
    assert view(made, 1, now_s)["a"].rate == pytest.approx(8 / 15)


# What is pending, and for how long ---------------------------------------------------------------------------


def test_the_way_back_is_the_way_there_while_it_is_pending() -> None:
    made = router("a", "b")
    made.sent("a", 1, 0.0)
    made.sent("b", 2, 0.0)
    assert (way(made, 1), way(made, 2), way(made, 3)) == ("a", "b", None)
    assert not made.finished("b", 1, 1.0), "nobody else's gradient counts"
    assert made.retire("a") == (1,)
    assert way(made, 1) is None
    assert not made.finished("a", 1, 1.0)
    assert made.finished("b", 2, 1.0)
    assert not made.finished("b", 2, 1.0), "a second time"
    assert not made.failed("b", 2, 1.0)
    assert not made.refused("b", 2, 1.0)


def test_one_that_left_the_stage_may_finish_what_it_has() -> None:
    made = router("a", "b")
    made.sent("a", 1, 0.0)
    made.set_replicas(1, {"b": None}, 1.0)
    assert made.pick(1, 1.0) == "b"
    assert way(made, 1) == "a"
    assert made.finished("a", 1, 2.0)


def test_little_is_known_at_first_so_the_patience_counts() -> None:
    made = router("a")
    made.sent("a", 1, 5.0)
    assert made.overdue(5.0 + PATIENCE_S - 0.001) == ()
    assert wake_s(made, 5.0) == 5.0 + PATIENCE_S
    assert made.overdue(5.0 + PATIENCE_S) == (1,)


def test_later_a_third_of_it_and_what_it_has_been_taking() -> None:
    made, now_s = router("a"), 0.0
    for key in range(9):
        made.sent("a", key, now_s)
        now_s += 0.5
        made.finished("a", key, now_s)
    made.sent("a", 9, now_s)
    made.sent("a", 10, now_s + 0.25)
    assert made.overdue(now_s + PATIENCE_S / 3 + 0.499) == ()
    assert made.overdue(now_s + PATIENCE_S / 3 + 0.501) == (9,)
    made.failed("a", 9, now_s + PATIENCE_S / 3 + 0.501)
    assert made.overdue(now_s + PATIENCE_S / 3 + 0.501) == ()
    assert made.overdue(now_s + PATIENCE_S / 3 + 0.751) == (10,)


def test_who_delivers_others_is_waited_for_but_not_for_ever() -> None:
    made, now_s = router("a"), 0.0
    made.sent("a", -1, now_s)
    late_s = []
    for key in range(60):
        made.sent("a", key, now_s)
        now_s += 0.5
        made.finished("a", key, now_s)
        if made.overdue(now_s) == (-1,):
            late_s.append(now_s)
    assert late_s[0] == PATIENCE_S + 0.5


def test_what_is_withdrawn_says_nothing_of_the_replica() -> None:
    made = router("a")
    made.sent("a", 1, 0.0)
    before = view(made, 1, 0.0)["a"]
    assert made.withdrawn("a", 1)
    assert way(made, 1) is None
    assert not made.withdrawn("a", 1)
    assert made.pick(1, 0.0) == "a", "nobody is full"
    after = view(made, 1, 30.0)["a"]
    assert (after.rate, after.queue, after.standing) == (before.rate, 0, "trusted")


def test_a_full_replica_is_asked_again_later_and_later() -> None:
    made, now_s, pauses_s = router("a"), 0.0, []
    made.set_replicas(2, {"b": 10.0}, now_s)
    for key in range(7):
        made.sent("b", key, now_s)
        assert made.refused("b", key, now_s)
        assert way(made, key) is None
        assert made.pick(2, now_s) is None
        again_s = wake_s(made, now_s)
        assert again_s is not None
        assert made.pick(2, again_s) == "b"
        pauses_s.append(again_s - now_s)
        now_s = again_s
    assert pauses_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    made.sent("b", 100, now_s)
    made.sent("b", 101, now_s)
    made.refused("b", 101, now_s)
    made.finished("b", 100, now_s + 0.1)
    assert made.pick(2, now_s + 0.1) == "b", "it has room again"


class Anything(RuleBasedStateMachine):
    """Whatever is reported, in whatever order: nobody is picked who may not be, and the books balance."""

    def __init__(self) -> None:
        super().__init__()
        self.router: Router = Router("me", PATIENCE_S)
        self.now_s = 0.0
        self.present: set[str] = set()
        self.pending: dict[int, str] = {}
        self.sent = self.settled = 0

    @rule(present=st.sets(st.sampled_from("abcde")), rate=st.none() | st.floats(0.01, 100))
    def replicas_change(self, present: set[str], rate: float | None) -> None:
        self.present = present
        self.router.set_replicas(1, dict.fromkeys(present, rate), self.now_s)

    @rule(seconds=st.floats(0, 3 * PATIENCE_S))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(avoid=st.sets(st.sampled_from("abcde"), max_size=2), count=st.integers(1, 4))
    def send(self, avoid: set[str], count: int) -> None:
        for _ in range(count):
            seen = view(self.router, 1, self.now_s)
            peer = self.router.pick(1, self.now_s, avoid)
            if peer is None:
                return
            assert peer in self.present - avoid
            assert seen[peer].standing != "banned"
            assert seen[peer].standing == "trusted" or not seen[peer].queue
            self.sent += 1
            self.router.sent(peer, self.sent, self.now_s)
            self.pending[self.sent] = peer

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), how=st.sampled_from(["finished", "failed", "refused", "withdrawn"]))
    def settle(self, data: st.DataObject, how: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.pending)))
        tell: dict[str, Callable[[str, int, float], bool]] = {
            "finished": self.router.finished,
            "failed": self.router.failed,
            "refused": self.router.refused,
            "withdrawn": lambda peer, key, now_s: self.router.withdrawn(peer, key),
        }
        assert not tell[how]("somebody else", key, self.now_s)
        peer = self.pending.pop(key)
        assert tell[how](peer, key, self.now_s)
        for again in tell.values():
            assert not again(peer, key, self.now_s)
        self.settled += 1

    @rule(peer=st.sampled_from("abcde"))
    def die(self, peer: str) -> None:
        lost = self.router.retire(peer)
        assert set(lost) == {key for key, at in self.pending.items() if at == peer}
        self.present -= {peer}
        self.settled += len(lost)
        for key in lost:
            del self.pending[key]

    @rule()
    def time_out(self) -> None:
        for key in self.router.overdue(self.now_s):
            assert self.router.failed(self.pending.pop(key), key, self.now_s)
            self.settled += 1

    @invariant()
    def the_books_balance(self) -> None:
        assert self.sent == self.settled + len(self.pending)
        assert {key: way(self.router, key) for key in range(1, self.sent + 1) if way(self.router, key)} == self.pending
        seen = view(self.router, 1, self.now_s)
        assert seen.keys() == self.present
        for peer, one in seen.items():
            assert one.queue == sum(at == peer for at in self.pending.values())
            assert one.rate is None or one.rate > 0

    @invariant()
    def everybody_well_gets_some_in_the_end(self) -> None:
        due_s = wake_s(self.router, self.now_s)
        assert due_s is None or due_s > self.now_s
        if self.present and self.router.pick(1, self.now_s) is None:
            assert self.router.overdue(self.now_s) or (due_s is not None and due_s - self.now_s <= 32 * PATIENCE_S)


TestAnything = Anything.TestCase
