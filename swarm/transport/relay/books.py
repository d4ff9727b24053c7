"""Limits and counters of a relay: who may connect how often, how fast bytes pass, and what was carried."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shoal.swarm.errors import TryLater
from shoal.swarm.token_buckets import TokenBuckets

MAX_CLIENTS = 4096
"""Most registered clients."""

MAX_REGISTRATIONS_PER_HOST = 2048
"""Most clients of one host's runs: a full run and its observers."""

_GUEST_BYTES_S, _GUEST_BURST_BYTES = 2.0**18, 2.0**24
"""Rate at which all newcomers of a network send to a host, which is control messages alone. Members that came as
newcomers keep their connections; what the host sends them is not limited by this."""

_CALLS_PER_S, _CALLS_BURST = 20.0, 1024.0
"""Connections that one member opens: a round of a full group needs two with each of the others."""

_NETWORK_CALLS_PER_S, _NETWORK_CALLS_BURST = 100.0, 2000.0
"""Requests from one network whose signatures are checked, which takes half a millisecond: many members may stand
behind one NAT."""

_LEAST_PAUSE_S = 0.005


@dataclass(frozen=True)
class RelayLimits:
    """Limits that the operator sets. Rates in bytes a second, 0 for none.

    ``links``: spliced connections at once; ``links_per_member``: of those that one member has opened;
    ``idle_s``: after so long without a byte a spliced connection is closed."""

    bytes_s: float = 0.0
    member_bytes_s: float = 0.0
    links: int = 1024
    links_per_member: int = 256
    idle_s: float = 1800.0


@dataclass
class Carried:
    """Counters since a relay has started."""

    sent_bytes: int = 0
    links: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class RelayBooks:
    """Books of one relay, by member (its identity key) and by network. Time is an argument."""

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self.carried = Carried()
        self.open_links: Counter[bytes] = Counter()
        """Spliced connections by the member that has opened them."""
        self._all_bytes = TokenBuckets[None](limits.bytes_s or 1.0, max(limits.bytes_s, 1.0))
        self._member_bytes = TokenBuckets[bytes](limits.member_bytes_s or 1.0, max(limits.member_bytes_s, 1.0))
        self._guest_bytes = TokenBuckets[bytes](_GUEST_BYTES_S, _GUEST_BURST_BYTES)
        self._calls = TokenBuckets[bytes](_CALLS_PER_S, _CALLS_BURST)
        self._network_calls = TokenBuckets[str](_NETWORK_CALLS_PER_S, _NETWORK_CALLS_BURST)

    def count_request(self, network: str, now_s: float) -> None:
        """Count a request before its signatures are checked. Raises ``TryLater``."""
        if not self._network_calls.take(network, 1, now_s):
            raise TryLater("this relay has had too many requests from your network: try again in a minute")

    def count_call(self, caller: bytes, now_s: float) -> None:
        """Count a connection that a member, or a newcomer from a network, opens. Raises ``TryLater``."""
        if self.open_links.total() >= self.limits.links:
            raise TryLater("this relay carries as many connections as it may: try again in a minute")
        if self.open_links[caller] >= self.limits.links_per_member or not self._calls.take(caller, 1, now_s):
            raise TryLater("this relay carries no more connections for you: try again in a minute")

    def open_link(self, caller: bytes) -> None:
        self.open_links[caller] += 1
        self.carried.links += 1

    def close_link(self, caller: bytes) -> None:
        self.open_links[caller] -= 1
        if not self.open_links[caller]:
            del self.open_links[caller]

    def pass_on(self, sender: bytes, size_bytes: int, now_s: float, *, is_guest: bool) -> float:
        """Count bytes of a sender; returns for how long it has to pause."""
        self.carried.sent_bytes += size_bytes
        pause_s = 0.0
        if self.limits.bytes_s:
            self._all_bytes.take(None, size_bytes, now_s)
            pause_s = self._all_bytes.wait_s(None, 1, now_s)
        if self.limits.member_bytes_s:
            self._member_bytes.take(sender, size_bytes, now_s)
            pause_s = max(pause_s, self._member_bytes.wait_s(sender, 1, now_s))
        if is_guest:
            self._guest_bytes.take(sender, size_bytes, now_s)
            pause_s = max(pause_s, self._guest_bytes.wait_s(sender, 1, now_s))
        return max(pause_s, _LEAST_PAUSE_S) if pause_s else 0.0
