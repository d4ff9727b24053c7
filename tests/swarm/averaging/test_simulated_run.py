"""Whole runs of a small model: gradients of leased samples, averaged, stepped. Same leases, same bits."""

import asyncio
from collections.abc import Sequence

import torch
from tests.fakes.gradients import take_gradients
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.outer_steps import stepped
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm
from tests.fakes.virtual_clock import run_virtual
from torch import Tensor, nn

from shoal.compression.range_reader import whole_vector
from shoal.peer.training.algorithms import AccumulatedGradient
from shoal.peer.training.outer_optimizer import AdamW
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.averaging.outcome import Aborted, Committed
from shoal.swarm.protocol.messages import CoordinatorToPeerLease, PeerToCoordinatorRequestLease
from shoal.swarm.sample_ranges import count, merge

ROUND_SAMPLES = 48
ROUNDS = 4
OUTER = AdamW(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 1))


ELEMENTS = ParameterVector(make_model()).elements
INPUTS = torch.randn(ROUND_SAMPLES * ROUNDS, 16, generator=torch.Generator().manual_seed(6))


def loss_of(model: nn.Module, start: int, stop: int) -> Tensor:
    batch = INPUTS[start:stop]
    return nn.functional.mse_loss(model(batch).squeeze(1), batch[:, 0].sin())


class TorchMember(SimMember):
    """``speed``: samples a second."""

    def __init__(self, swarm: Swarm, number: int, latency_s: float) -> None:
        super().__init__(swarm, number, latency_s)
        self.speed = (2.0, 6.0, 20.0)[number - 1]
        self.vector = ParameterVector(model := make_model())
        self.model = model
        self.work_done = AccumulatedGradient(self.vector)
        self.anchor = whole_vector(self.vector)
        self.outer = torch.zeros(OUTER.slots, ELEMENTS)

    def apply(self, mean: Tensor) -> None:
        self.anchor, self.outer = stepped(OUTER, self.anchor, self.outer, mean, self.version)
        self.work_done.restart_from(self.anchor)

    async def train(self, start: int, stop: int) -> None:
        loss = loss_of(self.model, start, stop)
        loss.backward()  # type: ignore[no-untyped-call]
        self.work_done.step(stop - start, 1.0)
        await asyncio.sleep((stop - start) / self.speed)
        self.done = merge([*self.done, (start, stop)])

    async def until_version(self, version: int) -> None:
        """Live as a session does: lease, train, close, as often as it takes."""
        while self.version < version:
            due = self.view.round != self.round or self.view.phase in ("closing", "averaging")
            if due:
                await self.average(whole_vector(self.work_done.contribution(self.anchor)))
                continue
            ask = PeerToCoordinatorRequestLease(round=self.round, samples=4, tokens_done=count(self.done))
            answer = await self.client.ask(ask, CoordinatorToPeerLease)
            for one in answer.ranges:
                await self.train(one.start, one.stop)
            await self.beat()
            if not answer.ranges:
                await self.client.wait_for(lambda view: view.round != self.round or view.phase != "training", 0.5)


def simulate(codec: str, seed: int) -> tuple[Tensor, list[int]]:
    """The last anchor, and how many samples each member has trained on."""

    async def main() -> tuple[Tensor, list[int]]:
        toml = run_toml(ROUND_SAMPLES, codec, "virtual_batch")
        async with swarm(3, toml, ELEMENTS, MemoryNetwork(seed), make=TorchMember) as run:
            async with asyncio.TaskGroup() as tasks:
                for member in run.members:
                    assert isinstance(member, TorchMember)
                    tasks.create_task(member.until_version(ROUNDS))
            assert all(torch.equal(member.anchor, run[0].anchor) for member in run.members)
            members = run.coordinator.machine.scope.membership.members
            return run[0].anchor, [members[member.peer].tokens_committed for member in run.members]

    return run_virtual(main())


def test_the_same_run_again_gives_the_same_bits() -> None:
    first, samples = simulate("int8", 1)
    again, same = simulate("int8", 1)
    assert torch.equal(first, again)
    assert samples == same
    assert sum(samples) == ROUNDS * ROUND_SAMPLES
    assert samples[0] < samples[1] < samples[2], "the fast do more"


def test_a_virtual_batch_is_the_batch_of_one_machine() -> None:
    model = make_model()
    vector = ParameterVector(model)
    anchor, outer = whole_vector(vector), torch.zeros(OUTER.slots, ELEMENTS)
    for number in range(ROUNDS):
        loss_of(model, number * ROUND_SAMPLES, (number + 1) * ROUND_SAMPLES).backward()  # type: ignore[no-untyped-call]
        anchor, outer = stepped(OUTER, anchor, outer, take_gradients(vector), number)
        vector.write(anchor)
    found, _ = simulate("float32", 2)
    torch.testing.assert_close(found, anchor, atol=2e-4, rtol=0)
    assert float((found - whole_vector(ParameterVector(make_model()))).abs().max()) > 100 * 2e-4


def with_fixed_leases(seed: int, latencies_s: tuple[float, float], pauses_s: Sequence[float]) -> Tensor:
    """Everybody always gets the same samples; only the times differ."""

    async def main() -> Tensor:
        network = MemoryNetwork(seed, latencies_s, (1e6, 1e9))
        toml = run_toml(ROUND_SAMPLES, "int8", "virtual_batch")
        async with swarm(3, toml, ELEMENTS, network, latencies_s[1] / 10, TorchMember) as run:

            async def member_round(member: TorchMember, pause_s: float) -> None:
                await asyncio.sleep(pause_s)
                while isinstance(
                    outcome := await member.average(whole_vector(member.work_done.contribution(member.anchor))), Aborted
                ):
                    pass
                assert isinstance(outcome, Committed)
                assert outcome.included

            for _ in range(ROUNDS):
                for member in run.members:
                    assert isinstance(member, TorchMember)
                    while count(member.done) < ROUND_SAMPLES // 3:
                        rest = ROUND_SAMPLES // 3 - count(member.done)
                        tokens = count(member.done)
                        ask = PeerToCoordinatorRequestLease(
                            round=member.round, samples=min(4, rest), tokens_done=tokens
                        )
                        answer = await member.client.ask(ask, CoordinatorToPeerLease)
                        for one in answer.ranges:
                            await member.train(one.start, one.stop)
                        await member.beat()
                async with asyncio.TaskGroup() as tasks:
                    for member, pause_s in zip(run.members, pauses_s, strict=True):
                        assert isinstance(member, TorchMember)
                        tasks.create_task(member_round(member, pause_s))
            assert all(torch.equal(member.anchor, run[0].anchor) for member in run.members)
            return run[0].anchor

    return run_virtual(main())


def test_other_orders_of_arrival_give_the_same_bits() -> None:
    first = with_fixed_leases(1, (0.001, 0.01), (0.0, 0.0, 0.0))
    assert torch.equal(first, with_fixed_leases(2, (0.0, 0.5), (1.5, 0.0, 0.7)))
    assert torch.equal(first, with_fixed_leases(3, (0.2, 0.3), (0.0, 2.0, 0.1)))
