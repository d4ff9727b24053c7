"""A member's whole contribution after its round: kept for validators until the next round but one, and fetched by them.

Its chunks are the leaves, each with its path, so that whoever fetches it checks every leaf against the root in the
plan."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from torch import Tensor

from shoal.compression.formats import CodecError
from shoal.compression.scratch import empty_aligned
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.chunk_streams import StreamMeter, receive_chunks
from shoal.swarm.averaging.contribution import EncodedContribution
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.spooled_chunks import SpooledChunks
from shoal.swarm.errors import BlobUnavailable, Busy, DeadlineExceeded, WireError
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

log = logging.getLogger(__name__)

_READERS = 2
"""Validators that are served at once."""


def committed_blob(round_number: int) -> Blob:
    """Return the blob of a member's contribution to a committed round."""
    return Blob(kind="committed", number=round_number)


class CommittedContribution:
    """Our contribution to a committed round, as validators may read it (a ``CountedSource``)."""

    def __init__(
        self, round_number: int, grid: LeafGrid, may_read: Callable[[bytes], bool], folder: Path | None
    ) -> None:
        """``may_read``: whether the transport key is that of a validator. ``folder``: for the file."""
        self.blob = committed_blob(round_number)
        self.chunks = grid.leaves
        self._grid = grid
        self._may_read = may_read
        self._reading: set[bytes] = set()
        self._kept = SpooledChunks(folder)

    def keep(self, contribution: EncodedContribution) -> None:
        """Copy all leaves. For a worker thread; never raises."""
        buffers = BufferPool()
        try:
            for leaf in range(self.chunks):
                self._kept.put(leaf, contribution.chunk(*self._grid.bounds(leaf), buffers))
        except OSError as error:
            log.warning("this contribution cannot be kept, so validators cannot score it: %s", error)

    def close(self) -> None:
        """Drop it."""
        self._kept.close()

    def begin_reading(self, reader: bytes) -> None:
        """Count a validator's stream. Raises ``Busy``, and ``BlobUnavailable`` for others than validators."""
        if not self._may_read(reader):
            raise BlobUnavailable("only validators that the host has authorised may read whole contributions")
        if reader in self._reading or len(self._reading) >= _READERS:
            raise Busy("other validators are being served")
        self._reading.add(reader)

    def end_reading(self, reader: bytes) -> None:
        """See ``CountedSource``."""
        self._reading.discard(reader)

    async def chunk(self, index: int) -> memoryview:
        """Return a leaf with its path. Raises ``BlobUnavailable`` once it is dropped."""
        return await in_thread(self._kept.get, index)


class PartialContribution:
    """What attempts to fetch a contribution have brought so far: a slow uplink is no refusal to show it.

    ``values``: (n,) float32, of which the first ``leaves`` are there."""

    def __init__(self, grid: LeafGrid) -> None:
        self.grid, self.leaves = grid, 0
        self.values = empty_aligned(grid.bounds(grid.leaves - 1)[1])


async def fetch_contribution(
    endpoint: Endpoint,
    peer: str,
    round_number: int,
    root: bytes,
    partial: PartialContribution,
    progress_s: float,
    limit_s: float,
) -> Tensor:
    """Fetch and decode a member's contribution to a committed round, ``(n,) float32``, from where ``partial`` ends.

    Raises ``LinkError``: ``WireError`` for leaves that do not lead to the root or do not decode, ``DeadlineExceeded``
    after ``limit_s``, however steadily leaves come, and whatever the member says. What has come stays in ``partial``.
    """
    grid, values = partial.grid, partial.values

    def room(leaf: int, size: int) -> memoryview:
        if size != grid.chunk_bytes(*grid.bounds(leaf)):
            raise WireError(f"a leaf of {size} bytes does not fit")
        return memoryview(bytearray(size))

    def decode(leaf: int, data: memoryview) -> None:
        start, stop = grid.bounds(leaf)
        try:
            grid.codec(leaf).decode(grid.checked(root, start, stop, data), stop - start, values[start:stop])
        except CodecError as error:
            raise WireError(f"a leaf does not decode: {error}") from error
        partial.leaves = leaf + 1

    fetch = functools.partial(endpoint.fetch, peer, committed_blob(round_number), range(partial.leaves, grid.leaves))
    chunks = receive_chunks(functools.partial(fetch, progress_s=progress_s), room, StreamMeter())
    try:
        async with asyncio.timeout(limit_s), aclosing(chunks) as stream:
            async for leaf, data in stream:
                await in_thread(decode, leaf, data)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{peer} did not show its contribution within {limit_s:.0f} s") from error
    return values
