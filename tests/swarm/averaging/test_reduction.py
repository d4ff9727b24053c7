from collections.abc import Sequence

import pytest
import torch
from tests.fakes.claims import claiming, generous
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.grids import plan_of
from tests.fakes.means import MEAN_ATOL
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.formats import CODEC_NAMES
from shoal.compression.registry import get_codec
from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.reduction import PartReducer, ReducedChunk

SIZE = 700


def values(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def flat(weights: Sequence[int]) -> Group:
    return Group((tuple(range(len(weights))),), tuple(weights))


def reducer(weights: Sequence[int], own: int = 0, codec: str = "float32", chunks: int = 1) -> PartReducer:
    bounds = {index: (index * SIZE, (index + 1) * SIZE) for index in range(chunks)}
    plan = plan_of(weights, [range(len(weights))], chunks * SIZE)
    codec_map = get_codec_map(codec)
    limits = NormBounds(claiming(plan, [generous(chunks * SIZE)] * len(weights)), codec_map)
    return PartReducer(codec_map, limits, flat(weights), bounds, own)


def reduced(work: PartReducer, chunk: int, own: Tensor | None) -> ReducedChunk:
    made = work.reduce(chunk, None if own is None else (own, torch.zeros_like(own)))
    assert isinstance(made, ReducedChunk)
    return made


def packed(seed: int, codec: str = "float32") -> Tensor:
    return get_codec(codec).encode(values(seed))


def result_codec(codec: str, members: int) -> Codec:
    return get_codec_map(codec).result(0, SIZE, members)


def decoded(made: ReducedChunk, group: Group, codec: str = "float32") -> Tensor:
    return result_codec(codec, len(group.members)).decode(made.result[group.header_bytes :], SIZE)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_weighted_mean_and_its_error(codec: str) -> None:
    work = reducer([1, 2, 5], own=1, codec=codec)
    work.offer(0, 0, packed(0, codec))
    assert not work.is_complete(0)
    work.offer(0, 2, packed(2, codec))
    assert work.is_complete(0)
    made = reduced(work, 0, values(1))
    sent = [get_codec(codec).decode(packed(seed, codec), SIZE).double() for seed in (0, 2)]
    expected = (sent[0] + 2 * values(1).double() + 5 * sent[1]) / 8
    assert made.included == work.group.header(made.result).included == [0, 1, 2]
    assert made.result.nbytes == work.group.result_bytes(result_codec(codec, 3), SIZE)
    assert made.error is not None
    found = decoded(made, work.group, codec).double() + made.error.values.double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    if codec in MEAN_ATOL:
        assert float(made.error.values.abs().max()) <= MEAN_ATOL[codec]
    assert codec == "float32" or float(made.error.values.abs().max()) > 0


def test_any_order_of_arrival_gives_the_same_bytes() -> None:
    results = []
    for order in ([0, 1, 3], [3, 0, 1], [1, 3, 0]):
        work = reducer([3, 1, 7, 11], own=2)
        for member in order:
            work.offer(0, member, packed(member))
        results.append(bytes(reduced(work, 0, values(2)).result))
    assert results[0] == results[1] == results[2]


def test_alone_it_is_complete_at_once() -> None:
    work = reducer([4])
    assert work.is_complete(0)
    assert torch.equal(decoded(reduced(work, 0, values(0)), work.group), values(0))


def test_who_is_given_up_is_left_out_of_what_it_did_not_deliver() -> None:
    work = reducer([1, 1, 1], chunks=3)
    for chunk in range(3):
        work.offer(chunk, 1, packed(1))
    work.offer(0, 2, packed(2))
    assert [work.is_complete(chunk) for chunk in range(3)] == [True, False, False]
    work.give_up(2)
    assert all(work.is_complete(chunk) for chunk in range(3))
    assert reduced(work, 0, values(0)).included == [0, 1, 2]
    late = reduced(work, 1, values(0))
    assert late.included == [0, 1]
    assert torch.allclose(decoded(late, work.group), (values(0) + values(1)) / 2)


def test_who_was_given_up_does_not_come_back() -> None:
    work = reducer([1, 1, 1])
    work.give_up(1)
    work.offer(0, 1, packed(1))
    assert not work.is_complete(0)
    work.offer(0, 2, packed(2))
    assert reduced(work, 0, values(0)).included == [0, 2]


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("kind", ["not a number", "another length"])
def test_garbage_is_left_out(codec: str, kind: str) -> None:
    work = reducer([1, 1, 1], codec=codec)
    work.offer(0, 1, packed(1, codec))
    good = get_codec(codec).encode(values(2))
    # All ones is NaN in every float format, as scales are; no exponent and no two indices of top-k are like that.
    work.offer(0, 2, torch.full_like(good, 255) if kind == "not a number" else good[:-1])
    made = reduced(work, 0, values(0))
    assert made.included == [0, 1]
    assert bool(decoded(made, work.group, codec).isfinite().all())


def test_a_mean_that_is_not_finite_is_void() -> None:
    work, huge = reducer([1, 1]), torch.zeros(SIZE)
    huge[5] = 3e38  # more than one such value is above every claim
    work.offer(0, 1, get_codec("float32").encode(huge))
    made = reduced(work, 0, huge)
    assert (made.included, made.error, bytes(made.result)) == ([], None, b"\0")


def test_reduced_chunks_hold_no_contributions() -> None:
    for size in (1.0, 3e38):
        work = reducer([1, 1])
        work.offer(0, 1, get_codec("float32").encode(torch.full((SIZE,), size)))
        reduced(work, 0, torch.full((SIZE,), size))
        assert not work._chunks
