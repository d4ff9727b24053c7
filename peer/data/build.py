"""Building of token shards: documents are tokenized in processes, a shard a piece; the manifest is written last.

A piece counts as done once its note is on the disk, so a build that was killed goes on with the pieces that are left.
The result depends on the input and the tokenizer alone."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from shoal.peer.data.documents import Piece, runs_of
from shoal.peer.data.manifest import BLOCK_BYTES, BYTES, DTYPES, MANIFEST, Manifest, ShardFile, TokenizerAbout
from shoal.swarm import durable
from shoal.swarm.errors import CorpusError

BYTES_TOKENIZER = "bytes"
"""Value of ``--tokenizer`` for text as it is."""

TOKENIZER_FILE = "tokenizer.json"
_NOTES = ".build"
_BATCH_LETTERS = 2**20
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_TOKEN_SUFFIXES = {".u8": "u8", ".u16": "u16", ".u32": "u32"}

Progress = Callable[[int, int], object]
"""Called with the bytes of input that are done, and those of all input."""


@dataclass(frozen=True)
class _Task:
    """One piece's work in a process. ``tokenizer``: a path, or ``bytes``."""

    piece: Piece
    number: int
    out: str
    tokenizer: str
    dtype: str
    end: int | None
    field: str
    block_bytes: int


@dataclass(frozen=True)
class _Note:
    """A piece that is done. ``digests``: in hexadecimal, of each block."""

    name: str
    size_bytes: int
    digests: str


def about_tokenizer(tokenizer: str, end: str = "") -> TokenizerAbout:
    """Describe ``bytes`` or a ``tokenizer.json``. ``end``: the token after each document, by default a usual one.

    Raises ``CorpusError``."""
    if tokenizer == BYTES_TOKENIZER:
        return BYTES
    loaded = _load_tokenizer(tokenizer)
    ids = loaded.get_vocab(with_added_tokens=True)
    named = [end] if end else [one for one in _ENDS if one in ids][:1]
    if named and named[0] not in ids:
        raise CorpusError(f"--end {end}: {tokenizer} has no such token")
    digest: bytes = blake3(Path(tokenizer).read_bytes()).digest()
    path = Path(tokenizer).resolve()
    name = path.parent.name if path.name == TOKENIZER_FILE else path.stem
    shown = "".join(letter if letter.isprintable() else "·" for letter in name)[:100] or "tokenizer"
    return TokenizerAbout(shown, digest, max(ids.values()) + 1, ids[named[0]] if named else None)


@lru_cache(maxsize=1)
def _load_tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CorpusError(f"tokenizers need a package: pip install 'shoal[data]' ({error})") from error
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare exceptions
        raise CorpusError(f"{path}: expected a tokenizer.json of the library tokenizers, or bytes: {error}") from error


def build_shards(
    out: Path,
    pieces: Sequence[Piece],
    tokenizer: str,
    about: TokenizerAbout,
    *,
    field: str = "text",
    block_bytes: int = BLOCK_BYTES,
    processes: int = 1,
    progress: Progress = lambda done, of: None,
) -> Manifest:
    """Tokenize all pieces into shards in ``out``, or those that an earlier call has left, and write the manifest.

    Raises ``CorpusError``."""
    dtype = "u8" if about.vocab <= 2**8 else "u16" if about.vocab <= 2**16 else "u32"
    plan: dict[str, Any] = {
        "pieces": [asdict(one) for one in pieces],
        "tokenizer": about.digest.hex(),
        "name": about.name,
    }
    plan |= {"end": about.end, "field": field, "block_bytes": block_bytes}
    plan["times"] = [os.stat(name).st_mtime_ns for piece in pieces for name in piece.files]
    planned = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest().encode()
    notes = out / _NOTES
    try:
        notes.mkdir(parents=True, exist_ok=True)
        if (out / MANIFEST).exists():
            raise CorpusError(f"{out}: has shards already: give an empty folder")
        if (notes / "plan").exists() and (notes / "plan").read_bytes() != planned:
            raise CorpusError(f"{out}: an earlier build has left shards of other input or options: empty the folder")
        durable.put(notes / "plan", planned)
        tasks = [
            _Task(piece, number, str(out), tokenizer, dtype, about.end, field, block_bytes)
            for number, piece in enumerate(pieces)
        ]
        _run(tasks, notes, processes, progress)
        done = [_read_note(notes, number) for number in range(len(pieces))]
        manifest = _manifest(dtype, block_bytes, about, [one for one in done if one is not None and one.size_bytes])
        if tokenizer != BYTES_TOKENIZER:
            shutil.copyfile(tokenizer, out / TOKENIZER_FILE)
        durable.put(out / MANIFEST, manifest.data)
        shutil.rmtree(notes)
    except OSError as error:
        raise _unwritable(out, error) from error
    return manifest


def index_shards(out: Path, about: TokenizerAbout, block_bytes: int, progress: Progress) -> Manifest:
    """Write a manifest for files of bare tokens that are in ``out`` already: ``.u8``, ``.u16``, ``.u32``, or ``.ds``
    of datatrove, whose type follows from the tokenizer. Nothing is copied. Raises ``CorpusError``."""
    found = sorted(path for path in out.rglob("*") if path.suffix in (".ds", *_TOKEN_SUFFIXES) and path.stat().st_size)
    of_ds = "u16" if about.vocab <= 2**16 else "u32"
    dtypes = {_TOKEN_SUFFIXES.get(path.suffix, of_ds) for path in found}
    if len(dtypes) != 1:
        raise CorpusError(f"{out}: expected .ds, .u8, .u16 or .u32 files of one type, not {len(found)} of {dtypes}")
    (dtype,) = dtypes
    total, done, notes = sum(path.stat().st_size for path in found), 0, []
    token_bytes = np.dtype(DTYPES[dtype]).itemsize
    for path in found:
        size = path.stat().st_size
        if size % token_bytes:
            raise CorpusError(f"{path}: {size} bytes do not divide into tokens of {token_bytes}: copy the file again")
        digests = []
        with path.open("rb") as file:
            while data := file.read(block_bytes):
                if int(np.frombuffer(data, DTYPES[dtype]).max()) >= about.vocab:
                    raise CorpusError(f"{path}: has tokens beyond the tokenizer's {about.vocab}: give the right one")
                digests.append(blake3(data).hexdigest())
                done += len(data)
                progress(done, total)
        notes.append(_Note(path.relative_to(out).as_posix(), size, "".join(digests)))
    manifest = _manifest(dtype, block_bytes, about, notes)
    try:
        durable.put(out / MANIFEST, manifest.data)
    except OSError as error:
        raise _unwritable(out, error) from error
    return manifest


def _unwritable(out: Path, error: OSError) -> CorpusError:
    return CorpusError(
        f"{error.filename or out}: {error.strerror or error}: free some space or fix it, and give the same command "
        "again, which goes on where this one ended"
    )


def _manifest(dtype: str, block_bytes: int, about: TokenizerAbout, notes: Sequence[_Note]) -> Manifest:
    if not notes:
        raise CorpusError("the input has no text: check the folder, and --field for records")
    digests = np.frombuffer(bytes.fromhex("".join(one.digests for one in notes)), np.uint8).reshape(-1, 32)
    files = tuple(ShardFile(one.name, one.size_bytes) for one in notes)
    return Manifest(dtype, block_bytes, about, files, digests)


def _run(tasks: Sequence[_Task], notes: Path, processes: int, progress: Progress) -> None:
    left = [task for task in tasks if _read_note(notes, task.number) is None]
    total = sum(task.piece.size_bytes for task in tasks)
    done = total - sum(task.piece.size_bytes for task in left)
    progress(done, total)
    if not left:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(left)), mp_context=context, initializer=_begin_worker) as pool:
        running = {pool.submit(_build_piece, task): task for task in left}
        try:
            for future in as_completed(running):
                future.result()
                done += running[future].piece.size_bytes
                progress(done, total)
        except BrokenProcessPool as error:
            raise CorpusError(
                "a process that tokenized was killed, for want of memory maybe: give the same command again, with a "
                "smaller --processes"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what is parallel


def _build_piece(task: _Task) -> None:
    out = Path(task.out)
    path = out / f"shard-{task.number:05}.{task.dtype}"
    part = path.with_suffix(".part")
    digests, size = [], 0
    buffer = bytearray()
    with part.open("wb") as file:
        for tokens in _tokenized(task):
            buffer += tokens
            while len(buffer) >= task.block_bytes:
                block = bytes(buffer[: task.block_bytes])
                del buffer[: task.block_bytes]
                file.write(block)
                digests.append(blake3(block).hexdigest())
                size += len(block)
        if buffer:
            file.write(buffer)
            digests.append(blake3(buffer).hexdigest())
            size += len(buffer)
        durable.sync(file)
    if size:
        durable.replace(part, path)
    else:
        part.unlink()
    note = _Note(path.name, size, "".join(digests))
    durable.put(out / _NOTES / f"{task.number:05}.json", json.dumps(asdict(note)).encode())


def _tokenized(task: _Task) -> Iterator[bytes]:
    dtype = np.dtype(DTYPES[task.dtype])
    end = b"" if task.end is None else np.array([task.end], dtype).tobytes()
    if task.tokenizer == BYTES_TOKENIZER:
        for text, ends in runs_of(task.piece, task.field):
            yield text.encode("utf-8", "replace").replace(b"\0", b" ") + (end if ends else b"")
        return
    tokenizer = _load_tokenizer(task.tokenizer)
    runs: list[tuple[str, bool]] = []
    letters = 0

    def encoded() -> Iterator[bytes]:
        found = tokenizer.encode_batch([text for text, _ in runs], add_special_tokens=False)
        for one, (_, ends) in zip(found, runs, strict=True):
            yield np.array(one.ids, dtype).tobytes() + (end if ends else b"")

    for run in runs_of(task.piece, task.field):
        runs.append(run)
        letters += len(run[0])
        if letters >= _BATCH_LETTERS:
            yield from encoded()
            runs, letters = [], 0
    if runs:
        yield from encoded()


def _read_note(notes: Path, number: int) -> _Note | None:
    try:
        return _Note(**json.loads((notes / f"{number:05}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
