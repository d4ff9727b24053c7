"""Systems that Shoal is compared with, on the same vectors and in step with the same clock.

Gloo: ``torch.distributed.all_reduce`` of float32 in the clear, between processes that never may die. Hivemind: its
``DecentralizedAverager`` with a DHT of its own on every peer, where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from pacing import Lap, Pace

_GLOO_S = 60.0
_LOOPBACK = "/ip4/127.0.0.1/tcp/0"
_MATCHMAKING_S = 3.0
"""The longest that a group is waited for; one that is complete begins at once. More does no good: with every member
here it only puts off the retry after two leaders have missed each other."""

_REQUEST_S = 1.0
_STEP_S = 60.0


def gloo_peer(pipe: Connection, store: str, number: int, peers: int, elements: int, rounds: int) -> None:
    torch.set_num_threads(1)
    pace = Pace(pipe)
    pace.introduce(number)
    dist.init_process_group(
        "gloo", f"file://{store}", timeout=timedelta(seconds=_GLOO_S), rank=number, world_size=peers
    )
    for one in range(1 + rounds):
        vector = torch.randn(elements, generator=torch.Generator().manual_seed(one))
        start_s = pace.start()
        time.sleep(max(0.0, start_s - time.monotonic()))
        dist.all_reduce(vector)
        end_s = time.monotonic() - start_s
        cpu_s, peak_bytes = pace.done()
        pace.report(Lap(end_s, cpu_s, int(2 * (peers - 1) / peers * 4 * elements), peak_bytes=peak_bytes))
    dist.destroy_process_group()


def has_hivemind() -> bool:
    return importlib.util.find_spec("hivemind") is not None


def hivemind_peer(pipe: Connection, codec: str, number: int, peers: int, elements: int, rounds: int) -> None:
    """Twice so many rounds: first with matchmaking on the clock; then with the group formed before the start.

    ``codec``: ``int8`` (blockwise) or ``float16``. What it sends is not known (0 bytes)."""
    # By name: it is no dependency, so type checkers may not have it.
    hivemind: Any = importlib.import_module("hivemind")
    stage = importlib.import_module("hivemind.averaging.control").AveragingStage
    compressions = importlib.import_module("hivemind.compression")
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # its own processes cannot be spawned
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    compression = getattr(compressions, {"int8": "BlockwiseQuantization", "float16": "Float16Compression"}[codec])()
    pace = Pace(pipe)
    dht = hivemind.DHT(host_maddrs=[_LOOPBACK], start=True) if number == 0 else None
    known = pace.introduce([str(address) for address in dht.get_visible_maddrs()] if dht is not None else [])
    if dht is None:
        dht = hivemind.DHT(initial_peers=known[0], host_maddrs=[_LOOPBACK], start=True)
    averager = hivemind.DecentralizedAverager(
        [torch.zeros(elements)],
        dht,
        start=True,
        prefix="bench",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=_MATCHMAKING_S,
        request_timeout=_REQUEST_S,
        compression=compression,
    )
    for one in range(2 * (1 + rounds)):
        with averager.get_tensors() as tensors:
            tensors[0].copy_(torch.randn(elements, generator=torch.Generator().manual_seed(one)))
        control: Any = None
        if one > rounds:
            control = averager.step(wait=False, require_trigger=True, timeout=_STEP_S)
            while control.stage != stage.AWAITING_TRIGGER:
                time.sleep(0.001)
        start_s = pace.start()
        time.sleep(max(0.0, start_s - time.monotonic()))
        if control is None:
            group = averager.step(timeout=_STEP_S)
        else:
            control.allow_allreduce()
            group = control.result()
        end_s = time.monotonic() - start_s
        cpu_s, _ = pace.done()
        size = len(group or ())
        pace.report(Lap(end_s, cpu_s, 0, note="" if size == peers else f"a group of {size}"))
    averager.shutdown()
    dht.shutdown()
