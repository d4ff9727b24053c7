"""Donor of states: serves its newest ones to joiners in chunks with digests, after the rounds' bytes."""

from __future__ import annotations

import asyncio
from collections import Counter

from torch import Tensor

from shoal.peer.state_transfer.chunk_format import BFLOAT16, RAW, Form
from shoal.peer.training.anchor import CHUNK_BYTES, DIGEST_BYTES, State, bytes_of, chunk_digest, chunks_in
from shoal.swarm.aio import in_thread
from shoal.swarm.errors import Busy
from shoal.swarm.protocol.types import Blob
from shoal.swarm.transport.node import Endpoint

MAX_READERS = 8
"""Joiners that one donor serves at once: more of them would all be slow. Others ask it again soon."""

MAX_STREAMS_PER_READER = 4
"""Two that it takes from, and two that it has just given up."""


def digests_blob(version: int) -> Blob:
    return Blob(kind="state_digests", number=version)


def rounded_digests_blob(version: int) -> Blob:
    return Blob(kind="anchor_bfloat16_digests", number=version)


class DonorState:
    """The states that this peer serves: the one held, the one before, and one older one while somebody downloads it.

    While an exchange runs here (``pause``) no chunk is sent, and who asks is told so: it knows then that we live."""

    def __init__(self, endpoint: Endpoint, keep_s: float, form: Form = RAW) -> None:
        """``keep_s``: how long a joiner may not have asked for anything until it counts as gone."""
        self._endpoint = endpoint
        self._form = form
        self._keep_s = keep_s
        self._sources: dict[int, tuple[StateSource, StateSource]] = {}  # the newest last
        self._readers: Counter[bytes] = Counter()
        self._free = asyncio.Event()
        self._free.set()

    @property
    def versions(self) -> tuple[int, ...]:
        """The newest last."""
        return tuple(self._sources)

    def hold(self, state: State) -> None:
        """This is the newest; offer it, and no longer what nobody needs."""
        self._sources.pop(state.version, None)
        whole = StateSource(state.values, state.version, self, self._form)
        rounded = StateSource(state.anchor, state.version, self, BFLOAT16)
        self._sources[state.version] = (whole, rounded)
        self._endpoint.publish(digests_blob(state.version), DigestSource(state))
        self._endpoint.publish(self._form.blob(state.version), whole)
        self._endpoint.publish(rounded_digests_blob(state.version), RoundedDigestSource(rounded))
        self._endpoint.publish(BFLOAT16.blob(state.version), rounded)
        # By what was held, not by counting back: a resync leaves versions out.
        older = list(self._sources)[:-2]
        read = [version for version in older if any(map(self._is_read, self._sources[version]))]
        for version in older:
            if version not in read[:1]:  # of several the oldest: its joiners have waited for longest
                del self._sources[version]
                for blob in (self._form.blob, digests_blob, BFLOAT16.blob, rounded_digests_blob):
                    self._endpoint.retract(blob(version))

    def pause(self, exchanging: bool) -> None:
        """The round goes first: chunks wait while an exchange runs here."""
        if exchanging:
            self._free.clear()
        else:
            self._free.set()

    def begin(self, reader: bytes) -> None:
        """A stream begins. Raises ``Busy``."""
        if not self._free.is_set():
            raise Busy("a round is being averaged here; ask again")
        others = len(self._readers) - (reader in self._readers)
        if others >= MAX_READERS:
            raise Busy(f"{MAX_READERS} others are being served here; ask again")
        if self._readers[reader] >= MAX_STREAMS_PER_READER:
            raise Busy(f"{MAX_STREAMS_PER_READER} streams of the state go to you already; ask again")
        self._readers[reader] += 1

    def end(self, reader: bytes) -> None:
        self._readers[reader] -= 1
        if not self._readers[reader]:
            del self._readers[reader]

    async def free(self) -> None:
        """Wait while an exchange runs here."""
        await self._free.wait()

    def _is_read(self, source: StateSource) -> bool:
        return source.streams > 0 or asyncio.get_running_loop().time() < source.read_s + self._keep_s


class StateSource:
    """A state, or the anchor of one, as chunks of 1 MiB of values, which are kept only once (a ``CountedSource``).
    ``read_s``: when it was last asked for."""

    def __init__(self, values: Tensor, version: int, donor: DonorState, form: Form) -> None:
        self.version = version
        self._data = bytes_of(values)
        self.chunks = chunks_in(self._data.nbytes)
        self.streams = 0
        self.read_s = float("-inf")
        self._donor = donor
        self._form = form

    def begin(self, reader: bytes) -> None:
        self.read_s = asyncio.get_running_loop().time()  # also of who has to ask again
        self._donor.begin(reader)
        self.streams += 1

    def end(self, reader: bytes) -> None:
        self._donor.end(reader)
        self.streams -= 1
        self.read_s = asyncio.get_running_loop().time()

    async def chunk(self, index: int) -> memoryview:
        await self._donor.free()
        values = self._values(index)
        return values if self._form is RAW else await in_thread(self._form.pack, values)

    def digests(self) -> bytes:
        """Of what comes out of the chunks at the other side; for threads."""
        form, sent = self._form, map(self._values, range(self.chunks))
        return b"".join(chunk_digest(form.unpack(form.pack(values), values.nbytes)) for values in sent)

    def _values(self, index: int) -> memoryview:
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class RoundedDigestSource:
    """The digests of a rounded anchor's chunks (a ``ChunkSource``); made when they are asked for, in a thread."""

    def __init__(self, rounded: StateSource) -> None:
        self.chunks = chunks_in(DIGEST_BYTES * rounded.chunks)
        self._rounded = rounded
        self._digests = b""

    async def chunk(self, index: int) -> memoryview:
        self._digests = self._digests or await in_thread(self._rounded.digests)
        return memoryview(self._digests)[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class DigestSource:
    """The digests of a state's chunks, in chunks of 1 MiB themselves (a ``ChunkSource``)."""

    def __init__(self, state: State) -> None:
        self._data = memoryview(state.chunk_digests)
        self.chunks = chunks_in(self._data.nbytes)

    async def chunk(self, index: int) -> memoryview:
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
