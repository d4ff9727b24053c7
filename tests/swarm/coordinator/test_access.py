"""How often and how many may join, on a virtual clock."""

from __future__ import annotations

import heapq
from collections import Counter
from contextlib import ExitStack

import pytest
from tests.fakes.memory_coordinator import curve_keys, identity
from tests.swarm.coordinator.test_round_scope import lost
from tests.swarm.coordinator.world import CPU, World, entry, heartbeat, run_file

from shoal.swarm.coordinator.access import (
    AT_ONCE,
    AT_ONCE_PER_NETWORK,
    OBSERVERS_PER_NETWORK,
    REJOINS_PER_MINUTE,
    Access,
    choose_evicted,
)
from shoal.swarm.errors import NotAdmitted, RunEnded, Superseded, TryLater
from shoal.swarm.protocol.messages import PeerToCoordinatorRequestLease
from shoal.swarm.protocol.run_file import AccessSection
from shoal.swarm.protocol.types import Certificate, Role

NEAR, FAR = "10.0.0.0/24", "10.0.1.0/24"


def limits(**changes: int) -> AccessSection:
    return AccessSection.model_validate({"admission": "open"} | changes)


def taken(access: Access, network: str, seconds: float, per_s: int = 20, is_observer: bool = False) -> int:
    """How many of those who try ``per_s`` times a second come in."""
    count = 0
    for number in range(int(seconds * per_s)):
        try:
            access.take(network, is_observer, 100.0 + number / per_s)
        except TryLater:
            continue
        count += 1
    return count


def test_one_network_has_a_minutes_worth_at_once_and_then_its_rate() -> None:
    assert taken(Access(limits()), NEAR, 0.05) == 1
    assert taken(Access(limits()), NEAR, 300.0, 50) == pytest.approx(60 + 300, abs=2)


def test_a_flood_from_one_network_leaves_others_their_joins() -> None:
    access = Access(limits())
    assert taken(access, NEAR, 60.0, 50) > 100
    access.take(FAR, False, 160.0)


def test_all_networks_together_have_a_limit() -> None:
    access = Access(limits(joins_per_minute=100))
    count = 0
    for number in range(1000):
        try:
            access.take(f"10.1.{number}.0/24", False, 100.0)
        except TryLater:
            continue
        count += 1
    assert count == 100
    with pytest.raises(
        TryLater, match=r"lets 100 a minute in, and so many have come: try again in 1 s .*joins_per_minute"
    ):
        access.take("10.2.0.0/24", False, 100.0)


def test_those_who_only_look_take_nothing_from_those_who_train() -> None:
    access = Access(limits(joins_per_minute=100))
    assert taken(access, NEAR, 2.0, 100, is_observer=True) < 70
    assert taken(access, FAR, 2.0, 100, is_observer=True) < 70
    access.take(NEAR, False, 102.0)


def test_a_refusal_says_when_to_try_again_and_then_there_is_room() -> None:
    access = Access(limits(joins_per_minute_per_network=2))
    for _ in range(2):
        access.take(NEAR, False, 0.0)
    with pytest.raises(TryLater, match=r"2 a minute in from one network.*10\.0\.0\.0/24: try again in 30 s"):
        access.take(NEAR, False, 0.0)
    with pytest.raises(TryLater, match="try again in 1 s"):
        access.take(NEAR, False, 29.5)
    access.take(NEAR, False, 30.0)


def test_a_known_identity_has_its_own_joins() -> None:
    access = Access(limits())
    for _ in range(REJOINS_PER_MINUTE):
        access.take_known("a", 0.0)
    with pytest.raises(TryLater, match="try again in 2 s"):
        access.take_known("a", 0.0)
    access.take_known("b", 0.0)


def test_few_joins_are_under_way_at_one_time() -> None:
    access = Access(limits())
    entered = []
    for number in range(AT_ONCE_PER_NETWORK):
        entered.append(access.under_way(bytes([number]), NEAR, False))
        entered[-1].__enter__()
    with pytest.raises(TryLater, match="at this moment"), access.under_way(b"x", NEAR, False):
        pass
    with access.under_way(b"x", NEAR, True), access.under_way(b"y", FAR, False):
        pass
    with pytest.raises(TryLater, match="earlier request"), access.under_way(bytes([1]), FAR, False):
        pass
    for number in range(AT_ONCE - AT_ONCE_PER_NETWORK):
        entered.append(access.under_way(bytes([1, number]), f"{number}", False))
        entered[-1].__enter__()
    with pytest.raises(TryLater, match="at this moment"), access.under_way(b"x", FAR, False):
        pass
    with access.under_way(b"x", FAR, True):
        pass
    for one in entered:
        one.__exit__(None, None, None)
    assert access._under_way == {}


def test_64_machines_of_a_lab_that_start_at_once_are_in_within_two_minutes() -> None:
    """They cannot be reached, so that each try takes as long as it may, and all come back as late as they may."""
    access, takes_s = Access(limits()), 4.0
    tries = [(0.0, 1.0, number) for number in range(64)]
    under_way: list[tuple[float, ExitStack]] = []
    last_s = 0.0
    while tries:
        now_s, wait_s, number = heapq.heappop(tries)
        for ended in [one for one in under_way if one[0] <= now_s]:
            under_way.remove(ended)
            ended[1].close()
        try:
            with ExitStack() as stack:
                stack.enter_context(access.under_way(bytes([number]), NEAR, False))
                access.take(NEAR, False, now_s)
                under_way.append((now_s + takes_s, stack.pop_all()))
        except TryLater:
            heapq.heappush(tries, (now_s + wait_s, min(2 * wait_s, 15.0), number))
        else:
            last_s = now_s
    assert last_s < 120


def test_the_most_crowded_network_is_evicted_from_until_all_have_as_many() -> None:
    here = [("a", NEAR, 1), ("b", NEAR, 0), ("c", NEAR, 0), ("d", FAR, 0)]
    assert choose_evicted("other", here) == "c", "the last to come of those who have done least"
    assert choose_evicted(FAR, here) == "c", "two of each, then"
    assert choose_evicted(FAR, here[1:]) is None, "it would be the most crowded one itself"
    assert choose_evicted(NEAR, here) is None
    assert choose_evicted("other", here[2:]) is None
    assert choose_evicted("other", []) is None


# In the machine -----------------------------------------------------------------------------------------------


def certificate(number: int, process: int = 0) -> Certificate:
    return identity(number).certify(curve_keys(number + 50 * process))


class Admissions:
    """A machine whose members come by ``come``, as the service has them come."""

    def __init__(self, **access: int) -> None:
        self.world = World(run_file().model_copy(update={"access": limits(**access)}))
        self.machine, self.scope = self.world.machine, self.world.scope

    def come(
        self, number: int, network: str = NEAR, process: int = 0, role: Role = "trainer", signed: bool = True
    ) -> str:
        shown = certificate(number, process)
        if not signed:
            shown = shown.model_copy(update={"signature": bytes(64)})
        with self.scope.admission.joining(shown, role, network, self.world.now_s) as peer:
            known = entry(0, role=role).model_copy(update={"peer": peer, "certificate": shown})
            self.scope.admission.join(known, CPU, self.world.now_s, network)
        return peer

    def wins_credit(self, peer: str) -> None:
        member = self.scope.membership.members[peer]
        member.credit, member.has_credit = 1, True

    def flood(self, first: int, count: int, network: str = NEAR) -> int:
        """How many of so many strangers got in."""
        let_in = 0
        for number in range(first, first + count):
            try:
                self.come(number, network)
            except TryLater:
                continue
            let_in += 1
        return let_in


def test_a_flood_of_strangers_keeps_out_neither_members_nor_records_nor_other_networks() -> None:
    door = Admissions()
    member, recorded = door.come(1), door.come(2)
    door.wins_credit(recorded)
    door.machine.scope.admission.leave(recorded, "done", door.world.now_s)
    assert door.flood(10, 200) == 60 - 2
    assert door.come(1, process=1) == member
    assert door.come(2, process=1) == recorded
    door.come(300, FAR)
    with pytest.raises(TryLater, match="from one network"):
        door.come(301)


def test_who_claims_to_be_a_member_and_is_not_uses_up_nothing_of_it() -> None:
    door = Admissions()
    member = door.come(1)
    for _ in range(2 * REJOINS_PER_MINUTE):
        with pytest.raises(NotAdmitted, match="signature"):
            door.come(1, process=1, signed=False)
    assert door.come(1, process=1) == member


def test_a_member_that_joins_all_the_time_is_slowed_down_by_itself() -> None:
    door = Admissions()
    for _ in range(1 + REJOINS_PER_MINUTE):
        door.come(1)
    with pytest.raises(TryLater, match="this identity has joined"):
        door.come(1)
    door.come(2)


def test_a_certificate_that_proves_nothing_costs_a_stranger_its_try() -> None:
    door = Admissions(joins_per_minute_per_network=5)
    for _ in range(5):
        with pytest.raises(NotAdmitted, match="signature"):
            door.come(1, signed=False)
    with pytest.raises(TryLater):
        door.come(1, signed=False)


def test_processes_that_were_replaced_and_runs_that_are_over_are_said_first() -> None:
    door = Admissions(joins_per_minute_per_network=2)
    door.come(1)
    door.come(1, process=1)
    with pytest.raises(Superseded):
        door.come(1)
    door.come(2)
    door.machine.scope.round.phase = "ended"
    with pytest.raises(RunEnded):
        door.come(3)
    door.come(4, role="observer")


def test_places_without_a_record_are_shared_among_networks() -> None:
    door = Admissions(members_without_credit=6)
    assert door.flood(10, 50) == 6
    with pytest.raises(TryLater, match="full: it takes no more than 6 members without credit"):
        door.come(99)
    assert [door.flood(100 + 10 * number, 9, f"10.1.{number}.0/24") for number in range(3)] == [3, 2, 1]
    alive = [one.network for one in door.machine.scope.membership.members.values() if one.alive]
    assert len(alive) == 6
    assert max(Counter(alive).values()) == 2
    left = [one.left for one in door.machine.scope.membership.members.values() if not one.alive]
    assert set(left) == {"made room for another network"}


def test_who_has_credit_takes_no_newcomers_place_and_makes_room_for_two_of_them() -> None:
    door = Admissions(members_per_network=3)
    peers = [door.come(number) for number in range(1, 4)]
    with pytest.raises(TryLater, match=r"has 3 members without credit from the network 10\.0\.0\.0/24"):
        door.come(4)
    for peer in peers:
        door.wins_credit(peer)
    assert door.flood(4, 10) == 3
    assert limits().newcomers(0) == 128
    assert limits().newcomers(100) == 200
    assert limits(members_without_credit=5).newcomers(100) == 5


def test_guests_have_places_of_their_own() -> None:
    door = Admissions()
    for number in range(OBSERVERS_PER_NETWORK):
        door.come(number + 10, role="observer")
    with pytest.raises(TryLater, match="guests from the network"):
        door.come(9, role="observer")
    door.come(9)


def test_a_snapshot_keeps_the_networks_of_members() -> None:
    door = Admissions()
    peer = door.come(1, FAR)
    door.machine.log.take()
    kept = door.machine.scope.snapshot()
    assert kept is not None
    other = World(run_file()).machine
    other.log.replay(other.scope, [kept], 0.0)
    assert other.scope.membership.members[peer].network == FAR


# Idle newcomers -----------------------------------------------------------------------------------------------


def wait(world: World, seconds: float, **says: object) -> None:
    """It heartbeats and says so all along; ``done``: of a download, in percent."""
    until_s = world.now_s + seconds
    while world.now_s < until_s and world.scope.membership.members[entry(0).peer].alive:
        world.scope.heartbeat(entry(0).peer, heartbeat(**says), world.now_s)
        world.tick(0.25)


IDLE_S = 4 * (20.0 + 4 * 3.0)


def test_a_newcomer_that_gets_on_with_nothing_leaves_its_place() -> None:
    world = World(run_file())
    world.scope.admission.join(entry(0), CPU, world.now_s)
    wait(world, IDLE_S - 2, anchor_version=None, state_digest=None, activity="joining")
    assert lost(world) == []
    wait(world, 10, anchor_version=None, state_digest=None, activity="joining")
    assert lost(world) == [(entry(0).peer, "idle")]
    world.scope.admission.join(entry(0), CPU, world.now_s)


@pytest.mark.parametrize("what", ["activity", "bytes_received", "chunks_moved", "tokens_done"])
def test_a_slow_download_or_a_slow_step_is_not_idle(what: str) -> None:
    world = World(run_file())
    world.scope.admission.join(entry(0), CPU, world.now_s)
    for number in range(6):
        says = {"activity": f"syncing {number}%"} if what == "activity" else {what: number}
        wait(world, IDLE_S / 2, **({"anchor_version": None, "state_digest": None} | says))
    assert lost(world) == []


def test_the_word_of_a_newcomer_is_believed_for_a_day() -> None:
    world = World(run_file())
    world.scope.admission.join(entry(0), CPU, world.now_s)
    for number in range(2000):
        if not world.scope.membership.members[entry(0).peer].alive:
            break
        wait(world, 1.0, anchor_version=None, state_digest=None, bytes_received=number)
        world.now_s += 59.0
        world.machine.log._ticked_s = world.now_s
        world.scope.membership.members[entry(0).peer].heard_s = world.now_s
    assert lost(world) == [(entry(0).peer, "idle")]
    assert world.now_s > 86_400


def test_neither_members_with_credit_nor_guests_are_idle() -> None:
    world = World(run_file())
    world.scope.admission.join(entry(0), CPU, world.now_s)
    world.scope.admission.join(entry(1, role="observer"), CPU, world.now_s)
    member = world.scope.membership.members[entry(0).peer]
    member.credit, member.has_credit = 1, True
    for _ in range(int(12 * IDLE_S)):
        for number in (0, 1):
            world.scope.heartbeat(entry(number).peer, heartbeat(anchor_version=None, state_digest=None), world.now_s)
        world.tick(0.25)
    assert lost(world) == []


def test_committed_work_is_progress() -> None:
    world = World(run_file(), 2)
    joined_s = world.now_s
    while len(world.verdicts) < 3:
        for worker in world.workers[:2]:
            world.behave(worker)
        world.tick(0.25)
    assert {one.worked_s > joined_s for one in world.scope.membership.members.values()} == {True}


def test_who_would_work_and_is_given_nothing_is_not_idle() -> None:
    world = World(run_file(), 2)
    world.scope.leasing.limit = lambda peer: 0  # type: ignore[method-assign]
    for _ in range(int(8 * IDLE_S)):
        for number in (0, 1):
            world.scope.heartbeat(entry(number).peer, heartbeat(), world.now_s)
        ask = PeerToCoordinatorRequestLease(round=world.scope.round.number, samples=4, tokens_done=0)
        assert world.scope.leasing.request(entry(0).peer, ask, world.now_s) == []
        world.tick(0.25)
    assert lost(world) == [(entry(1).peer, "idle")]
