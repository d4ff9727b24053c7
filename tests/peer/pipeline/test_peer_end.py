"""Tests of pipeline/peer: the run ends before the peer is ready, or the peer cannot go on."""

from types import SimpleNamespace
from typing import Any

from shoal.peer.pipeline.peer import PipelinePeer
from shoal.swarm.errors import Diverged, RunEnded


def test_a_run_that_ends_while_a_peer_gets_ready_is_no_failure_of_that_peer() -> None:
    peer: Any = PipelinePeer.__new__(PipelinePeer)
    tried = []

    def prepare(island: None) -> None:
        tried.append(1)
        raise RunEnded("the run is over")

    peer._prepare = prepare
    peer.train()
    assert tried


def test_what_ended_its_training_is_told_on_leaving() -> None:
    peer: Any = PipelinePeer.__new__(PipelinePeer)
    closed: list[BaseException | None] = []
    meter = SimpleNamespace(sent_bytes=0, received_bytes=0)
    peer._members = SimpleNamespace(run=SimpleNamespace(node=SimpleNamespace(meter=meter)))
    peer._connection = SimpleNamespace(emit=lambda event, **_: None, close=closed.append)
    peer._left_with, peer._tokens_trained = [], 0
    error = Diverged("host a new one")
    peer.__exit__(Diverged, error, None)
    assert closed == [error]
