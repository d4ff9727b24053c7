import math
from typing import Any

import pytest


def peers(rest: float, peak: float, joiner: float | None, elements: int) -> Any:
    from memory import Measured, Peer

    def peer(rest_n: float, peak_n: float) -> Peer:
        return Peer(int(4 * elements * rest_n) + 100, int(4 * elements * peak_n) + 200)

    others = (peer(rest / 2, peak / 2), peer(rest, peak))
    return Measured(elements, others, None if joiner is None else peer(joiner, joiner))


def test_slopes_are_told_from_constants() -> None:
    from memory import AMOUNTS, Line

    sizes = [peers(6.5, 7.0, 8.0, 1000), peers(6.5, 7.0, 8.0, 5000)]
    for name, slope, constant in (("rest", 6.5, 100), ("peak", 7.0, 200), ("joiner's peak", 8.0, 200)):
        line = Line.through(sizes, AMOUNTS[name])
        assert (line.slope, line.constant) == (pytest.approx(slope), pytest.approx(constant))


def test_ratios_are_what_is_beside_the_training() -> None:
    from memory import ratios_of
    from memory_stages import StagePeer

    found = {
        "diloco": [peers(6.5, 7.0, 8.0, 1000), peers(6.5, 7.0, 8.0, 5000)],
        "virtual_batch": [peers(6.0, 7.5, None, 1000), peers(6.0, 7.5, None, 5000)],
    }
    stages = [StagePeer(1, 100, 1000), StagePeer(1, 100, 900), StagePeer(2, 300, 2500), StagePeer(2, 200, 0)]
    ratios = ratios_of(found, stages, 4)
    assert ratios["diloco_rest_n"] == pytest.approx(3.5)
    assert ratios["diloco_peak_n"] == pytest.approx(4.0)
    assert ratios["joiner_peak_n"] == pytest.approx(5.0)
    assert ratios["virtual_batch_host_peak_n"] == pytest.approx(5.5)
    assert ratios["stage_peak_n"] == pytest.approx(7.5 - 2)
    assert ratios["account_vs_measured_worst"] is not None
    assert ratios["account_vs_measured_worst"] >= 8.0 / (3 + 4.01)
    assert set(ratios_of({}, [], 4).values()) == {None}
    assert list(ratios_of({}, [], 4)) == list(ratios)


def event(name: str, time_s: float, **about: Any) -> dict[str, Any]:
    return {"event": name, "time": time_s, **about}


def test_a_stall_is_charged_without_the_exchange() -> None:
    from memory import stalls_of

    events = [event("ready", 11.0), event("verdict_here", 15.0), event("blocked", 16.5, by="close_round", since=10.0)]
    assert list(stalls_of(events)) == [2.5]


def test_a_repeated_ready_does_not_shorten_it() -> None:
    from memory import stalls_of

    events = [event("ready", 11.0), event("ready", 12.0), event("verdict_here", 15.0)]
    assert list(stalls_of([*events, event("blocked", 16.5, by="close_round", since=10.0)])) == [2.5]


def test_with_overlap_both_ends_of_a_round_count() -> None:
    from memory import stalls_of

    events = [
        event("blocked", 10.5, by="close_round", since=10.0),
        event("ready", 10.7),
        event("verdict_here", 14.0),
        event("blocked", 15.25, by="conclude_round", since=15.0),
    ]
    assert list(stalls_of(events)) == [0.75]


def test_what_does_not_fit_as_a_whole_is_cut() -> None:
    from memory import fits_rows

    rows = {(row["model"], row["GPU"]): row for row in fits_rows()}
    assert rows["1B", "24 GB"]["128 GB host"] == "whole"
    assert rows["13B", "8 GB"]["16 GB host"].endswith(" stages")

    def stages(entry: str) -> int:
        return 1 if entry.startswith("whole") else int(entry.split()[0])

    for row in rows.values():
        by_host = [stages(row[f"{host} GB host"]) for host in (16, 32, 64, 128)]
        assert by_host == sorted(by_host, reverse=True)


def test_the_account_of_a_case_is_that_of_its_run() -> None:
    from memory import CASES, predicted

    plain, overlap, batch = (predicted(CASES[name], 4) for name in ("diloco", "overlap", "virtual_batch"))
    # The parameters that were contributed, and a copy of the inner optimizer's two values for checkpoints.
    assert overlap["peak"] == pytest.approx(plain["peak"] + 1 + 2)
    assert batch["peak"] == pytest.approx(plain["peak"] + 1), "AdamW has a value more than Nesterov"
    assert not any(math.isnan(one) for one in plain.values())
