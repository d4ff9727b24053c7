"""Reachability of members by each other: which can average together, whose work cannot be had, what to tell people.

Two members can meet if one of them can be dialed, unless the one that would have to dial says that it cannot connect.
A member's word that it cannot reach another costs only itself its place in the round: the other goes on as owner,
unless enough members say the same of it (``trust.outvotes``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.swarm.coordinator.trust import credit_of, outvotes, owners

if TYPE_CHECKING:
    from shoal.swarm.coordinator.membership import Member

WHAT_HELPS = (
    "forward both ports of one machine (PORT and PORT + 1) in its router and start it with --bind 0.0.0.0:PORT "
    "--advertise ADDRESS:PORT, or let a machine with a public address join; `shoal doctor INVITE` says what works there"
)
"""What to do where nobody can be reached."""

_NAMED = 3


def can_be_dialed(member: Member) -> bool:
    """Whether others can open connections to a member, itself or over a relay."""
    return member.entry.can_be_met


def is_limited(member: Member) -> bool:
    """Whether there may be others that a member cannot meet."""
    return not can_be_dialed(member) or bool(member.unmet)


def can_meet(one: str, other: str, members: Mapping[str, Member]) -> bool:
    """Whether one of two members can dial the other, as far as is known, and neither says that it has failed."""
    first, second = members[one], members[other]
    return (can_be_dialed(second) and other not in first.unmet) or (can_be_dialed(first) and one not in second.unmet)


@dataclass(frozen=True)
class Group:
    """Members that can average together. ``owners``: those that may reduce parts; ``apart``: members that cannot take
    part, with the reason; ``shunned``: members that enough others cannot reach, so that they own nothing."""

    owners: Collection[str]
    apart: Mapping[str, str] = field(default_factory=dict)
    shunned: Collection[str] = ()


def choose_group(members: Mapping[str, Member], peers: Sequence[str], group_size: int, least: int = 1) -> Group:
    """Choose those of ``peers`` that take part: in a flat group every one has to meet every owner.

    If nobody can be dialed, it is the one with the best standing alone: whoever was at work is not stopped by newcomers
    that cannot meet it. In a grid, where a member meets few owners, it is left out only if it misses most of them.
    ``least``: the owners that a grid needs."""
    able = [peer for peer, owns in zip(peers, owners(members, peers, least), strict=True) if owns]
    able = able or [peer for peer in peers if can_be_dialed(members[peer])]
    if len(peers) < 2:
        return Group(peers)
    order = sorted(peers, key=lambda peer: _standing(peer, members[peer]))
    if not able:
        lone = members[order[0]].entry.name
        reason = f"no member can be reached from outside, so only {lone} goes on: {WHAT_HELPS}"
        return Group(order[:1], dict.fromkeys(order[1:], reason))
    credit = credit_of(members, peers)
    missed_by: defaultdict[str, set[str]] = defaultdict(set)
    for peer in peers:
        for owner in members[peer].unmet:
            missed_by[owner].add(peer)
    shunned = {owner for owner in able if owner in missed_by and outvotes(missed_by[owner], owner, peers, credit)}
    if shunned.issuperset(able):
        shunned = set()
    able = [peer for peer in able if peer not in shunned]
    allowed = 0 if len(peers) <= group_size else len(able) // 2
    # In order of standing, each owner that can reach those before it; then whoever can reach all of these.
    meeting: set[str] = set()
    owning = set(able)
    for peer in order:
        if peer in owning and len(meeting.intersection(members[peer].unmet)) <= allowed:
            meeting.add(peer)
    apart: dict[str, str] = {}
    for peer in order:
        missed = meeting.intersection(members[peer].unmet) - apart.keys()
        if len(missed) > allowed:
            apart[peer] = f"it cannot connect to {_names(sorted(missed), members)}, which would take its work"
    return Group(meeting - apart.keys(), apart, shunned)


def walls(trainers: Mapping[str, Member], group_size: int) -> dict[str, str]:
    """Return why members cannot take part, by peer: those with a state that cannot average with the others, and those
    without one that can meet nobody who could give it to them.

    Whoever holds any state counts: just after a verdict some have applied it, and others not yet."""
    holders = [peer for peer, one in trainers.items() if one.anchor_version is not None]
    if len(trainers) < 2 or not holders:
        return {}
    apart = dict(choose_group(trainers, holders, group_size).apart)
    for peer, member in trainers.items():
        if member.anchor_version is None and not any(
            can_meet(peer, other, trainers) for other in trainers if other != peer
        ):
            apart[peer] = f"it cannot connect to any of the members that hold the state, nor they to it: {WHAT_HELPS}"
    return apart


def say_apart(trainers: Mapping[str, Member], apart: Mapping[str, str]) -> str:
    """Say which members cannot take part, and what to do; empty when all can."""
    if not apart:
        return ""
    names = _names(list(apart), trainers)
    if not any(can_be_dialed(one) for one in trainers.values()):
        return (
            f"none of the {len(trainers)} members can be reached from outside, so they cannot meet, and {names} cannot "
            f"take part: {WHAT_HELPS}"
        )
    return f"{names} cannot take part: {next(iter(apart.values()))}"


def _standing(peer: str, member: Member) -> tuple[int, int, int, float, str]:
    return -member.credit, -member.rounds_committed, -member.tokens_committed, member.joined_s, peer


def _names(peers: Sequence[str], members: Mapping[str, Member]) -> str:
    named = ", ".join(members[peer].entry.name for peer in peers[:_NAMED])
    return named + (f" and {len(peers) - _NAMED} more" if len(peers) > _NAMED else "")
