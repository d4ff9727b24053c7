"""Tests of member/member with the real coordinator's machine, without sockets, on the virtual clock."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fakes.memory_coordinator import MemoryCoordinator, curve_keys, identity, make_client
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.swarm import PATIENCE_S, run_toml
from tests.fakes.virtual_clock import run_virtual

from shoal.compression.range_reader import TensorReader
from shoal.peer.member.member import LAST_STATE_S, LocalMember, StageMembership
from shoal.peer.state_transfer.acquire import LocalCandidates
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.averaging.outcome import Committed, RoundOffer, RoundOutcome
from shoal.swarm.errors import Busy, ModelMismatch, NotAdmitted, RunEnded
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel, PeerToCoordinatorJoinRun
from shoal.swarm.protocol.rounds import RunView
from shoal.swarm.protocol.types import Blob, TensorSpec
from shoal.swarm.transport.limits.traffic_meter import TrafficMeter

ELEMENTS = 4096
READER = b"a joiner"


@asynccontextmanager
async def a_member(
    coordinator: MemoryCoordinator, is_ours: Callable[[RunView], bool] | None = None
) -> AsyncIterator[LocalMember]:
    node: Any = MemoryNetwork().endpoint(identity(1).peer_id)
    node.meter, node.bandwidth_bps = TrafficMeter(), 0.0
    client, _ = make_client(coordinator, node, identity(1), curve_keys(1), 0.01)
    await client.join()
    async with asyncio.TaskGroup() as tasks:
        member = LocalMember(node, client, tasks, StageMembership(client, is_ours, "it") if is_ours else None)
        yield member
        for task in member._background:
            task.cancel()


def test_no_state_is_served_while_a_round_is_averaged_here() -> None:
    async def main() -> None:
        async with a_member(MemoryCoordinator(run_toml(4))) as member:
            member.prepare_averaging((TensorSpec(name="w", shape=(ELEMENTS,)),))
            member.hold_state(AnchorState.of(torch.zeros(2, ELEMENTS), 3))
            node: Any = member.node
            served = node.blobs[Blob(kind="state", number=3)]
            member.averager.on_exchange(True)
            with pytest.raises(Busy):
                served.begin_reading(READER)
            member.averager.on_exchange(False)
            served.begin_reading(READER)
            served.end_reading(READER)

    run_virtual(main())


def test_a_member_that_was_forgotten_before_it_said_what_it_trains_joins_again() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        async with a_member(coordinator) as member:
            coordinator.events.clear()
            coordinator.restart()
            layout = (TensorSpec(name="w", shape=(ELEMENTS,)),)
            await member.describe(
                PeerToCoordinatorDescribeModel(layout=layout, corpus_digest=None, tokens_per_sample=1, samples=None)
            )
            assert member.client.joins == 2

    run_virtual(main())


def test_a_member_that_was_forgotten_outlives_a_coordinator_that_does_not_let_it_in_yet() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        async with a_member(coordinator) as member:
            coordinator.events.clear()
            coordinator.restart()  # with another's journal: it knows nobody
            coordinator.deaf_to = {PeerToCoordinatorJoinRun}
            # As who joins does it: nothing would catch an error of it but the end of the process.
            beat = asyncio.create_task(member.report_kept(()))
            await asyncio.sleep(120.0)
            assert not beat.done()
            coordinator.deaf_to = set()
            await beat
            assert member.rejoined
            assert member.client.joins == 2

    run_virtual(main())


@pytest.mark.parametrize(
    ("fetched_s", "gone_s", "back_s", "left_s"),
    [
        (None, None, None, LAST_STATE_S),
        (30.0, None, None, 30.0),
        (None, 20.0, None, 20.0 + PATIENCE_S),
        (60.0, 20.0, 22.0, 60.0),
    ],
    ids=["not for ever", "until it is fetched", "not for a host that is gone", "for one that was away a moment"],
)
def test_members_stay_for_the_last_state(
    fetched_s: float | None, gone_s: float | None, back_s: float | None, left_s: float
) -> None:
    async def main() -> None:
        async with a_member(MemoryCoordinator(run_toml(4))) as member:
            client, loop = member.client, asyncio.get_running_loop()
            began_s = loop.time()

            def show(stays: bool) -> None:
                client._view = client.view.model_copy(update={"stays": stays})
                client._changed.set()

            show(True)
            for after_s, is_away in ((gone_s, True), (back_s, False)):
                if after_s is not None:
                    loop.call_later(after_s, setattr, client, "coordinator_is_away", is_away)
            if fetched_s is not None:
                loop.call_later(fetched_s, show, False)
            await member.serve_after_end()
            assert loop.time() - began_s == pytest.approx(left_s, abs=2 * client.deadlines.heartbeat_s)
            assert member.progress.activity == "serving the model"

    run_virtual(main())


def test_a_member_that_is_removed_while_it_stays_leaves_as_from_any_run_that_has_ended() -> None:
    async def main() -> None:
        coordinator = MemoryCoordinator(run_toml(4))
        async with a_member(coordinator) as member:
            client, loop = member.client, asyncio.get_running_loop()

            async def is_over() -> None:
                raise RunEnded("the run is over")

            async def has_removed_it(*_: Any) -> Any:
                raise NotAdmitted("not a member")

            client.come_back = is_over  # type: ignore[method-assign]
            client.heartbeat = has_removed_it  # type: ignore[method-assign]
            with pytest.raises(RunEnded):  # it lacks the last state, and gets it no more
                await member.send_heartbeat()
            client._view = client.view.model_copy(update={"stays": True})
            staying = asyncio.create_task(member.serve_after_end())
            await asyncio.sleep(30.0)
            assert not staying.done()
            began_s = loop.time()
            await member.send_heartbeat()
            await staying
            assert loop.time() == began_s
            await member.send_heartbeat()  # until it has left

    run_virtual(main())


# A stage that goes to others ------------------------------------------------------------------------------


LAYOUT = (TensorSpec(name="w", shape=(ELEMENTS,)),)
MODEL = PeerToCoordinatorDescribeModel(layout=LAYOUT, corpus_digest=None, tokens_per_sample=1)


async def waits_for_a_donor(member: LocalMember) -> None:
    own = LocalCandidates(None, None, lambda state, newest: state, is_first=False)
    await member.agreed_state(own, (2, ELEMENTS), None, lambda *_, **__: None)


async def waits_for_a_verdict(member: LocalMember) -> None:
    """That it is not told any more: it goes to the stage's members."""

    async def average(offer: RoundOffer) -> RoundOutcome:
        await asyncio.Event().wait()
        raise AssertionError

    averager: Any = SimpleNamespace(average=average)
    member._averager = averager

    def step(outcome: Committed) -> Any:
        raise AssertionError

    await member.average(
        RoundOffer(0, 0, bytes(32), TensorReader(torch.zeros(ELEMENTS)), weight_tokens=4, ranges=(), loss=None),
        step,
    )


async def waits_to_say_what_it_trains(member: LocalMember) -> None:
    async def refused(*_: Any) -> Any:
        await asyncio.sleep(1.0)
        raise NotAdmitted("not a member of this stage")

    member.client.ask = refused  # type: ignore[method-assign]
    member.send_heartbeat = lambda: asyncio.sleep(1.0)  # type: ignore[method-assign]
    await member.describe(MODEL)


@pytest.mark.parametrize(
    "waits",
    [waits_for_a_donor, waits_for_a_verdict, waits_to_say_what_it_trains],
    ids=lambda one: one.__name__,
)
def test_whatever_a_stages_member_waits_for_gives_way_when_the_stage_is_taken_away(
    waits: Callable[[LocalMember], Awaitable[None]],
) -> None:
    async def main() -> None:
        coordinator, ours = MemoryCoordinator(run_toml(4)), [True]
        async with a_member(coordinator, lambda view: ours[0]) as member:
            serving = asyncio.create_task(coordinator.serve())
            await member.describe(MODEL)
            waiting = asyncio.create_task(waits(member))
            await asyncio.sleep(600.0)
            assert not waiting.done(), "as long as it takes"
            ours[0] = False
            member.client.wake()
            with pytest.raises(NotAdmitted, match=r"has given .* to another peer"):
                await asyncio.wait_for(waiting, 1.0)
            serving.cancel()

    run_virtual(main())


def test_what_is_done_before_a_stage_is_taken_away_is_done() -> None:
    async def main() -> None:
        async with a_member(MemoryCoordinator(run_toml(4)), lambda view: True) as member:
            await member.describe(MODEL)

            async def fails() -> None:
                raise ModelMismatch("as it was raised")

            with pytest.raises(ModelMismatch, match="as it was raised"):
                await member._guarded(fails())

    run_virtual(main())
