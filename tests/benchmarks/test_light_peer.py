from typing import Any

import msgpack
from hypothesis import HealthCheck, given, settings
from tests.fakes.virtual_clock import run_virtual
from tests.swarm.samples import records

from shoal.swarm.protocol.rounds import RoundPlan, RunView


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records(RunView), records(RoundPlan))
def test_a_glance_at_a_view_sees_what_is_in_it(view: Any, plan: Any) -> None:
    from light_view import glance

    view = view.model_copy(update={"plan": plan if view.phase == "averaging" else None})
    unpacker = msgpack.Unpacker()
    unpacker.feed(msgpack.packb([view.model_dump(), "what follows"]))
    assert unpacker.read_array_header() == 2
    seen = glance(unpacker)
    assert unpacker.unpack() == "what follows", "the whole view was read, and nothing else"
    assert (seen.epoch, seen.sequence, seen.round) == (view.epoch, view.sequence, view.round)
    assert (seen.anchor_version, seen.phase) == (view.anchor_version, view.phase)
    has_roster = bool(view.roster) or view.roster_delta is not None
    assert (seen.roster_version, seen.has_roster) == (view.roster_version, has_roster)
    assert seen.parts == (len(plan.parts) if view.plan else 0)


def test_a_light_peer_asks_for_its_samples_until_it_has_them() -> None:
    """Else a round of those that were told "none" at first would never have all its tokens."""
    import zmq.asyncio
    from light_peer import LEASES_PER_ROUND, SAMPLES_PER_LEASE, TOKENS_PER_SAMPLE, Habits, LightPeer
    from light_view import Glance

    from shoal.swarm.protocol.invite import Invite
    from shoal.swarm.protocol.messages import CoordinatorToPeerLease
    from shoal.swarm.protocol.types import Address, Message, SampleRange
    from shoal.swarm.protocol.wire import Envelope, encode

    class Peer(LightPeer):
        asked = 0

        async def _request(self, message: Message) -> bytes:
            self.asked += 1
            start = self.asked * SAMPLES_PER_LEASE
            ranges = (SampleRange(start=start, stop=start + SAMPLES_PER_LEASE),) if self.asked % 2 == 0 else ()
            return encode(Envelope("reply", self.asked, CoordinatorToPeerLease(ranges=ranges)))

    async def work() -> None:
        context = zmq.asyncio.Context()
        try:
            invite = Invite((Address(host="127.0.0.1", control_port=1),), "light", bytes(32), bytes(32))
            peer = Peer(context, invite, Habits(1, 4.0, 0.0, 1.0, 1.0))
            peer._view = Glance(round=3, phase="training")
            await peer._work(3)
            assert peer.asked == 2 * LEASES_PER_ROUND
            assert peer._tokens_done == LEASES_PER_ROUND * SAMPLES_PER_LEASE * TOKENS_PER_SAMPLE
            peer._view = Glance(round=3, phase="closing")
            await peer._work(3)
            assert peer.asked == 2 * LEASES_PER_ROUND, "only while the round trains"
        finally:
            context.destroy(linger=0)

    run_virtual(work())
