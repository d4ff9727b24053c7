from typing import Any

import msgpack
from hypothesis import HealthCheck, given, settings
from tests.swarm.samples import records

from shoal.swarm.messages import RoundPlan, RunView


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
    assert (seen.roster_version, seen.has_roster) == (view.roster_version, bool(view.roster))
    assert seen.parts == (len(plan.parts) if view.plan else 0)
