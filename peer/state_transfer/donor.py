"""Donor of states: serves the version that it holds to joiners in chunks with digests, after the rounds' bytes.

The state is stepped in place, and no step waits for a download: what joiners may still want of a version is on the disk
before it is overwritten (``StateSpool``), so that who is slower than the rounds still gets one version to its end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from shoal.peer.state_transfer.chunk_format import BFLOAT16, PIECE_BYTES, RAW, ChunkFormat, pieces_in
from shoal.peer.state_transfer.spool import StateSpool
from shoal.peer.training.anchor import DIGEST_BYTES, AnchorState, bytes_of, chunk_bounds, chunk_digest, chunks_in
from shoal.swarm.aio import in_thread
from shoal.swarm.errors import BlobUnavailable, Busy
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

MAX_READERS = 8
"""Joiners that one donor serves at once: more would all be slow. Others are told to ask again."""

MAX_STREAMS_PER_READER = 4
"""Two from which a joiner reads, and two that it has just abandoned."""

MAX_OLDER = 2
"""Versions that are kept on disk for those who download them. Who begins with a further one may have to begin again."""


def digests_blob(version: int) -> Blob:
    return Blob(kind="state_digests", number=version)


def rounded_digests_blob(version: int) -> Blob:
    return Blob(kind="anchor_bfloat16_digests", number=version)


class StateDonor:
    """Server of this peer's state: of the version that it holds, and of older ones while somebody downloads them.

    While a round is averaged here (``pause``) no chunk is sent, and new readers get ``Busy``, which tells them that
    this peer is alive. How much each may download is the data plane's affair (``download_quota.py``), which asks before
    a reader counts here: who has no quota left does not have versions kept. ``folder``: where versions are kept that
    are downloaded when the next step comes; without one they are gone then."""

    def __init__(
        self, endpoint: Endpoint, keep_s: float, chunk_format: ChunkFormat = RAW, folder: Path | None = None
    ) -> None:
        """``keep_s``: a joiner that has requested nothing for so long counts as gone."""
        self.folder = folder
        self.keep_s = keep_s
        self._endpoint = endpoint
        self._format = chunk_format
        self._offered: dict[int, OfferedState] = {}  # the newest last
        self._readers: Counter[bytes] = Counter()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._is_wanted = asyncio.Event()

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are served, the newest last."""
        return tuple(self._offered)

    def offer(self, state: AnchorState) -> None:
        """Serve ``state`` as the newest one, and stop serving older ones that nobody needs, or that are gone."""
        version = state.version
        self._drop(version)
        in_use = [one.state.version for one in self._offered.values() if one.is_served_from_disk and one.is_wanted()]
        for older in list(self._offered):
            if older not in in_use[:MAX_OLDER]:  # the oldest: their joiners have waited the longest
                self._drop(older)
        offered = self._offered[version] = OfferedState(self, state)
        whole, rounded = StateSource(offered, self, self._format), StateSource(offered, self, BFLOAT16)
        publish = self._endpoint.publish
        publish(digests_blob(version), DigestSource(whole.chunks, lambda: state.chunk_digests, offered))
        publish(self._format.blob(version), whole)
        publish(rounded_digests_blob(version), DigestSource(rounded.chunks, rounded.digests, offered))
        publish(BFLOAT16.blob(version), rounded)

    def _drop(self, version: int) -> None:
        offered = self._offered.pop(version, None)
        if offered is not None:
            offered.close()
            for blob in (self._format.blob, digests_blob, BFLOAT16.blob, rounded_digests_blob):
                self._endpoint.retract(blob(version))

    async def run(self) -> None:
        """Write versions that are wanted to the disk, ahead of the next step, which then has little left to write."""
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            for offered in list(self._offered.values()):
                while offered.spool is not None and await in_thread(offered.spool.write_next):
                    pass

    def close(self) -> None:
        """Serve nothing any more."""
        for version in self.versions:
            self._drop(version)

    def pause(self, exchanging: bool) -> None:
        """Hold chunks back while an exchange runs here: the round goes first."""
        if exchanging:
            self._unpaused.clear()
        else:
            self._unpaused.set()

    def want(self) -> None:
        """Have ``run`` look what is wanted."""
        self._is_wanted.set()

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


class OfferedState:
    """A version that a donor serves: from the memory where it is held, and from the disk once that has another one.

    ``streams``: number of streams of it now; ``last_read_s``: time when somebody last asked for some of it."""

    def __init__(self, donor: StateDonor, state: AnchorState) -> None:
        self.state = state
        self.state_bytes = 4 * state.shape[0] * state.elements
        self.spool: StateSpool | None = None
        self.streams = 0
        self.last_read_s = float("-inf")
        self._donor = donor
        self._loop = asyncio.get_running_loop()

    @property
    def is_served_from_disk(self) -> bool:
        return self.spool is not None and self.spool.is_whole

    def is_wanted(self) -> bool:
        """Whether somebody downloads it, or will go on to; from any thread."""
        return self.streams > 0 or self._loop.time() < self.last_read_s + self._donor.keep_s

    def touch(self) -> None:
        """Record that somebody asks for some of it, who will want the rest."""
        self.last_read_s = self._loop.time()
        if self.spool is None and self._donor.folder is not None:
            spool = StateSpool(self.state, self._donor.folder, self.is_wanted)
            if self.state.add_guard(spool):
                self.spool = spool
                self._donor.want()

    def read(self, chunk: int) -> memoryview:
        """Return a chunk's values, all rows one after the other; for worker threads. Raises ``BlobUnavailable``."""
        values = self.state.read(*chunk_bounds(chunk, self.state.elements))
        if values is not None:
            return bytes_of(values)
        kept = self.spool.read(chunk) if self.spool is not None else None
        if kept is None:
            raise BlobUnavailable(f"version {self.state.version} of the state has been replaced here")
        return kept

    def close(self) -> None:
        if self.spool is not None:
            self.spool.close()


class StateSource:
    """The values of a state, or rounded to bfloat16 those of its anchor alone, in chunks (a ``CountedSource`` and
    ``DownloadSource``)."""

    def __init__(self, offered: OfferedState, donor: StateDonor, chunk_format: ChunkFormat) -> None:
        self.chunks = chunks_in(offered.state.elements)
        self.state_bytes = offered.state_bytes
        self._offered = offered
        self._donor = donor
        self._format = chunk_format

    def begin_reading(self, reader: bytes) -> None:
        self._offered.touch()  # before ``Busy``: a refused reader asks again
        self._donor.admit(reader)
        self._offered.streams += 1

    def end_reading(self, reader: bytes) -> None:
        self._donor.release(reader)
        self._offered.streams -= 1
        self._offered.touch()

    async def chunk(self, index: int) -> memoryview:
        await self._donor.wait_until_unpaused()
        return await in_thread(self._packed, index)

    def digests(self) -> bytes:
        """The digests of all chunks as receivers unpack them; for worker threads."""
        unpack, found = self._format.unpack, []
        for index in range(self.chunks):
            values = self._values(index)
            found.append(chunk_digest(unpack(self._format.pack(values), values.nbytes)))
        return b"".join(found)

    def _packed(self, index: int) -> memoryview:
        return self._format.pack(self._values(index))

    def _values(self, index: int) -> memoryview:
        """The values of a chunk; of the anchor alone where they are to be rounded."""
        values = self._offered.read(index)
        return values[: values.nbytes // self._offered.state.shape[0]] if self._format is BFLOAT16 else values


class DigestSource:
    """The digests of ``count`` chunks of a state, in pieces of 1 MiB themselves (a ``CountedSource`` and
    ``DownloadSource``).

    ``compute`` is called in a worker thread once somebody requests them. Who has the digests will want the chunks."""

    def __init__(self, count: int, compute: Callable[[], bytes], offered: OfferedState) -> None:
        self.chunks = pieces_in(DIGEST_BYTES * count)
        self.state_bytes = offered.state_bytes
        self._compute = compute
        self._digests = b""
        self._offered = offered

    def begin_reading(self, reader: bytes) -> None:
        self._offered.touch()

    def end_reading(self, reader: bytes) -> None:
        """Nothing is held for readers of digests."""

    async def chunk(self, index: int) -> memoryview:
        self._digests = self._digests or await in_thread(self._compute)
        return memoryview(self._digests)[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
