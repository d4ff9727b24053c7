from pathlib import Path
from typing import Any

import pytest

from shoal.peer.cli import join as daemon
from shoal.peer.cli.consent import RunTerms
from shoal.peer.data_places import DataPlaces
from shoal.peer.options import SessionOptions
from shoal.peer.training.data_files import DataFile
from shoal.swarm.errors import NotAccepted, RecipeError
from shoal.swarm.protocol.run_file import RunFile


def run_file(recipe: str = "gpt") -> RunFile:
    settings = {"layers": 1, "heads": 2, "width": 16, "context": 12} if recipe == "gpt" else {}
    source = "text:*.txt" if recipe == "gpt" else "own"
    return RunFile.model_validate(
        {
            "run": {"name": "reef"},
            "recipe": {"name": recipe, "settings": settings},
            "data": {"source": source},
            "round": {"tokens": 1},
        }
    )


def test_no_file_is_opened_before_the_owner_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("sea " * 1000)
    options = SessionOptions(tmp_path / "identity", tmp_path / "state", data=DataPlaces((tmp_path / "data",)))
    opened: list[str] = []
    really = DataFile.open

    def noted(file: DataFile) -> Any:
        opened.append(file.name)
        return really(file)

    monkeypatch.setattr(DataFile, "open", noted)

    def refuse(terms: RunTerms, folder: Path) -> None:
        assert [file.name for file in terms.files] == ["a.txt"]
        assert folder.parent.parent == tmp_path / "state"
        raise NotAccepted("no")

    with pytest.raises(NotAccepted):
        daemon._prepare(run_file(), options, refuse)
    assert opened == []
    recipe = daemon._prepare(run_file(), options, lambda terms, folder: None)
    assert opened == ["a.txt"]
    assert len(recipe.training_data()) > 1


def test_who_brings_an_own_loop_does_not_join_like_this(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="their own training loop"):
        daemon._prepare(run_file("own"), SessionOptions(tmp_path / "identity"), lambda terms, folder: None)
