"""Limits and counters of a relay: who may connect how often, how fast bytes pass, and what was carried."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

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

_RATE_S = 10.0
"""Time over which the rate that a relay reports is averaged."""

_LEAST_SHARE = 4
"""Links that anybody may have while there is room."""


@dataclass(frozen=True)
class RelayLimits:
    """Limits that the operator sets. Rates in bytes a second, 0 for none.

    ``links``: spliced connections at once, half of which members alone may use; ``links_per_member``: of those that one
    member has opened; ``idle_s``: after so long without a byte a spliced connection is closed."""

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
        """Spliced connections by the member that has opened them, or the network of newcomers."""
        self._links_of_host: Counter[bytes] = Counter()
        self._guest_links = 0
        self._bytes_s, self._bytes_at_s = 0.0, 0.0
        self._all_bytes = TokenBuckets[None](limits.bytes_s or 1.0, max(limits.bytes_s, 1.0))
        self._member_bytes = TokenBuckets[bytes](limits.member_bytes_s or 1.0, max(limits.member_bytes_s, 1.0))
        self._guest_bytes = TokenBuckets[bytes](_GUEST_BYTES_S, _GUEST_BURST_BYTES)
        self._calls = TokenBuckets[bytes](_CALLS_PER_S, _CALLS_BURST)
        self._network_calls = TokenBuckets[str](_NETWORK_CALLS_PER_S, _NETWORK_CALLS_BURST)

    def count_request(self, network: str, now_s: float) -> None:
        """Count a request before its signatures are checked. Raises ``TryLater``."""
        if not self._network_calls.take(network, 1, now_s):
            raise TryLater("this relay has had too many requests from your network: try again in a minute")

    def set_rate(self, bytes_s: float) -> None:
        """Change the rate of all bytes together; 0 for no limit."""
        if bytes_s != self.limits.bytes_s:
            self.limits = replace(self.limits, bytes_s=bytes_s)
            self._all_bytes = TokenBuckets[None](bytes_s or 1.0, max(bytes_s, 1.0))

    def busy(self, now_s: float) -> float:
        """The share of its links or of its rate that is in use, whichever is more; 0 to 1."""
        rate = self._bytes_s * math.exp((self._bytes_at_s - now_s) / _RATE_S)
        of_rate = rate / self.limits.bytes_s if self.limits.bytes_s else 0.0
        return min(1.0, max(of_rate, self.open_links.total() / self.limits.links))

    def check_share(self, host: bytes) -> None:
        """Check that the runs of one host leave room for those of others, on a relay that serves all hosts.

        Raises ``TryLater``."""
        if not _is_fair(self._links_of_host[host], self.open_links.total(), self.limits.links):
            raise TryLater("this relay carries no more connections for this run's host: try again in a minute")

    def count_call(self, caller: bytes, now_s: float, *, is_guest: bool = False) -> None:
        """Count a connection that a member, or a newcomer from a network, opens. Raises ``TryLater``.

        Newcomers have half of the links at most, and those of one network leave room for others: without a pass
        nothing is known of them, and members need the rest."""
        guest_room = self.limits.links // 2
        if is_guest and not _is_fair(self.open_links[caller], self._guest_links, guest_room):
            raise TryLater("this relay carries no more newcomers of your network: try again in a minute")
        if self.open_links.total() >= self.limits.links:
            raise TryLater("this relay carries as many connections as it may: try again in a minute")
        if self.open_links[caller] >= self.limits.links_per_member or not self._calls.take(caller, 1, now_s):
            raise TryLater("this relay carries no more connections for you: try again in a minute")

    def open_link(self, caller: bytes, host: bytes, *, is_guest: bool = False) -> None:
        """Note a connection to a client of this host's runs."""
        self.open_links[caller] += 1
        self._links_of_host[host] += 1
        self._guest_links += is_guest
        self.carried.links += 1

    def close_link(self, caller: bytes, host: bytes, *, is_guest: bool = False) -> None:
        for links, key in ((self.open_links, caller), (self._links_of_host, host)):
            links[key] -= 1
            if not links[key]:
                del links[key]
        self._guest_links -= is_guest

    def pass_on(self, sender: bytes, size_bytes: int, now_s: float, *, is_guest: bool) -> float:
        """Count bytes of a sender; returns for how long it has to pause."""
        self.carried.sent_bytes += size_bytes
        decay = math.exp((self._bytes_at_s - now_s) / _RATE_S)
        self._bytes_s, self._bytes_at_s = self._bytes_s * decay + size_bytes / _RATE_S, now_s
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


def _is_fair(held: int, total: int, most: int) -> bool:
    """Whether who holds some of ``most`` links, of which ``total`` are in use, may have another one.

    Nobody takes more than half of what the others leave: one alone gets a third of all, and there is always some left
    for the next one."""
    return total < most and held < max(_LEAST_SHARE, (most - total) // 2)
