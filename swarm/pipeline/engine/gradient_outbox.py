"""Outbox of gradients: each is kept until the previous hop has it or, if that hop is gone, until another one asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.swarm.pipeline.engine.effects import Drop, MicroBatch, Send


@dataclass
class _Recipient:
    """Peer that waits for a gradient. ``since_s``: time of the last offer; ``failed``: that offer did not arrive."""

    attempt: int
    since_s: float
    failed: bool = False


@dataclass
class KeptGradient:
    """Gradient of the input of ``from_stage``, kept under ``number``; an orphan if nobody waits for it."""

    number: int
    micro_batch: MicroBatch
    from_stage: int
    waiting: dict[str, _Recipient] = field(default_factory=dict)


class GradientOutbox:
    """At most ``limit`` kept gradients.

    A recipient that is fetching one has the patience for it; other gradients make way, the oldest first. Dropping one
    costs time only: its micro-batch, if it comes again, is computed again and does not count a second time."""

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._kept: dict[int, KeptGradient] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def has_room(self, now_s: float) -> bool:
        """Whether one more gradient can be kept, perhaps in another's place."""
        return len(self._kept) < self._limit or self._least_needed(now_s) is not None

    def make_room(self, now_s: float) -> list[Drop]:
        """Drop the least needed gradient if the outbox is full; ``has_room`` must hold."""
        if len(self._kept) < self._limit:
            return []
        oldest = self._least_needed(now_s)
        assert oldest is not None
        return self._drop(oldest)

    def add(self, kept: KeptGradient) -> None:
        self._kept[kept.number] = kept
        assert len(self._kept) <= self._limit

    def find(self, micro_batch: MicroBatch, from_stage: int) -> KeptGradient | None:
        for one in self._kept.values():
            if (one.micro_batch, one.from_stage) == (micro_batch, from_stage):
                return one
        return None

    def offer(self, kept: KeptGradient, peer: str, attempt: int, now_s: float) -> Send:
        kept.waiting[peer] = _Recipient(attempt, now_s)
        stage = kept.from_stage - 1
        return Send("gradient", peer, kept.micro_batch, stage, attempt, kept.number)

    def settled(self, peer: str, micro_batch: MicroBatch, attempt: int) -> list[Drop]:
        """Forget a recipient that has the gradient or does not want it, for this attempt and earlier ones."""
        drops = []
        for one in [one for one in self._kept.values() if one.micro_batch == micro_batch]:
            waiting = one.waiting.get(peer)
            if waiting is not None and waiting.attempt <= attempt:
                del one.waiting[peer]
                if not one.waiting:
                    drops += self._drop(one)
        return drops

    def failed(self, send: Send) -> None:
        one = self._kept.get(send.number)
        waiting = one.waiting.get(send.peer) if one else None
        if waiting is not None and waiting.attempt == send.attempt:
            waiting.failed = True

    def gone(self, peer: str) -> None:
        """Forget a dead recipient. Its gradients stay: whoever drives their micro-batches again may ask for them."""
        for one in self._kept.values():
            one.waiting.pop(peer, None)

    def again(self, now_s: float, retry_s: float) -> list[Send]:
        """Repeat the offers that did not arrive."""
        return [
            self.offer(one, peer, waiting.attempt, now_s)
            for one in self._kept.values()
            for peer, waiting in list(one.waiting.items())
            if waiting.failed and now_s >= waiting.since_s + retry_s
        ]

    def _least_needed(self, now_s: float) -> KeptGradient | None:
        late_s = now_s - self._patience_s
        for one in self._kept.values():
            if all(waiting.failed or waiting.since_s <= late_s for waiting in one.waiting.values()):
                return one
        return None

    def _drop(self, kept: KeptGradient) -> list[Drop]:
        del self._kept[kept.number]
        return [Drop(kept.number)]
