"""Tensor parallelism of a recipe: which of its layers are cut among the ranks of an island, and how.

A recipe says it by names, so this imports nothing of torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class CutOutputs:
    """A linear layer whose outputs are cut, each rank having the whole input. ``parts``: outputs in one, each of which
    is cut, such as 3 for queries, keys and values. ``of``: what is cut, for messages; a rank has whole ones."""

    parts: int = 1
    of: str = "outputs"
    units: int | None = None


@dataclass(frozen=True)
class CutInputs:
    """A linear layer whose inputs are cut as the outputs of the layer before are; the ranks' outputs add up."""


Cut = CutOutputs | CutInputs


@runtime_checkable
class TensorParallelRecipe(Protocol):
    """Recipe whose model can be cut for tensor parallelism."""

    def tensor_parallel(self) -> Mapping[str, Cut]:
        """Return the layers that are cut, by names of modules in which ``*`` stands for any one step."""
        ...
