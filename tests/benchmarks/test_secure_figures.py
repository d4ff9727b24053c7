from typing import Any

import pytest


def row(what: str, elements: str, round_s: float, sent_mb: float = 0.0) -> dict[str, Any]:
    return {"what": what, "elements": elements, "s a round": round_s, "MB sent a peer": sent_mb}


def test_ratios_are_secure_over_plain_of_the_largest_size() -> None:
    from secure import INT4, INT8, PLAIN, ratios_of

    loopback = [
        row(PLAIN, "1M", 0.1, 1.0),
        row(INT8, "1M", 0.4, 1.0),
        row(PLAIN, "10M", 1.0, 20.0),
        row(INT8, "10M", 1.5, 25.0),
        row(INT4, "10M", 1.3, 15.0),
    ]
    wan = [row(PLAIN, "5M", 2.0), row(INT4, "5M", 1.0)]
    trained = [{"what": what, "loss after 100 rounds": loss} for what, loss in ((PLAIN, 2.0), (INT4, 2.01))]
    ratios = ratios_of(trained, loopback, wan)
    assert ratios["secure_int4_bytes_vs_plain_int8"] == pytest.approx(0.75)
    assert ratios["secure_round_time_vs_plain"] == pytest.approx(1.5)
    assert ratios["secure_int4_round_time_vs_plain_int8_100mbit"] == pytest.approx(0.5)
    assert ratios["secure_int4_loss_vs_plain_int8"] == pytest.approx(1.005)
    assert ratios["secure_int8_loss_vs_plain_int8"] is None
    assert set(ratios_of([], [], []).values()) == {None}


def test_cases_are_a_plain_round_and_secure_ones_of_one_group() -> None:
    from round_case import run_toml
    from secure import cases

    from shoal.swarm.protocol.run_file import parse_run_file

    runs = [parse_run_file(run_toml(case)).averaging for case in cases(10**6, 8, 5)]
    assert [(one.secure, one.code_bits) for one in runs] == [(False, 8), (True, 8), (True, 4)]
    assert all(one.secure_group == 8 for one in runs)
