"""Tests of training/data_files: a run reads regular files below the named folders and nothing else."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.peer.training import data_files
from shoal.peer.training.data_files import DataFile, find_files, named_folders
from shoal.swarm.errors import CorpusError, UserError


def write(path: Path, text: str = "sea") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(pattern: str, *folders: Path, kind: str = "text") -> list[str]:
    return [file.name for file in find_files(kind, pattern, folders)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name in ("a.txt", "b.md", "c[1].txt", "books/d.txt", "books/old/e.txt", "books/old/f.txt", ".hidden.txt"):
        write(folder / name, name)
    write(folder / ".ssh" / "key.txt")
    write(tmp_path / "secret" / "s.txt", "secret")
    return folder


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", ["a.txt", "c[1].txt"]),
        ("a.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "books/d.txt", "books/old/e.txt", "books/old/f.txt", "c[1].txt"]),
        ("**", ["a.txt", "b.md", "books/d.txt", "books/old/e.txt", "books/old/f.txt", "c[1].txt"]),
        ("books/**", ["books/d.txt", "books/old/e.txt", "books/old/f.txt"]),
        ("books/**/**/*.txt", ["books/d.txt", "books/old/e.txt", "books/old/f.txt"]),
        ("*/*.txt", ["books/d.txt"]),
        ("**/old/*", ["books/old/e.txt", "books/old/f.txt"]),
        ("**/e.txt", ["books/old/e.txt"]),
        ("?.[mt]*", ["a.txt", "b.md"]),
        ("[!.]*.txt", ["a.txt", "c[1].txt"]),
        ("/".join(["**"] * 160 + ["e.txt"]), ["books/old/e.txt"]),
    ],
)
def test_patterns(data: Path, pattern: str, found: list[str]) -> None:
    assert names(pattern, data) == found


@pytest.mark.parametrize("pattern", ["[.]*", "*hidden*", "[.]ssh/*", "**/key.txt", "*/key.txt", "nothing", "a.txt/b"])
def test_what_is_hidden_or_not_there_matches_nothing(data: Path, pattern: str) -> None:
    with pytest.raises(CorpusError, match="no file matches below"):
        names(pattern, data)


def test_a_name_of_tokens_is_no_pattern(data: Path) -> None:
    assert names("c[1].txt", data, kind="tokens") == ["c[1].txt"]
    with pytest.raises(CorpusError, match="no file matches"):
        names("*.txt", data, kind="tokens")


def test_sizes_are_known_before_anything_is_opened(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", None)
    assert [file.size_bytes for file in find_files("text", "**/*.txt", [data])] == [5, 11, 15, 15, 8]


def test_without_a_folder_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "scandir", None)
    with pytest.raises(CorpusError, match="--data FOLDER"):
        find_files("text", "*.txt", [])


def test_several_folders(data: Path, tmp_path: Path) -> None:
    assert names("*.txt", data, tmp_path / "secret") == ["a.txt", "c[1].txt", "s.txt"]
    assert names("*.txt", data, data, data / ".." / "data") == ["a.txt", "c[1].txt"]
    write(tmp_path / "more" / "a.txt")
    with pytest.raises(CorpusError, match="have the same name in the run"):
        names("*.txt", data, tmp_path / "more")


def test_what_is_no_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        named_folders([tmp_path / "nothing"])
    with pytest.raises(UserError, match="this is not a folder"):
        named_folders([data / "a.txt"])
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to(data)
    assert named_folders([Path("~/data"), tmp_path / "link"]) == (data,)


# Links ------------------------------------------------------------------------------------------------------


def test_links_that_stay_inside_are_followed_where_they_are_named(data: Path) -> None:
    (data / "same.txt").symlink_to("a.txt")
    (data / "shelf").symlink_to("books")
    assert names("same.txt", data) == ["same.txt"]
    assert names("shelf/*.txt", data) == ["shelf/d.txt"]
    (file,) = find_files("text", "shelf/*.txt", [data])
    with file.open() as opened:
        assert opened.read() == b"books/d.txt"


def test_any_depth_does_not_follow_links(data: Path, tmp_path: Path) -> None:
    (data / "loop").symlink_to(".")
    (data / "out").symlink_to(tmp_path / "secret")
    (data / "shelf").symlink_to("books")
    assert names("**/*.txt", data) == ["a.txt", "books/d.txt", "books/old/e.txt", "books/old/f.txt", "c[1].txt"]
    (data / "out").unlink()
    assert names("**/*", data) == names("**", data)


def test_links_in_a_circle_come_to_an_end(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("loop", "again"):
        (data / name).symlink_to(".")
    monkeypatch.setattr(data_files, "MAX_FILES", 1000)
    with pytest.raises(CorpusError, match="leads into more than 1,000 folders"):
        names("/".join(["*"] * 200), data)


@pytest.mark.parametrize("pattern", ["out.txt", "*.txt", "**/out.txt", "**/*.txt"])
@pytest.mark.parametrize("target", ["../secret/s.txt", "../secret/nothing", "/etc/passwd", "books/../../secret/s.txt"])
def test_a_file_that_leads_out_is_refused(data: Path, pattern: str, target: str) -> None:
    (data / "out.txt").symlink_to(target)
    with pytest.raises(CorpusError, match="leads out of"):
        names(pattern, data)


@pytest.mark.parametrize("pattern", ["out/s.txt", "*/s.txt", "**/out/s.txt", "out/**/s.txt", "inside/s.txt"])
def test_a_folder_that_leads_out_is_refused(data: Path, tmp_path: Path, pattern: str) -> None:
    (data / "out").symlink_to(tmp_path / "secret")
    (data / "inside").symlink_to("out")
    with pytest.raises(CorpusError, match="leads out of"):
        names(pattern, data)


def test_a_link_to_itself_matches_nothing(data: Path) -> None:
    (data / "knot.txt").symlink_to("knot.txt")
    with pytest.raises(CorpusError):
        names("knot.txt", data)


def to_pipe(path: Path) -> None:
    os.mkfifo(path)


def to_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.mark.parametrize(("make", "kind"), [(to_pipe, "pipe"), (to_socket, "socket")])
def test_what_is_no_regular_file_is_refused(data: Path, make: Callable[[Path], None], kind: str) -> None:
    make(data / "x.txt")
    with pytest.raises(CorpusError, match=f"is no regular file, but a {kind}"):
        names("*.txt", data)


# What is exchanged between looking and reading ---------------------------------------------------------------


def found(data: Path, name: str = "books/old/e.txt") -> DataFile:
    (file,) = find_files("text", name, [data])
    return file


def test_a_file_is_read(data: Path) -> None:
    with found(data).open() as file:
        assert file.read() == b"books/old/e.txt"


def test_a_file_exchanged_for_a_link(data: Path, tmp_path: Path) -> None:
    file = found(data)
    file.path.unlink()
    file.path.symlink_to(tmp_path / "secret" / "s.txt")
    with pytest.raises(CorpusError, match="but a link"):
        file.open()


def test_a_folder_exchanged_for_a_link(data: Path, tmp_path: Path) -> None:
    file = found(data)
    write(tmp_path / "secret" / "old" / "e.txt", "secret")
    (data / "books").rename(data / "moved")
    (data / "books").symlink_to(tmp_path / "secret")
    with pytest.raises(CorpusError, match="cannot be read"):
        file.open()


def test_the_folder_itself_exchanged_for_a_link(data: Path, tmp_path: Path) -> None:
    file = found(data, "a.txt")
    data.rename(tmp_path / "moved")
    write(tmp_path / "secret" / "a.txt", "secret")
    data.symlink_to(tmp_path / "secret")
    with pytest.raises(CorpusError, match="cannot be read"):
        file.open()


def test_a_file_exchanged_for_a_pipe(data: Path) -> None:
    file = found(data)
    file.path.unlink()
    os.mkfifo(file.path)
    with pytest.raises(CorpusError, match="but a pipe"):
        file.open()


def test_exchanged_between_the_last_look_and_the_opening(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for a pipe's writer nor follows a link."""
    really = os.stat

    def to_link(path: Path) -> None:
        path.symlink_to(tmp_path / "secret" / "s.txt")

    for exchange in (to_pipe, to_link):
        file = found(data)

        def look_then_exchange(
            name: str, file: DataFile = file, exchange: object = exchange, **named: object
        ) -> object:
            about = really(name, **named)  # type: ignore[arg-type]
            file.path.unlink()
            exchange(file.path)  # type: ignore[operator]
            return about

        with monkeypatch.context() as patched:
            patched.setattr(data_files.os, "stat", look_then_exchange)
            with pytest.raises(CorpusError, match=r"but a pipe|cannot be read"):
                file.open()
        file.path.unlink()
        write(file.path)


def test_no_descriptor_is_left_open(data: Path) -> None:
    file = found(data)
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    file.open().close()
    file.path.unlink()
    os.mkfifo(file.path)
    with pytest.raises(CorpusError):
        file.open()
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) == before


def test_too_many_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "MAX_FILES", 2)
    assert names("*.txt", data) == ["a.txt", "c[1].txt"]
    with pytest.raises(CorpusError, match="more than 2 files"):
        names("**/*.txt", data)
