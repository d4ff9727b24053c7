"""Model as an ordered list of layers, of which a peer builds only those that it holds.

A layer takes one tensor and returns one; run one after the other, the layers are the model. Parameters keep the names
that they have in the whole model, so the whole model's parameter vector is the concatenation of its stages' vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.peer.training.parameters import ParameterVector, layout_of, named_parameters
from shoal.peer.training.rng import derived_seed, seeded
from shoal.swarm.errors import ModelMismatch, RecipeError
from shoal.swarm.protocol.types import TensorSpec


@dataclass(frozen=True)
class Layer:
    """Layer of a model: parts that run one after the other, each with its name in the whole model (``blocks.3``)."""

    name: str
    parts: tuple[tuple[str, nn.Module], ...]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters by their plain names in the whole model, each parameter once."""
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


class LayerContext(Protocol):
    """Maker of the context that a layer's forward pass runs in; ``layer``: its place in the stage."""

    def __call__(self, layer: int) -> AbstractContextManager[None]: ...


class _Names(nn.Module):
    """Empty module that stands for a dot in names such as ``blocks.3``."""


class StageModel(nn.Module):
    """Consecutive layers as a module whose parameters and buffers have the whole model's names."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        """Raises ``RecipeError`` if the parts' names cannot be in one model, or give its parameters another order."""
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
                    f"layer {where}: its parameters come in another order than the layers; parts whose names begin "
                    f"alike have to follow each other"
                )

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self._layers

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """Modules that run one after the other, each once."""
        return tuple(dict.fromkeys(part for layer in self._layers for _, part in layer.parts))

    def forward(self, given: Tensor, around: LayerContext | None = None) -> Tensor:
        """Return the last layer's output for the first one's input. ``around``: makes each layer's context."""
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
    # A module's own attributes and earlier parts keep their names.
    if not step or not isinstance(at, _Names | StageModel) or hasattr(at, step):
        raise RecipeError(f"a part of the model cannot be called {name!r}: the name is taken")
    return step


Maker: TypeAlias = Callable[[], nn.Module]
"""Makes a layer on torch's default device, with values from torch's global generators."""


@dataclass(frozen=True)
class _Tie:
    parameter: str
    first: int
    second: int


class Layered:
    """Layers of a model for a pipeline: their names and shapes, and a builder of any consecutive ones.

    ``outline``: all layers, of which only names and shapes are read; on the meta device if they would not fit.
    ``build(first, stop)``: builds layers first to stop - 1, float32 on the CPU, with the values that they have in the
    whole model. ``untie``: advice for errors about weights that layers share.

    Layers that share weights, and the layers between them, are one layer here, because stages are averaged separately.
    """

    def __init__(
        self,
        outline: Sequence[Layer],
        build: Callable[[int, int], Sequence[Layer]],
        untie: str = "give each of them its own",
    ) -> None:
        StageModel(outline)  # raises for names in another order than the layers'
        ties = tuple(_ties(outline))
        self._untied = len(outline)
        self._why_tied = "".join(
            f"; layers {outline[tie.first].name} and {outline[tie.second].name} share the parameter {tie.parameter}, "
            f"and stages are averaged separately: {untie}"
            for tie in ties[:1]
        )
        self._starts = (*(at for at in range(len(outline)) if not _is_tied(ties, at)), len(outline))
        self._build = build
        self._outline = self._joined(outline, 0)
        self.names = tuple(layer.name for layer in self._outline)
        self.layouts = tuple(_layouts(self._outline))
        """Trainable parameters of each layer, in the order of the parameter vector."""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def layout(self) -> tuple[TensorSpec, ...]:
        """Layout of the whole model's parameter vector."""
        return tuple(spec for layout in self.layouts for spec in layout)

    def outline(self, layer: int) -> tuple[nn.Module, ...]:
        """Return the modules of a layer, perhaps on the meta device, for their structure and shapes."""
        return tuple(part for _, part in self._outline[layer].parts)

    def parameters_bytes(self, layer: int) -> int:
        """Return the size of a layer's trainable parameters in float32."""
        return 4 * sum(spec.elements for spec in self.layouts[layer])

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers, other than the first, that a stage may begin with: there are parameters on both sides."""
        return tuple(at for at in range(1, len(self)) if any(self.layouts[:at]) and any(self.layouts[at:]))

    def check_stages(self, stages: int) -> None:
        """Raise ``RecipeError`` if the model cannot be cut into that many stages."""
        if len(self.cuts) + 1 < stages:
            raise RecipeError(
                f"pipeline.stages: a model of {self._untied} layers that can be cut at {len(self.cuts)} places gives "
                f"no {stages} stages{self._why_tied}"
            )

    def check_boundaries(self, boundaries: Sequence[int]) -> None:
        """Check that the model can be cut at ``boundaries``: first layer of each stage, then the number of layers.

        Raises ``RecipeError`` if a stage would have no parameters, ``ModelMismatch`` if the boundaries are not those of
        a model with so many layers.
        """
        edges = list(boundaries)
        if len(edges) < 2 or edges[0] != 0 or edges[-1] != len(self) or edges != sorted(set(edges)):
            raise ModelMismatch(
                f"the run's stages begin at the layers {edges}, and this model has {len(self)} layers: is the same "
                f"version of the recipe installed here as on the other machines?"
            )
        for first, stop in pairwise(edges):
            if not any(self.layouts[first:stop]):
                raise RecipeError(
                    f"a stage of the layers {', '.join(self.names[first:stop])} would have no trainable parameters: "
                    f"make them a part of the layers beside them"
                )

    def build(self, first: int, stop: int) -> StageModel:
        """Build layers first to stop - 1 with the values that they have in the whole model."""
        assert 0 <= first < stop <= len(self), (first, stop, len(self))
        model = StageModel(self._joined(self._build(self._starts[first], self._starts[stop]), first))
        found = ParameterVector(model).layout if any(self.layouts[first:stop]) else ()
        expected = tuple(spec for layout in self.layouts[first:stop] for spec in layout)
        assert found == expected, (found, expected)
        return model

    def check_whole(self, model: nn.Module) -> None:
        """Raise ``ModelMismatch`` unless the layout of ``model`` is the concatenation of the layers' layouts."""
        found = ParameterVector(model).layout
        for ours, its in zip(self.layout, found, strict=False):
            if ours != its:
                raise ModelMismatch(
                    f"the layers have {ours.name} {ours.shape} where the model has {its.name} {its.shape}: register "
                    "its modules in the order of the layers"
                )
        if len(found) != len(self.layout):
            raise ModelMismatch(f"the layers have {len(self.layout)} parameters and the model {len(found)}")

    @torch.no_grad()
    def activation_shapes(self, given: Tensor) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each layer's output for an input like ``given``, without computing values.

        Raises ``RecipeError`` for a layer whose output shape depends on values.
        """
        shapes = []
        flowing = given.to("meta")
        for layer in self._outline:
            for name, part in layer.parts:
                stand_ins = {key: one.to("meta") for key, one in (*part.named_parameters(), *part.named_buffers())}
                try:
                    flowing = functional_call(part, stand_ins, (flowing,))
                except (RuntimeError, NotImplementedError) as error:
                    raise RecipeError(f"layer {layer.name}: {name} gives no shapes without values: {error}") from error
            shapes.append(tuple(flowing.shape))
        return tuple(shapes)

    def _joined(self, given: Sequence[Layer], first: int) -> tuple[Layer, ...]:
        """Join the recipe's layers that share weights; ``given`` begins with the joined layer ``first``."""
        begin = self._starts[first]
        edges = [at - begin for at in self._starts[first:] if at - begin <= len(given)]
        return tuple(
            Layer(
                " + ".join(one.name for one in given[start:stop]),
                tuple(part for one in given[start:stop] for part in one.parts),
            )
            for start, stop in pairwise(edges)
        )


@runtime_checkable
class LayeredRecipe(Protocol):
    """Additional interface of a ``Recipe`` whose models train in a pipeline.

    ``loss(model, batch)`` has to equal ``loss_of(model(input_of(batch)), targets_of(batch))``.
    """

    def layers(self, seed: int) -> Layered:
        """Return the layers of ``build_model(seed)``; each parameter has the same name and the same bits."""
        ...

    def input_of(self, batch: Tensor) -> Tensor:
        """Return the input of the first layer, (b, …)."""
        ...

    def targets_of(self, batch: Tensor) -> Tensor:
        """Return what the loss needs besides the output, (b, …); it travels to the last stage."""
        ...

    def check_targets(self, targets: Tensor, samples: int) -> None:
        """Raise ``ValueError`` unless ``targets`` could be those of so many samples.

        They come from another peer and are on the CPU; on a GPU an index out of range would end the process.
        """
        ...

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the samples, () float32, from the last layer's output."""
        ...


def layered_from_sequential(model: nn.Sequential) -> Layered:
    """Use the children of a model in memory as layers.

    Children without parameters join the layer before them, or after them at the beginning. Built layers are the model's
    own modules, not copies.
    """
    layers = _grouped([(name, part) for name, part in model._modules.items() if part is not None])
    return Layered(layers, lambda first, stop: layers[first:stop])


def layered_from_makers(makers: Sequence[tuple[str, Maker]], seed: int) -> Layered:
    """Use makers of layers, for a model larger than this machine; grouped as in ``layered_from_sequential``.

    ``makers``: name and maker of each module. Each has random numbers of its own, derived from ``seed`` and its place,
    so that it can be built alone.
    """
    with torch.device("meta"):
        outline = _grouped([(name, make()) for name, make in makers])
    places = {name: number for number, (name, _) in enumerate(makers)}

    def build(first: int, stop: int) -> Sequence[Layer]:
        return [Layer(one.name, tuple((name, made(name)) for name, _ in one.parts)) for one in outline[first:stop]]

    def made(name: str) -> nn.Module:
        place = places[name]
        with torch.device("cpu"), seeded(torch.device("cpu"), derived_seed(seed, place)):
            return makers[place][1]().float()

    return Layered(outline, build)


def _grouped(parts: Sequence[tuple[str, nn.Module]]) -> list[Layer]:
    groups: list[list[tuple[str, nn.Module]]] = []
    for part in parts:
        open_group = groups and (
            not any(True for _ in part[1].parameters())
            or not any(True for _, earlier in groups[-1] for _ in earlier.parameters())
        )
        if open_group:
            groups[-1].append(part)
        else:
            groups.append([part])
    return [Layer(next(_named_for(group)), tuple(group)) for group in groups]


def _named_for(group: list[tuple[str, nn.Module]]) -> Iterator[str]:
    yield from (name for name, part in group if any(True for _ in part.parameters()))
    yield group[0][0]


def _ties(layers: Sequence[Layer]) -> Iterator[_Tie]:
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            first, known_as = seen.setdefault(parameter, (number, name))
            if first != number:
                yield _Tie(known_as, first, number)


def _is_tied(ties: Sequence[_Tie], at: int) -> bool:
    """Return whether layers before and after the beginning of layer ``at`` share a parameter."""
    return any(tie.first < at <= tie.second for tie in ties)


def _layouts(layers: Sequence[Layer]) -> Iterator[tuple[TensorSpec, ...]]:
    seen: set[nn.Parameter] = set()
    for layer in layers:
        named = [(name, one) for name, one in layer.named_parameters() if one.requires_grad and one not in seen]
        seen.update(one for _, one in named)
        yield layout_of(named)
