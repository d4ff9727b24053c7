"""What a pipeline's peer does when the run ends before it has got ready for it."""

from typing import Any

from shoal.peer.pipeline_peer import PipelinePeer
from shoal.swarm.errors import RunEnded


def test_a_run_that_ends_while_a_peer_gets_ready_is_no_failure_of_that_peer() -> None:
    peer: Any = PipelinePeer.__new__(PipelinePeer)
    tried = []

    def prepare() -> None:
        tried.append(1)
        raise RunEnded("the run is over")

    peer._prepare = prepare
    peer.train()
    assert tried
