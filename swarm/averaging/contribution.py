"""Contribution of a member: encoded once, before its round has a plan, and served to the owners of the plan."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.aio import in_thread, task_scope
from shoal.swarm.averaging.buffer_pool import BufferPool
from shoal.swarm.averaging.leaf_grid import LeafGrid
from shoal.swarm.averaging.merkle import MerkleTree, leaf_digest
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import BlobUnavailable
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import Blob

_MOST_WORKERS = 8
"""Threads that encode one contribution, if there are so many processors."""

_AT_ONCE = 1 << 18
"""Elements of a call to encode. More would not stay in a processor's cache, and leaves are no longer."""


@dataclass(frozen=True)
class EncodedLeaf:
    """Packed bytes of a leaf, and their digest."""

    packed: memoryview
    digest: bytes


class EncodedContribution:
    """All leaves of a contribution, and the tree over them, whose root its member commits to in ``ready``.

    The bytes are the feedback's until its round ends: they settle its residual."""

    def __init__(self, grid: LeafGrid, leaves: Sequence[EncodedLeaf]) -> None:
        self._grid = grid
        self._packed = [leaf.packed for leaf in leaves]
        self._tree = MerkleTree([leaf.digest for leaf in leaves])

    @property
    def root(self) -> bytes:
        return self._tree.root

    def chunk(self, start: int, stop: int, buffers: BufferPool) -> memoryview:
        """Return the leaves of these elements one after the other, and their path. For a worker thread."""
        leaves, at = self._grid.within(start, stop), 0
        data = buffers.take(self._grid.chunk_bytes(start, stop))
        for leaf in leaves:
            packed = self._packed[leaf]
            data[at : at + packed.nbytes] = packed
            at += packed.nbytes
        data[at:] = self._tree.path(leaves.start, leaves.stop)
        return data


async def encode(feedback: ErrorFeedback, grid: LeafGrid, buffers: BufferPool) -> EncodedContribution:
    """Encode the contribution that ``feedback`` has begun its round with, in several threads. Raises ``CodecError``."""
    workers = min(_MOST_WORKERS, os.cpu_count() or 1, grid.leaves)
    edges = [grid.leaves * worker // workers for worker in range(workers + 1)]
    runs = [range(start, stop) for start, stop in itertools.pairwise(edges)]
    async with task_scope() as tasks:
        encoding = [tasks.create_task(in_thread(encode_leaves, feedback, grid, run, buffers)) for run in runs]
    return EncodedContribution(grid, [leaf for one in encoding for leaf in one.result()])


def encode_leaves(feedback: ErrorFeedback, grid: LeafGrid, leaves: range, buffers: BufferPool) -> list[EncodedLeaf]:
    """Encode some leaves, in their order. Raises ``CodecError``."""
    encoded = []
    at_once = max(1, _AT_ONCE // grid.leaf)
    for first in range(leaves.start, leaves.stop, at_once):
        run = range(first, min(first + at_once, leaves.stop))
        codec, chunks = grid.codec_of(run), [(grid.codec(leaf), *grid.bounds(leaf)) for leaf in run]
        size = codec.packed_bytes(chunks[-1][2] - chunks[0][1])
        room = torch.frombuffer(buffers.take(size), dtype=torch.uint8)
        for packed in feedback.encode_chunks(codec, chunks, room):
            data = packed.numpy().data
            encoded.append(EncodedLeaf(data, leaf_digest(data)))
    return encoded


def contribution_blob(plan: RoundPlan) -> Blob:
    """Return the blob of a round's contributions: plans with the same chunk size have the same chunks."""
    return Blob(kind="contribution", number=plan.round, grid=plan.chunk_elements)


class ContributionSource:
    """Chunks of our contribution with their paths, each put together when its owner asks (a ``ChunkSource``).

    Until ``begin`` or ``close``, requests wait. ``asked``: the chunks that somebody has asked for since then."""

    def __init__(self, store: ResultStore) -> None:
        """``store``: of a plan with the same chunks."""
        self.asked: set[int] = set()
        self.chunks = store.chunks
        self._store = store
        self._contribution: EncodedContribution | None = None
        self._settled = asyncio.Event()
        self._closed = False

    def begin(self, contribution: EncodedContribution) -> None:
        """Serve chunks from now on: the plan is here that has our root in it."""
        self._contribution = contribution
        self._settled.set()

    async def chunk(self, index: int) -> memoryview:
        """Return a chunk, not to be changed. Raises ``BlobUnavailable`` once closed: streams outlive the round."""
        await self._settled.wait()
        if self._contribution is None or self._closed:
            raise BlobUnavailable(f"the contribution to round {self._store.plan.round} is not offered any more")
        self.asked.add(index)
        bounds, buffers = self._store.bounds(index), self._store.buffers.passing
        return await in_thread(self._contribution.chunk, *bounds, buffers)

    async def close(self) -> None:
        """Serve nothing more."""
        self._closed, self._contribution = True, None
        self._settled.set()
