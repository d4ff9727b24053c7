from typing import Any

import pytest


def computed(kind: str, began_s: float, end_s: float, number: int, start: int = 0, stages: Any = ()) -> dict[str, Any]:
    return {"event": kind, "began_s": began_s, "time": end_s, "round": number, "start": start, "stages": list(stages)}


def test_the_bound_is_that_of_the_slowest_stage_with_all_replicas_busy() -> None:
    from pipeline_figures import bound_of

    cut = (0, 4, 8)
    assert bound_of(cut, [(0, 0), (0, 0), (1, 1)], [0.1, 0.1, 0.1]) == pytest.approx(2.5)
    assert bound_of(cut, [(0, 0), (0, 0), (1, 1)], [0.1, 0.4, 0.05]) == pytest.approx(2.5 + 0.625)
    # Who holds both takes twice as long for each.
    assert bound_of(cut, [(0, 1), (1, 1)], [0.1, 0.1]) == pytest.approx(1.25)


def test_whole_rounds_are_counted_from_the_first_verdict_on() -> None:
    from pipeline_figures import whole_rounds

    assert whole_rounds([{"time": 10.0}, {"time": 14.0}, {"time": 20.0}], 40) == (8.0, 2)


def test_training_is_from_a_rounds_first_computation_to_its_last() -> None:
    from pipeline_figures import while_training

    verdicts = [{"round": 0, "time": 10.0}, {"round": 1, "time": 20.0}]
    notes = [
        [computed("forward", 1.0, 2.0, 0), computed("forward", 11.0, 12.0, 1), computed("backward", 14.0, 15.0, 1)],
        [computed("backward", 12.0, 16.0, 1), {"event": "round_end", "began_s": 16.0, "time": 20.0}],
    ]
    assert while_training(notes, verdicts, 40) == 8.0


def test_a_micro_batch_is_complete_where_its_gradient_counts() -> None:
    from pipeline_figures import completions, rates_over_time

    notes = [
        [computed("backward", 0.0, 3.0, 0, stages=[1]), computed("backward", 0.0, 1.0, 0, stages=[0, 1])],
        [computed("backward", 0.0, 2.0, 0), computed("forward", 0.0, 2.5, 0)],
    ]
    assert completions(notes, 1) == [1.0, 3.0]
    assert rates_over_time([1.0, 1.5, 3.0, 9.0], 1.0, 5.0, 2.0) == [1.0, 0.5]


def test_recovered_is_the_first_window_as_fast_as_before() -> None:
    from pipeline_figures import recovered_s

    slow = [float(second) for second in range(20)]
    fast = [20 + step / 2 for step in range(20)]
    assert recovered_s([*slow, *fast], 10.0, 2.0, 4.0) == pytest.approx(10.0)
    # No window is whole, or none is as fast.
    assert recovered_s([*slow, *fast[:4]], 10.0, 2.0, 4.0) is None
    assert recovered_s(slow, 10.0, 2.0, 4.0) is None


def test_ratios_have_the_goals_names_and_are_the_worst_of_all_rows() -> None:
    from pipeline_figures import ratios_of

    rows = [
        {"what": "equal", "vs bound": 0.9},
        {"what": "equal", "vs bound": 0.8},
        {"what": "unequal", "vs bound": 0.7},
        {"what": "slow link", "activations": "int8", "mb/s": 6.0},
        {"what": "slow link", "activations": "float32", "note": "needs root"},
        {"what": "refill", "s": 9.0, "vs patience": 1.5},
        {"what": "over time", "s": 1.0, "mb/s": 3.0},
        {"what": "loss", "activations": "float32", "loss": 2.0},
        {"what": "loss", "activations": "int8", "loss": 2.01},
    ]
    assert ratios_of(rows) == {
        "equal_peers_vs_bound": 0.8,
        "unequal_peers_vs_bound": 0.7,
        "int8_activations_loss_vs_float32": pytest.approx(1.005),
        "int8_activations_rate_vs_float32": None,
        "refill_s_vs_patience": 1.5,
    }
    assert set(ratios_of([]).values()) == {None}
    assert ratios_of([]).keys() == ratios_of(rows).keys()


def test_a_chain_that_packs_nothing_away_trains_as_the_whole_model_does() -> None:
    from pipeline_loss import Chain

    from shoal.compression.registry import get_codec
    from shoal.peer.recipes.gpt import GptRecipe
    from shoal.swarm.protocol.run_file import DataSection

    settings = {"layers": 4, "width": 16, "heads": 2, "context": 16, "tie_embedding": False}
    recipe = GptRecipe(settings, DataSection(source="stdlib"))
    losses = {}
    for codec in ("float32", "int4"):
        chain = Chain(recipe, 1, get_codec(codec))
        before = chain.held_out_loss(8)
        chain.train(3)
        losses[codec] = before, chain.held_out_loss(8)
    assert losses["float32"][0] == losses["int4"][0]
    assert losses["float32"][1] < losses["float32"][0]
    assert losses["float32"][1] != losses["int4"][1]


def test_a_peers_memory_is_enough_for_one_stage_and_for_no_two() -> None:
    from pipeline import CASES, LINK_CASE, REFILL_CASE
    from pipeline_run import LAYERS, MICRO_BATCH

    from shoal.swarm.memory_account import account_of
    from shoal.swarm.pipeline.planner.model import LayerCost, PeerCapability, PlanningProblem

    for case in (*CASES, LINK_CASE, REFILL_CASE):
        pipeline = case.run_file.pipeline
        assert pipeline is not None
        sent = MICRO_BATCH * case.tokens * case.width
        layer = LayerCost(4 * (case.ballast + case.width * (case.width + 1)), 4 * sent, 12 * sent)
        peer = PeerCapability("peer", case.memory_bytes, (0.1,) * LAYERS, 1e9)
        swarm = PlanningProblem([layer] * LAYERS, [peer], pipeline.in_flight, account_of(case.run_file).demand())
        table = swarm.table(range(0, LAYERS + 1, LAYERS // case.stages))
        assert ((table.rates[0] > 0) == (table.first == table.last)).all(), case
        assert not table.recomputes.any(), case
