"""A stage of a pipeline on a virtual clock: senders with a window each, replicas that work in the order of arrival."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.swarm.pipeline.router_views import wake_s, way

from shoal.swarm.pipeline.engine.routing import Router

Key = tuple[str, int]


@dataclass
class Replica:
    """``service_s(now_s)`` is what a micro-batch takes that is begun then; None: it hangs. ``places``: it refuses more
    than so many."""

    service_s: Callable[[float], float | None]
    places: int = 10**6
    held: int = 0
    free_s: float = 0.0
    dropped: int = 0


@dataclass
class Flow:
    """``delivered``: (moment, sender, replica) of every micro-batch that came back. ``delay_s``: there and back."""

    replicas: dict[str, Replica]
    senders: int = 1
    window: int = 4
    delay_s: float = 0.0
    patience_s: float = 10.0
    prior: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now_s = 0.0
        self.routers: dict[str, Router] = {f"s{i}": Router(f"s{i}", self.patience_s) for i in range(self.senders)}
        for router in self.routers.values():
            router.set_replicas(1, {peer: self.prior.get(peer) for peer in self.replicas}, 0.0)
        self.free = dict.fromkeys(self.routers, self.window)
        self._wakes_s = dict.fromkeys(self.routers, 0.0)
        self.delivered: list[tuple[float, str, str]] = []
        self.picked: list[tuple[float, str]] = []
        self._keys, self._order = count(), count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def run(self, until_s: float) -> None:
        """Everything that happens until then; every sender keeps its window full."""
        self._fill()
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
            for router in self.routers.values():
                for key in router.overdue(self.now_s):
                    peer = way(router, key)
                    assert peer is not None
                    assert router.failed(peer, key, self.now_s)
                    self.free[key[0]] += 1
            self._fill()
        self.now_s = until_s

    def shares(self, since_s: float = 0.0, sender: str = "") -> dict[str, float]:
        """Of what came back since then."""
        found = Counter(peer for at_s, by, peer in self.delivered if at_s >= since_s and sender in ("", by))
        return {peer: found[peer] / max(1, found.total()) for peer in self.replicas}

    def rate(self, since_s: float) -> float:
        """Micro-batches a second that came back since then."""
        return sum(at_s >= since_s for at_s, _, _ in self.delivered) / (self.now_s - since_s)

    def kill(self, peer: str) -> None:
        for router in self.routers.values():
            for key in router.retire(peer):
                self.free[key[0]] += 1

    def _at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), action, arguments))

    def _fill(self) -> None:
        for name, router in self.routers.items():
            while self.free[name] and (peer := router.pick(1, self.now_s)) is not None:
                key = (name, next(self._keys))
                router.sent(peer, key, self.now_s)
                self.picked.append((self.now_s, peer))
                self.free[name] -= 1
                self._at(self.now_s + self.delay_s / 2, self._arrive, peer, key)
            due_s = wake_s(router, self.now_s)
            if due_s is not None and not self.now_s < self._wakes_s[name] <= due_s:
                self._wakes_s[name] = due_s
                self._at(due_s, lambda: None)

    def _arrive(self, peer: str, key: Key) -> None:
        replica = self.replicas[peer]
        if replica.held >= replica.places:
            self._at(self.now_s + self.delay_s / 2, self._refuse, peer, key)
            return
        service_s = replica.service_s(max(self.now_s, replica.free_s))
        if service_s is None:
            replica.dropped += 1
            return
        replica.held += 1
        replica.free_s = max(self.now_s, replica.free_s) + service_s
        self._at(replica.free_s, self._leave, peer, key)

    def _leave(self, peer: str, key: Key) -> None:
        self.replicas[peer].held -= 1
        self._at(self.now_s + self.delay_s / 2, self._deliver, peer, key)

    def _refuse(self, peer: str, key: Key) -> None:
        if self.routers[key[0]].refused(peer, key, self.now_s):
            self.free[key[0]] += 1

    def _deliver(self, peer: str, key: Key) -> None:
        if self.routers[key[0]].finished(peer, key, self.now_s):
            self.free[key[0]] += 1
            self.delivered.append((self.now_s, key[0], peer))


def steady(rate: float) -> Replica:
    """That many micro-batches a second, always."""
    return Replica(lambda now_s: 1 / rate)
