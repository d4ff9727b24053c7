"""Failures that members report alike: said once on the host, when several machines had the same one."""

from __future__ import annotations

import re
from collections import OrderedDict

_ALIKE_FROM = 3
"""Members with the same failure from which it is more likely the run's than one machine's."""

_MOST_KINDS = 64
_MOST_MEMBERS = 4096
_OWN = re.compile(r"[0-9a-f]{8,}|\d+|(/[\w.~-]+)+")
"""What differs between machines in words that mean the same: numbers, digests, paths."""


class AlikeFailures:
    """Counts the members that have left a run with the same error. Bounded, whatever strangers report."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, set[str]] = OrderedDict()

    def note(self, peer: str, trouble: str) -> int:
        """Take a member's failure. Returns how many members have had it, when that is worth saying: at three, then
        each time that it has doubled; else 0."""
        kind = _OWN.sub("#", trouble.strip().lower())
        if not kind:
            return 0
        peers = self._peers.setdefault(kind, set())
        self._peers.move_to_end(kind)
        while len(self._peers) > _MOST_KINDS:
            self._peers.popitem(last=False)
        if peer in peers or len(peers) >= _MOST_MEMBERS:
            return 0
        peers.add(peer)
        share, rest = divmod(len(peers), _ALIKE_FROM)
        return len(peers) if share and not rest and share & (share - 1) == 0 else 0
