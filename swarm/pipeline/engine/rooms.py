"""Who was told that we are busy, and for whom a place is held open: in turn, so that nobody starves. Pure."""

from __future__ import annotations


class Rooms:
    """A peer that was refused waits in line; when its turn comes a place is held for it for ``hold_s``."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._line: dict[str, None] = {}
        self._until_s: dict[str, float] = {}

    def held(self, now_s: float, besides: str = "") -> int:
        """Places that others than ``besides`` may still come for."""
        self._until_s = {peer: until_s for peer, until_s in self._until_s.items() if now_s < until_s}
        return sum(peer != besides for peer in self._until_s)

    def is_called(self, peer: str) -> bool:
        return peer in self._until_s

    def refused(self, peer: str) -> None:
        self._line.setdefault(peer)

    def leave(self, peer: str) -> None:
        """It got a place, or is gone."""
        self._line.pop(peer, None)
        self._until_s.pop(peer, None)

    def call(self, free: int, now_s: float) -> list[str]:
        """Whom to tell that there is room, when so many places are free."""
        called = []
        while self._line and self.held(now_s) < free:
            peer = next(iter(self._line))
            del self._line[peer]
            self._until_s[peer] = now_s + self._hold_s
            called.append(peer)
        return called
