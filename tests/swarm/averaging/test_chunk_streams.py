import asyncio
import functools
import itertools

import pytest
import torch
from tests.fakes.memory_network import MemoryNetwork, UplinkNetwork
from tests.fakes.swarm import SimMember, Swarm, run_toml, swarm, together
from tests.fakes.virtual_clock import now_s, run_virtual

from shoal.swarm.averaging.chunk_streams import Chunks, DeliveryMeter, MemberMeters, StreamMeter, receive_chunks
from shoal.swarm.averaging.outcome import Committed
from shoal.swarm.protocol.types import MAX_DELIVERIES, Blob, Delivery

MIB = 2**20
BROUGHT, MADE = Blob(kind="contribution", number=1), Blob(kind="result", number=1)


def test_bits_by_the_time_that_was_waited() -> None:
    meter = DeliveryMeter()
    meter.began(10.0)
    meter.arrived(MIB, 10.5, waited_s=0.5, paused_s=0.0)
    meter.arrived(MIB, 11.0, waited_s=0.25, paused_s=0.25)
    assert meter.bps == 8 * 2 * MIB / 1.0


def test_what_had_been_lying_here_tells_nothing() -> None:
    meter = DeliveryMeter()
    meter.arrived(MIB, 10.0, waited_s=0.5, paused_s=0.1)
    before = meter.bps
    meter.arrived_beside(MIB)
    meter.arrived(MIB, 13.001, waited_s=0.001, paused_s=3.0)
    assert meter.bps == before
    meter.arrived(MIB, 13.601, waited_s=0.6, paused_s=0.0)
    assert meter.bps == pytest.approx(8 * 2 * MIB / 1.2)


def test_streams_beside_each_other_share_the_time() -> None:
    meter = DeliveryMeter()
    for _ in range(2):
        meter.began(10.0)
    for second in (11.0, 12.0, 13.0):
        for _ in range(2):
            meter.arrived(MIB, second, waited_s=1.0, paused_s=0.0)
    assert meter.bps == 8 * 6 * MIB / 3.0


def test_results_that_come_meanwhile_over_the_same_link_count() -> None:
    meter = DeliveryMeter()
    meter.arrived_beside(MIB)  # before we asked for anything
    meter.began(10.0)
    meter.arrived_beside(MIB)
    meter.arrived(MIB, 11.0, waited_s=1.0, paused_s=0.0)
    meter.arrived(MIB, 12.0, waited_s=1.0, paused_s=0.0)
    assert meter.bps == 8 * 3 * MIB / 2.0


def test_little_tells_nothing() -> None:
    meter = DeliveryMeter()
    assert meter.bps is None
    meter.arrived(1000, 10.0, waited_s=0.5, paused_s=0.0)
    assert meter.bps is None


class _Bytes:
    """Chunks of 64 KiB."""

    chunks = 32

    async def chunk(self, index: int) -> memoryview:
        return memoryview(bytes(2**16))


def test_a_fetch_is_measured_without_its_callers_own_time() -> None:
    async def main() -> None:
        network = MemoryNetwork(latency_s=(0.1, 0.1), bandwidth_bps=(1e6, 1e6))
        ours, theirs, meters = network.endpoint("a"), network.endpoint("b"), MemberMeters(b=DeliveryMeter())
        for blob in (BROUGHT, MADE):
            theirs.publish(blob, _Bytes())

        def fetch(blob: Blob) -> Chunks:
            stream = functools.partial(ours.fetch, "b", blob, range(32), progress_s=60.0)
            meter = StreamMeter(meters["b"], is_contribution=blob is BROUGHT)
            return receive_chunks(stream, lambda _, size: memoryview(bytearray(size)), meter)

        async for _ in fetch(MADE):
            pass
        assert meters.deliveries(["a", "b"], "a", 1) == (), "only contributions are waited for"
        async for chunk, _ in fetch(BROUGHT):
            if chunk > 20:
                await asyncio.sleep(5.0)
        assert now_s() > 50.0
        (seen,) = meters.deliveries(["a", "b"], "a", 1)
        assert (seen.member, seen.bps) == (1, pytest.approx(1e6))

    run_virtual(main())


def test_of_many_members_others_are_named_in_every_round() -> None:
    members = [f"peer {index}" for index in range(2 * MAX_DELIVERIES + 3)]
    meters = MemberMeters({peer: DeliveryMeter(index * MIB, 8.0) for index, peer in enumerate(members[1:], start=1)})
    named: set[int] = set()
    for number in range(3):
        seen = meters.deliveries(members, members[0], number)
        assert len(seen) == MAX_DELIVERIES
        assert all(one == Delivery(member=one.member, bps=one.member * MIB) for one in seen)
        named |= {one.member for one in seen}
    assert named == set(range(1, len(members)))


# In rounds ----------------------------------------------------------------------------------------------------

ELEMENTS = 2**19


async def play(run: Swarm, rounds: int) -> None:
    for _ in range(rounds):
        outcomes = await together(*(member.play(torch.ones(ELEMENTS), 4) for member in run.members))
        assert all(isinstance(outcome, Committed) for outcome in outcomes)


def owned(run: Swarm, member: SimMember) -> int:
    """Elements of the last verdict's plan."""
    verdict = member.view.verdict
    assert verdict is not None
    assert verdict.plan is not None
    return sum(part.stop - part.start for part in verdict.plan.parts if part.owner == run.index(member))


def test_a_slow_link_is_found_out_within_two_rounds_whatever_it_claims() -> None:
    async def main() -> None:
        network = UplinkNetwork(1e8)
        async with swarm(4, run_toml(16), ELEMENTS, network) as run:
            liar, others = run[2], [run[0], run[1], run[3]]
            liar.bandwidth_bps = 1e13
            await play(run, 1)
            assert owned(run, liar) == ELEMENTS // 4
            network.uplinks_bps[liar.peer] = 1e7
            await play(run, 3)
            assert owned(run, liar) == 0
            assert all(owned(run, one) > 0 for one in others)
            network.uplinks_bps.clear()
            await play(run, 3)
            assert owned(run, liar) > 0, "its contributions still show what its link can do"

    run_virtual(main())


def test_reports_say_what_links_deliver() -> None:
    async def main() -> None:
        network = UplinkNetwork(1e8)
        async with swarm(3, run_toml(12), ELEMENTS, network) as run:
            network.uplinks_bps |= {run[0].peer: 5e7, run[1].peer: 2e7}
            machine, seen = run.coordinator.machine, []
            report = machine.scope.report
            machine.scope.report = lambda peer, one, at_s: (seen.append((peer, one)), report(peer, one, at_s))[1]  # type: ignore[method-assign]
            await play(run, 1)
            peers = [run[index].peer for index in range(3)]
            rates = {(peer, peers[each.member]): each.bps for peer, one in seen for each in one.deliveries}
            assert rates.keys() == set(itertools.permutations(peers, 2))
            for (_, sender), bps in rates.items():
                assert bps >= network.link(sender, "")[1] * 0.9

    run_virtual(main())
