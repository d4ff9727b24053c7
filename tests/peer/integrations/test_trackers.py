"""Trackers: metrics made from events, and what real trackers keep of them."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.peer.event_schema import make_event
from shoal.peer.integrations import trackers
from shoal.peer.integrations.trackers import TrackedRun, Tracker, TrackerChoice, metrics_of
from shoal.swarm.errors import UserError

ABOUT = TrackedRun("digits", "ab" * 32, "host", {"inner.lr": 0.5, "run.name": "digits"})


def verdict(number: int, **fields: Any) -> dict[str, Any]:
    given = {"committed": True, "loss": 2.5, "members": ["a", "b"], "tokens_total": 100 * number, "elapsed_s": 3.0}
    return make_event("verdict", round=number, **(given | fields))


def test_a_verdict_gives_a_step_of_numbers() -> None:
    assert metrics_of(verdict(4)) == {
        "committed": 1.0,
        "loss": 2.5,
        "tokens_total": 400.0,
        "members": 2.0,
        "round_s": 3.0,
    }


def test_an_aborted_round_is_a_step_too() -> None:
    assert metrics_of(make_event("aborted", round=3, reason="nobody was left")) == {"committed": 0.0}
    assert metrics_of(verdict(3, committed=False, loss=None))["committed"] == 0.0


def test_a_stage_has_curves_of_its_own() -> None:
    assert metrics_of(verdict(4, stage=2))["stage_2/loss"] == 2.5


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, "2.5"])
def test_what_is_no_number_is_left_out(loss: object) -> None:
    assert "loss" not in metrics_of(verdict(1, loss=loss))


def test_other_events_give_none() -> None:
    assert metrics_of(make_event("resync", reason="why")) == {}


@pytest.mark.parametrize("text", ["neptune", "", "wandb2:project"])
def test_an_unknown_tracker_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="no such tracker; there are wandb, trackio, mlflow, tensorboard"):
        TrackerChoice.parse(text)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[mlflow\]'"):
        TrackerChoice.parse("mlflow")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for place in sorted({path.parent for path in folder.rglob("events.out.*")}):
        events = EventAccumulator(str(place))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((one.step, one.value) for one in events.Scalars(tag))
    return found


def test_tensorboard_goes_on_with_the_same_curves(tmp_path: Path) -> None:
    choice = TrackerChoice.parse(f"tensorboard:{tmp_path}")
    for first in (1, 3):  # the second time as a process that is started again
        with Tracker(choice, ABOUT) as tracker:
            for number in (first, first + 1):
                tracker.on_event(verdict(number, loss=1.0 / number))
            tracker.on_event(make_event("resync", reason="why"))
    found = scalars(tmp_path)
    assert [step for step, _ in found["loss"]] == [1, 2, 3, 4]
    assert found["loss"][3][1] == pytest.approx(0.25)
    assert len({path.parent for path in tmp_path.rglob("events.out.*")}) == 1


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    for first in (1, 2):
        with Tracker(TrackerChoice.parse(f"mlflow:{uri}"), ABOUT) as tracker:
            tracker.on_event(verdict(first, loss=1.0 / first))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == [(1, 1.0), (2, 0.5)]
    assert run.data.params["inner.lr"] == "0.5"
    assert run.info.status == "FINISHED"


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with Tracker(TrackerChoice.parse("wandb:tests"), ABOUT) as tracker:
        tracker.on_event(verdict(1))
    (kept,) = tmp_path.rglob("*.wandb")
    assert kept.stat().st_size > 0
    assert ABOUT.lasting_id in kept.name


class Sink:
    """A tracker whose every call may wait or fail."""

    def __init__(self, gate: threading.Event, fails: bool = False) -> None:
        self.gate, self.fails = gate, fails
        self.steps: list[int] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.gate.wait(30)
        if self.fails:
            raise ConnectionError("the tracker is away")
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


def test_a_slow_tracker_costs_its_own_metrics_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink(threading.Event())
    monkeypatch.setattr(TrackerChoice, "open", lambda self, about: sink)
    with Tracker(TrackerChoice("tensorboard", ""), ABOUT) as tracker:
        for number in range(1, 3000):
            tracker.on_event(verdict(number))
        sink.gate.set()
    assert 1024 <= len(sink.steps) <= 1027
    assert sink.steps[-1] == -1
    assert sink.steps[:-1] == list(range(1, len(sink.steps)))
    assert [one.getMessage() for one in caplog.records] == [
        "tensorboard is too slow: some rounds will be missing there"
    ]


def test_a_tracker_that_fails_is_named_once_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    gate.set()
    sink = Sink(gate, fails=True)
    monkeypatch.setattr(TrackerChoice, "open", lambda self, about: sink)
    with caplog.at_level(logging.WARNING), Tracker(TrackerChoice("wandb", ""), ABOUT) as tracker:
        for number in range(1, 3000):
            tracker.on_event(verdict(number))
    assert "ConnectionError: the tracker is away" in caplog.text
    assert sum("gets no more metrics" in one.getMessage() for one in caplog.records) == 1
    assert sink.steps == [-1]


def test_a_held_out_figure_is_of_the_round_that_made_the_model() -> None:
    about = {"version": 4, "standing": "agreed", "counts": True, "losses": {"a": 2.5, "b": 2.5}}
    event = make_event("evaluated", round=3, loss=2.5, accuracy=0.4, sources={"code": 2.0}, **about)
    found = {"held_out/loss": 2.5, "held_out/accuracy": 0.4, "held_out/code/loss": 2.0}
    assert metrics_of(event) == found
    disputed = make_event("evaluated", round=3, loss=None, accuracy=None, sources={}, **about)
    assert metrics_of(disputed) == {}
