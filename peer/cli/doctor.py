"""``shoal doctor``: what this machine can do for a run, and what would make it better."""

from __future__ import annotations

import functools
import importlib.util
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.machine_memory import memory_text
from shoal.peer.options import DEFAULT_PORT
from shoal.peer.pipeline.profile import CACHE, ModelProfile, profile_model
from shoal.peer.recipes import load_recipe
from shoal.peer.recipes.model_memory import check_layers_fit
from shoal.peer.training.device import (
    MemoryBytes,
    MemoryLimits,
    choose_device,
    demanded_memory,
    describe_device,
    precision_of,
    usable_memory,
)
from shoal.swarm.errors import DeviceError, RecipeError
from shoal.swarm.memory_account import account_of
from shoal.swarm.pipeline.planner.model import LayerCost
from shoal.swarm.protocol.run_file import PipelineSection, RunFile, load_run_file, parse_run_file
from shoal.swarm.protocol.types import DeviceInfo

_USUAL = """\
algorithm = "virtual_batch"

[run]
name = "small-gpt"

[recipe]
name = "gpt"
settings = { layers = 6, width = 384, heads = 6, context = 256, tie_embedding = false }

[data]
source = "stdlib"

[pipeline]
micro_batch = 8

[outer]
optimizer = "adamw"
lr = 1e-3

[round]
tokens = 2_048_000
"""
"""The model of examples/stdlib.toml, in layers."""

_WAITING = PipelineSection(micro_batch=1).in_flight
"""Micro-batches in flight that are assumed for a run without ``[pipeline]``: the default of that section."""


@dataclass(frozen=True)
class Diagnosis:
    """Results of ``shoal doctor`` for a run. ``layer_bytes``: memory to hold each layer; ``span``: of the runs of
    layers [first, stop) that fit, the one with most parameters; ``port_is_free``: of ``shoal host``."""

    run: str
    device: DeviceInfo
    usable: MemoryBytes
    limits: MemoryLimits
    precision: str
    model: ModelProfile
    layer_bytes: tuple[MemoryBytes, ...]
    span: tuple[int, int]
    has_numba: bool
    has_idle_gpu: bool
    port_is_free: bool

    @property
    def share(self) -> float:
        """Share of the model's parameters that ``span`` has."""
        costs = [layer.cost.parameters_bytes for layer in self.model.layers]
        return sum(costs[slice(*self.span)]) / max(1, sum(costs))

    @property
    def is_whole(self) -> bool:
        return self.span == (0, len(self.model.layers))

    @property
    def limited(self) -> tuple[tuple[str, int | None, int], ...]:
        """Option, its value, and what is usable, of each memory; last that in which the device computes."""
        host = ("--max-memory", self.limits.host_bytes, self.usable.host)
        if self.usable.device is None:
            return (host,)
        return host, ("--max-device-memory", self.limits.device_bytes, self.usable.device)


def examine(
    run_path: Path | None,
    device_name: str,
    limits: MemoryLimits,
    cache: Path = CACHE,
    *,
    data: DataPlaces = NOWHERE,
) -> Diagnosis:
    """Look at the machine and measure the run's model on it; ``data``: what ``--data`` names.

    Raises ``DeviceError``, ``RunFileError``, ``RecipeError`` or ``CorpusError``."""
    device = choose_device(device_name)
    run = load_run_file(run_path)[1] if run_path else parse_run_file(_USUAL)
    if run.recipe.name == "own":
        raise RecipeError(f"{run_path}: the members of this run bring their own model, which cannot be measured here")
    usable = usable_memory(device, limits)  # before anything of ours is in it
    if usable.computing <= 0:
        raise DeviceError(f"no memory of {device} is free: end other programs that use it")
    recipe = load_recipe(run, data)
    check_layers_fit(run, recipe, usable.computing)
    model = profile_model(run, recipe, device, time.time(), cache)
    costs = [layer.cost for layer in model.layers]
    layer_bytes = tuple(held_bytes(cost, run, device) for cost in costs)
    return Diagnosis(
        run=run.run.name,
        device=describe_device(str(device)),
        usable=usable,
        limits=limits,
        precision=precision_of(device, run.inner.precision, scales_loss=run.pipeline is None),
        model=model,
        layer_bytes=layer_bytes,
        span=largest_span(costs, layer_bytes, usable),
        has_numba=importlib.util.find_spec("numba") is not None,
        has_idle_gpu=device.type == "cpu" and choose_device("auto").type != "cpu",
        port_is_free=_is_free(DEFAULT_PORT),
    )


def held_bytes(cost: LayerCost, run: RunFile, device: torch.device) -> MemoryBytes:
    """Memory that a layer takes: what the account has for its parameters, and what autograd keeps for all micro-batches
    in flight. A pipeline's layer counts as the coordinator's plan counts it."""
    waiting = run.pipeline.in_flight if run.pipeline else _WAITING
    return demanded_memory(device, account_of(run).demand(), cost.parameters_bytes // 4, waiting * cost.kept_bytes)


def largest_span(
    costs: Sequence[LayerCost], layer_bytes: Sequence[MemoryBytes], usable: MemoryBytes
) -> tuple[int, int]:
    """Of the runs of layers [first, stop) that fit into memory, the one with most parameters; (0, 0) if none fits."""
    best, best_parameters = (0, 0), -1
    first, parameters = 0, 0
    for stop, cost in enumerate(costs, 1):
        parameters += cost.parameters_bytes
        while first < stop and not _sum(layer_bytes[first:stop]).fit_into(usable):
            parameters -= costs[first].parameters_bytes
            first += 1
        if first < stop and parameters > best_parameters:
            best, best_parameters = (first, stop), parameters
    return best


def _sum(sizes: Sequence[MemoryBytes]) -> MemoryBytes:
    return functools.reduce(MemoryBytes.__add__, sizes)


def advice(found: Diagnosis) -> Iterator[str]:
    """Advice to the owner of this machine, the most important first."""
    layers = len(found.model.layers)
    first, stop = found.span
    if found.is_whole and found.model.whole:
        yield "The whole model fits: this machine can train alone."
    elif found.is_whole:
        yield "The whole model fits: this machine can train alone, or hold any stage of a pipeline."
    elif stop:
        yield (
            f"It can hold {stop - first} of {layers} layers, {found.share:.0%} of the parameters: join a run with "
            f"\\[pipeline], as a stage."
        )
    else:
        need = min(found.layer_bytes, key=lambda one: one.computing)
        more = _how_to_allow_more(need, found)
        yield f"Not one layer fits, the smallest takes {_text(need)}: {more}, or join a run with smaller layers."
    if found.model.whole:
        yield f"Measured as a whole, since it cannot be cut into stages: {escape(found.model.whole)}."
    for option, limit, usable in found.limited:
        if limit is not None and limit > usable:
            yield f"Of the {memory_text(limit)} of {option} only {memory_text(usable)} are free now."
    if found.limited[-1][1] is None and found.usable.computing < found.device.memory_bytes / 2:
        yield "More than half of the memory is in use: other programs take it."
    if found.has_idle_gpu:
        yield "This machine has a GPU that is not used: leave --device out."
    if not found.has_numba:
        yield "Rounds of large models cost less time with compiled kernels: pip install 'shoal\\[fast]'."
    if not found.port_is_free:
        yield f"Port {DEFAULT_PORT} is in use: `shoal host` needs another one here, --bind 0.0.0.0:PORT."


def _text(memory: MemoryBytes) -> str:
    if memory.device is None:
        return memory_text(memory.host)
    return f"{memory_text(memory.device)} on the GPU and {memory_text(memory.host)} of the machine's memory"


def _how_to_allow_more(need: MemoryBytes, found: Diagnosis) -> str:
    """Return what the owner can do about the memory that is too small for a layer."""
    needs = (need.host,) if need.device is None else (need.host, need.device)
    for (option, limit, usable), needed in zip(found.limited, needs, strict=True):
        if needed > usable:
            return f"allow a larger {option}" if limit else "end other programs"
    return "end other programs"


def report(found: Diagnosis) -> RenderableType:
    """Render the diagnosis for a terminal of 80 columns or more. For each kind of layer: how many there are, the
    parameters of one, and for a micro-batch the time forward and backward, the bytes sent on and the bytes kept; then
    the memory that the layer takes."""
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    capped = [option for option, limit, usable in found.limited if limit == usable]
    facts.add_row("device", escape(f"{found.device.name} ({found.device.kind})"))
    usable = f"{memory_text(found.usable.computing)} usable of {memory_text(found.device.memory_bytes)}"
    if found.usable.device is not None:
        usable += f", and {memory_text(found.usable.host)} of the machine's"
    facts.add_row("memory", usable + (f" ({', '.join(capped)})" if capped else ""))
    facts.add_row("precision", found.precision)
    facts.add_row("kernels", "compiled (numba)" if found.has_numba else "PyTorch's, numba is not installed")
    port = "free" if found.port_is_free else "in use"
    facts.add_row("ports", f"{DEFAULT_PORT}, that of `shoal host`, is {port}; `shoal join` takes any")
    parameters = sum(layer.cost.parameters_bytes for layer in found.model.layers) // 4
    layers = "in one piece" if found.model.whole else f"{len(found.model.layers)} layers"
    facts.add_row("model", escape(f"{found.run}: {parameters:,} parameters, {layers}"))
    facts.add_row("share", f"{found.share:.0%} of it can be held here")
    facts.add_row("speed", f"{1 / found.model.seconds:.3g} micro-batches of {_samples(found)} a second, whole model")
    lines = Table(box=None, pad_edge=False, show_header=False)
    lines.add_column(style="yellow", no_wrap=True)
    lines.add_column()
    for line in advice(found):
        lines.add_row("•", line)
    return Group(facts, _kinds(found), lines)


def _kinds(found: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("layers", overflow="ellipsis", no_wrap=True)
    takes = ("takes",) if found.usable.device is None else ("on GPU", "on host")
    for title in ("number", "parameters", "time", "sends", "keeps", *takes):
        table.add_column(title, justify="right", no_wrap=True)
    numbers: dict[str, list[int]] = {}
    for number, layer in enumerate(found.model.layers):
        numbers.setdefault(layer.kind, []).append(number)
    for same in numbers.values():
        layer = found.model.layers[same[0]]
        ends = dict.fromkeys((found.model.names[same[0]], found.model.names[same[-1]]))
        table.add_row(
            escape(" … ".join(ends)),
            str(len(same)),
            f"{layer.cost.parameters_bytes // 4:,}",
            f"{1000 * layer.seconds:,.1f} ms",
            memory_text(layer.cost.activation_bytes),
            memory_text(layer.cost.kept_bytes),
            *(
                memory_text(one)
                for one in (found.layer_bytes[same[0]].device, found.layer_bytes[same[0]].host)
                if one is not None
            ),
        )
    return table


def _samples(found: Diagnosis) -> str:
    return "1 sample" if found.model.micro_batch == 1 else f"{found.model.micro_batch} samples"


def _is_free(port: int) -> bool:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
