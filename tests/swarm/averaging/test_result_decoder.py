"""A mean that is decoded part by part is that of the bytes that the store holds in the end."""

import asyncio

import pytest
import torch
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import plan_of
from tests.fakes.rounds import results_of, verdict_on

from shoal.swarm.averaging.results import ResultDecoder, ResultStore, chunks_of
from shoal.swarm.errors import WireError
from shoal.swarm.protocol.types import MAX_MEMBERS
from shoal.swarm.transport.data_connection import MAX_CHUNK_BYTES

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


def test_parts_in_any_order_make_the_whole_mean() -> None:
    decoder = ResultDecoder(filled())
    decoder.decode(chunks_of(PLAN, SECOND))
    decoder.decode(chunks_of(PLAN, FIRST))
    assert torch.equal(decoder.finish(), filled().mean())
    assert torch.equal(ResultDecoder(filled()).finish(), filled().mean())
    assert bool(filled().mean()[:64].any())


def test_chunks_are_as_large_as_frames_can_be_and_no_larger() -> None:
    plan = plan_of([3] * 4, [[0, 1, 2, 3]], 2**24, chunk=2**22)
    store = ResultStore(plan, get_codec_map("int8"))
    of_most_members = 2 * MAX_MEMBERS // 8  # a bit each, and in a grid one for its row
    assert 2**22 < store.group.result_bytes(store.codec(0), 2**22) + of_most_members <= MAX_CHUNK_BYTES
    with pytest.raises(WireError, match="chunks of 4194304 values; the codec allows 1048576"):
        ResultStore(plan, get_codec_map("float32"))


def test_what_is_decoded_is_not_decoded_again() -> None:
    decoder = ResultDecoder(filled())
    decoder.decode(chunks_of(PLAN, FIRST))
    decoder.decode(chunks_of(PLAN, SECOND))
    decoder.finish()[:3] = 7.0
    assert decoder.finish()[:3].tolist() == [7.0] * 3


def test_bytes_that_come_instead_are_decoded_again() -> None:
    store = filled()
    decoder = ResultDecoder(store)
    for part in PLAN.parts:
        decoder.decode(chunks_of(PLAN, part))
    before = decoder.finish().clone()
    store.forget(FIRST)
    for index in store.chunks_of(FIRST):
        put(store, index, of_twice_the_scale(CHUNKS[index]) if index == 0 else bytes(CHUNKS[index]))
    mean = decoder.finish()
    assert torch.equal(mean[:64], 2.0 * before[:64])
    assert torch.equal(mean[64:], before[64:])


def test_a_part_that_turns_out_void_is_zero() -> None:
    store = filled()
    decoder = ResultDecoder(store)
    for part in PLAN.parts:
        decoder.decode(chunks_of(PLAN, part))
    store.drop(FIRST)
    mean, whole = decoder.finish(), filled().mean()
    assert not bool(mean[FIRST.start : FIRST.stop].any())
    assert torch.equal(mean[SECOND.start :], whole[SECOND.start :])


def test_a_chunk_that_did_not_decode_counts_again_with_other_bytes() -> None:
    store = filled()
    after = store.group.header_bytes
    put(store, 1, bytes(CHUNKS[1][:after]) + b"\xff" * 4 + bytes(CHUNKS[1][after + 4 :]))  # a scale of NaN
    decoder = ResultDecoder(store)
    decoder.decode(chunks_of(PLAN, FIRST))
    assert not bool(decoder.finish()[64:128].any())
    assert store.header(1).included == []
    store.forget(FIRST)
    store.adopt(CHUNKS)
    assert torch.equal(decoder.finish(), filled().mean())
    assert store.header(1).included == store.group.header(CHUNKS[1]).included != []


def test_a_void_part_needs_no_bytes() -> None:
    verdict = verdict_on(PLAN, CHUNKS)
    store = ResultStore.of(verdict.model_copy(update={"digests": (None, verdict.digests[1])}), CODEC_MAP)
    store.adopt([None if index in store.chunks_of(FIRST) else chunk for index, chunk in enumerate(CHUNKS)])
    assert not bool(ResultDecoder(store).finish()[: FIRST.stop].any())
