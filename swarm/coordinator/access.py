"""Limits on joins, by rate and at a time, asked before anything that costs time, memory or a connection.

A stranger's identity costs nothing, so what is counted is the network that it comes from. Identities that the run knows
are counted by themselves: a flood of strangers does not keep them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.swarm.errors import TryLater
from shoal.swarm.protocol.run_file import AccessSection
from shoal.swarm.token_buckets import TokenBuckets

REJOINS_PER_MINUTE = 30
"""Joins of one known identity, as of a machine that crashes at once and is started again by a script."""

OBSERVERS, OBSERVERS_PER_NETWORK = 64, 32
"""Observers at one time; each is on everybody's roster."""

AT_ONCE, AT_ONCE_PER_NETWORK = 64, 16
"""Joins under way at one time. Each may take seconds and sockets, to dial the newcomer back."""


@dataclass
class Access:
    """Limits of one run and what is used up of them. Not journaled: they begin anew with the coordinator."""

    limits: AccessSection
    _in_all: TokenBuckets[bool] = field(init=False)
    _networks: TokenBuckets[tuple[str, bool]] = field(init=False)
    _known: TokenBuckets[str] = field(init=False, default_factory=lambda: _per_minute(REJOINS_PER_MINUTE))
    _under_way: dict[bytes, str] = field(init=False, default_factory=dict)
    """Networks of the joins that are being answered, by CURVE key."""

    def __post_init__(self) -> None:
        self._in_all = _per_minute(self.limits.joins_per_minute)
        self._networks = _per_minute(self.limits.joins_per_minute_per_network)

    def follow(self, limits: AccessSection) -> None:
        """Take other limits, if the host has amended them; what is used up of them begins anew."""
        if limits != self.limits:
            self.limits = limits
            self.__post_init__()

    def take_known(self, peer: str, now_s: float) -> None:
        """Count the join of a known identity whose certificate is verified. Raises ``TryLater``."""
        wait_s = self._known.wait_s(peer, 1, now_s)
        if wait_s:
            raise TryLater(
                f"this identity has joined {REJOINS_PER_MINUTE} times within a minute: try again in {_text(wait_s)}"
            )
        self._known.take(peer, 1, now_s)

    def take(self, network: str, is_observer: bool, now_s: float) -> None:
        """Count the join of a stranger. Raises ``TryLater``."""
        of_network, of_all = (network, is_observer), is_observer
        wait_s = self._networks.wait_s(of_network, 1, now_s)
        if wait_s:
            raise TryLater(
                f"this run lets {self.limits.joins_per_minute_per_network} a minute in from one network, and so many "
                f"have come from {network}: try again in {_text(wait_s)} (or ask the host for more [access] "
                f"joins_per_minute_per_network)"
            )
        wait_s = self._in_all.wait_s(of_all, 1, now_s)
        if wait_s:
            raise TryLater(
                f"this run lets {self.limits.joins_per_minute} a minute in, and so many have come: "
                f"try again in {_text(wait_s)} (or ask the host for more [access] joins_per_minute)"
            )
        self._networks.take(of_network, 1, now_s)
        self._in_all.take(of_all, 1, now_s)

    @contextmanager
    def under_way(self, curve_key: bytes, network: str, is_known: bool) -> Iterator[None]:
        """Hold a place while a join is answered. Strangers leave room for known identities. Raises ``TryLater``."""
        if curve_key in self._under_way:
            raise TryLater("an earlier request of this process to join is being answered: try again in a few seconds")
        most, here = (2 * AT_ONCE, 0) if is_known else (AT_ONCE, list(self._under_way.values()).count(network))
        if len(self._under_way) >= most or here >= AT_ONCE_PER_NETWORK:
            raise TryLater("too many are joining at this moment: try again in a few seconds")
        self._under_way[curve_key] = network
        try:
            yield
        finally:
            del self._under_way[curve_key]


def choose_evicted(network: str, newcomers: Iterable[tuple[str, str, int]]) -> str | None:
    """Return the newcomer that has to leave for one more from ``network``; None if nobody has to.

    ``newcomers``: (peer, network, standing), in the order of joining. Places are shared evenly among networks: of the
    network that has the most, the newcomer with the least standing leaves, and of equals the last to join."""
    here = list(newcomers)
    counts = Counter(of for _, of, _ in here)
    crowded, most = max(counts.items(), key=lambda one: one[1], default=("", 0))
    if counts[network] + 1 >= most:
        return None
    done = [(standing, -at, peer) for at, (peer, of, standing) in enumerate(here) if of == crowded]
    return min(done)[2]


def _per_minute(tokens: int) -> TokenBuckets[Any]:
    """Buckets of which so many tokens may be taken at once, and as many are refilled a minute."""
    return TokenBuckets(tokens / 60.0, tokens)


def _text(wait_s: float) -> str:
    return f"{max(1.0, wait_s):.0f} s"
