"""Tests of pipeline/view_watch: attention, departed peers and replicas of the next stage."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.peer.member.member import Progress
from shoal.peer.member.round_deadline import Attention
from shoal.peer.pipeline.view_watch import SpanAssignment, ViewWatch, assigned_span
from shoal.swarm.pipeline.engine.engine import StageSpan

ROUND = 4
RATES = {"b": 2.5}


def view(phase: str = "training", round_number: int = ROUND, **spans: tuple[int, int]) -> Any:
    given = [
        SimpleNamespace(peer=peer, first=one[0], last=one[1], rate=RATES.get(peer, 0.0), recomputes=peer == "me")
        for peer, one in spans.items()
    ]
    pipeline = SimpleNamespace(spans=given, boundaries=(0, 1, 2, 3)) if spans else None
    return SimpleNamespace(phase=phase, round=round_number, must_resync=False, pipeline=pipeline)


class World:
    """``me`` holds stages 0 and 1, ``b`` and ``c`` the last one."""

    def __init__(self) -> None:
        self.processes = {"me": b"1", "b": b"1", "c": b"1"}
        node = SimpleNamespace(processes=lambda: dict(self.processes))
        self.spans = {"me": (0, 1), "b": (2, 2), "c": (2, 2)}
        self.run = SimpleNamespace(
            node=node, rejoined=False, client=SimpleNamespace(peer="me", view=view(**self.spans))
        )
        self.stages = {
            stage: SimpleNamespace(rejoined=False, client=SimpleNamespace(view=view())) for stage in range(2)
        }
        members: Any = SimpleNamespace(run=self.run, stages=self.stages)
        self.watch = ViewWatch(members, StageSpan(0, 1))

    def move(self, **spans: tuple[int, int]) -> None:
        self.spans |= spans
        self.run.client.view = view(**self.spans)


def test_nothing_goes_before_computing_while_nothing_happens() -> None:
    world = World()
    assert world.watch.attention(ROUND) is Attention.NOTHING
    assert not world.watch.is_closing(ROUND)


@pytest.mark.parametrize(
    ("phase", "number"), [("closing", ROUND), ("averaging", ROUND), ("training", ROUND + 1), ("ended", ROUND + 1)]
)
def test_a_round_that_closes_in_any_stage_goes_before_computing(phase: str, number: int) -> None:
    world = World()
    world.stages[1].client.view = view(phase, number)
    assert world.watch.attention(ROUND) is Attention.ROUND
    assert world.watch.attention(-1) in (Attention.NOTHING, Attention.ENDED), "none is open here"


def test_the_end_comes_after_the_last_round() -> None:
    world = World()
    world.stages[0].client.view = view("ended", ROUND)
    assert world.watch.attention(ROUND) is Attention.ENDED


def test_a_lost_membership_goes_before_all_else() -> None:
    world = World()
    world.move(me=(2, 2))
    assert world.watch.attention(ROUND) is Attention.MOVED
    world.stages[0].rejoined = True
    assert world.watch.attention(ROUND) is Attention.RESYNC
    world.stages[0].rejoined = False
    world.run.rejoined = True
    assert world.watch.attention(ROUND) is Attention.RESYNC


def test_who_is_gone_or_begins_anew_is_named_once() -> None:
    world = World()
    assert world.watch.take_gone() == []
    world.processes = {"me": b"1", "b": b"2"}
    assert sorted(world.watch.take_gone()) == ["b", "c"]
    assert world.watch.take_gone() == []


def test_a_place_is_what_the_plan_has() -> None:
    world = World()
    assert assigned_span(world.run.client.view, "me") == SpanAssignment((0, 1, 2, 3), StageSpan(0, 1), recomputes=True)
    assert assigned_span(world.run.client.view, "nobody") is None
    assert assigned_span(view(), "me") is None, "nothing is cut yet"


def test_replicas_are_those_of_the_next_stage_that_are_in_the_run() -> None:
    world = World()
    world.watch.take_gone()
    assert world.watch.take_replicas() == {"b": 2.5, "c": None}
    assert world.watch.take_replicas() is None, "nothing new"
    del world.processes["c"]
    world.watch.take_gone()
    assert world.watch.take_replicas() == {"b": 2.5}
    world.move(b=(0, 0))
    assert world.watch.take_replicas() == {}


def test_who_begins_anew_is_a_replica_again() -> None:
    world = World()
    world.watch.take_gone()
    world.watch.take_replicas()
    world.processes |= {"b": b"2", "c": b"2"}
    assert world.watch.take_gone() == ["b", "c"]
    assert world.watch.take_replicas() == {"b": 2.5, "c": None}, "the engine has forgotten them"
    assert world.watch.take_replicas() is None


def test_whoever_has_nothing_to_compute_says_so_everywhere() -> None:
    world = World()
    everybody = [world.run, *world.stages.values()]
    for member in everybody:
        member.progress = Progress(activity="training")
    world.watch.report_idle()
    assert {member.progress.activity for member in everybody} == {"idle"}
