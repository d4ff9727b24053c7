"""The training side of a member on one device: speed, the training thread's stall, memory, two stages.

Speed: ``shoal join``'s loop in a real session, whose host is another process, beside a bare torch loop of the same
model; they take turns between two rounds, and a figure is the median of its turns. ``MFU``: of the device's peak, where
that is known. Stall: what a round takes of the training thread, in copies of the parameters, network apart, while other
threads read the contribution as codecs do. ``--device cpu --quick`` tries all of it anywhere.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from common import await_invite, over, parser, publish
from pipeline_gpu import CODECS, SIZES, SMALL
from pipeline_gpu import measured as measured_stages
from torch import nn
from torch.optim import AdamW

from shoal.compression.range_reader import RangeReader, whole_vector
from shoal.peer.demo.processes import Child
from shoal.peer.options import SessionOptions
from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.gpt import GptRecipe
from shoal.peer.recipes.local_loop import LocalLoop
from shoal.peer.session import Session
from shoal.peer.training.algorithms import OverlappedPseudoGradient, PseudoGradient
from shoal.peer.training.device import (
    MemoryLimits,
    allow_tf32,
    autocast,
    choose_device,
    describe_device,
    has_own_memory,
)
from shoal.peer.training.device_streams import streams_of
from shoal.peer.training.inner_optimizer import make_inner
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import DataSection, InnerSection, RunFile, parse_run_file

Row = dict[str, Any]

PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense bfloat16 (V100, T4: float16) operations a second with float32 sums, by a part of the device's name."""

RUN = """
[run]
name = "gpu"
[recipe]
name = "gpt"
settings = {{ layers = {layers}, width = {width}, heads = {heads}, context = {context}, tie_embedding = false }}
[data]
source = "stdlib"
[inner]
batch_samples = {batch}
precision = "{precision}"
compile = {compile}
[averaging]
codec = "int8"
[round]
tokens = 1_000_000_000_000
max_s = 80_000
"""

CHUNK = 2**20
"""Elements that a codec's thread reads at a time."""


def synchronise(device: torch.device) -> None:
    streams_of(device).mark().wait()


def timed_s(work: Callable[[], None], device: torch.device) -> float:
    synchronise(device)
    began_s = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began_s


def repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()


def median_s(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    work()
    return statistics.median(timed_s(work, device) for _ in range(repeats))


# Speed ------------------------------------------------------------------------------------------------------


class BareLoop:
    """The same model in the loop that one would write without Shoal."""

    def __init__(self, run: RunFile, recipe: GptRecipe, device: torch.device, local: LocalLoop) -> None:
        self._model: nn.Module = recipe.build_model(run.run.seed).to(device)
        parameters, inner = list(self._model.parameters()), run.inner
        groups = [
            {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": inner.weight_decay},
            {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
        ]
        fused = True if has_own_memory(device) else None
        self._optimizer = AdamW(groups, lr=inner.lr, betas=inner.betas, eps=inner.eps, fused=fused)
        self._called: Any = torch.compile(self._model) if inner.compile else self._model
        self._run, self._recipe, self._device = run, recipe, device
        self._cast, self._micro_batch = autocast(device, local.precision), local.inner.micro_batch
        self._data, self._next = recipe.training_data(), 0

    def step(self) -> None:
        batch_samples = self._run.inner.batch_samples
        indices = [(self._next + number) % len(self._data) for number in range(batch_samples)]
        self._next += batch_samples
        for micro in torch.split(self._data.batch(indices).to(self._device), self._micro_batch):
            with self._cast():
                loss = self._recipe.loss(self._called, micro)
            (loss * (len(micro) / batch_samples)).backward()  # type: ignore[no-untyped-call]
        assert self._run.inner.clip_norm is not None
        nn.utils.clip_grad_norm_(self._model.parameters(), self._run.inner.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def speed(options: argparse.Namespace, toml: str, folder: Path) -> Row:
    """A row with tokens/s of both loops, in turns, and the memory of the session's."""
    (folder / "run.toml").write_text(toml)
    command = ["host", str(folder / "run.toml"), "--bind", "127.0.0.1:0", "--no-supervisor", "--no-keep-model"]
    host = Child("host", folder / "host", command)
    try:
        invite = await_invite(host, time.monotonic() + 300)
        own = SessionOptions(folder / "identity", folder / "state", bind=("127.0.0.1", 0), maps_ports=False)
        with Session.connect(invite, own, str(options.device)) as session:
            return _speed(session, options)
    finally:
        host.ask_to_end()
        host.end()


def _speed(session: Session, options: argparse.Namespace) -> Row:
    device, run = options.device, session.run_file
    recipe = load_recipe(run)
    assert isinstance(recipe, GptRecipe)
    free_before = available(device)
    local = LocalLoop.prepare(run, recipe, device, MemoryLimits())
    session.start(local.setup)
    batches = session.batches(local.data)

    def member_step() -> None:
        session.step(local.inner.backward(next(batches)))

    steps: dict[str, Callable[[], None]] = {"member": member_step}
    for _ in range(options.steps):
        member_step()
    synchronise(device)
    memory = memory_row(run, local, free_before)
    steps["bare"] = BareLoop(run, recipe, device, local).step
    taken_s: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(1 + options.turns):
        for name, step in steps.items():
            seconds = timed_s(partial(repeat, step, options.steps), device)
            if turn:
                taken_s[name].append(seconds)
    tokens = options.steps * run.inner.batch_samples * recipe.tokens_per_sample
    member, bare = (tokens / statistics.median(taken_s[name]) for name in ("member", "bare"))
    session.request_stop()
    return {
        "precision": local.precision,
        "compiled": str(run.inner.compile).lower(),
        "micro-batch": local.inner.micro_batch,
        "member tokens/s": member,
        "bare loop tokens/s": bare,
        "member / bare": over(member, bare),
        "MFU": mfu(recipe, local, device, member),
        **memory,
    }


def mfu(recipe: GptRecipe, local: LocalLoop, device: torch.device, tokens_s: float) -> float | None:
    """Share of the device's peak: 6 operations for each parameter and 12 for each layer, value of the width and token
    of the context (PaLM, arXiv:2204.02311)."""
    name = describe_device(str(device)).name
    peak = next((peak for part, peak in PEAKS.items() if re.search(rf"\b{part}\b", name)), None)
    if peak is None or local.precision not in ("bfloat16", "float16"):
        return None
    settings, parameters = recipe.settings, sum(one.numel() for one in local.setup.model.parameters())
    flops = 6 * parameters + 12 * settings.layers * settings.width * settings.context
    return flops * tokens_s / peak


def available(device: torch.device) -> int:
    return psutil.Process().memory_info().rss if not has_own_memory(device) else 0


def memory_row(run: RunFile, local: LocalLoop, before: int) -> Row:
    """Bytes of the member after some steps, in float32 values for each parameter; the account's, without a batch's
    activations."""
    model = local.setup.model
    parameters, device = sum(one.numel() for one in model.parameters()), next(model.parameters()).device
    demand, row = account_of(run).demand(), {}
    if has_own_memory(device):
        module = torch.get_device_module(device)
        row["device GB, most"] = module.max_memory_allocated(device) / 1e9
        row["device GB, of the account"] = 4 * demand.device * parameters / 1e9
    row["host GB"] = (psutil.Process().memory_info().rss - before) / 1e9
    row["host GB, of the account"] = 4 * (demand.host if has_own_memory(device) else demand.shared) * parameters / 1e9
    return row


# Stall ------------------------------------------------------------------------------------------------------


def stalls(options: argparse.Namespace, recipe: GptRecipe) -> Iterator[Row]:
    """A row without overlap, and one with it."""
    device = options.device
    for overlap in (False, True):
        model = recipe.build_model(1).to(device)
        vector, inner = ParameterVector(model), make_inner(model, InnerSection())
        work = (OverlappedPseudoGradient if overlap else PseudoGradient)(vector, inner, 1.0)
        anchor, values = whole_vector(vector), torch.empty(vector.elements)
        data, cast = recipe.training_data(), autocast(device, options.precision)

        def step(model: nn.Module = model, work: PseudoGradient = work, data: Any = data, cast: Any = cast) -> None:
            batch = data.batch(list(range(options.batch))).to(device)
            for micro in torch.split(batch, options.stall_micro_batch):
                with cast():
                    loss = recipe.loss(model, micro)
                loss.backward()  # type: ignore[no-untyped-call]
            work.step(options.batch, 1.0)

        copy_s = median_s(copier(vector, device), device, options.turns)
        step_s = median_s(step, device, options.turns)
        held_s, read_s, steps_s = [], [], []
        with ThreadPoolExecutor(4) as threads:
            for turn in range(1 + options.turns):
                step()
                offered: list[RangeReader] = []
                begin_s = timed_s(lambda: offered.append(work.contribution(anchor)), device)  # noqa: B023
                began_s = time.perf_counter()
                bounds = [*range(0, vector.elements, CHUNK), vector.elements]
                reads = [threads.submit(offered[0].read, *one, values[slice(*one)]) for one in pairwise(bounds)]
                if overlap:
                    during_s = timed_s(step, device)
                wait(reads)
                reading_s = time.perf_counter() - began_s
                for read in reads:
                    read.result()
                end_s = timed_s(lambda: work.continue_from(anchor), device)  # noqa: B023
                if turn:
                    held_s.append(begin_s + end_s)
                    read_s.append(reading_s)
                    if overlap:
                        steps_s.append(during_s)
        stall_s = statistics.median(held_s)
        yield {
            "overlap": str(overlap).lower(),
            "M parameters": vector.elements / 1e6,
            "stall ms": 1e3 * stall_s,
            "copy of the parameters ms": 1e3 * copy_s,
            "stall / copy": over(stall_s, copy_s),
            "others read ms": 1e3 * statistics.median(read_s),
            "step meanwhile / alone": over(statistics.median(steps_s), step_s) if steps_s else None,
        }


def copier(vector: ParameterVector, device: torch.device) -> Callable[[], None]:
    """Make a copy of all parameters from one piece of (pinned) memory to the device."""
    source = torch.empty(vector.elements, pin_memory=has_own_memory(device))
    target = torch.empty(vector.elements, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return copy


def ratios_of(rows: list[Row]) -> dict[str, float | None]:
    def found(column: str, **where: str) -> float | None:
        alike = [row for row in rows if column in row and all(row.get(key) == one for key, one in where.items())]
        return alike[0][column] if alike else None

    return {
        "member_vs_bare_tokens_s": found("member / bare"),
        "stall_vs_copy": found("stall / copy", overlap="false"),
        "stall_vs_copy_overlap": found("stall / copy", overlap="true"),
        "stages_vs_unsplit_tokens_s": found("stages / unsplit"),
    }


def settings_of(options: argparse.Namespace) -> dict[str, int]:
    sizes = SMALL if options.quick else {name: getattr(options, name) for name in SIZES}
    return {name: int(size) for name, size in sizes.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="auto")
    arguments.add_argument("--precision", default="auto", help="as inner.precision of a run file")
    arguments.add_argument("--compile", action="store_true", help="both loops by torch.compile")
    arguments.add_argument("--batch", type=int, default=16, help="samples of a step")
    arguments.add_argument("--steps", type=int, default=20, help="of a turn")
    arguments.add_argument("--turns", type=int, default=7)
    arguments.add_argument("--micro-batch", type=int, default=8, help="samples, of the stages and the stall")
    arguments.add_argument("--micro-batches", type=int, default=16, help="a turn of the stages")
    arguments.add_argument("--quick", action="store_true", help="a smoke run: a tiny model, few steps")
    for name, size in SIZES.items():
        arguments.add_argument(f"--{name}", type=int, default=size)
    options = arguments.parse_args()
    options.device = choose_device(options.device)
    options.stall_micro_batch = options.micro_batch
    options.repeats, options.codecs = options.turns, CODECS[:1]
    if options.quick:
        options.steps, options.turns, options.repeats, options.micro_batches = 5, 3, 2, 4
    allow_tf32(options.device, options.precision)
    sizes = settings_of(options)
    toml = RUN.format(**sizes, batch=options.batch, precision=options.precision, compile=str(options.compile).lower())
    parse_run_file(toml)
    with tempfile.TemporaryDirectory() as folder:
        rows = [speed(options, toml, Path(folder))]
    recipe = GptRecipe({**sizes, "tie_embedding": False}, DataSection(source="stdlib"))
    rows.extend(stalls(options, recipe))
    rows.extend(measured_stages(recipe, "float32" if options.device.type == "cpu" else "bfloat16", options))
    about = describe_device(str(options.device)).name
    publish(f"{about}, {os.cpu_count()} processors, torch {torch.__version__}", rows, ratios_of(rows), options.json)


if __name__ == "__main__":
    main()
