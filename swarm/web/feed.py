"""One run's changing documents, encoded once for all who look at it.

Browsers get the whole status first and then what has changed since the one before. Nothing is queued for a browser: one
that has missed a change gets the whole status again, so a slow reader costs no memory."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.web.documents import RoundHistory, public_status

_DIGITS = 3
_ROUGH = frozenset({"tokens_per_s", "share", "credit", "capacity_tokens_per_s", "busy"})
"""Figures of which nobody reads more than three digits, and that would change at each look."""


def encode(value: Any) -> bytes:
    """Compact JSON, safe within a script element of a page, too."""
    text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").encode()


def _finite(value: Any) -> Any:
    """JSON has no infinite numbers: a loss that is none is null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case _:
            return value


def _event(kind: str, data: bytes, number: int) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, kind.encode(), data)


class Feed:
    """The status of one run, its versions, and its rounds. Used in the page's loop only."""

    def __init__(self) -> None:
        self.history = RoundHistory()
        self.version = 0
        self.status: dict[str, Any] = {}
        self.status_bytes = b"{}"
        self._delta = b""
        self._whole = b""
        self._changed = asyncio.Event()

    def take(self, status: CoordinatorToPeerStatus, facts_digest: str = "") -> None:
        """Make this the newest status, and wake those who wait for one. ``facts_digest``: of the run's facts."""
        here = {"next_round": self.history.next_round, "undone_rounds": self.history.undone, "facts": facts_digest}
        new = _rounded(public_status(status)) | here
        if new == self.status:
            return
        delta = _difference(self.status, new)
        self.version += 1
        self.status, self.status_bytes = new, encode(new)
        self._delta = _event("delta", encode(delta), self.version)
        self._whole = _event("status", self.status_bytes, self.version)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def after(self, known: int) -> tuple[int, bytes]:
        """Wait for a version above ``known``; returns it, and the event that leads there."""
        while self.version <= known:
            await self._changed.wait()
        return self.version, self._delta if known and known == self.version - 1 else self._whole


def _rounded(status: dict[str, Any]) -> dict[str, Any]:
    for holders in (status["members"], status["stages"]):
        for holder in holders:
            for name in _ROUGH & holder.keys():
                holder[name] = float(f"{holder[name]:.{_DIGITS}g}")
    return status


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The fields that differ; of the members those that are new or differ, and the ids of those that are gone."""
    delta = {name: value for name, value in after.items() if name != "members" and before.get(name) != value}
    known = {member["peer"]: member for member in before.get("members", ())}
    here = {member["peer"] for member in after["members"]}
    delta["members"] = [
        {name: value for name, value in member.items() if name == "peer" or earlier.get(name) != value}
        for member in after["members"]
        if (earlier := known.get(member["peer"], {})) != member
    ]
    delta["gone"] = [peer for peer in known if peer not in here]
    return delta
