"""Trust in members: how many samples each may hold, whose accusations count, who is left out and who may own parts.

A member has a record once enough of its work was committed (``Member.has_record``). What steers everybody is decided
by members with a record, where there are any; what a member without one says or does has a bounded effect. All rules
of it stand here or in ``Member``; leases, plans, verdicts and the status ask.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.swarm.coordinator.events import Accusation
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import MAX_DETOURS

GROWTH = 2.0
"""A member may lease up to so many times what it was seen to commit: honest ones ask for less, and one that has become
faster, or is faster than all others, is believed within a few rounds."""

NEWCOMERS_SHARE = 0.2
"""Of a round's samples, for all members without a record together."""

_PACE_KEPT = 0.8
"""Of a member's pace after a committed round in which it did less: a bad round is no reason to be given less."""

DETOUR_ROUNDS = 16
"""For so long an accuser does without the one it accuses; then their link is tried again."""

_ACCUSED_AT_ONCE = 16
"""By one member, in one round: who gets nothing from more of them has another trouble."""

_IN_VAIN = 2
"""Rounds in a row in which a member was waited for and was not ready, until it is waited for no more."""

_MOST_IN_VAIN = 7
"""Doublings of the rounds in which it is not waited for."""


# Leases -----------------------------------------------------------------------------------------------------


@dataclass
class LeaseClock:
    """Since when members work on the samples that they hold, as far as is known: their leases grow with that time, so
    that nobody holds samples that it cannot have had the time for. Moments, so nothing of it is journaled: after a
    restart, what a member holds counts as worked for."""

    _since_s: dict[str, float] = field(default_factory=dict)
    _ready_s: dict[str, float] = field(default_factory=dict)
    _before_s: float = -math.inf
    """Opening of the round before this one."""

    def start(self, peer: str, now_s: float, held_tokens: int, tokens_per_s: float) -> None:
        """It asks for samples, maybe for the first time."""
        self._since_s.setdefault(peer, now_s - held_tokens / tokens_per_s if tokens_per_s else now_s)

    def offer(self, peer: str, now_s: float) -> None:
        """Its contribution to this round is waiting: what it does from now on is for the next one."""
        self._ready_s[peer] = now_s

    def lose(self, peer: str) -> None:
        """Forget a member: its samples are for others."""
        self._since_s.pop(peer, None)
        self._ready_s.pop(peer, None)

    def end_round(self, committed: Collection[str], opened_s: float) -> None:
        """``committed``: whose contributions are; whoever else has offered one still works on it."""
        self._since_s |= {peer: moment_s for peer, moment_s in self._ready_s.items() if peer in committed}
        self._ready_s.clear()
        self._before_s = opened_s

    def excuse(self, seconds: float) -> None:
        """We stood still for so long, and leased nothing."""
        self._since_s = {peer: moment_s + seconds for peer, moment_s in self._since_s.items()}

    def worked_s(self, peer: str, now_s: float, not_before_s: float = -math.inf) -> float:
        """For how long it has been at what it holds; of earlier than the round before this one nothing counts."""
        return max(0.0, now_s - max(self._since_s.get(peer, now_s), self._before_s, not_before_s))


def pace_limit(member: Member, recorded: Mapping[str, Member]) -> float:
    """Tokens a second at which a member may lease, and be seen to commit; any while nobody has a record.

    Whoever has no record may be as fast as the fastest who has one before it has shown anything."""
    if not recorded:
        return math.inf
    if member.has_record:
        return GROWTH * member.pace_tps
    return GROWTH * max(member.pace_tps, *(one.pace_tps for one in recorded.values()))


def pace_after(member: Member, tokens: int, took_s: float, recorded: Mapping[str, Member]) -> float:
    """A member's pace once so many tokens of it were committed in a round that took so long."""
    seen_tps = min(tokens / took_s, pace_limit(member, recorded))
    return max(seen_tps, _PACE_KEPT * member.pace_tps)


def newcomers_tokens(recorded: Iterable[Member], goal_tokens: int, open_s: float | None) -> float:
    """Bound on what all members without a record hold together in a round that has been open for so long.

    As much more with time as those with a record are usually doing; ``open_s`` None: of a batch that has to be exact,
    whose share is known from the beginning."""
    most = NEWCOMERS_SHARE * goal_tokens
    if open_s is None:
        return most
    usual_tps = sum(one.pace_tps for one in recorded)
    return min(most, NEWCOMERS_SHARE / (1.0 - NEWCOMERS_SHARE) * usual_tps * open_s)


# Accusations ------------------------------------------------------------------------------------------------


def recorded_work(members: Mapping[str, Member], peers: Iterable[str]) -> dict[str, int]:
    """Tokens that each of these has committed; only those with a record."""
    return {peer: one.tokens_committed for peer in peers if (one := members.get(peer)) is not None and one.has_record}


def outvotes(accusers: Collection[str], accused: str, present: Collection[str], work: Mapping[str, int]) -> bool:
    """Whether accusers are enough to do something about a member: two of them, where there could be two, who have more
    than half of the recorded work of all present, the accused included. While nobody has a record, two of them.

    So newcomers put out nobody with a record, and those who did little nobody who did most."""
    others = [peer for peer in present if peer != accused]
    if len(accusers) < min(2, len(others)):
        return False
    if not work:
        return True
    return 2 * sum(work.get(peer, 0) for peer in accusers) > sum(work.get(peer, 0) for peer in {*others, accused})


def accusations_of(round_number: int, said: Mapping[str, Collection[str]]) -> tuple[Accusation, ...]:
    """Pairs that follow from a round's reports: each accuser does without those whom it accuses from now on."""
    return tuple(
        Accusation(by=by, of=accused, round=round_number)
        for by in sorted(said)
        for accused in sorted(said[by])[:_ACCUSED_AT_ONCE]
        if accused != by
    )


@dataclass
class Accusations:
    """Pairs of members of whom one does not depend on the other for a while, and the round in which it said so."""

    pairs: dict[tuple[str, str], int] = field(default_factory=dict)

    def take(self, new: Iterable[Accusation], round_number: int) -> None:
        """At the end of that round; the oldest are forgotten."""
        self.pairs |= {(one.by, one.of): one.round for one in new}
        since = round_number - DETOUR_ROUNDS
        self.pairs = {pair: made for pair, made in self.pairs.items() if made > since}

    def into(self, plan: RoundPlan) -> RoundPlan:
        """The plan with everybody's detours round those that it has accused."""
        index_of = {member.peer: index for index, member in enumerate(plan.members)}
        detours: dict[str, list[int]] = {}
        for by, accused in self.pairs:
            if by in index_of and accused in index_of:
                detours.setdefault(by, []).append(index_of[accused])
        if not detours:
            return plan
        members = tuple(
            one.model_copy(update={"detours": tuple(sorted(detours[one.peer])[:MAX_DETOURS])})
            if one.peer in detours
            else one
            for one in plan.members
        )
        return plan.model_copy(update={"members": members})

    def kept(self) -> tuple[Accusation, ...]:
        """For a snapshot."""
        return tuple(Accusation(by=by, of=accused, round=made) for (by, accused), made in self.pairs.items())


# Owners -----------------------------------------------------------------------------------------------------


def owners(members: Mapping[str, Member], peers: Sequence[str], least: int) -> list[bool]:
    """Choose which of these peers may own parts: those with a record that can be reached, where there are any.

    An owner that has failed before may do better than none; one that cannot be reached will not. ``least``: so many
    owners a grid needs: where fewer have a record, those without one who have committed most come in as well."""
    able = [peer for peer in peers if members[peer].can_own] or [peer for peer in peers if members[peer].can_be_reached]
    recorded = [peer for peer in able if members[peer].has_record]
    if not recorded:
        recorded = [peer for peer in peers if members[peer].has_record and members[peer].can_be_reached]
    chosen = set(recorded or able)
    newcomers = sorted((peer for peer in able if peer not in chosen), key=lambda peer: -members[peer].tokens_committed)
    chosen.update(newcomers[: max(0, least - len(chosen))])
    return [peer in chosen for peer in peers]


# Waiting ----------------------------------------------------------------------------------------------------


@dataclass
class Punctuality:
    """Members that are not ready when they are waited for. That excludes nobody: whoever is ready in time is in the
    plan. But the others stop waiting for it, for ever more rounds. Not journaled: after a restart they try again."""

    _in_vain: dict[str, int] = field(default_factory=dict)
    _until: dict[str, int] = field(default_factory=dict)

    def is_awaited(self, peer: str, round_number: int) -> bool:
        return round_number >= self._until.get(peer, 0)

    def saw(self, round_number: int, ready: Iterable[str], awaited: Iterable[str]) -> None:
        """Take note of who was ready when the round was planned, and of who was waited for in vain."""
        for peer in ready:
            self._in_vain[peer] = max(0, self._in_vain.get(peer, 0) - 1)
        for peer in awaited:
            times = self._in_vain[peer] = min(self._in_vain.get(peer, 0) + 1, _MOST_IN_VAIN)
            if times >= _IN_VAIN:
                self._until[peer] = round_number + 1 + 2 ** (times - 1)
