"""To which replica of the next stage a micro-batch goes: weighted round robin on what they have been delivering.

Interleaved weighted round robin as in SWARM (Ryabinin et al. 2023, arXiv:2301.11913), with the tags of self-clocked
fair queueing (Golestani 1994): each replica's turn moves on by the seconds that it takes for a micro-batch, and the
next one goes where turn and queue end first. Pure: every moment is an argument, in seconds of one clock.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Generic

from shoal.swarm.pipeline.engine.replicas import KeyT, Replica, Standing


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
        self._replicas: dict[str, Replica[KeyT]] = {}
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
            self._replicas.setdefault(peer, Replica(rates[peer], our_part, self._patience_s))
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
