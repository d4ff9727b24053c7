"""The state of a run from peer to peer: offered in chunks with their digests, and fetched from whoever has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

import torch

from shoal.peer.state import CHUNK_BYTES, State, bytes_of, chunks_in
from shoal.swarm.errors import LinkError, ShoalError, WireError
from shoal.swarm.messages import Blob
from shoal.swarm.tasks import task_scope
from shoal.swarm.transport import Endpoint

_ASKED_AT_ONCE = 16


class StateSource:
    """A state as chunks of 1 MiB, offered to joiners (a ``ChunkSource``)."""

    def __init__(self, state: State) -> None:
        self._data = bytes_of(state.values)
        self.chunks = chunks_in(self._data.nbytes)

    async def chunk(self, index: int) -> memoryview:
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class DigestSource:
    """The digests of a state's chunks, in chunks of 1 MiB themselves (a ``ChunkSource``)."""

    def __init__(self, state: State) -> None:
        self._data = memoryview(state.chunk_digests)
        self.chunks = chunks_in(self._data.nbytes)

    async def chunk(self, index: int) -> memoryview:
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def state_blob(version: int) -> Blob:
    return Blob(kind="state", number=version)


def digests_blob(version: int) -> Blob:
    return Blob(kind="state_digests", number=version)


def offer_state(endpoint: Endpoint, state: State) -> None:
    """From now on joiners can fetch it."""
    endpoint.publish(digests_blob(state.version), DigestSource(state))
    endpoint.publish(state_blob(state.version), StateSource(state))


def withdraw_state(endpoint: Endpoint, version: int) -> None:
    endpoint.retract(state_blob(version))
    endpoint.retract(digests_blob(version))


async def fetch_state(
    endpoint: Endpoint,
    donors: Sequence[str],
    version: int,
    digest: bytes,
    shape: tuple[int, int],
    progress_s: float,
) -> State:
    """The state of that version and digest from the donor that is the first to send some of it, else from another one.

    ``shape``: (1 + slots, n). Raises the last ``LinkError`` when no donor has it.
    """
    trouble = LinkError(f"nobody in the run offers the state of version {version} yet")
    values = torch.empty(shape)
    data = bytes_of(values)
    chunks = chunks_in(data.nbytes)

    def sink(chunk: int, size: int) -> memoryview:
        place = data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        if place.nbytes != size:
            raise WireError(f"a state chunk of {size} bytes does not fit")
        return place

    if len(donors) > 1:
        first = await _first_to_send(endpoint, donors, state_blob(version), min(CHUNK_BYTES, data.nbytes), progress_s)
        donors = sorted(donors, key=lambda one: one != first) if first else ()
    for donor in donors:
        try:
            async with aclosing(endpoint.fetch(donor, state_blob(version), range(chunks), sink, progress_s)) as stream:
                async for _ in stream:
                    pass
        except ShoalError as error:  # the donor's errors come out of here, too
            trouble = LinkError(f"{donor}: {error}")
            continue
        state = await asyncio.to_thread(State.of, values, version)
        if state.digest == digest:
            return state
        trouble = LinkError(f"{donor} has another state of version {version} than the run agreed on")
    raise trouble


async def _first_to_send(
    endpoint: Endpoint, donors: Sequence[str], blob: Blob, first_bytes: int, progress_s: float
) -> str | None:
    """Whoever of them is the first to send the first chunk; None when nobody does.

    All at once, but for the very many: to wait for one that is dead, or has nothing yet itself, after the other would
    take longer than a round, and then the others have a newer state."""
    answers: asyncio.Queue[str | None] = asyncio.Queue()

    def sink(chunk: int, size: int) -> memoryview:
        if size != first_bytes:
            raise WireError(f"a state chunk of {size} bytes does not fit")
        return memoryview(bytearray(size))

    async def ask(donor: str) -> None:
        found = None
        with suppress(ShoalError):
            async with aclosing(endpoint.fetch(donor, blob, range(1), sink, progress_s)) as stream:
                async for _ in stream:
                    found = donor
        answers.put_nowait(found)

    for at in range(0, len(donors), _ASKED_AT_ONCE):
        async with task_scope() as tasks:
            asked = [tasks.create_task(ask(donor)) for donor in donors[at : at + _ASKED_AT_ONCE]]
            first = None
            for _ in asked:
                first = first or await answers.get()
            for task in asked:
                task.cancel()
        if first:
            return first
    return None
