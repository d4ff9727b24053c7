from typing import Any

import pytest


def row(what: str, elements: str, **figures: Any) -> dict[str, Any]:
    return {"what": what, "elements": elements, **figures}


def test_ratios_are_ours_over_theirs_of_the_same_size() -> None:
    from allreduce import ratios_of

    rows = [
        row("Shoal int8", "1M", **{"s a round": 0.05, "exchange s": 0.03}),
        row("Shoal int8", "10M", **{"s a round": 0.25, "exchange s": 0.2}),
        row("Shoal float32", "50M", **{"s a round": 9.0, "exchange s": 9.0}),
        row("Shoal int8", "50M", **{"s a round": 0.6, "exchange s": 0.5}),
        row("gloo float32, in the clear", "50M", **{"s a round": 0.3}),
        row("Hivemind int8", "10M", **{"s a round": 1.25}),
    ]
    ratios = ratios_of(rows)
    assert ratios["int8_50M_vs_gloo"] == pytest.approx(2.0)
    assert ratios["int8_10M_vs_hivemind"] == pytest.approx(0.2)
    assert ratios["overhead_1M_s"] == pytest.approx(0.05 - 0.5 / 50)
    assert ratios["grid16_bytes_vs_flat"] is None


def test_what_is_missing_makes_no_ratio() -> None:
    from allreduce import ratios_of

    alone = [
        row("Shoal int8", "1M", **{"s a round": 0.05, "exchange s": 0.03}),
        row("Hivemind int8", "10M", note="died"),
    ]
    assert set(ratios_of(alone).values()) == {None}
    assert set(ratios_of([])) == set(ratios_of(alone))


def test_apart_every_codec_is_measured_twice() -> None:
    from argparse import Namespace

    from allreduce import systems_of

    options = Namespace(
        sizes=[100],
        codecs=["int8", "float32"],
        peers=4,
        rounds=1,
        beside=["gloo"],
        grid=0,
        apart=True,
        uncommitted=False,
    )
    ((*ours, gloo),) = systems_of(options)
    assert [one.what for one in ours] == ["Shoal int8", "Shoal float32", "Shoal int8, apart", "Shoal float32, apart"]
    addresses = [{one.case.loopback_address(number) for number in range(4)} for one in ours]
    assert [len(one) for one in addresses] == [1, 1, 4, 4]
    assert not gloo.is_ours
    options.apart = False
    assert len(systems_of(options)[0]) == 3


def test_bytes_of_a_flat_group() -> None:
    from allreduce import flat_bytes, grid_ratio

    # Chunks of 8192 of int8: a float32 scale for 1024 values.
    assert flat_bytes("int8", 2**20, 16) == 2 * 15 / 16 * (2**20 + 4 * 2**10)
    assert flat_bytes("float32", 10_000, 4) == 2 * 3 / 4 * 40_000
    measured = row(
        "Shoal int8, groups of 4", "4M", peers=16, **{"MB sent a peer": 1.05e-6 * flat_bytes("int8", 4_000_000, 16)}
    )
    assert grid_ratio([measured]) == pytest.approx(1.05)


def test_a_run_file_for_every_case() -> None:
    from round_case import Case, run_toml

    from shoal.swarm.protocol.run_file import parse_run_file

    run = parse_run_file(run_toml(Case("float16", 100, peers=7, patience_s=9.0)))
    assert (run.averaging.codec, run.round.tokens, run.round.patience_s) == ("float16", 7, 9.0)
    grid = parse_run_file(run_toml(Case("int8", 100, peers=16, group_size=4)))
    assert (grid.averaging.group_size, grid.round.tokens) == (4, 16)


def test_figures_of_laps() -> None:
    from pacing import Lap, costs, notes, seconds, stages

    quick = Lap(1.0, 0.5, 10, peak_bytes=100, in_all_bytes=800, plan_s=0.2, held_s=0.9, verdict_s=0.95)
    slow = Lap(3.0, 0.25, 30, peak_bytes=400, plan_s=0.1, held_s=2.1, verdict_s=2.35, note="late")
    rounds = [[quick, slow], [quick, quick], [slow, slow]]
    assert seconds(rounds) == 3.0
    assert stages(rounds) == {
        "plan s": pytest.approx(0.1),
        "exchange s": pytest.approx(2.0),
        "verdict s": pytest.approx(0.25),
        "mean s": pytest.approx(0.65),
    }
    assert set(stages([[quick, Lap(1.0, 0.0, 0)]]).values()) == {None}
    figures = costs(rounds, elements=100)
    assert figures == {
        "CPU s": 0.75,
        "peak MB": pytest.approx(4e-4),
        "peak / contribution": 1.0,
        "in all / contribution": 2.0,
        "MB sent a peer": pytest.approx(20e-6),
    }
    assert costs([[Lap(1.0, 0.0, 0)]], 1)["peak MB"] is None
    assert notes(rounds) == "late"


def test_systems_are_measured_in_turns() -> None:
    from allreduce import System, in_turns
    from pacing import RoundFailed
    from round_case import Case

    order: list[str] = []

    def system(what: str, runs: list[Any], *, is_ours: bool = False) -> System:
        def run(limit_s: float) -> Any:
            order.append(what)
            if isinstance(following := runs.pop(0), Exception):
                raise following
            return following

        return System(what, Case("int8", 10, peers=2), run, lambda made: row(what, "10", runs=made), is_ours)

    systems = [system("a", [1, 2, 3], is_ours=True), system("b", [4, RoundFailed("died"), 6]), system("c", [7, 8, 9])]
    rows = list(in_turns(systems, 3, 1.0))
    assert order == ["a", "b", "c", "c", "b", "a", "a", "c"], "who failed has no turn any more"
    assert rows[0] == row("a", "10", runs=[1, 2, 3])
    assert rows[1] == row("b", "10", peers=2, note="died")
    assert rows[2] == row("c", "10", runs=[7, 8, 9])
    with pytest.raises(RoundFailed):
        list(in_turns([system("a", [RoundFailed("died")], is_ours=True)], 1, 1.0))


def test_rounds_of_all_turns_count_alike() -> None:
    from allreduce import gloo
    from pacing import Lap
    from round_case import Case

    def laps(*seconds: float) -> list[list[Lap]]:
        return [[Lap(0.1, 1.0, 8), Lap(one, 1.0, 8)] for one in seconds]

    one = gloo(Case("float32", 100, peers=2))
    made = one.row([laps(1.0, 2.0, 9.0), laps(3.0, 4.0, 5.0)])
    assert (made["s a round"], made["exchange s"], made["by turn"]) == (3.5, 3.5, "2 4")


def test_the_account_adds_up() -> None:
    from account import steps, table

    rows = table({"encode": 0.25, "seal": 0.5}, 2.0)
    assert [(one["CPU s"], one["share"]) for one in rows] == [(0.25, 0.125), (0.5, 0.25), (1.25, 0.625), (2.0, 1.0)]
    measured = steps("int8", 300_000, 3)
    assert {"encode", "seal", "open", "reduce", "settle the residual", "decode"} <= set(measured)
    assert all(cpu_s >= 0 for cpu_s in measured.values())
