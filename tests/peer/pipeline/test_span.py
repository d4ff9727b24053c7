"""Tests of pipeline/span: the reported headway while a span is left."""

from types import SimpleNamespace
from typing import Any

from shoal.peer.member.member import Progress
from shoal.peer.pipeline.span import HeldSpan
from shoal.swarm.pipeline.engine.engine import StageSpan


class FakeNetwork:
    def call(self, left: None) -> None:
        return left


def test_while_it_saves_them_nothing_of_them_counts_as_ready_for_the_next() -> None:
    progress, said = Progress(prepared=1.0, has_work=True), []
    run = SimpleNamespace(progress=progress)
    members: Any = SimpleNamespace(run=run, stages={1: object()}, leave_all=lambda: None)
    training: Any = SimpleNamespace(save_checkpoints=lambda: said.append((progress.prepared, progress.has_work)))
    network: Any = FakeNetwork()
    nothing: Any = None
    HeldSpan(network, members, StageSpan(1, 1), training, nothing, nothing).leave()
    assert said == [(0.0, False)]
