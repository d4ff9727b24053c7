"""Members of a simulated run that hold a real state, keep records of rounds, and catch up by those of others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.swarm import PATIENCE_S, SimMember, Swarm, swarm
from torch import Tensor

from shoal.peer.history.catch_up import RoundApplier, RoundCatchUp
from shoal.peer.history.record_archive import RecordArchive
from shoal.peer.history.round_records import RECORDS, RecordOwner, RoundRecords
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.outer_optimizer import make_outer
from shoal.swarm.averaging.averager import Averager
from shoal.swarm.averaging.outcome import Committed, RoundOutcome
from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import TensorSpec


class StatefulMember(SimMember):
    """``state`` is made by the run's outer optimizer, and anchors begin at zero. ``folder``: where records go."""

    folder: Path
    keeper: RecordArchive
    missed: RoundCatchUp

    def __init__(self, swarm: Swarm, number: int, latency_s: float) -> None:
        super().__init__(swarm, number, latency_s)
        self.outer = make_outer(swarm.coordinator.run.outer)
        self.initial = AnchorState.make(torch.zeros(self.elements), torch.zeros(self.outer.slots, self.elements), 0)
        self.state = self.initial
        self.states = [self.initial]

    @property
    def digest(self) -> bytes:
        return self.state.digest

    async def _make_averager(self, tasks: asyncio.TaskGroup) -> Averager:
        run = self.client.run_file
        self.steps = RoundApplier(run, [TensorSpec(name="w", shape=(1, self.elements))])
        records = RoundRecords(self.folder / self.peer / RECORDS, RecordOwner(run.hash, self.client.coordinator_key))
        self.keeper = RecordArchive(records, self.endpoint, tasks, 0, lambda: None)
        await self.keeper.start()
        self.missed = RoundCatchUp(
            self.steps, self.endpoint, self.keeper, self.verdicts_from, self.donors, lambda: self.view, PATIENCE_S / 2
        )
        return Averager(self.client, self.endpoint, self.steps.codec_map, self.elements, self.keeper)

    def donors(self) -> list[str]:
        return [member.peer for member in self.swarm.members if member is not self]

    async def verdicts_from(self, first: int) -> list[Verdict]:
        events = [event for event in self.swarm.coordinator.events if isinstance(event, VerdictGiven)]
        return [event.verdict for event in events if event.verdict.round >= first]

    def apply(self, mean: Tensor) -> None:
        """Apply nothing yet: the state changes with the verdict."""

    async def average(self, contribution: Tensor) -> RoundOutcome:
        outcome = await super().average(contribution)
        if isinstance(outcome, Committed):
            self.hold_state(self.steps.apply(self.state.copy(), outcome.verdict, outcome.mean))
        return outcome

    def hold_state(self, state: AnchorState) -> None:
        self.state, self.anchor, self.version = state, state.anchor, state.version
        self.states.append(state)

    # Cut off ------------------------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """Cut the member off: it notices nothing, and nobody hears of it."""
        self.channel.open = False
        self.endpoint.alive = False

    async def come_back(self) -> None:
        """Join again as a member, with the state that it held."""
        self.channel.open = self.endpoint.alive = True
        await self.client.join()
        self.done, self.round = [], self.view.round


@asynccontextmanager
async def stateful_swarm(
    folder: Path, members: int, toml: str, elements: int, network: MemoryNetwork | None = None
) -> AsyncIterator[tuple[Swarm, list[StatefulMember]]]:
    """Yield the run, and its members in the order of plans."""

    class Member(StatefulMember):
        pass

    Member.folder = folder
    async with swarm(members, toml, elements, network, make=Member) as run:
        found = [run[index] for index in range(members)]
        assert all(isinstance(member, StatefulMember) for member in found)
        yield run, found  # type: ignore[misc]


async def play_rounds(
    members: list[StatefulMember], rounds: int, samples: int, contribution: Callable[[int], Tensor]
) -> None:
    """That many rounds of these, each member with a contribution of its own, which all have to be committed."""
    for number in range(rounds):
        async with asyncio.TaskGroup() as tasks:
            plays = [
                tasks.create_task(member.play(contribution(100 * number + index), samples))
                for index, member in enumerate(members)
            ]
        assert all(isinstance(play.result(), Committed) for play in plays)
        assert len({member.digest for member in members}) == 1, "parity"
        await asyncio.sleep(0.01)  # what is written beside
