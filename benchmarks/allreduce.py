"""One exchange of a round between processes on loopback, against gloo's ring all-reduce of the same vector.

Shoal: plan in hand, from the contribution in memory to every mean in the store and its digest: encode, seal, send,
decode, sum, encode, send. Gloo: ``torch.distributed.all_reduce``, float32, unencrypted. Bytes are those that one
peer sends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from common import entry_of, parser, publish

from shoal.compression import fast
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.registry import get_coding
from shoal.swarm.averaging.allreduce import AllReduce, ResultStore
from shoal.swarm.averaging.partition import chunk_elements, split
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.identity import CurveKeys, Identity
from shoal.swarm.messages import Blob, Part, PlanMember, RosterEntry, RoundPlan
from shoal.swarm.transport import Node


def make_plan(peers: list[str], elements: int, number: int) -> RoundPlan:
    chunk = chunk_elements(elements, len(peers))
    parts = split(elements, [1 / len(peers)] * len(peers), chunk)
    return RoundPlan(
        round=number,
        anchor_version=0,
        state_digest=bytes(32),
        chunk_elements=chunk,
        members=tuple(PlanMember(peer=peer, weight_tokens=1) for peer in sorted(peers)),
        parts=tuple(Part(owner=owner, start=start, stop=stop) for owner, start, stop in parts),
    )


def shoal_peer(pipe: Connection, codec: str, elements: int, rounds: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(_shoal_peer(pipe, codec, elements, rounds))


async def _shoal_peer(pipe: Connection, codec_name: str, elements: int, rounds: int) -> None:
    identity, keys, coding = Identity.generate(), CurveKeys.fresh(), get_coding(codec_name)
    for thread in fast.compile_ahead(coding.kernels):  # a member does so when it joins
        await asyncio.to_thread(thread.join)
    node: Node

    async def admit(key: bytes) -> bool:
        return node.knows_key(key)

    async with Node.open(keys, "127.0.0.1", (0, 0), admit) as node:
        me = entry_of(node, identity, keys)
        pipe.send(me.model_dump())
        roster = tuple(RosterEntry.model_validate(one) for one in await asyncio.to_thread(pipe.recv))
        node.update_roster(roster)
        feedback = ErrorFeedback(elements)
        for number in range(rounds):
            plan = make_plan([entry.peer for entry in roster], elements, number)
            contribution = torch.randn(elements, generator=torch.Generator().manual_seed(number))
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            sent, start = node.meter.sent_bytes, time.perf_counter()
            feedback.begin(contribution)
            store = ResultStore(plan, coding)
            node.publish(Blob(kind="result", number=number), store)
            exchange = AllReduce(node, store, identity.peer_id, feedback, Deadlines(30))
            assert not (await exchange.run()).trouble
            for part in plan.parts:
                await asyncio.to_thread(store.digest, part)
            seconds = time.perf_counter() - start
            pipe.send(seconds)
            await asyncio.to_thread(pipe.recv)
            pipe.send(node.meter.sent_bytes - sent)
            feedback.commit()
        pipe.send("end")
        await asyncio.to_thread(pipe.recv)


def gloo_peer(pipe: Connection, store: str, elements: int, rounds: int) -> None:
    torch.set_num_threads(1)
    pipe.send("here")
    rank, size = pipe.recv()
    dist.init_process_group("gloo", f"file://{store}", timeout=timedelta(seconds=60), rank=rank, world_size=size)
    for number in range(rounds):
        vector = torch.randn(elements, generator=torch.Generator().manual_seed(number))
        pipe.send("ready")
        pipe.recv()
        start = time.perf_counter()
        dist.all_reduce(vector)
        pipe.send(time.perf_counter() - start)
        pipe.recv()
        pipe.send(int(2 * (size - 1) / size * 4 * elements))
    pipe.send("end")
    pipe.recv()
    dist.destroy_process_group()


def measure(
    end: Callable[[Connection, str, int, int], None], detail: str, peers: int, elements: int, rounds: int
) -> tuple[float, float]:
    """Median over rounds of the slowest peer's seconds, and the mean bytes that a peer sent in a round."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    for _ in range(peers):
        ours, theirs = context.Pipe()
        process = context.Process(target=end, args=(theirs, detail, elements, rounds))
        process.start()
        pipes.append(ours)
        processes.append(process)
    first = [pipe.recv() for pipe in pipes]
    for rank, pipe in enumerate(pipes):
        pipe.send((rank, peers) if end is gloo_peer else first)
    seconds, sent = [], []
    for _ in range(rounds):
        for step in ("ready", "times"):
            answers = [pipe.recv() for pipe in pipes]
            if step == "times":
                seconds.append(max(answers))
            for pipe in pipes:
                pipe.send("go")
        sent.append(sum(pipe.recv() for pipe in pipes) / peers)
    for pipe in pipes:
        assert pipe.recv() == "end"
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join()
    return sorted(seconds)[len(seconds) // 2], sum(sent) / len(sent)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--peers", type=int, default=4)
    arguments.add_argument("--elements", type=int, default=2**24)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    size = (options.peers, options.elements, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        variants: list[tuple[str, Callable[[Connection, str, int, int], None], str]] = [
            ("gloo float32, in the clear", gloo_peer, f"{folder}/store"),
            ("Shoal float32, sealed", shoal_peer, "float32"),
            ("Shoal int8, sealed", shoal_peer, "int8"),
        ]
        for name, end, detail in variants:
            seconds, sent = measure(end, detail, *size)
            speed = options.elements / 1e6 / seconds
            rows.append({"what": name, "s a round": seconds, "M elements/s": speed, "MB sent a peer": sent / 1e6})
    gloo, float32, int8 = rows
    ratios = {
        "shoal_float32_time_vs_gloo": float32["s a round"] / gloo["s a round"],
        "shoal_int8_time_vs_gloo": int8["s a round"] / gloo["s a round"],
        "shoal_int8_bytes_vs_gloo": int8["MB sent a peer"] / gloo["MB sent a peer"],
    }
    title = f"{options.elements:,} elements, {options.peers} peers on {multiprocessing.cpu_count()} cores"
    publish(title, rows, ratios, options.json)


if __name__ == "__main__":
    main()
