"""How far a run is: shares, speeds over wall time and time left, and how they are drawn with and without colour."""

import io

import pytest
from rich.console import Console

from shoal.peer.terminal.bars import Bar, Sparkline, left_text, of_goal
from shoal.peer.terminal.speed import SpeedMeter
from shoal.swarm.protocol.progress import RunProgress, progress_of
from shoal.swarm.protocol.run_file import RunSection


def ends(**goals: float) -> RunSection:
    return RunSection.model_validate({"name": "reef", **goals})


@pytest.mark.parametrize(
    ("goals", "share", "left_s", "words"),
    [
        ({"tokens": 20_000_000}, 0.2025, 3190.0, "4.05M of 20M tokens"),
        ({"rounds": 10}, 0.5, 100.0, "5 of 10 rounds, 4.05M tokens"),
        ({"max_s": 1000}, 0.25, 750.0, "4.05M tokens"),
        ({"tokens": 8_100_000, "rounds": 10, "max_s": 300}, 250 / 300, 50.0, "4.05M of 8.1M tokens"),
        ({"tokens": 1}, 1.0, 0.0, "4.05M of 1 tokens"),
        ({}, None, None, "4.05M tokens"),
    ],
)
def test_a_run_is_as_far_as_its_nearest_goal(
    goals: dict[str, float], share: float | None, left_s: float | None, words: str
) -> None:
    found = progress_of(ends(**goals), 100_000, tokens=4_050_000, rounds=5, elapsed_s=250.0, tokens_per_s=5000.0)
    assert found.share == share
    assert found.left_s == left_s
    assert of_goal(found, 4_050_000, 5) == words


def test_nothing_is_guessed_before_the_speed_is_known() -> None:
    found = progress_of(ends(tokens=100), 10, tokens=0, rounds=0)
    assert (found.share, found.left_s) == (0.0, None)
    assert left_text(found) == ""
    assert left_text(RunProgress(left_s=720.0)) == "about 0:12:00 left"


def test_a_speed_is_what_was_added_over_wall_time_and_no_burst() -> None:
    meter = SpeedMeter(window_s=60.0)
    assert meter.per_s == 0.0
    for second in range(200):  # a burst of 1,000 every ten seconds
        meter.note(1000 * (second // 10), float(second))
        if second > 60:
            assert meter.per_s == pytest.approx(100.0, rel=0.2)
    assert len(meter._seen) < 100


def test_a_counter_that_goes_back_is_measured_anew() -> None:
    meter = SpeedMeter()
    for second, count in enumerate((0, 1000, 2000, 500, 600, 700)):
        meter.note(count, float(second))
    assert meter.per_s == 100.0


@pytest.mark.parametrize("colors", [None, "truecolor"])
@pytest.mark.parametrize("width", [10, 80])
def test_bars_read_the_same_without_colour(colors: str | None, width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=colors, record=True)  # type: ignore[arg-type]
    console.print(Bar(0.5))
    console.print(Sparkline([1.0, 2.0] * 100))
    bar, line = console.export_text().splitlines()
    assert bar == "█" * (width // 2) + "░" * (width // 2)
    assert len(line) == width
    assert set(line) == {"▁", "█"}
