"""Trust in members: credit for committed work, samples that each may hold, accusations that count, owners of parts,
members waited for.

A member has credit once enough of its work was committed, and as long as it goes on working. Members with credit, where
there are any, decide what affects everybody; one without credit has a bounded effect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.swarm.coordinator.events import Accusation, WorkStanding
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import MAX_DETOURS
from shoal.swarm.protocol.work_scores import BAD, WorkScore

if TYPE_CHECKING:
    from shoal.swarm.coordinator.membership import Member

CREDIT_ROUNDS = 8
"""Committed rounds in which a member has to earn credit before it counts."""

_ROUND = 10**9
"""Credit for all the work of one round. Whole numbers, so that a replay of the journal on any machine gives the same.
"""

_KEPT = 978_572
"""Millionths of a member's credit that are left after one more committed round: half of it after 32 rounds. A machine
that is away for 32 rounds still weighs half of what it did; what somebody did long ago soon decides nothing."""

_SLOWEST = 40
"""A member with less than a fortieth of the usual member's credit counts as one without: one that works at a twentieth
of the usual speed gets there within a half-life, one that only takes part never does."""

_HEADS = 2
"""Most members with credit from one network, for each usual member's worth of credit that its members have together.
A network of equal machines has as many as it has machines, and one with a single machine behind many identities two."""

GROWTH = 2.0
"""Factor on the committed pace up to which a member may lease: honest members ask for less, and one that has become
faster, or is faster than all others, is believed within a few rounds."""

NEWCOMERS_SHARE = 0.2
"""Share of a round's samples for all members without credit together."""

_PACE_KEPT = 0.8
"""Part of a member's pace that is kept after a round in which it did less: one bad round costs it little."""

DETOUR_ROUNDS = 16
"""Rounds for which an accuser does without the member that it accuses; then their link is tried again."""

ACCUSED_AT_ONCE = 16
"""Most accusations by one member in one round: a member that gets nothing from more has another trouble."""

_IN_VAIN = 2
"""Rounds in which a member was waited for and was not ready, until it is waited for no more."""

_MOST_IN_VAIN = 7
"""Most doublings of the rounds in which it is not waited for."""


# Credit -----------------------------------------------------------------------------------------------------


def earn_credit(members: Mapping[str, Member], tokens: Mapping[str, int], round_tokens: int) -> None:
    """Let credit decay by one committed round, give the members their shares of this round, and decide who has credit.

    ``tokens``: of the contributions that earn credit, by peer; ``round_tokens``: of the whole round, or of a usual one
    if this was smaller, so that a few who commit small rounds while others are away do not earn whole ones."""
    for peer, member in members.items():
        member.credit = member.credit * _KEPT // 10**6
        if peer in tokens:
            member.credit += _ROUND * tokens[peer] // max(round_tokens, 1)
            member.credit_rounds += 1
    _decide_credit(members)


def forfeit_credit(member: Member) -> None:
    """Take all credit away from a member that is expelled: if it comes back, it begins as a newcomer."""
    member.credit = member.credit_rounds = 0
    member.has_credit = False


def _decide_credit(members: Mapping[str, Member]) -> None:
    """Decide who has credit: members with enough of it, in each network as many as its work is worth.

    What is usual is the credit of the member in the middle of all credit, which identities without work do not move.
    Of one network those with the most credit come first. A member of an unknown network is a network of its own."""
    usual = int(weighted_median([(one.credit, one.credit) for one in members.values() if one.credit]))
    network_of = {peer: one.network or peer for peer, one in members.items()}
    together, heads = Counter[str](), Counter[str]()
    for peer, one in members.items():
        together[network_of[peer]] += one.credit
    for peer, one in sorted(members.items(), key=lambda item: (-item[1].credit, item[0])):
        network = network_of[peer]
        is_proven = one.credit_rounds >= CREDIT_ROUNDS and one.credit > 0 and _SLOWEST * one.credit >= usual
        one.has_credit = is_proven and heads[network] < max(1, _HEADS * together[network] // usual)
        heads[network] += one.has_credit


def credit_of(members: Mapping[str, Member], peers: Iterable[str]) -> dict[str, int]:
    """Return the credit of those of these peers that have any."""
    return {peer: one.credit for peer in peers if (one := members.get(peer)) is not None and one.has_credit}


def counting(members: Mapping[str, Member], peers: Iterable[str]) -> list[str]:
    """Return the peers whose reports decide: those with credit, or all where none of them has any."""
    peers = list(peers)
    return [peer for peer in peers if members[peer].has_credit] or peers


def weights_of(members: Mapping[str, Member]) -> dict[str, int]:
    """Return the weight of each member's reports: its credit, if it has any.

    While nobody has credit, its committed rounds, as claims of much work prove nothing yet; before any round, 1."""
    credit = {peer: one.credit if one.has_credit else 0 for peer, one in members.items()}
    for weights in (credit, {peer: one.rounds_committed for peer, one in members.items()}):
        if any(weights.values()):
            return weights
    return dict.fromkeys(members, 1)


def established(members: Mapping[str, Member], tokens: Mapping[str, int]) -> Mapping[str, int]:
    """Return the members of a round that others are measured by, with their weights: those with credit, by it.

    While none of them has credit, those that have earned some and have no bad score, by their ``tokens`` in this round,
    as only leases stand behind those. Empty where a run begins."""
    if credit := credit_of(members, tokens):
        return credit
    return {peer: weight for peer, weight in tokens.items() if members[peer].credit and not members[peer].work.bad}


def uncounted_tokens(
    members: Mapping[str, Member], tokens: Mapping[str, int], useless: Collection[str] = ()
) -> dict[str, int]:
    """Return the tokens that do not count in a round's mean, by peer.

    Members that are not established weigh no more together than is their share, beside those that are; each weighs at
    least one token, and the ``useless`` ones no more than that. Nobody is cut where a run begins."""
    known = established(members, tokens)
    if not known:
        return {}
    others = {peer: held for peer, held in tokens.items() if peer not in known}
    together = sum(held for peer, held in others.items() if peer not in useless)
    most = int(NEWCOMERS_SHARE / (1.0 - NEWCOMERS_SHARE) * sum(tokens[peer] for peer in known))
    counted = {
        peer: 1 if peer in useless else max(1, held * min(most, together) // together) for peer, held in others.items()
    }
    return {peer: others[peer] - count for peer, count in counted.items() if count < others[peer]}


def median_weights(members: Mapping[str, Member], tokens: Mapping[str, int]) -> Mapping[str, int]:
    """Return the weights of a round's members in a median: of the established ones, or of all by their ``tokens``."""
    return established(members, tokens) or tokens


def weightiest(digests: Mapping[str, bytes | None], members: Mapping[str, Member]) -> bytes | None:
    """Return the digest with most of the weight behind it, from ``digests`` by peer; None where there is none.

    Of equals the one that most peers report, then the smallest, so that any two judges agree."""
    said = {peer: digest for peer, digest in digests.items() if digest is not None}
    weights = weights_of({peer: members[peer] for peer in said})
    heads, behind = Counter(said.values()), Counter[bytes]()
    for peer, digest in said.items():
        behind[digest] += weights[peer]
    return min(heads, key=lambda digest: (-behind[digest], -heads[digest], digest), default=None)


def weighted_median(values: Iterable[tuple[float, int]]) -> float:
    """Return the lower weighted median of (value, weight); 0 of none."""
    ordered = sorted(values)
    left = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return 0.0


# Leases -----------------------------------------------------------------------------------------------------


@dataclass
class LeaseClock:
    """Moments since which members work on the samples that they hold. Leases grow with that time.

    So no member holds samples that it cannot have had the time for. Not journaled: after a restart, what a member holds
    counts as worked for."""

    _since_s: dict[str, float] = field(default_factory=dict)
    _ready_s: dict[str, float] = field(default_factory=dict)
    _before_s: float = -math.inf
    """Opening of the round before this one."""

    def start(self, peer: str, now_s: float, held_tokens: int, tokens_per_s: float) -> None:
        """Start a member's clock when it first asks for samples."""
        self._since_s.setdefault(peer, now_s - held_tokens / tokens_per_s if tokens_per_s else now_s)

    def offer(self, peer: str, now_s: float) -> None:
        """Note that a member's contribution waits: its work from now on is for the next round."""
        self._ready_s[peer] = now_s

    def lose(self, peer: str) -> None:
        """Forget a member."""
        self._since_s.pop(peer, None)
        self._ready_s.pop(peer, None)

    def end_round(self, committed: Collection[str], opened_s: float) -> None:
        """Start the clocks of ``committed`` members anew; the others still work on what they hold."""
        self._since_s |= {peer: moment_s for peer, moment_s in self._ready_s.items() if peer in committed}
        self._ready_s.clear()
        self._before_s = opened_s

    def excuse(self, seconds: float) -> None:
        """Exclude a time in which the coordinator stood still, and leased nothing."""
        self._since_s = {peer: moment_s + seconds for peer, moment_s in self._since_s.items()}

    def worked_s(self, peer: str, now_s: float, not_before_s: float = -math.inf) -> float:
        """Return how long a member has worked on what it holds, at most since the round before this one."""
        return max(0.0, now_s - max(self._since_s.get(peer, now_s), self._before_s, not_before_s))


def pace_limit(member: Member, credited: Mapping[str, Member]) -> float:
    """Return the tokens a second at which a member may lease and be counted; infinite while nobody has credit.

    A member without credit may be as fast as the fastest one with credit."""
    if not credited:
        return math.inf
    if member.has_credit:
        return GROWTH * member.pace_tps
    return GROWTH * max(member.pace_tps, *(one.pace_tps for one in credited.values()))


def pace_after(member: Member, tokens: int, took_s: float, credited: Mapping[str, Member]) -> float:
    """Return a member's pace after a round of ``took_s`` that committed ``tokens`` of it."""
    seen_tps = min(tokens / took_s, pace_limit(member, credited))
    return max(seen_tps, _PACE_KEPT * member.pace_tps)


def newcomers_tokens(credited: Iterable[Member], goal_tokens: int, open_s: float) -> float:
    """Return the most tokens that all members without credit may hold together after ``open_s`` of a round.

    It grows with the usual pace of members with credit."""
    usual_tps = sum(one.pace_tps for one in credited)
    return min(NEWCOMERS_SHARE * goal_tokens, NEWCOMERS_SHARE / (1.0 - NEWCOMERS_SHARE) * usual_tps * open_s)


def newcomers_batch(batch_tokens: int, open_s: float, max_s: float) -> float:
    """Return the most tokens of an exact batch that all members without credit may hold together.

    Their share, known from the start. If those with credit have not filled the batch after half of its time, the share
    grows, up to the whole batch after three quarters."""
    late = min(max(4.0 * open_s / max_s - 2.0, 0.0), 1.0)
    return batch_tokens * (NEWCOMERS_SHARE + (1.0 - NEWCOMERS_SHARE) * late)


def newcomers_limit(
    peer: str, networks: Mapping[str, str], held: Mapping[str, int], most: int, batch: int, *, apart: bool
) -> int:
    """Return the samples that a newcomer may still get of the ``most`` for all newcomers; may be negative.

    Each network has the same part, however many come from there, unless ``apart`` is false, and within it each member,
    but at least a ``batch``. What one keeps above its own part is not taken from the others'. ``networks``: of the
    newcomers, this one included, empty for unknown; ``held``: what they hold."""
    network_of = {one: network or one for one, network in networks.items()}
    heads, mine = Counter(network_of.values()), network_of[peer]
    part = most // len(heads) if apart else most
    each = max(batch, part // heads[mine] if apart else part)
    here, elsewhere = 0, Counter[str]()
    for holder, samples in held.items():
        network = network_of.get(holder, holder)
        if network == mine:
            here += min(samples, each)
        else:
            elsewhere[network] += samples
    taken = here + sum(min(samples, part) for samples in elsewhere.values())
    return min(max(batch, part) - here, max(batch, most) - taken, each - held.get(peer, 0))


# Accusations ------------------------------------------------------------------------------------------------


def outvotes(accusers: Collection[str], accused: str, present: Collection[str], credit: Mapping[str, int]) -> bool:
    """Whether enough members accuse one: two, where there could be two, with more than half of the credit.

    The credit is that of all present, the accused included. So newcomers exclude nobody with credit, and members that
    did little nobody that did most. While nobody has credit, most of the others have to accuse it; of two members
    neither excludes the other."""
    others = {peer for peer in present if peer != accused}
    accusing = others.intersection(accusers)
    if len(accusing) < min(2, len(others)):
        return False
    if not credit:
        return len(others) > 1 and 2 * len(accusing) > len(others)
    return 2 * sum(credit.get(peer, 0) for peer in accusing) > sum(credit.get(peer, 0) for peer in {*others, accused})


def accusations_of(round_number: int, said: Mapping[str, Collection[str]]) -> tuple[Accusation, ...]:
    """Return the accusations of a round's reports: each accuser does without the accused from now on."""
    return tuple(
        Accusation(by=by, of=accused, round=round_number)
        for by in sorted(said)
        for accused in sorted(said[by])[:ACCUSED_AT_ONCE]
        if accused != by
    )


@dataclass
class Accusations:
    """Accusations by (accuser, accused), with their round: the accuser does without the accused for a while."""

    pairs: dict[tuple[str, str], int] = field(default_factory=dict)

    def take(self, new: Iterable[Accusation], round_number: int) -> None:
        """Add the accusations of a round and forget the oldest."""
        self.pairs |= {(one.by, one.of): one.round for one in new}
        since = round_number - DETOUR_ROUNDS
        self.pairs = {pair: made for pair, made in self.pairs.items() if made > since}

    def into(self, plan: RoundPlan) -> RoundPlan:
        """Return the plan with each member's detours around those that it has accused."""
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
        """Return all accusations, for a snapshot."""
        return tuple(Accusation(by=by, of=accused, round=made) for (by, accused), made in self.pairs.items())


# Owners -----------------------------------------------------------------------------------------------------


def owners(members: Mapping[str, Member], peers: Sequence[str], least: int) -> list[bool]:
    """Return for each of these peers whether it may own parts: those with credit that are reachable, if any.

    An owner that has failed before may do better than none; one that cannot be reached will not. ``least``: the owners
    that a grid needs: if fewer have credit, those without that have earned most are added."""
    able = [peer for peer in peers if members[peer].can_own] or [peer for peer in peers if members[peer].can_be_reached]
    credited = [peer for peer in able if members[peer].has_credit]
    if not credited:
        credited = [peer for peer in peers if members[peer].has_credit and members[peer].can_be_reached]
    chosen = set(credited or able)
    newcomers = sorted((peer for peer in able if peer not in chosen), key=lambda peer: -members[peer].credit)
    chosen.update(newcomers[: max(0, least - len(chosen))])
    return [peer in chosen for peer in peers]


# Waiting ----------------------------------------------------------------------------------------------------


@dataclass
class Punctuality:
    """Members that were not ready when the plan waited for them. The plan stops waiting for them, for ever more rounds.

    That excludes nobody: whoever is ready in time is in the plan. Not journaled: after a restart they are waited for
    again."""

    _in_vain: dict[str, int] = field(default_factory=dict)
    _until: dict[str, int] = field(default_factory=dict)

    def forget(self, peer: str) -> None:
        """Forget a member that the run has forgotten."""
        self._in_vain.pop(peer, None)
        self._until.pop(peer, None)

    def is_awaited(self, peer: str, round_number: int) -> bool:
        return round_number >= self._until.get(peer, 0)

    def saw(self, round_number: int, ready: Iterable[str], awaited: Iterable[str]) -> None:
        """Note the members that were ready when the round was planned, and those that were waited for in vain."""
        for peer in self._in_vain.keys() & set(ready):
            self._in_vain[peer] -= 1
            if not self._in_vain[peer]:
                del self._in_vain[peer]
        self._until = {peer: until for peer, until in self._until.items() if until > round_number}
        for peer in awaited:
            times = self._in_vain[peer] = min(self._in_vain.get(peer, 0) + 1, _MOST_IN_VAIN)
            if times >= _IN_VAIN:
                self._until[peer] = round_number + 1 + 2 ** (times - 1)


# Scores of work ---------------------------------------------------------------------------------------------

_SIGN_SHARE = 0.05
"""Share of one score in the moving average of signs (Gauntlet, Templar's validators)."""

_LEAST_SIGN = -0.5
"""Average below which a member is treated as a newcomer: chance alone, of work that does nothing, is at -0.16."""

DOUBTED_AFTER = 3
"""Bad scores in a row, whoever made them, until a member is treated as a newcomer."""

EXPELLED_AFTER = 6
"""Bad scores in a row until it is expelled."""


def work_after(standing: WorkStanding, validator: str, score: WorkScore) -> WorkStanding:
    """Return what is known of a member's work after one more score by an authorised validator.

    Three bad scores in a row cost it its credit, and so does an average that falls below a half of all against it. It
    earns none until a good score finds its average above zero: after many good rounds at once, otherwise when as much
    has spoken for it as against it."""
    sign = standing.sign
    if score.on_random is not None:
        sign += _SIGN_SHARE * (math.copysign(1.0, score.on_random.mean) * bool(score.on_random.mean) - sign)
    is_doubted = standing.is_doubted or sign < _LEAST_SIGN
    counted: dict[str, object] = {"sign": sign, "scores": standing.scores + 1, "is_doubted": is_doubted}
    if score.finding in BAD:
        bad = standing.bad + 1
        accusers = tuple(sorted({*standing.accusers, validator}))
        shown = standing.shown + (score.finding != "withheld")
        is_doubted = is_doubted or bad >= DOUBTED_AFTER
        counted |= {"bad": bad, "shown": shown, "accusers": accusers, "is_doubted": is_doubted}
    elif score.finding == "helps":
        counted |= {"bad": 0, "shown": 0, "accusers": (), "is_doubted": is_doubted and sign <= 0.0}
    return standing.model_copy(update=counted)


def is_expelled(standing: WorkStanding, validators: Collection[str]) -> bool:
    """Whether a member's work excludes it: enough bad scores in a row, by most of the ``validators`` that are here.

    A contribution that could not be had excludes nobody, as a bad link does that, too."""
    accusers = set(standing.accusers).intersection(validators)
    return standing.shown >= EXPELLED_AFTER and 2 * len(accusers) > len(validators)
