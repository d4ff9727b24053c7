"""The page of a run: frames of a browser with 1,000 members, and what 500 browsers and slow readers cost the rounds.

The browser is a real one, headless. Rounds are those of a host and two members as processes, in turns: some rounds with
nobody at the page, some with everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from common import console, end_on_sigterm, over, parser, publish

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integration.harness import Host, Swarm, run_toml
from tests.integration.test_page import page_url
from tests.swarm.web.samples import RUN, member, status, verdict

from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.timing import RoundTiming
from shoal.swarm.web.metrics import Reading
from shoal.swarm.web.run_metrics import HostFacts, run_readings
from shoal.swarm.web.server import PageServer

Row = dict[str, Any]

_ROUNDS_SHOWN = 500
_WATCHED_S = 25.0
_SETTLED_S = 2.0


class LargeRun:
    """A run of many members, of which half change at each look."""

    own_peer = ""

    def __init__(self, members: int) -> None:
        self._random = random.Random(1)
        self._members = [member(number) for number in range(members)]
        self._rounds = [verdict(number, number + 1) for number in range(_ROUNDS_SHOWN)]

    def run_file(self) -> RunFile:
        return RUN

    async def status(self) -> CoordinatorToPeerStatus:
        for number in self._random.sample(range(len(self._members)), len(self._members) // 2):
            rate, sent = self._random.uniform(10, 1e5), self._random.randrange(10**10)
            changed = {"tokens_per_s": rate, "bytes_sent": sent, "share": self._random.random()}
            self._members[number] = self._members[number].model_copy(update=changed)
        return status(self._members, round=_ROUNDS_SHOWN)

    async def verdicts(self, first: int, limit: int) -> Sequence[Verdict]:
        return self._rounds[first : first + limit]

    async def readings(self) -> Sequence[Reading]:
        return run_readings(RUN, await self.status(), HostFacts())

    async def timings(self, first: int) -> Sequence[RoundTiming]:
        return ()


@contextlib.contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


_FIRST = """() => new Promise(done => {
    new PerformanceObserver(list => done(Math.max(...list.getEntries().map(one => one.duration))))
        .observe({type: 'longtask', buffered: true});
    setTimeout(() => done(0), 1000);
})"""
"""The longest task until now: drawing the page for the first time."""

_FRAMES = """seconds => new Promise(done => {
    const gaps = [], tasks = [];
    new PerformanceObserver(list => { for (const one of list.getEntries()) tasks.push(one.duration); })
        .observe({type: 'longtask'});
    let before = performance.now();
    const end = before + 1000 * seconds;
    const frame = now => {
        gaps.push(now - before);
        before = now;
        now < end ? requestAnimationFrame(frame) : done({gaps, tasks});
    };
    requestAnimationFrame(frame);
})"""


def frames(members: int, show_all: bool) -> Row:
    """Frames of a browser that shows so many members."""
    from playwright.sync_api import sync_playwright

    with loop_in_thread() as network, sync_playwright() as playwright:
        server = PageServer(("127.0.0.1", 0), 64)
        with server.showing(LargeRun(members), network):
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(server.url)
            page.wait_for_selector("#members-table tbody tr")
            first = page.evaluate(_FIRST)
            if show_all and members > 100:
                page.click("#more")
            page.evaluate(_FRAMES, _SETTLED_S)  # what is drawn for the first time
            found = page.evaluate(_FRAMES, _WATCHED_S)
            browser.close()
        server.close()
    gaps = sorted(found["gaps"])
    return {
        "members": members,
        "shown": members if show_all else min(members, 100),
        "first drawing ms": first,
        "frames": len(gaps),
        "median ms": statistics.median(gaps),
        "99 % ms": gaps[int(0.99 * (len(gaps) - 1))],
        "worst ms": gaps[-1],
        "longest task ms": max(found["tasks"], default=0.0),
    }


def watchers(url: str, fast: int, slow: int) -> list[socket.socket]:
    """Connections that follow a run. The slow ones never read; a thread reads the others, until all are closed."""
    port = urlsplit(url).port or 0
    lines = []
    for _ in range(fast + slow):
        line = socket.create_connection(("127.0.0.1", port), timeout=30)
        line.sendall(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        lines.append(line)

    def read(reading: list[socket.socket]) -> None:
        for line in reading:
            line.setblocking(False)
        while any(line.fileno() >= 0 for line in reading):
            for line in reading:
                with contextlib.suppress(OSError):
                    line.recv(65_536)
            time.sleep(0.05)

    threading.Thread(target=read, args=(lines[:fast],), daemon=True).start()
    return lines


def ending_s(host: Host, after: int) -> list[float]:
    """Seconds from a round's closing to its verdict, of committed rounds after this one."""
    closings = {one["round"]: one["time"] for one in host.events("round_closing")}
    ended = [one for one in host.events("verdict", committed=True) if one["round"] > after and one["round"] in closings]
    return [one["time"] - closings[one["round"]] for one in ended]


def rounds(turns: int, per_turn: int, fast: int, slow: int) -> list[Row]:
    """Rounds of a real run, without and with browsers, in turns."""
    took: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(Path(folder))
        try:
            host = swarm.host(run_toml(max_s=1.0), extra=["--web", "127.0.0.1:0"])
            one, two = swarm.members(host.invite, "one", "two")
            one.committed()
            two.committed()
            process = psutil.Process(host.pid)
            for _ in range(turns):
                for watched in (False, True):
                    lines = watchers(page_url(host), fast, slow) if watched else []
                    last = max(event["round"] for event in host.events("verdict"))
                    used_s, began_s = sum(process.cpu_times()[:2]), time.monotonic()
                    while len(found := ending_s(host, last + 1)) < per_turn:
                        time.sleep(0.2)
                    took[watched] += found
                    cpu[watched].append((sum(process.cpu_times()[:2]) - used_s) / (time.monotonic() - began_s))
                    for line in lines:
                        line.close()
        finally:
            swarm.close()
    return [
        {
            "browsers": fast if watched else 0,
            "slow readers": slow if watched else 0,
            "rounds": len(took[watched]),
            "closing to verdict s": statistics.median(took[watched]),
            "host's cores": statistics.mean(cpu[watched]),
        }
        for watched in (False, True)
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="fewer members, browsers and rounds")
    args = options.parse_args()
    end_on_sigterm()
    many, turns, fast, slow = (200, 1, 50, 4) if args.quick else (1000, 3, 500, 20)
    drawn = [frames(many, show_all) for show_all in (False, True)]
    console.print("frames measured; now the rounds", style="dim")
    ended = rounds(turns, 5, fast, slow)
    ratios = {
        "frame_99_vs_100ms": drawn[1]["99 % ms"] / 100,
        "round_end_watched_vs_not": over(ended[1]["closing to verdict s"], ended[0]["closing to verdict s"]),
    }
    publish("the page", [*drawn, *ended], ratios, args.json)


if __name__ == "__main__":
    main()
