"""A model's trainable parameters as one flat float32 vector, and the layout that all peers must share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import torch
from blake3 import blake3
from torch import Tensor, nn

from shoal.peer.training.tensor_sequence import TensorSequence
from shoal.swarm.errors import ModelMismatch
from shoal.swarm.protocol.types import FrozenParameters, TensorSpec

_WRAPPERS = frozenset(("_orig_mod", "module"))
"""Steps that ``torch.compile`` and ``DistributedDataParallel`` add to the names in a wrapped module."""

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_PIECE = 2**20
"""Elements that are hashed at a time."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types that round the anchor."""


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without the steps that wrappers add: compiled models fit plain ones."""
    *path, last = name.split(".")
    return ".".join([step for step in path if step not in _WRAPPERS] + [last])


def named_parameters(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the model's parameters by plain names."""
    for name, parameter in model.named_parameters(prefix):
        yield plain_name(name), parameter


def layout_of(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    """Return the layout: names and shapes, in order.

    Raises ``ModelMismatch`` for a type that cannot be trained, and for two tensors of one name.
    """
    layout: dict[str, TensorSpec] = {}
    for name, one in named:
        if one.dtype not in _TYPES:
            raise ModelMismatch(
                f"parameter {name} is {type_name(one.dtype)}: trainable parameters have to be float32, float64, "
                "bfloat16 or float16; freeze this one or convert it"
            )
        if name in layout:
            raise ModelMismatch(
                f"two parameters are called {name} once {' and '.join(sorted(_WRAPPERS))} are taken off their names: "
                "rename one of the modules that they are in"
            )
        layout[name] = TensorSpec(name=name, shape=tuple(one.shape))
    return tuple(layout.values())


def type_name(dtype: torch.dtype) -> str:
    """Return a type's name, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def frozen_parameters(model: nn.Module) -> FrozenParameters | None:
    """Describe the model's parameters that are not trained; None without any. Reads all of them, by pieces.

    The digest is BLAKE3 of names, shapes and values in float32, so a base in bfloat16 is the same one after it was
    converted; values of integer types, as of quantised bases, count by their bytes.
    """
    digest, elements = blake3(b"shoal frozen parameters 1\0"), 0
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            continue
        elements += parameter.numel()
        digest.update(json.dumps([name, list(parameter.shape)]).encode() + b"\0")
        for piece in _plain_pieces(parameter.detach()):
            digest.update(piece.view(torch.uint8).numpy().data)
    return FrozenParameters(elements=elements, digest=digest.digest()) if elements else None


def _plain_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Iterate over a tensor's elements on the CPU, by pieces: as float32, or as they are in integer types.

    Shards of a ``DTensor`` are gathered, in which all its ranks have to take part."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.is_floating_point():
        sequence = TensorSequence([tensor])
        for start in range(0, sequence.elements, _PIECE):
            stop = min(start + _PIECE, sequence.elements)
            piece = torch.empty(stop - start)
            sequence.read(start, stop, piece)
            yield piece
        return
    for row in torch.split(tensor.reshape(-1), _PIECE):
        yield row.cpu()


class MasterWeights:
    """Float32 masters of a model's trainable low-precision parameters, for the inner optimizer to step.

    Updates below the parameters' precision add up in the masters, where the parameters would lose them (mixed precision
    training, arXiv:1710.03740). They take 4 bytes for each low-precision element on the model's device, and their
    gradients as much during a step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._masters = {
            parameter: nn.Parameter(parameter.detach().float())
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.dtype in LOW_PRECISION
        }

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a parameter's master, which is the parameter itself where that is precise enough."""
        return self._masters.get(parameter, parameter)

    def take_gradients(self) -> None:
        """Move the parameters' gradients to their masters."""
        for parameter, master in self._masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Round the masters to the parameters."""
        for parameter, master in self._masters.items():
            parameter.copy_(master)


class ParameterVector(TensorSequence):
    """Trainable parameters of a model, in the order of ``named_parameters``, as a float32 vector.

    Buffers, such as BatchNorm's running statistics, are local to each peer and are not averaged. ``parameters``: those
    of the model; ``weights``: those that an optimizer steps and whose values are read, masters where there are any.
    """

    def __init__(self, model: nn.Module, masters: MasterWeights | None = None) -> None:
        """Raises ``ModelMismatch`` for a model without trainable parameters, and as ``layout_of``."""
        named = [(name, one) for name, one in named_parameters(model) if one.requires_grad]
        if not named:
            raise ModelMismatch("the model has no trainable parameters")
        self.parameters = [parameter for _, parameter in named]
        self.layout = layout_of(named)
        self.masters = masters
        self.weights = self.parameters if masters is None else [masters.of(one) for one in self.parameters]
        super().__init__(self.weights)

    def write(self, values: Tensor, start: int = 0) -> None:
        super().write(values, start)
        if self.masters is not None:
            self.masters.update_parameters()

    def rebase(self, before: TensorSequence, values: Tensor) -> None:
        super().rebase(before, values)
        if self.masters is not None:
            self.masters.update_parameters()

    def alike(self, tensors: Sequence[Tensor | None]) -> TensorSequence:
        """Return the sequence of tensors that are shaped and placed as the parameters are; None stands for zeros."""
        nothing, pairs = torch.zeros(()), zip(tensors, self.parameters, strict=True)
        return TensorSequence([nothing.expand(like.shape) if one is None else one for one, like in pairs])

    def clip_gradients(self, most: float) -> None:
        """Scale the gradients of the weights so that their norm is ``most`` at most."""
        nn.utils.clip_grad_norm_(self.weights, most)

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def split_by_layout(vector: Tensor, layout: tuple[TensorSpec, ...]) -> dict[str, Tensor]:
    """Cut a vector, (n,), into tensors by name and shape, without copies."""
    named, at = {}, 0
    for spec in layout:
        size = spec.elements
        named[spec.name] = vector[at : at + size].view(spec.shape)
        at += size
    return named
