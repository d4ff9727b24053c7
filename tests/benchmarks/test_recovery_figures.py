from typing import Any

import pytest


def at(name: str, time_s: float, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time_s, **fields}


def verdict(time_s: float, tokens: int = 10, committed: bool = True) -> dict[str, Any]:
    return at("verdict", time_s, committed=committed, tokens=tokens)


def test_ratios_have_the_goals_names_and_are_null_where_nothing_was_measured() -> None:
    from recovery import ratios_of

    rows = [
        {"what": "join", "elements": "10M", "s": 6.0, "beside s": 0.5},
        {"what": "join", "elements": "100M", "note": "needs more memory"},
        {"what": "round with a joiner", "elements": "10M", "s": 4.2, "beside s": 4.0},
        {"what": "checkpoint", "elements": "10M", "s": 0.03, "beside s": 0.02},
        {"what": "coordinator killed", "elements": "10M", "s": 3.0, "beside s": 2.5},
        {"what": "peer killed", "elements": "10M", "s": 7.0, "beside s": 6.0},
    ]
    assert ratios_of(rows) == {
        "join_vs_wire_time_10M": 12.0,
        "join_vs_wire_time_100M": None,
        "round_with_joiner_vs_without": 1.05,
        "checkpoint_stall_vs_memcpy": 1.5,
        "coordinator_restart_to_commit_s": 3.0,
        "peer_kill_to_verdict_s": 7.0,
    }
    assert set(ratios_of([]).values()) == {None}
    assert list(ratios_of([])) == list(ratios_of(rows))


def test_a_join_begins_with_its_process_and_ends_with_its_first_step() -> None:
    from recovery import join_row

    late = at("committed", 9.0, included=False)
    joins = [
        [
            at("joined", 2.0),
            at("state_chunk", 4.0),
            at("synced", 4.5),
            at("step", 5.0),
            late,
            at("committed", 12.0, included=True),
        ],
        [at("joined", 25.0), at("state_chunk", 26.0), at("step", 30.0), at("committed", 33.0, included=True)],
        [
            at("joined", 42.0),
            at("state_chunk", 43.0),
            at("step", 46.0),
            at("step", 47.0),
            at("committed", 48.0, included=True),
        ],
    ]
    row = join_row(10**7, joins, [1.0, 22.0, 40.0], 0.25)
    assert (row["s"], row["s from first byte"], row["s until committed"]) == (6.0, 3.0, 11.0)
    assert row["s until admitted"] == 2.0
    assert (row["elements"], row["beside s"], row["times"]) == ("10M", 0.25, 3)


def test_rounds_run_from_one_committed_verdict_to_the_next() -> None:
    from recovery import rounds_of

    verdicts = [verdict(10.0), verdict(14.0, 20), verdict(15.0, committed=False), verdict(20.0, 5)]
    assert rounds_of(verdicts) == [((10.0, 14.0), 20), ((14.0, 20.0), 5)]
    assert rounds_of(verdicts[:1]) == []


def test_a_round_with_some_of_a_visit_is_one_with_a_joiner() -> None:
    from recovery import token_s, visits_of

    rounds = [((0.0, 4.0), 2), ((4.0, 10.0), 2), ((10.0, 18.0), 2), ((18.0, 28.0), 2)]
    events = [
        at("visit_begins", 4.5),
        at("synced", 5.0),
        at("visit_ends", 5.5),
        at("visit_begins", 17.0),
        at("visit_ends", 19.0),
        at("visit_begins", 30.0),
    ]
    assert visits_of(events) == [(4.5, 5.5), (17.0, 19.0)]
    assert token_s(rounds, visits_of(events)) == ([2.0], [3.0, 4.0, 5.0])
    assert token_s(rounds, []) == ([2.0, 3.0, 4.0, 5.0], [])


def test_a_checkpoints_stall_stands_beside_a_copy_of_what_it_saves() -> None:
    from recovery import stall_row

    stalls = [{"stall_s": 0.01 * factor, "copy_s": 0.02, "copy_bytes": 100} for factor in (1, 2, 9)]
    row = stall_row(10**7, stalls, 150)
    assert row["s"] == 0.02
    assert row["beside s"] == pytest.approx(0.03)
