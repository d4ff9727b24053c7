"""Contribution of a member, encoded as other members fetch it."""

from __future__ import annotations

import asyncio

import torch

from shoal.compression.error_feedback import ErrorFeedback
from shoal.swarm.aio import in_thread
from shoal.swarm.averaging.results import ResultStore
from shoal.swarm.errors import BlobUnavailable
from shoal.swarm.protocol.rounds import RoundPlan
from shoal.swarm.protocol.types import Blob

_ENCODED_AT_ONCE, _ENCODED_ELEMENTS = 4, 2**22
"""Chunks that are encoded at once, unless they have more elements: a worker's turn costs about as much as a small
chunk."""


def contribution_blob(plan: RoundPlan) -> Blob:
    """Return the blob of a round's contributions: plans with the same chunk size have the same chunks."""
    return Blob(kind="contribution", number=plan.round, grid=plan.chunk_elements)


class ContributionSource:
    """Chunks of our contribution, each encoded when its owner asks for it (a ``ChunkSource``).

    A chunk that was handed out is not kept, so that the next ones reuse its memory while it is in the cache; the few
    that are asked for again are encoded again. Until ``begin`` or ``close``, requests wait."""

    def __init__(self, store: ResultStore) -> None:
        """``store``: of a plan with the same chunks."""
        self.chunks = store.chunks
        self._store = store
        self._feedback: ErrorFeedback | None = None
        self._encoded: dict[int, memoryview] = {}
        self._handed_out: set[int] = set()
        self._locks: dict[range, asyncio.Lock] = {}
        step = max(1, min(_ENCODED_AT_ONCE, _ENCODED_ELEMENTS // store.plan.chunk_elements))
        parts = [store.chunks_of(part) for part in store.plan.parts]
        runs = [chunks[at : at + step] for chunks in parts for at in range(0, len(chunks), step)]
        self._runs = [run for run in runs for _ in run]
        self._settled = asyncio.Event()
        self._closed = False

    def begin(self, feedback: ErrorFeedback) -> None:
        """Serve chunks from now on: ``feedback`` has begun its round with our contribution."""
        self._feedback = feedback
        self._settled.set()

    async def chunk(self, index: int) -> memoryview:
        """Return a packed chunk. Raises ``BlobUnavailable`` once closed: streams outlive the round."""
        await self._settled.wait()
        run = self._runs[index]
        async with self._locks.setdefault(run, asyncio.Lock()):
            if index not in self._encoded and not self._closed and self._feedback is not None:
                wanted = range(index, index + 1) if index in self._handed_out else run
                self._encoded |= await in_thread(self._encode, self._feedback, wanted)
            if self._closed:
                raise BlobUnavailable(f"the contribution to round {self._store.plan.round} is not offered any more")
            self._handed_out.add(index)
            return self._encoded.pop(index)

    def _encode(self, feedback: ErrorFeedback, run: range) -> dict[int, memoryview]:
        encoded = {}
        for index in run:
            bounds = self._store.bounds(index)
            codec = self._store.codec_map.contribution(*bounds)
            encoded[index] = self._store.buffers.passing.take(codec.packed_bytes(bounds[1] - bounds[0]))
            feedback.encode_chunk(codec, *bounds, torch.frombuffer(encoded[index], dtype=torch.uint8))
        return encoded

    async def close(self) -> None:
        """Serve nothing more; returns when no chunk is being encoded any more."""
        self._closed = True
        self._settled.set()
        for lock in list(self._locks.values()):
            async with lock:
                pass
        self._encoded.clear()
