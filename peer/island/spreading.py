"""Spreading a recipe's model over the ranks of an island: tensor parallelism by DTensor, then FSDP2.

The ranks take their shards from shared memory, where rank 0 has written the model's values, so that no other rank
builds them."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shoal.peer.island.group import TENSOR_PARALLEL, Island
from shoal.peer.island.ranks import SpreadModel
from shoal.peer.island.shards import row_order
from shoal.peer.island.shared_image import SharedImage, as_image_parts
from shoal.peer.training.parameters import named_parameters
from shoal.peer.training.tensor_parallel import Cut, CutInputs, CutOutputs
from shoal.peer.training.tensor_sequence import TensorSequence
from shoal.swarm.errors import DeviceError

DATA_PARALLEL = "dp"


def spread_model(model: nn.Module, island: Island, cuts: Mapping[str, Cut]) -> SpreadModel:
    """Spread a model, on the CPU, over the ranks, with the values that it has on rank 0. All ranks call this together.

    ``cuts``: layers that are cut among the ranks of tensor parallelism. Raises ``DeviceError`` where they cannot be."""
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


def _cut_layers(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut], ranks: int) -> dict[str, Tensor]:
    """Cut layers for tensor parallelism; return the orders of those rows that are not cut as they are."""
    styles: dict[str, ParallelStyle] = {}
    orders: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        cut = next((cut for pattern, cut in cuts.items() if _matches(name, pattern)), None)
        match cut:
            case CutInputs():
                styles[name] = RowwiseParallel()
            case CutOutputs(parts=parts, of=of, units=units):
                assert isinstance(module, nn.Linear)
                units = units or module.out_features // parts
                if units % ranks:
                    raise DeviceError(
                        f"--tensor-parallel {ranks}: {name} has {units} {of}, which cannot be cut in {ranks} equal "
                        "parts; take a number that divides it"
                    )
                styles[name] = ColwiseParallel()
                if parts > 1:
                    order = row_order(module.out_features, parts, ranks)
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
    """Shard the parameters by FSDP2: of the elements of each list of layers, one after the other, and of the rest."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
