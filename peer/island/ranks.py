"""The ranks of an island at work together: rank 0 has a ``Session``, the others follow it.

All of them run the same training loop. Rank 0's session decides what comes next, and has the others do their part of it
by commands; between two calls of their loops the others serve these."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.compression.range_reader import RangeReader
from shoal.peer.island.group import Command, Island
from shoal.peer.island.optimizer import IslandOptimizer, gather, scatter
from shoal.peer.island.shared_image import SharedImage
from shoal.peer.island.vector import IslandVector
from shoal.peer.training.algorithms import LocalWork, OwnLoop, local_work
from shoal.peer.training.data import BatchShare, Dataset, not_in_islands, take_batch
from shoal.peer.training.parameters import MasterWeights, frozen_parameters
from shoal.swarm.errors import IslandBroken
from shoal.swarm.protocol.run_file import RunFile, parse_run_file

log = logging.getLogger(__name__)

_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class SpreadModel:
    """How a recipe's model was spread: the ``image`` that has its values, and ``row_orders``, see ``shard_of``."""

    image: SharedImage
    row_orders: Mapping[str, Tensor]


class IslandLead:
    """Rank 0's end of the island, for its session and replica. ``number``: of the model, of those that it has."""

    def __init__(self, island: Island, spread: SpreadModel | None = None, number: int = 0) -> None:
        self.island = island
        self.number = number
        self._spread = spread
        self._share = BatchShare(1, 1.0, 1)
        self._lr_factor = 1.0
        self._followers_serve = True

    @property
    def share(self) -> BatchShare:
        """Share of rank 0 in the batch in hand."""
        return self._share

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate that all ranks' loops were last told."""
        return self._lr_factor

    # For the replica ------------------------------------------------------------------------------------------

    def vector(self, model: nn.Module, masters: MasterWeights | None) -> IslandVector:
        return _vector(self.island, model, masters, self._spread)

    def work(self, own: LocalWork) -> LocalWork:
        """Return rank 0's local work, which has the other ranks do theirs."""
        return _LeadWork(own, self.island, self.number)

    def optimizer(self, optimizer: Optimizer, vector: IslandVector) -> IslandOptimizer:
        return IslandOptimizer(optimizer, vector, self.island, self.number)

    def drop_gradients(self) -> None:
        """Have the other ranks drop their gradients."""
        self.island.send(Command.DROP_GRADIENTS, self.number)

    # For the session ------------------------------------------------------------------------------------------

    def introduce(self, run_toml: str) -> None:
        """Tell the other ranks the run, with which they begin their sessions."""
        self.island.send_bytes(run_toml.encode())

    def take_over(self) -> None:
        """Note that the loop has called the session: the other ranks' loops call theirs, too, and serve."""
        self._followers_serve = True

    def give_out(self, indices: NDArray[np.int64], lr_factor: float) -> NDArray[np.int64]:
        """Give all ranks their shares of a batch, (b,), and the schedule's factor; return rank 0's share."""
        self._have_loops_go_on(Command.BATCH, lr_factor)
        self.island.send_bytes(indices.tobytes())
        mine, self._share = self.island.share_of(indices)
        return mine

    def mean_loss(self, loss: Tensor) -> Tensor:
        """Return the mean loss of the batch from rank 0's."""
        return self.island.mean_loss(loss, self._share)

    def resume(self, lr_factor: float, *, loop_ends: bool = False) -> None:
        """Have the other ranks' loops go on: after a step, or behind the last batch."""
        self._have_loops_go_on(Command.LOOP_ENDS if loop_ends else Command.RESUME, lr_factor)

    def _have_loops_go_on(self, command: Command, lr_factor: float) -> None:
        self.island.send(command, _as_number(lr_factor))
        self._lr_factor, self._followers_serve = lr_factor, False

    def may_end(self, error: BaseException | None) -> bool:
        """Return whether the other ranks can take part in what comes at the session's end.

        After an error in the training loop itself they may be anywhere in theirs, and after one in rank 0's part of a
        command they wait for it in theirs."""
        if self.island.is_apart or isinstance(error, IslandBroken):
            return False
        return error is None or self._followers_serve

    def end(self) -> None:
        self.island.send(Command.END)


class _LeadWork:
    """Local work of all ranks; see ``LocalWork``."""

    def __init__(self, own: LocalWork, island: Island, number: int) -> None:
        self._own = own
        self._island = island
        self._number = number

    def step(self, samples: int, lr_factor: float) -> None:
        with self._island.carrying_out(Command.STEP, self._number, samples, _as_number(lr_factor)):
            self._own.step(samples, lr_factor)

    def contribution(self, anchor: Tensor) -> RangeReader:
        with self._island.carrying_out(Command.CONTRIBUTE, self._number):
            return self._own.contribution(anchor)

    def restart_from(self, anchor: Tensor) -> None:
        with self._island.carrying_out(Command.RESTART, self._number):
            self._own.restart_from(anchor)

    def reset_optimizer(self) -> None:
        with self._island.carrying_out(Command.RESET_OPTIMIZER, self._number):
            self._own.reset_optimizer()

    def continue_from(self, anchor: Tensor) -> None:
        with self._island.carrying_out(Command.CONTINUE, self._number):
            self._own.continue_from(anchor)


class FollowedModel:
    """A model, or a stage, on a rank that follows rank 0: its part of the local work."""

    def __init__(
        self,
        island: Island,
        run: RunFile,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        masters: MasterWeights | None = None,
        own_loop: OwnLoop | None = None,
        spread: SpreadModel | None = None,
    ) -> None:
        """Made while rank 0 makes its replica. Raises as that."""
        self._island = island
        self._optimizer = optimizer
        self._vector = _vector(island, model, masters, spread)
        frozen_parameters(model)  # all ranks gather those that are spread
        self.work = local_work(run, self._vector, optimizer, own_loop)

    def carry_out(self, command: Command, samples: int = 0, lr_factor: int = 0) -> bool:
        """Carry out a command of rank 0; returns False if it is about something else."""
        match command:
            case Command.STEP:
                self.work.step(samples, _as_float(lr_factor))
            case Command.DROP_GRADIENTS:
                self._vector.drop_gradients()
            case Command.CONTRIBUTE:
                self.work.contribution(_NOTHING)
            case Command.RESTART:
                self.work.restart_from(_NOTHING)
            case Command.CONTINUE:
                self.work.continue_from(_NOTHING)
            case Command.RESET_OPTIMIZER:
                self.work.reset_optimizer()
            case Command.GATHER_OPTIMIZER:
                assert self._optimizer is not None, "rank 0 has one, too"
                gather(self._optimizer, self._vector)
            case Command.SCATTER_OPTIMIZER:
                assert self._optimizer is not None, "rank 0 has one, too"
                scatter(self._optimizer, self._vector, self._island)
            case _:
                return False
        return True


class FollowingSession:
    """Session of a rank that follows rank 0: the same calls as of ``Session``, for the same training loop."""

    def __init__(
        self,
        island: Island,
        model: nn.Module,
        optimizer: Optimizer | None,
        *,
        masters: MasterWeights | None = None,
        own_loop: OwnLoop | None = None,
        spread: SpreadModel | None = None,
    ) -> None:
        """Made while rank 0 starts its session; returns when that has the run's state.

        Raises ``IslandBroken``, and as rank 0 for a model or an optimizer that no run can have."""
        self._island = island
        run = parse_run_file(island.receive_bytes().decode())
        self._model = FollowedModel(island, run, model, optimizer, masters, own_loop, spread)
        self.share = BatchShare(1, 1.0, 1)
        self._lr_factor = 1.0
        self._has_ended = False
        self._serve()

    def batches(self, dataset: Dataset) -> Iterator[Any]:
        """Iterate over this rank's shares of the batches that rank 0 takes, until the run ends."""
        while not self._has_ended:
            match self._serve():
                case Command.BATCH:
                    indices = np.frombuffer(self._island.receive_bytes(), np.int64).copy()
                    mine, self.share = self._island.share_of(indices)
                    yield take_batch(dataset, mine)
                case _:
                    return

    def step(self, loss: Tensor) -> None:
        """Take the inner step after ``loss.backward()``, and all that comes before the next batch on rank 0."""
        self._island.mean_loss(loss, self.share)
        if not self._has_ended:
            self._serve()

    @property
    def loss_weight(self) -> float:
        """As ``Session.loss_weight``."""
        return self.share.weight

    @property
    def lr_factor(self) -> float:
        """As ``Session.lr_factor``, and the same on all ranks."""
        return self._lr_factor

    def request_stop(self) -> None:
        """Do nothing: the island ends when rank 0 does."""

    def stepped(self, samples: int, loss: Tensor | float) -> None:
        """Raise ``UserError``, as the following ones do on all ranks."""
        raise not_in_islands("session.stepped")

    def stepped_batches(self, batches: int, loss: Tensor | float) -> None:
        raise not_in_islands("session.stepped_batches")

    def loader(self, *arguments: object, **options: object) -> Iterator[Any]:
        raise not_in_islands("session.loader")

    def counted(self, *arguments: object, **options: object) -> Iterator[Any]:
        raise not_in_islands("session.counted")

    def offer_if_due(self) -> None:
        raise not_in_islands("session.offer_if_due")

    def conclude(self) -> None:
        raise not_in_islands("session.conclude")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"session.{name} is not there on the ranks of an island that follow rank 0: only that one has it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while kind is None and not self._has_ended:
            self._serve()

    def _serve(self) -> Command:
        """Carry out commands up to the next one that is for the loop, which is returned."""
        while True:
            command, numbers = self._island.receive()
            if self._model.carry_out(command, *numbers[1:]):
                continue
            if command is Command.END:
                self._has_ended = True
            else:
                self._lr_factor = _as_float(numbers[0])
            return command


def _as_number(value: float) -> int:
    """Return a float as one of a command's numbers."""
    number: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return number


def _as_float(number: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<q", number))[0]
    return value


def _vector(
    island: Island, model: nn.Module, masters: MasterWeights | None, spread: SpreadModel | None
) -> IslandVector:
    if spread is None:
        return IslandVector(model, masters, island)
    return IslandVector(model, masters, island, spread.image, spread.row_orders)
