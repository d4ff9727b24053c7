"""Choice of the next stage's replica for each micro-batch: weighted round robin by delivered throughput.

Interleaved weighted round robin as in SWARM (Ryabinin et al. 2023, arXiv:2301.11913), with the tags of self-clocked
fair queueing (Golestani 1994): each replica's turn moves on by the seconds that it takes for a micro-batch, and the
next micro-batch goes where turn and queue end first. Every moment is an argument, in seconds of one monotonic clock.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from shoal.swarm.deadlines import Delays

KeyT = TypeVar("KeyT", bound=Hashable)

Standing = Literal["trusted", "probation", "banned"]
"""On probation it has one micro-batch at a time, until it has delivered; banned, it has none until the ban is over."""

_WINDOW = 8
"""Micro-batches that the throughput is measured on: a slowed replica has lost its share after a few of them."""

_LONGEST_BAN = 32
"""The longest ban, in patiences; the first is one, and each that follows twice the one before. Where nobody else holds
the stage, or they are all banned, each is one: nothing is won by waiting longer for the only one there is."""

_LONGEST_PAUSE = 6
"""The longest time that a full replica is not asked again is this part of the patience: a heartbeat."""

_SHORTEST_S = 1e-6


@dataclass(frozen=True)
class _Sent:
    """``spell``: the replica's standing when it was sent. A failure that began before a change of standing is part of
    the incident that changed it, not another one."""

    at_s: float
    spell: int


class ReplicaEstimate(Generic[KeyT]):
    """One replica, as it looks from here: others send to it, too, and what it delivers to us is what counts."""

    def __init__(self, rate: float | None, part: float, patience_s: float) -> None:
        """``rate``: micro-batches a second, as the plan has it; ``part``: of that, what one sender seems to get. They
        count as much as one that it delivered."""
        self._patience_s = patience_s
        self._pending: dict[KeyT, _Sent] = {}
        self._planned = rate
        self._intervals_s: deque[float] = deque([1 / (rate * part)] if rate else [], maxlen=_WINDOW)
        self._silences, self._answers = Delays(patience_s), Delays(patience_s)
        self._busy_since_s = self._heard_s = self._full_until_s = 0.0
        self._banned_s = self._ban_s = 0.0
        self._standing: Standing = "trusted"
        self._spell = self._bans = self._delivered = self._refusals = 0

    @property
    def queue(self) -> int:
        """What it has of ours: sent, and not finished."""
        return len(self._pending)

    def pending(self) -> tuple[KeyT, ...]:
        return tuple(self._pending)

    @property
    def our_part(self) -> float | None:
        """Of what the plan expects of it, what it delivers to us; None before both are known."""
        if self._planned is None or self._delivered < _WINDOW:
            return None
        return 1 / (self._planned * max(sum(self._intervals_s) / len(self._intervals_s), _SHORTEST_S))

    @property
    def is_known(self) -> bool:
        """Whether its speed is: planned or measured."""
        return bool(self._intervals_s)

    def interval_s(self, now_s: float, otherwise_s: float) -> float:
        """Seconds for one micro-batch while it has any; ``otherwise_s``: what is supposed of one that is not known.

        The mean of its last ones, or how long the next one is taking already, so a replica that hangs loses its share
        before anything has timed out.
        """
        usual_s = sum(self._intervals_s) / len(self._intervals_s) if self._intervals_s else otherwise_s
        waiting_s = now_s - self._busy_since_s if self._pending else 0.0
        return max(usual_s, waiting_s, _SHORTEST_S)

    def standing(self, now_s: float, is_needed: bool = False) -> Standing:
        """``is_needed``: whether there is nobody in its stage who is not banned."""
        if self._standing == "banned" and now_s >= self._ban_ends_s(is_needed):
            self._standing = "probation"
        return self._standing

    def may_take(self, now_s: float, is_needed: bool) -> bool:
        standing = self.standing(now_s, is_needed)
        if standing == "banned" or now_s < self._full_until_s:
            return False
        return standing == "trusted" or not self._pending

    def sent(self, key: KeyT, now_s: float) -> None:
        if not self._pending:
            self._busy_since_s = now_s
        self._pending[key] = _Sent(now_s, self._spell)

    def finished(self, key: KeyT, now_s: float) -> None:
        sent = self._pending.pop(key)
        self._intervals_s.append(now_s - self._busy_since_s)
        self._silences.saw(now_s - max(sent.at_s, self._heard_s))
        self._answers.saw(now_s - sent.at_s)
        self._busy_since_s = self._heard_s = now_s
        self._full_until_s, self._refusals = now_s, 0
        if self.standing(now_s) == "banned":
            return  # late, not well
        if self._standing == "probation":
            self._stand("trusted")
        self._delivered += 1
        if self._delivered >= _WINDOW:
            self._bans = 0

    def refused(self, key: KeyT, now_s: float, pause_s: float) -> None:
        """Full: it is asked again when it has finished one of ours, or after ``pause_s``, doubled each time."""
        self.withdrawn(key)
        pause_s = min(pause_s * 2**self._refusals, self._patience_s / _LONGEST_PAUSE)
        self._full_until_s = now_s + pause_s
        self._refusals = min(self._refusals + 1, 16)

    def withdrawn(self, key: KeyT) -> None:
        del self._pending[key]

    def failed(self, key: KeyT, now_s: float) -> None:
        """Timed out, or its link broke: about halves the throughput that it is believed to have, or more."""
        sent = self._pending.pop(key)
        known_s = min(sum(self._intervals_s) or self._patience_s, self._patience_s)
        self._intervals_s.append(max(now_s - self._busy_since_s, known_s))
        self._busy_since_s, self._delivered = now_s, 0
        if sent.spell != self._spell:
            return
        if self.standing(now_s) == "trusted":
            self._stand("probation")
        else:
            self._banned_s, self._ban_s = now_s, self._patience_s * min(2**self._bans, _LONGEST_BAN)
            self._bans = min(self._bans + 1, _LONGEST_BAN)
            self._stand("banned")

    def _stand(self, standing: Standing) -> None:
        self._standing = standing
        self._spell += 1

    def deadline_s(self, key: KeyT) -> float:
        """From when on ``key`` is overdue: when it takes longer than this replica has been taking for one, and there
        was no other sign of life for longer than it has been taking between two of them (each within the patience).
        However many others it delivers, ``key`` is also overdue at the patience more than one has been taking."""
        sent = self._pending[key]
        late_s = max(sent.at_s + self._answers.wait_s, self._heard_s + self._silences.wait_s)
        usual_s = self._answers.usual_s
        return late_s if usual_s is None else min(late_s, sent.at_s + usual_s + self._patience_s)

    def changes_s(self, now_s: float, is_needed: bool) -> float | None:
        """When it may be given something again, if only time keeps it from that."""
        until_s = max(self._ban_ends_s(is_needed) if self._standing == "banned" else 0.0, self._full_until_s)
        return until_s if until_s > now_s else None

    def _ban_ends_s(self, is_needed: bool) -> float:
        return self._banned_s + (self._patience_s if is_needed else self._ban_s)


@dataclass
class _Hop:
    """The replicas of one stage. ``clock_s``: where the latest turn ended; ``turns``: where each one's last turn ended,
    at most one of its micro-batches behind the clock, so that nobody saves up turns that it could not use."""

    clock_s: float = 0.0
    turns: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplicaView:
    """For people. ``rate``: micro-batches a second, None while nothing is known; ``queue``: sent and not finished."""

    rate: float | None
    queue: int
    standing: Standing


class Router(Generic[KeyT]):
    """One sender's choice of replicas. A ``key`` names one attempt at one micro-batch; after ``sent`` it is pending
    until it is finished, failed, refused or withdrawn, or its replica retired, whichever is first; what is said of it
    later counts for nothing (False). Its gradient comes back the way that it went, ``way(key)``."""

    def __init__(self, me: str, patience_s: float) -> None:
        """``me`` only decides where a sender begins: they would all begin with the same replica."""
        self._me, self._patience_s = me, patience_s
        self._replicas: dict[str, ReplicaEstimate[KeyT]] = {}
        self._hops: dict[int, _Hop] = {}
        self._ways: dict[KeyT, str] = {}

    def set_replicas(self, stage: int, rates: Mapping[str, float | None], now_s: float) -> None:
        """The live replicas of a stage, each with the micro-batches a second that the plan expects of it, or None.

        A rate counts only for who is new, beside the others: other senders have their part of what a replica does.
        Whoever is missing is not picked any more; what it has of ours stays pending.
        """
        hop = self._hops.setdefault(stage, _Hop())
        hop.turns = {peer: turn for peer, turn in hop.turns.items() if peer in rates}
        new = sorted(rates.keys() - hop.turns.keys())
        parts = self._parts(hop.turns)
        our_part = statistics.median(parts) if parts else 1.0
        for peer in new:
            self._replicas.setdefault(peer, ReplicaEstimate(rates[peer], our_part, self._patience_s))
        hop.turns |= dict.fromkeys(new, hop.clock_s)
        for peer in new:
            hop.turns[peer] -= self._head_start(peer) * self._interval_s(peer, hop.turns, now_s)
        self._forget_unused(now_s)

    def pick(self, stage: int, now_s: float, avoid: Set[str] = frozenset()) -> str | None:
        """Where the next micro-batch is done first; None when nobody may take one now (``wake_s``: when to ask again).

        Changes nothing: only what is ``sent`` counts.
        """
        hop = self._hops.get(stage, _Hop())
        is_needed = self._are_all_banned(hop, now_s)
        free = [peer for peer in hop.turns if peer not in avoid and self._replicas[peer].may_take(now_s, is_needed)]
        ends: dict[str, float] = {}
        for peer in free:
            interval_s = self._interval_s(peer, hop.turns, now_s)
            ends[peer] = hop.turns[peer] + (self._replicas[peer].queue + 1) * interval_s
        return min(free, key=lambda peer: (ends[peer], peer), default=None)

    def sent(self, peer: str, key: KeyT, now_s: float) -> None:
        """``key`` was offered to ``peer``, which ``pick`` named."""
        assert key not in self._ways, "each attempt has a key of its own"
        for hop in self._hops.values():
            if peer in hop.turns:
                self._take_turn(hop, peer, now_s)
        self._replicas[peer].sent(key, now_s)
        self._ways[key] = peer

    def finished(self, peer: str, key: KeyT, now_s: float) -> bool:
        """Its gradient is here. False, and of no consequence, unless ``key`` is pending at ``peer``."""
        if not self._settle(peer, key):
            return False
        self._replicas[peer].finished(key, now_s)
        return True

    def refused(self, peer: str, key: KeyT, now_s: float) -> bool:
        """The peer is full, not ill: it gets nothing for a moment."""
        if not self._settle(peer, key):
            return False
        self._replicas[peer].refused(key, now_s, self._interval_s(peer, self._replicas, now_s))
        return True

    def withdrawn(self, peer: str, key: KeyT) -> bool:
        """Nobody wants it from there any more, which says nothing of the peer."""
        if not self._settle(peer, key):
            return False
        self._replicas[peer].withdrawn(key)
        return True

    def failed(self, peer: str, key: KeyT, now_s: float) -> bool:
        """It took too long, or the link broke. After this a replica is on probation; if it fails on that, banned.

        Bans are for the others to do its part: while all of a stage are banned, none is for longer than the patience.
        """
        if not self._settle(peer, key):
            return False
        self._replicas[peer].failed(key, now_s)
        return True

    def retire(self, peer: str) -> tuple[KeyT, ...]:
        """It is dead, and forgotten. What it had is not pending any more: the keys, to be sent to others."""
        for hop in self._hops.values():
            hop.turns.pop(peer, None)
        replica = self._replicas.pop(peer, None)
        lost = replica.pending() if replica else ()
        for key in lost:
            del self._ways[key]
        return lost

    def way(self, key: KeyT) -> str | None:
        """Who has it, and so sends its gradient; None when it is not pending: nobody does, or it is here."""
        return self._ways.get(key)

    def overdue(self, now_s: float) -> tuple[KeyT, ...]:
        """What has taken too long, to be told as ``failed`` or waited for still; the longest overdue first."""
        late = [(at_s, key) for key, at_s in self._deadlines() if at_s <= now_s]
        return tuple(key for _, key in sorted(late, key=lambda one: one[0]))

    def wake_s(self, now_s: float) -> float | None:
        """The next moment at which ``overdue`` or ``pick`` says something else, if nothing happens before."""
        stuck = [hop for hop in self._hops.values() if self._are_all_banned(hop, now_s)]
        needed = {peer for hop in stuck for peer in hop.turns}
        changes = [replica.changes_s(now_s, peer in needed) for peer, replica in self._replicas.items()]
        moments = [at_s for at_s in changes if at_s is not None] + [at_s for _, at_s in self._deadlines()]
        return min((at_s for at_s in moments if at_s > now_s), default=None)

    def view(self, stage: int, now_s: float) -> dict[str, ReplicaView]:
        """The stage's replicas as they look from here."""
        found: dict[str, ReplicaView] = {}
        hop = self._hops.get(stage, _Hop())
        is_needed = self._are_all_banned(hop, now_s)
        for peer in sorted(hop.turns):
            replica = self._replicas[peer]
            rate = 1 / replica.interval_s(now_s, 0.0) if replica.is_known else None
            found[peer] = ReplicaView(rate, replica.queue, replica.standing(now_s, is_needed))
        return found

    def _are_all_banned(self, hop: _Hop, now_s: float) -> bool:
        return all(self._replicas[peer].standing(now_s) == "banned" for peer in hop.turns)

    def _parts(self, peers: Iterable[str]) -> list[float]:
        """Of what was expected of each, what we get; without those of which not enough is known."""
        return [part for peer in peers if (part := self._replicas[peer].our_part) is not None]

    def _take_turn(self, hop: _Hop, peer: str, now_s: float) -> None:
        hop.clock_s = max(hop.clock_s, hop.turns[peer] + self._interval_s(peer, hop.turns, now_s))
        hop.turns[peer] = hop.clock_s
        for other, turn in hop.turns.items():
            hop.turns[other] = max(turn, hop.clock_s - self._interval_s(other, hop.turns, now_s))

    def _interval_s(self, peer: str, among: Iterable[str], now_s: float) -> float:
        """Of one that nothing is known of: as the middle one ``among`` the others."""
        replica = self._replicas[peer]
        if replica.is_known:
            return replica.interval_s(now_s, 0.0)
        known = [other for one in among if (other := self._replicas[one]).is_known]
        usual_s = statistics.median(other.interval_s(now_s, 0.0) for other in known) if known else 1.0
        return replica.interval_s(now_s, usual_s)

    def _head_start(self, peer: str) -> float:
        """In [0, 1), another one for each pair."""
        return int.from_bytes(hashlib.sha256(f"{self._me} {peer}".encode()).digest()[:6]) / 2**48

    def _settle(self, peer: str, key: KeyT) -> bool:
        if self._ways.get(key) != peer:
            return False
        del self._ways[key]
        return True

    def _deadlines(self) -> list[tuple[KeyT, float]]:
        return [(key, self._replicas[peer].deadline_s(key)) for key, peer in self._ways.items()]

    def _forget_unused(self, now_s: float) -> None:
        """Those of no stage that have nothing of ours; the ill are remembered, or leaving would heal them."""
        used = {peer for hop in self._hops.values() for peer in hop.turns} | set(self._ways.values())
        for peer in self._replicas.keys() - used:
            if self._replicas[peer].standing(now_s) == "trusted":
                del self._replicas[peer]
