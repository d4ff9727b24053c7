"""Mirrors of token shards: the same files at several URLs, of which each may lie, be slow, or be gone.

Bytes are checked by the caller's digest, so a mirror is only trusted to be there. One that sends other bytes is left
for good; one that fails or is slow is left for a while; either is said once."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

from shoal.peer.checkpoints.remote.store import DaemonThreads, RemoteStore, without_password
from shoal.peer.data.manifest import MANIFEST, MAX_MANIFEST_BYTES
from shoal.peer.http_get import HttpError, allow_any, allow_public, get
from shoal.swarm.errors import CorpusError, RemoteStorageError
from shoal.swarm.protocol.run_sources import check_url
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

log = logging.getLogger(__name__)

PATIENCE = 10
"""Times that all mirrors are tried: about five minutes in which a server may be away while its members wait."""

IMPATIENCE = 2
"""The same before a run is joined, when somebody is watching."""

_BLOCK_S = 20.0
"""Time for a block when all mirrors are tried first; it doubles each time that none was fast enough."""

_LONGEST_S = 320.0
_LONGEST_PAUSE_S = 60.0
_AT_ONCE = 4
"""Downloads that may share the owner's limit: the training's own and those ahead of it."""

_REST_S = 60.0
"""Time for which a mirror that failed is left, doubled by each further failure."""

_MUCH_FASTER = 3.0


class _Unavailable(Exception):
    """The mirror gave no answer, or one that is too short."""


@dataclass(frozen=True)
class Mirror:
    """Shards at a URL. ``by_owner``: named by this machine's owner, and may lie anywhere; others are public, and are
    asked without the owner's credentials."""

    url: str
    by_owner: bool = False

    @property
    def shown(self) -> str:
        return without_password(self.url)

    def read(self, name: str, span: tuple[int, int] | None, limit_bytes: int, within_s: float, meter: Meter) -> bytes:
        """Read a part of a file, or a whole one of at most ``limit_bytes``. Raises ``_Unavailable``."""
        try:
            if self.url.startswith(("http://", "https://")):
                url = f"{self.url.rstrip('/')}/{name}"
                end_s = time.monotonic() + within_s
                judge = allow_any if self.by_owner else allow_public
                data = get(url, judge, limit_bytes, end_s, span, meter.count).data
                return data[: span[1] - span[0]] if span is not None else data
            if not self.by_owner:
                check_url(self.url)
            start, stop = span or (0, limit_bytes + 1)
            asked = DaemonThreads().submit(
                lambda: RemoteStore.open(self.url, anonymous=not self.by_owner).read(name, start, stop)
            )
            data = asked.result(within_s)
            meter.count(len(data))
            return data
        except FutureTimeoutError as error:
            raise _Unavailable("the server is too slow") from error
        except (HttpError, http.client.HTTPException, OSError, ValueError, RemoteStorageError) as error:
            raise _Unavailable(str(error) or type(error).__name__) from error


class Meter:
    """Keeps downloads, of all threads together, to the limits of this machine's owner, and counts them in its month."""

    def __init__(
        self,
        limits: TrafficLimits | None,
        pause: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._pause, self._clock = limits, pause, clock
        self._free_s = 0.0
        self._lock = threading.Lock()

    def count(self, size_bytes: int) -> None:
        if self._limits is None:
            return
        self._limits.download.count_fetched(size_bytes)
        if bps := self._limits.download.bps:
            with self._lock:
                now_s = self._clock()
                self._free_s = max(self._free_s, now_s) + size_bytes * 8 / bps
                wait_s = self._free_s - now_s
            self._pause(wait_s)

    def least_s(self, size_bytes: int) -> float:
        """Seconds that so many bytes take at the limit."""
        bps = self._limits.download.bps if self._limits is not None else 0.0
        return size_bytes * 8 / bps if bps else 0.0


class _Standing:
    """What is known of a mirror: failures since it last answered, until when it is left, its bytes a second."""

    def __init__(self) -> None:
        self.lied = False
        self.failures = 0
        self.rests_until_s = 0.0
        self.rate = 0.0
        self.why = "was not asked"
        self.said = False


class Mirrors:
    """The mirrors of one corpus; from any thread. ``clock``, ``pause``: of seconds."""

    def __init__(
        self,
        mirrors: Sequence[Mirror],
        limits: TrafficLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        assert mirrors, "a run file names at least one URL"
        self._mirrors = tuple(mirrors)
        self._standing = [_Standing() for _ in mirrors]
        self._meter = Meter(limits, pause, clock)
        self._clock, self._pause = clock, pause
        self._lock = threading.Lock()

    @property
    def shown(self) -> str:
        return ", ".join(one.shown for one in self._mirrors)

    def manifest(self, is_right: Callable[[bytes], bool], patience: int = IMPATIENCE) -> bytes:
        """The bytes of the manifest for which ``is_right``. Raises ``CorpusError``."""
        return self._fetch(MANIFEST, None, MAX_MANIFEST_BYTES, is_right, patience)

    def block(self, name: str, start: int, stop: int, is_right: Callable[[bytes], bool]) -> bytes:
        """The bytes [start, stop) of a file, for which ``is_right``.

        Tries mirror after mirror, for minutes. Raises ``CorpusError``."""
        return self._fetch(name, (start, stop), stop - start, is_right, PATIENCE)

    def _fetch(
        self,
        name: str,
        span: tuple[int, int] | None,
        limit_bytes: int,
        is_right: Callable[[bytes], bool],
        patience: int,
    ) -> bytes:
        for tried in range(patience):
            within_s = min(_BLOCK_S * 2**tried, _LONGEST_S) + _AT_ONCE * self._meter.least_s(limit_bytes)
            for number in self._in_order(last_chance=tried > 0):
                data = self._ask(number, name, span, limit_bytes, within_s, is_right)
                if data is not None:
                    return data
            if all(one.lied for one in self._standing):
                break
            if tried + 1 < patience:
                self._pause(min(2.0**tried, _LONGEST_PAUSE_S))
        told = "; ".join(
            f"{one.shown}: {standing.why}" for one, standing in zip(self._mirrors, self._standing, strict=True)
        )
        raise CorpusError(
            f"{name} of the run's shards cannot be had ({told}): give the URL or folder of a good copy with --data "
            "and join again; what was downloaded is kept"
        )

    def _in_order(self, *, last_chance: bool) -> list[int]:
        """The mirrors to ask: those that answer first, of them the fastest by far, else in the order of the run file.

        ``last_chance``: also those that rest."""
        with self._lock:
            now_s = self._clock()
            fastest = max(one.rate for one in self._standing)

            def key(number: int) -> tuple[int, bool, int]:
                one = self._standing[number]
                return one.failures, 0 < one.rate < fastest / _MUCH_FASTER, number

            able = [n for n, one in enumerate(self._standing) if not one.lied]
            awake = [n for n in able if last_chance or self._standing[n].rests_until_s <= now_s]
            return sorted(awake or able, key=key)

    def _ask(
        self,
        number: int,
        name: str,
        span: tuple[int, int] | None,
        limit_bytes: int,
        within_s: float,
        is_right: Callable[[bytes], bool],
    ) -> bytes | None:
        mirror, standing, begun_s = self._mirrors[number], self._standing[number], self._clock()
        try:
            data = mirror.read(name, span, limit_bytes, within_s, self._meter)
            if span is not None and len(data) < span[1] - span[0]:
                raise _Unavailable(f"{name} ends too early")
        except _Unavailable as error:
            with self._lock:
                standing.failures += 1
                standing.rests_until_s = self._clock() + _REST_S * 2 ** min(standing.failures - 1, 6)
            self._leave(mirror, standing, str(error), "left for a while")
            return None
        if not is_right(data):
            with self._lock:
                standing.lied = True
            self._leave(mirror, standing, f"{name} has other bytes than the run's", "not used any more", anew=True)
            return None
        with self._lock:
            rate = len(data) / max(self._clock() - begun_s, 1e-3)
            standing.rate = rate if not standing.rate else 0.7 * standing.rate + 0.3 * rate
            standing.failures, standing.rests_until_s = 0, 0.0
        return data

    def _leave(self, mirror: Mirror, standing: _Standing, why: str, what: str, *, anew: bool = False) -> None:
        with self._lock:
            standing.why = why
            is_news, standing.said = anew or not standing.said, True
        if is_news:
            log.warning("data: %s is %s: %s", mirror.shown, what, why)
