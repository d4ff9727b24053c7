"""Tests of pipeline/peer: from one assigned span to the next, reports of its capability, lost memberships."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.compression.registry import get_codec
from shoal.peer.member.round_deadline import Attention
from shoal.peer.pipeline import peer as pipeline_peer
from shoal.peer.pipeline.capability_updates import CapabilityUpdates
from shoal.peer.pipeline.peer import PipelinePeer
from shoal.peer.pipeline.profile import LayerProfile, ModelProfile
from shoal.peer.pipeline.tensor_io import Staging
from shoal.peer.training.device import MemoryBytes, MemoryLimits
from shoal.swarm.errors import NotAdmitted
from shoal.swarm.pipeline.planner.model import LayerCost
from shoal.swarm.protocol.messages import Acknowledged, PeerToCoordinatorShowCapability
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

RUN = """
algorithm = "virtual_batch"
[run]
name = "tiny"
[recipe]
name = "gpt"
[round]
tokens = 3200
[pipeline]
micro_batch = 1
"""


class FakeNetwork:
    def call(self, coroutine: Coroutine[Any, Any, Any], interruptible: object = False) -> Any:
        return asyncio.run(coroutine)

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(asyncio.run(coroutine))
        return future

    def wait_for(self, future: Future[Any]) -> Any:
        return future.result(timeout=0)


class FakeClient:
    """``places``: one of the view after each look, None: the run has ended. ``shown``: what the coordinator heard."""

    peer = "me"
    deadlines = SimpleNamespace(heartbeat_s=1.0)

    def __init__(self, places: list[tuple[int, int] | None]) -> None:
        self._places = iter(places)
        self.shown: list[PeerToCoordinatorShowCapability] = []
        self.look()

    def look(self) -> None:
        span = next(self._places)
        spans = [SimpleNamespace(peer="me", first=span[0], last=span[1], rate=1.0, recomputes=False)] if span else []
        pipeline = SimpleNamespace(boundaries=(0, 1, 2), spans=spans)
        self.view = SimpleNamespace(pipeline=pipeline, phase="training" if span else "ended")

    async def wait_for(self, predicate: Any, timeout_s: float) -> Any:
        return self.view

    async def ask(self, message: PeerToCoordinatorShowCapability, reply: type) -> Acknowledged:
        self.shown.append(message)
        return Acknowledged()


class Side:
    """A peer whose stages are only entered and left; ``begins``: what beginning raises, by visit."""

    def __init__(self, places: list[tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = FakeClient(places)
        self.log: list[str] = []
        self.begins: dict[int, Exception] = {}
        self.visits = 0
        self.meter = SimpleNamespace(probed_bps=0.0, bandwidth_bps=0.0)
        self.node = SimpleNamespace(meter=self.meter, round_trip_s=0.0)
        self.run = SimpleNamespace(
            client=self.client, rejoined=False, node=self.node, progress=SimpleNamespace(activity="joining")
        )
        self.peer: Any = PipelinePeer.__new__(PipelinePeer)
        self.peer._members = SimpleNamespace(run=self.run, stages={})
        self.peer._network = FakeNetwork()
        self.peer._connection = SimpleNamespace(
            peer="me",
            emit=lambda event, **_: None,
            options=SimpleNamespace(limits=TrafficLimits()),
            look_at_amendments=lambda: None,
        )
        self.peer._stopping, self.peer._device = False, torch.device("cpu")
        self.peer._memory, self.peer._limits = MemoryBytes(1000, None), MemoryLimits()
        self.peer._slowdown, self.peer._updates, self.peer._next_check_s, self.peer._reporting = (
            1.0,
            CapabilityUpdates(),
            0.0,
            None,
        )
        self.peer._last_warning = ""
        self.peer._measured = ModelProfile(1, ("a",), (LayerProfile("a", LayerCost(4, 4, 4), 0.1),))
        staging = Staging(torch.device("cpu"), get_codec("int8"))
        self.peer._prepare = lambda island: SimpleNamespace(staging=staging, drop_span=lambda: None)
        self.peer._emit_span = lambda held, boundaries: None
        self.peer._leave = lambda held: held.leave()
        monkeypatch.setattr(pipeline_peer.HeldSpan, "enter", self.enter)

    def enter(self, work: Any, place: Any) -> Any:
        self.log.append(f"enters {place.span.first}")
        visit, self.visits = self.visits, self.visits + 1

        def begin() -> None:
            if visit in self.begins:
                raise self.begins[visit]

        def next_task(made: Any) -> Attention:
            return Attention.MOVED

        def leave() -> None:
            self.log.append(f"leaves {place.span.first}")
            self.client.look()

        return SimpleNamespace(begin_training=begin, leave=leave, next_task=next_task)


def test_who_waits_for_a_state_of_a_stage_that_is_taken_away_goes_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Side([(0, 0), (1, 1), None], monkeypatch)
    side.begins = {0: NotAdmitted("stage 0 is not this peer's any more")}
    side.peer.train()
    assert side.log == ["enters 0", "leaves 0", "enters 1", "leaves 1"]


def test_results_that_are_not_finite_are_begun_anew_and_the_round_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    side, done = Side([(0, 0), None], monkeypatch), []
    held: Any = SimpleNamespace(
        runner=SimpleNamespace(trouble="an activation cannot be sent"),
        training=SimpleNamespace(recover_from_divergence=done.append),
        open_round=lambda *, goes_on: done.append(goes_on),
    )
    assert side.peer._settle(held, Attention.DIVERGED)
    assert done == ["an activation cannot be sent", False]


def test_who_is_given_up_while_it_shows_what_it_can_do_shows_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side([(1, 1), None], monkeypatch)

    async def given_up(message: Any, reply: type) -> Any:
        side.run.rejoined = True  # by the next heartbeat
        side.client.ask = real  # type: ignore[method-assign]
        raise NotAdmitted("who are you?")

    real, side.client.ask = side.client.ask, given_up  # type: ignore[method-assign]
    side.peer.train()
    assert side.log == ["enters 1", "leaves 1"]
    assert len(side.client.shown) == 1
    assert not side.run.rejoined


# What it shows of itself ----------------------------------------------------------------------------------


def shown(side: Side) -> tuple[float, float, float]:
    """The last that the coordinator heard: seconds of the first layer, bits a second, round trip."""
    one = side.client.shown[-1].capability
    return one.layer_s[0], one.bandwidth_bps, one.rtt_s


def test_the_bandwidth_is_supposed_until_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side([(0, 0)], monkeypatch)
    side.meter.bandwidth_bps = 3e6  # little has moved, which says nothing of the link
    side.peer._report_capability()
    assert shown(side) == (0.1, 1e8, 0.0)
    side.peer._report_changed_capability()
    assert len(side.client.shown) == 1
    side.meter.probed_bps, side.node.round_trip_s, side.peer._next_check_s = 4e7, 0.03, 0.0
    side.peer._report_changed_capability()
    assert shown(side) == (0.1, 4e7, 0.03)
    side.peer._report_changed_capability()
    assert len(side.client.shown) == 2


@pytest.mark.parametrize("memory", [MemoryBytes(1000, None), MemoryBytes(1000, 500)])
def test_the_plan_learns_of_both_memories(memory: MemoryBytes, monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side([(0, 0)], monkeypatch)
    side.peer._memory = memory
    side.peer._report_capability()
    shown = side.client.shown[-1].capability
    assert (shown.host_bytes, shown.device_bytes) == (memory.host, memory.device)


def test_the_layers_take_what_they_really_take(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side([(0, 0)], monkeypatch)
    now_s = [1000.0]
    monkeypatch.setattr(pipeline_peer.time, "monotonic", lambda: now_s[0])
    side.peer._report_capability()
    side.peer._slowdown = 2.5
    for _ in range(20):
        now_s[0] += 10.0
        side.peer._report_changed_capability()
    assert len(side.client.shown) == 2
    assert shown(side)[0] == pytest.approx(0.25)


def test_who_can_hold_no_stage_is_told_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side([(0, 0)], monkeypatch)
    side.peer._connection.run_file = parse_run_file(RUN)
    for _ in range(3):
        side.peer._warn_why_it_waits((0, 1))
    assert len(caplog.records) == 1
    assert "the plan has no place for this machine now" in caplog.text
    side.peer._memory = MemoryBytes(10, None)
    side.peer._warn_why_it_waits((0, 1))
    assert "the smallest, stage 0 (layer 0), takes" in caplog.text
    assert "--max-memory" in caplog.text
