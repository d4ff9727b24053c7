"""Ranks of an island and what they say to each other: rank 0 leads and sends commands, the others follow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from math import ceil

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shoal.peer.training.data import BatchShare
from shoal.swarm.errors import IslandBroken, UserError

TENSOR_PARALLEL = "tp"
"""Name of the dimension of a mesh whose ranks train on the same samples."""

_FOLLOWERS_WAIT = timedelta(days=365)
"""Followers wait for a command while rank 0 waits for other members. A rank that has died closes its connections."""

_NUMBERS = 3
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Command(IntEnum):
    """Commands of rank 0 to the others. The last four give the control back to their training loops."""

    STEP = 1
    DROP_GRADIENTS = 2
    CONTRIBUTE = 3
    RESTART = 4
    CONTINUE = 5
    RESET_OPTIMIZER = 6
    GATHER_OPTIMIZER = 7
    SCATTER_OPTIMIZER = 8
    BATCH = 9
    RESUME = 10
    LOOP_ENDS = 11
    END = 12


class Island:
    """Ranks of a machine that are one member; made on all of them at once.

    ``mesh``: of all ranks of ``torch.distributed``. Ranks along a dimension called ``tp`` train on the same samples
    (tensor parallelism), and those along all others share each batch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """Raises ``UserError`` for a mesh that is not of all ranks."""
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if mesh.size() != self.ranks:
            raise UserError(f"an island's mesh has all ranks ({self.ranks}), and this one has {mesh.size()}")
        self.mesh = mesh
        names = mesh.mesh_dim_names or ()
        self.tensor_parallel = mesh.size(names.index(TENSOR_PARALLEL)) if TENSOR_PARALLEL in names else 1
        self._control = dist.new_group(backend="gloo", timeout=_FOLLOWERS_WAIT)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "this rank is in the mesh"
        self._place = 0
        for dimension, at in enumerate(coordinate):
            if not names or names[dimension] != TENSOR_PARALLEL:
                self._place = self._place * mesh.size(dimension) + at

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # Commands -------------------------------------------------------------------------------------------------

    def send(self, command: Command, *numbers: int) -> None:
        """Have the other ranks carry out a command, as rank 0. Raises ``IslandBroken``."""
        assert self.leads
        padded = [int(command), *numbers, *[0] * (_NUMBERS - len(numbers))]
        self._broadcast(torch.tensor(padded, dtype=torch.int64))

    def receive(self) -> tuple[Command, list[int]]:
        """Wait for the next command. Raises ``IslandBroken``."""
        message = torch.zeros(1 + _NUMBERS, dtype=torch.int64)
        self._broadcast(message)
        command, *numbers = message.tolist()
        return Command(command), numbers

    def send_bytes(self, content: bytes) -> None:
        """Send bytes to the other ranks, which call ``receive_bytes``. Raises ``IslandBroken``."""
        self._broadcast(torch.tensor([len(content)], dtype=torch.int64))
        if content:
            self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def receive_bytes(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        content = torch.empty(int(size), dtype=torch.uint8)
        if len(content):
            self._broadcast(content)
        return content.numpy().tobytes()

    def broadcast(self, tensor: Tensor) -> None:
        """Give all ranks the values that the tensor, on the CPU, has on rank 0. Raises ``IslandBroken``."""
        self._broadcast(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which are on the CPU and of one shape. Raises ``IslandBroken``."""
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
        with _connected():
            dist.all_gather(gathered, tensor, group=self._control)
        return gathered

    def barrier(self) -> None:
        """Wait for all ranks. Raises ``IslandBroken``."""
        with _connected():
            dist.barrier(group=self._control)

    def _broadcast(self, tensor: Tensor) -> None:
        with _connected():
            dist.broadcast(tensor, 0, group=self._control)

    # Batches --------------------------------------------------------------------------------------------------

    def share_of(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], BatchShare]:
        """Return this rank's samples of a batch, (b,), b >= 1: never none, see ``BatchShare``."""
        groups, samples = self.ranks // self.tensor_parallel, len(indices)
        start, stop = samples * self._place // groups, samples * (self._place + 1) // groups
        share = BatchShare(stop - start, samples / groups, ceil(samples / groups))
        return (indices[start:stop] if stop > start else indices[:1]), share

    def mean_loss(self, loss: Tensor, share: BatchShare) -> Tensor:
        """Return the mean loss of a batch, (), from those of the ranks' shares. Raises ``IslandBroken``."""
        total = loss.detach().float() * share.weight if share.samples else torch.zeros_like(loss, dtype=torch.float32)
        self.sum_of_ranks(total)
        return total / self.ranks

    def sum_of_ranks(self, total: Tensor) -> None:
        """Add up a tensor on the ranks' devices, in place. Raises ``IslandBroken``."""
        with _connected():
            dist.all_reduce(total)


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise IslandBroken(
            f"another rank of this island has ended or cannot be reached ({str(error).splitlines()[0][:200]}): what "
            "the island has contributed is kept; give the same command again"
        ) from error


def init_process_group(folder: str, rank: int, ranks: int, *, on_gpus: bool) -> None:
    """Begin torch.distributed among the ranks of this machine, which meet in a folder that is theirs alone.

    Their connections are on loopback: nothing of them can be reached from outside."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
    store = dist.FileStore(os.path.join(folder, "store"), ranks)  # type: ignore[attr-defined]
    if dist.is_initialized():
        dist.destroy_process_group()  # of an earlier run
    dist.init_process_group("nccl" if on_gpus else "gloo", store=store, rank=rank, world_size=ranks)
