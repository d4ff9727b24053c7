"""CPU seconds of a round, by step: each step of the exchange alone, on one thread, beside what a whole round took.

Every step runs on the sizes that a round of these peers has, so the sum is what the round would take if nothing else
cost anything; the rest is the event loop, messages, threads that wait for each other, and that in a round all cores
share the memory's bandwidth, which most steps alone have for themselves. Nothing is sent: between processes of one
machine sealed frames lie in shared memory. Memory that a round keeps for the next one is here from the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import publish, size_of
from torch import Tensor

from shoal.compression.codec_map import CodecMap
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import named_format_map
from shoal.compression.kernels import loader
from shoal.compression.range_reader import TensorReader
from shoal.compression.weighted_mean import EncodingLoss, WeightedMean
from shoal.swarm.averaging.results import part_digest
from shoal.swarm.coordinator.round_plan import chunk_elements
from shoal.swarm.transport.bulk.frame_crypto import TAG_BYTES, SealedLink, preferred_cipher

_REPEATS = 3
_FAST_BPS = 1e9
"""Of links that are no limit, as loopback's are known to be when rounds count."""

_LARGEST = 10.0
"""Of normally distributed values: none is above."""


class _Bench:
    """One peer's share of a round of ``peers``, ``elements`` each; all methods do all of it once."""

    def __init__(self, codec_map: CodecMap, elements: int, peers: int) -> None:
        self.codec_map, self.peers = codec_map, peers
        size = chunk_elements(elements, peers, _FAST_BPS, codec_map.formats.max_chunk_values)
        self.bounds = [(start, min(start + size, elements)) for start in range(0, elements, size)]
        own = max(1, len(self.bounds) // peers)
        self.own, self.others = self.bounds[:own], self.bounds[own:]
        self.contribution = torch.randn(elements, generator=torch.Generator().manual_seed(1))
        self.feedback = ErrorFeedback(elements)
        self.feedback.begin(TensorReader(self.contribution))
        self.packed = {
            bounds: self.feedback.encode_chunk(codec_map.contribution(*bounds), *bounds) for bounds in self.bounds
        }
        self.mean = torch.zeros(elements)
        self.means: dict[tuple[int, int], Tensor] = {}
        self.left: dict[tuple[int, int], Tensor] = {}
        self.losses: dict[tuple[int, int], EncodingLoss] = {}
        self.reduce()
        self._link(max(packed.numel() for packed in self.packed.values()))

    def _link(self, largest: int) -> None:
        secrets = bytes(64)
        ends = [SealedLink(b"12345678", secrets, preferred_cipher(), opener=opener) for opener in (True, False)]
        self._sender, self._receiver = ends
        self._sealed = memoryview(bytearray(largest + TAG_BYTES))
        self._opened = memoryview(bytearray(largest))

    def _sent(self) -> list[memoryview]:
        """Bytes that one peer sends, and receives: contributions to the parts' owners, its own means to all."""
        outward = [self.packed[bounds].numpy().data for bounds in self.others]
        means = [self.packed[bounds].numpy().data for bounds in self.own]
        return outward + means * (self.peers - 1)

    def settle_s(self) -> float:
        """CPU seconds of a verdict's work on the residual, all chunks of which were encoded."""
        self.encode_s()
        return _cpu_s(self._settle)

    def _settle(self) -> None:
        for start, stop in self.bounds:
            self.feedback.include_chunk(start, stop)
        for (start, _), loss in self.losses.items():
            self.feedback.add_mean_loss(start, loss, self.peers)
        self.feedback.commit()

    def encode_s(self) -> float:
        """CPU seconds to encode a contribution with the residual of the round before."""
        self.feedback.reset()
        self.feedback.begin(TensorReader(self.contribution), _LARGEST)
        return _cpu_s(self._encode)

    def _encode(self) -> None:
        for bounds in self.bounds:
            self._encode_chunk(*bounds)

    def _encode_chunk(self, start: int, stop: int) -> None:
        room = self.packed[start, stop]
        self.feedback.encode_chunk(self.codec_map.contribution(start, stop), start, stop, lambda _: room)

    def reduce(self) -> None:
        for start, stop in self.own:
            codec, mean = self.codec_map.contribution(start, stop), WeightedMean(stop - start)
            for _ in range(self.peers):
                mean.add_packed(codec, self.packed[start, stop], 1.0)
            codec = self.codec_map.result(start, stop, self.peers)
            size = codec.packed_bytes(stop - start)
            packed = self.means.setdefault((start, stop), torch.empty(size, dtype=torch.uint8))
            left = self.left.setdefault((start, stop), torch.empty(stop - start))
            self.losses[start, stop] = mean.encode(codec, self.peers, left, packed)

    def digest(self) -> None:
        """Of all parts, once: everybody's report names them, and compares them with the verdict's."""
        part_digest(packed.numpy().data for packed in self.packed.values())

    def decode(self) -> None:
        for start, stop in self.bounds:
            self.codec_map.contribution(start, stop).decode(
                self.packed[start, stop], stop - start, self.mean[start:stop]
            )

    def seal_s(self) -> float:
        return sum(self._seal_and_open(payload)[0] for payload in self._sent())

    def open_s(self) -> float:
        return sum(self._seal_and_open(payload)[1] for payload in self._sent())

    def _seal_and_open(self, payload: memoryview) -> tuple[float, float]:
        """CPU seconds to seal and to open frames, each of which can be opened only once."""
        sealed, opened = self._sealed[: payload.nbytes + TAG_BYTES], self._opened[: payload.nbytes]
        header = self._sender.next_header(0, 0)
        start_s = time.thread_time()
        self._sender.seal(header, payload, sealed)
        middle_s = time.thread_time()
        self._receiver.open(header, sealed, opened)
        return middle_s - start_s, time.thread_time() - middle_s


def steps(codec: str, elements: int, peers: int) -> dict[str, float]:
    """CPU seconds of each step for all peers together."""
    torch.set_num_threads(1)
    codec_map = CodecMap(named_format_map(codec))
    for thread in loader.compile_ahead(codec_map.kernels):
        thread.join()
    bench = _Bench(codec_map, elements, peers)
    whole: dict[str, Callable[[], float]] = {
        "settle the residual": bench.settle_s,
        "encode": bench.encode_s,
        "seal": bench.seal_s,
        "open": bench.open_s,
        "reduce": lambda: _cpu_s(bench.reduce),
        "digest": lambda: _cpu_s(bench.digest),
        "decode": lambda: _cpu_s(bench.decode),
    }
    return {name: peers * min(measure() for _ in range(1 + _REPEATS)) for name, measure in whole.items()}


def _cpu_s(work: Callable[[], None]) -> float:
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


def table(measured: dict[str, float], total_cpu_s: float) -> list[dict[str, Any]]:
    """Make a row for each step with its share of the round's total, and one for the unexplained rest."""
    known = dict(measured)
    known["event loop and the rest"] = total_cpu_s - sum(measured.values())
    known["the whole round"] = total_cpu_s
    return [{"step": name, "CPU s": seconds, "share": seconds / total_cpu_s} for name, seconds in known.items()]


def publish_account(codec: str, elements: int, peers: int, total_cpu_s: float, path: Path | None) -> None:
    """Measure the steps and print them beside the round's CPU seconds."""
    rows = table(steps(codec, elements, peers), total_cpu_s)
    unexplained = next(row["share"] for row in rows if row["step"] == "event loop and the rest")
    title = f"CPU seconds of a round, {peers} peers together, {size_of(elements)} {codec}"
    publish(title, rows, {"unexplained_cpu_share": unexplained}, path)
