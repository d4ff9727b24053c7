from pathlib import Path

from shoal.peer.checkpoints.manifest import MANIFEST
from shoal.peer.checkpoints.store import checkpoints_in


def made(place: Path) -> Path:
    place.mkdir(parents=True)
    (place / MANIFEST).touch()
    return place


def test_what_is_being_written_is_no_checkpoint_nor_is_what_lies_in_it(tmp_path: Path) -> None:
    found = [made(tmp_path / "a" / "round-00000001"), made(tmp_path / "whole")]
    made(tmp_path / ".new-round-00000002")
    made(tmp_path / "a" / ".old-1" / "round-00000001")
    assert checkpoints_in(tmp_path) == found


def test_a_folder_around_the_one_that_is_given_may_have_any_name(tmp_path: Path) -> None:
    place = made(tmp_path / ".shoal" / "runs" / "round-00000001")
    assert checkpoints_in(tmp_path / ".shoal") == checkpoints_in(place) == [place]
