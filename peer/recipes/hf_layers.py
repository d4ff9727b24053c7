"""Layers of transformers' causal language models, for the stages of a pipeline.

Each block runs within the architecture's own code: that of the whole model, in which it is the only block. So
positions, masks and scales are what they are in the whole model, whatever the architecture does about them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.peer.training.layers import Layer

CUT = frozenset(
    (
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "phi3"),
        *("smollm3", "cohere", "glm", "helium", "gpt_neox", "gpt2"),
    )
)
"""Values of ``model_type`` whose stages compute exactly what the whole model does: tests/peer/test_hf_layers.py."""


class _Inside(nn.Module):
    """Part of a model that runs within other code, under the names that its parameters have in the part.

    ``run``: computes the part's output; ``shared``: modules without parameters that it also needs."""

    def __init__(self, part: nn.Module, run: Callable[[Tensor], Tensor], shared: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Modules and parameters are the part's, so what moves or replaces them here does so in the part.
        vars(self).update(_parameters=part._parameters, _buffers=part._buffers, _part=part, _run=run)
        vars(self)["_modules"] = {**part._modules, **{f"shared_{name}": one for name, one in shared.items()}}

    def train(self, mode: bool = True) -> _Inside:
        vars(self)["_part"].training = mode
        super().train(mode)
        return self

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = vars(self)["_run"](given)
        return found


class _OnDevice(nn.Module):
    """Module that takes positions on the CPU, where whether they are consecutive is seen without waiting for a GPU, and
    without values of activations."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values(), *self.module.parameters())
        device = next(one.device for one in given if isinstance(one, Tensor) and one.is_floating_point())

        def moved(one: Any) -> Any:
            return one.to(device, non_blocking=True) if isinstance(one, Tensor) else one

        return self.module(*map(moved, args), **{name: moved(one) for name, one in kwargs.items()})


class _NoPositions(nn.Module):
    """Stands for an embedding of positions that have been added already."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


class _Given(nn.Module):
    """Stands for the model below the head: gives what it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


class CutModel:
    """A model of transformers that can be cut: embedding, blocks, and final norm with head.

    Parts of it may be on the meta device. ``sources`` names its modules by layer, for those who give them memory."""

    def __init__(self, model: nn.Module) -> None:
        whole: Any = model
        self._model, self._base = whole, whole.base_model
        self._base_name = whole.base_model_prefix
        self._head_name = next(name for name, _ in model.named_children() if name != self._base_name)
        children = dict(self._base.named_children())
        self._blocks_name = next(name for name, one in children.items() if isinstance(one, nn.ModuleList))
        embedding = self._base.get_input_embeddings()
        self._embedding_name = next(name for name, one in children.items() if one is embedding)
        plain = [
            name
            for name, one in children.items()
            if name not in (self._embedding_name, self._blocks_name) and any(True for _ in one.parameters())
        ]
        *positions, self._norm_name = plain
        self._positions_name = positions[0] if positions else ""
        self._dropout_name = next((name for name, one in children.items() if isinstance(one, nn.Dropout)), "")
        taken = (*plain, self._embedding_name, self._blocks_name, self._dropout_name)
        self._shared = {name: one for name, one in children.items() if name not in taken}

    @property
    def sources(self) -> list[list[nn.Module]]:
        """Modules of each layer."""
        base = self._base
        first = [getattr(base, name) for name in (self._embedding_name, self._positions_name) if name]
        blocks = [[one] for one in getattr(base, self._blocks_name)]
        return [first, *blocks, [getattr(base, self._norm_name), getattr(self._model, self._head_name)]]

    @property
    def shared(self) -> list[nn.Module]:
        """Modules without parameters that blocks need."""
        return list(self._shared.values())

    def layers(self) -> list[Layer]:
        """Return the layers; one after the other they compute the logits of tokens, ``(b, t) int64``."""
        return [self._first(), *map(self._block, range(len(getattr(self._base, self._blocks_name)))), self._last()]

    def _first(self) -> Layer:
        named = [(name, getattr(self._base, name)) for name in (self._embedding_name,)]
        if self._positions_name:
            positions = getattr(self._base, self._positions_name)
            others = {self._positions_name: _OnDevice(positions), self._dropout_name: nn.Identity()}
            added = self._within(nn.ModuleList(), others)
            named.append((self._positions_name, _Inside(positions, added, {})))
        if self._dropout_name:
            named.append((self._dropout_name, getattr(self._base, self._dropout_name)))
        parts = tuple((f"{self._base_name}.{name}", one) for name, one in named)
        return Layer(parts[0][0], parts)

    def _block(self, number: int) -> Layer:
        block = getattr(self._base, self._blocks_name)[number]
        others: dict[str, nn.Module] = {name: _OnDevice(one) for name, one in self._shared.items()}
        if self._positions_name:
            others[self._positions_name] = _NoPositions()
        if self._dropout_name:
            others[self._dropout_name] = nn.Identity()
        name = f"{self._base_name}.{self._blocks_name}.{number}"
        run = self._within(nn.ModuleList([block]), others, number)
        return Layer(name, ((name, _Inside(block, run, self._shared)),))

    def _within(
        self, blocks: nn.ModuleList, others: Mapping[str, nn.Module], number: int | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the code of the model below the head, with other modules, the only block being ``number``."""
        shell: Any = copy.copy(self._base)
        ends = {self._embedding_name: nn.Identity(), self._blocks_name: blocks, self._norm_name: nn.Identity()}
        vars(shell)["_modules"] = {**self._base._modules, **ends, **{name: one for name, one in others.items() if name}}
        shell.config = copy.deepcopy(self._base.config)
        types = getattr(shell.config, "layer_types", None)
        if types and number is not None:
            shell.config.layer_types = [types[number]]
        shell.config.num_hidden_layers = len(blocks)

        def run(given: Tensor) -> Tensor:
            positions = torch.arange(given.shape[1], device="cpu")[None]
            found: Tensor = shell(inputs_embeds=given, position_ids=positions).last_hidden_state
            return found

        return run

    def _last(self) -> Layer:
        norm, head = getattr(self._base, self._norm_name), getattr(self._model, self._head_name)
        shell: Any = copy.copy(self._model)
        vars(shell)["_modules"] = {**self._model._modules, self._base_name: _Given()}

        def run(given: Tensor) -> Tensor:
            found: Tensor = shell(inputs_embeds=given).logits
            return found

        parts = ((f"{self._base_name}.{self._norm_name}", norm), (self._head_name, _Inside(head, run, {})))
        return Layer(self._head_name, parts)
