from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
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
from shoal.swarm.averaging.reduction import _WINDOW, WINDOW_BYTES, PartReducer, ReducedChunk, window_of
from shoal.swarm.protocol.rounds import PlanMember
from shoal.swarm.transport.bulk.link import CREDIT

SIZE = 700


def values(seed: int, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def flat(weights: Sequence[int]) -> Group:
    return Group((tuple(range(len(weights))),), tuple(weights))


def reducer(weights: Sequence[int], codec: str = "float32", chunks: int = 1, mean: str = "weighted") -> PartReducer:
    bounds = {index: (index * SIZE, (index + 1) * SIZE) for index in range(chunks)}
    plan = plan_of(weights, [range(len(weights))], chunks * SIZE).model_copy(update={"mean": mean})
    codec_map = get_codec_map(codec)
    limits = NormBounds(claiming(plan, [generous(chunks * SIZE)] * len(weights)), codec_map)
    return PartReducer(codec_map, limits, flat(weights), bounds)


def reduced(work: PartReducer, chunk: int = 0) -> ReducedChunk:
    made = work.reduce(chunk)
    assert isinstance(made, ReducedChunk)
    return made


def packed(seed: int, codec: str = "float32") -> Tensor:
    return get_codec(codec).encode(values(seed))


def result_codec(codec: str, members: int) -> Codec:
    return get_codec_map(codec).result(0, SIZE, members)


def decoded(made: ReducedChunk, group: Group, codec: str = "float32") -> Tensor:
    return result_codec(codec, len(group.members)).decode(made.result[group.header_bytes :], SIZE)


def test_tokens_that_a_plan_does_not_count_are_no_weight() -> None:
    plan = claiming(plan_of([2, 9], [range(2)], SIZE), [generous(SIZE)] * 2)
    members = plan.members[0], plan.members[1].model_copy(update={"uncounted": 8})
    plan = plan.model_copy(update={"members": members})
    codec_map = get_codec_map("float32")
    work = PartReducer(codec_map, NormBounds(plan, codec_map), Group.of(plan), {0: (0, SIZE)})
    for one in range(2):
        work.offer(0, one, packed(one))
    torch.testing.assert_close(decoded(reduced(work), work.group), (2 * values(0) + values(1)) / 3)
    with pytest.raises(ValidationError, match="at least one token"):
        PlanMember(peer=members[0].peer, weight_tokens=9, uncounted=9)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_weighted_mean_and_its_loss(codec: str) -> None:
    work = reducer([1, 2, 5], codec=codec)
    for member in (2, 0):
        work.offer(0, member, packed(member, codec))
        assert not work.is_complete(0)
    work.offer(0, 1, packed(1, codec))
    assert work.is_complete(0)
    made = reduced(work)
    sent = [get_codec(codec).decode(packed(seed, codec), SIZE).double() for seed in range(3)]
    expected = (sent[0] + 2 * sent[1] + 5 * sent[2]) / 8
    assert made.included == work.group.header(made.result).included == [0, 1, 2]
    assert made.result.nbytes == work.group.result_bytes(result_codec(codec, 3), SIZE)
    assert made.loss is not None
    lost = expected - decoded(made, work.group, codec).double()
    torch.testing.assert_close(made.loss.values.double(), lost, atol=1e-6, rtol=0)
    largest = float(made.loss.values.abs().max())
    assert largest <= made.loss.largest
    if codec in MEAN_ATOL:
        assert largest <= MEAN_ATOL[codec]
    assert codec == "float32" or largest > 0


def test_any_order_of_arrival_gives_the_same_bytes() -> None:
    results = []
    for order in ([0, 1, 2, 3], [3, 0, 2, 1], [1, 3, 0, 2]):
        work = reducer([3, 1, 7, 11])
        for member in order:
            work.offer(0, member, packed(member))
        results.append(bytes(reduced(work).result))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("mean", ["clip", "trimmed"])
@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(5)), given_up=st.sets(st.integers(0, 4), max_size=2))
def test_a_robust_mean_does_not_depend_on_the_order_of_arrival(
    mean: str, order: Sequence[int], given_up: set[int]
) -> None:
    results = []
    for arriving in (sorted(order), order):
        work = reducer([3, 1, 7, 11, 2], mean=mean)
        for member in given_up:
            work.give_up(member)
        for member in arriving:
            work.offer(0, member, packed(member))
        results.append(bytes(reduced(work).result))
    assert results[0] == results[1]


def test_alone_it_is_complete_with_what_it_brings_itself() -> None:
    work = reducer([4])
    work.offer(0, 0, packed(0))
    assert work.is_complete(0)
    assert torch.equal(decoded(reduced(work), work.group), values(0))


def test_who_is_given_up_is_left_out_of_what_it_did_not_deliver() -> None:
    work = reducer([1, 1, 1], chunks=3)
    for chunk in range(3):
        work.offer(chunk, 0, packed(0))
        work.offer(chunk, 1, packed(1))
    work.offer(0, 2, packed(2))
    assert [work.is_complete(chunk) for chunk in range(3)] == [True, False, False]
    work.give_up(2)
    assert all(work.is_complete(chunk) for chunk in range(3))
    assert reduced(work).included == [0, 1, 2]
    late = reduced(work, 1)
    assert late.included == [0, 1]
    assert torch.allclose(decoded(late, work.group), (values(0) + values(1)) / 2)


def test_who_was_given_up_does_not_come_back() -> None:
    work = reducer([1, 1, 1])
    work.give_up(1)
    work.offer(0, 0, packed(0))
    work.offer(0, 1, packed(1))
    assert not work.is_complete(0)
    work.offer(0, 2, packed(2))
    assert reduced(work).included == [0, 2]


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("kind", ["not a number", "another length"])
def test_garbage_is_left_out(codec: str, kind: str) -> None:
    work = reducer([1, 1, 1], codec=codec)
    work.offer(0, 0, packed(0, codec))
    work.offer(0, 1, packed(1, codec))
    good = get_codec(codec).encode(values(2))
    # All ones is NaN in every float format, as scales are; no exponent and no two indices of top-k are like that.
    work.offer(0, 2, torch.full_like(good, 255) if kind == "not a number" else good[:-1])
    made = reduced(work)
    assert made.included == [0, 1]
    assert bool(decoded(made, work.group, codec).isfinite().all())


def test_a_mean_that_is_not_finite_is_void() -> None:
    work, huge = reducer([1, 1]), torch.zeros(SIZE)
    huge[5] = 3e38  # more than one such value is above every claim
    for member in (0, 1):
        work.offer(0, member, get_codec("float32").encode(huge))
    made = reduced(work)
    assert (made.included, made.loss, bytes(made.result)) == ([], None, b"\0")


def test_reduced_chunks_hold_no_contributions() -> None:
    for size in (1.0, 3e38):
        work = reducer([1, 1])
        for member in (0, 1):
            work.offer(0, member, get_codec("float32").encode(torch.full((SIZE,), size)))
        reduced(work)
        assert not work._chunks


def test_contributions_in_flight_are_bounded_in_bytes() -> None:
    assert window_of(3, 2**18) == _WINDOW
    for sources, chunk_bytes in ((15, 2**20 // 4), (4, 2**20), (3, 2**22)):
        window = window_of(sources, chunk_bytes)
        in_flight = sources * (window + CREDIT) * chunk_bytes
        assert in_flight <= WINDOW_BYTES or window == 2
    assert window_of(4, 2**20) == 8
    assert window_of(1024, 2**20) == 2, "it never stops"
