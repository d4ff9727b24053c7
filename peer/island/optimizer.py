"""An inner optimizer whose state is spread over the ranks of an island, whole for checkpoints.

Checkpoints have whole tensors on the CPU, so an island of any size restores what one of another size has written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.peer.checkpoints.local_state import from_plain, to_plain
from shoal.peer.island.group import Command, Island
from shoal.peer.island.vector import IslandVector


class IslandOptimizer:
    """The optimizer as rank 0's checkpoints see it: ``state_dict`` and ``load_state_dict`` have whole tensors.

    ``param_groups`` has no parameters' values, and ``state`` nothing, as nothing can be read into them."""

    def __init__(self, optimizer: Optimizer, vector: IslandVector, island: Island, number: int = 0) -> None:
        """``number``: of the model, of those that the island has."""
        self._optimizer = optimizer
        self._number = number
        self._vector = vector
        self._island = island
        self.state: dict[Tensor, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        nothing = torch.empty(0)
        return [{**one, "params": [nothing] * len(one["params"])} for one in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        with self._island.carrying_out(Command.GATHER_OPTIMIZER, self._number):
            return gather(self._optimizer, self._vector)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        with self._island.carrying_out(Command.SCATTER_OPTIMIZER, self._number):
            scatter(self._optimizer, self._vector, self._island, saved)


def gather(optimizer: Optimizer, vector: IslandVector) -> dict[str, Any]:
    """Return the optimizer's state with whole tensors on rank 0. All ranks call this together."""
    found = optimizer.state_dict()
    numbers = _numbers(optimizer, vector)

    def whole(value: Any, number: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        is_spread = value.dim() > 0 and value.shape == vector.weights[number].shape
        return vector.collect_one(value, number) if is_spread else value.cpu().clone()

    states = {
        at: {name: whole(value, numbers[at]) for name, value in state.items()} for at, state in found["state"].items()
    }
    return {**found, "state": states}


def scatter(optimizer: Optimizer, vector: IslandVector, island: Island, saved: Mapping[str, Any] | None = None) -> None:
    """Restore a state with whole tensors, which rank 0 gives. All ranks call this together.

    Settings of the groups stay those that the loop has given."""
    tensors: dict[str, Tensor] = {}
    if saved is not None:
        plain = to_plain(saved["state"], tensors.__setitem__)
        about: list[Any] = [
            [name, list(one.shape), str(one.dtype).removeprefix("torch.")] for name, one in tensors.items()
        ]
        island.send_bytes(json.dumps([plain, about]).encode())
    else:
        plain, about = json.loads(island.receive_bytes())
    numbers = _numbers(optimizer, vector)
    held: dict[str, Tensor] = {}
    for name, shape, dtype in about:
        parameter = vector.weights[numbers[int(name.split("/")[1])]]
        whole = tensors.get(name)
        if list(parameter.shape) == shape and shape:
            held[name] = torch.zeros_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
            vector.spread_one(whole, held[name], vector.number_of(parameter))
        else:
            held[name] = torch.zeros(shape, dtype=getattr(torch, dtype)) if whole is None else whole.clone()
            island.broadcast(held[name])
    optimizer.load_state_dict(
        {"state": from_plain(plain, held), "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _numbers(optimizer: Optimizer, vector: IslandVector) -> list[int]:
    """Return the numbers in the vector of the optimizer's parameters, in its order."""
    return [vector.number_of(one) for group in optimizer.param_groups for one in group["params"]]
