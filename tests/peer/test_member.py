"""A member's own wiring, with the real coordinator's machine and no sockets: on the virtual clock."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from tests.fakes.memory_coordinator import MemoryCoordinator, curve_keys, identity, make_client
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.swarm import run_toml
from tests.fakes.virtual_clock import run_virtual

from shoal.peer.member import Member
from shoal.peer.state import State
from shoal.swarm.errors import Busy
from shoal.swarm.links import Meter
from shoal.swarm.messages import Blob, PeerToCoordinatorDescribeModel, PeerToCoordinatorJoinRun, TensorSpec

ELEMENTS = 4096
READER = b"a joiner"


@asynccontextmanager
async def a_member(coordinator: MemoryCoordinator) -> AsyncIterator[Member]:
    node: Any = MemoryNetwork().endpoint(identity(1).peer_id)
    node.meter = Meter()
    client, _ = make_client(coordinator, node, identity(1), curve_keys(1), 0.01)
    await client.join()
    async with asyncio.TaskGroup() as tasks:
        yield Member(node, client, tasks)


def test_no_state_is_served_while_a_round_is_averaged_here() -> None:
    async def main() -> None:
        async with a_member(MemoryCoordinator(run_toml(4))) as member:
            member.prepare_averaging((TensorSpec(name="w", shape=(ELEMENTS,), dtype="float32"),))
            member.hold(State.of(torch.zeros(2, ELEMENTS), 3))
            node: Any = member.node
            served = node.blobs[Blob(kind="state", number=3)]
            member.averager.on_exchange(True)
            with pytest.raises(Busy):
                served.begin(READER)
            member.averager.on_exchange(False)
            served.begin(READER)
            served.end(READER)

    run_virtual(main())


def test_a_member_that_was_forgotten_before_it_said_what_it_trains_joins_again() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        async with a_member(coordinator) as member:
            coordinator.facts.clear()
            coordinator.restart()
            layout = (TensorSpec(name="w", shape=(ELEMENTS,), dtype="float32"),)
            await member.describe(
                PeerToCoordinatorDescribeModel(
                    layout=layout, corpus_digest=None, corpus_about="", tokens_per_sample=1, samples=None
                )
            )
            assert member.client.joins == 2

    run_virtual(main())


def test_a_member_that_was_forgotten_outlives_a_coordinator_that_does_not_let_it_in_yet() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        async with a_member(coordinator) as member:
            coordinator.facts.clear()
            coordinator.restart()  # with another's journal: it knows nobody
            coordinator.deaf_to = {PeerToCoordinatorJoinRun}
            # As who joins does it: nothing would catch an error of it but the end of the process.
            beat = asyncio.create_task(member.tell(()))
            await asyncio.sleep(120.0)
            assert not beat.done()
            coordinator.deaf_to = set()
            await beat
            assert member.rejoined
            assert member.client.joins == 2

    run_virtual(main())
