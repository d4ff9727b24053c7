import math

import pytest

from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.simulation.figures import figures_of
from shoal.swarm.simulation.links import LINK_SHARE, Transfers
from shoal.swarm.simulation.result import Model, PipelineCourse, Result
from shoal.swarm.simulation.run import simulate
from shoal.swarm.simulation.traces import Churn, Machine, Session, Trace

MODEL = Model.decoder(1_000_000, 100, 4)
MICRO = 2
SAMPLES = 80
"""Of a round."""

ROOM = 20_000_000
"""Memory for two of the four layers, and not for three."""


def run_file(stages: int | str = 2, samples: int = SAMPLES) -> RunFile:
    asked = f'"{stages}"' if isinstance(stages, str) else stages
    return parse_run_file(f"""
algorithm = "virtual_batch"
[run]
name = "simulated"
[recipe]
name = "own"
[data]
source = "own"
[pipeline]
stages = {asked}
micro_batch = {MICRO}
activations = "float32"
max_in_flight = 8
[round]
tokens = {100 * samples}
max_s = 3000
patience_s = 6
""")


def machine(name: str = "m", **others: object) -> Machine:
    usual = {"name": name, "tokens_per_s": 1000.0, "up_bps": 1e9, "down_bps": 1e9, "host_bytes": ROOM}
    return Machine(**(usual | others))  # type: ignore[arg-type]


def simulated(
    *machines: Machine, rounds: int = 3, run: RunFile | None = None, seed: int = 1, until_s: float = 3000.0
) -> Result:
    trace = Trace("test", lambda number, _: machines[number])
    return simulate(run or run_file(), MODEL, trace, len(machines), seed, until_s, rounds)


def course_of(result: Result) -> PipelineCourse:
    assert result.pipeline is not None
    return result.pipeline


def named(count: int, **others: object) -> list[Machine]:
    return [machine(f"m{number}", network=f"n{number}", **others) for number in range(count)]


def test_activations_and_gradients_are_what_the_samples_have() -> None:
    result = simulated(*named(4))
    course = course_of(result)
    width = math.sqrt(1e6 / 48)
    assert [one.tokens for one in result.committed] == [100 * SAMPLES] * 3
    assert course.boundaries == (0, 2, 4)
    expected = 3 * SAMPLES * round(100 * width) * 4
    assert course.activation_bytes == course.gradient_bytes == {1: pytest.approx(expected, rel=1e-3)}
    assert course.driven == 3 * SAMPLES / MICRO
    assert course.computed_samples == 2 * 3 * SAMPLES
    assert result.member_sent_bytes == pytest.approx(result.member_received_bytes)


def test_a_run_is_as_fast_as_its_slowest_stage() -> None:
    # Of two replicas each trains half of the model at 2000 tokens/s, and computes forward twice to save memory.
    run = run_file(samples=8 * SAMPLES)
    even, uneven = simulated(*named(4), run=run), simulated(*named(3), machine("slow", tokens_per_s=250.0), run=run)
    figures = [figures_of(one, None) for one in (even, uneven)]
    assert course_of(even).replicas == course_of(uneven).replicas == (2, 2)
    # The plan does not know that the last stage never computes forward twice.
    for one, figure, planned, bound in zip((even, uneven), figures, (3000.0, 1875.0), (3000.0, 2500.0), strict=True):
        assert course_of(one).planned_tokens_per_s == pytest.approx(planned)
        assert 0.85 * bound < figure.tokens_per_s <= bound


def test_a_slow_link_between_stages_sets_the_pace() -> None:
    link_bps = 1e6
    quick, slow = simulated(*named(2)), simulated(*named(2, up_bps=link_bps, down_bps=link_bps, latency_s=0.0))
    micro_batch_s = 8 * MICRO * round(100 * math.sqrt(1e6 / 48)) * 4 / (link_bps * LINK_SHARE)
    rounds = [one.planned_s - before.ended_s for before, one in zip(slow.committed, slow.committed[1:], strict=False)]
    # The activations of one way go beside the gradients of the other; fill and drain come on top.
    assert all(SAMPLES / MICRO <= one / micro_batch_s <= SAMPLES / MICRO + 4 for one in rounds)
    assert figures_of(slow, None).tokens_per_s < figures_of(quick, None).tokens_per_s / 2


def test_a_stage_whose_holder_dies_is_given_to_another_machine_which_fetches_its_state() -> None:
    usual = simulated(*named(5), rounds=6)
    moment_s = usual.rounds[2].ended_s + 1.0
    for says_goodbye in (True, False):
        mortal = machine("mortal", sessions=(Session(0.0, moment_s, says_goodbye),))
        result = simulated(*named(4), mortal, rounds=6)
        course = course_of(result)
        assert sum(usual.pipeline.replicas) == 5 if usual.pipeline else False
        assert sum(course.replicas) == 4
        assert [one.committed for one in result.rounds] == [True] * 6
        assert result.rounds[3].ended_s > usual.rounds[3].ended_s


def test_the_only_holder_of_a_stage_takes_the_newest_state_with_it() -> None:
    lone = simulated(*named(2), rounds=2)
    moment_s = lone.rounds[1].ended_s + 1.0
    back_s = moment_s + 60.0
    mortal = machine("mortal", sessions=(Session(0.0, moment_s, says_goodbye=False), Session(back_s)))
    result = simulated(machine("one"), mortal, machine("spare", sessions=(Session(moment_s + 1.0),)), rounds=4)
    course = course_of(result)
    # Nobody else has its state: the run waits for it to come back, whoever is given the stage meanwhile.
    assert result.rounds[2].ended_s > back_s
    assert course.stalled_s > back_s - moment_s - 30.0
    assert result.rounds[3].committed


def test_a_replica_of_a_stage_gets_its_state_from_the_other_one() -> None:
    result = simulated(*named(2), machine("late", sessions=(Session(30.0),)), rounds=30)
    course = course_of(result)
    assert sum(course.replicas) == 3
    assert course.state_bytes >= 500_000 * 4
    assert result.committed[-1].members == 3


def test_machines_that_cannot_hold_the_model_together_wait() -> None:
    result = simulated(machine(), until_s=200.0)
    assert not result.rounds
    assert "cannot hold" in course_of(result).shortage
    assert any("cannot hold" in note for note in figures_of(result, None).notes)


def test_the_same_seed_gives_the_same_pipeline() -> None:
    churn = [machine(f"m{n}", network=f"n{n}", churn=Churn(200.0, 30.0, 0.7, 0.5)) for n in range(8)]
    one, two, other = (simulated(*churn, rounds=8, seed=seed) for seed in (3, 3, 4))
    figures = [figures_of(each, None).as_dict() for each in (one, two, other)]
    assert figures[0] == figures[1]
    assert one.pipeline == two.pipeline
    assert figures[0] != figures[2]
    assert course_of(one).computed_samples >= 2 * SAMPLES * len(one.committed)


def test_a_pipeline_needs_to_know_the_layers() -> None:
    trace = Trace("test", lambda number, _: machine())
    with pytest.raises(UserError, match="--layers"):
        simulate(run_file(), Model(1000, 10), trace, 2, 0, 100.0)


def test_a_link_serves_one_transfer_after_the_other_in_each_direction() -> None:
    links, size = Transfers(relay_bps=1e6), 1e6 * LINK_SHARE / 8
    assert links.end_s(0.0, ("a", 1e6), ("b", 1e7), size, relayed=False) == pytest.approx(1.0)
    assert links.end_s(0.0, ("a", 1e6), ("c", 1e7), size, relayed=False) == pytest.approx(2.0)
    assert links.end_s(0.0, ("b", 1e6), ("a", 1e6), size, relayed=False) == pytest.approx(1.0)
    assert links.end_s(5.0, ("a", 1e6), ("b", 1e7), size, relayed=True) == pytest.approx(6.0)
    assert links.end_s(5.0, ("d", 1e7), ("e", 1e7), size, relayed=True) == pytest.approx(7.0)
