"""Profile of a model's layers on this machine: seconds forward and backward, and bytes, measured layer by layer.

Measuring takes some seconds, so the figures are cached on disk for some days.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from shoal.compression.formats import CodecFormat
from shoal.peer.options import SHOAL_HOME
from shoal.peer.recipes import Recipe, layered_recipe
from shoal.peer.training.device import MemoryBytes, autocast, describe_device, kept_bytes
from shoal.peer.training.device_streams import streams_of
from shoal.swarm import durable
from shoal.swarm.errors import DeviceError, RecipeError
from shoal.swarm.pipeline.planner.model import LayerCost, PeerCapability
from shoal.swarm.protocol.run_file import RunFile

_REPEATS, _ENOUGH_S = 5, 2.0
"""Most repetitions of a measurement, and the total seconds after which there is no further one."""


@dataclass(frozen=True)
class LayerProfile:
    """Measured cost of a layer.

    ``kind``: hash of its structure, layers of the same kind are measured once; ``seconds``: forward and backward of a
    micro-batch.
    """

    kind: str
    cost: LayerCost
    seconds: float


@dataclass(frozen=True)
class ProfileSetup:
    """Device and precision of a measurement. ``sent_bytes``: size of so many values as the activations' codec packs."""

    device: torch.device
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    sent_bytes: Callable[[int], int] = lambda values: 4 * values


def profile_layers(
    outlines: Sequence[Sequence[nn.Module]],
    build: Callable[[int], nn.Module],
    given: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    bench: ProfileSetup,
) -> tuple[LayerProfile, ...]:
    """Measure the cost of every layer at the run's shapes.

    ``outlines``: modules of each layer, on any device, which define its kind; ``build``: builds the layer of an index;
    ``given``: the model's input, one micro-batch; ``loss_of``: computes the loss from the last layer's output and
    counts as a part of that layer. One layer of each kind is measured, and only one is in memory at a time, so the
    model need not fit as a whole. Raises ``DeviceError`` if the device has not enough memory for a layer.
    """
    known: dict[str, tuple[LayerProfile, Tensor]] = {}
    found: list[LayerProfile] = []
    flowing = given.to(bench.device)
    last = len(outlines) - 1
    for number, outline in enumerate(outlines):
        kind = _kind(outline, flowing, is_first=number == 0, is_last=number == last)
        if kind not in known:
            end = loss_of if number == last else None
            # The model's input needs no gradient.
            wanted = flowing.detach().requires_grad_(number > 0 and flowing.is_floating_point())
            with _room_on(bench.device):
                known[kind] = _measure(kind, build(number), wanted, end, bench)
        measured, flowing = known[kind]
        found.append(measured)
    return tuple(found)


def _kind(outline: Sequence[nn.Module], given: Tensor, *, is_first: bool, is_last: bool) -> str:
    """Hash a layer's structure to 16 hexadecimal digits, without parameter names, which contain the layer's number."""
    parts = [part for module in outline for part in module.modules()]
    tensors = [one for module in outline for one in (*module.parameters(), *module.buffers())]
    about = {
        "ends": [is_first, is_last],
        "given": [list(given.shape), str(given.dtype)],
        "modules": [[type(one).__module__, type(one).__qualname__, one.extra_repr(), _plain(one)] for one in parts],
        "tensors": [[list(one.shape), str(one.dtype)] for one in tensors],
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _plain(part: nn.Module) -> dict[str, int | float | str]:
    """Return a module's plain attributes, such as a number of heads, which shapes do not show."""
    return {name: value for name, value in vars(part).items() if isinstance(value, int | float | str)}


def _measure(
    kind: str, layer: nn.Module, given: Tensor, loss_of: Callable[[Tensor], Tensor] | None, bench: ProfileSetup
) -> tuple[LayerProfile, Tensor]:
    layer = layer.to(bench.device)

    def forward() -> Tensor:
        with bench.autocast():
            output: Tensor = layer(given)
            return output if loss_of is None else loss_of(output)

    with bench.autocast(), torch.no_grad():
        output = layer(given)
    kept = kept_bytes(layer, forward)
    # Gradients of 1 everywhere: their values do not change the time.
    seconds = _median_s(lambda: _backward(forward()), bench.device)
    cost = LayerCost(
        parameters_bytes=4 * sum(one.numel() for one in layer.parameters() if one.requires_grad),
        activation_bytes=bench.sent_bytes(output.numel()),
        kept_bytes=kept,
    )
    return LayerProfile(kind, cost, seconds), output.detach()


@contextmanager
def _room_on(device: torch.device) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On the CPU torch raises a plain RuntimeError, which only its message tells apart.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise DeviceError(
            f"there is not enough memory on {device} for one layer and a micro-batch: end other programs that use it, "
            f"or join a run with smaller layers or micro-batches"
        ) from error


def _backward(output: Tensor) -> None:
    if output.requires_grad:
        torch.autograd.backward(output, torch.ones_like(output))


def _median_s(work: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of ``work``, after a first run that allocates memory and chooses kernels."""
    _timed_s(work, device)
    taken_s: list[float] = []
    while len(taken_s) < _REPEATS and sum(taken_s) < _ENOUGH_S:
        taken_s.append(_timed_s(work, device))
    return statistics.median(taken_s)


def _timed_s(work: Callable[[], None], device: torch.device) -> float:
    streams = streams_of(device)
    began = streams.mark()
    began.wait()
    work()
    ended = streams.mark()
    ended.wait()
    return ended.seconds_since(began)


log = logging.getLogger(__name__)

CACHE = SHOAL_HOME / "measured.json"
_KEPT_S = 7 * 86400.0
"""Seconds that figures are used for; drivers, power settings and other programs change after that."""
_MAX_ENTRIES = 64
_USUAL_MICRO_BATCH = 8

_Bytes = Annotated[int, Field(ge=0)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Layer(_Checked):
    kind: Annotated[str, Field(min_length=1, max_length=64)]
    parameters_bytes: _Bytes
    activation_bytes: _Bytes
    kept_bytes: _Bytes
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Entry(_Checked):
    measured_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    layers: Annotated[list[_Layer], Field(min_length=1)]


class _File(_Checked):
    """Content of the cache: entries by ``cache_key``. A file of any other form is ignored and replaced."""

    entries: dict[str, _Entry] = {}


@dataclass(frozen=True)
class ModelProfile:
    """Measured layers of a model, in order. ``whole``: why the model was measured as one layer; empty if it was not."""

    micro_batch: int
    names: tuple[str, ...]
    layers: tuple[LayerProfile, ...]
    whole: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of one micro-batch, forward and backward, through the whole model."""
        return sum(layer.seconds for layer in self.layers)

    def shared_by(self, ranks: int) -> ModelProfile:
        """Return the figures of so many devices like the measured one, which share the work."""
        return replace(self, layers=tuple(replace(one, seconds=one.seconds / ranks) for one in self.layers))

    def capability(self, peer: str, memory: MemoryBytes, bandwidth_bps: float, rtt_s: float = 0.0) -> PeerCapability:
        """Return this machine's capability for the planner."""
        layer_s = tuple(layer.seconds for layer in self.layers)
        return PeerCapability(peer, memory.host, layer_s, bandwidth_bps, rtt_s, memory.device)


def micro_batch_of(run: RunFile) -> int:
    """Return the samples of a micro-batch; for runs without a pipeline those of a batch, at most eight."""
    return run.pipeline.micro_batch if run.pipeline else min(run.inner.batch_samples, _USUAL_MICRO_BATCH)


def profile_model(
    run: RunFile, recipe: Recipe, device: torch.device, now_s: float, cache: Path = CACHE
) -> ModelProfile:
    """Measure a run's model on this device, or take the figures of some days ago from ``cache``.

    ``now_s``: wall-clock time. Raises ``DeviceError`` if the memory is too small for a layer, and ``RecipeError`` if a
    pipeline's recipe has no layers, or cannot be cut into the run's stages.
    """
    micro_batch = micro_batch_of(run)
    codec = run.pipeline.activation_format if run.pipeline else None
    batch = recipe.training_data().batch([0] * micro_batch).to(device)
    bench = ProfileSetup(device, autocast(device, run.inner.precision), _sent_bytes(codec))
    names, whole, measure = _ways_to_measure(run, recipe, batch, bench)
    about = {
        "device": describe_device(str(device)).name,
        "torch": torch.__version__,
        "recipe": recipe.config(),
        "micro_batch": micro_batch,
        "precision": run.inner.precision,
        "activations": run.pipeline.activations if run.pipeline else None,
        "threads": torch.get_num_threads(),
        "layers": list(names),
    }
    layers = cached_profile(cache, cache_key(about), now_s, len(names), measure)
    return ModelProfile(micro_batch, names, layers, whole)


def cache_key(about: Mapping[str, Any]) -> str:
    """Hash all that the figures depend on to 64 hexadecimal digits (SHA-256)."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def cached_profile(
    path: Path, key: str, now_s: float, count: int, measure: Callable[[], tuple[LayerProfile, ...]]
) -> tuple[LayerProfile, ...]:
    """Return the ``count`` layers cached in ``path`` under ``key``; if there are none, ``measure`` and cache them."""
    entries = _read(path)
    found = entries.get(key)
    if found is not None and 0 <= now_s - found.measured_s < _KEPT_S and len(found.layers) == count:
        return tuple(_measure_of(layer) for layer in found.layers)
    layers = measure()
    entries[key] = _Entry(measured_s=now_s, layers=[_layer_of(layer) for layer in layers])
    newest = sorted(entries, key=lambda one: entries[one].measured_s, reverse=True)[:_MAX_ENTRIES]
    _write(path, _File(entries={one: entries[one] for one in sorted(newest)}))
    return layers


def _ways_to_measure(
    run: RunFile, recipe: Recipe, batch: Tensor, bench: ProfileSetup
) -> tuple[tuple[str, ...], str, Callable[[], tuple[LayerProfile, ...]]]:
    """Return the layers' names, why the model is one layer (or ""), and a function that measures them."""
    try:
        in_layers = layered_recipe(recipe, run)
        layered = in_layers.layers(run.run.seed)
        stages = run.pipeline.stages if run.pipeline else "auto"
        layered.check_stages(2 if stages == "auto" else stages)
        layered.check_boundaries(range(len(layered) + 1))
    except RecipeError as error:
        if run.pipeline is not None:
            raise
        model = _WithLoss(recipe, run.run.seed)
        return (
            ("the whole model",),
            str(error),
            lambda: profile_layers([(model,)], lambda _: model, batch, lambda loss: loss, bench),
        )
    given, targets = in_layers.input_of(batch), in_layers.targets_of(batch)
    outlines = [layered.outline(number) for number in range(len(layered))]
    return (
        layered.names,
        "",
        lambda: profile_layers(
            outlines,
            lambda number: layered.build(number, number + 1),
            given,
            lambda output: in_layers.loss_of(output, targets),
            bench,
        ),
    )


class _WithLoss(nn.Module):
    """Model that cannot be cut, with its loss, as one layer."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        super().__init__()
        self.model = recipe.build_model(seed)
        self._recipe = recipe

    def forward(self, batch: Tensor) -> Tensor:
        """Return the mean loss, (), of a batch (b, …)."""
        return self._recipe.loss(self.model, batch)


def _sent_bytes(codec: CodecFormat | None) -> Callable[[int], int]:
    return codec.packed_bytes if codec else lambda values: 4 * values


def _read(path: Path) -> dict[str, _Entry]:
    try:
        return _File.model_validate_json(path.read_bytes()).entries
    except (OSError, ValidationError) as error:
        log.debug("the cached measurements cannot be read and are taken again: %s", error)
        return {}


def _write(path: Path, content: _File) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.put(path, content.model_dump_json(indent=1).encode())
    except OSError as error:
        log.warning("the measurements could not be cached, so the next start takes them again: %s", error)


def _layer_of(layer: LayerProfile) -> _Layer:
    cost = layer.cost
    return _Layer(
        kind=layer.kind,
        parameters_bytes=cost.parameters_bytes,
        activation_bytes=cost.activation_bytes,
        kept_bytes=cost.kept_bytes,
        seconds=layer.seconds,
    )


def _measure_of(layer: _Layer) -> LayerProfile:
    cost = LayerCost(layer.parameters_bytes, layer.activation_bytes, layer.kept_bytes)
    return LayerProfile(layer.kind, cost, layer.seconds)
