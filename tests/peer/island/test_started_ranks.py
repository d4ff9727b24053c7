"""Processes of an island, of which one fails."""

import os
import tempfile
import threading
from pathlib import Path

import pytest
from tests.integration.harness import START_S, eventually

from shoal.peer.island.training import RankTask, started_ranks
from shoal.swarm.errors import DeviceError, IslandBroken

pytestmark = pytest.mark.integration


def test_a_rank_that_fails_is_told_of_and_leaves_no_folder() -> None:
    """Its run file cannot be read. Rank 0 finds its connections broken in the model's collectives."""
    task, died, found = RankTask("nonsense", {}, ["cpu", "cpu"], 1, 1), threading.Event(), []

    def on_death(words: str) -> None:
        found.append((words, os.path.exists(ranks.folder)))
        died.set()

    with pytest.raises(IslandBroken, match=r"rank 1 of this island.*and here: connection closed"):  # noqa: PT012, SIM117
        with started_ranks(task, on_death) as ranks:
            assert Path(ranks.folder).exists()
            assert died.wait(START_S)
            raise RuntimeError("connection closed by peer")
    ((words, is_there),) = found
    assert "rank 1" in words
    assert not is_there, "the process may end at once"


def test_what_rank_0_fails_of_itself_it_says_itself() -> None:
    """The other rank has failed of the same, maybe before."""
    task, found = RankTask("nonsense", [], ["cpu", "cpu"], 1, 1), list[str]()
    with (  # noqa: PT012
        pytest.raises(DeviceError, match="heads"),
        started_ranks(task, found.append) as ranks,
        ranks.noting_failure(),
    ):
        eventually("its end is known", lambda: not os.path.exists(ranks.folder), START_S)
        raise DeviceError("heads that cannot be cut")
    assert found == []


def test_folders_of_islands_that_have_ended_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ranks there were, all of them were killed at once; those of an island that lives stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "shoal-island-left"
    left.mkdir()
    (left / "lock").touch()
    with started_ranks(RankTask("", [], ["cpu"], 1, 1), print) as mine:
        assert not left.exists()
        with started_ranks(RankTask("", [], ["cpu"], 1, 1), print):
            assert Path(mine.folder).exists()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_model_stays_what_it_is() -> None:
    task = RankTask("", {}, ["cpu"], 1, 1)
    with pytest.raises(RuntimeError, match="shapes"), started_ranks(task, print):
        raise RuntimeError("shapes differ")
