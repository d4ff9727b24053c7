"""One run's page in the page's loop: asks the run how it is, while somebody looks, and keeps what it has said."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from shoal.swarm.errors import ShoalError
from shoal.swarm.web.documents import facts, round_detail, run_card
from shoal.swarm.web.feed import Feed, encode
from shoal.swarm.web.metrics import Reading, Readings
from shoal.swarm.web.source import PageSource

log = logging.getLogger(__name__)

_TICK_S = 1.0
_MEMBERS_A_TICK = 100
"""Members of which the status may be asked each second; of more, it is asked more rarely."""
_ANSWER_S = 10.0
_SCRAPE_S = 4.0
"""Time for the run to answer a scrape, twice: Prometheus waits for ten seconds."""
_REST = 50
"""A scrape gets what an earlier one got for so many times as long as that took to find out, and for a second."""
_ROUNDS_A_READ = 64
_READS_A_LOOK = 32
"""A long history comes little by little, and the status does not wait for it."""
_ROUNDS_AN_ANSWER = 1_000
"""Some 80 kB, which may lie here for each browser that does not read them."""
_KEPT_DETAILS = 256

T = TypeVar("T")


class RunPage:
    """``source``: the run, whose network runs in the loop ``network``."""

    def __init__(self, source: PageSource, network: asyncio.AbstractEventLoop) -> None:
        self._source, self._network = source, network
        self.feed = Feed()
        self.ended = asyncio.Event()
        self.watchers = 0
        self._wanted = asyncio.Event()
        self._looked_s = -math.inf
        self._looking = asyncio.Lock()
        self._details: OrderedDict[int, bytes] = OrderedDict()
        self._scraping = asyncio.Lock()
        self._readings: Sequence[Reading] = ()
        self._scrape_again_s = -math.inf
        self._facts = source.run_file(), b""

    # What browsers ask for --------------------------------------------------------------------------------

    async def card(self) -> dict[str, Any]:
        """The run among others of the same page, as far as that is known."""
        with suppress(ShoalError, TimeoutError):
            await self._look()
        return run_card(self._source.run_file(), self.feed.status)

    def facts(self) -> bytes:
        """The run's facts with the amendments that are in force, and the peer whose page this is."""
        run = self._source.run_file()
        if not self._facts[1] or run is not self._facts[0]:
            self._facts = run, encode(facts(run) | {"own_peer": self._source.own_peer})
        return self._facts[1]

    async def status(self) -> bytes:
        """The status, a second old or little more. Raises ``ShoalError`` and ``TimeoutError`` while the run does not
        answer."""
        await self._look()
        return self.feed.status_bytes

    async def rounds(self, first: int) -> bytes:
        """Rounds from ``first`` on, as many as an answer has, by column. Raises as ``status``."""
        await self._look()
        return encode(self.feed.history.since(first, _ROUNDS_AN_ANSWER))

    async def round_detail(self, number: int) -> bytes:
        """Who took part in a round. Raises ``KeyError`` for one that has not ended, and as ``status``."""
        if number not in self._details:
            await self._look()
            if not 0 <= number < self.feed.history.next_round:
                raise KeyError(number)
            async with self._looking:
                found = await self._ask(self._source.verdicts(number, 1))
            if not found or found[0].round != number:
                raise KeyError(number)
            self._details[number] = encode(round_detail(found[0]))
            while len(self._details) > _KEPT_DETAILS:
                self._details.popitem(last=False)
        return self._details[number]

    async def readings(self) -> Sequence[Reading]:
        """What a scrape says of the run, a second old or little more; whether it answers, at least. Never raises."""
        async with self._scraping:
            if time.monotonic() >= self._scrape_again_s:
                began_s = time.monotonic()
                self._readings = await self._scrape()
                now_s = time.monotonic()
                self._scrape_again_s = now_s + max(_TICK_S, _REST * (now_s - began_s))
            return self._readings

    async def _scrape(self) -> Sequence[Reading]:
        about, began_s = Readings(self._source.run_file().run.name), time.monotonic()
        try:
            await self._ask(asyncio.sleep(0), _SCRAPE_S)
            about.put("shoal_answer_seconds", time.monotonic() - began_s)
            readings = await self._ask(self._source.readings(), _SCRAPE_S)
        except (ShoalError, TimeoutError) as error:
            log.debug("nothing to scrape: %s", error)
            about.put("shoal_up", 0)
            return about
        about.put("shoal_up", 1)
        return [*about, *readings]

    def watch(self) -> None:
        """Count a browser that follows what changes."""
        self.watchers += 1
        self._wanted.set()

    def unwatch(self) -> None:
        self.watchers -= 1

    # What the run is asked --------------------------------------------------------------------------------

    async def keep_looking(self) -> None:
        """Ask again and again while somebody follows, until cancelled."""
        while True:
            if not self.watchers:
                self._wanted.clear()
                await self._wanted.wait()
            try:
                await self._look()
            except (ShoalError, TimeoutError) as error:
                log.debug("the page has nothing new: %s", error)
            await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        return _TICK_S * max(1.0, len(self.feed.status.get("members", ())) / _MEMBERS_A_TICK)

    async def _look(self) -> None:
        """Ask for what is new, unless that was done just now."""
        async with self._looking:
            if time.monotonic() < self._looked_s + self._pause_s() - 0.1:
                return
            status = await self._ask(self._source.status())
            history = self.feed.history
            timings = await self._ask(self._source.timings(history.next_round))
            for _ in range(_READS_A_LOOK):
                first = history.next_round
                if first > status.round or (first == status.round and status.phase != "ended"):
                    break
                history.take(await self._ask(self._source.verdicts(first, _ROUNDS_A_READ)), timings)
                if history.next_round == first:
                    break
            self._looked_s = time.monotonic()
            # Browsers ask for the facts again when their digest is another one.
            self.feed.take(status, hashlib.sha256(self.facts()).hexdigest()[:16])

    async def _ask(self, question: Coroutine[Any, Any, T], within_s: float = _ANSWER_S) -> T:
        """Have the run's own loop answer. Raises ``TimeoutError`` when it has other things to do for too long."""
        try:
            answer = asyncio.run_coroutine_threadsafe(question, self._network)
        except RuntimeError as error:  # its loop has ended
            question.close()
            raise TimeoutError from error
        async with asyncio.timeout(within_s):
            try:
                return await asyncio.wrap_future(answer)
            except asyncio.CancelledError as error:
                here = asyncio.current_task()
                if here is not None and here.cancelling():
                    raise
                raise TimeoutError from error  # its loop has ended
