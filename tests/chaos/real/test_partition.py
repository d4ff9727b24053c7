"""A network that falls in two and heals: peers and coordinator in network namespaces, packets that get lost unseen."""

from __future__ import annotations

import pytest
from tests.chaos.real.namespaces import Wire
from tests.integration.harness import (
    CALM,
    ROUNDS_S,
    SHOAL,
    START_S,
    Host,
    Member,
    Swarm,
    eventually,
    finish,
    run_toml,
)
from tests.integration.namespaces import NoNamespaces

pytestmark = pytest.mark.integration

ROUNDS_APART = 3


def start(swarm: Swarm, wire: Wire) -> tuple[Host, list[Member]]:
    """Returns when all four have committed a round together."""
    corpus = swarm.folder / "data" / "corpus.txt"
    swarm.data = corpus.parent
    corpus.parent.mkdir()
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    toml = run_toml(max_s=0.5, patience_s=2.0, source="text:corpus.txt")
    launcher = (*wire.inside("coordinator"), *SHOAL)
    host = swarm.host(toml, launcher=launcher, bind=f"{wire.address('coordinator')}:0")
    members = []
    for name in "abcd":
        bind = ["--bind", f"{wire.address(name)}:0"]
        members.append(swarm.member(host.invite, name, (*wire.inside(name), *CALM), extra=bind))
        members[0].event("synced", START_S)  # whoever has the state is the first to be asked for it
    for member in members:
        member.event("committed", START_S + ROUNDS_S, included=True, members=4)
    return host, members


def connected(here: list[str], there: list[str]) -> Wire:
    try:
        return Wire(here, there).__enter__()
    except NoNamespaces as error:
        pytest.skip(str(error))


def take_part_again(swarm: Swarm, members: list[Member], after: int) -> None:
    def together() -> bool:
        rounds = [{one["round"] for one in member.events("committed", included=True, members=4)} for member in members]
        return len([one for one in set.intersection(*rounds) if one > after]) >= 2

    eventually("all take part again", together, START_S + ROUNDS_S, swarm.tails)


def test_half_of_the_peers_are_cut_off(swarm: Swarm) -> None:
    with connected(["coordinator", "a", "b"], ["c", "d"]) as wire:
        host, members = start(swarm, wire)
        near, far = members[:2], members[2:]
        wire.pull()
        for member in far:
            host.event("member_lost", peer=member.peer, reason="silent")
        stuck = [member.last_round() for member in far]
        apart = max(stuck)
        for _ in range(ROUNDS_APART):
            apart = max(member.committed(after=apart)["round"] for member in near)
        assert [member.last_round() for member in far] == stuck, "no verdict of their own"
        wire.plug_in()
        take_part_again(swarm, members, apart)
        assert all(member.running for member in members)
        verdicts = finish(host, members)
        alone = [one.verdict for one in verdicts[max(stuck) + 1 : apart + 1]]
        assert sum(one.committed for one in alone) >= ROUNDS_APART


def test_the_coordinator_is_cut_off_from_all(swarm: Swarm) -> None:
    with connected(["coordinator"], ["a", "b", "c", "d"]) as wire:
        host, members = start(swarm, wire)
        wire.pull()
        for member in members:
            host.event("member_lost", peer=member.peer, reason="silent")
        ended = max(one["round"] for one in host.events("verdict"))
        version = max(one["anchor_version"] for one in host.events("verdict"))
        wire.plug_in()
        take_part_again(swarm, members, ended)
        after = [one for one in host.events("verdict") if one["round"] > ended and one["committed"]]
        assert [one["anchor_version"] for one in after] == list(range(version + 1, version + 1 + len(after)))
        finish(host, members)
