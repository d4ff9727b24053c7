"""Bulk streams between two processes on loopback, against a plain TCP socket copying the same bytes.

The plain socket (``sendall`` / ``recv_into``, no encryption, no framing) is the physical limit here. The time of
both processes' CPUs counts too: it is what training loses.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from common import entry_of, parser, publish

from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.types import Blob, RosterEntry
from shoal.swarm.transport.node import Node

CHUNK = 2**20
BLOB = Blob(kind="state", number=0)


class Random:
    """A ``ChunkSource`` of the same random MiB again and again."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self._data = memoryview(os.urandom(CHUNK))

    async def chunk(self, index: int) -> memoryview:
        return self._data


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def shoal_end(pipe: Connection, chunks: int, receives: bool) -> None:
    asyncio.run(_shoal_end(pipe, chunks, receives))


async def _shoal_end(pipe: Connection, chunks: int, receives: bool) -> None:
    identity, keys = Identity.generate(), CurveKeys.fresh()
    node: Node

    async def admit(key: bytes) -> bool:
        return node.knows_key(key)

    async with Node.open(keys, "127.0.0.1", (0, 0), admit) as node:
        me = entry_of(node, identity, keys)
        pipe.send(me.model_dump())
        other = RosterEntry.model_validate(await asyncio.to_thread(pipe.recv))
        node.update_roster((me, other))
        node.publish(BLOB, Random(chunks))
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        if receives:
            place = memoryview(bytearray(CHUNK))
            warm = [index async for index in node.fetch(other.peer, BLOB, range(16), lambda c, n: place[:n], 30)]
            assert len(warm) == 16
        pipe.send("warm")
        await asyncio.to_thread(pipe.recv)
        before, start = cpu_s(), time.perf_counter()
        if receives:
            async for _ in node.fetch(other.peer, BLOB, range(chunks), lambda c, n: place[:n], 30):
                pass
            pipe.send("done")
        await asyncio.to_thread(pipe.recv)
        pipe.send((time.perf_counter() - start, cpu_s() - before))


def plain_end(pipe: Connection, chunks: int, receives: bool) -> None:
    if receives:
        listener = socket.create_server(("127.0.0.1", 0))
        pipe.send(listener.getsockname()[1])
        pipe.recv()
        connection, _ = listener.accept()
    else:
        pipe.send(0)
        connection = socket.create_connection(("127.0.0.1", pipe.recv()))
    for step in ("ready", "warm"):
        pipe.send(step)
        pipe.recv()
    before, start = cpu_s(), time.perf_counter()
    data = memoryview(bytearray(os.urandom(CHUNK)))
    if receives:
        left = chunks * CHUNK
        while left:
            left -= connection.recv_into(data, min(left, CHUNK))
        pipe.send("done")
    else:
        for _ in range(chunks):
            connection.sendall(data)
    pipe.recv()
    pipe.send((time.perf_counter() - start, cpu_s() - before))


def measure(end: Callable[[Connection, int, bool], None], chunks: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of both processes together, for ``chunks`` MiB from one to the other."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for receives in (True, False):
        ours, theirs = context.Pipe()
        process = context.Process(target=end, args=(theirs, chunks, receives))
        process.start()
        pipes.append(ours)
        processes.append(process)
    receiver, sender = pipes
    first, second = receiver.recv(), sender.recv()
    sender.send(first)
    receiver.send(second)
    for _ in ("ready", "warm"):
        receiver.recv(), sender.recv()
        receiver.send("go")
        sender.send("go")
    assert receiver.recv() == "done"
    receiver.send("stop")
    sender.send("stop")
    (seconds, cpu), (_, other_cpu) = receiver.recv(), sender.recv()
    for process in processes:
        process.join()
    return seconds, cpu + other_cpu


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mib", type=int, default=2048)
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for name, end in (("plain TCP socket", plain_end), ("Shoal sealed stream", shoal_end)):
        runs = sorted(measure(end, options.mib) for _ in range(3))
        seconds, cpu = runs[1]
        gigabytes = options.mib * CHUNK / 1e9
        rows.append({"what": name, "MB/s": 1e3 * gigabytes / seconds, "CPU-s a GB": cpu / gigabytes})
    plain, shoal = rows
    ratios = {
        "shoal_throughput_vs_plain_tcp": shoal["MB/s"] / plain["MB/s"],
        "shoal_cpu_vs_plain_tcp": shoal["CPU-s a GB"] / plain["CPU-s a GB"],
    }
    publish(f"{options.mib} MiB from one process to another (median of 3)", rows, ratios, options.json)


if __name__ == "__main__":
    main()
