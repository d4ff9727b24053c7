"""Safetensors files that are read tensor by tensor, straight into the memory where the values belong.

Nothing of a file's size is held: a few MiB at a time pass by, also where a file is only checked."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.peer.checkpoints.manifest import FileEntry
from shoal.peer.checkpoints.source import CheckpointSource, FileContent, refusal
from shoal.peer.checkpoints.tensors import DTYPE_NAMES, PIECE_BYTES
from shoal.peer.training.anchor import bytes_of
from shoal.swarm.errors import StateFileError

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 2**26
_MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: its bytes are those from ``start`` to ``stop``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class CheckedStream:
    """Content that is read once, from its beginning to its end, and hashed on the way (a ``FileContent``)."""

    def __init__(self, content: FileContent, digest: str, place: str) -> None:
        self.size_bytes = content.size_bytes
        self.place = place
        self._content = content
        self._expected = digest
        self._digest = hashlib.sha256()
        self._at = 0

    def read_into(self, at: int, out: memoryview) -> None:
        assert at == self._at, "in order"
        self._content.read_into(at, out)
        self._digest.update(out)
        self._at += out.nbytes

    def finish(self) -> None:
        """Read what is left and check the digest. Raises ``StateFileError``."""
        piece = memoryview(bytearray(min(PIECE_BYTES, self.size_bytes - self._at)))
        while self._at < self.size_bytes:
            self.read_into(self._at, piece[: self.size_bytes - self._at])
        found = self._digest.hexdigest()
        if found != self._expected:
            raise refusal(self.place, "SHA-256", self._expected, found)


@contextmanager
def checked_stream(source: CheckpointSource, name: str, entry: FileEntry) -> Iterator[CheckedStream]:
    """Open a file that the manifest names; its digest is checked when the context ends.

    Until then nothing of it may be used. Raises ``StateFileError``; of a damaged file that makes no sense it says that
    it is damaged."""
    size_bytes, digest = entry
    place = source.place(name)
    with source.open(name) as content:
        check_size(place, size_bytes, content.size_bytes)
        stream = CheckedStream(content, digest, place)
        try:
            yield stream
        except StateFileError:
            stream.finish()
            raise
        stream.finish()


def check_size(place: str, claimed_bytes: int, found_bytes: int) -> None:
    """Raise ``StateFileError`` unless a file has the size that the manifest says."""
    if claimed_bytes != found_bytes:
        raise refusal(place, "size", f"{claimed_bytes} bytes", f"{found_bytes} bytes")


def read_entries(content: FileContent, place: str) -> tuple[TensorEntry, ...]:
    """The tensors of a safetensors file in the order of their bytes, by its header.

    Raises ``StateFileError`` unless header and tensors are the whole file."""
    length = bytearray(_LENGTH_BYTES)
    if content.size_bytes < _LENGTH_BYTES:
        raise _no_safetensors(place, "it is too short")
    content.read_into(0, memoryview(length))
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > min(_MAX_HEADER_BYTES, content.size_bytes - _LENGTH_BYTES):
        raise _no_safetensors(place, f"a header of {header_bytes} bytes")
    header = bytearray(header_bytes)
    content.read_into(_LENGTH_BYTES, memoryview(header))
    at = first = _LENGTH_BYTES + header_bytes
    try:
        named = json.loads(header)
        named.pop("__metadata__", None)
        found = sorted((_entry(name, one, first) for name, one in named.items()), key=lambda one: (one.start, one.stop))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_safetensors(place, f"{type(error).__name__}: {str(error)[:200]}") from error
    for one in found:
        if one.start != at or one.stop - one.start != one.elements * one.dtype.itemsize:
            raise _no_safetensors(place, f"the place of the tensor {one.name[:100]!r}")
        at = one.stop
    if at != content.size_bytes:
        raise _no_safetensors(place, f"{content.size_bytes - at} bytes that are no tensor's")
    return tuple(found)


def _entry(name: str, fields: dict[str, object], first: int) -> TensorEntry:
    """Raises ``ValueError``, ``KeyError``, ``TypeError``."""
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("dtype, shape or data_offsets of another type")
    if len(shape) > _MAX_DIMENSIONS or any(type(one) is not int or not 0 <= one < 2**62 for one in (*shape, *offsets)):
        raise ValueError("sizes that are no sizes")
    start, stop = offsets
    return TensorEntry(name, _DTYPES[dtype], tuple(shape), first + start, first + stop)


def _no_safetensors(place: str, found: str) -> StateFileError:
    return refusal(place, "its content", "safetensors", found)


def read_tensor(content: FileContent, entry: TensorEntry, out: Tensor) -> None:
    """Read a tensor into memory of its type and number of elements, on any device. Raises ``StateFileError``."""
    out = out.detach()
    assert (out.dtype, out.numel()) == (entry.dtype, entry.elements)
    if not out.is_contiguous():
        whole = torch.empty(out.shape, dtype=out.dtype)
        read_tensor(content, entry, whole)
        out.copy_(whole)
    elif out.device.type == "cpu":
        data = bytes_of(out)
        for start in range(0, data.nbytes, PIECE_BYTES):
            content.read_into(entry.start + start, data[start : start + PIECE_BYTES])
    else:
        flat, size = out.view(-1), PIECE_BYTES // entry.dtype.itemsize
        buffer = torch.empty(min(size, flat.numel()), dtype=entry.dtype)
        for start in range(0, flat.numel(), size):
            piece = buffer[: flat.numel() - start]
            content.read_into(entry.start + start * entry.dtype.itemsize, bytes_of(piece))
            flat[start : start + piece.numel()].copy_(piece)
