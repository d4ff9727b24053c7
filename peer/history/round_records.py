"""Round records: a round's committed bytes and its signed verdict, one safetensors file a round.

They are checked whenever they are read: by the coordinator's signature, and by the digests that it covers."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shoal.peer.regular_file import open_regular
from shoal.swarm.averaging.results import chunks_of, part_digest
from shoal.swarm.durable import replace, sync
from shoal.swarm.errors import BlobUnavailable, StateFileError, StorageError, WireError
from shoal.swarm.protocol.rounds import Part, Verdict
from shoal.swarm.protocol.verdict_chain import check_verdict, pack_verdict, unpack_verdicts
from shoal.swarm.system import read_at

log = logging.getLogger(__name__)

RECORDS = "rounds"
"""Name of the records' folder, beside the checkpoints'."""

_FORMAT = "shoal-round-1"
_MAX_HEADER_BYTES = 2**20
_PIECES_AT_ONCE = 256
"""Pieces written by one system call, which takes a limited number of them (1,024 on Linux)."""

Chunks = Sequence[memoryview | None]
"""A round's result chunks in their order, with their headers; None in void parts."""


@dataclass(frozen=True)
class RecordOwner:
    """Owner of records: a run by its hash, and its coordinator's identity key, which signs verdicts."""

    run_hash: bytes
    coordinator_key: bytes


@dataclass(frozen=True)
class RoundRecord:
    """A record whose verdict and layout have been checked; ``read`` checks its chunks, too."""

    path: Path
    verdict: Verdict
    owner: RecordOwner
    lengths: tuple[int, ...]
    """Bytes of every chunk; 0 in void parts."""
    _starts: tuple[int, ...] = field(repr=False)

    @property
    def result_bytes(self) -> int:
        return sum(self.lengths)

    def chunk(self, index: int) -> memoryview:
        """Read one chunk without checking it. Raises ``BlobUnavailable`` for a void one."""
        if not self.lengths[index]:
            raise BlobUnavailable(f"chunk {index} of round {self.verdict.round} is void")
        with _refusing(self.path), open_regular(self.path) as file:
            data = read_at(file.fileno(), self.lengths[index], self._starts[index])
        if len(data) != self.lengths[index]:
            raise StateFileError(f"{self.path}: ends in the middle of chunk {index}; it is damaged")
        return memoryview(data)

    def read(self) -> Chunks:
        """Read all chunks and check them against the committed digests. Raises ``StateFileError``."""
        chunks: list[memoryview | None] = [None] * len(self.lengths)
        assert self.verdict.plan is not None
        with _refusing(self.path), open_regular(self.path) as file:
            for index, (part, digest) in enumerate(zip(self.verdict.plan.parts, self.verdict.digests, strict=True)):
                if digest is None:
                    continue
                its = chunks_of(self.verdict.plan, part)
                file.seek(self._starts[its.start])
                data = memoryview(file.read(sum(self.lengths[its.start : its.stop])))
                for chunk in its:
                    chunks[chunk], data = data[: self.lengths[chunk]], data[self.lengths[chunk] :]
                if part_digest(one for chunk in its if (one := chunks[chunk]) is not None) != digest:
                    raise StateFileError(
                        f"{self.path}: field {_part_name(index)}: expected the bytes that the verdict of round "
                        f"{self.verdict.round} names; it is damaged"
                    )
        return chunks


class RoundRecords:
    """The records in one folder. For any thread; every call reads the disk."""

    def __init__(self, folder: Path, owner: RecordOwner) -> None:
        self.folder = folder
        self.owner = owner

    def path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.safetensors"

    def numbers(self) -> list[int]:
        """The rounds that have a file here, lowest first; none where the folder cannot be read."""
        with suppress(OSError):
            return sorted(int(path.stem) for path in self.folder.glob("*.safetensors") if path.stem.isdecimal())
        return []

    def open(self, number: int) -> RoundRecord:
        """Open a record. Raises ``StateFileError`` naming the file and what is wrong with it."""
        return open_record(self.path(number), self.owner)

    def open_all(self) -> list[RoundRecord]:
        """All records, lowest round first; those that cannot be used are left out, with a warning."""
        found = []
        for number in self.numbers():
            try:
                found.append(self.open(number))
            except StateFileError as error:
                log.warning("a round record is left out: %s", error)
        return found

    def write(self, verdict: Verdict, chunks: Chunks) -> RoundRecord:
        """Write a record completely or not at all. ``chunks``: those of the verdict's digests, which the caller has
        checked.

        Raises ``StorageError`` when the disk refuses."""
        path = self.path(verdict.round)
        temporary = path.with_name(f".{path.name}.new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(temporary, verdict, chunks, self.owner)
            replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StorageError(f"{path}: the round cannot be kept: {error}; free some space on that disk") from error
        return self.open(verdict.round)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove records; those that cannot be removed stay and do no harm."""
        for number in numbers:
            with suppress(OSError):
                self.path(number).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove the files that killed writers left."""
        with suppress(OSError):
            for path in self.folder.glob(".*.safetensors.new"):
                path.unlink(missing_ok=True)


def open_record(path: Path, owner: RecordOwner | None = None) -> RoundRecord:
    """Open a record; ``owner`` is None where the coordinator's key is known from the record alone. Raises
    ``StateFileError``."""
    with _refusing(path), open_regular(path) as file:
        header, fields = _read_header(path, file.read(8 + _MAX_HEADER_BYTES))
        start = 8 + len(header)
        found = RecordOwner(_digest_of(path, fields, "run_hash"), _digest_of(path, fields, "coordinator"))
        raw_lengths = _tensor(path, fields, "lengths", file.fileno(), start)
        raw_verdict = _tensor(path, fields, "verdict", file.fileno(), start)
        size_bytes = os.fstat(file.fileno()).st_size
    for name, value, expected in _differences(found, owner):
        raise StateFileError(f"{path}: field {name}: expected {expected}, not {value}: it is of another run")
    verdict = _unpack_verdict(path, raw_verdict)
    try:
        check_verdict(verdict, found.coordinator_key)
    except WireError as error:
        raise StateFileError(f"{path}: field verdict: {error}; it is damaged") from error
    plan = verdict.plan
    if not verdict.committed or plan is None or path.stem != f"{verdict.round:08d}":
        raise StateFileError(f"{path}: field verdict: expected a committed round with the number in the file's name")
    chunks = -(-plan.parts[-1].stop // plan.chunk_elements)
    lengths = tuple(np.frombuffer(raw_lengths, "<i8").tolist()) if len(raw_lengths) == 8 * chunks else ()
    if len(lengths) != chunks or min(lengths) < 0:
        raise StateFileError(f"{path}: field lengths: expected the lengths of {chunks} chunks")
    expected_header, starts, stop = _layout(verdict, lengths, len(raw_verdict), found)
    if expected_header != header or size_bytes != start + stop:
        raise StateFileError(f"{path}: expected {start + stop} bytes with one tensor a part; it is damaged")
    return RoundRecord(path, verdict, found, lengths, tuple(start + at for at in starts))


# The format -------------------------------------------------------------------------------------------------


def _read_header(path: Path, data: bytes) -> tuple[bytes, dict[str, Any]]:
    """The header of a record's file, as bytes and parsed."""
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    try:
        fields = json.loads(text)
        if fields["__metadata__"]["format"] == _FORMAT:
            return text, fields
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise StateFileError(f"{path}: not a complete Shoal round record (format: expected {_FORMAT})")


def _digest_of(path: Path, fields: dict[str, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(fields["__metadata__"][name])
    except (KeyError, TypeError, ValueError) as error:
        raise StateFileError(f"{path}: field {name}: expected a digest; it is damaged") from error


def _tensor(path: Path, fields: dict[str, Any], name: str, descriptor: int, start: int) -> bytes:
    try:
        begin, end = fields[name]["data_offsets"]
        if 0 <= begin <= end <= os.fstat(descriptor).st_size:
            return read_at(descriptor, end - begin, start + begin)
    except (KeyError, TypeError, ValueError):
        pass
    raise StateFileError(f"{path}: field {name}: expected a tensor; it is damaged")


def _layout(
    verdict: Verdict, lengths: Sequence[int], verdict_bytes: int, owner: RecordOwner
) -> tuple[bytes, list[int], int]:
    """The header of a record, the offset of each chunk in the data after it, and the end of the data.

    There is exactly one header for a record, so any other one is recognised as damage."""
    assert verdict.plan is not None
    metadata = {"format": _FORMAT, "run_hash": owner.run_hash.hex(), "coordinator": owner.coordinator_key.hex()}
    sizes = [("lengths", "I64", len(lengths), 8 * len(lengths)), ("verdict", "U8", verdict_bytes, verdict_bytes)]
    starts = [0] * len(lengths)
    at = sum(size for *_, size in sizes)
    for index, (part, digest) in enumerate(zip(verdict.plan.parts, verdict.digests, strict=True)):
        if digest is None:
            continue
        begin = at
        for chunk in chunks_of(verdict.plan, part):
            starts[chunk], at = at, at + lengths[chunk]
        sizes.append((_part_name(index), "U8", at - begin, at - begin))
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    for name, kind, count, size in sizes:
        header[name] = {"dtype": kind, "shape": [count], "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), starts, at


def _write(path: Path, verdict: Verdict, chunks: Chunks, owner: RecordOwner) -> None:
    assert verdict.plan is not None
    kept = [chunk for part in _committed_parts(verdict) for chunk in chunks_of(verdict.plan, part)]
    pieces = {index: chunk for index in kept if (chunk := chunks[index]) is not None}
    assert len(pieces) == len(kept), "all committed chunks are here"
    lengths = [pieces[index].nbytes if index in pieces else 0 for index in range(len(chunks))]
    packed = pack_verdict(verdict)
    header, _, _ = _layout(verdict, lengths, len(packed), owner)
    with path.open("wb", buffering=0) as file:
        start = [len(header).to_bytes(8, "little"), header, np.array(lengths, "<i8").tobytes(), packed]
        _write_all(file.fileno(), [memoryview(piece) for piece in start])
        _write_all(file.fileno(), [pieces[index] for index in kept])
        sync(file)


def _write_all(descriptor: int, pieces: list[memoryview]) -> None:
    left = deque(pieces)
    while left:
        written = os.writev(descriptor, list(islice(left, _PIECES_AT_ONCE)))
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if left:
            left[0] = left[0][written:]


def _committed_parts(verdict: Verdict) -> list[Part]:
    assert verdict.plan is not None
    return [part for part, digest in zip(verdict.plan.parts, verdict.digests, strict=True) if digest is not None]


def _part_name(index: int) -> str:
    return f"part-{index:05d}"


def _unpack_verdict(path: Path, data: bytes) -> Verdict:
    with suppress(WireError, ValueError):
        ((verdict, end),) = unpack_verdicts(data)
        if end == len(data):
            return verdict
    raise StateFileError(f"{path}: field verdict: not a verdict; it is damaged")


def _differences(found: RecordOwner, expected: RecordOwner | None) -> list[tuple[str, str, str]]:
    if expected is None:
        return []
    fields = [
        ("run_hash", found.run_hash, expected.run_hash),
        ("coordinator", found.coordinator_key, expected.coordinator_key),
    ]
    return [(name, one.hex()[:16], other.hex()[:16]) for name, one, other in fields if one != other]


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn errors of the disk into ``StateFileError`` that names the file."""
    try:
        yield
    except OSError as error:
        raise StateFileError(f"{path}: cannot be read: {error}") from error
