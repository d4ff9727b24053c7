"""Consecutive layers as one module: the names are those of the whole model, the order is that of the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from shoal.peer.training.parameters import named_parameters
from shoal.swarm.errors import RecipeError


@dataclass(frozen=True)
class Layer:
    """One layer: its parts run one after the other, each called as it is in the whole model (``blocks.3``)."""

    name: str
    parts: tuple[tuple[str, nn.Module], ...]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """By their plain names in the whole model; one that is there twice counts once."""
        seen: set[nn.Parameter] = set()
        for prefix, part in self.parts:
            for name, parameter in named_parameters(part, prefix):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter

    def __call__(self, given: Tensor) -> Tensor:
        for _, part in self.parts:
            given = part(given)
        return given


class Around(Protocol):
    """What a layer's forward pass runs inside."""

    def __call__(self, layer: int) -> AbstractContextManager[None]: ...


class _Names(nn.Module):
    """A dot in names, such as the one in ``blocks.3``; it computes nothing."""


class StageModel(nn.Module):
    """Layers that run one after the other. ``named_parameters`` and ``state_dict`` have the whole model's names."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        """Raises ``RecipeError`` for names of parts that cannot be in one model, or not in this order."""
        super().__init__()
        for layer in layers:
            for name, part in layer.parts:
                _graft(self, name, part)
        self._layers = tuple(layers)
        expected = list(dict.fromkeys(one for layer in layers for _, one in layer.named_parameters()))
        found = list(self.parameters())
        for ours, its in zip(expected, found, strict=True):
            if ours is not its:
                where = next(layer.name for layer in layers if any(one is ours for _, one in layer.named_parameters()))
                raise RecipeError(
                    f"layer {where}: parts whose names begin alike have to follow each other, so that parameters have "
                    f"the order of the layers"
                )

    def forward(self, given: Tensor, around: Around | None = None) -> Tensor:
        """The last layer's output for the first one's input; ``around``: what each layer runs in, by its place here."""
        for number, layer in enumerate(self._layers):
            if around is None:
                given = layer(given)
                continue
            with around(number):
                given = layer(given)
        return given


def _graft(root: nn.Module, name: str, part: nn.Module) -> None:
    *path, last = name.split(".")
    at = root
    for step in path:
        if step not in at._modules:
            at.add_module(_free(at, step, name), _Names())
        at = at.get_submodule(step)
    at.add_module(_free(at, last, name), part)


def _free(at: nn.Module, step: str, name: str) -> str:
    # A module's own attributes, and parts that are there, keep their names.
    if not step or not isinstance(at, _Names | StageModel) or hasattr(at, step):
        raise RecipeError(f"a part of the model cannot be called {name!r}: the name is taken")
    return step
