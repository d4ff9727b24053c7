"""What tests see of a router: its replicas, where an attempt is pending, and when it may change its mind."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from shoal.swarm.pipeline.engine.routing import Router, Standing, _Hop


@dataclass(frozen=True)
class ReplicaView:
    """``rate``: micro-batches a second, or None; ``queue``: sent and not finished."""

    rate: float | None
    queue: int
    standing: Standing


def view(router: Router, stage: int, now_s: float) -> dict[str, ReplicaView]:
    """A stage's replicas as this sender sees them."""
    found: dict[str, ReplicaView] = {}
    hop = router._hops.get(stage, _Hop())
    is_needed = router._are_all_banned(hop, now_s)
    for peer in sorted(hop.turns):
        replica = router._replicas[peer]
        rate = 1 / replica.interval_s(now_s, 0.0) if replica.is_known else None
        found[peer] = ReplicaView(rate, replica.queue, replica.standing(now_s, is_needed))
    return found


def way(router: Router, key: Hashable) -> str | None:
    """The replica at which ``key`` is pending; None if it is not pending."""
    return router._ways.get(key)


def wake_s(router: Router, now_s: float) -> float | None:
    """The next moment at which ``overdue`` or ``pick`` may answer differently, if nothing happens before."""
    stuck = [hop for hop in router._hops.values() if router._are_all_banned(hop, now_s)]
    needed = {peer for hop in stuck for peer in hop.turns}
    moments = [at_s for _, at_s in router._deadlines()]
    for peer, replica in router._replicas.items():
        ban_ends_s = replica._ban_ends_s(peer in needed) if replica._standing == "banned" else 0.0
        moments.append(max(ban_ends_s, replica._full_until_s))
    return min((at_s for at_s in moments if at_s > now_s), default=None)
