"""Download of a run's anchor in bfloat16, for exports: half the bytes, vouched for by two donors.

The run's digest covers the float32 values only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from shoal.peer.state_transfer.chunk_format import BFLOAT16
from shoal.peer.state_transfer.donor import rounded_digests_blob
from shoal.peer.state_transfer.download import StateDownload, fetch_into
from shoal.peer.state_transfer.partial_state import PartialState, WantedState
from shoal.peer.training.anchor import DIGEST_BYTES, chunks_in, state_digest
from shoal.swarm.aio import task_scope
from shoal.swarm.errors import LinkError, ShoalError
from shoal.swarm.transport.node import Endpoint

_ASKED = 8


async def fetch_rounded_anchor(
    endpoint: Endpoint, donors: Sequence[str], version: int, elements: int, progress_s: float
) -> Tensor:
    """Fetch the anchor of ``version``: (n,) float32, rounded to bfloat16.

    Its digests are those that two donors give alike; where there is a single donor, that donor's. Raises ``LinkError``.
    """
    shape = (1, elements)
    digests = await _agreed_digests(endpoint, donors[:_ASKED], version, elements, progress_s)
    partial = PartialState(WantedState(version, state_digest(version, shape, digests), shape))
    assert partial.learn_digests(digests)
    await StateDownload(endpoint, partial, lambda: donors, progress_s, chunk_format=BFLOAT16).run()
    return partial.values[0]


async def _agreed_digests(
    endpoint: Endpoint, donors: Sequence[str], version: int, elements: int, progress_s: float
) -> bytes:
    answers: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def ask(donor: str) -> None:
        answer = None
        try:
            digests = bytearray(DIGEST_BYTES * chunks_in(elements))
            blob = rounded_digests_blob(version)
            await fetch_into(endpoint, donor, blob, memoryview(digests), "the digests", progress_s)
            answer = bytes(digests)
        except ShoalError as error:  # the donor's errors come out of here, too
            trouble.append(f"{donor}: {error}")
        answers.put_nowait(answer)

    said: Counter[bytes] = Counter()
    trouble: list[str] = []
    enough = min(2, len(donors))
    async with task_scope() as tasks:
        asked = [tasks.create_task(ask(donor)) for donor in donors]
        for _ in asked:
            answer = await answers.get()
            said.update([answer] if answer else [])
            if answer and said[answer] >= enough:
                for task in asked:
                    task.cancel()
                return answer
    why = "; ".join(trouble) or "they differ"
    raise LinkError(
        f"too few members give the same rounded anchor of version {version} ({why}); "
        "export it in float32, which the run's digest vouches for"
    )
