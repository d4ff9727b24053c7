"""Rounds in step: the script on one end of pipes, peers as processes on the other, all on one monotonic clock.

A peer says that it is ready; when all are, the script names the moment at which everybody starts. When all are done it
asks what the round took them, so that what a peer still does for slower ones counts too.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from usage import PeakMemory, kill_tree, own_cpu_s

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

_AHEAD_S = 0.1
"""From the script's word to the start: everybody must have heard it."""

_END_S = 10.0

_started: list[SpawnContext | ForkServerContext] = [multiprocessing.get_context("spawn")]


def fork_with(*modules: str) -> None:
    """Have helpers forked from one process that has imported these modules, which takes seconds of CPU time each. On
    Linux only; elsewhere, and before this call, each imports for itself."""
    if sys.platform == "linux":
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(modules))
        _started[:] = [context]


class RoundFailed(Exception):
    """A peer died or was silent until the case's deadline; the message says which."""


@dataclass(frozen=True)
class Lap:
    """One peer's round. Moments in seconds since the start: ``end_s``, when it holds the mean; and, where there are
    such things, when it had the plan, every part's result, and the verdict. ``cpu_s`` with its descendants'.
    ``peak_bytes``, ``in_all_bytes``: most memory above the round's start, and above the first round's."""

    end_s: float
    cpu_s: float
    sent_bytes: int
    received_bytes: int = 0
    peak_bytes: int | None = None
    in_all_bytes: int | None = None
    plan_s: float | None = None
    held_s: float | None = None
    verdict_s: float | None = None
    partners: int | None = None
    note: str = ""


class Pace:
    """A peer's end. ``start`` and ``done`` block: call them in a thread."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._memory = PeakMemory()
        self._cpu_s = 0.0
        self.start_s = 0.0

    def introduce(self, about: Any) -> list[Any]:
        """Exchange introductions with all peers, in the script's order."""
        self._pipe.send(about)
        told: list[Any] = self._pipe.recv()
        return told

    def start(self) -> float:
        """Everybody's start on the monotonic clock: sleep until then."""
        self._memory.begin()
        self._pipe.send("ready")
        self.start_s = self._pipe.recv()
        self._cpu_s = own_cpu_s()
        return self.start_s

    def done(self) -> tuple[float, int | None]:
        """Call it right after the end. Returns CPU seconds since the start and peak memory, once everybody is done."""
        self._pipe.send("done")
        self._pipe.recv()
        return own_cpu_s() - self._cpu_s, self._memory.risen_bytes()

    @property
    def in_all_bytes(self) -> int | None:
        """Peak memory of this round above what it was before the first round; call it after ``done``."""
        return self._memory.risen_in_all_bytes()

    def report(self, lap: Lap) -> None:
        """After ``done``."""
        self._pipe.send(lap)


class Helper:
    """A process with a pipe that is killed, with all it started, at the end."""

    def __init__(self, name: str, target: Callable[..., None], arguments: Sequence[Any], deadline_s: float) -> None:
        context = _started[0]
        self.pipe, theirs = context.Pipe()
        self._name, self._deadline_s = name, deadline_s
        # No daemon: those may not have children, and some peer systems need them.
        self.process: BaseProcess = context.Process(target=target, args=(theirs, *arguments), name=name)
        self.process.start()
        theirs.close()

    def tell(self, message: Any) -> None:
        """Raises ``RoundFailed``."""
        try:
            self.pipe.send(message)
        except OSError as error:
            raise RoundFailed(f"{self._name} died") from error

    def hear(self) -> Any:
        """Raises ``RoundFailed`` when it dies, or says nothing until the deadline."""
        try:
            if not self.pipe.poll(max(0.0, self._deadline_s - time.monotonic())):
                raise RoundFailed(f"{self._name} did not answer in time")
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise RoundFailed(f"{self._name} died") from error

    def end(self, grace_s: float = 0.0) -> None:
        """Let it end by itself for so long, then kill it."""
        self.process.join(grace_s)
        if self.process.pid is not None:
            kill_tree(self.process.pid)
        self.process.join(_END_S)
        self.pipe.close()


class Pack:
    """The script's connections to its peers."""

    def __init__(self, peers: list[Helper]) -> None:
        self._peers = peers

    @classmethod
    @contextmanager
    def started(cls, target: Callable[..., None], arguments: Sequence[Sequence[Any]], limit_s: float) -> Iterator[Pack]:
        """One peer for each of ``arguments``, which ``target`` gets after its pipe; all killed at the end."""
        peers: list[Helper] = []
        deadline_s = time.monotonic() + limit_s
        try:
            for number, one in enumerate(arguments):
                peers.append(Helper(f"peer {number}", target, one, deadline_s))
            yield cls(peers)
            for peer in peers:
                peer.process.join(max(0.0, min(_END_S, deadline_s - time.monotonic())))
        finally:
            for peer in peers:
                peer.end()

    def introduce(self) -> None:
        """Tell everybody of everybody."""
        about = [peer.hear() for peer in self._peers]
        for peer in self._peers:
            peer.tell(about)

    def lap(self, at_start: Callable[[], None] = lambda: None, at_end: Callable[[], None] = lambda: None) -> list[Lap]:
        """One round of all peers. Raises ``RoundFailed``."""
        for peer in self._peers:
            self._expect(peer, "ready")
        at_start()
        start_s = time.monotonic() + _AHEAD_S
        for peer in self._peers:
            peer.tell(start_s)
        for peer in self._peers:
            self._expect(peer, "done")
        at_end()
        for peer in self._peers:
            peer.tell("count")
        return [peer.hear() for peer in self._peers]

    @staticmethod
    def _expect(peer: Helper, word: str) -> None:
        said = peer.hear()
        if said != word:
            raise RoundFailed(f"{peer.process.name} said {said!r} instead of {word!r}")


def seconds(laps: Sequence[Sequence[Lap]]) -> float:
    """Median over rounds of the moment when the last peer holds the mean."""
    return median(max(lap.end_s for lap in one) for one in laps)


def stages(laps: Sequence[Sequence[Lap]]) -> dict[str, float | None]:
    """Columns of a table, median over rounds: until the first peer has the plan; until the last holds every result;
    until the last has the verdict; until the last has the mean. None where there are no such things."""
    spans: dict[str, list[float]] = {"plan s": [], "exchange s": [], "verdict s": [], "mean s": []}
    for one in laps:
        plans = [lap.plan_s for lap in one if lap.plan_s is not None]
        held = [lap.held_s for lap in one if lap.held_s is not None]
        verdicts = [lap.verdict_s for lap in one if lap.verdict_s is not None]
        if len(one) != len(plans) or len(one) != len(held) or len(one) != len(verdicts):
            return dict.fromkeys(spans)
        moments = [0.0, min(plans), max(held), max(verdicts), max(lap.end_s for lap in one)]
        for span, (start_s, end_s) in zip(spans.values(), pairwise(moments), strict=True):
            span.append(end_s - start_s)
    return {name: median(span) for name, span in spans.items()}


def costs(laps: Sequence[Sequence[Lap]], elements: int) -> dict[str, float | None]:
    """Columns of a table: what a round took of the machine. Memory: of the peer that took most, over all rounds."""
    peak_bytes = max((lap.peak_bytes for one in laps for lap in one if lap.peak_bytes is not None), default=None)
    in_all_bytes = max((lap.in_all_bytes for one in laps for lap in one if lap.in_all_bytes is not None), default=None)
    return {
        "CPU s": median(sum(lap.cpu_s for lap in one) for one in laps),
        "peak MB": None if peak_bytes is None else peak_bytes / 1e6,
        "peak / contribution": None if peak_bytes is None else peak_bytes / (4 * elements),
        "in all / contribution": None if in_all_bytes is None else in_all_bytes / (4 * elements),
        "MB sent a peer": mean(lap.sent_bytes for one in laps for lap in one) / 1e6,
    }


def notes(laps: Sequence[Sequence[Lap]]) -> str:
    """Return the remarks of peers, each remark once."""
    return "; ".join(dict.fromkeys(lap.note for one in laps for lap in one if lap.note))
