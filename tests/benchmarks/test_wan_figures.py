from typing import Any

import pytest


def row(elements: str, mbit: str, trip_ms: float, **figures: Any) -> dict[str, Any]:
    return {"codec": "int8", "elements": elements, "Mbit/s": mbit, "round trip ms": trip_ms, **figures}


def test_ratios_are_of_the_goals_links() -> None:
    from wan import ratios_of

    share = {"link share": 0.5, "exchange's share": 0.75, "s a round": 8.0, "plain TCP s": 10.0}
    rows = [
        row("50M", "100", 50.0, **share),
        row("10M", "100", 50.0, **{**share, "link share": 0.25, "exchange's share": 0.5, "plain TCP s": 4.0}),
        row("10M", "20", 50.0, **share),
        row("50M", "100", 10.0, **share),
        row("50M", "100/100/100/10", 50.0, **{"exchange s": 3.0, "predicted s": 2.0}),
        row("10M", "100/100/100/10", 50.0, **{"exchange s": 9.0, "predicted s": 2.0}),
    ]
    ratios = ratios_of(rows)
    assert ratios == {
        "wan_100mbit_25ms_50M_link_share": 0.5,
        "wan_100mbit_25ms_10M_link_share": 0.25,
        "wan_100mbit_25ms_50M_exchange_share": 0.75,
        "wan_100mbit_25ms_10M_exchange_share": 0.5,
        "wan_100mbit_25ms_50M_vs_plain_tcp": 0.8,
        "wan_100mbit_25ms_10M_vs_plain_tcp": 2.0,
        "slow_member_vs_predicted": 1.5,
    }
    assert set(ratios_of([]).values()) == {None}


def test_what_the_bytes_alone_take() -> None:
    from pacing import Lap
    from wan import ideal_s, predicted_s

    laps = [Lap(1.0, 0.0, 10**6, 2 * 10**6), Lap(1.0, 0.0, 10**6, 0)]
    assert ideal_s(laps, (16.0, 100.0)) == pytest.approx(1.0)
    assert ideal_s(laps, (100.0, 1.0)) == pytest.approx(8.0)
    # Four alike: each sends and receives 3/2 of the vector.
    assert predicted_s((8.0,) * 4, 10**6) == pytest.approx(1.5)
    # One at a tenth owns nothing and sends its vector.
    assert predicted_s((80.0, 80.0, 80.0, 8.0), 10**6) == pytest.approx(1.0)


def test_all_cases_that_were_asked_for() -> None:
    from types import SimpleNamespace

    from wan import cases

    options = SimpleNamespace(
        sizes=[10, 20], codecs=["int8"], rates=[20.0, 100.0], delays=[10.0], slow_of=100.0, peers=3, rounds=1
    )
    made = cases(options)
    assert [(case.elements, link.words, link.round_trip_ms) for case, link in made] == [
        (size, words, trip_ms)
        for size in (10, 20)
        for words, trip_ms in (("20", 10.0), ("100", 10.0), ("100/100/10", 50.0))
    ]
    assert made[-1][0].bandwidths_bps == (1e8, 1e8, 1e7)
    assert not made[0][0].bandwidths_bps
