"""Limits on the rates at which this process sends and receives, over all its links together.

A token bucket for each direction. The data sockets ask before they move bytes and wait where none are left: TCP then
slows the other side down. Control messages never wait, but what they take is missing to the data. Packets' headers are
counted, so that the machine's router sees no more than its owner has allowed.
"""

from __future__ import annotations

import threading

_BURST_S = 0.1
"""What may move at once after a rest, as a time at the limit's rate: a reading of a second shows no more than the limit
and a tenth."""

_LEAST_BURST_BYTES = 4096
_MAX_DEBT_S = 1.0
"""Control messages put the data this far back at most, whatever they take."""

_RECEIVE_S, _LEAST_RECEIVE_BYTES = 0.25, 2**16
"""What may wait in the kernel to be read, on one connection: the other side has sent it already."""

_WITH_HEADERS = 1500 / 1448
"""Bytes of a packet for each of its bytes of data, with the headers of IP and TCP."""


class RateLimit:
    """Limit of one direction, and all bytes that have moved in it."""

    def __init__(self, bps: float = 0.0) -> None:
        self.bps = bps
        """Bits a second; 0 for no limit. May be changed at any time."""
        # The I/O thread writes only the first counter, the event loop only the second, and a lock guards the third.
        self._data_bytes = 0
        self._control_bytes = 0
        self._fetched_bytes = 0
        self._fetched_lock = threading.Lock()
        self._paid_bytes = 0
        self._left_bytes = 0.0
        self._since_s: float | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that have moved so far, with the headers of packets."""
        return round(_WITH_HEADERS * self._moved_bytes)

    @property
    def _moved_bytes(self) -> int:
        return self._data_bytes + self._control_bytes + self._fetched_bytes

    def count_control(self, size_bytes: int) -> None:
        """Count a control message; on the event loop."""
        self._control_bytes += size_bytes

    def count_data(self, size_bytes: int) -> None:
        """Count bytes of a data socket; on the I/O thread, like the following methods."""
        self._data_bytes += size_bytes

    def count_fetched(self, size_bytes: int) -> None:
        """Count bytes that came from a server and not over a link, such as training data; on any thread."""
        with self._fetched_lock:
            self._fetched_bytes += size_bytes

    def allowed_bytes(self, now_s: float) -> int | None:
        """Return how many bytes may move now; None where there is no limit."""
        if not self.bps:
            self._since_s = None
            return None
        self._refill(now_s)
        return max(0, int(self._left_bytes / _WITH_HEADERS))

    def wait_s(self, now_s: float) -> float:
        """Return how long to wait until it is worth to go on; 0 where bytes may move at once."""
        if not self.bps:
            return 0.0
        self._refill(now_s)
        return max(0.0, self._burst_bytes / 2 - self._left_bytes) * 8 / self.bps

    @property
    def _burst_bytes(self) -> float:
        return max(_BURST_S * self.bps / 8, _LEAST_BURST_BYTES)

    def _refill(self, now_s: float) -> None:
        moved_bytes = self._moved_bytes
        if self._since_s is None:  # the limit is new: what moved before does not count
            self._left_bytes, self._since_s, self._paid_bytes = self._burst_bytes, now_s, moved_bytes
            return
        taken = _WITH_HEADERS * (moved_bytes - self._paid_bytes)
        refilled = self._left_bytes + self.bps / 8 * (now_s - self._since_s)
        debt = -max(_MAX_DEBT_S * self.bps / 8, _LEAST_BURST_BYTES)
        self._left_bytes = max(debt, min(self._burst_bytes, refilled) - taken)
        self._since_s, self._paid_bytes = now_s, moved_bytes


class TrafficLimits:
    """Limits of a process in both directions. The rates may be changed at any time."""

    def __init__(self, upload_bps: float = 0.0, download_bps: float = 0.0) -> None:
        self.upload, self.download = RateLimit(upload_bps), RateLimit(download_bps)

    @property
    def are_set(self) -> bool:
        return bool(self.upload.bps or self.download.bps)

    @property
    def total_bytes(self) -> int:
        """Bytes that have moved so far in both directions, with the headers of packets."""
        return self.upload.total_bytes + self.download.total_bytes

    @property
    def receive_buffer_bytes(self) -> int | None:
        """Size of a connection's receive buffer; None for the system's own."""
        if not self.download.bps:
            return None
        return max(int(_RECEIVE_S * self.download.bps / 8), _LEAST_RECEIVE_BYTES)

    def usable_bps(self, measured_bps: float) -> float:
        """Return what this machine's link carries within the limits. ``measured_bps``: 0 where that is not known; then
        the limits count alone, and without any it stays unknown.

        A round sends and receives about as much, so the lower limit counts."""
        known = [bps for bps in (measured_bps, self.upload.bps, self.download.bps) if bps]
        return min(known, default=0.0)
