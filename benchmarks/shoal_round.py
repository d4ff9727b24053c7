"""Rounds of Shoal, measured: a real coordinator and every peer in processes of their own."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from pacing import Helper, Lap, Pack
from round_case import Case, run_toml
from round_peer import run_peer
from shaped_links import Site, enter
from usage import own_cpu_s

from shoal.peer.cli.host import HostOptions, host

_LOOPBACK = "127.0.0.1"


def run_coordinator(pipe: Connection, toml: str, folder: Path, site: Site | None) -> None:
    """Sends its invite; after that its CPU seconds whenever it is asked. Ends when the pipe does."""
    if site is not None:
        enter(site.namespace)

    def answer() -> None:
        try:
            while True:
                pipe.recv()
                pipe.send(own_cpu_s())
        except (EOFError, OSError):
            os._exit(0)

    address = site.address if site is not None else _LOOPBACK
    (folder / "run.toml").write_text(toml)
    options = HostOptions(folder / "identity", folder / "state", bind=(address, 0))
    threading.Thread(target=answer, daemon=True).start()
    asyncio.run(
        host([folder / "run.toml"], options, lambda hosting: pipe.send(str(hosting.invite)), lambda event: None)
    )


@dataclass(frozen=True)
class Measured:
    """``laps``: of the rounds that count, by round and peer; ``first``: of the one before them; ``coordinator_cpu_s``:
    median of a round."""

    laps: list[list[Lap]]
    first: list[Lap]
    coordinator_cpu_s: float


def measure(case: Case, limit_s: float, sites: Sequence[Site] = ()) -> Measured:
    """Run the case; ``sites``: one for each peer and the last for the coordinator. Raises ``RoundFailed``."""
    places: list[Site | None] = [*sites] if sites else [None] * (case.peers + 1)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = (run_toml(case), folder, places[-1])
        coordinator = Helper("the coordinator", run_coordinator, arguments, time.monotonic() + limit_s)
        stack.callback(coordinator.end)
        invite = coordinator.hear()
        peers = [(invite, case, number, places[number]) for number in range(case.peers)]
        pack = stack.enter_context(Pack.started(run_peer, peers, limit_s))
        pack.introduce()
        seen: list[float] = []

        def look() -> None:
            coordinator.tell("how much?")
            seen.append(coordinator.hear())

        laps = [pack.lap(look, look) for _ in range(1 + case.rounds)]
    spent = [seen[index + 1] - seen[index] for index in range(0, len(seen), 2)]
    return Measured(laps[1:], laps[0], median(spent[1:]))
