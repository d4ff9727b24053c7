"""A model's trainable parameters as one flat float32 vector, and the layout that all peers must share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from shoal.compression.scratch import empty_aligned
from shoal.swarm.errors import ModelMismatch
from shoal.swarm.protocol.types import TensorSpec

_WRAPPERS = frozenset(("_orig_mod", "module"))
"""Steps that ``torch.compile`` and ``DistributedDataParallel`` add to the names in a wrapped module."""

_EXACT = (torch.float32, torch.float64)
"""Types that hold every value of a float32 anchor. A model of another type would differ from the anchor by rounding,
and that difference would be taken for work."""


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without the steps that wrappers add: compiled models fit plain ones."""
    *path, last = name.split(".")
    return ".".join([step for step in path if step not in _WRAPPERS] + [last])


def named_parameters(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the model's parameters by plain names."""
    for name, parameter in model.named_parameters(prefix):
        yield plain_name(name), parameter


def layout_of(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Return the layout: names, shapes and types, in order.

    Raises ``ModelMismatch`` for a type that cannot hold the anchor, and for two tensors of one name.
    """
    layout: dict[str, TensorSpec] = {}
    for name, one in named:
        dtype = str(one.dtype).removeprefix("torch.")
        if one.dtype not in _EXACT:
            raise ModelMismatch(
                f"parameter {name} is {dtype}, and a run's anchor is float32: make the model with .float(); for the "
                'speed of bfloat16 set inner.precision = "bfloat16" in the run file, or use torch.autocast in your loop'
            )
        if name in layout:
            raise ModelMismatch(
                f"two parameters are called {name} once {' and '.join(sorted(_WRAPPERS))} are taken off their names: "
                "rename one of the modules that they are in"
            )
        layout[name] = TensorSpec(name=name, shape=tuple(one.shape), dtype=dtype)
    return tuple(layout.values())


class ParameterVector:
    """Trainable parameters of a model, in the order of ``named_parameters``, as a vector (n,) float32 on the CPU.

    Buffers, such as BatchNorm's running statistics, are local to each peer and are not averaged.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises ``ModelMismatch`` for a model without trainable parameters, and as ``layout_of``."""
        named = [(name, one) for name, one in named_parameters(model) if one.requires_grad]
        if not named:
            raise ModelMismatch("the model has no trainable parameters")
        self.parameters = [parameter for _, parameter in named]
        self.layout = layout_of(named)
        self.elements = sum(parameter.numel() for parameter in self.parameters)

    def read(self) -> Tensor:
        """Return the parameters' values, a new (n,) float32 on the CPU."""
        flat = empty_aligned(self.elements)
        at = 0
        for parameter in self.parameters:
            flat[at : at + parameter.numel()].copy_(parameter.detach().reshape(-1))
            at += parameter.numel()
        return flat

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set every parameter from (n,) float32."""
        at = 0
        for parameter in self.parameters:
            values = vector[at : at + parameter.numel()].view(parameter.shape)
            parameter.copy_(values)
            at += parameter.numel()

    @torch.no_grad()
    def take_gradients(self) -> Tensor:
        """Return the gradients, a new (n,) float32 on the model's device, zeros where there is none, and clear them."""
        device = self.parameters[0].device
        flat = torch.empty(self.elements, device=device)
        at = 0
        for parameter in self.parameters:
            part = flat[at : at + parameter.numel()]
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.reshape(-1))
            parameter.grad = None
            at += parameter.numel()
        return flat

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Cut a vector, (n,), into tensors by parameter name, without copies."""
        return split_by_layout(vector, self.layout)


def split_by_layout(vector: Tensor, layout: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    """Cut a vector, (n,), into tensors by name and shape, without copies."""
    named, at = {}, 0
    for spec in layout:
        size = spec.elements
        named[spec.name] = vector[at : at + size].view(spec.shape)
        at += size
    return named
