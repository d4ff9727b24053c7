"""The mean of a round is decoded from its bytes, piece by piece, when it is read."""

import asyncio

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import plan_of
from tests.fakes.rounds import results_of, verdict_on

from shoal.swarm.averaging import results
from shoal.swarm.averaging.results import ResultStore, RoundMean
from shoal.swarm.errors import BlobUnavailable, WireError
from shoal.swarm.protocol.types import RUN_MEMBERS
from shoal.swarm.transport.bulk.data_connection import MAX_CHUNK_BYTES

ELEMENTS = 5 * 64 + 7
CODEC_MAP = get_codec_map("int8", None, [("w", (ELEMENTS,))])
PLAN = plan_of([3, 4], [[0, 1]], ELEMENTS, chunk=64)
FIRST, SECOND = PLAN.parts
CHUNKS = results_of(PLAN, CODEC_MAP, empty=[4])


def filled() -> ResultStore:
    store = ResultStore(PLAN, CODEC_MAP)
    store.adopt(CHUNKS)
    return store


def put(store: ResultStore, chunk: int, data: bytes) -> None:
    asyncio.run(store.put(chunk, memoryview(bytearray(data))))


def of_twice_the_scale(chunk: memoryview) -> bytes:
    """The same codes with another scale."""
    after = ResultStore(PLAN, CODEC_MAP).group.header_bytes
    scale = torch.frombuffer(bytearray(chunk[after : after + 4]), dtype=torch.float32)
    return bytes(chunk[:after]) + (2 * scale).numpy().tobytes() + bytes(chunk[after + 4 :])


def expected() -> torch.Tensor:
    store = filled()
    mean = torch.zeros(ELEMENTS)
    for index in range(store.chunks):
        bounds = slice(*store.bounds(index))
        if store.group.header(store[index]).included:
            packed = store[index][store.group.header_bytes :]
            mean[bounds] = store.codec(index).decode(packed, bounds.stop - bounds.start)
    return mean


@pytest.mark.parametrize("most", [1, 64, 150, 10_000])
def test_pieces_are_the_whole_mean(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_PIECE_ELEMENTS", most)
    mean, at = RoundMean(filled()), 0
    for start, stop, values in mean.pieces():
        assert (start, stop) == (at, min(start + max(1, most // 64) * 64, ELEMENTS))
        assert torch.equal(values, expected()[start:stop])
        at = stop
    assert at == mean.elements == ELEMENTS
    assert torch.equal(mean.whole(), expected())
    assert bool(expected()[:64].any())
    assert not bool(expected()[256:320].any()), "nobody is in chunk 4"


def test_pieces_share_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_PIECE_ELEMENTS", 130)
    rooms = {values.data_ptr() for _, _, values in RoundMean(filled()).pieces()}
    assert len(rooms) == 1


def test_a_mean_outlives_its_store() -> None:
    store = filled()
    mean = RoundMean(store)
    asyncio.run(store.close())
    assert torch.equal(mean.whole(), expected())


def test_chunks_are_as_large_as_frames_can_be_and_no_larger() -> None:
    plan = plan_of([3] * 4, [[0, 1, 2, 3]], 2**24, chunk=2**22)
    store = ResultStore(plan, get_codec_map("int8"))
    of_most_members = 2 * RUN_MEMBERS // 8  # a bit each, and in a grid one for its row
    assert 2**22 < store.group.result_bytes(store.codec(0), 2**22) + of_most_members <= MAX_CHUNK_BYTES
    with pytest.raises(WireError, match="chunks of 4194304 values; the codec allows 1048576"):
        ResultStore(plan, get_codec_map("float32"))


def test_bytes_that_come_instead_count() -> None:
    store = filled()
    before = RoundMean(store).whole()
    store.forget(FIRST)
    for index in store.chunks_of(FIRST):
        put(store, index, of_twice_the_scale(CHUNKS[index]) if index == 0 else bytes(CHUNKS[index]))
    mean = RoundMean(store).whole()
    assert torch.equal(mean[:64], 2.0 * before[:64])
    assert torch.equal(mean[64:], before[64:])


def test_a_mean_needs_every_chunk() -> None:
    store = filled()
    store.forget(FIRST)
    with pytest.raises(BlobUnavailable):
        RoundMean(store)


def test_a_part_that_turns_out_void_is_zero() -> None:
    store = filled()
    store.drop(FIRST)
    mean = RoundMean(store).whole()
    assert not bool(mean[FIRST.start : FIRST.stop].any())
    assert torch.equal(mean[SECOND.start :], expected()[SECOND.start :])


def test_a_chunk_that_did_not_decode_counts_again_with_other_bytes() -> None:
    store = filled()
    after = store.group.header_bytes
    put(store, 1, bytes(CHUNKS[1][:after]) + b"\xff" * 4 + bytes(CHUNKS[1][after + 4 :]))  # a scale of NaN
    mean = RoundMean(store)
    assert not bool(mean.whole()[64:128].any())
    assert not bool(torch.cat([values.clone() for _, _, values in mean.pieces()])[64:128].any())
    assert store.header(1).included == []
    store.forget(FIRST)
    store.adopt(CHUNKS)
    assert torch.equal(RoundMean(store).whole(), expected())
    assert store.header(1).included == store.group.header(CHUNKS[1]).included != []


def test_a_void_part_needs_no_bytes() -> None:
    verdict = verdict_on(PLAN, CHUNKS)
    store = ResultStore.of(verdict.model_copy(update={"digests": (None, verdict.digests[1])}), CODEC_MAP)
    store.adopt([None if index in store.chunks_of(FIRST) else chunk for index, chunk in enumerate(CHUNKS)])
    assert not bool(RoundMean(store).whole()[: FIRST.stop].any())
