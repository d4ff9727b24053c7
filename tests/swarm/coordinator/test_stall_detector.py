"""A peer that has a stage, and keeps the others waiting there, loses it; one that makes progress does not."""

import pytest
from tests.swarm.coordinator.pipeline_world import SMALL, STAGES, Peer, PipelineWorld, Replica, run_file
from tests.swarm.coordinator.test_pipeline_run import holder, rounds, training
from tests.swarm.coordinator.world import CPU, entry

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.stall_detector import _span_s
from shoal.swarm.protocol.start_section import StartSection, StartTensor


def turn(world: PipelineWorld, seconds: float = 0.25) -> None:
    """The others work; who hangs says that it is there."""
    for peer in world.peers:
        if peer.running and peer.hung and world.admitted(peer):
            world.beat(peer)
        elif peer.running:
            world.behave(peer)
    world.tick(seconds)


def until_taken(world: PipelineWorld, within_s: float = 120.0) -> tuple[ev.SpanTaken, float]:
    """The next span that is taken from somebody, and after which time."""
    began_s, seen = world.now_s, len(world.events)
    while True:
        taken = [one for one in world.events[seen:] if isinstance(one, ev.SpanTaken) and one.reason]
        if taken:
            return taken[0], world.now_s - began_s
        assert world.now_s < began_s + within_s, f"{world.machine.say_outlook()!r} for ever"
        turn(world)


def never_enters(world: PipelineWorld, stage: int) -> Peer:
    """The stage's holder leaves, and who gets its place only says that it is there."""
    world.leave(holder(world, stage))
    found = holder(world, stage)
    found.hung = True
    found.forget()
    return found


def test_who_never_enters_its_stage_loses_it_and_the_run_goes_on() -> None:
    world = training(5)
    late = never_enters(world, 2)
    turn(world)
    assert f"waits for {world.machine.membership.members[late.name].entry.name}" in world.machine.say_outlook()
    taken, took_s = until_taken(world)
    deadlines = world.machine.deadlines
    assert taken.peer == late.name
    assert "closer to stage 2" in taken.reason
    assert deadlines.enter_s(0) <= took_s <= deadlines.enter_s(0) + 3
    assert taken.until_s == taken.at_s + deadlines.rest_s(0)
    rounds(world, 1, within_s=30)
    assert late.name not in world.machine.spans


def test_who_rested_is_given_a_stage_again_and_rests_longer_the_next_time() -> None:
    world = training(5)
    late = never_enters(world, 2)
    first, _ = until_taken(world)
    while late.name not in world.machine.spans:
        assert world.now_s < first.until_s + 2
        turn(world)
    assert world.now_s >= first.until_s
    second, _ = until_taken(world)
    assert second.until_s - second.at_s == pytest.approx(2 * (first.until_s - first.at_s))


def test_another_process_of_the_same_peer_need_not_rest() -> None:
    world = training(5)
    late = never_enters(world, 2)
    until_taken(world)
    world.start(late)
    assert late.name in world.machine.spans


def test_rests_outlive_the_coordinator() -> None:
    for compact in (False, True):
        world = training(5)
        late = never_enters(world, 2)
        taken, _ = until_taken(world)
        rounds(world, 1)
        world.restart(compact=compact)
        assert world.machine.rests[late.name] == ev.Rest(until_s=taken.until_s, reason=taken.reason, times=1)
        turn(world)
        assert late.name not in world.machine.spans


def test_who_left_its_stage_and_not_the_run_loses_its_place() -> None:
    world = training(4)
    gone = holder(world, 2)
    world.machine.scopes[2].admission.leave(gone.name, "its stage failed", world.now_s)
    gone.hung = True
    gone.forget()
    taken, _ = until_taken(world)
    assert taken.peer == gone.name
    rounds(world, 1)


def test_who_gets_closer_keeps_its_place_but_not_for_ever() -> None:
    world = training(5)
    slow = never_enters(world, 2)
    allowed_s = world.machine.deadlines.enter_s(0)
    for step in range(1, 5):
        slow.prepared = step / 4
        until_s = world.now_s + 0.8 * allowed_s
        while world.now_s < until_s:
            turn(world)
            assert slow.name in world.machine.spans
    taken, took_s = until_taken(world)
    assert taken.peer == slow.name, "saying the same again is no progress"
    assert took_s < allowed_s


def test_what_a_peer_had_of_other_stages_is_no_way_to_the_new_ones() -> None:
    """It moves while all of its former stage is ready, and still says so for a while."""
    world = training(5)
    for peer in world.peers:
        peer.prepared = 1.0
    turn(world)
    world.leave(holder(world, 2))
    slow = holder(world, 2)
    slow.hung = True
    slow.forget()
    allowed_s = world.machine.deadlines.enter_s(0)
    for prepared in (1.0, 0.25, 0.5, 0.75, 1.0):
        slow.prepared = prepared
        until_s = world.now_s + 0.45 * allowed_s
        while world.now_s < until_s:
            turn(world)
            assert slow.name in world.machine.spans, f"with {prepared:.0%} of its layers built"
    slow.prepared = 0.0
    turn(world)
    slow.prepared = 1.0
    _, took_s = until_taken(world)
    assert took_s < allowed_s, "the same way twice is no progress"


def test_a_large_stage_over_a_slow_link_takes_its_time() -> None:
    world = training(5)
    slow = never_enters(world, 2)
    shown = world.machine.capabilities[slow.name]
    world.machine.capabilities[slow.name] = shown.model_copy(update={"bandwidth_bps": 1e3})
    layers = tuple(one.model_copy(update={"parameters_bytes": 10**7}) for one in world.machine.layers)
    world.machine.layers = layers
    state_bits = 8 * world.machine.parameters_bytes(2) * (1 + world.run.outer.slots)
    _, took_s = until_taken(world, within_s=3000)
    assert took_s > 2 * state_bits / 1e6, "1 Mbit/s is the least that is believed"


def test_nobody_is_blamed_for_a_state_that_nobody_has() -> None:
    world = PipelineWorld(run_file(), 3)
    rounds(world, 2)
    world.lose_all(lambda stage, version: stage != 1)
    for peer in world.peers[:3]:
        world.start(peer)
    while world.machine.anchor_version == 2:
        turn(world)
    assert [one for one in world.events if isinstance(one, ev.SpanTaken)] == []
    assert world.machine.anchor_version == 0


def test_nobody_is_blamed_while_nobody_has_what_the_run_starts_from() -> None:
    world = PipelineWorld(run_file(), STAGES)
    tensors = {"w": StartTensor(shape=(1,), sha256="0" * 64)}
    start = StartSection(run="earlier", round=3, state="0" * 64, tensors=tensors)
    started = world.run.model_copy(update={"start": start})
    world.machine.settings.run = started
    for peer in world.peers[:STAGES]:
        stage = world.machine.spans[peer.name][0]
        world.machine.join_stage(stage, entry(peer.number, peer.key), CPU, world.now_s)
        peer.replicas[stage] = Replica()
        peer.hung = True
    world.archive = [{} for _ in range(STAGES)]
    for _ in range(200):
        for peer in world.peers[:STAGES]:
            world.beat(peer)
        world.machine.tick(world.now_s)
        world.now_s += 0.25
        world.events += world.machine.log.take()
    assert [one for one in world.events if isinstance(one, ev.SpanTaken)] == []


def test_a_transfer_over_a_slow_link_is_no_idling() -> None:
    world = training(3)
    allowed_s = [_span_s(world.machine, peer) for peer in world.machine.spans]
    layers = tuple(one.model_copy(update={"activation_bytes": 10**9}) for one in world.machine.layers)
    world.machine.layers = layers
    assert [_span_s(world.machine, peer) - s for peer, s in zip(world.machine.spans, allowed_s, strict=True)] == (
        pytest.approx([16.0 * sides for sides in (1, 2, 1)], rel=1e-3)
    )


# In its stage -------------------------------------------------------------------------------------------


def spare(world: PipelineWorld) -> None:
    """One peer that is there, and gets no stage before somebody else loses one."""
    peer = world.peers[STAGES]
    peer.memory_bytes = SMALL
    world.start(peer)
    for one in world.peers[: STAGES + 1]:
        world.behave(one, drives=False)


@pytest.mark.parametrize("stage", range(STAGES))
@pytest.mark.parametrize("is_begun", [False, True])
def test_who_does_nothing_in_its_stage_while_the_others_wait_loses_it(stage: int, is_begun: bool) -> None:
    world = PipelineWorld(run_file(max_s=600.0), STAGES)
    rounds(world, 1)
    for peer in world.peers[:STAGES]:
        world.behave(peer, drives=False)
    if is_begun:
        world.behave(holder(world, 0), steps=3)
    hung = holder(world, stage)
    hung.hung = True
    taken, took_s = until_taken(world)
    assert taken.peer == hung.name
    assert f"nothing in stage {stage} for" in taken.reason
    allowed_s = world.machine.deadlines.idle_s(0.2)
    assert allowed_s <= took_s <= allowed_s + 4


def test_a_spare_peer_takes_over_from_one_that_hangs() -> None:
    world = training(3)
    spare(world)
    stage = world.machine.spans[world.peers[STAGES].name][0]
    other = next(number for number in range(STAGES) if number != stage)
    holder(world, other).hung = True
    until_taken(world)
    rounds(world, 2)


def test_who_alone_can_hold_a_stage_gets_it_again_at_once() -> None:
    world = training(3)
    hung = holder(world, 1)
    hung.hung = True
    span = world.machine.spans[hung.name]
    until_taken(world)
    assert world.machine.spans[hung.name] == span
    hung.hung = False
    rounds(world, 1)


def test_who_gets_its_stage_again_has_all_the_time_again() -> None:
    world = training(3)
    gone = holder(world, 1)
    world.machine.scopes[1].admission.leave(gone.name, "its stage failed", world.now_s)
    gone.hung = True
    gone.forget()
    until_taken(world)
    _, took_s = until_taken(world)
    assert took_s >= world.machine.deadlines.enter_s(0) - 1


def test_who_got_its_stage_again_before_it_has_rested_keeps_it() -> None:
    world = training(5)
    stage = next(number for number in range(STAGES) if len(world.machine.holders(number)) == 1)
    alone = holder(world, stage).name
    span, unix_s = world.machine.spans[alone], world.machine.log.unix_s
    world.machine.record(ev.SpanTaken(peer=alone, at_s=unix_s, reason="hung", until_s=unix_s + 1000.0))
    world.machine.record(ev.SpanAssigned(peer=alone, first=span[0], last=span[1], at_s=unix_s))
    turn(world)
    seen = len(world.events)
    rounds(world, 6)
    assert [one for one in world.events[seen:] if isinstance(one, ev.SpanTaken | ev.SpanAssigned)] == []
    assert world.machine.spans[alone] == span


def test_slow_computing_is_no_idling() -> None:
    world = training(3)
    slow = holder(world, 1)
    slow.hung = True
    for _ in range(6):
        slow.computed += 1
        until_s = world.now_s + 0.8 * world.machine.deadlines.idle_s(0.2)
        while world.now_s < until_s and not world.verdicts:
            turn(world)
    assert [one for one in world.events if isinstance(one, ev.SpanTaken)] == []


def test_who_waits_for_an_empty_stage_is_not_blamed() -> None:
    world = training(3)
    world.leave(holder(world, 1))
    for _ in range(100):
        turn(world)
    assert [one for one in world.events if isinstance(one, ev.SpanTaken)] == []
