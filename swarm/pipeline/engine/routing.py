"""Choice of the next stage's replica for each micro-batch: weighted round robin by delivered throughput.

Interleaved weighted round robin as in SWARM (Ryabinin et al. 2023, arXiv:2301.11913), with the tags of self-clocked
fair queueing (Golestani 1994): each replica's turn moves on by the seconds that it takes for a micro-batch, and the
next micro-batch goes where turn and queue end first. Every moment is an argument, in seconds of one monotonic clock.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from shoal.swarm.deadlines import Delays
from shoal.swarm.pipeline.engine.effects import AttemptKey

Standing = Literal["trusted", "probation", "banned"]
"""Trust in a replica: on probation it gets one micro-batch at a time until it delivers, banned it gets none."""

_WINDOW = 8
"""Micro-batches in the throughput's window: few, so that a slowed replica soon loses its share."""

_LONGEST_BAN = 32
"""Longest ban, in patiences; the first lasts one, each further one twice as long. While all replicas of a stage are
banned each ban lasts one patience: waiting longer for the only ones there are gains nothing."""

_LONGEST_PAUSE = 6
"""Longest pause after ``busy``, as a divisor of the patience: a heartbeat."""

_SHORTEST_S = 1e-6


@dataclass(frozen=True)
class _Sent:
    """Pending micro-batch. ``spell``: number of the replica's standing when it was sent; a failure of an earlier spell
    belongs to the incident that changed the standing and does not count again."""

    at_s: float
    spell: int


class ReplicaEstimate:
    """Estimate of one replica's throughput and health, from its deliveries to this sender."""

    def __init__(self, rate: float | None, part: float, patience_s: float) -> None:
        """``rate``: planned micro-batches a second, or None; ``part``: one sender's share of it. Together they
        weigh as much as one delivered micro-batch."""
        self._patience_s = patience_s
        self._pending: dict[AttemptKey, _Sent] = {}
        self._planned = rate
        self._intervals_s: deque[float] = deque([1 / (rate * part)] if rate else [], maxlen=_WINDOW)
        self._silences, self._answers = Delays(patience_s), Delays(patience_s)
        self._busy_since_s = self._heard_s = self._full_until_s = 0.0
        self._banned_s = self._ban_s = 0.0
        self._standing: Standing = "trusted"
        self._spell = self._bans = self._delivered = self._refusals = 0

    @property
    def queue(self) -> int:
        """Micro-batches sent to it and not finished."""
        return len(self._pending)

    def pending(self) -> tuple[AttemptKey, ...]:
        return tuple(self._pending)

    @property
    def our_part(self) -> float | None:
        """Share of its planned rate that it delivers to this sender; None before both are known."""
        if self._planned is None or self._delivered < _WINDOW:
            return None
        return 1 / (self._planned * max(sum(self._intervals_s) / len(self._intervals_s), _SHORTEST_S))

    @property
    def is_known(self) -> bool:
        """Whether its speed is known, planned or measured."""
        return bool(self._intervals_s)

    def interval_s(self, now_s: float, otherwise_s: float) -> float:
        """Seconds per micro-batch while it has any; ``otherwise_s`` is assumed if nothing is known.

        The mean of the window or, if longer, how long the current micro-batch has been taking: a replica that hangs
        loses its share before anything has timed out.
        """
        usual_s = sum(self._intervals_s) / len(self._intervals_s) if self._intervals_s else otherwise_s
        waiting_s = now_s - self._busy_since_s if self._pending else 0.0
        return max(usual_s, waiting_s, _SHORTEST_S)

    def standing(self, now_s: float, is_needed: bool = False) -> Standing:
        """Standing now; ``is_needed``: whether every replica of its stage is banned."""
        if self._standing == "banned" and now_s >= self._ban_ends_s(is_needed):
            self._standing = "probation"
        return self._standing

    def may_take(self, now_s: float, is_needed: bool) -> bool:
        """Whether it may get another micro-batch now."""
        standing = self.standing(now_s, is_needed)
        if standing == "banned" or now_s < self._full_until_s:
            return False
        return standing == "trusted" or not self._pending

    def sent(self, key: AttemptKey, now_s: float) -> None:
        if not self._pending:
            self._busy_since_s = now_s
        self._pending[key] = _Sent(now_s, self._spell)

    def finished(self, key: AttemptKey, now_s: float) -> None:
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

    def refused(self, key: AttemptKey, now_s: float, pause_s: float) -> None:
        """Note that it is full: it is asked again once it finishes a micro-batch, or after ``pause_s``."""
        self.withdrawn(key)
        pause_s = min(pause_s * 2**self._refusals, self._patience_s / _LONGEST_PAUSE)
        self._full_until_s = now_s + pause_s
        self._refusals = min(self._refusals + 1, 16)

    def withdrawn(self, key: AttemptKey) -> None:
        del self._pending[key]

    def failed(self, key: AttemptKey, now_s: float) -> None:
        """Count a time-out or a broken link, which at least about halves its estimated throughput."""
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

    def deadline_s(self, key: AttemptKey) -> float:
        """Moment from which ``key`` is overdue.

        It takes longer than usual for this replica, and there was no other sign of life for longer than usual between
        two (each within the patience). Whatever else the replica delivers, ``key`` is overdue one patience after the
        usual time."""
        sent = self._pending[key]
        late_s = max(sent.at_s + self._answers.wait_s, self._heard_s + self._silences.wait_s)
        usual_s = self._answers.usual_s
        return late_s if usual_s is None else min(late_s, sent.at_s + usual_s + self._patience_s)

    def _ban_ends_s(self, is_needed: bool) -> float:
        return self._banned_s + (self._patience_s if is_needed else self._ban_s)


@dataclass
class _Hop:
    """Replicas of one stage in self-clocked fair queueing.

    ``clock_s``: end of the latest turn; ``turns``: end of each replica's last turn, at most one of its micro-batches
    behind the clock, so that no replica saves up turns that it could not use."""

    clock_s: float = 0.0
    turns: dict[str, float] = field(default_factory=dict)


class Router:
    """Choice of replicas by one sender.

    A ``key`` names one attempt at one micro-batch. After ``sent`` it is pending until it is finished, failed, refused
    or withdrawn, or its replica is retired, whichever comes first; later calls for it do nothing and return False. Its
    gradient comes back from the same replica."""

    def __init__(self, me: str, patience_s: float) -> None:
        """``me`` decides which replica this sender begins with, so that not all begin with the same one."""
        self._me, self._patience_s = me, patience_s
        self._replicas: dict[str, ReplicaEstimate] = {}
        self._hops: dict[int, _Hop] = {}
        self._ways: dict[AttemptKey, str] = {}

    def set_replicas(self, stage: int, rates: Mapping[str, float | None], now_s: float) -> None:
        """Set the live replicas of a stage, each with its planned micro-batches a second, or None.

        Rates count only for new replicas, scaled by the share that this sender gets of the known ones. A replica that
        is missing is not picked any more; what it has stays pending.
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
        """Choose the replica that would finish the next micro-batch first; None if none may get it now.

        Changes nothing until ``sent``.
        """
        hop = self._hops.get(stage, _Hop())
        is_needed = self._are_all_banned(hop, now_s)
        free = [peer for peer in hop.turns if peer not in avoid and self._replicas[peer].may_take(now_s, is_needed)]
        ends: dict[str, float] = {}
        for peer in free:
            interval_s = self._interval_s(peer, hop.turns, now_s)
            ends[peer] = hop.turns[peer] + (self._replicas[peer].queue + 1) * interval_s
        return min(free, key=lambda peer: (ends[peer], peer), default=None)

    def sent(self, peer: str, key: AttemptKey, now_s: float) -> None:
        """Note that ``key`` was offered to ``peer``, which ``pick`` chose."""
        assert key not in self._ways, "each attempt has a key of its own"
        for hop in self._hops.values():
            if peer in hop.turns:
                self._take_turn(hop, peer, now_s)
        self._replicas[peer].sent(key, now_s)
        self._ways[key] = peer

    def finished(self, peer: str, key: AttemptKey, now_s: float) -> bool:
        """Note that the gradient has arrived. False, without effect, unless ``key`` is pending at ``peer``."""
        if not self._settle(peer, key):
            return False
        self._replicas[peer].finished(key, now_s)
        return True

    def refused(self, peer: str, key: AttemptKey, now_s: float) -> bool:
        """Note that the peer is full: it gets nothing for a moment, and its standing stays."""
        if not self._settle(peer, key):
            return False
        self._replicas[peer].refused(key, now_s, self._interval_s(peer, self._replicas, now_s))
        return True

    def withdrawn(self, peer: str, key: AttemptKey) -> bool:
        """Forget ``key``, which is not wanted from there any more; the peer's standing stays."""
        if not self._settle(peer, key):
            return False
        self._replicas[peer].withdrawn(key)
        return True

    def failed(self, peer: str, key: AttemptKey, now_s: float) -> bool:
        """Note a time-out or a broken link: the replica goes on probation or, failing on that, is banned.

        Bans let the others do its part: while all replicas of a stage are banned, no ban exceeds the patience.
        """
        if not self._settle(peer, key):
            return False
        self._replicas[peer].failed(key, now_s)
        return True

    def retire(self, peer: str) -> tuple[AttemptKey, ...]:
        """Forget a dead replica; returns the keys that were pending there, to be sent to others."""
        for hop in self._hops.values():
            hop.turns.pop(peer, None)
        replica = self._replicas.pop(peer, None)
        lost = replica.pending() if replica else ()
        for key in lost:
            del self._ways[key]
        return lost

    def overdue(self, now_s: float) -> tuple[AttemptKey, ...]:
        """Keys that take too long, the longest overdue first; the caller reports them as ``failed`` or waits on."""
        late = [(at_s, key) for key, at_s in self._deadlines() if at_s <= now_s]
        return tuple(key for _, key in sorted(late, key=lambda one: one[0]))

    def _are_all_banned(self, hop: _Hop, now_s: float) -> bool:
        return all(self._replicas[peer].standing(now_s) == "banned" for peer in hop.turns)

    def _parts(self, peers: Iterable[str]) -> list[float]:
        """Shares of their planned rates that known replicas deliver to this sender."""
        return [part for peer in peers if (part := self._replicas[peer].our_part) is not None]

    def _take_turn(self, hop: _Hop, peer: str, now_s: float) -> None:
        hop.clock_s = max(hop.clock_s, hop.turns[peer] + self._interval_s(peer, hop.turns, now_s))
        hop.turns[peer] = hop.clock_s
        for other, turn in hop.turns.items():
            hop.turns[other] = max(turn, hop.clock_s - self._interval_s(other, hop.turns, now_s))

    def _interval_s(self, peer: str, among: Iterable[str], now_s: float) -> float:
        """Seconds per micro-batch; an unknown replica is taken for the median one ``among`` the others."""
        replica = self._replicas[peer]
        if replica.is_known:
            return replica.interval_s(now_s, 0.0)
        known = [other for one in among if (other := self._replicas[one]).is_known]
        usual_s = statistics.median(other.interval_s(now_s, 0.0) for other in known) if known else 1.0
        return replica.interval_s(now_s, usual_s)

    def _head_start(self, peer: str) -> float:
        """Pseudo-random number in [0, 1) for this pair of sender and replica."""
        return int.from_bytes(hashlib.sha256(f"{self._me} {peer}".encode()).digest()[:6]) / 2**48

    def _settle(self, peer: str, key: AttemptKey) -> bool:
        if self._ways.get(key) != peer:
            return False
        del self._ways[key]
        return True

    def _deadlines(self) -> list[tuple[AttemptKey, float]]:
        return [(key, self._replicas[peer].deadline_s(key)) for key, peer in self._ways.items()]

    def _forget_unused(self, now_s: float) -> None:
        """Forget trusted replicas without stage and pending work; leaving does not clear the others."""
        used = {peer for hop in self._hops.values() for peer in hop.turns} | set(self._ways.values())
        for peer in self._replicas.keys() - used:
            if self._replicas[peer].standing(now_s) == "trusted":
                del self._replicas[peer]
