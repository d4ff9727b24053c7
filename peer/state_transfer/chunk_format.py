"""Formats in which chunks of a state travel: raw, losslessly compressed for slow links, or rounded to bfloat16."""

from __future__ import annotations

import zlib
from typing import Literal, Protocol

import numpy as np
import torch

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.types import Blob

PIECE_BYTES = 2**20
"""Bytes of a piece in which blobs are sent that are no states' chunks, such as lists of digests; the last one may be
shorter."""

_PLANES = 4
_SAMPLE_BYTES = 2**14
_WORTHWHILE = 0.95
"""A plane is sent as it is unless a sample of it shrinks to less than this share."""


class ChunkFormat(Protocol):
    """Encoding of chunks of float32 values for the network; for worker threads. Digests are of the values."""

    def pack(self, values: memoryview) -> memoryview: ...

    def unpack(self, packed: memoryview, size: int) -> memoryview:
        """Decode a chunk of ``size`` bytes of values. Raises ``WireError`` for what is not such a chunk."""
        ...

    def blob(self, version: int) -> Blob: ...


class Raw:
    """The values as they are in memory."""

    def pack(self, values: memoryview) -> memoryview:
        return values

    def unpack(self, packed: memoryview, size: int) -> memoryview:
        return packed

    def blob(self, version: int) -> Blob:
        return Blob(kind="state", number=version)


class Lossless:
    """Byte planes: all first bytes of the values, all second ones, and so on, each deflated if that makes it smaller.

    Signs and exponents of trained values are alike, low bits of mantissas are noise: about one plane of four gets
    smaller. Runs and Huffman codes alone (no search for repeated strings) take half the time and compress as well.

    Format: the lengths of the four planes as they are sent, little-endian uint32, then the planes."""

    def pack(self, values: memoryview) -> memoryview:
        planes = np.frombuffer(values, np.uint8).reshape(-1, _PLANES)
        sent = [_deflated(np.ascontiguousarray(planes[:, number]).data) for number in range(_PLANES)]
        lengths = np.array([plane.nbytes for plane in sent], "<u4").tobytes()
        return memoryview(b"".join([lengths, *sent]))

    def unpack(self, packed: memoryview, size: int) -> memoryview:
        head = 4 * _PLANES
        if packed.nbytes < head:
            raise WireError(f"a packed chunk of {packed.nbytes} bytes is too short")
        lengths = np.frombuffer(packed[:head], "<u4").tolist()
        if head + sum(lengths) != packed.nbytes:
            raise WireError("the planes of a packed chunk are not as long as its header says")
        values = np.empty((size // _PLANES, _PLANES), np.uint8)
        at = head
        for number, length in enumerate(lengths):
            values[:, number] = np.frombuffer(_inflated(packed[at : at + length], len(values)), np.uint8)
            at += length
        return values.data.cast("B")

    def blob(self, version: int) -> Blob:
        return Blob(kind="state_lossless", number=version)


class Bfloat16:
    """Anchors rounded to bfloat16, in half the bytes, for exports, which contribute nothing.

    Digests are of the rounded values, so the run's digest does not vouch for them."""

    def pack(self, values: memoryview) -> memoryview:
        return torch.frombuffer(values, dtype=torch.float32).bfloat16().view(torch.int16).numpy().data.cast("B")

    def unpack(self, packed: memoryview, size: int) -> memoryview:
        if 2 * packed.nbytes != size:
            raise WireError(f"a bfloat16 chunk has {packed.nbytes} bytes, not {size // 2}")
        return torch.frombuffer(packed, dtype=torch.bfloat16).float().numpy().data.cast("B")

    def blob(self, version: int) -> Blob:
        return Blob(kind="anchor_bfloat16", number=version)


def pieces_in(size_bytes: int) -> int:
    return -(-size_bytes // PIECE_BYTES)


RAW, LOSSLESS, BFLOAT16 = Raw(), Lossless(), Bfloat16()


def format_of(transfer: Literal["raw", "lossless"]) -> ChunkFormat:
    """The format that a run file's ``[checkpoints] transfer`` names."""
    return LOSSLESS if transfer == "lossless" else RAW


def _deflated(plane: memoryview) -> memoryview:
    """The plane deflated, or as it is where that is no smaller."""
    sample = plane[:_SAMPLE_BYTES]
    if len(_deflate(sample)) > _WORTHWHILE * sample.nbytes:
        return plane
    smaller = _deflate(plane)
    return memoryview(smaller) if len(smaller) < plane.nbytes else plane


def _deflate(data: memoryview) -> bytes:
    deflating = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return deflating.compress(data) + deflating.flush()


def _inflated(plane: memoryview, size: int) -> memoryview:
    """Inflate a plane to exactly ``size`` bytes, and never to more. Raises ``WireError``."""
    if plane.nbytes == size:
        return plane
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(plane, size + 1)
    except zlib.error as error:
        raise WireError(f"a packed chunk cannot be unpacked: {error}") from error
    if len(data) != size or not inflating.eof or inflating.unused_data:
        raise WireError("a plane of a packed chunk unpacks to another size")
    return memoryview(data)
