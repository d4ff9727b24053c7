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
from shoal.swarm.errors import IslandBroken, UserError, WireError

TENSOR_PARALLEL = "tp"
"""Name of the dimension of a mesh whose ranks train on the same samples."""

_FOLLOWERS_WAIT = timedelta(days=365)
"""Followers wait for a command while rank 0 waits for other members. A rank that has died closes its connections."""

_NUMBERS = 3
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Command(IntEnum):
    """Commands of rank 0 to the others."""

    STEP = 1
    DROP_GRADIENTS = 2
    CONTRIBUTE = 3
    RESTART = 4
    CONTINUE = 5
    RESET_OPTIMIZER = 6
    GATHER_OPTIMIZER = 7
    SCATTER_OPTIMIZER = 8
    # These give the control back to their training loops.
    BATCH = 9
    RESUME = 10
    LOOP_ENDS = 11
    END = 12
    # These are about stages of a pipeline.
    ENTER_STAGE = 13
    HOLD_STAGE = 14
    BEGIN_SPAN = 15
    FORWARD = 16
    BACKWARD = 17
    REPEAT = 18
    DROP = 19
    LEAVE_SPAN = 20


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
        self.is_apart = False
        """Whether rank 0 has failed in its part of a command, so that the others wait for it somewhere."""
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

    @contextmanager
    def carrying_out(self, command: Command, *numbers: int) -> Iterator[None]:
        """Send a command, as rank 0, which does its own part of it in this context. Raises ``IslandBroken``.

        After an error the ranks are apart, unless it is about what others have sent, which all ranks find alike."""
        self.is_apart = True
        self.send(command, *numbers)
        try:
            yield
        except WireError:
            self.is_apart = False
            raise
        self.is_apart = False

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

    @property
    def groups(self) -> int:
        """Number of groups of ranks that train on the same samples."""
        return self.ranks // self.tensor_parallel

    def share_of(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], BatchShare]:
        """Return this rank's samples of a batch, (b,), b >= 1: never none, see ``BatchShare``."""
        rows, share = self.rows_of(len(indices))
        return indices[rows], share

    def rows_of(self, samples: int) -> tuple[slice, BatchShare]:
        """Return which of so many samples this rank has: never none, see ``BatchShare``."""
        start, stop = self._bounds(samples, self._place)
        share = BatchShare(stop - start, samples / self.groups, ceil(samples / self.groups))
        return (slice(start, stop) if stop > start else slice(0, 1)), share

    def samples_by_group(self, samples: int) -> list[int]:
        """Return how many of so many samples each group has."""
        bounds = (self._bounds(samples, place) for place in range(self.groups))
        return [stop - start for start, stop in bounds]

    def _bounds(self, samples: int, place: int) -> tuple[int, int]:
        return samples * place // self.groups, samples * (place + 1) // self.groups

    def mean_loss(self, loss: Tensor, share: BatchShare) -> Tensor:
        """Return the mean loss of a batch, (), from those of the ranks' shares. Raises ``IslandBroken``."""
        total = loss.detach().float() * share.weight if share.samples else torch.zeros_like(loss, dtype=torch.float32)
        self.sum_of_ranks(total)
        return total / self.ranks

    def sum_of_ranks(self, total: Tensor) -> None:
        """Add up a tensor on the ranks' devices, in place. Raises ``IslandBroken``."""
        with _connected():
            dist.all_reduce(total)

    def broadcast_on_devices(self, tensor: Tensor) -> None:
        """Give all ranks the values that a tensor, on their devices, has on rank 0. Raises ``IslandBroken``."""
        with _connected():
            dist.broadcast(tensor, 0)

    def gather_from_groups(self, tensor: Tensor, dimension: str) -> list[Tensor]:
        """Return the tensors that the ranks along a dimension of the mesh have on their devices, all of one shape.

        Raises ``IslandBroken``."""
        gathered = [torch.empty_like(tensor) for _ in range(self.groups)]
        with _connected():
            dist.all_gather(gathered, tensor, group=self.mesh[dimension].get_group())
        return gathered


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
