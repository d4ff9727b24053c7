"""Files that a run may read on this machine: only regular files below folders that the machine's owner has named.

A run file comes from a stranger. It names files relative to those folders (see ``swarm/protocol/run_sources.py``).
Links that lead out of the folders are refused, also ones that replace a file between its check and its reading, because
every folder of a path is opened and checked in turn.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from shoal.swarm.errors import CorpusError, UserError
from shoal.swarm.system import flags

MAX_FILES = 1 << 20
"""Most files of one corpus, and most folders that are searched for them. A pattern that matches more is a mistake, and
links that lead in a circle have no end."""

_EVERYTHING = "**"
_FOLDER = os.O_RDONLY | flags("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC")
_FILE = os.O_RDONLY | flags("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC")


@dataclass(frozen=True)
class DataFile:
    """File below a named folder.

    ``name``: path relative to ``folder``, with ``/``; ``place``: the parts of that path with links resolved;
    ``size_bytes``: size when the file was found.
    """

    folder: Path
    name: str
    place: tuple[str, ...]
    size_bytes: int

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def open(self) -> FileIO:
        """Open for reading. Raises ``CorpusError`` unless it is still a regular file below the folder."""
        try:
            if not flags("O_DIRECTORY"):
                return self._open_by_path()
            handle = os.open(self.folder, _FOLDER)
            try:
                for part in self.place[:-1]:
                    inner = os.open(part, _FOLDER, dir_fd=handle)
                    os.close(handle)
                    handle = inner
                last = self.place[-1]
                # Checked before it is opened, since opening has effects on some devices and on a pipe's writer.
                _require_regular(os.stat(last, dir_fd=handle, follow_symlinks=False), self.path)
                file = FileIO(os.open(last, _FILE, dir_fd=handle), "r")
            finally:
                os.close(handle)
            try:
                _require_regular(os.fstat(file.fileno()), self.path)
            except CorpusError:
                file.close()
                raise
        except OSError as error:
            raise CorpusError(f"{self.path}: cannot be read ({error.strerror}); fix it or leave it out") from error
        return file

    def _open_by_path(self) -> FileIO:
        """The same where folders cannot be opened (Windows): the path is resolved, and what it leads to is checked."""
        path = self.folder.joinpath(*self.place)
        if Path(os.path.realpath(path)) != path:
            raise CorpusError(f"{self.path}: this is a link now; remove it or leave it out")
        _require_regular(os.stat(path, follow_symlinks=False), self.path)
        return FileIO(os.open(path, _FILE), "r")


def named_folders(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Resolve the folders that ``--data`` names, each once. Raises ``UserError`` for a path that is no folder."""
    found = []
    for folder in folders:
        try:
            real = folder.expanduser().resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise UserError(f"--data {folder}: there is no such folder") from error
        if not real.is_dir():
            raise UserError(f"--data {folder}: this is not a folder; give the folder that the file is in")
        found.append(real)
    return tuple(dict.fromkeys(found))


def find_files(kind: str, pattern: str, folders: Sequence[Path]) -> tuple[DataFile, ...]:
    """Find the files, at least one, that ``text:GLOB`` or ``tokens:FILE`` names, sorted by name; opens none.

    ``**`` stands for folders of any depth and follows no links; wildcards match no hidden names. ``folders``: those of
    ``--data``. Raises ``CorpusError``, whose message says what to do on this machine, and ``UserError`` as
    ``named_folders``.
    """
    folders = named_folders(folders)
    if not folders:
        raise CorpusError(
            f"the run trains on files of this machine ({kind}:{pattern}): name the folder that they are in with "
            "--data FOLDER (SessionOptions.data); the run can read nothing outside of it"
        )
    found: dict[str, DataFile] = {}
    for folder in folders:
        for one in _matches(folder, pattern, literal=kind == "tokens"):
            other = found.setdefault(one.name, one)
            if other.folder != one.folder:
                raise CorpusError(f"{other.path} and {one.path} have the same name in the run: leave out one --data")
            if len(found) > MAX_FILES:
                raise CorpusError(f"{kind}:{pattern}: matches more than {MAX_FILES:,} files below {folder}")
    if not found:
        places = ", ".join(str(folder) for folder in folders)
        raise CorpusError(
            f"{kind}:{pattern}: no file matches below {places}: check --data, and data.source in the run file"
        )
    return tuple(found[name] for name in sorted(found))


def _matches(folder: Path, pattern: str, *, literal: bool) -> Iterator[DataFile]:
    steps = [_step(part, literal=literal) for part in pattern.split("/")]
    last = len(steps) - 1
    pending, looked_into = [("", folder, _closed({0}, steps))], 0
    while pending:
        above, place, here = pending.pop()
        looked_into += 1
        if looked_into > MAX_FILES:
            raise CorpusError(f"{pattern}: leads into more than {MAX_FILES:,} folders below {folder}")
        for entry in _entries(place):
            if entry.name.startswith("."):
                continue
            name, real = above + entry.name, place / entry.name
            by_name = {at for at in here if (step := steps[at]) is not None and step(entry.name)}
            at_any_depth = {at for at in here if steps[at] is None}
            if entry.is_symlink():
                if not by_name:
                    continue
                real, at_any_depth = _led_to(real, folder), set()
            about = _stat(real)
            if about is None:
                continue
            if stat.S_ISDIR(about.st_mode):
                beyond = _closed({at + 1 for at in by_name if at < last} | at_any_depth, steps)
                if beyond:
                    pending.append((f"{name}/", real, beyond))
            elif last in by_name | at_any_depth:
                _require_regular(about, folder / name)
                yield DataFile(folder, name, real.relative_to(folder).parts, about.st_size)


def _step(part: str, *, literal: bool) -> Callable[[str], object] | None:
    """Make the test of an entry's name for a part of the pattern; None for ``**``, any number of folders."""
    if literal or not glob.has_magic(part):
        return part.__eq__
    return None if part == _EVERYTHING else re.compile(fnmatch.translate(part)).match


def _closed(steps_at: set[int], steps: Sequence[object]) -> frozenset[int]:
    """Add the step after each ``**``, which may stand for no folder at all."""
    closed = set(steps_at)
    for at in range(len(steps) - 1):
        if at in closed and steps[at] is None:
            closed.add(at + 1)
    return frozenset(closed)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise CorpusError(f"{folder}: cannot be read ({error.strerror}); fix it or leave it out") from error


def _led_to(link: Path, folder: Path) -> Path:
    """Resolve a link. Raises ``CorpusError`` if it leads out of the folder."""
    try:
        real = Path(os.path.realpath(link))
    except OSError as error:
        raise CorpusError(f"{link}: cannot be read ({error.strerror}); fix it or leave it out") from error
    if not real.is_relative_to(folder):
        raise CorpusError(
            f"{link}: this link leads out of {folder}, where the run may read nothing: remove it, or name the folder "
            "that it leads to with --data"
        )
    return real


def _stat(real: Path) -> os.stat_result | None:
    """Return the status of a path; None if it is gone, or was a link to nothing."""
    try:
        return os.stat(real, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorpusError(f"{real}: cannot be read ({error.strerror}); fix it or leave it out") from error


def _require_regular(about: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise CorpusError(f"{path}: this is no regular file, but a {_kind(about.st_mode)}; remove it or leave it out")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "device")
