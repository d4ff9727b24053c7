"""Limits on joins, by rate and at a time, asked before anything that costs time, memory or a connection.

A stranger's identity costs nothing, so what is counted is the network that it comes from. Identities that the run knows
are counted by themselves: a flood of strangers does not keep them out."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal.swarm.errors import TryLater
from shoal.swarm.protocol.run_file import AccessSection

REJOINS_PER_MINUTE = 30
"""Joins of one known identity, as of a machine that crashes at once and is started again by a script."""

OBSERVERS, OBSERVERS_PER_NETWORK = 64, 32
"""Observers at one time; each is on everybody's roster."""

AT_ONCE, AT_ONCE_PER_NETWORK = 64, 16
"""Joins under way at one time. Each may take seconds and sockets, to dial the newcomer back."""

_MAX_BUCKETS = 4096


class Buckets:
    """Token buckets by key: ``per_minute`` tokens are refilled, and as many may be taken at once."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        """Tokens and their moment, in the order of use; a key that is missing has all its tokens."""

    def wait_s(self, key: Hashable, now_s: float) -> float:
        """Return how long until there is a token; 0 if there is one."""
        return max(0.0, 1.0 - self._tokens(key, now_s)) * 60.0 / self.per_minute

    def take(self, key: Hashable, now_s: float) -> None:
        """Take a token of a key that has one."""
        self._left[key] = (self._tokens(key, now_s) - 1.0, now_s)
        self._left.move_to_end(key)
        while len(self._left) > _MAX_BUCKETS:
            self._left.popitem(last=False)

    def _tokens(self, key: Hashable, now_s: float) -> float:
        tokens, at_s = self._left.get(key, (float(self.per_minute), now_s))
        return min(float(self.per_minute), tokens + max(0.0, now_s - at_s) * self.per_minute / 60.0)


@dataclass
class Access:
    """Limits of one run and what is used up of them. Not journaled: they begin anew with the coordinator."""

    limits: AccessSection
    _in_all: Buckets = field(init=False)
    _networks: Buckets = field(init=False)
    _known: Buckets = field(init=False, default_factory=lambda: Buckets(REJOINS_PER_MINUTE))
    _under_way: dict[bytes, str] = field(init=False, default_factory=dict)
    """Networks of the joins that are being answered, by CURVE key."""

    def __post_init__(self) -> None:
        self._in_all = Buckets(self.limits.joins_per_minute)
        self._networks = Buckets(self.limits.joins_per_minute_per_network)

    def take_known(self, peer: str, now_s: float) -> None:
        """Count the join of a known identity whose certificate is verified. Raises ``TryLater``."""
        wait_s = self._known.wait_s(peer, now_s)
        if wait_s:
            raise TryLater(
                f"this identity has joined {REJOINS_PER_MINUTE} times within a minute: try again in {_text(wait_s)}"
            )
        self._known.take(peer, now_s)

    def take(self, network: str, is_observer: bool, now_s: float) -> None:
        """Count the join of a stranger. Raises ``TryLater``."""
        of_network, of_all = (network, is_observer), is_observer
        wait_s = self._networks.wait_s(of_network, now_s)
        if wait_s:
            raise TryLater(
                f"this run lets {self._networks.per_minute} a minute in from one network, and so many have come from "
                f"{network}: try again in {_text(wait_s)} (or ask the host for more [access] "
                f"joins_per_minute_per_network)"
            )
        wait_s = self._in_all.wait_s(of_all, now_s)
        if wait_s:
            raise TryLater(
                f"this run lets {self._in_all.per_minute} a minute in, and so many have come: "
                f"try again in {_text(wait_s)} (or ask the host for more [access] joins_per_minute)"
            )
        self._networks.take(of_network, now_s)
        self._in_all.take(of_all, now_s)

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


def _text(wait_s: float) -> str:
    return f"{max(1.0, wait_s):.0f} s"
