"""Donor of states: serves its newest ones to joiners in chunks with digests, after the rounds' bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from shoal.peer.state_transfer.chunk_format import BFLOAT16, RAW, ChunkFormat
from shoal.peer.training.anchor import CHUNK_BYTES, DIGEST_BYTES, AnchorState, bytes_of, chunk_digest, chunks_in
from shoal.swarm.aio import in_thread
from shoal.swarm.errors import Busy
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

MAX_READERS = 8
"""Joiners that one donor serves at once: more would all be slow. Others are told to ask again."""

MAX_STREAMS_PER_READER = 4
"""Two from which a joiner reads, and two that it has just abandoned."""


def digests_blob(version: int) -> Blob:
    return Blob(kind="state_digests", number=version)


def rounded_digests_blob(version: int) -> Blob:
    return Blob(kind="anchor_bfloat16_digests", number=version)


class StateDonor:
    """Server of this peer's states: the newest one, the one before, and an older one while somebody downloads it.

    While a round is averaged here (``pause``) no chunk is sent, and new readers get ``Busy``, which tells them that
    this peer is alive."""

    def __init__(self, endpoint: Endpoint, keep_s: float, chunk_format: ChunkFormat = RAW) -> None:
        """``keep_s``: a joiner that has requested nothing for so long counts as gone."""
        self._endpoint = endpoint
        self._format = chunk_format
        self._keep_s = keep_s
        self._sources: dict[int, tuple[StateSource, StateSource]] = {}  # the newest last
        self._readers: Counter[bytes] = Counter()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are served, the newest last."""
        return tuple(self._sources)

    def offer(self, state: AnchorState) -> None:
        """Serve ``state`` as the newest one, and stop serving older ones that nobody needs."""
        version = state.version
        self._sources.pop(version, None)
        whole, rounded = StateSource(state.values, self, self._format), StateSource(state.anchor, self, BFLOAT16)
        self._sources[version] = whole, rounded
        self._endpoint.publish(digests_blob(version), DigestSource(whole.chunks, lambda: state.chunk_digests))
        self._endpoint.publish(self._format.blob(version), whole)
        self._endpoint.publish(rounded_digests_blob(version), DigestSource(rounded.chunks, rounded.digests))
        self._endpoint.publish(BFLOAT16.blob(version), rounded)
        # By what was offered, not by counting back: a resync leaves versions out.
        older = list(self._sources)[:-2]
        in_use = [version for version in older if any(map(self._is_read, self._sources[version]))]
        for version in older:
            if version not in in_use[:1]:  # of several the oldest: its joiners have waited the longest
                del self._sources[version]
                for blob in (self._format.blob, digests_blob, BFLOAT16.blob, rounded_digests_blob):
                    self._endpoint.retract(blob(version))

    def pause(self, exchanging: bool) -> None:
        """Hold chunks back while an exchange runs here: the round goes first."""
        if exchanging:
            self._unpaused.clear()
        else:
            self._unpaused.set()

    def admit(self, reader: bytes) -> None:
        """Admit one more stream of a reader. Raises ``Busy``."""
        if not self._unpaused.is_set():
            raise Busy("a round is being averaged here; ask again")
        others = len(self._readers) - (reader in self._readers)
        if others >= MAX_READERS:
            raise Busy(f"{MAX_READERS} others are being served here; ask again")
        if self._readers[reader] >= MAX_STREAMS_PER_READER:
            raise Busy(f"{MAX_STREAMS_PER_READER} streams of the state go to you already; ask again")
        self._readers[reader] += 1

    def release(self, reader: bytes) -> None:
        self._readers[reader] -= 1
        if not self._readers[reader]:
            del self._readers[reader]

    async def wait_until_unpaused(self) -> None:
        await self._unpaused.wait()

    def _is_read(self, source: StateSource) -> bool:
        return source.streams > 0 or asyncio.get_running_loop().time() < source.last_read_s + self._keep_s


class StateSource:
    """The values of a state, or of its anchor alone, in chunks of 1 MiB, without a copy (a ``CountedSource``)."""

    def __init__(self, values: Tensor, donor: StateDonor, chunk_format: ChunkFormat) -> None:
        self._data = bytes_of(values)
        self.chunks = chunks_in(self._data.nbytes)
        self.streams = 0
        self.last_read_s = float("-inf")
        self._donor = donor
        self._format = chunk_format

    def begin_reading(self, reader: bytes) -> None:
        self.last_read_s = asyncio.get_running_loop().time()  # before ``Busy``: a refused reader asks again
        self._donor.admit(reader)
        self.streams += 1

    def end_reading(self, reader: bytes) -> None:
        self._donor.release(reader)
        self.streams -= 1
        self.last_read_s = asyncio.get_running_loop().time()

    async def chunk(self, index: int) -> memoryview:
        await self._donor.wait_until_unpaused()
        values = self._values(index)
        return values if self._format is RAW else await in_thread(self._format.pack, values)

    def digests(self) -> bytes:
        """The digests of all chunks as receivers unpack them; for worker threads."""
        pack, unpack = self._format.pack, self._format.unpack
        sent = map(self._values, range(self.chunks))
        return b"".join(chunk_digest(unpack(pack(values), values.nbytes)) for values in sent)

    def _values(self, index: int) -> memoryview:
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class DigestSource:
    """The digests of ``count`` chunks, in chunks of 1 MiB themselves (a ``ChunkSource``).

    ``compute`` is called in a worker thread once somebody requests them."""

    def __init__(self, count: int, compute: Callable[[], bytes]) -> None:
        self.chunks = chunks_in(DIGEST_BYTES * count)
        self._compute = compute
        self._digests = b""

    async def chunk(self, index: int) -> memoryview:
        self._digests = self._digests or await in_thread(self._compute)
        return memoryview(self._digests)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
