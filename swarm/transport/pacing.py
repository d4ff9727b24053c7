"""Pacing of the uplink: each receiver of a round gets its share of what the link has been carrying.

Flows that share a link take TCP seconds to become even, and a round ends with its last one. So the kernel paces them:
all are done at one moment, and no queue grows on the way (minimum allocation for the desired duration: Chowdhury et al.
2014, "Efficient Coflow Scheduling with Varys"). Where a kernel cannot pace (other than Linux), TCP goes as it sees fit.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median_high
from typing import TYPE_CHECKING

from shoal.swarm.transport.sockets import acked_bytes, pace, renew_model, shortest_round_trip_s

if TYPE_CHECKING:
    from shoal.swarm.transport.link import Connection, Link

TICK_S = 0.1
_WINDOW_S = 0.5
_PACED_ROUNDS = 10
_HEADROOM, _MOST_HEADROOM = 0.02, 0.5
_STEP_DOWN = 0.93
_WAS_REACHED, _USUAL_REACHES, _STEEPNESS = 0.985, 2, 3
"""A pace that is right is reached once or twice: each time a little is added, until it is more than the link has."""

_FASTEST_BPS = 1e9
"""Above, it is processors and not links that limit us, and pacing costs them more than it brings."""

_MADE_UP_S = 0.75
"""BBR lets a connection stand still for less than half of it, to see how short the way is."""

_MODEL_S = 8.0
"""How long BBR's model of a way is left alone: it would stop to look anew after ten seconds."""

_MOST_REST_S, _MOST_RESTED_BYTES = 0.003, 2**15
"""A round trip takes longer, and a quarter of what waits in the kernel to be sent."""

_SHORT_WAY_S = 0.001
"""Within a house flows are even at once, and what they carried was as much as their ends had time for."""


class Uplink:
    """Estimate of the uplink's rate, from what arrived while more was waiting, and the pace that follows.

    A round's figure is what its better half seconds had. The pace is that and a little more; a lot more before anything
    is settled, and whenever it was reached several times in a row: a link that is faster than it seemed soon shows.
    When two rounds of three had less, it comes down step by step: too fast a pace makes flows uneven again, and uneven
    ones do not show all that a link has. One alone does not lower it: somebody was busy for a moment, and everybody
    would wait for us in the rounds that it takes until the pace is right again. Every so many rounds go without a pace,
    so that nothing wears it down for good.
    """

    def __init__(self) -> None:
        self._base_bps = 0.0
        self._headroom = _MOST_HEADROOM
        self._reached = self._paced_rounds = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._rates_bps: list[float] = []
        self._figures_bps: deque[float] = deque(maxlen=3)
        """Of the last rounds; of one without a pace no less than what was known."""

    @property
    def pace_bps(self) -> float | None:
        """Bits a second; None before anything is known, in a round without, and where there is nothing to pace."""
        paced = self._base_bps * (1 + self._headroom)
        return paced if 0 < paced <= _FASTEST_BPS and self._paced_rounds < _PACED_ROUNDS else None

    @property
    def rest_s(self) -> float:
        """How long what arrives may lie in the kernel; 0 for links that are too fast for that, or not known."""
        if not 0 < self._base_bps <= _FASTEST_BPS:
            return 0.0
        return min(_MOST_REST_S, 8 * _MOST_RESTED_BYTES / self._base_bps)

    def saw(self, now_s: float, arrived_bytes: int, *, is_waiting: bool) -> None:
        """A sample: the bytes that have arrived at the other ends so far; whether more wait to be sent."""
        if not is_waiting:
            self._samples.clear()
            return
        self._samples.append((now_s, arrived_bytes))
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        since_s, before_bytes = self._samples[0]
        if now_s - since_s >= _WINDOW_S and arrived_bytes > before_bytes:
            self._rates_bps.append(8 * (arrived_bytes - before_bytes) / (now_s - since_s))

    def end(self) -> None:
        """The round is over."""
        if self._rates_bps:
            self._learn(sorted(self._rates_bps)[3 * len(self._rates_bps) // 4])
        self._rates_bps.clear()
        self._samples.clear()

    def _learn(self, figure_bps: float) -> None:
        pace_bps, least_bps = self.pace_bps, 0.0
        if self._paced_rounds == _PACED_ROUNDS:
            self._paced_rounds = 0
            figure_bps = max(figure_bps, self._base_bps)  # so uneven is TCP alone
        elif pace_bps is not None:
            self._paced_rounds += 1
            self._reached = self._reached + 1 if figure_bps >= _WAS_REACHED * pace_bps else 0
            if self._headroom < _MOST_HEADROOM:
                least_bps = _STEP_DOWN * pace_bps
            steps = max(0, self._reached - _USUAL_REACHES)
            self._headroom = min(_HEADROOM * _STEEPNESS**steps, _MOST_HEADROOM)
        self._figures_bps.append(figure_bps)
        self._base_bps = max(figure_bps, median_high(self._figures_bps), least_bps)


def together(rounds: Sequence[Mapping[bytes, float]]) -> dict[bytes, float]:
    """The shares of several rounds at once, by key: stages are cut to be equally large, so each round gets as much."""
    keys = {key for shares in rounds for key in shares}
    return {key: sum(shares.get(key, 0.0) for shares in rounds) / len(rounds) for key in sorted(keys)}


def portions(
    pace_bps: float, shares: Mapping[bytes, float], arrived_bytes: Mapping[bytes, int], waiting: Collection[bytes]
) -> dict[bytes, float]:
    """The pace of what we send to each, in bits a second: of ``waiting``, to whom there is more to send, all is shared.

    Who has got less of its share than the one that got most, as its connection stood still for a moment, gets a little
    more, or the round would wait for it. One that has got far less cannot take more: the way to it is slower than ours.
    """
    lead = max((arrived_bytes.get(key, 0) / share for key, share in shares.items()), default=0.0)
    weights = {}
    for key, share in shares.items():
        behind_s = 8 * (lead - arrived_bytes.get(key, 0) / share) / pace_bps
        weights[key] = share * (1 + behind_s if behind_s <= _MADE_UP_S else 1.0)
    total = sum(weights[key] for key in waiting)
    return {key: pace_bps * (weights[key] / total if key in waiting else share) for key, share in shares.items()}


class Pacing:
    """Keeps the connections of a round's links at their pace. On the data plane's thread."""

    def __init__(self, short_way_s: float = _SHORT_WAY_S) -> None:
        """``short_way_s``: connections with a shorter round trip are not paced."""
        self._short_way_s = short_way_s
        self._uplink = Uplink()
        self._shares: Mapping[bytes, float] = {}
        self._acked: dict[Connection, int] = {}
        self._paced: dict[Connection, float] = {}
        """With the moment at which each one's model of its way was new."""
        self._arrived_bytes: Counter[bytes] = Counter()
        self._next_look_s = 0.0
        self._is_far = False

    @property
    def is_on(self) -> bool:
        return bool(self._shares)

    @property
    def rest_s(self) -> float:
        """How long to leave all connections alone between two looks at them. What is read at once has one receipt:
        of every second packet, as Linux sends them else, they take 1.7 % of a link that is busy both ways."""
        return self._uplink.rest_s if self._is_far else 0.0

    def share(self, shares: Mapping[bytes, float]) -> None:
        """Begin a round: of what we send, each key's holder gets that share. None: the round is over."""
        if self._shares:
            self._uplink.end()
            for connection in self._paced:
                if not connection.is_closed:
                    pace(connection.socket, None)
            self._paced.clear()
            self._acked.clear()
            self._arrived_bytes.clear()
        self._shares, self._next_look_s, self._is_far = shares, 0.0, False

    def look(self, now_s: float, links: Mapping[bytes, Link]) -> None:
        """See what has arrived, and pace what is to come, if it is time to; to be called that often."""
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + TICK_S
        towards = [link for link in list(links.values()) if link.remote_key in self._shares]  # the event loop adds some
        for link in towards:
            for connection in link.connections:
                acked = acked_bytes(connection.socket)
                self._arrived_bytes[link.remote_key] += acked - self._acked.setdefault(connection, acked)
                self._acked[connection] = acked
        waiting = {link.remote_key for link in towards if any(one.is_blocked for one in link.connections)}
        self._uplink.saw(now_s, self._arrived_bytes.total(), is_waiting=bool(waiting))
        far = [(link, one) for link in towards for one in link.connections if self._goes_far(one)]
        self._is_far = bool(far)
        if (pace_bps := self._uplink.pace_bps) is None:
            return
        paces_bps = portions(pace_bps, self._shares, self._arrived_bytes, waiting)
        for link, connection in far:  # of two links with a member, each side sends over the other one's
            pace(connection.socket, paces_bps[link.remote_key] / len(link.connections))
            if now_s - self._paced.get(connection, -math.inf) >= _MODEL_S:
                renew_model(connection.socket)
                self._paced[connection] = now_s

    def _goes_far(self, connection: Connection) -> bool:
        return shortest_round_trip_s(connection.socket) >= self._short_way_s
