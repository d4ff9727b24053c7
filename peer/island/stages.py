"""Stages of a pipeline that an island holds: rank 0 has the member's networking, and all ranks compute.

A micro-batch's tensors go from rank 0 to all ranks, each of which computes its share of the samples, and the shares of
the results come back. Layers that mix samples, or draw random numbers, are computed by every rank for all samples, so
that another replica that computes the micro-batch again finds the same."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from shoal.peer.island.group import Command, Island
from shoal.peer.island.ranks import FollowedModel, IslandLead, SpreadModel
from shoal.peer.island.spreading import DATA_PARALLEL, check_cuts, spread_model
from shoal.peer.island.vector import IslandVector
from shoal.peer.pipeline.compute import BackwardResult, ComputeSettings, HeldStage, MicroBatchKey, StageCompute
from shoal.peer.pipeline.training import MakeCompute
from shoal.peer.training.data import BatchShare
from shoal.peer.training.device import MemoryBytes, autocast
from shoal.peer.training.device_streams import moved
from shoal.peer.training.layers import Layered, LayeredRecipe, StageModel
from shoal.peer.training.parameters import MasterWeights
from shoal.peer.training.tensor_parallel import Cut
from shoal.swarm.errors import WireError
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import RunFile

log = logging.getLogger(__name__)

# Shares of a micro-batch ------------------------------------------------------------------------------------


class RankShares:
    """``MicroBatchShares`` of an island. ``divides``: whether the ranks share the samples, or compute all of them."""

    def __init__(self, island: Island, *, divides: bool) -> None:
        self._island = island
        self.divides = divides and island.groups > 1

    @property
    def groups(self) -> int:
        return self._island.groups if self.divides else 1

    def of(self, whole: Tensor) -> tuple[Tensor, BatchShare]:
        if not self.divides:
            return whole, BatchShare(len(whole), len(whole), len(whole))
        rows, share = self._island.rows_of(len(whole))
        return whole[rows], share

    def gathered(self, mine: Tensor, samples: int) -> Tensor:
        if not self.divides:
            return mine
        counts = self._island.samples_by_group(samples)
        padded = mine.new_zeros((max(counts), *mine.shape[1:]))
        padded[: len(mine)] = mine
        found = self._island.gather_from_groups(padded, DATA_PARALLEL)
        return torch.cat([one[:count] for one, count in zip(found, counts, strict=True)])

    def mean_loss(self, loss: Tensor, share: BatchShare) -> Tensor:
        return self._island.mean_loss(loss, share) if self.divides else loss.detach().float()


# Rank 0 -----------------------------------------------------------------------------------------------------


class StageLead(IslandLead):
    """Rank 0's end of the island for one stage."""

    def vector(self, model: nn.Module, masters: MasterWeights | None) -> IslandVector:
        self.island.send(Command.HOLD_STAGE, self.number)
        return super().vector(model, masters)


class StageRanks:
    """Rank 0's end of an island that holds stages of a pipeline, one span after the other."""

    def __init__(self, island: Island, cuts: Mapping[str, Cut]) -> None:
        """``cuts``: layers that are cut among the ranks of tensor parallelism."""
        self._island = island
        self._cuts = cuts
        self._mixes = False

    @property
    def ranks(self) -> int:
        return self._island.ranks

    def memory(self, run: RunFile, of_one: MemoryBytes) -> MemoryBytes:
        """Return the memory that planners may count with, as for a single device, from that of the first device.

        Every group of ranks has its part of the parameters and of the samples, but the image of the parameters is in
        the machine's memory besides."""
        alone, here = account_of(run).demand(), account_of(run, ranks=self.ranks).demand()
        if of_one.device is None:
            return MemoryBytes(int(of_one.host * alone.shared / here.shared), None)
        return MemoryBytes(int(of_one.host * alone.host / here.host), of_one.device * self._island.groups)

    def enter_stage(self, number: int, layers: tuple[int, int], model: StageModel, *, mixes: bool) -> StageLead:
        """Spread a stage's layers, from the first to before the second number, over the ranks.

        ``model``: has them, on the CPU; ``mixes``: see ``mixes_samples``. Raises ``IslandBroken``, and ``DeviceError``
        for layers that cannot be cut."""
        check_cuts(model, self._cuts, self._island.tensor_parallel)
        if mixes and self._island.groups > 1:
            self._mixes = True
            log.warning(
                "the layers of stage %d mix the samples of a micro-batch, or draw random numbers: each device computes "
                "all samples, and only the parameters are spread",
                number,
            )
        with self._island.carrying_out(Command.ENTER_STAGE, number, *layers):
            spread = spread_model(model, self._island, self._cuts)
        return StageLead(self._island, spread, number)

    def shares(self) -> RankShares:
        """Return the shares of a micro-batch in the stages that were entered."""
        return RankShares(self._island, divides=not self._mixes)

    def begin_span(self, settings: Mapping[int, ComputeSettings], *, is_last: bool) -> MakeCompute:
        """Have the ranks compute micro-batches that enter at these stages; returns a maker of rank 0's computations."""
        about = {
            "inputs": {number: one.input_shape for number, one in settings.items()},
            "recompute": any(one.recompute for one in settings.values()),
            "divides": not self._mixes,
            "is_last": is_last,
        }
        with self._island.carrying_out(Command.BEGIN_SPAN):
            self._island.send_bytes(json.dumps(about).encode())
        return partial(LeadCompute, self._island)

    def leave_span(self) -> None:
        """Have the other ranks drop all stages."""
        self._mixes = False
        self._island.send(Command.LEAVE_SPAN)

    def end(self) -> None:
        """Have the other ranks end, unless they wait for rank 0's part of something."""
        if not self._island.is_apart:
            self._island.send(Command.END)


class LeadCompute(StageCompute):
    """Passes through stages that all ranks compute; see ``StageCompute``."""

    def __init__(
        self, island: Island, stages: Sequence[HeldStage], settings: ComputeSettings, loss: LayeredRecipe | None
    ) -> None:
        super().__init__(stages, settings, loss)
        self._island = island
        self._device = settings.device
        self._span = stages[0].number, stages[-1].number

    def forward(self, key: MicroBatchKey, given: Tensor) -> Tensor | None:
        with self._island.carrying_out(Command.FORWARD, *self._span):
            (given,) = self._tell(key, (), given)
            return super().forward(key, given)

    def backward(self, key: MicroBatchKey, received: Tensor, accumulate: Collection[int]) -> BackwardResult:
        with self._island.carrying_out(Command.BACKWARD, *self._span):
            (received,) = self._tell(key, accumulate, received)
            return super().backward(key, received, accumulate)

    def repeat(self, key: MicroBatchKey, given: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor | None]:
        with self._island.carrying_out(Command.REPEAT, *self._span, self._loss is not None):
            given, *more = self._tell(key, (), given, *(() if received is None else (received,)))
            return super().repeat(key, given, more[0] if more else None)

    def drop(self, key: MicroBatchKey) -> None:
        with self._island.carrying_out(Command.DROP, *self._span):
            self._tell(key, ())
            super().drop(key)

    def _tell(self, key: MicroBatchKey, accumulate: Collection[int], *tensors: Tensor) -> list[Tensor]:
        """Give the other ranks what a computation is of; return the tensors on the device."""
        here = [moved(one.detach(), self._device).contiguous() for one in tensors]
        about = {
            "key": [key.round, key.start, key.stop, key.job],
            "accumulate": sorted(accumulate),
            "tensors": [[list(one.shape), str(one.dtype).removeprefix("torch.")] for one in here],
        }
        self._island.send_bytes(json.dumps(about).encode())
        for one in here:
            self._island.broadcast_on_devices(one)
        return here


# Other ranks ------------------------------------------------------------------------------------------------


class FollowingStages:
    """Stages of a rank that follows rank 0."""

    def __init__(
        self, island: Island, run: RunFile, recipe: LayeredRecipe, device: torch.device, cuts: Mapping[str, Cut]
    ) -> None:
        self._island = island
        self._run = run
        self._recipe = recipe
        self._layered: Layered = recipe.layers(run.run.seed)
        self._device = device
        self._cuts = cuts
        self._entered: dict[int, tuple[int, StageModel, SpreadModel]] = {}
        self._followed: dict[int, FollowedModel] = {}
        self._held: list[HeldStage] = []
        self._settings: dict[int, ComputeSettings] = {}
        self._computes: dict[int, StageCompute] = {}

    def serve(self) -> None:
        """Carry out rank 0's commands until it ends. Raises ``IslandBroken``."""
        while True:
            command, numbers = self._island.receive()
            if command is Command.END:
                return
            if (followed := self._followed.get(numbers[0])) and followed.carry_out(command, *numbers[1:]):
                continue
            with suppress(WireError):  # rank 0 finds it, too
                self._carry_out(command, numbers)

    def _carry_out(self, command: Command, numbers: list[int]) -> None:
        match command:
            case Command.ENTER_STAGE:
                number, first, stop = numbers
                model = self._layered.build(first, stop)
                self._entered[number] = first, model, spread_model(model, self._island, self._cuts)
            case Command.HOLD_STAGE:
                first, model, spread = self._entered[numbers[0]]
                followed = self._followed[numbers[0]] = FollowedModel(self._island, self._run, model, spread=spread)
                self._held.append(HeldStage(numbers[0], first, model, followed.work))
            case Command.BEGIN_SPAN:
                self._begin_span()
            case Command.LEAVE_SPAN:
                for dropped in (self._entered, self._followed, self._held, self._settings, self._computes):
                    dropped.clear()
            case _:
                self._compute(command, *numbers)

    def _begin_span(self) -> None:
        about = json.loads(self._island.receive_bytes())
        assert self._run.pipeline is not None
        shares = RankShares(self._island, divides=about["divides"])
        for at, stage in enumerate(self._held):
            shape = about["inputs"][str(stage.number)]
            settings = self._settings[stage.number] = ComputeSettings(
                device=self._device,
                autocast=autocast(self._device, self._run.inner.precision),
                max_in_flight=self._run.pipeline.in_flight,
                recompute=about["recompute"],
                seed=self._run.run.seed,
                input_shape=None if shape is None else tuple(shape),
                shares=shares,
            )
            loss = self._recipe if about["is_last"] else None
            self._computes[stage.number] = StageCompute(self._held[at:], settings, loss)

    def _compute(self, command: Command, first: int, last: int, is_end: int) -> None:
        about = json.loads(self._island.receive_bytes())
        key, tensors = MicroBatchKey(*about["key"]), []
        for shape, dtype in about["tensors"]:
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=self._device))
            self._island.broadcast_on_devices(tensors[-1])
        match command:
            case Command.FORWARD:
                self._computes[first].forward(key, tensors[0])
            case Command.BACKWARD:
                self._computes[first].backward(key, tensors[0], about["accumulate"])
            case Command.REPEAT:
                held = [stage for stage in self._held if first <= stage.number <= last]
                again = StageCompute(held, self._settings[first], self._recipe if is_end else None)
                again.repeat(key, tensors[0], tensors[1] if len(tensors) > 1 else None)
            case Command.DROP:
                self._computes[first].drop(key)
            case _:
                raise AssertionError(f"{command.name} is not about stages")
