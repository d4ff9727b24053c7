import io

import pytest
from rich.console import Console
from tests.peer.demo.logged import STAGES_HOST, WHOLE_HOST, Event, stages_log, stages_peers, whole_peers, whole_report

from shoal.peer.demo.board import Board
from shoal.peer.demo.run_log import Death, PeerLog, RunLog
from shoal.swarm.protocol.run_file import RunSection


def shown(log: RunLog, host: list[Event], peers: dict[str, list[Event]], is_terminal: bool) -> str:
    """What the board has shown at the end."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, height=40, color_system=None)
    board = Board(console, log)
    with board.live:
        for name, events in peers.items():
            log.peers.setdefault(name, PeerLog())
            for event in events:
                log.peers[name].feed(event)
        for event in host:
            told = log.feed_host(event)
            if told is not None:
                board.show(told)
        board.refresh()
        board.say("done")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_board_of_whole_models(is_terminal: bool) -> None:
    log = RunLog(RunSection(name="demo", seed=0, max_s=60.0), 1000.0)
    log.peers = {name: PeerLog() for name in whole_report().log.peers}
    log.kill(Death("peer-2", 1020.0))
    words = shown(log, WHOLE_HOST, whole_peers(), is_terminal)
    assert "round 3 committed · loss 2.000" in words
    assert "peer-2 (bbbbbbbbbbbbbbbb) is gone: silent" in words
    assert ("SIGKILL" in words) == is_terminal
    assert "done" in words


@pytest.mark.parametrize("is_terminal", [True, False])
def test_board_of_stages(is_terminal: bool) -> None:
    words = shown(stages_log(), STAGES_HOST, stages_peers(), is_terminal)
    assert ("round 5, 1 aborted" in words) == is_terminal
    assert (
        words.count("round 3 committed · loss 2.000") == 1 + is_terminal
    )  # what is live is drawn once more at the end
    assert ("round 1 committed" in words) != is_terminal  # in a terminal the next one takes its place
    assert words.count("peer-3 (cccccccccccccccc) is gone: silent") == 1 + is_terminal  # not once more for the stage
