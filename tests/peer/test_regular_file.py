"""Tests of regular_file: other kinds of files are refused at once, and nothing is read that does not fit."""

import os
import socket
from pathlib import Path

import pytest

from shoal.peer import regular_file
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.regular_file import NotRegular, open_regular, read_regular
from shoal.peer.state_transfer.partial_state import PartialState, WantedState, state_on_disk
from shoal.swarm.errors import StateFileError


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """By what errors call them."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-fifo").symlink_to("fifo")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    return {
        "a FIFO": tmp_path / "fifo",
        "regular file, not a FIFO": tmp_path / "to-fifo",
        "a folder": tmp_path / "folder",
        "a socket": tmp_path / "socket",
        "a device": Path("/dev/zero"),
        "Too many levels of symbolic links": tmp_path / "loop",
    }


@pytest.mark.parametrize("mode", ["rb", "r+b", "ab"])
def test_anything_else_is_refused_without_waiting(odd: dict[str, Path], mode: str) -> None:
    for words, path in odd.items():
        with pytest.raises(OSError, match=words) as caught:
            open_regular(path, mode)  # type: ignore[arg-type]
        assert isinstance(caught.value, NotRegular) == ("levels" not in words)


def test_the_refusal_of_a_checkpoints_file_names_it(odd: dict[str, Path]) -> None:
    for words, path in odd.items():
        source = FolderSource(path.parent)
        refusal = rf"^{path}: cannot be read: .*{words}"
        with pytest.raises(StateFileError, match=refusal):
            source.read(path.name, 100)
        with pytest.raises(StateFileError, match=refusal):
            source.size_bytes(path.name)


def test_files_are_read_and_written_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open_regular(path, "ab") as file:
        file.write(b"12345")
    assert read_regular(path) == b"12345"
    assert read_regular(path, 3) == b"1234", "one more, to show that it is longer"
    (tmp_path / "link").symlink_to(path)
    assert read_regular(tmp_path / "link") == b"12345"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")


def test_what_does_not_fit_into_memory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2**43)  # 8.8 TB, and nothing on the disk
    with pytest.raises(OSError, match="fit into memory"):
        read_regular(path)
    assert len(read_regular(path, 10)) == 11
    monkeypatch.setattr(regular_file, "free_machine_bytes", lambda: 2**30)
    regular_file.check_memory(2**30)
    with pytest.raises(OSError, match=r"1,073,741,825 bytes do not fit .* 1,073,741,824 bytes are free"):
        regular_file.check_memory(2**30 + 1)


def test_a_state_that_was_being_fetched_is_none_where_a_fifo_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1-abc.part")
    assert state_on_disk(tmp_path) is None
    partial = PartialState.resume(WantedState(1, bytes(32), (2, 5)), tmp_path)
    assert partial.resumed == 0
