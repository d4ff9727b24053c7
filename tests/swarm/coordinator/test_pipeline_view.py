"""What members see of a pipeline: the plan's spans, each with what is expected of its peer."""

import pytest
from tests.swarm.coordinator.pipeline_world import LAYERS, SIZES, STAGES, PipelineWorld, run_file

from shoal.swarm.coordinator.placement import PipelineViews
from shoal.swarm.pipeline.planner.model import StagePlan
from shoal.swarm.protocol.types import AssignedSpan, Capability, PipelineView

PLAN = StagePlan((0, 2, 4, 6), {"b" * 16: (0, 0), "a" * 16: (1, 2)})
MEMORY_BYTES = 10**9


def able(layer_s: float, memory_bytes: int = MEMORY_BYTES) -> Capability:
    return Capability(
        host_bytes=memory_bytes, device_bytes=None, layer_s=(layer_s,) * LAYERS, bandwidth_bps=1e9, rtt_s=0.0
    )


def seen(shown: dict[str, Capability], plan: StagePlan = PLAN) -> dict[str, AssignedSpan]:
    view = PipelineViews(run_file()).of(plan, 1, SIZES, shown)
    assert view.boundaries == plan.boundaries
    return {span.peer[0]: span for span in view.spans}


def test_a_span_has_the_rate_that_the_plan_expects() -> None:
    spans = seen({"a" * 16: able(0.1), "b" * 16: able(0.4)})
    assert spans["a"].rate == pytest.approx(1 / (4 * 0.1), rel=1e-3)
    assert spans["b"].rate == pytest.approx(1 / (2 * 0.4), rel=1e-3)
    assert (spans["a"].first, spans["a"].last, spans["b"].first, spans["b"].last) == (1, 2, 0, 0)
    assert not spans["a"].recomputes


def test_who_has_too_little_memory_to_keep_everything_recomputes() -> None:
    # 4 of 6 layers, each of about 1000 bytes of parameters and 20 that autograd keeps of each micro-batch.
    least = next(size for size in range(10_000, 90_000, 10) if seen_by_a(size).rate > 0)
    assert seen_by_a(least).recomputes
    assert seen_by_a(least).rate == pytest.approx(0.75 / (4 * 0.1), rel=1e-3)
    assert not seen_by_a(least + 5000).recomputes


def seen_by_a(memory_bytes: int) -> AssignedSpan:
    return seen({"a" * 16: able(0.1, memory_bytes), "b" * 16: able(0.4)})["a"]


def test_a_gpu_beside_the_machine_needs_room_too() -> None:
    host = next(size for size in range(10_000, 90_000, 10) if seen_by_a(size).rate > 0)
    for device, holds in ((host, True), (1000, False)):
        shown = able(0.1, host).model_copy(update={"device_bytes": device})
        assert (seen({"a" * 16: shown, "b" * 16: able(0.4)})["a"].rate > 0) == holds


def test_nothing_is_expected_of_who_has_too_little_memory_by_now() -> None:
    assert seen_by_a(10).rate == 0.0
    assert seen_by_a(10).recomputes, "it keeps as little as it can"


def test_it_is_made_anew_only_when_something_has_changed() -> None:
    views, shown = PipelineViews(run_file()), {"a" * 16: able(0.1), "b" * 16: able(0.4)}

    def made(version: int = 1) -> PipelineView:
        return views.of(PLAN, version, SIZES, shown)

    first = made()
    shown = dict(shown)
    assert made() is first, "so that it is packed once for everybody"
    shown["b" * 16] = able(0.2)
    faster = made()
    assert faster.spans[1].rate == pytest.approx(2 * first.spans[1].rate, rel=1e-3)
    assert made(2).version == 2


def test_every_member_sees_it() -> None:
    world = PipelineWorld(run_file(), 5)
    for peer in world.peers[:5]:
        world.behave(peer, drives=False)
    views = [world.machine.view(peer.name, world.now_s).pipeline for peer in world.peers[:5]]
    assert len({id(view) for view in views}) == 1
    assert views[0] is not None
    assert len(views[0].spans) == 5
    assert all(span.rate > 0 for span in views[0].spans)
    assert len(views[0].boundaries) == STAGES + 1


def test_it_is_said_which_stages_have_one_replica() -> None:
    world = PipelineWorld(run_file(), peers=3)
    for newcomers, said in (
        (0, "stages 0, 1, 2 have one replica each: nobody checks them"),
        (2, "stage 2 has one replica: nobody checks it"),
        (1, ""),
    ):
        for _ in range(newcomers):
            world.start(next(peer for peer in world.peers if not peer.running))
        world.tick(1.0)
        assert world.machine.say_unchecked() == said
