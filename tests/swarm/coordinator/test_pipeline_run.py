"""The stages of a pipeline go from round to round together, each sample once in each of them."""

from pathlib import Path

import pytest
from tests.fakes.journals import leased
from tests.swarm.coordinator.pipeline_world import (
    BATCH,
    LAYERS,
    MICRO,
    SIZES,
    SMALL,
    STAGES,
    WHOLE,
    Peer,
    PipelineWorld,
    attributes,
    initial,
    journaled,
    model,
    run_file,
)
from tests.swarm.coordinator.world import CPU, TOKENS_PER_SAMPLE, entry, heartbeat, peer_name

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.micro_batch_ledger import Batch, MicroBatchLedger
from shoal.swarm.coordinator.placement import planner_of
from shoal.swarm.errors import ModelMismatch
from shoal.swarm.protocol.messages import (
    PeerToCoordinatorAccuseReplica,
    PeerToCoordinatorDrive,
    PeerToCoordinatorShowCapability,
)
from shoal.swarm.protocol.types import Capability, DeviceUse, KeptState, LayerSize
from shoal.swarm.protocol.verdict_chain import chain_hash, genesis, tied_together
from shoal.swarm.sample_ranges import Ranges, to_wire

CELLS = [(start, start + MICRO) for start in range(0, BATCH, MICRO)]


def turn(world: PipelineWorld, seconds: float = 0.25, steps: int = 12) -> None:
    for peer in world.peers:
        if peer.running and not peer.hung:
            world.behave(peer, steps)
    world.tick(seconds)


def until(world: PipelineWorld, phase: str, within_s: float = 60.0, steps: int = 12) -> None:
    """Everybody behaves until the run is in that phase."""
    deadline_s = world.now_s + within_s
    while world.machine.phase != phase:
        assert world.now_s < deadline_s, f"still {world.machine.phase}"
        turn(world, steps=steps)


def rounds(world: PipelineWorld, committed: int, within_s: float = 120.0) -> None:
    deadline_s = world.now_s + within_s
    while len(world.history) < committed:
        assert world.now_s < deadline_s, f"stuck in {world.machine.phase}: {world.machine.say_outlook()}"
        turn(world)


def training(peers: int = 5) -> PipelineWorld:
    """Everybody is in its stage, and nothing is driven yet."""
    world = PipelineWorld(run_file(), peers)
    for peer in world.peers[:peers]:
        world.behave(peer, drives=False)
    world.tick(0.1)
    assert world.machine.phase == "training"
    return world


def holder(world: PipelineWorld, stage: int, number: int = 0) -> Peer:
    return world.by_name(sorted(world.machine.holders(stage))[number])


def reasons(world: PipelineWorld) -> list[str]:
    return [one[1].verdict.reason for one in world.verdicts if not one[1].verdict.committed]


# Rounds -------------------------------------------------------------------------------------------------


def test_three_stages_over_five_peers() -> None:
    world = PipelineWorld(run_file(), 5)
    rounds(world, 3)
    assert [one[1].verdict.committed for one in world.verdicts] == [True] * 3
    assert [event.verdict.loss for event in world.verdicts[0].values()] == [2.5] * STAGES, "the last stage's, for all"
    assert world.machine.status(world.now_s).loss == 2.5


def test_a_peer_that_holds_the_whole_model_is_a_chain_of_one() -> None:
    world = PipelineWorld(run_file())
    world.peers[0].memory_bytes = WHOLE
    rounds(world, 1) if world.peers[0].running else world.start(world.peers[0])
    rounds(world, 2)
    assert world.machine.spans == {world.peers[0].name: (0, STAGES - 1)}
    turn(world)
    stages = world.machine.status(world.now_s).stages
    whole_s = 0.1 * LAYERS
    assert [one.capacity_tokens_per_s for one in stages] == pytest.approx(
        [MICRO * TOKENS_PER_SAMPLE / whole_s] * STAGES
    )
    assert not any(one.is_bottleneck for one in stages), "all could do the same"


def test_whole_replicas_and_stages_together() -> None:
    world = PipelineWorld(run_file())
    world.peers[3].memory_bytes = WHOLE
    for peer in world.peers[:5]:
        world.start(peer)
    rounds(world, 3)
    plans = [one.verdict.plan for given in world.verdicts for one in given.values()]
    members = {member.peer for planned in plans if planned for member in planned.members}
    assert world.peers[3].name in members
    assert len(members) > 2


def test_chains_begin_each_with_its_own_genesis_and_each_covers_the_others() -> None:
    world = PipelineWorld(run_file(), 3)
    rounds(world, 1)
    given = world.verdicts[0]
    chains = {genesis(world.run.hash, scope) for scope in range(STAGES + 1)}
    assert len(chains) == STAGES + 1
    verdicts = [event.verdict for event in given.values()]
    assert len({verdict.together for verdict in verdicts}) == 1
    other = verdicts[2].model_copy(update={"tokens": 1})
    assert tied_together([*verdicts[:2], other])[0].together != verdicts[0].together
    assert chain_hash(verdicts[0].model_copy(update={"together": bytes(32)})) != verdicts[0].chain


def test_nothing_is_committed_when_one_stage_cannot_average() -> None:
    world = PipelineWorld(run_file(), 3)
    until(world, "averaging")
    for stage in range(STAGES):
        missing = (0,) if stage == 1 else ()
        world.report(holder(world, stage), stage, missing=missing)
    (given,) = world.verdicts
    assert [event.verdict.committed for event in given.values()] == [False] * STAGES
    assert {event.verdict.reason for event in given.values()} == {
        "stage 1: 1 of 1 parts did not arrive; a link was slow"
    }
    assert all(stage.leases.held == {} for stage in world.machine.scopes)
    rounds(world, 1)


def test_nothing_is_committed_when_the_work_of_a_dead_replica_is_lost() -> None:
    world = PipelineWorld(run_file())
    for peer in world.peers[:6]:
        world.start(peer)
    until(world, "averaging")
    planned = world.planned[2].plan
    assert len(planned.members) == 2
    world.leave(world.by_name(planned.members[1].peer))
    world.report(world.by_name(planned.members[0].peer), 1, dropped=(1,))
    for stage in (0, 2):
        for member in world.planned[stage + 1].plan.members:
            if world.machine.phase == "averaging":
                world.report(world.by_name(member.peer), stage)
    assert reasons(world) == ["stage 1: the work of 1 replicas is not in the mean"]
    rounds(world, 1)


def test_nothing_is_committed_without_the_work_of_a_living_replica() -> None:
    """It would come with the next round, and in the other stages it would have come with this one."""
    world = PipelineWorld(run_file())
    for peer in world.peers[:6]:
        world.start(peer)
    until(world, "averaging")
    for stage in range(STAGES):
        for member in world.planned[stage + 1].plan.members:
            world.report(world.by_name(member.peer), stage, dropped=(1,) if stage == 1 else ())
    assert reasons(world) == ["stage 1: the work of 1 replicas is not in the mean"]
    rounds(world, 1)


def test_whose_work_is_never_in_the_mean_loses_its_place() -> None:
    """All its bytes may be no numbers: it would cost everybody each round, for ever."""
    world = PipelineWorld(run_file())
    for peer in world.peers[:6]:
        world.start(peer)
    for number in range(3):
        until(world, "averaging")
        plan = world.planned[2].plan
        culprit = max(member.peer for member in plan.members)
        assert culprit in world.machine.spans
        index = [member.peer for member in plan.members].index(culprit)
        for stage in range(STAGES):
            for member in world.planned[stage + 1].plan.members:
                world.report(world.by_name(member.peer), stage, dropped=(index,) if stage == 1 else ())
        assert len(world.verdicts) == number + 1
    assert culprit not in world.machine.spans
    assert "brought nothing that could be averaged" in world.machine.rests[culprit].reason
    rounds(world, 1)


def test_a_batch_that_is_not_done_in_time_is_done_anew() -> None:
    world = training()
    late = holder(world, 1)
    cell = CELLS[0]
    assert world.claim(late, 1, [cell]) == [cell]
    late.hung = True
    while not world.verdicts:
        world.beat(late)
        turn(world)
    assert reasons(world) == [f"stage 1 brought {BATCH - MICRO} of the batch's {BATCH} samples in 40 s"]
    assert ("kept samples from the others", late.name) in [
        (one.event.reason, one.event.peer)
        for one in world.events
        if isinstance(one, ev.InScope) and isinstance(one.event, ev.MemberLost)
    ]
    rounds(world, 1)


def test_a_stage_that_dies_with_its_work_done_gives_it_back_before_the_plan() -> None:
    world = PipelineWorld(run_file(), 5)
    until(world, "closing")
    world.leave(holder(world, 1))
    rounds(world, 2)
    events = [one for one in world.events if isinstance(one, ev.InScope)]
    assert [one.scope for one in events if isinstance(one.event, ev.RoundReopened)][:STAGES] == [1, 2, 3]
    assert reasons(world) == []


def test_who_releases_what_it_had_offered_offers_anew() -> None:
    world = PipelineWorld(run_file(), 3)
    until(world, "closing")
    peer = holder(world, 1)
    world.ready(peer, 1)
    peer.replicas[1].offered = True
    world.release(peer, 1, [CELLS[0]])
    assert peer.name not in world.machine.scopes[1].round.ready
    rounds(world, 1)
    assert "RoundReopened" in [type(one.event).__name__ for one in world.events if isinstance(one, ev.InScope)]


@pytest.mark.parametrize("phase", ["closing", "averaging"])
def test_all_holders_of_one_stage_die_when_everybody_else_is_done(phase: str) -> None:
    world = PipelineWorld(run_file(), 4)
    until(world, phase)
    lost = [world.by_name(peer) for peer in world.machine.holders(1)]
    for stage in (0, 2):
        for peer in map(world.by_name, world.machine.holders(stage)):
            world.follow(peer, stage)
    for peer in lost:
        world.leave(peer)
    assert world.history == []
    rounds(world, 2)
    assert [reason.split(":")[0] for reason in reasons(world)] == ([] if phase == "closing" else ["stage 1"])


def test_nobody_claims_drives_or_releases_what_is_not_its_own() -> None:
    world = training(5)
    first, other = holder(world, 1), holder(world, 0)
    assert world.claim(first, 1, CELLS[:2]) == CELLS[:2]
    assert not world.admitted(other, 2), "the stage's door refuses whatever it asks there"
    assert drive(world, first, 4) == []
    second = holder(world, 1, 1)
    second.replicas[1].claimed = list(first.replicas[1].claimed)
    world.release(second, 1, CELLS[:2])
    assert world.machine.scopes[1].leases.held == {first.name: [(0, 2 * MICRO)]}
    world.machine.take_span(first.name, "for the test")
    world.settle()
    assert not world.admitted(first, 2)
    assert world.machine.scopes[1].leases.held == {}


# Claims -------------------------------------------------------------------------------------------------


def test_the_first_claim_wins_and_again_is_the_same() -> None:
    world = training()
    first, second = holder(world, 1), holder(world, 1, 1)
    assert world.claim(first, 1, CELLS[1:3]) == CELLS[1:3]
    assert world.claim(second, 1, CELLS[:3]) == CELLS[:1]
    assert world.claim(first, 1, CELLS[1:3]) == CELLS[1:3]
    assert world.machine.scopes[1].leases.pool == []
    assert world.machine.missing(Batch(0, BATCH, MICRO)) == [(0, BATCH)]  # other stages have none


def test_what_is_released_or_left_behind_is_for_others() -> None:
    world = training()
    first, second = holder(world, 1), holder(world, 1, 1)
    world.claim(first, 1, CELLS[:3])
    world.release(first, 1, [CELLS[1]])
    assert world.claim(second, 1, CELLS[:3]) == [CELLS[1]]
    world.leave(first)
    assert world.claim(second, 1, CELLS[:3]) == CELLS[:3]


def test_a_claim_is_for_this_round_and_its_batch() -> None:
    world = training()
    first = holder(world, 1)
    assert world.refused(world.claim, first, 1, [(BATCH, BATCH + MICRO)])
    assert world.refused(world.claim, first, 1, [CELLS[0], CELLS[0]])
    first.replicas[1].round = 1
    assert world.claim(first, 1, [CELLS[0]]) == []


def test_whoever_lacks_the_state_claims_nothing() -> None:
    world = training()
    first = holder(world, 1)
    world.enter(first, 1)
    first.replicas[1].version = first.replicas[1].digest = None
    world.beat(first)
    first.replicas[1].version = 0
    assert world.claim(first, 1, [CELLS[0]]) == []


# Driving ------------------------------------------------------------------------------------------------


def drive(world: PipelineWorld, peer: Peer, samples: int, done: Ranges | None = None) -> Ranges:
    ask = PeerToCoordinatorDrive(round=0, samples=samples, done=to_wire(done or []))
    ranges = world.machine.drive(peer.name, ask, world.now_s)
    world.settle()
    return ranges


def test_a_driver_has_what_it_asked_for_in_hand_whatever_gets_lost() -> None:
    world = training()
    driver, other = holder(world, 0), holder(world, 0, 1)
    assert drive(world, driver, 4) == CELLS[:2]
    assert drive(world, driver, 4) == CELLS[:2]
    assert drive(world, other, 3) == CELLS[2:4]
    assert drive(world, driver, 6) == [*CELLS[:2], CELLS[4]]
    assert drive(world, holder(world, 1), 4) == []


def test_what_some_stage_misses_is_driven_again() -> None:
    world = training()
    driver, other = holder(world, 0), holder(world, 0, 1)
    assert drive(world, driver, 100) == CELLS
    assert drive(world, other, 100) == [], "all of it is under way"
    for stage in range(STAGES):
        world.claim(holder(world, stage), stage, CELLS[: 6 - stage])
    assert drive(world, driver, 1, CELLS) == CELLS[4:5]
    assert drive(world, other, 100) == CELLS[5:]


def test_a_driver_that_dies_leaves_what_it_drove() -> None:
    world = training()
    driver, other = holder(world, 0), holder(world, 0, 1)
    drive(world, driver, 6)
    assert drive(world, other, 6) == CELLS[3:]
    world.leave(driver)
    assert drive(world, other, 100, CELLS[3:5]) == [*CELLS[:5], CELLS[5]]


def test_of_a_driver_that_stands_still_another_one_takes_over() -> None:
    world = training()
    driver, other = holder(world, 0), holder(world, 0, 1)
    drive(world, driver, 100)
    patience_s = world.machine.deadlines.result_s
    driver.hung = True
    while world.now_s < 1000.0 + patience_s - 1:
        for peer in world.peers[:5]:
            world.beat(peer)
        world.tick(0.5)
        assert drive(world, other, 100) == []
    for _ in range(4):
        for peer in world.peers[:5]:
            world.beat(peer)
        world.tick(0.5)
    assert drive(world, other, 100) == CELLS


def test_nothing_is_driven_while_a_stage_is_empty() -> None:
    world = training(3)
    driver = holder(world, 0)
    drive(world, driver, 2)
    world.leave(holder(world, 1))
    assert world.machine.phase == "waiting"
    assert drive(world, driver, 100) == CELLS[:1]


def test_micro_batches_are_whole_and_the_last_one_may_be_smaller() -> None:
    batch = Batch(10, 17, 3)
    assert batch.cells([(10, 17)]) == [(10, 13), (13, 16), (16, 17)]
    assert batch.cells([(11, 12), (12, 14)]) == [(10, 13), (13, 16)]
    drives = MicroBatchLedger()
    assert drives.choose(batch, [], [], 4) == [(10, 13), (13, 16)]


# Spans --------------------------------------------------------------------------------------------------


def test_the_run_waits_for_an_empty_stage_says_so_and_goes_on() -> None:
    world = PipelineWorld(run_file(), 3)
    rounds(world, 1)
    lost = holder(world, 1)
    world.leave(lost)
    for _ in range(8):
        turn(world)
    assert world.machine.phase == "waiting"
    outlook = world.machine.status(world.now_s).outlook
    assert outlook.startswith("stage 1 (layers 2 to 3, 0.0 MB of parameters) waits for a peer that can hold it: ")
    stages = world.machine.status(world.now_s).stages
    assert [bool(one.outlook) for one in stages] == [False, True, False]
    assert stages[1].outlook in outlook
    assert (stages[1].replicas, stages[1].coming, stages[1].state_digest) == ((), (), None)
    assert [one.tokens_per_s for one in stages] == [0.0] * STAGES, "nobody does anything now"
    assert "nobody can hold stage 1, which takes" in outlook
    committed = len(world.history)
    world.start(lost)
    found, name = world.machine.status(world.now_s).stages[1], world.machine.membership.members[lost.name].entry.name
    assert (found.coming, found.outlook) == ((lost.name,), f"waits for {name} to get its state")
    rounds(world, committed + 1)
    for peer in world.peers[:3]:
        world.behave(peer)
    assert world.machine.status(world.now_s).outlook == ""


def test_an_empty_stage_is_refilled_by_a_move_in_the_middle_of_a_round() -> None:
    world = training(4)
    mover = holder(world, 0)
    world.claim(mover, 0, CELLS[:2])
    assert drive(world, mover, 4) == CELLS[:2]
    world.leave(holder(world, 1))
    assert mover.name not in world.machine.stages[0].micro_batches.in_flight
    assert world.machine.spans[mover.name] == (1, 1)
    assert mover.name not in world.machine.scopes[0].leases.held
    assert not world.admitted(mover, 1)
    assert world.refused(world.machine.join_stage, 0, entry(mover.number, mover.key), CPU, world.now_s)
    rounds(world, 1)


def test_without_need_peers_move_between_rounds_one_at_a_time() -> None:
    world = PipelineWorld(run_file())
    for peer in world.peers[:6]:
        world.start(peer)
    rounds(world, 1)
    for peer in [holder(world, 2), *[holder(world, 1)]]:
        world.leave(peer)
    assert len(world.machine.holders(2)) == 1
    for peer in world.peers[6:9]:
        world.start(peer)
    versions = [world.machine.version]
    for _ in range(60):
        phase, spans = world.machine.phase, dict(world.machine.spans)
        ended = len(world.verdicts)
        turn(world)
        moved = [peer for peer, span in world.machine.spans.items() if spans.get(peer, span) != span]
        assert len(moved) <= 1
        assert not moved or len(world.verdicts) > ended, phase
    assert world.machine.version >= versions[0]


def test_nothing_is_kept_of_strangers_that_left_without_a_stage() -> None:
    world = PipelineWorld(run_file(), 3)
    for number in range(300):
        peer = "x" * 14 + "".join("abcdefghijklmnopqrstuvwxyz234567"[at] for at in divmod(number, 32))
        world.machine.admission.join(entry(9, 100 + number).model_copy(update={"peer": peer}), CPU, world.now_s)
        world.machine.admission.leave(peer, "", world.now_s)
    assert len(world.machine.admission.sent_bytes._reported) <= len(world.machine.membership.members)


def test_who_comes_back_gets_the_stage_whose_state_it_may_have() -> None:
    world = PipelineWorld(run_file(), 3)
    rounds(world, 2)
    spans = dict(world.machine.spans)
    for peer in world.peers[:3]:
        world.leave(peer)
    for peer in reversed(world.peers[:3]):
        world.start(peer)
    assert world.machine.spans == spans
    rounds(world, 3)
    assert not any(one[1].went_back for one in world.verdicts)


def test_all_stages_go_back_with_one_that_lost_its_state() -> None:
    world = PipelineWorld(run_file(), 3)
    rounds(world, 3)
    world.lose_all(lambda stage, version: stage != 1 or version < 2)
    for peer in world.peers[:3]:
        world.start(peer)
    deadline_s = world.now_s + 300
    while not any(one[1].went_back for one in world.verdicts):
        assert world.now_s < deadline_s
        turn(world)
    assert world.machine.anchor_version == len(world.history) <= 1
    rounds(world, 3, within_s=400)


@pytest.mark.parametrize(
    ("kept", "goes"),
    [(({1, 4}, {1, 3}, {0, 1, 4}), [1]), (({4}, {3}, {1, 2}), [])],
    ids=["all keep one", "they do not"],
)
def test_behind_a_wrong_mean_all_stages_go_to_a_version_that_each_of_them_keeps(
    kept: tuple[set[int], ...], goes: list[int]
) -> None:
    world = PipelineWorld(run_file(), 3)
    rounds(world, 5)

    def saved(stage: int) -> tuple[KeptState, ...]:
        states = world.archive[stage]
        return tuple(KeptState(anchor_version=one, digest=states[one]) for one in kept[stage] if one in states)

    world.saved = saved  # type: ignore[method-assign]
    scope, before = world.machine.scopes[0], len(world.verdicts)
    number = scope.history.rounds[4].round
    scope.disprove(number, world.peers[0].name, b"e" * 32, world.peers[1].name, 8.0)
    rounds(world, 8)
    ends = [one for one in world.verdicts[before:] if one[1].went_back is not None]
    assert [one[1].verdict.anchor_version for one in ends] == goes


def test_the_first_plan_of_a_free_number_of_stages_waits_for_those_that_start_together() -> None:
    world = PipelineWorld(run_file("auto"))
    for peer in world.peers[:4]:
        world.start(peer)
        world.tick(0.2)
    assert world.machine.boundaries == ()
    assert "waiting for peers" in world.machine.say_outlook()
    world.restart()
    rounds(world, 1)
    assert world.machine.boundaries == (0, 2, 4, 6)


def test_until_the_model_is_cut_layers_bind_only_while_somebody_is_there_who_has_them() -> None:
    world = PipelineWorld(run_file())
    able = Capability(host_bytes=SMALL, device_bytes=None, layer_s=(0.1,) * LAYERS, bandwidth_bps=1e9, rtt_s=0.01)
    wrong = tuple(one.model_copy(update={"parameters_bytes": 7}) for one in SIZES)

    def first(layers: tuple[LayerSize, ...]) -> None:
        said = PeerToCoordinatorShowCapability(capability=able, layers=layers)
        world.machine.show_capability(peer_name(9), said, world.now_s)

    world.machine.admission.join(entry(9, 1000), CPU, world.now_s)
    first(wrong)
    with pytest.raises(ModelMismatch, match=r"1000 bytes of parameters here, 7 in the run, as name 9 said.*stop them"):
        world.start(world.peers[0])
    world.crash(world.peers[0])
    world.machine.admission.leave(peer_name(9), "done", world.now_s)
    world.settle()
    world.restart()
    for peer in world.peers[:3]:
        world.start(peer)
    rounds(world, 1)
    for peer in world.peers[:3]:
        world.leave(peer)
    world.machine.admission.join(entry(9, 1001), CPU, world.now_s)
    with pytest.raises(ModelMismatch, match=r"1000 in the run, as those who came first said.*under another name"):
        first(wrong)


def test_layers_and_samples_are_the_runs() -> None:
    world = training()
    able = Capability(host_bytes=1, device_bytes=None, layer_s=(0.1,) * LAYERS, bandwidth_bps=1e9, rtt_s=0.01)
    peer = world.peers[0]
    for layers in (SIZES[:-1], (SIZES[1], *SIZES[1:])):
        shown = able.model_copy(update={"layer_s": (0.1,) * len(layers)})
        said = PeerToCoordinatorShowCapability(capability=shown, layers=layers)
        with pytest.raises(ModelMismatch, match="layer"):
            world.machine.show_capability(peer.name, said, world.now_s)
    other = model(0).model_copy(update={"tokens_per_sample": TOKENS_PER_SAMPLE + 1})
    with pytest.raises(ModelMismatch, match="tokens a sample"):
        world.machine.describe_stage(0, holder(world, 0).name, other)


def test_the_status_shows_each_stage() -> None:
    world = training()
    world.claim(holder(world, 1), 1, CELLS[:3])
    stages = world.machine.status(world.now_s).stages
    assert [(one.first_layer, one.stop_layer) for one in stages] == [(0, 2), (2, 4), (4, 6)]
    assert [len(one.replicas) for one in stages] == [2, 2, 1]
    assert [one.queue for one in stages] == [0, 3 * MICRO, 0]
    assert [one.is_bottleneck for one in stages] == [False, False, True]
    assert stages[0].parameters_bytes == 2001
    a_replicas = [one.capacity_tokens_per_s / len(one.replicas) for one in stages]
    assert a_replicas == pytest.approx(a_replicas[:1] * STAGES)
    assert a_replicas[0] > 0
    digests = [one.state_digest for one in stages]
    assert digests == [initial(stage) for stage in range(STAGES)]
    rounds(world, 1)
    members = world.machine.status(world.now_s).members
    assert [one.stages for one in members] == [world.machine.spans[one.peer] for one in members]
    assert sum(one.tokens_committed for one in members) == STAGES * BATCH * TOKENS_PER_SAMPLE
    assert sum(one.share for one in members) == pytest.approx(1.0)


def test_the_runs_own_planner() -> None:
    planner = planner_of(run_file(7))
    answer = planner(None, [], [], None)
    assert "7 stages" in getattr(answer, "reason", "")


# The journal --------------------------------------------------------------------------------------------


def test_every_transaction_of_the_journal_is_a_point_to_go_on_from() -> None:
    """From the newest snapshot, and every fifth from the journal's beginning, too."""
    world = PipelineWorld(run_file(), 4)
    seen = 0
    while len(world.history) < 2:
        for peer in world.peers[:4]:
            world.behave(peer, 5)
            if len(world.journal) > seen:
                seen = len(world.journal)
                for kept in (world.short,) if seen % 5 else (world.short, world.journal):
                    assert journaled(world.replayed(kept)) == journaled(world.machine)
        world.tick(0.25)
        if len(world.verdicts) == 1 and world.peers[0].running and len(world.history) == 1:
            world.crash(world.peers[0])
            world.start(world.peers[0])


def test_on_disk_with_compaction_every_scope_has_its_verdicts(tmp_path: Path) -> None:
    world = PipelineWorld(run_file(), 4)
    rounds(world, 5)
    journal = leased(tmp_path, world.run.hash, "")
    journal.compact_at_bytes = 1
    machine = world.replayed([])
    compacted = 0
    for transaction in world.journal:
        events = [ev.unpack_event(one) for one in transaction]
        journal.append(journal.next_index, events)
        machine.log.replay(machine, events, 0.0)
        snapshot = machine.snapshot() if ev.verdicts_in(events) else None
        if journal.wants_snapshot and snapshot is not None:
            journal.compact(snapshot)
            compacted += 1
    journal.close()
    assert compacted >= 1
    again = leased(tmp_path, world.run.hash, "")
    found = world.replayed([])
    found.log.replay(found, again.read(), world.now_s)
    assert attributes(found) == attributes(world.replayed(world.journal))
    for scope in range(1, STAGES + 1):
        assert again.verdicts(scope=scope) == [given[scope] for given in world.verdicts]
    assert again.verdicts(1, 2) == [given[1] for given in world.verdicts[1:3]]
    assert again.verdicts(scope=STAGES + 1) == []
    again.close()


# Accusations ------------------------------------------------------------------------------------------------


def accuse(world: PipelineWorld, by: int, of: int, stage: int) -> None:
    accusation = PeerToCoordinatorAccuseReplica(accused=world.peers[of].name, stage=stage, reason="values")
    world.machine.accuse(world.peers[by].name, accusation, world.now_s)
    world.settle()


def stage_of(world: PipelineWorld, peer: int) -> int:
    return world.machine.spans[world.peers[peer].name][0]


def accused_and_neighbours() -> tuple[PipelineWorld, int, list[int], list[int]]:
    """Nine peers in three stages; one of the middle, its six neighbours, and the other two of its stage."""
    world = training(9)
    accused, *others = [one for one in range(9) if stage_of(world, one) == 1]
    return world, accused, [one for one in range(9) if stage_of(world, one) != 1], others


def test_one_member_alone_takes_no_stage_from_another() -> None:
    world, accused, neighbours, _ = accused_and_neighbours()
    for _ in range(5):
        accuse(world, neighbours[0], accused, 1)
    assert world.peers[accused].name in world.machine.spans


def test_most_of_the_neighbours_take_a_stage_while_nobody_has_credit() -> None:
    world, accused, neighbours, _ = accused_and_neighbours()
    for by in neighbours[:3]:
        accuse(world, by, accused, 1)
    assert world.peers[accused].name in world.machine.spans
    accuse(world, neighbours[3], accused, 1)
    assert world.peers[accused].name not in world.machine.spans
    assert world.machine.rests[world.peers[accused].name].reason == "sent wrong values, as its neighbours say"


def test_who_sends_to_the_middle_of_a_span_is_a_neighbour() -> None:
    world, accused, neighbours, _ = accused_and_neighbours()
    world.machine.spans[world.peers[accused].name] = (0, 1)
    for by in sorted(neighbours, key=lambda one: stage_of(world, one))[:4]:
        assert world.peers[accused].name in world.machine.spans
        accusation = PeerToCoordinatorAccuseReplica(accused=world.peers[accused].name, stage=1, reason="values")
        world.machine.accuse(world.peers[by].name, accusation, world.now_s)
    assert world.peers[accused].name not in world.machine.spans


def test_who_gets_nothing_from_the_accused_has_no_say() -> None:
    world, accused, _, others = accused_and_neighbours()
    for by in others:
        accuse(world, by, accused, 1)
    accuse(world, accused, accused, 1)
    accuse(world, others[0], accused, 2)  # a stage that it does not hold
    assert world.peers[accused].name in world.machine.spans


@pytest.mark.parametrize(("accusers", "is_believed"), [(3, False), (4, True)])
def test_neighbours_with_most_of_the_credit_are_believed(accusers: int, is_believed: bool) -> None:
    world, accused, neighbours, _ = accused_and_neighbours()
    for scope in world.machine.scopes:
        for member in scope.membership.members.values():
            member.has_credit, member.credit = True, 100
    for by in neighbours[:accusers]:
        accuse(world, by, accused, 1)
    assert (world.peers[accused].name not in world.machine.spans) == is_believed


def test_newcomers_take_no_stage_from_who_has_credit() -> None:
    world, accused, neighbours, _ = accused_and_neighbours()
    member = world.machine.scopes[1].membership.members[world.peers[accused].name]
    member.has_credit, member.credit = True, 100
    for by in neighbours:
        accuse(world, by, accused, 1)
    assert world.peers[accused].name in world.machine.spans


def test_energy_of_a_pipeline_is_counted_once_for_all_stages() -> None:
    world = PipelineWorld(run_file(), 4)
    rounds(world, 1)
    peer = world.peers[0]

    def reads(energy_j: float) -> None:
        use = DeviceUse(cpu=0.5, memory_used_bytes=1, energy_j=energy_j)
        world.machine.heartbeat(peer.name, heartbeat(use=use, anchor_version=None, state_digest=None), world.now_s)

    reads(0.0)
    rounds(world, 2)
    reads(900.0)
    rounds(world, 3)
    costs = world.machine.status(world.now_s).costs
    assert (costs.energy_j, costs.round_energy_j, costs.metered_members) == (900.0, 900.0, 1)
    assert world.machine.timings.since(0)[-1].energy_j == 900.0
    world.restart()
    assert world.machine.status(world.now_s).costs.energy_j == 900.0
