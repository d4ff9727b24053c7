"""A peer's own part of a checkpoint: inner optimizer, residual, buffers of the model, random state, counters.

A peer that was stopped resumes with it as if it had not been. Random state is that of torch (CPU and CUDA), NumPy's and
Python's global generators; the position of the learning-rate schedule is the run's, in committed tokens.

Optimizers' ``state_dict`` and random generators' states are trees of dicts, lists, tuples, scalars and tensors. They
are stored as JSON and named tensors, never pickled, whatever optimizer it is."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.compression.scratch import empty_aligned
from shoal.peer.checkpoints.source import refusal
from shoal.peer.checkpoints.tensors import can_be_saved, parse_file
from shoal.peer.training.parameters import plain_name
from shoal.swarm.averaging.outcome import CarriedResidual

log = logging.getLogger(__name__)

_MAX_DEPTH = 64
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


_CONTENT = "content"
"""Name of the tensor that holds the JSON, (bytes,) uint8."""


class NotPlain(ValueError):
    """Raised for a tree that has no plain form; the message says where."""


def to_plain(tree: Any, keep: Callable[[str, Tensor], None], where: str = "") -> Any:
    """Encode ``tree`` as JSON values; ``keep`` is called with a name (its path) and each tensor, in order.

    Raises ``NotPlain`` for anything but None, booleans, numbers, texts, tensors, arrays, and dicts, lists and tuples of
    them."""
    if where.count("/") > _MAX_DEPTH:
        raise NotPlain(f"{where[:100]}: more than {_MAX_DEPTH} levels")
    match tree:
        case None | bool() | str():
            return tree
        case np.integer():
            return int(tree)
        case int():
            return int(tree)
        case float():
            return float(tree) if math.isfinite(tree) else {"float": str(float(tree))}
        case Tensor() if can_be_saved(tree):
            keep(where, tree)
            return {"tensor": where}
        case np.ndarray() if tree.dtype.kind in "iu" and tree.dtype.itemsize <= 4:
            keep(where, torch.from_numpy(tree.astype(np.int64)))
            return {"array": where, "dtype": str(tree.dtype)}
        case list():
            return [to_plain(one, keep, f"{where}/{at}") for at, one in enumerate(tree)]
        case tuple():
            return {"tuple": [to_plain(one, keep, f"{where}/{at}") for at, one in enumerate(tree)]}
        case Mapping():
            pairs = [[_key(key, where), to_plain(one, keep, f"{where}/{key}")] for key, one in tree.items()]
            return {"dict": pairs}
    raise NotPlain(f"{where or 'it'}: {type(tree).__name__} has no plain form")


def from_plain(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode the output of ``to_plain``. Raises ``ValueError`` or ``KeyError`` for anything else."""
    match plain:
        case None | bool() | int() | float() | str():
            return plain
        case list():
            return [from_plain(one, tensors) for one in plain]
        case {"tuple": list(items), **rest} if not rest:
            return tuple(from_plain(one, tensors) for one in items)
        case {"dict": list(pairs), **rest} if not rest:
            return {_key(key, "a dict"): from_plain(one, tensors) for key, one in pairs}
        case {"tensor": str(name), **rest} if not rest:
            return tensors[name]
        case {"array": str(name), "dtype": str(dtype), **rest} if not rest:
            kind = np.dtype(dtype)
            if kind.kind not in "iu":
                raise ValueError(f"array of {dtype}")
            return tensors[name].numpy().astype(kind)
        case {"float": str(text), **rest} if not rest and text in _NON_FINITE:
            return _NON_FINITE[text]
    raise ValueError(f"unknown form: {str(plain)[:100]}")


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise NotPlain(f"{where}: a key of type {type(key).__name__}")
    return key


@dataclass(frozen=True)
class LocalStateSnapshot:
    """A snapshot that is to be written: ``plain`` is JSON with the tensors taken out.

    Copies from another device may still be under way: call ``wait`` before reading them."""

    plain: Any
    tensors: dict[str, Tensor]
    copied: tuple[torch.cuda.Event, ...] = ()

    def wait(self) -> None:
        for event in self.copied:
            event.synchronize()

    def file(self) -> dict[str, Tensor]:
        """The tensors of the snapshot's file."""
        text = json.dumps(self.plain, separators=(",", ":"), allow_nan=False).encode()
        return {**self.tensors, _CONTENT: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def parse_local_state(data: bytes, place: str) -> dict[str, Any]:
    """Decode the tree from a file's checked bytes. Raises ``StateFileError``."""
    tensors = parse_file(data, place)
    try:
        tree = from_plain(json.loads(bytes(tensors[_CONTENT].numpy())), tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise refusal(place, "its content", "a peer's own state", str(error)[:200]) from error
    if not isinstance(tree, dict):
        raise refusal(place, "its content", "a dict", type(tree).__name__)
    return tree


class SnapshotBuffers:
    """Memory for snapshots, used again for the next one: the first touch of fresh pages costs more than the copy.

    ``copy`` overwrites the snapshot before; it is called on the training thread."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def prepare(self, tree: Mapping[str, Any]) -> None:
        """Allocate and touch the memory for a snapshot of ``tree``, before the first ``copy``; in any thread."""
        room: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            room[name] = _room_for(tensor).zero_()

        for name, branch in tree.items():
            with suppress(NotPlain):  # ``copy`` logs it
                to_plain(branch, keep, name)
        self._kept = room

    def copy(self, tree: Mapping[str, Any]) -> LocalStateSnapshot:
        """Copy everything in ``tree``; top-level branches that cannot be saved are left out, with a warning."""
        kept, self._kept = self._kept, {}
        devices: set[torch.device] = set()

        def keep(name: str, tensor: Tensor) -> None:
            if name in self._kept:
                raise NotPlain(f"{name}: two tensors have this name")
            copy = kept.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = _room_for(tensor)
            copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            self._kept[name] = copy
            if tensor.is_cuda:
                devices.add(tensor.device)

        branches = []
        for name, branch in tree.items():
            before = dict(self._kept)
            try:
                branches.append([name, to_plain(branch, keep, name)])
            except NotPlain as error:
                self._kept = before
                log.warning("a part of this peer's own state is left out of checkpoints: %s", error)
        copied = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
        return LocalStateSnapshot({"dict": branches}, dict(self._kept), copied)


def _room_for(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    if tensor.dtype == torch.float32:
        return empty_aligned(tensor.numel()).view(tensor.shape)
    return torch.empty(tensor.shape, dtype=tensor.dtype)


# What is in it ------------------------------------------------------------------------------------------------


def local_state_tree(optimizer: Optimizer | None, model: nn.Module, carried: CarriedResidual) -> dict[str, Any]:
    """The tree of a peer's own state, its tensors by reference."""
    return {
        "optimizer": optimizer.state_dict() if optimizer is not None else None,
        "buffers": _buffers(model),
        "residual": carried.residual,
        "residual_weight_tokens": carried.weight_tokens,
        "random": _random_state(),
    }


def restore_local_state(tree: Mapping[str, Any], optimizer: Optimizer | None, model: nn.Module) -> None:
    """Restore optimizer, buffers and random state; what does not fit is left as it is, with a warning."""
    attempts = {"optimizer": lambda part: _restore_optimizer(optimizer, part), "random": _restore_random_state}
    attempts["buffers"] = lambda part: _restore_buffers(model, part)
    for name, attempt in attempts.items():
        if tree.get(name) is None:
            continue
        try:
            attempt(tree[name])
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            # The file is undamaged and our own, so another version of the training loop or of torch wrote it.
            log.warning("going on without the %s of the checkpoint, which does not fit: %s", name, error)


def carried_residual(tree: Mapping[str, Any], elements: int) -> CarriedResidual | None:
    """The residual in the tree; None where there is none of that size."""
    residual, weight = tree.get("residual"), tree.get("residual_weight_tokens")
    if not isinstance(residual, Tensor) or not isinstance(weight, int) or weight < 0:
        return None
    if residual.shape != (elements,) or residual.dtype != torch.float32:
        return None
    return CarriedResidual(residual, weight)


def _restore_optimizer(optimizer: Optimizer | None, part: dict[str, Any]) -> None:
    if optimizer is not None:
        optimizer.load_state_dict(part)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's persistent buffers, such as running statistics; they are not averaged."""
    trained = dict(model.named_parameters())
    kept = {name: one for name, one in model.state_dict().items() if name not in trained and isinstance(one, Tensor)}
    return {plain_name(name): one for name, one in kept.items()}


def _restore_buffers(model: nn.Module, part: dict[str, Tensor]) -> None:
    present = _buffers(model)
    if {name: one.shape for name, one in present.items()} != {name: one.shape for name, one in part.items()}:
        raise ValueError("the model has other buffers now")
    for name, tensor in part.items():
        present[name].copy_(tensor)


def _random_state() -> dict[str, Any]:
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }


def _restore_random_state(part: dict[str, Any]) -> None:
    torch.set_rng_state(part["torch"])
    if len(part["cuda"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.set_rng_state_all(part["cuda"])
    np.random.set_state(part["numpy"])
    random.setstate(part["python"])
