"""Memory that a run's model needs on this machine, determined before the model is built.

The recipe's code runs with every tensor on the meta device, which has shapes and no values. Where that code needs
values, it fails there; then a child process builds the model within a memory limit, reports its size and ends."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shoal.peer.machine_memory import memory_text
from shoal.peer.recipes import Recipe, load_recipe
from shoal.peer.training.device import (
    MemoryLimits,
    available_bytes,
    demanded_memory,
    has_own_memory,
    memory_bytes,
    usable_bytes,
)
from shoal.peer.training.layers import Layered, LayeredRecipe
from shoal.swarm.errors import DeviceError, RecipeError, ShoalError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.system import resource

log = logging.getLogger(__name__)

_CHILD_S = 600.0
_OUT_OF_MEMORY = 3
"""The child's exit code for a model that does not fit."""

_NEEDS_VALUES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError),
    *(TypeError, ValueError),
)
"""Errors that a recipe's code may raise because its tensors have no values."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ModelOutline:
    """Size of a model.

    ``trained``: elements of the parameters that a run averages, ``trained_bytes``: their size in the model;
    ``other_bytes``: of all other parameters and buffers; ``layers``: trained elements of each layer, of a recipe that
    gives layers."""

    trained: int
    trained_bytes: int
    other_bytes: int
    layers: tuple[int, ...] = ()

    @property
    def value_bytes(self) -> float:
        """Size of a trained parameter in the model, on average."""
        return self.trained_bytes / max(1, self.trained)


def outline_of(run: RunFile, recipe: Recipe, limit_bytes: int) -> ModelOutline:
    """Size of the run's model. Blocks for a few seconds, or longer where a child process has to build the model.

    Raises ``DeviceError`` for a model that cannot be built within ``limit_bytes``, and what the recipe raises."""
    try:
        with _Weightless():  # type: ignore[no-untyped-call]
            return _outline(recipe, run.run.seed)
    except ShoalError:
        raise
    except _NEEDS_VALUES as error:
        log.info("another process builds the model to find its size, as its recipe needs values: %s", error)
    return _outline_by_child(run, limit_bytes)


class _Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which every operation happens on the meta device, whatever device or generator it names."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        names = {one.name for one in func._schema.arguments}
        if "device" in names:
            given["device"] = torch.device("meta")
        if given.get("pin_memory"):
            given["pin_memory"] = False
        if "generator" in given:
            given["generator"] = None
        args, given = tree_map_only(Tensor, _without_values, (tuple(args), given))
        return func(*args, **given)


def _without_values(tensor: Tensor) -> Tensor:
    """Meta tensor in place of a tensor that was made outside the mode, from Python's numbers or numpy's."""
    if tensor.device.type == "meta":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _outline(recipe: Recipe, seed: int) -> ModelOutline:
    layered = _layers_of(recipe, seed)
    if layered is not None:  # does not draw initial values
        layers = tuple(layered.parameters_bytes(number) // 4 for number in range(len(layered)))
        parts = [part for number in range(len(layered)) for part in layered.outline(number)]
        return ModelOutline(sum(layers), 4 * sum(layers), _other_bytes(parts), layers)
    model = recipe.build_model(seed)
    trained = {one for one in model.parameters() if one.requires_grad}
    trained_bytes = sum(one.nbytes for one in trained)
    return ModelOutline(sum(one.numel() for one in trained), trained_bytes, _other_bytes([model]))


def _layers_of(recipe: Recipe, seed: int) -> Layered | None:
    """Layers of the model; None if it is not cut."""
    try:
        return recipe.layers(seed) if isinstance(recipe, LayeredRecipe) else None
    except RecipeError:  # of a recipe some of whose models are not cut
        return None


def _other_bytes(parts: Iterable[nn.Module]) -> int:
    others = {
        one
        for part in parts
        for one in (*part.parameters(), *part.buffers())
        if not (isinstance(one, nn.Parameter) and one.requires_grad)
    }
    return sum(one.numel() * one.element_size() for one in others)


def _outline_by_child(run: RunFile, limit_bytes: int) -> ModelOutline:
    ask = json.dumps({"run": run.model_dump(mode="json"), "limit_bytes": limit_bytes})
    command = [sys.executable, "-m", "shoal.peer.recipes.model_memory"]
    try:
        done = subprocess.run(command, input=ask, capture_output=True, text=True, timeout=_CHILD_S)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"building the model to find its size took longer than {_CHILD_S:.0f} s") from error
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1])
        return ModelOutline(**found | {"layers": tuple(found["layers"])})
    if done.returncode == _OUT_OF_MEMORY:
        raise DeviceError(
            f"the run's model cannot be built within {limit_bytes / 2**30:.1f} GiB of memory: allow more, take a "
            f"machine with more memory, or give the run a [pipeline], whose members hold a part of the model each"
        )
    last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
    raise DeviceError(f"the run's model cannot be built here: {last[:500]}")


def _answer() -> int:
    """The child process: build the model that standard input describes, and print its size."""
    ask = json.loads(sys.stdin.read())
    run = RunFile.model_validate_json(json.dumps(ask["run"]))
    recipe = load_recipe(run)
    _limit_memory(ask["limit_bytes"])
    try:
        found = _outline(recipe, run.run.seed)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "can't allocate memory" not in str(error):
            raise
        return _OUT_OF_MEMORY
    print(json.dumps(asdict(found)))
    return 0


def _limit_memory(limit_bytes: int) -> None:
    """Limit this process to ``limit_bytes`` more than it has now, on Linux; other systems do not enforce the limit."""
    if psutil.LINUX and resource is not None:
        allowed = psutil.Process().memory_info().data + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def check_model_fits(run: RunFile, recipe: Recipe, device: torch.device, limits: MemoryLimits, ranks: int = 1) -> None:
    """Check that a member can train the whole model; takes no memory for it. ``ranks``: of an island, each with such a
    device, among which the model is divided.

    Without a limit the model has to fit into what is free now. Raises ``DeviceError``, and what the recipe raises."""
    limits.check(device)
    host = _Room.of(_CPU, limits.host_bytes)
    outline = outline_of(run, recipe, host.bytes)
    demand = account_of(run, value_bytes=outline.value_bytes, ranks=ranks).demand()
    needed = demanded_memory(device, demand, outline.trained, outline.other_bytes)
    if needed.device is None:
        _check(outline, demand.shared, needed.host, host)
        return
    _check(outline, demand.device, needed.device, _Room.of(device, limits.device_bytes))
    _check(outline, demand.host, needed.host, host)


def check_start_fits(run: RunFile, recipe: Recipe) -> None:
    """Check that the whole model can be built here. Raises ``DeviceError``, and what the recipe raises."""
    room = _Room.of(_CPU, None)
    outline = outline_of(run, recipe, room.bytes)
    _check(outline, 1.0, 4 * outline.trained + outline.other_bytes, room)


def check_layers_fit(run: RunFile, recipe: Recipe, allowed_bytes: int) -> None:
    """Check that the layers can be measured one at a time, with gradients, or a whole model that cannot be cut.

    Raises ``DeviceError``, and what the recipe raises."""
    outline = outline_of(run, recipe, allowed_bytes)
    largest = max(outline.layers, default=outline.trained)
    if 8 * largest > allowed_bytes:
        needed, usable = memory_text(8 * largest), memory_text(allowed_bytes)
        raise DeviceError(
            f"the largest layer of the run's model has {largest:,} parameters and takes {needed} with its gradients, "
            f"and {usable} of the memory can be used here: allow more with --max-memory, end other programs, or join a "
            "run with smaller layers"
        )


@dataclass(frozen=True)
class _Room:
    """Memory that may be used, and how to say so. ``option``: the one that limits it; empty if none was given."""

    bytes: int
    name: str
    option: str

    @classmethod
    def of(cls, device: torch.device, limit_bytes: int | None) -> _Room:
        """A limit that the user gave may exceed what is free now, as other programs may end."""
        name = f"of {device}" if has_own_memory(device) else "of this machine"
        if limit_bytes is None:
            return cls(usable_bytes(device, None), name, "")
        option = "--max-device-memory" if has_own_memory(device) else "--max-memory"
        return cls(min(limit_bytes, max(memory_bytes(device), available_bytes(device))), name, option)


def _check(outline: ModelOutline, copies: float, needed_bytes: int, room: _Room) -> None:
    if needed_bytes <= room.bytes:
        return
    takes, allows = memory_text(needed_bytes), memory_text(room.bytes)
    limit = f"{room.option} allows {allows}" if room.option else f"{allows} of it can be used"
    more = f"allow more with {room.option}" if room.option else "end other programs"
    stages = math.ceil(needed_bytes / max(1, room.bytes))
    raise DeviceError(
        f"the run's model has {outline.trained:,} parameters and takes {takes} of the memory {room.name} ({copies:.1f} "
        f"float32 values for each parameter), and {limit}: {more}, take a machine with more memory, or give the run a "
        f"[pipeline], whose members hold a part of the model each: {stages:,} stages or more would fit"
    )


if __name__ == "__main__":
    sys.exit(_answer())
