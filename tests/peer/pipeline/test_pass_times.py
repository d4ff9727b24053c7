"""Tests of the times of passes: those of the device, which may be done long after the training thread."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.peer.layered_models import gpt, held
from torch import Tensor

from shoal.peer.pipeline import training
from shoal.peer.pipeline.capability_updates import SpeedEstimate
from shoal.peer.pipeline.compute import ComputeSettings
from shoal.peer.pipeline.training import BackwardTask, ForwardTask, SpanTraining, TrainingSamples
from shoal.peer.training.data import SampleOrder
from shoal.swarm.averaging.phase_clock import PhaseClock
from shoal.swarm.pipeline.engine.effects import ComputeBackward, ComputeForward, MicroBatch

CPU = torch.device("cpu")


class Device:
    """A device that is at ``now_s`` on its clock and takes ``pass_s`` for what is queued between two marks."""

    def __init__(self) -> None:
        self.now_s = self.queued_s = 0.0
        self.pass_s = 1.0

    def mark(self) -> Any:
        device, at_s = self, self.queued_s
        self.queued_s += self.pass_s

        def seconds_since(earlier: Any) -> float:
            assert device.now_s >= at_s, "only of marks that are reached"
            return at_s - earlier.at_s  # type: ignore[no-any-return]

        return SimpleNamespace(at_s=at_s, is_reached=lambda: device.now_s >= at_s, seconds_since=seconds_since)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(training, "streams_of", lambda _: made)
    return made


def train(span: SpanTraining, number: int, gradient: Tensor) -> None:
    micro_batch = MicroBatch(0, number, number + 1)
    span.execute(ForwardTask(ComputeForward(number, micro_batch, 0)))
    span.execute(BackwardTask(ComputeBackward(number, micro_batch, 0, frozenset({0})), gradient))


def test_a_throttled_device_is_measured_by_its_own_clock(device: Device) -> None:
    recipe, took = gpt(), []
    layered = recipe.layers(1)
    stage = held(layered, (0, 2, len(layered)), 0, CPU)
    replica: Any = SimpleNamespace(round=0, count_trained=lambda *_: None, clock=PhaseClock())
    samples = TrainingSamples(recipe, recipe.training_data(), SampleOrder(100, 1))
    speed = SpeedEstimate(lambda stage: 2.0)

    def note(stage: int, seconds: float) -> None:
        took.append((stage, seconds))
        speed.add(stage, seconds)

    span = SpanTraining([stage], {0: replica}, samples, {0: ComputeSettings(CPU)}, note, is_last=False)
    gradient = torch.zeros(1, recipe.tokens_per_sample, recipe.settings.width)
    train(span, 0, gradient)
    train(span, 1, gradient)
    assert took == [], "the device has done nothing yet"
    device.now_s = device.queued_s
    device.pass_s = 3.0
    train(span, 2, gradient)
    assert took == [(0, 2.0), (0, 2.0)]
    for number in range(3, 24):
        device.now_s = device.queued_s
        train(span, number, gradient)
    assert speed.factor == 3.0
