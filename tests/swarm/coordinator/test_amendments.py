"""Amendments in the coordinator: they count from their round on, are in its verdict, and come back from the journal."""

from typing import Any

import pytest
from tests.peer.checkpoints.making import verdict_chain
from tests.swarm.coordinator.pipeline_world import PipelineWorld
from tests.swarm.coordinator.pipeline_world import run_file as pipeline_run_file
from tests.swarm.coordinator.test_invites import HOST
from tests.swarm.coordinator.world import World, journaled, run_file

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.access_trail import AccessTrail
from shoal.swarm.coordinator.amendments import RunSettings
from shoal.swarm.coordinator.host_commands import HostCommands
from shoal.swarm.errors import CommandRefused
from shoal.swarm.protocol.access_records import RecordCheck
from shoal.swarm.protocol.messages import AmendRun, CoordinatorToHostAmended
from shoal.swarm.protocol.types import MAX_AMENDMENTS, Amendment
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis

VERDICT = verdict_chain(1)[-1]


def amend(world: Any, at_round: int = 0, **changes: str) -> CoordinatorToHostAmended:
    named = tuple(sorted((key.replace("__", "."), text) for key, text in changes.items()))
    scope = getattr(world, "scope", None) or world.machine
    answer = HostCommands(scope, HOST).answer(AmendRun(changes=named, at_round=at_round))
    world.settle()
    assert isinstance(answer, CoordinatorToHostAmended)
    return answer


def go_to(world: World, rounds: int) -> None:
    """Let three members work until so many verdicts are there."""
    while len(world.verdicts) < rounds:
        for worker in world.workers[:3]:
            world.behave(worker)
        world.tick(0.25)


def test_an_amendment_counts_from_its_round_on_and_is_in_the_verdicts() -> None:
    world = World(run_file(tokens=200), 3)
    go_to(world, 2)
    made = amend(world, at_round=4, round__tokens="60", outer__lr="0.5")
    assert [one.at_round for one in made.amendments] == [4, 4]
    assert world.view(world.workers[0]).amendments == made.amendments, "members see it before it counts"
    assert world.scope.run.round.tokens == 200
    go_to(world, 7)
    verdicts = [one.verdict for one in world.verdicts]
    changes = (("outer.lr", "0.5"), ("round.tokens", "60"))
    assert [one.amended for one in verdicts] == [()] * 4 + [changes] * 3
    assert [one.tokens for one in verdicts[1:]] == [120] * 3 + [60] * 3, "rounds close by the new goal"
    assert verdicts[0].previous_chain == genesis(world.run.hash), "it is the same run"
    with pytest.raises(Exception, match="own hash"):
        check_verdict(verdicts[5].model_copy(update={"amended": ()}), HOST.public_key)


@pytest.mark.parametrize("at_round", [1, 2, 3, 5])
def test_journal_and_snapshot_bring_amendments_back(at_round: int) -> None:
    """After a restart before, in and after the round with which an amendment begins to count."""
    world = World(run_file(), 3)
    go_to(world, 1)
    amend(world, at_round=3, round__tokens="60")
    amend(world, at_round=5, outer__lr="0.5")
    go_to(world, at_round)
    for events in (world.short, world.journal):
        again = world.replayed(events)
        assert again.scope.settings == world.scope.settings
        assert again.scope.run == world.scope.run
        assert journaled(again.scope) == journaled(world.scope)
    world.restart()
    go_to(world, 7)
    assert [bool(one.verdict.amended) for one in world.verdicts] == [False] * 3 + [True] * 4


def test_a_longer_run_goes_on_and_a_shorter_one_ends() -> None:
    world = World(run_file(run_rounds=3), 3)
    go_to(world, 2)
    amend(world, at_round=3, run__rounds="5")
    go_to(world, 3)
    assert not world.scope.has_ended, "the round after the old end begins with the new one"
    go_to(world, 5)
    assert world.scope.has_ended
    with pytest.raises(CommandRefused, match="has ended"):
        amend(world, run__rounds="9")
    shorter = World(run_file(run_rounds=9), 3)
    go_to(shorter, 1)
    amend(shorter, run__rounds="2")
    go_to(shorter, 2)
    assert shorter.scope.has_ended


@pytest.mark.parametrize(
    ("at_round", "changes", "words"),
    [
        (1, {"outer__lr": "0.5"}, "has begun"),
        (9, {"averaging__codec": '"int4"'}, "start a new run"),
        (9, {"outer__lr": "-1"}, "outer.lr"),
    ],
)
def test_refused_ones_change_nothing(at_round: int, changes: dict[str, str], words: str) -> None:
    world = World(run_file(), 3)
    go_to(world, 1)
    with pytest.raises(CommandRefused, match=words):
        amend(world, at_round, **changes)
    assert world.scope.settings.made == ()


def test_one_that_does_not_fit_a_later_one_is_refused() -> None:
    """A schedule that needs an end, and a later amendment that takes the end away."""
    settings = RunSettings(run_file(run_tokens=1000))
    settings.add((Amendment(at_round=5, key="run.tokens", value="null"),), 0)
    with pytest.raises(CommandRefused, match=r"needs run\.tokens"):
        settings.check([Amendment(at_round=3, key="schedule.kind", value='"linear"')], 1)


def test_replaced_ones_are_forgotten() -> None:
    settings = RunSettings(run_file())
    for number in range(200):
        new = (Amendment(at_round=number + 1, key="outer.lr", value=f"{number + 1}.5"),)
        settings.check(new, number)
        settings.add(new, number)
        assert len(settings.made) <= 2
    assert settings.at(200).outer.lr == 200.5


def test_a_verdict_brings_back_what_a_lost_journal_had() -> None:
    world = World(run_file(), 3)
    go_to(world, 1)
    before = [*world.journal]
    amend(world, at_round=2, outer__lr="0.5")
    go_to(world, 3)
    lost = world.replayed(before)
    for given in world.verdicts[1:]:
        lost.scope.settings.adopt(given.verdict)
    assert lost.scope.settings.changes(3) == (("outer.lr", "0.5"),)


def test_access_is_amended() -> None:
    world = World(run_file(), 3)
    go_to(world, 1)
    amend(world, access__joins_per_minute="7", access__admission='"open"')
    go_to(world, 2)
    admission = world.scope.admission
    assert world.scope.run.access.admission == "open"
    admission.access.follow(world.scope.run.access)
    assert admission.access.limits.joins_per_minute == 7


def test_the_host_signs_a_record_of_it() -> None:
    made = (Amendment(at_round=4, key="outer.lr", value="0.5"),)
    trail = AccessTrail(bytes(32), HOST.sign, None)
    from collections import Counter

    (recorded,) = trail.records([ev.RunAmended(amendments=made, round=1, at_s=5.0)], Counter(), 5.0)
    assert (recorded.record.kind, recorded.record.round) == ("amended", 4)
    assert recorded.record.text == "outer.lr = 0.5 from round 4 on"
    RecordCheck(bytes(32), HOST.public_key).add(recorded.record)


def test_all_stages_of_a_pipeline_are_amended_with_the_same_round() -> None:
    world = PipelineWorld(pipeline_run_file(), 4)
    while len(world.verdicts) < 1:
        for peer in world.peers[:4]:
            world.behave(peer)
        world.tick(0.25)
    amend(world, at_round=2, outer__lr="0.5")
    while len(world.verdicts) < 4:
        for peer in world.peers[:4]:
            world.behave(peer)
        world.tick(0.25)
    for number, given in enumerate(world.verdicts):
        assert {one.verdict.amended for one in given.values()} == {(("outer.lr", "0.5"),) if number >= 2 else ()}
    for scope in world.machine.scopes:
        assert scope.run.outer.lr == 0.5
    again = world.replayed(world.short)
    assert again.settings == world.machine.settings


def test_status_names_those_in_effect_and_to_come() -> None:
    world = World(run_file(), 3)
    go_to(world, 1)
    made = amend(world, at_round=3, outer__lr="0.5")
    assert world.scope.status(world.now_s).amendments == made.amendments
    stages = PipelineWorld(pipeline_run_file(), 4)
    made = amend(stages, at_round=2, outer__lr="0.5")
    assert stages.machine.status(stages.now_s).amendments == made.amendments


def test_what_a_verdict_brings_back_is_bounded_with_what_is_to_come() -> None:
    settings = RunSettings(run_file())
    to_come = tuple(Amendment(at_round=9 + at, key="outer.lr", value=f"{at}.5") for at in range(MAX_AMENDMENTS))
    settings.add(to_come, 1)
    verdict = VERDICT.model_copy(update={"round": 5, "amended": (("outer.lr", "0.25"), ("round.tokens", "60"))})
    settings.adopt(verdict)
    assert len(settings.made) == MAX_AMENDMENTS
    assert settings.changes(5) == verdict.amended
    assert settings.made[2:] == to_come[:-2], "the last ones are given up"
