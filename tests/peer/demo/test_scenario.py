from collections.abc import Callable

import pytest
from tests.peer.demo.logged import STAGES_HOST, WHOLE_HOST, feed, stages_log, stages_peers, whole_peers

from shoal.peer.demo.run_log import Death, RunLog
from shoal.peer.demo.scenario import Scenario, Step, Target, choose_victim, make_scenario
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import RunSection


def whole(peers: int | None = None, minutes: float = 3.0, preset: str | None = None) -> Scenario:
    return make_scenario(peers, minutes, preset, pipeline=False)


def stages(peers: int | None = None, minutes: float = 3.0, preset: str | None = None) -> Scenario:
    return make_scenario(peers, minutes, preset, pipeline=True)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(UserError, match=r"--preset: expected one of diloco, sparseloco, not 'adam'"):
        whole(preset="adam")


def test_too_few_peers_are_refused() -> None:
    with pytest.raises(UserError, match="--peers"):
        whole(peers=1)
    with pytest.raises(UserError, match="--peers: expected 5 or more"):
        stages(peers=4)


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="leave out --preset"):
        stages(preset="diloco")
    with pytest.raises(UserError, match="--minutes: expected 1 or more"):
        stages(minutes=0.5)


@pytest.mark.parametrize("make", [whole, stages])
def test_steps_are_in_the_order_of_their_shares(make: Callable[[], Scenario]) -> None:
    steps = [step for step in make().steps if step.act != "restart"]
    assert steps == sorted(steps, key=lambda step: step.after)


def test_whole_models_are_started_killed_when_all_train_and_joined() -> None:
    *starts, kill, late = whole(peers=2).steps
    log = RunLog(RunSection(name="demo", seed=0, max_s=60.0), 1000.0)
    assert [(step.act, step.choose(log)) for step in starts] == [("start", Target(f"peer-{n}")) for n in (1, 2)]
    feed(log, WHOLE_HOST[:2], {name: events[:1] for name, events in whole_peers().items()})
    assert (kill.act, kill.choose(log)) == ("kill", None)
    feed(log, [], {name: events[1:2] for name, events in whole_peers().items()})
    assert kill.choose(log) == Target("peer-2")
    assert (late.act, late.choose(log)) == ("start", Target("peer-3"))


def pipeline_steps() -> tuple[Step, Step, Step]:
    first, second, back = stages().steps[-3:]
    assert (first.act, second.act, back.act) == ("kill", "kill", "restart")
    return first, second, back


def test_a_replica_is_killed_in_the_middle_of_a_round() -> None:
    first, second, _ = pipeline_steps()
    log = feed(stages_log(), STAGES_HOST[:18], {**stages_peers(), "peer-4": stages_peers()["peer-4"][:3]})
    assert log.commits[-1]["time"] == 1022.0
    assert log.round_s == 6.0
    chosen = {}
    for now in (1022.5, 1025.0, 1027.5):
        log.now = now
        chosen[now] = first.choose(log)
    assert chosen == {1022.5: None, 1025.0: Target("peer-4", 0, 2), 1027.5: None}
    log.now = 1026.0
    log.kill(Death("peer-3", 1024.0, 1, 2))
    assert second.choose(log) is None, "no round was committed since then"
    log.deaths[-1] = Death("peer-3", 1021.0, 1, 2)
    assert log.round_s == 10.0
    assert second.choose(log) == Target("peer-2", 1, 1), "the only one, as stage 0 has two"


def test_the_last_victim_comes_back_when_the_run_waits_for_it() -> None:
    *_, back = pipeline_steps()
    log = feed(stages_log(), [], stages_peers())
    log.kill(Death("peer-2", 1025.0, 1, 1))
    log.now = 1026.0
    assert back.choose(log) is None
    log.outlook = "stage 1 waits for a replica"
    assert back.choose(log) == Target("peer-2")
    log.outlook, log.now = "", 1045.5
    assert back.choose(log) == Target("peer-2")


def test_first_a_replica_of_the_middlemost_stage_that_has_several() -> None:
    assert choose_victim({"a": 0, "b": 1, "c": 1, "d": 2, "e": 2}, 3, alone=False) == Target("c", 1, 2)
    assert choose_victim({"a": 0, "b": 0, "c": 1, "d": 2}, 3, alone=False) == Target("b", 0, 2)
    assert choose_victim({"a": 0, "b": 1, "c": 2}, 3, alone=False) is None


def test_then_the_only_one_of_another_stage() -> None:
    def only(holders: dict[str, int]) -> Target | None:
        return choose_victim(holders, 3, alone=True, avoid={1})

    assert only({"a": 0, "b": 1, "c": 2, "d": 2}) == Target("a", 0, 1)
    assert only({"a": 0, "b": 0, "c": 1, "d": 2, "e": 2}) == Target("c", 1, 1)  # there is no other one
    assert only({"a": 0, "b": 1, "c": 1}) is None  # stage 2 is not held yet
