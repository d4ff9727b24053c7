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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoal.peer.checkpoints.manifest import OWN_FILE, RESIDUAL_FILE
from shoal.peer.checkpoints.source import CheckpointSource, FileContent, refusal
from shoal.peer.checkpoints.tensor_file import TensorEntry, read_entries, read_tensor
from shoal.peer.checkpoints.tensors import can_be_saved, file_pieces
from shoal.peer.training.deferred_copy import DeferredCopy
from shoal.peer.training.device_streams import streams_of
from shoal.peer.training.parameters import plain_name
from shoal.swarm.averaging.outcome import CarriedResidual
from shoal.swarm.errors import StateFileError

log = logging.getLogger(__name__)

_MAX_DEPTH = 64
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


_OPTIMIZER = "optimizer"
_CONTENT = "content"
"""Name of the tensor that holds the JSON, (bytes,) uint8."""

_MAX_CONTENT_BYTES = 2**28
_RESIDUAL = "residual"
_WEIGHT = "weight_tokens"


class OptimizerState(Protocol):
    """The part of ``torch.optim.Optimizer`` that checkpoints use."""

    @property
    def state(self) -> Mapping[Tensor, Any]: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


MakeRoom = Callable[[TensorEntry], Tensor | None]
"""Memory for a tensor of a file, of its type and shape; None for memory of its own."""


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
class LocalStateContent:
    """The content of the file of a peer's own state: ``plain`` is JSON with the tensors taken out, by reference.

    ``copying``: the copy that the tensors are of, which ``pieces`` completes."""

    plain: Any
    tensors: Mapping[str, Tensor]
    copying: DeferredCopy | None = None

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> LocalStateContent:
        """Take a tree apart; top-level branches that cannot be saved are left out, with a warning."""
        tensors: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            if name in tensors:
                raise NotPlain(f"{name}: two tensors have this name")
            tensors[name] = tensor

        branches = []
        for name, branch in tree.items():
            before = dict(tensors)
            try:
                branches.append([name, to_plain(branch, keep, name)])
            except NotPlain as error:
                tensors = before
                log.warning("a part of this peer's own state is left out of checkpoints: %s", error)
        return cls({"dict": branches}, tensors)

    def copy(self) -> LocalStateContent:
        """Return the same with copies of the tensors in the machine's memory, for a loop that trains on meanwhile.

        Before the optimizer's next step ``copying`` has to be completed; all else is copied where it is at once."""
        held = {
            name: one if name.startswith(f"{_OPTIMIZER}/") else one.detach().clone()
            for name, one in self.tensors.items()
        }
        copying = DeferredCopy(held)
        return LocalStateContent(self.plain, copying.copies, copying)

    def wait_for_device(self) -> None:
        """Wait until the computations are done that the training thread has begun on the tensors."""
        for device in {tensor.device for tensor in self.tensors.values()}:
            streams_of(device).mark().wait()

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the content of the file, in pieces."""
        if self.copying is not None:
            self.copying.complete()
        text = json.dumps(self.plain, separators=(",", ":"), allow_nan=False).encode()
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        yield from file_pieces({**self.tensors, _CONTENT: content})


def residual_pieces(carried: CarriedResidual) -> Iterator[bytes | memoryview]:
    """Yield the content of the residual's file, in pieces."""
    return file_pieces({_RESIDUAL: carried.residual, _WEIGHT: torch.tensor(carried.weight_tokens)})


# What is in it ------------------------------------------------------------------------------------------------


def local_state_tree(optimizer: OptimizerState | None, model: nn.Module) -> dict[str, Any]:
    """The tree of a peer's own state without the residual, its tensors by reference."""
    return {
        _OPTIMIZER: optimizer.state_dict() if optimizer is not None else None,
        "buffers": model_buffers(model),
        "random": _random_state(),
    }


@dataclass(frozen=True)
class SavedLocalState:
    """A peer's own state in the files of a checkpoint, which have been read through and found undamaged.

    Its tensors are read now, in a second pass, one after the other and into the memory where they belong, so that
    nothing of the files' size is held and nothing is overwritten by a damaged file."""

    source: CheckpointSource

    def restore(self, optimizer: OptimizerState | None, model: nn.Module) -> dict[str, Any]:
        """Restore optimizer, buffers and random state; return all else, such as counters.

        What does not fit is left as it is, with a warning. Raises ``StateFileError`` for a file that is no peer's own
        state, or that cannot be read any more."""
        rest = {}
        with self.source.open(OWN_FILE) as content:
            tensors = _SavedTensors(content, self.source.place(OWN_FILE))
            for name, branch in tensors.branches():
                try:
                    match name:
                        case _ if name == _OPTIMIZER:
                            _restore_optimizer(optimizer, branch, tensors)
                        case "buffers":
                            _restore_buffers(model, from_plain(branch, tensors))
                        case "random":
                            _restore_random_state(from_plain(branch, tensors))
                        case _:
                            rest[name] = from_plain(branch, tensors)
                except StateFileError:
                    raise
                except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
                    # The file is undamaged and our own, so another version of the training loop or of torch wrote it.
                    log.warning("going on without the %s of the checkpoint, which does not fit: %s", name, error)
        return rest

    def buffers(self) -> dict[str, Tensor]:
        """Read the model's buffers alone. Raises ``StateFileError``."""
        with self.source.open(OWN_FILE) as content:
            place = self.source.place(OWN_FILE)
            tensors = _SavedTensors(content, place)
            branch = dict(tensors.branches()).get("buffers", {"dict": []})
            try:
                found = dict(from_plain(branch, tensors))
            except (ValueError, KeyError, TypeError) as error:
                raise refusal(place, "its buffers", "tensors by name", str(error)[:200]) from error
        return {str(name): one for name, one in found.items() if isinstance(one, Tensor)}

    def restore_residual(self, into: Tensor) -> int | None:
        """Read the residual into memory of its type and size; return the weight in tokens that it counts with.

        None where the residual has another type or size; ``into`` is as it was then. Raises ``StateFileError``."""
        with self.source.open(RESIDUAL_FILE) as content:
            place = self.source.place(RESIDUAL_FILE)
            entries = {one.name: one for one in read_entries(content, place)}
            weight = torch.zeros((), dtype=torch.int64)
            if not {_RESIDUAL, _WEIGHT} <= entries.keys() or not _fits(entries[_WEIGHT], weight):
                raise refusal(place, "its tensors", f"{_RESIDUAL} and {_WEIGHT}", "others")
            read_tensor(content, entries[_WEIGHT], weight)
            if not _fits(entries[_RESIDUAL], into) or int(weight) < 0:
                return None
            read_tensor(content, entries[_RESIDUAL], into)
        return int(weight)


class _SavedTensors(Mapping[str, Tensor]):
    """Tensors of the file of a peer's own state by name; each is read when it is asked for, into ``room`` for it."""

    def __init__(self, content: FileContent, place: str) -> None:
        """Raises ``StateFileError``."""
        self.room: MakeRoom = lambda entry: None
        self._content = content
        self._place = place
        self._entries = {one.name: one for one in read_entries(content, place)}

    def branches(self) -> list[tuple[str, Any]]:
        """Names and JSON values of the tree's branches, read from the file. Raises ``StateFileError``."""
        entry = self._entries.get(_CONTENT)
        if entry is None or entry.dtype != torch.uint8 or entry.elements > _MAX_CONTENT_BYTES:
            raise refusal(self._place, "its content", "a peer's own state", "none")
        try:
            plain = json.loads(bytes(self[_CONTENT].numpy()))
            match plain:
                case {"dict": list(pairs), **rest} if not rest:
                    return [(str(_key(key, "a dict")), branch) for key, branch in pairs]
        except (ValueError, TypeError, RecursionError) as error:
            raise refusal(self._place, "its content", "a peer's own state", str(error)[:200]) from error
        raise refusal(self._place, "its content", "a dict", type(plain).__name__)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        out = self.room(entry)
        if out is None:
            out = torch.empty(entry.shape, dtype=entry.dtype)
        read_tensor(self._content, entry, out)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _fits(entry: TensorEntry, memory: Tensor) -> bool:
    return (entry.dtype, entry.shape) == (memory.dtype, tuple(memory.shape))


def _restore_optimizer(optimizer: OptimizerState | None, branch: Any, tensors: _SavedTensors) -> None:
    """Restore an optimizer, each tensor into the one that it has, or into a new one on the parameter's device."""
    match branch:
        case {"dict": list(pairs), **rest} if not rest:
            parts = {_key(key, "a dict"): part for key, part in pairs}
        case _:
            parts = {}
    if optimizer is None or not parts:
        return
    groups = from_plain(parts["param_groups"], tensors)
    if [len(one["params"]) for one in groups] != [len(one["params"]) for one in optimizer.param_groups]:
        raise ValueError("it has other groups of parameters now")
    numbers = [str(number) for group in groups for number in group["params"]]
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    by_number: dict[str, Tensor] = dict(zip(numbers, parameters, strict=True))

    def room(entry: TensorEntry) -> Tensor | None:
        _, _, number, *rest = entry.name.split("/", 3)
        parameter = by_number.get(number)
        if parameter is None:
            return None
        held = optimizer.state.get(parameter, {}).get(rest[0]) if rest else None
        if isinstance(held, Tensor) and _fits(entry, held):
            return held
        return torch.empty_like(parameter, requires_grad=False) if _fits(entry, parameter) else None

    tensors.room = room
    try:
        state = from_plain(parts["state"], tensors)
    except StateFileError:
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        raise
    finally:
        tensors.room = lambda entry: None
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for group, own in zip(optimizer.param_groups, before, strict=True):
        for name in {"lr", "initial_lr"} & own.keys():  # the loop's, or the run's schedule's
            group[name] = own[name]


def model_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's persistent buffers by plain names, such as running statistics; they are not averaged."""
    trained = dict(model.named_parameters())
    tied = {id(one) for one in trained.values()}  # a tied parameter has further names
    kept = {
        name: one
        for name, one in model.state_dict(keep_vars=True).items()
        if name not in trained and isinstance(one, Tensor) and id(one) not in tied
    }
    return {plain_name(name): one.detach() for name, one in kept.items()}


def _restore_buffers(model: nn.Module, part: dict[str, Tensor]) -> None:
    present = model_buffers(model)
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
