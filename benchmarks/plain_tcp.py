"""Time of a round's bytes over plain TCP: every peer sends that many to each other peer at once.

Without encryption, chunks or a plan: the lower bound for a round over the same links.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import median

from pacing import Lap, Pace, Pack
from shaped_links import Site, enter

_AT_ONCE_BYTES = 2**18
_IDLE_S = 3.0
"""As long as a round's peers are idle before the next one, about."""


def plain_peer(pipe: Connection, number: int, pair_bytes: int, rounds: int, site: Site) -> None:
    enter(site.namespace)
    pace = Pace(pipe)
    listener = socket.create_server((site.address, 0), backlog=64)
    addresses = pace.introduce(listener.getsockname())
    others = [address for index, address in enumerate(addresses) if index != number]
    outgoing = [socket.create_connection(address) for address in others]
    incoming = [listener.accept()[0] for _ in others]
    for _ in range(1 + rounds):
        time.sleep(_IDLE_S)
        start_s = pace.start()
        time.sleep(max(0.0, start_s - time.monotonic()))
        work = [threading.Thread(target=_send, args=(one, pair_bytes)) for one in outgoing]
        work += [threading.Thread(target=_receive, args=(one, pair_bytes)) for one in incoming]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        end_s = time.monotonic() - start_s
        cpu_s, _ = pace.done()
        pace.report(Lap(end_s, cpu_s, pair_bytes * len(others), pair_bytes * len(others)))


def _send(connection: socket.socket, size: int) -> None:
    some = memoryview(bytes(_AT_ONCE_BYTES))
    while size:
        size -= connection.send(some[:size])


def _receive(connection: socket.socket, size: int) -> None:
    place = memoryview(bytearray(_AT_ONCE_BYTES))
    while size:
        got = connection.recv_into(place[:size])
        if not got:
            raise ConnectionResetError("a peer is gone")
        size -= got


def plain_tcp_s(sites: Sequence[Site], pair_bytes: int, rounds: int, limit_s: float) -> float:
    """Median seconds until the last byte is where it belongs. Raises ``RoundFailed``."""
    arguments = [(number, pair_bytes, rounds, site) for number, site in enumerate(sites)]
    with Pack.started(plain_peer, arguments, limit_s) as pack:
        pack.introduce()
        laps = [pack.lap() for _ in range(1 + rounds)]
    return median(max(lap.end_s for lap in one) for one in laps[1:])
