"""Account of the memory that a run's model takes on this machine, and the refusal of one that does not fit, before it
is built."""

from __future__ import annotations

import torch

from shoal.peer.recipes import Recipe
from shoal.peer.training.device import available_bytes, has_all_state, memory_bytes, usable_bytes
from shoal.peer.training.inner_loop import optimizer_states
from shoal.peer.training.model_outline import WHAT_HELPS, ModelOutline, outline_of
from shoal.peer.training.outer_optimizer import outer_of
from shoal.swarm.coordinator.placement import optimizer_values
from shoal.swarm.errors import DeviceError
from shoal.swarm.pipeline.planner.model import AVERAGER_COPIES, state_copies
from shoal.swarm.protocol.run_file import RunFile

_CPU = torch.device("cpu")
_MACHINE = "{} of the memory of this machine can be used"


def held_copies(run: RunFile, device: torch.device) -> float:
    """Count the float32 values that a parameter takes of the memory of ``device``: itself, its gradient and the inner
    optimizer's; on the CPU the anchor, the outer optimizer's and the averaging's, too. In a pipeline as the plan has
    it."""
    if run.pipeline is not None:
        return state_copies(optimizer_values(run.outer), has_all_state(device))
    copies = 2.0 + optimizer_states(run.inner, run.algorithm)
    return copies + _averaging_copies(run) if has_all_state(device) else copies


def _averaging_copies(run: RunFile) -> float:
    """In the machine's memory, wherever the model is."""
    return 1 + outer_of(run.outer).slots + AVERAGER_COPIES


def check_model_fits(run: RunFile, recipe: Recipe, device: torch.device, limit_bytes: int | None) -> None:
    """A whole model, for a member that trains it. ``limit_bytes``: ``--max-memory``, for the memory of ``device``;
    without it the model has to fit into what is free now.

    Raises ``DeviceError``, and what the recipe raises; takes no memory for the model."""
    allowed = _allowed_bytes(device, limit_bytes)
    outline = outline_of(run, recipe, allowed)
    free = _MACHINE if has_all_state(device) else f"{{}} of the memory of {device} can be used"
    limit = free if limit_bytes is None else "--max-memory allows {}"
    _check(outline, held_copies(run, device), allowed, limit)
    if not has_all_state(device):
        _check(outline, _averaging_copies(run), usable_bytes(_CPU, None), _MACHINE)


def check_start_fits(run: RunFile, recipe: Recipe) -> None:
    """A whole model, for who only builds it, to look at it. Raises ``DeviceError``, and what the recipe raises."""
    allowed = _allowed_bytes(_CPU, None)
    _check(outline_of(run, recipe, allowed), 1.0, allowed, _MACHINE)


def check_layers_fit(run: RunFile, recipe: Recipe, allowed_bytes: int) -> None:
    """For who measures the layers one at a time, with their gradients, or the whole model where it cannot be cut.

    Raises ``DeviceError``, and what the recipe raises."""
    outline = outline_of(run, recipe, allowed_bytes)
    largest = max(outline.layers, default=outline.trained)
    if 8 * largest > allowed_bytes:
        raise DeviceError(
            f"the largest layer of the run's model has {largest:,} parameters and takes {_size(8 * largest)} with its "
            f"gradients, and {_size(allowed_bytes)} of the memory can be used here: allow more with --max-memory, end "
            "other programs, or join a run with smaller layers"
        )


def _allowed_bytes(device: torch.device, limit_bytes: int | None) -> int:
    """A limit that somebody has given is believed, as far as there is so much memory at all: other programs may end."""
    if limit_bytes is None:
        return usable_bytes(device, None)
    return min(limit_bytes, max(memory_bytes(device), available_bytes(device)))


def _check(outline: ModelOutline, copies: float, allowed_bytes: int, limit: str) -> None:
    needed = int(4 * copies * outline.trained) + outline.other_bytes
    if needed > allowed_bytes:
        raise DeviceError(
            f"the run's model has {outline.trained:,} parameters and takes {_size(needed)} here ({copies:.1f} float32 "
            f"values for each parameter), and {limit.format(_size(allowed_bytes))}: {WHAT_HELPS}"
        )


def _size(size_bytes: int) -> str:
    """12.3 GiB, 0.5 MiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes / 2**20:.1f} MiB"
