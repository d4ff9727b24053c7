"""What one sender knows of one replica of the next stage: how fast it delivers, and whether it may be given more.

Pure: every moment is an argument, in seconds of one clock that never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
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


class Replica(Generic[KeyT]):
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
