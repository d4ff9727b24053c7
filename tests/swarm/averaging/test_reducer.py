from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.means import MEAN_ATOL
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.registry import CODEC_NAMES, get_codec, get_coding
from shoal.swarm.averaging.reducer import PartReducer, Reduced, mask_bytes, pack_mask, result_bytes, unpack_mask

SIZE = 700


def values(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def reducer(weights: Sequence[int], own: int = 0, codec: str = "float32", chunks: int = 1) -> PartReducer:
    bounds = {index: (index * SIZE, (index + 1) * SIZE) for index in range(chunks)}
    return PartReducer(get_coding(codec), weights, bounds, own)


def packed(seed: int, codec: str = "float32") -> Tensor:
    return get_codec(codec).encode(values(seed))


def result_codec(codec: str, members: int) -> Codec:
    return get_coding(codec).result(0, SIZE, members)


def decoded(reduced: Reduced, members: int, codec: str = "float32") -> Tensor:
    return result_codec(codec, members).decode(reduced.result[mask_bytes(members) :], SIZE)


@given(st.integers(1, 256).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_masks_round_trip(case: tuple[int, set[int]]) -> None:
    members, included = case
    mask = pack_mask(sorted(included), members)
    assert len(mask) == mask_bytes(members)
    assert unpack_mask(memoryview(mask + b"\xff\xff"), members) == sorted(included)


def test_mask_bits_of_nobody_are_ignored() -> None:
    assert unpack_mask(memoryview(b"\xff"), 3) == [0, 1, 2]


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_weighted_mean_and_its_error(codec: str) -> None:
    work = reducer([1, 2, 5], own=1, codec=codec)
    assert not work.offer(0, 0, packed(0, codec))
    assert work.offer(0, 2, packed(2, codec))
    reduced = work.reduce(0, values(1))
    sent = [get_codec(codec).decode(packed(seed, codec), SIZE).double() for seed in (0, 2)]
    expected = (sent[0] + 2 * values(1).double() + 5 * sent[1]) / 8
    assert reduced.included == unpack_mask(reduced.result, 3) == [0, 1, 2]
    assert reduced.result.nbytes == result_bytes(result_codec(codec, 3), SIZE, 3)
    assert reduced.error is not None
    torch.testing.assert_close(
        decoded(reduced, 3, codec).double() + reduced.error.double(), expected, atol=1e-6, rtol=0
    )
    if codec in MEAN_ATOL:
        assert float(reduced.error.abs().max()) <= MEAN_ATOL[codec]
    assert codec == "float32" or float(reduced.error.abs().max()) > 0


def test_any_order_of_arrival_gives_the_same_bytes() -> None:
    results = []
    for order in ([0, 1, 3], [3, 0, 1], [1, 3, 0]):
        work = reducer([3, 1, 7, 11], own=2)
        for member in order:
            work.offer(0, member, packed(member))
        results.append(bytes(work.reduce(0, values(2)).result))
    assert results[0] == results[1] == results[2]


def test_alone_it_is_complete_at_once() -> None:
    work = reducer([4])
    assert work.is_complete(0)
    assert torch.equal(decoded(work.reduce(0, values(0)), 1), values(0))


def test_who_is_given_up_is_left_out_of_what_it_did_not_deliver() -> None:
    work = reducer([1, 1, 1], chunks=3)
    for chunk in range(3):
        work.offer(chunk, 1, packed(1))
    assert work.offer(0, 2, packed(2))
    assert work.give_up(2) == [1, 2]
    assert work.dropped() == {2}
    assert work.reduce(0, values(0)).included == [0, 1, 2]
    late = work.reduce(1, values(0))
    assert late.included == [0, 1]
    assert torch.allclose(decoded(late, 3), (values(0) + values(1)) / 2)


def test_giving_up_changes_nothing_in_reduced_chunks() -> None:
    work = reducer([1, 1], chunks=1)
    work.offer(0, 1, packed(1))
    work.reduce(0, values(0))
    assert work.give_up(1) == []
    assert work.dropped() == set()


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("kind", ["not a number", "another length"])
def test_garbage_is_left_out(codec: str, kind: str) -> None:
    work = reducer([1, 1, 1], codec=codec)
    work.offer(0, 1, packed(1, codec))
    good = get_codec(codec).encode(values(2))
    # All ones is NaN in every float format, as scales are; no exponent and no two indices of top-k are like that.
    work.offer(0, 2, torch.full_like(good, 255) if kind == "not a number" else good[:-1])
    reduced = work.reduce(0, values(0))
    assert reduced.included == [0, 1]
    assert work.dropped() == {2}
    assert bool(decoded(reduced, 3, codec).isfinite().all())


def test_a_mean_that_is_not_finite_is_void() -> None:
    work = reducer([1, 1])
    work.offer(0, 1, get_codec("float32").encode(torch.full((SIZE,), 3e38)))
    reduced = work.reduce(0, torch.full((SIZE,), 3e38))
    assert (reduced.included, reduced.error, bytes(reduced.result)) == ([], None, b"\0")


def test_reduced_chunks_hold_no_contributions() -> None:
    for size in (1.0, 3e38):
        work = reducer([1, 1])
        work.offer(0, 1, get_codec("float32").encode(torch.full((SIZE,), size)))
        work.reduce(0, torch.full((SIZE,), size))
        assert not any(chunk.arrived for chunk in work._chunks.values())
