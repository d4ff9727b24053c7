"""Pauses in punching: a direct path that was punched and then broke is not tried for again at once.

Some firewalls let a connection be made and drop it later. The relayed path works all the same, and each try that ends
so costs a round the time to notice it.
"""

from __future__ import annotations

from collections.abc import Iterable

_FIRST_S, _LONGEST_S = 60.0, 3600.0


class PunchPauses:
    """Pauses by peer, each twice as long as the one before. Moments are on any one clock."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}
        """Length and end."""

    def note_broken(self, peer: str, now_s: float) -> None:
        """Note that a punched path to a peer has broken in use."""
        length_s, until_s = self._pauses.get(peer, (_FIRST_S / 2, now_s))
        if now_s >= until_s:  # several streams notice the same
            length_s = min(2 * length_s, _LONGEST_S)
            self._pauses[peer] = length_s, now_s + length_s

    def may_punch(self, peer: str, now_s: float) -> bool:
        """Whether to try for a direct path to a peer now."""
        return peer not in self._pauses or now_s >= self._pauses[peer][1]

    def forget(self, peers: Iterable[str]) -> None:
        """Forget peers that are no members any more."""
        for peer in peers:
            self._pauses.pop(peer, None)

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that a pause is kept of."""
        return tuple(self._pauses)
