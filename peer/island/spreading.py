"""Spreading a recipe's model over the ranks of an island: tensor parallelism by DTensor, then FSDP2.

The ranks take their shards from shared memory, where rank 0 has written the model's values, so that no other rank
builds them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shoal.peer.island.group import TENSOR_PARALLEL, Island
from shoal.peer.island.ranks import SpreadModel
from shoal.peer.island.shards import row_order
from shoal.peer.island.shared_image import SharedImage, as_image_parts
from shoal.peer.training.layers import StageModel
from shoal.peer.training.parameters import named_parameters
from shoal.peer.training.tensor_parallel import Cut, CutInputs, CutOutputs
from shoal.peer.training.tensor_sequence import TensorSequence
from shoal.swarm.errors import DeviceError

DATA_PARALLEL = "dp"


def spread_model(model: nn.Module, island: Island, cuts: Mapping[str, Cut]) -> SpreadModel:
    """Spread a model, on the CPU, over the ranks, with the values that it has on rank 0. All ranks call this together.

    ``cuts``: layers that are cut among the ranks of tensor parallelism, see ``check_cuts``."""
    named = [(name, one) for name, one in named_parameters(model) if one.requires_grad]
    values = TensorSequence([one for _, one in named])
    image = SharedImage(island, values.elements, max(one.numel() for _, one in named))
    if island.leads:
        values.read(0, values.elements, image.values)
    island.barrier()
    for (_, one), part in zip(named, as_image_parts([one for _, one in named], image.values), strict=True):
        one.data = part.to(one.dtype)
    for fixed in [*(one for one in model.parameters() if not one.requires_grad), *model.buffers()]:
        island.broadcast(fixed.data)
    orders = _cut_layers(model, island.mesh, cuts, island.tensor_parallel) if island.tensor_parallel > 1 else {}
    _shard(model, island.mesh[DATA_PARALLEL])
    island.barrier()
    return SpreadModel(image, orders)


def check_cuts(model: nn.Module, cuts: Mapping[str, Cut], ranks: int) -> None:
    """Raise ``DeviceError`` for layers that cannot be cut among so many ranks."""
    for name, _, cut in _cuts_in(model, cuts) if ranks > 1 else ():
        if isinstance(cut, CutOutputs) and cut.units is not None and cut.units % ranks:
            raise DeviceError(
                f"--tensor-parallel {ranks}: {name} has {cut.units} {cut.of}, which cannot be cut in {ranks} equal "
                "parts; take a number that divides it"
            )


def _cuts_in(model: nn.Module, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, nn.Module, Cut]]:
    """Iterate over the layers that are cut, by name; ``units`` of the cuts are known."""
    for name, module in model.named_modules():
        cut = next((cut for pattern, cut in cuts.items() if _matches(name, pattern)), None)
        if isinstance(cut, CutOutputs):
            assert isinstance(module, nn.Linear)
            cut = replace(cut, units=cut.units or module.out_features // cut.parts)
        if cut is not None:
            yield name, module, cut


def _cut_layers(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut], ranks: int) -> dict[str, Tensor]:
    """Cut layers for tensor parallelism; return the orders of those rows that are not cut as they are."""
    styles: dict[str, ParallelStyle] = {}
    orders: dict[str, Tensor] = {}
    for name, module, cut in _cuts_in(model, cuts):
        if isinstance(cut, CutInputs):
            styles[name] = RowwiseParallel()
            continue
        styles[name] = ColwiseParallel()
        if cut.parts > 1:
            assert isinstance(module, nn.Linear)
            order = row_order(module.out_features, cut.parts, ranks)
            for end, one in module.named_parameters():
                orders[f"{name}.{end}"] = order
                one.data = one.data[order]
    # Each rank has all values in shared memory and takes its own; nothing is sent.
    parallelize_module(model, mesh[TENSOR_PARALLEL], styles, src_data_rank=None)
    return orders


def _matches(name: str, pattern: str) -> bool:
    steps, wanted = name.split("."), pattern.split(".")
    return len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted))


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the parameters by FSDP2: of the elements of each list of layers, one after the other, and of the rest.

    A stage's parameters are whole on a device only during a pass through them, as several micro-batches are between
    their passes at a time, and values are written then, too."""
    if isinstance(model, StageModel):
        for layer in model.layers:
            parts = [part for _, part in layer.parts]
            of_parts = [parameter for part in parts for parameter in part.parameters()]
            if len(set(of_parts)) < len(of_parts):  # parts that share weights
                continue
            for part in parts:
                if any(True for _ in part.parameters()):
                    fully_shard(part, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        return
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for element in module:
                fully_shard(element, mesh=mesh)
    fully_shard(model, mesh=mesh)
