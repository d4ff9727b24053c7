import pytest


def test_means_are_of_the_rounds_after_the_first_one() -> None:
    from simulate import Outcome, Verdict

    verdicts = [
        Verdict(50.0, 60.0, 1e9, 1e9),
        Verdict(70.0, 75.0, 1e9 + 8e6, 1e9 + 1e3),
        Verdict(85.0, 100.0, 1e9 + 16e6, 1e9 + 5e3),
    ]
    assert Outcome.of(verdicts, 4, skipped=2).member_mb == pytest.approx(2.0)
    found = Outcome.of(verdicts, 4)
    assert found.rounds_per_hour == pytest.approx(3600 * 2 / 40)
    assert (found.work_s, found.exchange_s) == (10.0, 10.0)
    assert found.member_mb == pytest.approx(2.0)
    assert found.host_kbit == pytest.approx(1.0)


def test_the_simulator_gets_the_links_and_the_work_of_the_real_run() -> None:
    from simulate import STEP_S, Case, OwnTimes, predicted

    even, slow = (
        predicted(Case(1_000_000, rates, 15.0, 3, 15.0), [OwnTimes(STEP_S, 0.0, 0.0)] * 4)
        for rates in ((8.0,) * 4, (8.0, 8.0, 8.0, 0.8))
    )
    assert even.work_s == pytest.approx(15.0, rel=0.03)
    # int8, 2 (N - 1) / N of the model at 0.95 of 8 Mbit/s; the slow member has to send its contribution once, and to
    # get the last chunk of each part then.
    assert even.exchange_s == pytest.approx(1.5 / 0.95, rel=0.2)
    assert 10 / 0.95 < slow.exchange_s < 1.15 * 10 / 0.95
    least_mb = 1.5 * (1 + 52 / 1448 + 26 / 1448)
    assert least_mb < even.member_mb < 1.1 * least_mb  # and audits, and messages
