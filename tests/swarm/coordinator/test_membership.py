"""Whoever has a version of the roster makes the newest one of what it is told, whatever got lost on the way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.swarm.coordinator.world import CPU, entry

from shoal.swarm.coordinator.events import MemberJoined, MemberLost, MemberMoved
from shoal.swarm.coordinator.membership import _LOGGED_CHANGES, Membership
from shoal.swarm.protocol.types import Address, RosterEntry


class Reader:
    """What a member knows of the roster."""

    def __init__(self) -> None:
        self.version = 0
        self.entries: dict[str, RosterEntry] = {}

    def hear(self, members: Membership, version: int | None = None) -> str:
        """The news for whoever has that version, by default its own."""
        roster, delta = members.roster_news(self.version if version is None else version)
        if roster is not None:
            self.entries = {one.peer: one for one in roster}
            what = "whole"
        elif delta is not None:
            assert delta.since <= self.version, "else it is not for us"
            for peer in delta.removed:
                self.entries.pop(peer, None)
            self.entries |= {one.peer: one for one in delta.changed}
            what = "delta"
        else:
            return "nothing"
        self.version = members.roster_version
        assert self.entries == {one.peer: one for one in members.roster()}
        return what


def join(members: Membership, number: int, key: int = 0, role: str = "trainer") -> None:
    members.join(MemberJoined(entry=entry(number, key, role), device=CPU), 0.0, 0)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["join", "observe", "move", "lose", "a", "b", "a late"]), st.integers(0, 6))))
def test_any_version_becomes_the_newest(steps: list[tuple[str, int]]) -> None:
    members, readers = Membership(roster_version=1000), {"a": Reader(), "b": Reader()}
    earlier = 0
    for key, (what, number) in enumerate(steps):
        member = members.members.get(entry(number).peer)
        if what == "join":
            join(members, number, key)
        elif what == "observe":
            join(members, number + 10, key, "observer")
        elif what == "move" and member is not None and member.alive:
            relay = Address(kind="relayed", host="10.0.0.9", control_port=key + 1, relay_key=bytes(32))
            ways = (member.entry.address, relay)
            members.move(MemberMoved(peer=member.entry.peer, addresses=ways, reachable=False))
        elif what == "lose" and member is not None and member.alive:
            members.lose(MemberLost(peer=entry(number).peer, reason="silent"))
        elif what == "a late":  # news for a version that it had some time ago
            readers["a"].hear(members, min(earlier, readers["a"].version))
        elif what in readers:
            earlier = readers[what].version
            readers[what].hear(members)
    for reader in readers.values():
        reader.hear(members)
        assert reader.hear(members) == "nothing"


def test_members_at_one_version_are_told_the_same_object() -> None:
    members = Membership()
    for number in range(5):
        join(members, number)
    _, one = members.roster_news(2)
    _, other = members.roster_news(2)
    assert one is other, "so that it is packed once"
    assert one is not None
    assert [entry.peer for entry in one.changed] == [entry(number).peer for number in (2, 3, 4)]


def test_the_whole_roster_for_versions_that_nobody_knows() -> None:
    members, reader = Membership(roster_version=1000), Reader()
    join(members, 0)
    assert reader.hear(members) == "whole"
    for version in (0, 999, 2**62):
        assert members.roster_news(version)[0] == members.roster() or version == 999
    members.roster_version += 50  # as a coordinator's start does
    join(members, 1)
    assert members.roster_news(1001)[0] == members.roster()
    assert reader.hear(members) == "whole"


def test_versions_that_a_start_has_left_out_are_no_change_that_is_known() -> None:
    members = Membership(roster_version=1000)
    for number in range(4):
        join(members, number)
    members.roster_version += 2  # as a coordinator's start does
    join(members, 4)
    assert members.roster_news(1003)[0] == members.roster()
    assert members.roster_news(1006)[1] is not None


def test_few_changes_are_remembered() -> None:
    members, reader = Membership(), Reader()
    join(members, 0)
    reader.hear(members)
    for number in range(_LOGGED_CHANGES):
        join(members, 1, number)
    assert reader.hear(members) == "delta"
    for number in range(_LOGGED_CHANGES + 1):
        join(members, 1, number)
    for version in range(members.roster_version):
        members.roster_news(version)
    assert len(members._remembered) <= _LOGGED_CHANGES + 5
    assert reader.hear(members) == "whole"
