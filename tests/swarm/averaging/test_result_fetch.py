"""Committed results of an earlier round from members that have them, and from those that pretend to."""

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import PEERS, plan_of
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.rounds import results_of, verdict_on
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.averaging.result_fetch import fetch_committed
from shoal.swarm.averaging.results import ResultStore, RoundMean
from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.types import Blob

ELEMENTS = 5 * 64 + 7
CODEC_MAP = get_codec_map("int8", None, [("w", (ELEMENTS,))])
PLAN = plan_of([3, 4], [[0, 1]], ELEMENTS, chunk=64)
CHUNKS = results_of(PLAN, CODEC_MAP, empty=[4])
VERDICT = verdict_on(PLAN, CHUNKS)
ME = PEERS[20]


class Given:
    """These chunks (a ``ChunkSource``)."""

    def __init__(self, chunks: list[memoryview]) -> None:
        self.chunks = len(chunks)
        self._chunks = chunks

    async def chunk(self, index: int) -> memoryview:
        return self._chunks[index]


def fetched(*donors: list[memoryview]) -> ResultStore:
    """What comes of asking members that offer these chunks, in that order."""
    store = ResultStore.of(VERDICT, CODEC_MAP)

    async def main() -> None:
        network = MemoryNetwork()
        endpoint = network.endpoint(ME)
        for peer, chunks in zip(PEERS, donors, strict=False):
            network.endpoint(peer).publish(Blob(kind="result", number=PLAN.round), Given(chunks))
        await fetch_committed(endpoint, store, VERDICT, PEERS[: len(donors)], progress_s=3.0)

    run_virtual(main())
    return store


def mean_of(chunks: list[memoryview]) -> torch.Tensor:
    store = ResultStore.of(VERDICT, CODEC_MAP)
    store.adopt(chunks)
    return RoundMean(store).whole()


def split_elsewhere() -> list[memoryview]:
    """The same bytes one after the other, and so of the same digest, but other chunks."""
    joined, header_bytes = bytes(CHUNKS[3]) + bytes(CHUNKS[4]), CHUNKS[4].nbytes
    return [*CHUNKS[:3], memoryview(joined[:header_bytes]), memoryview(joined[header_bytes:]), *CHUNKS[5:]]


def test_it_brings_what_was_committed() -> None:
    assert torch.equal(RoundMean(fetched(CHUNKS)).whole(), mean_of(CHUNKS))
    assert torch.equal(RoundMean(fetched(CHUNKS, CHUNKS)).whole(), mean_of(CHUNKS))


def test_a_member_that_splits_a_part_elsewhere_is_left() -> None:
    assert torch.equal(RoundMean(fetched(split_elsewhere(), CHUNKS)).whole(), mean_of(CHUNKS))
    with pytest.raises(LinkError, match="with its header"):
        fetched(split_elsewhere())


def test_other_bytes_are_not_taken() -> None:
    other = results_of(PLAN, CODEC_MAP, seed=1, empty=[4])
    assert torch.equal(RoundMean(fetched(other, CHUNKS)).whole(), mean_of(CHUNKS))
    with pytest.raises(LinkError, match=f"{PEERS[0]} has other bytes of round 3"):
        fetched(other)
