"""The planner is asked, answers later, and what it says counts as far as it still holds; over restarts, too."""

from tests.swarm.coordinator.pipeline_world import LAYERS, SIZES, STAGES, PipelineWorld, plan, run_file
from tests.swarm.coordinator.test_pipeline_run import holder, rounds, training, until
from tests.swarm.coordinator.world import heartbeat

from shoal.swarm.coordinator.placement import PlacementRequest
from shoal.swarm.pipeline.planner.model import Infeasible, StagePlan
from shoal.swarm.pipeline.planner.planner import Rebalancing
from shoal.swarm.protocol.messages import PeerToCoordinatorShowCapability
from shoal.swarm.protocol.types import Capability, Headway, PipelineView


def asked(world: PipelineWorld) -> PlacementRequest:
    found = world.machine.plan_request(world.now_s)
    assert found is not None
    return found


def answer(world: PipelineWorld, question: PlacementRequest, answered: StagePlan | Infeasible | None = None) -> None:
    world.machine.take_plan(question, answered or question.plan(plan), world.now_s)
    world.settle()


def test_one_question_at_a_time() -> None:
    world = training(3)
    world.plans = False
    world.start(world.peers[3])
    question = asked(world)
    world.start(world.peers[4])
    assert world.machine.plan_request(world.now_s) is None
    answer(world, question)
    assert world.peers[3].name in world.machine.spans
    assert world.peers[4].name not in world.machine.spans
    answer(world, asked(world))
    assert world.peers[4].name in world.machine.spans
    assert world.machine.plan_request(world.now_s) is None


def test_who_left_meanwhile_gets_nothing_and_the_others_their_places() -> None:
    world = training(3)
    world.plans = False
    for peer in world.peers[3:5]:
        world.start(peer)
    question = asked(world)
    world.leave(world.peers[3])
    answer(world, question)
    assert world.peers[3].name not in world.machine.spans
    assert world.peers[4].name in world.machine.spans


def test_a_refill_is_planned_anew_when_somebody_left_meanwhile() -> None:
    world = training(5)
    world.plans = False
    world.leave(holder(world, 2))
    question = asked(world)
    before = dict(world.machine.spans)
    mover = next(peer for peer, span in question_plan(question).spans.items() if before[peer] != span)
    world.leave(world.by_name(next(peer for peer in before if peer != mover)))
    del before[next(peer for peer in before if peer not in world.machine.spans)]
    answer(world, question)
    assert world.machine.spans == before, "of a plan that is outdated nobody moves"
    answer(world, asked(world))
    assert all(world.machine.holders(stage) for stage in range(STAGES))


def question_plan(question: PlacementRequest) -> StagePlan:
    answered = question.plan(plan)
    assert isinstance(answered, StagePlan)
    return answered


def test_the_first_cut_is_for_those_who_are_still_there() -> None:
    world = PipelineWorld(run_file())
    world.plans = False
    for peer in world.peers[:4]:
        world.start(peer)
    question = asked(world)
    world.leave(world.peers[0])
    answer(world, question)
    assert world.machine.boundaries == ()
    world.plans = True
    rounds(world, 1)


def rebalanced(world: PipelineWorld, question: PlacementRequest) -> StagePlan:
    """With the driver of stage 0 that has nothing beside it moved to the last stage."""
    assert question.previous is not None
    spans = dict(question.previous.spans)
    spans[holder(world, 0).name] = (STAGES - 1, STAGES - 1)
    return StagePlan(question.previous.boundaries, spans)


def test_who_is_to_move_does_so_before_the_round_has_begun_or_after_its_end() -> None:
    for is_begun in (False, True):
        world = PipelineWorld(run_file(), 5)
        until(world, "averaging")
        world.plans = False
        rounds(world, 1)
        question = asked(world)
        assert question.rebalancing is not None
        mover = holder(world, 0)
        if is_begun:
            for peer in world.peers[:5]:
                world.behave(peer, drives=False)
            world.tick(0.1)
            assert world.ask(mover)
        answer(world, question, rebalanced(world, question))
        assert (world.machine.spans[mover.name] == (0, 0)) == is_begun
        if is_begun:
            rounds(world, 2)
        assert world.machine.spans[mover.name] == (STAGES - 1, STAGES - 1)


def test_moves_are_remembered_over_restarts_compacted_or_not() -> None:
    for compact in (False, True):
        world = training(4)
        world.leave(holder(world, 1))
        ((mover, moved_s),) = world.machine.moved_s.items()
        assert moved_s == world.now_s
        rounds(world, 1)
        world.restart(compact=compact)
        assert world.machine.moved_s == {mover: moved_s}
        world.plans = False
        rounds(world, 2)
        question = asked(world)
        assert question.rebalancing == Rebalancing(world.now_s, {mover: moved_s})


def test_who_knows_the_spans_is_not_told_them_with_every_view() -> None:
    world = training(4)
    peer = world.peers[0]

    def told() -> PipelineView | None:
        return world.machine.view(peer.name, world.now_s).pipeline

    first = told()
    assert first is not None
    said = heartbeat(headway=Headway(plan_version=first.version))
    world.machine.heartbeat(peer.name, said, world.now_s)
    assert told() is None
    world.start(world.peers[4])
    after = told()
    assert after is not None
    assert len(after.spans) == len(first.spans) + 1
    world.machine.heartbeat(peer.name, said, world.now_s)
    assert told() == after, "it has not heard of the newcomer yet"
    world.restart()
    assert told() == after, "what it knows it says to the next coordinator itself"


def test_a_forged_capability_is_believed_within_bounds() -> None:
    world = training(3)
    world.plans = False
    liar = world.peers[3]
    world.start(liar)
    forged = Capability(host_bytes=2**62, device_bytes=None, layer_s=(0.0,) * LAYERS, bandwidth_bps=1e18, rtt_s=0.0)
    shown = PeerToCoordinatorShowCapability(capability=forged, layers=SIZES)
    world.machine.show_capability(liar.name, shown, world.now_s)
    peers = {one.peer: one for one in asked(world).peers}
    assert peers[liar.name].host_bytes == 2**48
    assert min(peers[liar.name].layer_s) == 0.1 / 64
    assert peers[liar.name].bandwidth_bps == 1e11
    assert {one.layer_s for peer, one in peers.items() if peer != liar.name} == {(0.1,) * LAYERS}
