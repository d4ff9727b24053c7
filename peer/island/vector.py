"""Parameters of a model that are spread over the ranks of an island, as one vector in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.compression.range_reader import RangeReader, TensorReader
from shoal.peer.island.group import Island
from shoal.peer.island.shards import held_part, shard_of, who_holds
from shoal.peer.island.shared_image import SharedImage, as_image_parts
from shoal.peer.training.parameters import MasterWeights, ParameterVector
from shoal.peer.training.tensor_sequence import TensorSequence


class SpreadSequence(TensorSequence):
    """Tensors that are spread over the ranks as the weights of ``vector`` are."""

    def __init__(self, tensors: Sequence[Tensor], vector: IslandVector) -> None:
        super().__init__(tensors)
        self.tensors = tensors
        self._vector = vector

    def settled(self) -> RangeReader:
        return self._vector.collect(self.tensors)


class IslandVector(ParameterVector):
    """``ParameterVector`` of a model whose parameters are ``DTensor`` or the same on all ranks.

    Rank 0 has the vector, in shared memory; the other ranks' has no elements. All ranks call ``settled``, ``write``
    and ``rebase`` together; the values that ``read`` returns are those of the last of these calls."""

    def __init__(
        self,
        model: nn.Module,
        masters: MasterWeights | None,
        island: Island,
        image: SharedImage | None = None,
        row_orders: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``image``: shared memory that has the model's values; None to make it; ``row_orders``: by the names of
        parameters, see ``shard_of``. Raises as ``ParameterVector`` and ``SharedImage``."""
        super().__init__(model, masters)
        self._island = island
        self._whole_elements = super().elements
        largest = max(one.numel() for one in self.weights)
        self._image = image or SharedImage(island, self._whole_elements, largest)
        self._parts = as_image_parts(self.weights, self._image.values)
        orders = row_orders or {}
        found = [shard_of(one, orders.get(spec.name)) for one, spec in zip(self.weights, self.layout, strict=True)]
        bounds = torch.tensor([bounds for _, bounds in found], dtype=torch.int64)
        holders = who_holds(island.all_gather(bounds), island.rank)
        self._shards = [
            replace(shard, is_ours=is_ours, holders=count)
            for (shard, _), (is_ours, count) in zip(found, holders, strict=True)
        ]
        if image is None:
            self.settled()

    @property
    def elements(self) -> int:
        """Elements of the vector on rank 0, and 0 on the others."""
        return self._whole_elements if self._island.leads else 0

    def read(self, start: int, stop: int, out: Tensor) -> None:
        out.copy_(self._image.values[start:stop])

    def settled(self) -> RangeReader:
        return self.collect(self.weights)

    def copy(self) -> SpreadSequence:
        return SpreadSequence([one.detach().clone() for one in self.weights], self)

    def alike(self, tensors: Sequence[Tensor | None]) -> SpreadSequence:
        nothing, pairs = torch.zeros(()), zip(tensors, self.weights, strict=True)
        return SpreadSequence(
            [nothing.expand(held_part(like).shape) if one is None else one for one, like in pairs], self
        )

    def collect(self, tensors: Sequence[Tensor]) -> RangeReader:
        """Copy tensors that are spread as the weights are to the image, and return its reader."""
        self._island.barrier()  # nobody reads the image any more
        for held, part, shard in zip(tensors, self._parts, self._shards, strict=True):
            shard.store(held_part(held), part)
        self._island.barrier()
        return TensorReader(self._image.values[: self.elements])

    @torch.no_grad()
    def write(self, values: Tensor, start: int = 0) -> None:
        """Set the parameters to ``values``: all of them on rank 0, none on the others."""
        assert start == 0, "the whole vector"
        assert values.numel() == self.elements, (values.numel(), self.elements)
        self._island.barrier()
        self._image.values[: self.elements].copy_(values)
        self._load()

    @torch.no_grad()
    def rebase(self, before: TensorSequence, values: Tensor) -> None:
        assert isinstance(before, SpreadSequence), "copy() has made it"
        self._island.barrier()
        self._image.values[: self.elements].copy_(values)
        self._island.barrier()
        for own, old, part, shard in zip(self.weights, before.tensors, self._parts, self._shards, strict=True):
            held = held_part(own)
            anchor = torch.empty_like(held, dtype=torch.float32)
            shard.load(anchor, part)
            # In this order the result is exactly the anchor if no work was done meanwhile.
            held.copy_((held.float() - held_part(old).float()).add_(anchor))
        self._after_load()

    def _load(self) -> None:
        """Have all ranks take their parameters from the image."""
        self._island.barrier()
        for held, part, shard in zip(self.weights, self._parts, self._shards, strict=True):
            shard.load(held_part(held), part)
        self._after_load()

    def _after_load(self) -> None:
        if self.masters is not None:
            self.masters.update_parameters()
        self._island.barrier()

    def rounded(self, values: Tensor, start: int = 0) -> Tensor:
        if not self._rounds:
            return values
        rounded, stops = torch.empty_like(values), [0, *self._stops]
        for (first, stop), one in zip(pairwise(stops), self.weights, strict=True):
            part = slice(max(first - start, 0), max(stop - start, 0))
            rounded[part].copy_(values[part].to(one.dtype))
        return rounded

    @torch.no_grad()
    def clip_gradients(self, most: float) -> None:
        """Scale the gradients so that the norm of those of all ranks is ``most`` at most; a shard counts once."""
        pairs = zip(self.weights, self._shards, strict=True)
        held = [(held_part(one.grad), shard) for one, shard in pairs if one.grad is not None]
        if not held:
            return
        total = torch.zeros((), device=held[0][0].device)
        for gradient, shard in held:
            total += gradient.float().square().sum() / shard.holders
        self._island.sum_of_ranks(total)
        factor = (most / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient, _ in held:
            gradient.mul_(factor.to(gradient.dtype))

    # Optimizers -----------------------------------------------------------------------------------------------

    def number_of(self, parameter: Tensor) -> int:
        """Return the number of one of the ``weights``."""
        return next(number for number, one in enumerate(self.weights) if one is parameter)

    def collect_one(self, tensor: Tensor, number: int) -> Tensor | None:
        """Return a tensor that is spread as parameter ``number`` is, whole and on the CPU; None on other ranks.

        All ranks call this together."""
        whole = self._scratch(number)
        self._island.barrier()
        self._shards[number].store(held_part(tensor), whole)
        self._island.barrier()
        return whole.to(tensor.dtype, copy=True) if self._island.leads else None

    def spread_one(self, whole: Tensor | None, tensor: Tensor, number: int) -> None:
        """Set a tensor that is spread as parameter ``number`` is to a whole one, which rank 0 has.

        All ranks call this together."""
        memory = self._scratch(number)
        self._island.barrier()
        if whole is not None:
            memory.copy_(whole)
        self._island.barrier()
        self._shards[number].load(held_part(tensor), memory)

    def _scratch(self, number: int) -> Tensor:
        shape = self.weights[number].shape
        return self._image.scratch[: shape.numel()].view(shape)
