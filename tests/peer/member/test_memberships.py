"""Tests of member/memberships: one process in several stages, with real nodes, coordinator scopes and replicas."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.memory_coordinator import MemoryCoordinator, identity
from tests.fakes.node_coordinator import HOST, serve
from tests.fakes.swarm import run_toml
from torch import Tensor, nn

from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CHECKPOINTS, CheckpointStore
from shoal.peer.folders import stage_folder
from shoal.peer.history.history_file import HISTORY_FILE
from shoal.peer.history.round_records import RECORDS
from shoal.peer.member.member import LocalMember
from shoal.peer.member.memberships import Memberships, scope_of
from shoal.peer.member.replica import TrainingReplica, TrainingSetup
from shoal.peer.network_thread import NetworkThread
from shoal.peer.state_transfer.acquire import LocalCandidates
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.data import DataAbout
from shoal.swarm.client.coordinator_client import MemberInfo
from shoal.swarm.errors import RunEnded, WireError
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.types import DeviceInfo, TensorSpec

STAGES, PEERS, ROUNDS, SAMPLES = 2, 2, 3, 4
TOML = run_toml(PEERS * SAMPLES, algorithm="virtual_batch")
ELEMENTS = 4096
LAYOUT = (TensorSpec(name="w", shape=(ELEMENTS,)),)
LONG_S = 30.0


def describe() -> MemberInfo:
    return MemberInfo(name="fake", role="trainer", device=DeviceInfo(kind="cpu", name="fake", memory_bytes=0))


@asynccontextmanager
async def hosted(stages: int) -> AsyncIterator[tuple[Invite, MemoryCoordinator]]:
    coordinator = MemoryCoordinator(TOML)
    for stage in range(stages):
        coordinator.add_scope(scope_of(stage), TOML)
    async with serve(coordinator) as invite:
        yield invite, coordinator


def opened(invite: Invite, number: int) -> Any:
    return Memberships.open(invite, identity(number), (HOST, 0), describe)


def trainers(coordinator: MemoryCoordinator) -> dict[int, int]:
    """How many there are, by scope."""
    return {scope: len(one.machine.scope.membership.trainers()) for scope, one in coordinator.scopes.items()}


def run(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def wrapper() -> None:
        async def main() -> None:
            async with asyncio.timeout(LONG_S):
                await test()

        asyncio.run(main())

    wrapper.__name__ = test.__name__
    return wrapper


# Memberships --------------------------------------------------------------------------------------------


@run
async def test_stages_are_entered_and_left_at_any_time() -> None:
    async with hosted(STAGES) as (invite, coordinator):
        async with opened(invite, 1) as members:
            assert trainers(coordinator) == {0: 1, 1: 0, 2: 0}
            await members.enter(1)
            first = await members.enter(0)
            assert list(members.stages) == [0, 1]
            assert members.stages[0] is first
            assert trainers(coordinator) == {0: 1, 1: 1, 2: 1}
            assert len(members.run.node.control._dialed) == 1, "all over one connection"
            await members.leave(1)
            assert list(members.stages) == [0]
            assert trainers(coordinator) == {0: 1, 1: 1, 2: 0}
            assert members.run.client._clients == [members.run.client, first.client]
            assert {scope for _, scope, _ in members.run.node.control._handlers} == {0, 1}
            await first.send_heartbeat()
            await members.run.send_heartbeat()
            await members.enter(1)
            assert trainers(coordinator) == {0: 1, 1: 1, 2: 1}
        assert trainers(coordinator) == {0: 0, 1: 0, 2: 0}


@run
async def test_who_enters_while_everything_ends_waits_for_the_reason() -> None:
    async with asyncio.TaskGroup() as over:
        pass
    members: Any = Memberships(None, over)  # type: ignore[arg-type]
    entering = asyncio.create_task(members.enter(0))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not entering.done()
    await members.leave_all()
    entering.cancel()


@run
async def test_a_stage_that_cannot_be_joined_is_its_callers_error_and_nobody_elses() -> None:
    async with hosted(1) as (invite, _), opened(invite, 1) as members:
        held = await members.enter(0)
        with pytest.raises(WireError, match="scope 2"):
            await members.enter(1)
        assert list(members.stages) == [0]
        await held.send_heartbeat()
        await members.leave(0)
        await members.enter(0)


@run
async def test_what_ends_a_stay_ends_the_process() -> None:
    async with hosted(1) as (invite, _):
        with pytest.raises(RunEnded):  # noqa: PT012
            async with opened(invite, 1) as members:
                stage = await members.enter(0)

                async def ended(*_: Any) -> None:
                    raise RunEnded("for the test")

                stage.client.heartbeat = ended  # type: ignore[method-assign]
                stage._beat_now.set()
                await asyncio.Event().wait()


@run
async def test_who_is_only_in_a_stage_with_us_is_let_in() -> None:
    async with hosted(STAGES) as (invite, _), opened(invite, 1) as ours, opened(invite, 2) as theirs:
        await ours.enter(1)
        stage = await theirs.enter(1)
        key = theirs.run.node.control.keys.public
        # As of a roster of the run that they are not on; the stage's is not here yet.
        ours.run.node.update_roster(())
        ours.run.node.update_roster((), scope_of(1))
        ours.stages[1].client._roster_version = 0
        ours.run.client._view = ours.run.client.view.model_copy(update={"sequence": 2**62})
        assert not ours.run.node.knows_key(key)
        assert await ours.run.client.admit(key)
        assert stage.client.peer in ours.run.node.trainers(scope_of(1))
        assert ours.run.node.trainers() == []


def states(seed: int) -> AnchorState:
    return AnchorState.of(torch.randn(2, ELEMENTS, generator=torch.Generator().manual_seed(seed)), 0)


async def describe_model(member: LocalMember) -> None:
    await member.describe(PeerToCoordinatorDescribeModel(layout=LAYOUT, corpus_digest=bytes(32), tokens_per_sample=1))


@run
async def test_each_stage_has_its_own_state_from_its_own_donors() -> None:
    async with hosted(STAGES) as (invite, _), opened(invite, 1) as donor, opened(invite, 2) as joiner:
        for stage in range(STAGES):
            member = await donor.enter(stage)
            await describe_model(member)
            member.hold_state(states(stage))
            await member.send_heartbeat()
        for stage in reversed(range(STAGES)):
            member = await joiner.enter(stage)
            await describe_model(member)
            own = LocalCandidates(None, None, lambda state, newest: state, is_first=False)
            found = await member.agreed_state(own, (2, ELEMENTS), None, lambda *_, **__: None)
            assert found.digest == states(stage).digest
            assert torch.equal(found.values, states(stage).values)
        assert joiner.stages[0].state is not joiner.stages[1].state


# Replicas -----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A stage whose gradient is the mean of the samples' whole numbers: exact in any order."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3 + 2 * stage))

    def loss(self, start: int, stop: int) -> Tensor:
        samples = torch.arange(start, stop).unsqueeze(1) * (1 + torch.arange(self.weight.numel())) % 16
        return (samples.float() * self.weight).sum(1).mean()


class Holding:
    """A replica of one stage, or of the run where that is all there is."""

    def __init__(self, network: NetworkThread[Any], member: LocalMember, stage: int, folder: Path, number: int) -> None:
        self.folder, self.member, self.network = folder, member, network
        run_file = member.client.run_file
        store = CheckpointStore(folder / CHECKPOINTS, run_file.hash, identity(number), Retention())
        network.call(member.keep_records(folder / RECORDS, store.oldest_of_newest))
        self.layer = Layer(stage)
        about = DataAbout(bytes(32), "none", 1)
        self.events: list[str] = []
        self.replica = TrainingReplica(
            run_file,
            TrainingSetup(self.layer, data=about),
            network,
            member,
            folder,
            store,
            lambda event, **_: self.events.append(event),
        )
        self.replica.register(about)
        self.replica.sync_state()

    def train(self) -> None:
        """As many samples as everybody does in a round."""
        samples = self.replica.samples
        while samples.tokens_done < SAMPLES:
            for one in self.network.call(self.member.lease(SAMPLES - samples.tokens_done, samples.undone())):
                samples.add_lease(one.start, one.stop)
            while (bounds := samples.next_batch(1)) is not None:
                loss = self.layer.loss(*bounds)
                loss.backward()  # type: ignore[no-untyped-call]
                self.replica.step(samples.finish_batch(loss), 1.0)
            self.member.progress.tokens_done = samples.tokens_done
            self.network.call(self.member.send_heartbeat())

    @property
    def digest(self) -> bytes:
        assert self.replica.state is not None
        return self.replica.state.digest


@contextmanager
def thread(context: Callable[[], Any]) -> Iterator[NetworkThread[Any]]:
    network: NetworkThread[Any] = NetworkThread(context)
    network.start()
    try:
        yield network
    finally:
        network.stop()


def rounds(holdings: list[list[Holding]], number: int = ROUNDS) -> None:
    """Of each process, what it holds: all is offered before anything is concluded."""
    for _ in range(number):
        for held in holdings:
            for holding in held:
                holding.train()
        for held in holdings:
            for holding in held:
                assert holding.replica.begin_exchange()
        for held in holdings:
            for holding in held:
                assert holding.replica.exchanging
                assert holding.replica.conclude_round()


def separately(stage: int, folder: Path) -> bytes:
    """The state's digest when the stage is a run of its own."""
    with thread(lambda: hosted(0)) as host:
        invite, _ = host.resource

        def member(number: int) -> Any:
            return LocalMember.open(invite, identity(number), (HOST, 0), describe)

        with thread(lambda: member(1)) as one, thread(lambda: member(2)) as other:
            held = [
                [Holding(network, network.resource, stage, folder / f"{number}", number)]
                for number, network in ((1, one), (2, other))
            ]
            rounds(held)
            (digest,) = {holding.digest for (holding,) in held}
            return digest


def test_replicas_of_several_stages_in_one_process_are_averaged_as_runs_of_their_own(tmp_path: Path) -> None:
    with thread(lambda: hosted(STAGES)) as host:
        invite, coordinator = host.resource
        with thread(lambda: opened(invite, 1)) as one, thread(lambda: opened(invite, 2)) as other:
            held: list[list[Holding]] = []
            for number, network in ((1, one), (2, other)):
                members: Memberships = network.resource
                held.append([])
                for stage in range(STAGES):
                    member = network.call(members.enter(stage))
                    folder = stage_folder(tmp_path / f"{number}", stage)
                    held[-1].append(Holding(network, member, stage, folder, number))
            rounds(held)
            for stage in range(STAGES):
                (digest,) = {held[peer][stage].digest for peer in range(PEERS)}
                assert digest == separately(stage, tmp_path / f"alone {stage}")
                assert held[0][stage].replica.vector.elements == 3 + 2 * stage
                assert held[0][stage].events == ["synced"] + ROUNDS * ["committed"]
            first, second = held[0]
            # The second stage is left, the first one goes on; then whoever left it comes back to it.
            first.replica.save_checkpoint()
            second.replica.save_checkpoint()
            one.call(one.resource.leave(1))
            rounds([[first], held[1][:1]], 1)
            (digest,) = {first.digest, held[1][0].digest}
            assert first.replica.state is not None
            assert first.replica.state.version == ROUNDS + 1
            back = Holding(one, one.call(one.resource.enter(1)), 1, second.folder, 1)
            assert back.digest == held[1][1].digest == second.digest
            rounds([[back], held[1][1:]], 1)
            assert back.digest == held[1][1].digest != second.digest
            for holding in (first, second):
                kept = {path.name for path in holding.folder.iterdir()}
                assert {CHECKPOINTS, RECORDS, HISTORY_FILE} <= kept
                assert list((holding.folder / CHECKPOINTS).iterdir())
            assert first.folder.name == "stage-00000"
            assert coordinator.scopes[2].machine.scope.anchor_version == ROUNDS + 1
