"""Pacing of the uplink: the kernel divides the link's measured rate among the receivers of a round.

TCP needs seconds to divide a link evenly among flows, and a round ends with its last flow. So the kernel paces them:
all end at the same time, and no queue grows on the path (minimum allocation for the desired duration: Chowdhury et al.
2014, "Efficient Coflow Scheduling with Varys"). Kernels other than Linux cannot pace, so there TCP is left alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median_high
from typing import TYPE_CHECKING

from shoal.swarm.transport.tcp.sockets import acked_bytes, pace, renew_model, shortest_round_trip_s

if TYPE_CHECKING:
    from shoal.swarm.transport.bulk.data_connection import DataConnection
    from shoal.swarm.transport.bulk.link import Link

TICK_S = 0.1
_WINDOW_S = 0.5
_PACED_ROUNDS = 10
_HEADROOM, _MAX_HEADROOM = 0.02, 0.5
_STEP_DOWN = 0.93
_REACHED, _USUAL_REACHES, _STEEPNESS = 0.985, 2, 3
"""A round reaches its pace at this share of it. A correct pace is reached once or twice in a row: each time the pace
rises a little, until it exceeds what the link carries."""

_FASTEST_BPS = 1e9
"""Above this rate processors are the bottleneck, not links, and pacing costs them more than it gains."""

_MAX_LAG_S = 0.75
"""Connections that lag behind by no more catch up. BBR pauses a connection for less than half of this time, to measure
its shortest round trip."""

_MODEL_S = 8.0
"""Lifetime of BBR's model of a path, which BBR would pause to measure again after ten seconds."""

_MAX_SLEEP_S, _MAX_SLEPT_BYTES = 0.003, 2**15
"""Less than a round trip takes, and a quarter of what waits in the kernel to be sent."""

_LOCAL_TRIP_S = 0.001
"""Shortest round trip of a local network, where flows become even at once and their ends limit their rates."""


class Uplink:
    """Estimate of the uplink's rate, measured while data was waiting, and the pace derived from it.

    A round's rate is the upper quartile of its half seconds. The pace is that rate plus a little headroom; plus much
    headroom at the beginning and after the pace was reached several times in a row, so that a faster link soon shows.
    When two of three rounds had a lower rate, the pace falls step by step: too fast a pace makes flows uneven again,
    and uneven flows do not show all that a link can carry. A single slow round does not lower it: this machine may have
    been busy for a moment, and all members would wait for it until the pace had risen again. One round in eleven is not
    paced, so that no effect lowers the pace for good.
    """

    def __init__(self) -> None:
        self._base_bps = 0.0
        self._headroom = _MAX_HEADROOM
        self._reached = self._paced_rounds = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._rates_bps: list[float] = []
        self._recent_bps: deque[float] = deque(maxlen=3)
        """Rates of the last rounds; that of an unpaced round is not below the known rate."""

    @property
    def pace_bps(self) -> float | None:
        """Bits a second; None before a rate is known, in an unpaced round, and on links too fast to be paced."""
        paced = self._base_bps * (1 + self._headroom)
        return paced if 0 < paced <= _FASTEST_BPS and self._paced_rounds < _PACED_ROUNDS else None

    @property
    def sleep_s(self) -> float:
        """Time for which received data may wait in the kernel; 0 for links that are too fast or unknown."""
        if not 0 < self._base_bps <= _FASTEST_BPS:
            return 0.0
        return min(_MAX_SLEEP_S, 8 * _MAX_SLEPT_BYTES / self._base_bps)

    def record(self, now_s: float, arrived_bytes: int, *, is_waiting: bool) -> None:
        """Record how many bytes have arrived at the receivers so far, and whether more are waiting to be sent."""
        if not is_waiting:
            self._samples.clear()
            return
        self._samples.append((now_s, arrived_bytes))
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        since_s, before_bytes = self._samples[0]
        if now_s - since_s >= _WINDOW_S and arrived_bytes > before_bytes:
            self._rates_bps.append(8 * (arrived_bytes - before_bytes) / (now_s - since_s))

    def end_round(self) -> None:
        """Derive the next round's pace from this round's samples."""
        if self._rates_bps:
            self._learn(sorted(self._rates_bps)[3 * len(self._rates_bps) // 4])
        self._rates_bps.clear()
        self._samples.clear()

    def _learn(self, rate_bps: float) -> None:
        pace_bps, least_bps = self.pace_bps, 0.0
        if self._paced_rounds == _PACED_ROUNDS:
            self._paced_rounds = 0
            rate_bps = max(rate_bps, self._base_bps)  # TCP alone is that uneven
        elif pace_bps is not None:
            self._paced_rounds += 1
            self._reached = self._reached + 1 if rate_bps >= _REACHED * pace_bps else 0
            if self._headroom < _MAX_HEADROOM:
                least_bps = _STEP_DOWN * pace_bps
            steps = max(0, self._reached - _USUAL_REACHES)
            self._headroom = min(_HEADROOM * _STEEPNESS**steps, _MAX_HEADROOM)
        self._recent_bps.append(rate_bps)
        self._base_bps = max(rate_bps, median_high(self._recent_bps), least_bps)


def merge_shares(rounds: Sequence[Mapping[bytes, float]]) -> dict[bytes, float]:
    """Merge the shares, by key, of simultaneous rounds. Stages are about equally large, so each gets the same."""
    keys = {key for shares in rounds for key in shares}
    return {key: sum(shares.get(key, 0.0) for shares in rounds) / len(rounds) for key in sorted(keys)}


def divide_pace(
    pace_bps: float, shares: Mapping[bytes, float], arrived_bytes: Mapping[bytes, int], waiting: Collection[bytes]
) -> dict[bytes, float]:
    """Divide the pace among receivers, in bits a second; the ``waiting`` ones, with data left to send, get all of it.

    A receiver that lags a little behind, because its connection paused for a moment, gets a little more, as otherwise
    the round would wait for it. One that lags far behind cannot take more: its path is slower than our uplink."""
    lead = max((arrived_bytes.get(key, 0) / share for key, share in shares.items()), default=0.0)
    weights = {}
    for key, share in shares.items():
        behind_s = 8 * (lead - arrived_bytes.get(key, 0) / share) / pace_bps
        weights[key] = share * (1 + behind_s if behind_s <= _MAX_LAG_S else 1.0)
    total = sum(weights[key] for key in waiting)
    return {key: pace_bps * (weights[key] / total if key in waiting else share) for key, share in shares.items()}


class Pacing:
    """Paces the connections of a round's links; on the I/O thread."""

    def __init__(self, local_trip_s: float = _LOCAL_TRIP_S) -> None:
        """``local_trip_s``: connections with a shorter round trip are not paced."""
        self._local_trip_s = local_trip_s
        self._uplink = Uplink()
        self._shares: Mapping[bytes, float] = {}
        self._acked: dict[DataConnection, int] = {}
        self._paced: dict[DataConnection, float] = {}
        """The time at which each connection's BBR model was renewed."""
        self._arrived_bytes: Counter[bytes] = Counter()
        self._next_update_s = 0.0
        self._is_far = False

    @property
    def is_on(self) -> bool:
        return bool(self._shares)

    @property
    def sleep_s(self) -> float:
        """Sleep of the thread between two reads, so that data read together is acknowledged together.

        Otherwise Linux acknowledges every second packet: 1.7 % of a link that is busy in both directions."""
        return self._uplink.sleep_s if self._is_far else 0.0

    def begin_round(self, shares: Mapping[bytes, float]) -> None:
        """End the current round and begin one in which the holder of each key gets its share; empty: begin none."""
        if self._shares:
            self._uplink.end_round()
            for connection in self._paced:
                if not connection.is_closed:
                    pace(connection.socket, None)
            self._paced.clear()
            self._acked.clear()
            self._arrived_bytes.clear()
        self._shares, self._next_update_s, self._is_far = shares, 0.0, False

    def update(self, now_s: float, links: Mapping[bytes, Link]) -> None:
        """Measure what has arrived and set the paces, every ``TICK_S``."""
        if now_s < self._next_update_s:
            return
        self._next_update_s = now_s + TICK_S
        towards = [
            link for link in list(links.values()) if link.remote_key in self._shares
        ]  # the event loop adds links
        for link in towards:
            for connection in link.connections:
                acked = acked_bytes(connection.socket)
                self._arrived_bytes[link.remote_key] += acked - self._acked.setdefault(connection, acked)
                self._acked[connection] = acked
        waiting = {link.remote_key for link in towards if any(one.is_blocked for one in link.connections)}
        self._uplink.record(now_s, self._arrived_bytes.total(), is_waiting=bool(waiting))
        far = [(link, one) for link in towards for one in link.connections if self._goes_far(one)]
        self._is_far = bool(far)
        if (pace_bps := self._uplink.pace_bps) is None:
            return
        paces_bps = divide_pace(pace_bps, self._shares, self._arrived_bytes, waiting)
        for link, connection in far:  # of two links with a member, each side sends over one
            pace(connection.socket, paces_bps[link.remote_key] / len(link.connections))
            if now_s - self._paced.get(connection, -math.inf) >= _MODEL_S:
                renew_model(connection.socket)
                self._paced[connection] = now_s

    def _goes_far(self, connection: DataConnection) -> bool:
        return shortest_round_trip_s(connection.socket) >= self._local_trip_s
