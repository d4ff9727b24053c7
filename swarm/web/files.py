"""Files of the page, and copies of it that need no server: the same files, with the data as one more script."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.web.documents import RoundHistory, facts, public_status, round_detail
from shoal.swarm.web.feed import encode

STATIC_FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css",
    "dom.js": "text/javascript",
    "format.js": "text/javascript",
    "charts.js": "text/javascript",
    "cards.js": "text/javascript",
    "members.js": "text/javascript",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "vendor/uPlot.js": "text/javascript",
    "vendor/uPlot.css": "text/css",
    "vendor/uPlot.LICENSE": "text/plain; charset=utf-8",
}
"""Names with their types."""

_DATA = "data.js"
_SCRIPT = b'<script src="page.js" defer></script>'
_SCRIPTS = b'<script src="data.js" defer></script>\n' + _SCRIPT
_MOST_DETAILS = 2_000
_MOST_DETAILED_MEMBERS = 50_000
"""Bounds on what a copy says about who took part: newest rounds, and members in them, about 70 bytes each."""


def static_file(name: str) -> bytes:
    """A file of the page, by its name in ``STATIC_FILES``."""
    return files("shoal.swarm.web").joinpath("static", *name.split("/")).read_bytes()


class PageCopy:
    """Content of a copy. ``most_rounds``: newest ones that are kept, about 100 bytes each; all without it."""

    def __init__(self, most_rounds: int | None = None) -> None:
        self._most_rounds = most_rounds
        self._history = RoundHistory()
        self._details: deque[dict[str, Any]] = deque(maxlen=_MOST_DETAILS)
        self._detailed_members = 0

    @property
    def next_round(self) -> int:
        """The first round that is not here yet."""
        return self._history.next_round

    def take(self, verdicts: Sequence[Verdict], timings: Sequence[RoundTiming] = ()) -> None:
        """Append verdicts, oldest first, with some of their timings; those of rounds that are here are left out."""
        for detail in [round_detail(one) for one in verdicts if one.round >= self.next_round][-_MOST_DETAILS:]:
            if len(self._details) == _MOST_DETAILS:
                self._forget_detail()
            self._details.append(detail)
            self._detailed_members += len(detail["members"])
            while self._detailed_members > _MOST_DETAILED_MEMBERS:
                self._forget_detail()
        self._history.take(verdicts, timings)
        if self._most_rounds is not None:
            del self._history.rows[: -self._most_rounds]

    def _forget_detail(self) -> None:
        self._detailed_members -= len(self._details.popleft()["members"])

    def files(
        self, run: RunFile, status: CoordinatorToPeerStatus, made_s: float, renewed_s: float | None = None
    ) -> dict[str, bytes]:
        """The copy's files by name. ``index.html`` is the last: whoever finds it finds the rest.

        ``made_s``: when, by the host's clock; ``renewed_s``: after how many seconds there is a newer one, if so."""
        content = {
            "facts": facts(run) | {"own_peer": ""},
            "status": public_status(status) | {"next_round": self.next_round, "waits_for": ""},
            "rounds": self._history.since(0, len(self._history.rows)),
            "details": {one["round"]: one for one in self._details},
            "made_s": made_s,
            "renewed_s": renewed_s,
        }
        index = static_file("index.html").replace(
            _SCRIPT, b'<script src="%s" defer></script>\n' % _DATA.encode() + _SCRIPT
        )
        static = {name: static_file(name) for name in STATIC_FILES if name != "index.html"}
        return static | {_DATA: b"window.shoalCopy = %s;\n" % encode(content), "index.html": index}
