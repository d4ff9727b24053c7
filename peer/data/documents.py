"""Documents of a corpus in text, JSON lines, parquet or Arrow files, and their division into pieces of work.

The division depends on the files alone, so that shards are the same whatever the number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.swarm.errors import CorpusError

PIECE_BYTES = 64 * 2**20
"""Input of one piece, about; it becomes one shard."""

_RUN_BYTES = 2**18
"""Text that is tokenized at once, of files that are one document each."""

SUFFIXES = {
    "text": (".txt", ".text", ".md", ".rst", ".py", ".html", ".tex"),
    "jsonl": (".jsonl", ".json"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}


@dataclass(frozen=True)
class Piece:
    """Part of the input. ``files``: whole ones where ``start`` is -1, else one, from byte or row group ``start`` to
    ``stop``; ``size_bytes``: about, for the progress."""

    kind: str
    files: tuple[str, ...]
    start: int
    stop: int
    size_bytes: int


def input_files(folder: Path, kind: str) -> list[Path]:
    """The files of a kind below a folder, or the one file, by name. Raises ``CorpusError`` if there are none."""
    if folder.is_file():
        return [folder]
    found = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    found = [path for path in found if path.suffix in SUFFIXES[kind]]
    if not found:
        raise CorpusError(f"{folder}: has no files of {kind} ({', '.join(SUFFIXES[kind])}): check the folder")
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def dataset_files(folder: Path) -> tuple[str, list[Path]]:
    """Kind and files of a Hugging Face dataset's folder: saved by ``save_to_disk``, or as on the hub."""
    for kind in ("arrow", "parquet", "jsonl"):
        if any(folder.rglob(f"*{SUFFIXES[kind][0]}")):
            return kind, input_files(folder, kind)
    raise CorpusError(f"{folder}: has no .arrow, .parquet or .jsonl files of a dataset: check the folder")


def plan_pieces(kind: str, files: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Divide files into pieces, in order."""
    pieces: list[Piece] = []
    group: list[str] = []
    group_bytes = 0

    def close() -> None:
        nonlocal group, group_bytes
        if group:
            pieces.append(Piece(kind, tuple(group), -1, -1, group_bytes))
        group, group_bytes = [], 0

    for path in files:
        size = path.stat().st_size
        if kind in ("text", "jsonl") and size > piece_bytes:
            close()
            for start in range(0, size, piece_bytes):
                stop = min(start + piece_bytes, size)
                pieces.append(Piece(kind, (str(path),), start, stop, stop - start))
            continue
        if kind == "parquet" and size > piece_bytes:
            close()
            groups = _parquet(path).num_row_groups
            step = max(1, groups * piece_bytes // size)
            for start in range(0, groups, step):
                stop = min(start + step, groups)
                pieces.append(Piece(kind, (str(path),), start, stop, size * (stop - start) // groups))
            continue
        if group_bytes + size > piece_bytes:
            close()
        group.append(str(path))
        group_bytes += size
    close()
    return pieces


def runs_of(piece: Piece, field: str) -> Iterator[tuple[str, bool]]:
    """The texts of a piece in order, each with whether its document ends there. ``field``: with the text, in records.

    Raises ``CorpusError`` for files that cannot be read."""
    read: dict[str, Callable[[Path, int, int, str], Iterator[tuple[str, bool]]]] = {
        "text": _text,
        "jsonl": _jsonl,
        "parquet": _parquet_texts,
        "arrow": _arrow_texts,
    }
    for name in piece.files:
        try:
            yield from read[piece.kind](Path(name), piece.start, piece.stop, field)
        except OSError as error:
            raise CorpusError(f"{name}: cannot be read ({error.strerror or error}); fix it or leave it out") from error


def _lines(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in [start, stop), or all, with their places."""
    with path.open("rb") as file:
        at = max(start, 0)
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while (stop < 0 or at < stop) and (line := file.readline()):
            yield at, line
            at += len(line)


def _text(path: Path, start: int, stop: int, field: str) -> Iterator[tuple[str, bool]]:
    run, size, total = [], 0, path.stat().st_size
    at = 0
    for place, line in _lines(path, start, stop):
        run.append(line)
        size += len(line)
        at = place + len(line)
        if size >= _RUN_BYTES:
            yield b"".join(run).decode("utf-8", "replace"), at >= total
            run, size = [], 0
    if run:
        yield b"".join(run).decode("utf-8", "replace"), at >= total


def _jsonl(path: Path, start: int, stop: int, field: str) -> Iterator[tuple[str, bool]]:
    for place, line in _lines(path, start, stop):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{path}: byte {place:,}: expected a line of JSON: {error}") from error
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise CorpusError(f"{path}: byte {place:,}: expected a record with a text {field!r}; name it with --field")
        yield text, True


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(f"parquet and Arrow files need a package: pip install 'shoal[data]' ({error})") from error
    return pyarrow


def _parquet(path: Path) -> Any:
    pyarrow = _arrow()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{path}: is no parquet file, or was cut off ({error}): copy it again") from error


def _parquet_texts(path: Path, start: int, stop: int, field: str) -> Iterator[tuple[str, bool]]:
    file = _parquet(path)
    if field not in file.schema_arrow.names:
        raise CorpusError(f"{path}: expected a column {field!r}, not {', '.join(file.schema_arrow.names)}: see --field")
    groups = range(file.num_row_groups) if start < 0 else range(start, stop)
    yield from _column(path, file.iter_batches(row_groups=list(groups), columns=[field]), field)


def _arrow_texts(path: Path, start: int, stop: int, field: str) -> Iterator[tuple[str, bool]]:
    pyarrow = _arrow()
    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowException as error:
            raise CorpusError(f"{path}: is no Arrow stream of a dataset ({error})") from error
        if field not in reader.schema.names:
            raise CorpusError(f"{path}: expected a column {field!r}, not {', '.join(reader.schema.names)}: see --field")
        yield from _column(path, reader, field)


def _column(path: Path, batches: Any, field: str) -> Iterator[tuple[str, bool]]:
    pyarrow = _arrow()
    try:
        for batch in batches:
            for value in batch.column(batch.schema.get_field_index(field)):
                text = value.as_py()
                if isinstance(text, str):
                    yield text, True
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{path}: cannot be read, or was cut off ({error}): copy it again") from error
