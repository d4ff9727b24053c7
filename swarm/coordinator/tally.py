"""A figure for people to read that is a sum over all members: not counted anew for every message. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

EXACT_MEMBERS = 64
"""Up to here it is always counted."""

COUNTED_S = 0.25
"""So old it may be in larger swarms."""


@dataclass
class Tally:
    """The last count, when it was made and of which round."""

    count: int = 0
    counted_s: float = -math.inf
    round: int = -1

    def take(self, round_number: int, now_s: float, members: int, count: Callable[[], int]) -> int:
        """What ``count`` gives, or has given in this round a moment ago."""
        is_fresh = round_number == self.round and self.counted_s <= now_s < self.counted_s + COUNTED_S
        if members <= EXACT_MEMBERS or not is_fresh:
            self.count, self.counted_s, self.round = count(), now_s, round_number
        return self.count
