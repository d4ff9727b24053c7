"""Processes of an island, of which one fails."""

import os
import threading
from pathlib import Path

import pytest
from tests.integration.harness import START_S

from shoal.peer.island.training import RankTask, started_ranks
from shoal.swarm.errors import IslandBroken

pytestmark = pytest.mark.integration


def test_a_rank_that_fails_is_told_of_and_leaves_no_folder() -> None:
    """Its run file cannot be read. Rank 0 finds its connections broken in the model's collectives."""
    task, died, found = RankTask("nonsense", [], ["cpu", "cpu"], 1, 1), threading.Event(), []

    def on_death(words: str) -> None:
        found.append((words, os.path.exists(folder)))
        died.set()

    with pytest.raises(IslandBroken, match="rank 1 of this island"):  # noqa: PT012, SIM117
        with started_ranks(task, on_death) as folder:
            assert Path(folder).exists()
            assert died.wait(START_S)
            raise RuntimeError("connection closed by peer")
    ((words, is_there),) = found
    assert "rank 1" in words
    assert not is_there, "the process may end at once"


def test_an_error_of_the_model_stays_what_it_is() -> None:
    task = RankTask("", [], ["cpu"], 1, 1)
    with pytest.raises(RuntimeError, match="shapes"), started_ranks(task, print):
        raise RuntimeError("shapes differ")
