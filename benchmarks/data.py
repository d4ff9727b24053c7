"""Tokens a second from token shards, cold and warm, beside a memory map; start-up and memory by the corpus's size.

python benchmarks/data.py [--mb 128]"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from blake3 import blake3
from rich.console import Console
from rich.table import Table

from shoal.peer.data.manifest import BLOCK_BYTES, MANIFEST, Manifest, ShardFile, TokenizerAbout
from shoal.peer.data.shard_samples import ShardSamples, open_shards
from shoal.peer.data_places import DataPlaces
from shoal.peer.recipes.corpus import WindowDataset
from shoal.swarm.protocol.run_file import DataSection

CONTEXT, BATCH, VOCAB = 1024, 8, 50_000
TOKENIZER = TokenizerAbout("drawn", b"", VOCAB, None)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mb", type=int, default=128, help="size of the corpus that is read, in MiB")
    options.add_argument("--plan", type=int, default=0, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.plan:
        plan(given.plan)
        return
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        console.print(speeds(Path(folder), given.mb))
    console.print(plans())


def speeds(folder: Path, mb: int) -> Table:
    """Batches in the run's order: the same samples from a memory map and from shards."""
    shards = folder / "shards"
    shards.mkdir()
    tokens = np.random.default_rng(1).integers(0, VOCAB, mb * 2**19, dtype=np.uint16)
    tokens.tofile(shards / "0.u16")
    data = tokens.tobytes()
    digests = b"".join(blake3(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES))
    table = np.frombuffer(digests, np.uint8).reshape(-1, 32)
    manifest = Manifest("u16", BLOCK_BYTES, TOKENIZER, (ShardFile("0.u16", len(data)),), table)
    (shards / MANIFEST).write_bytes(manifest.data)
    section = DataSection(source="shards:https://data.example.org/x", manifest=manifest.digest.hex())
    mapped = WindowDataset(np.memmap(shards / "0.u16", dtype="<u2", mode="r"), CONTEXT)
    with serving(shards) as url:
        places = DataPlaces.of([url], cache=str(folder / "cache"))
        cold = open_shards(section, VOCAB, CONTEXT, places).train
        cold_tps = tokens_per_s(cold)
        fresh = open_shards(section, VOCAB, CONTEXT, places).train
        first_tps = tokens_per_s(fresh)
    rates: dict[str, list[float]] = {"memory map": [], "warm": []}
    for _ in range(5):  # in turns, so that what else the machine does is the same for both
        rates["memory map"].append(tokens_per_s(mapped, fresh))
        rates["warm"].append(tokens_per_s(fresh))
    base = float(np.median(rates["memory map"]))
    rows = [
        ("memory map", base),
        ("shards, warm", float(np.median(rates["warm"]))),
        ("shards, from the disk cache, each block checked", first_tps),
        ("shards, cold, from a server on this machine", cold_tps),
    ]
    found = Table(
        "source", "million tokens/s", "beside the memory map", title=f"{mb} MiB, batches of {BATCH} x {CONTEXT}"
    )
    for name, rate in rows:
        found.add_row(name, f"{rate / 1e6:.1f}", f"{rate / base:.2f}")
    return found


def tokens_per_s(data: ShardSamples | WindowDataset, ordered: ShardSamples | None = None) -> float:
    """Read an epoch; ``ordered``: whose order it is read in."""
    shards = ordered if ordered is not None else data
    assert isinstance(shards, ShardSamples)
    length = len(shards)
    indices = shards.sample_order(7, 0).indices(0, length)
    begun_s = time.perf_counter()
    for start in range(0, length - BATCH, BATCH):
        if start % (64 * BATCH) == 0 and data is shards:
            shards.prefetch(indices[start : start + 4096])
        data.batch(indices[start : start + BATCH])
    return length * CONTEXT / (time.perf_counter() - begun_s)


def plans() -> Table:
    """Start-up and memory of processes that plan corpora of several sizes, of which only manifests are made."""
    found = Table("tokens", "manifest kB", "seconds to the first indices", "memory MB", title="Planning")
    for tokens in (10**7, 10**8, 10**9, 10**10):
        command = [sys.executable, __file__, "--plan", str(tokens)]
        found.add_row(
            f"{tokens:,}", *subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        )
    return found


def plan(tokens: int) -> None:
    """Plan a synthetic corpus in this process: parse its manifest, split it, and compute the order of a lease."""
    count = max(1, tokens // 10**9)
    files = tuple(ShardFile(f"{number}.u16", 2 * tokens // count) for number in range(count))
    blocks = sum(-(-one.size_bytes // BLOCK_BYTES) for one in files)
    manifest = Manifest("u16", BLOCK_BYTES, TOKENIZER, files, np.zeros((blocks, 32), np.uint8))
    section = DataSection(source="shards:https://data.example.org/x", manifest=manifest.digest.hex())
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "manifests" / manifest.digest.hex()
        kept.parent.mkdir()
        kept.write_bytes(manifest.data)
        before = psutil.Process().memory_info().rss
        begun_s = time.perf_counter()
        train = open_shards(section, VOCAB, CONTEXT, DataPlaces.of(["http://127.0.0.1:1"], cache=folder)).train
        train.sample_order(7, 0).indices(10**6 % len(train), 10**6 % len(train) + 64)
        took_s = time.perf_counter() - begun_s
        used = psutil.Process().memory_info().rss - before
    print(f"{len(manifest.data) / 1e3:.0f} {took_s:.3f} {used / 1e6:.1f}")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a folder with ranges."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, span = folder / self.path.lstrip("/"), self.headers.get("Range", "")
            first, last = (int(one) for one in span.removeprefix("bytes=").split("-")) if span else (0, 2**40)
            with path.open("rb") as file:
                file.seek(first)
                data = file.read(last + 1 - first) if span else file.read()
            self.send_response(206 if span else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


if __name__ == "__main__":
    main()
