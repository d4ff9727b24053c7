"""Speed, bytes and error of every codec, beside a plain copy, bitsandbytes, plain torch and numpy, and Hivemind.

GB/s are of the float32 that goes in or comes out, normal random values, coded in chunks of ``--chunk`` values as the
averager does it (1 MiB each; on a GPU all at once). ``decode`` puts each chunk in its place among all values, so it is
bound by memory; ``decode warm`` puts all in one place, which stays in the cache. ``accumulate`` adds chunk after chunk
to one total of a chunk a thread, as the owner of a part adds one member after the other; ``accumulate cold`` adds each
to its place in a total of all values, which comes from memory and goes back. ``residual`` is error feedback's pass.
What an encoder returns is dropped at once, so its memory is warm: no page faults in the figures. All subjects take
turns, each turn beside a copy of the whole (``memcpy``), and a figure is the median of the turns. What is decoded ends
in the memory that was asked for, except in the row "bitsandbytes, no out": its call as it is, on the CPU, gives a
tensor of its own, here dropped while still in the cache. Ratios to bitsandbytes' decoding compare ours, warm, to that
row; those with ``copied`` compare what ends in its place among all values.

``--threads N``: a pool of N threads, each of which codes one chunk after the other; inside a chunk every library has
one thread. (All of these kernels release the interpreter's lock. A copy is made in the same way.)

Path ``torch`` is ours as it is without numba, ``compiled`` with it; a codec without kernels has no such row. Peers
that only encode and decode accumulate and keep a residual with torch's own operations. Errors are relative, in the L2
norm: on the normal values, and on the gradient of a small gpt after some steps of training, cut to whole chunks.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from codec_subjects import BLOCK, ROWS, Subject, limit_threads, on_path, own, peers
from common import console, parser, publish
from torch import Tensor

from shoal.compression.formats import CODEC_NAMES
from shoal.peer.recipes import load_recipe
from shoal.swarm.protocol.run_file import parse_run_file

CHUNK = 2**18
GRADIENT_STEPS = 20
RUN = """
run = { name = "codecs", seed = 1 }
round = { tokens = 1 }
[recipe]
name = "gpt"
settings = { layers = 4, width = 384, heads = 6, context = 128 }
"""
OPERATIONS = ("encode", "decode", "decode_warm", "accumulate", "accumulate_cold", "residual")
GOALS = {
    "int8_encode_vs_bitsandbytes": (">=", 14.0),
    "int8_encode_vs_memcpy": (">=", 1.2),
    "int8_fallback_encode_vs_bitsandbytes": (">=", 4.0),
    "int8_accumulate_vs_memcpy": (">=", 2.0),
    "int8_fallback_decode_vs_bitsandbytes": (">=", 1.4),
    "topk_encode_vs_torch_topk": (">=", 2.0),
    "topk_decode_vs_memcpy": (">=", 1.0),
    "topk_float32_ratio": (">=", 195.0),
    "int8_error_vs_bitsandbytes": ("<=", 1.0),
}
"""On one thread of a CPU."""
DEVICE_GOALS = {"int8_encode_vs_memcpy": (">=", 0.6), "int8_decode_vs_memcpy": (">=", 0.6)}
Key = tuple[str, str]
"""Codec and path."""
COPY: Key = ("float32", "memcpy")


def chunks_of(values: Tensor, chunk: int) -> list[Tensor]:
    return [values[start : start + chunk] for start in range(0, values.numel(), chunk)]


class Bench:
    """Values cut into chunks, and the thread pool that encodes and decodes them."""

    def __init__(self, values: Tensor, chunk: int, threads: int) -> None:
        self.values = chunks_of(values, chunk)
        self.out = chunks_of(torch.zeros_like(values), chunk)
        self.total = chunks_of(torch.zeros_like(values), chunk)
        self.residual = chunks_of(torch.zeros_like(values), chunk)
        self.copied = torch.zeros_like(values)
        self.whole = values
        self.threads = threads
        self._one_total = threading.local()
        self._pool = ThreadPoolExecutor(threads, initializer=functools.partial(limit_threads, 1))

    def timed(self, work: Callable[[int], Any]) -> float:
        """GB/s of ``work`` done for every chunk."""
        self._wait()
        start = time.perf_counter()
        if self.threads == 1:
            for index in range(len(self.values)):
                work(index)
        else:
            for _ in self._pool.map(work, range(len(self.values))):
                pass
        self._wait()
        return self.whole.nbytes / 1e9 / (time.perf_counter() - start)

    def copy(self) -> float:
        """GB/s of a copy of all values: in one call, on several threads in chunks."""
        if self.threads == 1:
            self._wait()
            start = time.perf_counter()
            self.copied.copy_(self.whole)
            self._wait()
            return self.whole.nbytes / 1e9 / (time.perf_counter() - start)
        return self.timed(lambda index: self.out[index].copy_(self.values[index]))

    def turn(self, subject: Subject, packed: list[Any]) -> dict[str, float]:
        """GB/s of each of the operations, once through all values."""
        for residual in self.residual:
            residual.zero_()
        with on_path(subject):
            return {
                "encode": self.timed(lambda index: _drop(subject.encode(self.values[index]))),
                "decode": self.timed(lambda index: _drop(subject.decode(packed[index], self.out[index]))),
                "decode_warm": self.timed(lambda index: _drop(subject.decode(packed[index], self._warm(index)))),
                "accumulate": self.timed(lambda index: subject.accumulate(packed[index], self._warm(index))),
                "accumulate_cold": self.timed(lambda index: subject.accumulate(packed[index], self.total[index])),
                "residual": self.timed(
                    lambda index: _drop(subject.encode_residual(self.values[index], self.residual[index]))
                ),
            }

    def _warm(self, index: int) -> Tensor:
        if not hasattr(self._one_total, "values"):
            self._one_total.values = torch.zeros_like(self.values[0])
        total: Tensor = self._one_total.values
        return total[: self.values[index].numel()]

    def _wait(self) -> None:
        if self.whole.device.type == "cuda":
            torch.cuda.synchronize(self.whole.device)


def _drop(result: Any) -> None:
    """Drop a result, so that a pool does not keep all results until the end."""


def encoded(subject: Subject, chunks: list[Tensor]) -> list[Any]:
    with on_path(subject):
        return [subject.encode(chunk) for chunk in chunks]


def relative_error(subject: Subject, values: Tensor) -> float:
    """Relative error ``|x - decode(encode(x))| / |x|``."""
    lost = 0.0
    for part in chunks_of(values, CHUNK):
        with on_path(subject):
            decoded = subject.decode(subject.encode(part), torch.empty_like(part))
        lost += float((part.double() - decoded.double()).square().sum())
    return math.sqrt(lost / float(values.double().square().sum()))


def real_gradient(elements: int) -> Tensor:
    """The flat gradient of a step, after ``GRADIENT_STEPS`` steps, cut to whole chunks and at most so many."""
    recipe = load_recipe(parse_run_file(RUN))
    model, samples = recipe.build_model(1), recipe.training_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    for step in range(GRADIENT_STEPS + 1):
        optimizer.zero_grad()
        recipe.loss(model, samples.batch(order[8 * step : 8 * step + 8])).backward()  # type: ignore[no-untyped-call]
        if step < GRADIENT_STEPS:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    flat = torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])
    return flat[: min(elements, flat.numel() // CHUNK * CHUNK)].clone()


def measure(subjects: list[Subject], bench: Bench, repeat: int) -> dict[Key, dict[str, float]]:
    """Median GB/s of every operation of every subject and of the copies in between, with the bytes a parameter."""
    packed = {(subject.codec, subject.path): encoded(subject, bench.values) for subject in subjects}
    turns: dict[Key, list[dict[str, float]]] = {key: [] for key in packed}
    copies = []
    for number in range(repeat + 1):
        for subject in subjects:
            key = subject.codec, subject.path
            copy, turn = bench.copy(), bench.turn(subject, packed[key])
            if number:  # the first round warms up
                turns[key].append(turn)
                copies.append(copy)
    figures = {COPY: dict.fromkeys(OPERATIONS, statistics.median(copies)) | {"bytes": 4.0}}
    for subject in subjects:
        key = subject.codec, subject.path
        size = sum(subject.size_bytes(one) for one in packed[key]) / bench.whole.numel()
        figures[key] = {name: statistics.median(turn[name] for turn in turns[key]) for name in OPERATIONS}
        figures[key]["bytes"] = size
    return figures


def rows_of(subjects: list[Subject], figures: dict[Key, dict[str, float]], data: list[Tensor]) -> list[dict[str, Any]]:
    """Make the table, the plain copy first. ``data``: normal values and a gradient."""
    rows: list[dict[str, Any]] = []
    errors = {(one.codec, one.path): [relative_error(one, values) for values in data] for one in subjects}
    for (codec, path), figure in figures.items():
        gaussian, gradient = errors.get((codec, path), [0.0, 0.0])
        row = {"codec": codec, "path": path, **{f"{name}_GBps": figure[name] for name in OPERATIONS}}
        row |= {"bytes_per_param": figure["bytes"], "error_gaussian": gaussian, "error_gradient": gradient}
        rows.append(row)
    return rows


def ratios_of(rows: list[dict[str, Any]], device: torch.device) -> dict[str, float]:
    """Ratios of the goals and some more, where both sides were measured."""
    by_key = {(row["codec"], row["path"]): row for row in rows}
    default, no_out = ("int8(block=4096)", "bitsandbytes"), ("int8(block=4096)", "bitsandbytes, no out")
    same_bytes = f"int8(block={BLOCK})", "bitsandbytes"
    fallback, top_fallback, top_torch = ("int8", "torch"), ("topk", "torch"), ("topk", "plain torch")
    fast_path = "compiled" if device.type == "cpu" else "torch"
    ours, top = ("int8", fast_path), ("topk", fast_path)
    wanted: dict[str, tuple[Key, Key, str]] = {
        "int8_encode_vs_bitsandbytes": (ours, default, "encode_GBps"),
        "int8_encode_vs_memcpy": (ours, COPY, "encode_GBps"),
        "int8_fallback_encode_vs_bitsandbytes": (fallback, default, "encode_GBps"),
        "int8_accumulate_vs_memcpy": (ours, COPY, "accumulate_GBps"),
        "int8_accumulate_cold_vs_memcpy": (ours, COPY, "accumulate_cold_GBps"),
        "int8_decode_vs_memcpy": (ours, COPY, "decode_GBps"),
        "int8_decode_vs_bitsandbytes": (ours, no_out, "decode_warm_GBps"),
        "int8_fallback_decode_vs_bitsandbytes": (fallback, no_out, "decode_warm_GBps"),
        "int8_decode_vs_bitsandbytes_copied": (ours, default, "decode_GBps"),
        "int8_fallback_decode_vs_bitsandbytes_copied": (fallback, default, "decode_GBps"),
        "topk_encode_vs_torch_topk": (top, top_torch, "encode_GBps"),
        "topk_fallback_encode_vs_torch_topk": (top_fallback, top_torch, "encode_GBps"),
        "topk_decode_vs_memcpy": (top, COPY, "decode_GBps"),
        "topk_fallback_decode_vs_memcpy": (top_fallback, COPY, "decode_GBps"),
        "topk_float32_ratio": (COPY, top_fallback, "bytes_per_param"),
        "int8_error_vs_bitsandbytes": (fallback, same_bytes, "error_gaussian"),
        "int8_gradient_error_vs_bitsandbytes": (fallback, same_bytes, "error_gradient"),
    }
    return {
        name: by_key[above][column] / by_key[below][column]
        for name, (above, below, column) in wanted.items()
        if above in by_key and below in by_key
    }


def parse() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--elements", type=int, default=2**24, help="float32 values, a multiple of 4096")
    arguments.add_argument("--chunk", type=int, help=f"values a call, a multiple of 4096 (CPU: {CHUNK}; GPU: all)")
    arguments.add_argument("--codecs", nargs="+", choices=CODEC_NAMES, default=list(CODEC_NAMES), metavar="NAME")
    arguments.add_argument("--repeat", type=int, default=9, help="turns after the one that warms up")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--device", default="cpu", help="cpu, or cuda for our codecs on a GPU")
    options = arguments.parse_args()
    try:
        if torch.device(options.device).type not in ("cpu", "cuda"):
            raise RuntimeError("expected cpu or cuda")
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        arguments.error(f"there is no device {options.device!r} here: {str(error).splitlines()[0]}")
    options.device = torch.device(options.device)
    options.chunk = options.chunk or (CHUNK if options.device.type == "cpu" else options.elements)
    for name in ("elements", "chunk"):
        if getattr(options, name) < ROWS or getattr(options, name) % ROWS:
            arguments.error(f"--{name} is a positive multiple of {ROWS}")
    if options.threads < 1 or options.repeat < 1:
        arguments.error("--threads and --repeat are at least 1")
    return options


def main() -> None:
    options = parse()
    limit_threads(1)
    subjects = [*own(options.codecs, options.device), *peers(options.device)]
    subjects = [subject for subject in subjects if subject.kind in options.codecs]
    gradient = real_gradient(options.elements).to(options.device)
    normal = torch.randn(options.elements, generator=torch.Generator().manual_seed(1)).to(options.device)
    figures = measure(subjects, Bench(normal, options.chunk, options.threads), options.repeat)
    rows = rows_of(subjects, figures, [normal, gradient])
    about = f"{options.elements:,} float32 in chunks of {options.chunk:,}, {options.device}, threads: {options.threads}"
    title = f"GB/s of {about}; gradient of {gradient.numel():,}"
    ratios = ratios_of(rows, options.device)
    publish(title, rows, ratios, options.json)
    for name, (sign, goal) in (GOALS if options.device.type == "cpu" else DEVICE_GOALS).items():
        if name in ratios and options.threads == 1:
            met = ratios[name] >= goal if sign == ">=" else ratios[name] <= goal
            console.print(f"goal: {name} {sign} {goal:g}: {'met' if met else 'MISSED'} ({ratios[name]:.4g})")


if __name__ == "__main__":
    main()
