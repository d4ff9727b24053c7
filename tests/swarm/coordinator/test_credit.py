"""Credit for committed work: who has it, how it decays, and what many identities get for little work.

Simulated rounds, in which members do ``tokens`` of work each; the rules alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

import pytest
from tests.swarm.coordinator.world import CPU, World, entry, peer_name, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.trust import CREDIT_ROUNDS, credit_of, earn_credit, forfeit_credit, owners, weights_of

HALF_LIFE = 32


class Rounds:
    """Members in their networks, which commit rounds."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.usual_tokens = 0

    def come(self, name: str, network: str = "") -> str:
        self.members[name] = Member(entry(0), CPU, 0.0, network=network)
        return name

    def commit(self, tokens: Mapping[str, int], rounds: int = 1) -> None:
        for _ in range(rounds):
            earn_credit(self.members, tokens, max(sum(tokens.values()), self.usual_tokens))

    def have_credit(self) -> set[str]:
        return {peer for peer, one in self.members.items() if one.has_credit}

    def owners(self) -> set[str]:
        peers = sorted(self.members)
        return {peer for peer, one in zip(peers, owners(self.members, peers, 1), strict=True) if one}

    def weight(self, *peers: str) -> float:
        """Share of what is decided."""
        weights = weights_of(self.members)
        return sum(weights[peer] for peer in peers) / sum(weights.values())


def until_credit(world: Rounds, tokens: Mapping[str, int], peer: str) -> int:
    """Return the rounds until a member has credit."""
    for rounds in count(1):
        world.commit(tokens)
        if world.members[peer].has_credit:
            return rounds
        assert rounds < 1000
    raise AssertionError


@pytest.mark.parametrize("rounds", [CREDIT_ROUNDS, 30, 100])
@pytest.mark.parametrize("work", [100, 25])
def test_twenty_idle_identities_of_one_network_own_and_decide_next_to_nothing(rounds: int, work: int) -> None:
    """One sample each in every round, beside three members that do ``work`` samples, from the run's start on."""
    world = Rounds()
    honest = [world.come(f"honest {number}", f"{number}.0.0.0/24") for number in range(3)]
    idle = [world.come(f"idle {number:02}", "9.9.9.0/24") for number in range(20)]
    world.commit({**dict.fromkeys(honest, work), **dict.fromkeys(idle, 1)}, rounds)
    assert set(honest) <= world.owners() == world.have_credit()
    mine = world.have_credit() & set(idle)
    print(f"{rounds} rounds, {work}:1 own {len(mine)} of {len(world.owners())}, weigh {world.weight(*idle):.1%}")
    assert len(mine) <= (0 if work == 100 else 1)
    assert world.weight(*idle) <= (0.0 if work == 100 else 0.02)


def test_identities_of_one_network_that_do_some_work_own_and_decide_by_what_they_do() -> None:
    """Each works at a twentieth of an honest member's speed: together as much as one of them."""
    world = Rounds()
    honest = [world.come(f"honest {number}", f"{number}.0.0.0/24") for number in range(3)]
    many = [world.come(f"many {number:02}", "9.9.9.0/24") for number in range(20)]
    world.commit({**dict.fromkeys(honest, 100), **dict.fromkeys(many, 5)}, 100)
    assert len(world.have_credit() & set(many)) in (1, 2)
    assert world.weight(*many) < 0.04
    apart = Rounds()
    honest = [apart.come(f"honest {number}") for number in range(3)]
    many = [apart.come(f"many {number:02}") for number in range(20)]
    apart.commit({**dict.fromkeys(honest, 100), **dict.fromkeys(many, 5)}, 100)
    assert apart.weight(*many) == pytest.approx(0.25, abs=0.001), "over many networks they weigh what they work"


def test_members_of_speeds_1_to_20_have_credit_after_eight_rounds_together() -> None:
    for network in ("", "1.2.3.0/24"):
        world = Rounds()
        tokens = {world.come(f"speed {speed:02}", network): speed for speed in (1, 2, 4, 8, 11, 14, 17, 20)}
        world.commit(tokens, CREDIT_ROUNDS - 1)
        assert not world.have_credit()
        world.commit(tokens)
        assert world.have_credit() == set(tokens)
        assert world.weight("speed 20") == pytest.approx(20 / sum(tokens.values()), abs=0.001)


@pytest.mark.parametrize(("speed", "most"), [(20, CREDIT_ROUNDS), (4, CREDIT_ROUNDS), (2, 14), (1, HALF_LIFE + 1)])
def test_a_newcomer_has_credit_within_a_bounded_number_of_rounds(speed: int, most: int) -> None:
    world = Rounds()
    tokens = {world.come(f"old {number}"): 20 for number in range(4)}
    world.commit(tokens, 1000)
    rounds = until_credit(world, tokens | {world.come("new"): speed}, "new")
    print(f"speed {speed}: {rounds} rounds")
    assert CREDIT_ROUNDS <= rounds <= most


def test_equal_machines_of_one_network_all_have_credit() -> None:
    world = Rounds()
    tokens = {world.come(f"lab {number}", "1.2.3.0/24"): 10 for number in range(20)}
    tokens |= {world.come(f"home {number}"): 10 for number in range(3)}
    world.commit(tokens, CREDIT_ROUNDS)
    assert world.have_credit() == set(tokens)


def test_credit_halves_in_32_rounds_and_is_gone_when_work_stops() -> None:
    world = Rounds()
    gone, stays = world.come("gone"), world.come("stays")
    world.commit({gone: 5, stays: 5}, 100)
    before = world.members[gone].credit
    world.commit({stays: 5}, HALF_LIFE)
    assert world.members[gone].credit == pytest.approx(before / 2, rel=1e-4)
    assert world.members[gone].has_credit, "a night away"
    world.commit({stays: 5}, 5 * HALF_LIFE)
    assert world.have_credit() == {stays}
    world.commit({stays: 5, gone: 5}, 2)
    assert world.have_credit() == {stays, gone}, "it has proven itself: what it does now counts at once"


def test_whoever_commits_small_rounds_alone_does_not_replace_the_others() -> None:
    world = Rounds()
    old = [world.come("old 0"), world.come("old 1")]
    world.commit(dict.fromkeys(old, 100), 100)
    world.usual_tokens = 200
    world.commit({world.come("alone"): 2}, HALF_LIFE)
    assert world.weight("alone") == 0.0
    world.commit({"alone": 2}, 2 * HALF_LIFE)
    assert world.weight("alone") < 0.1


def test_one_round_of_huge_claims_is_one_round() -> None:
    world = Rounds()
    old = [world.come("old 0"), world.come("old 1")]
    world.commit(dict.fromkeys(old, 100), 100)
    world.commit({world.come("boasts"): 10**12, **dict.fromkeys(old, 100)})
    assert credit_of(world.members, ["boasts"]) == {}
    assert world.members["boasts"].credit < 0.03 * sum(one.credit for one in world.members.values())


def test_who_is_expelled_begins_as_a_newcomer() -> None:
    world = Rounds()
    tokens = {world.come("bad"): 10, world.come("good"): 10}
    world.commit(tokens, 50)
    forfeit_credit(world.members["bad"])
    assert world.have_credit() == {"good"}
    assert until_credit(world, tokens, "bad") == CREDIT_ROUNDS


def test_the_hosts_ban_takes_credit_away_of_the_identity_and_its_network() -> None:
    world = World(run_file(), 3)
    world.scope.membership.advance(0)
    for number, one in enumerate(world.scope.membership.members.values()):
        one.credit, one.has_credit, one.network = 5, True, f"{min(number, 1)}.0.0.0/24"
    assert len(world.scope.membership.with_credit()) == 3
    world.scope.record(ev.PeerBanned(peer=peer_name(1), network="1.0.0.0/24", at_s=1.0))
    assert [peer for peer, one in world.scope.membership.members.items() if one.credit] == [peer_name(0)]
    assert list(world.scope.membership.with_credit()) == [peer_name(0)]
    assert dict(world.scope.membership.credit_shares()) == {peer_name(0): 1.0}
