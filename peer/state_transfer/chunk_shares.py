"""Which donor is asked for which chunks of a state: pure bookkeeping, without clock or network."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, groupby

_ASKED_FROM = 2
"""The last chunks are asked from so many donors, so that a slow one does not hold up the end."""


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive chunks that one donor was asked for."""

    donor: str
    chunks: range


class ChunkShares:
    """Donors take runs of chunks as they are done with those before, so a slow one gets less. ``missing``: the chunks
    that are not here yet, each named once."""

    def __init__(self, missing: Iterable[int]) -> None:
        self._missing = set(missing)
        self._free = deque(_ranges(self._missing))
        self._askers: dict[int, list[str]] = {}
        self._runs: dict[Run, None] = {}  # the oldest first

    @property
    def left(self) -> int:
        """How many chunks are not here."""
        return len(self._missing)

    def wants(self, chunk: int) -> bool:
        return chunk in self._missing

    def take(self, donor: str, most: int) -> Run | None:
        """What ``donor`` is to be asked for, at most so many chunks; None when there is nothing for it now.

        When all is asked for, a donor that has nothing else to do is asked for the last chunk of who was asked the
        longest ago and has not delivered."""
        chunks = self._take_free(most) or self._second_ask(donor)
        if chunks is None:
            return None
        run = Run(donor, chunks)
        self._runs[run] = None
        for chunk in chunks:
            self._askers.setdefault(chunk, []).append(donor)
        return run

    def arrived(self, chunk: int) -> None:
        self._missing.discard(chunk)

    def end(self, run: Run) -> bool:
        """That donor delivers no more of it; returns whether others can now be asked for something."""
        del self._runs[run]
        given_back = False
        for chunk in run.chunks:
            self._askers[chunk].remove(run.donor)
            if self._askers[chunk]:
                given_back = given_back or chunk in self._missing
                continue
            del self._askers[chunk]
        unasked = [chunk for chunk in run.chunks if chunk in self._missing and chunk not in self._askers]
        # In front: what was asked for first is missed most.
        self._free.extendleft(reversed(list(_ranges(unasked))))
        return given_back or bool(unasked)

    def _take_free(self, most: int) -> range | None:
        if not self._free:
            return None
        chunks = self._free.popleft()
        if len(chunks) > most:
            self._free.appendleft(chunks[most:])
        return chunks[:most]

    def _second_ask(self, donor: str) -> range | None:
        if any(run.donor == donor for run in self._runs):
            return None
        for run in self._runs:
            for chunk in reversed(run.chunks):
                askers = self._askers[chunk]
                if chunk in self._missing and len(askers) < _ASKED_FROM and donor not in askers:
                    return range(chunk, chunk + 1)
        return None


def _ranges(chunks: Iterable[int]) -> Iterable[range]:
    """Those numbers as ranges of consecutive ones."""
    following = count()
    for _, group in groupby(sorted(chunks), key=lambda chunk: chunk - next(following)):
        run = list(group)
        yield range(run[0], run[-1] + 1)
