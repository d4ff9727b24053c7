"""Contributions and means that are larger than claims and factors allow, and honest ones, which never are."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.claims import claiming, generous, honest
from tests.fakes.codec_maps import get_codec_map
from tests.fakes.exchanges import PATIENCE_S, Side, digests, make_sides, run_all
from tests.fakes.grids import PEERS, plan_of
from tests.fakes.memory_network import MemoryNetwork, changed
from tests.fakes.virtual_clock import run_virtual
from torch import Tensor

from shoal.compression.codec import Codec
from shoal.compression.error_feedback import ErrorFeedback
from shoal.compression.formats import CODEC_NAMES
from shoal.compression.registry import get_codec
from shoal.swarm.averaging.allreduce import ExchangeResult
from shoal.swarm.averaging.chunk_header import ChunkHeader, Group
from shoal.swarm.averaging.norm_bounds import NormBounds
from shoal.swarm.averaging.norm_claims import MAX_RANGES, claim_of, pack, range_elements, ranges, unpack
from shoal.swarm.averaging.reduction import PartReducer, ReducedChunk
from shoal.swarm.averaging.result_fetch import adopt_agreed, complete_part
from shoal.swarm.averaging.results import ResultStore, RoundMean
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import AboveBound
from shoal.swarm.protocol.rounds import RoundPlan

ELEMENTS = 6 * 4096 + 17
WEIGHTS = [4, 1, 3, 2]


def drawn(seed: int, n: int = ELEMENTS) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def flat(weights: Sequence[int] = WEIGHTS, chunks: int = 1) -> RoundPlan:
    """Of parts with at least so many chunks each; everybody else stands in."""
    plan = plan_of(weights, [range(len(weights))], ELEMENTS * chunks, chunk=4096)
    others = [tuple(one for one in range(len(weights)) if one != part.owner) for part in plan.parts]
    parts = [part.model_copy(update={"stand_ins": able[:3]}) for part, able in zip(plan.parts, others, strict=True)]
    return plan.model_copy(update={"parts": tuple(parts)})


class OnePart:
    """A reducer of all chunks, of two members: the first one owns the part and brings nothing."""

    def __init__(self, claim: bytes, codec: str = "float32", chunk: int = 4096, elements: int = ELEMENTS) -> None:
        self.codec: Codec = get_codec(codec)
        codec_map = get_codec_map(codec)
        plan = claiming(plan_of([1, 1], [[0, 1]], elements), [b"", claim])
        starts = range(0, elements, chunk)
        self.bounds = {index: (start, min(start + chunk, elements)) for index, start in enumerate(starts)}
        self.reducer = PartReducer(codec_map, NormBounds(plan, codec_map), Group.of(plan), self.bounds)

    def takes(self, index: int, values: Tensor) -> bool:
        """Whether the other member's chunk is in the mean."""
        self.reducer.offer(index, 0, self.codec.encode(torch.zeros_like(values)))
        self.reducer.offer(index, 1, self.codec.encode(values))
        made = self.reducer.reduce(index)
        assert isinstance(made, ReducedChunk)
        return 1 in made.included


# What is added up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_chunks_above_their_claim_are_left_out(codec: str) -> None:
    values = drawn(1)
    work = OnePart(honest(values), codec)
    factor = 1.05 * work.codec.growth if codec not in ("sign", "int2", "topk") else 4 * work.codec.growth
    for index, (start, stop) in work.bounds.items():
        assert work.takes(index, values[start:stop] * (factor if index % 2 else 1.0)) is (index % 2 == 0)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_no_claim_is_a_claim_of_zeros(codec: str) -> None:
    work = OnePart(b"", codec)
    assert work.takes(0, torch.zeros(4096))
    assert not work.takes(1, torch.full((4096,), 1e-20))
    assert not work.takes(2, torch.ones(4096))


@pytest.mark.parametrize("claim", [b"\xff", b"\xff" * 2, b"\xff" * 128, pack([1e30] * 9)])
def test_a_claim_for_another_number_of_ranges_is_none(claim: bytes) -> None:
    assert len(claim) != 2 * len(ranges(ELEMENTS))
    assert not OnePart(claim).takes(0, torch.ones(4096))


def test_swapped_claims_let_neither_pass() -> None:
    values = drawn(1)
    values[:4096] *= 100
    norms = unpack(honest(values)).tolist()
    work = OnePart(pack([norms[1], norms[0], *norms[2:]]))
    assert not work.takes(0, values[:4096])
    assert work.takes(1, values[4096:8192])


def test_many_chunks_do_not_each_use_all_of_a_range() -> None:
    elements = 4 * MAX_RANGES * 4096
    assert range_elements(elements) == 4 * 4096
    values = torch.full((4096,), 1 / 64)  # of norm 1
    work = OnePart(pack([1.0] * MAX_RANGES), elements=elements)
    assert [work.takes(index, values) for index in range(12)] == 3 * [True, False, False, False]


def test_what_was_not_used_of_earlier_ranges_does_not_raise_a_chunks_own_claim() -> None:
    work = OnePart(pack([100.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    assert work.takes(0, torch.zeros(4096))
    assert not work.takes(1, torch.full((4096,), 1.0))


@pytest.mark.parametrize("codec", CODEC_NAMES)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-42, 1e-30, 1.0, 1e20]),
    power=st.sampled_from([0, 1, 7]),
    chunk=st.sampled_from([4096, 3 * 4096]),
)
def test_honest_chunks_are_never_above_their_claim(codec: str, seed: int, size: float, power: int, chunk: int) -> None:
    values = drawn(seed).pow_(power).mul_(size)
    residual = drawn(seed + 1) * size
    bounds = ranges(ELEMENTS)
    norms = [[float((one[start:stop].double()).norm()) for start, stop in bounds] for one in (values, residual)]
    work = OnePart(claim_of(*norms), codec, chunk)
    for index, (start, stop) in work.bounds.items():
        assert work.takes(index, values[start:stop] + residual[start:stop])


# Factors --------------------------------------------------------------------------------------------------------


def expected_mean(sides: Sequence[Side], factors: Sequence[float], weights: Sequence[int] = WEIGHTS) -> Tensor:
    cut = zip(sides, factors, weights, strict=True)
    total = sum(weight * factor * side.brought.double() for side, factor, weight in cut)
    assert isinstance(total, Tensor)
    return total / sum(weights)


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[0, 2], [1, 3]]], ids=["group", "grid"])
def test_a_factor_cuts_what_a_member_brings_and_gives_it_to_nobody(rows: list[list[int]]) -> None:
    async def main() -> None:
        factors = [1.0, 0.25, 0.0, 0.5]
        plan = plan_of(WEIGHTS, rows, ELEMENTS)
        sides = make_sides(MemoryNetwork(), claiming(plan, [b""] * 4, factors))
        await run_all(sides)
        means = [await side.commit() for side in sides]
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert all(side.outcome == ExchangeResult() for side in sides)
        torch.testing.assert_close(means[0].double(), expected_mean(sides, factors), atol=1e-6, rtol=0)

    run_virtual(main())


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[0, 2], [1, 3]]], ids=["group", "grid"])
@pytest.mark.parametrize("codec", ["int8", "sign", "topk"])
def test_what_is_cut_is_not_carried_on(codec: str, rows: list[list[int]]) -> None:
    """Means and residuals add up to what was brought times its factor, round after round."""

    async def main() -> None:
        network, feedbacks = MemoryNetwork(), [ErrorFeedback(ELEMENTS) for _ in WEIGHTS]
        plan = plan_of(WEIGHTS, rows, ELEMENTS)
        for number, factors in enumerate([[0.5, 1.0, 0.125, 1.0], [1.0, 0.0, 1.0, 0.25], [1.0] * 4]):
            before = [feedback.residual.clone() for feedback in feedbacks]
            here = claiming(plan.model_copy(update={"round": number}), [b""] * 4, factors)
            sides = make_sides(network, here, codec, feedbacks)
            await run_all(sides)
            assert all(side.outcome == ExchangeResult() for side in sides)
            means = [await side.commit() for side in sides]
            applied = sum(WEIGHTS) * means[0].double()
            for side, weight, factor, residual in zip(sides, WEIGHTS, factors, before, strict=True):
                applied += weight * side.feedback.residual.double()
                applied -= weight * factor * (side.brought.double() + residual.double())
            torch.testing.assert_close(applied, torch.zeros_like(applied), atol=1e-3, rtol=0)

    run_virtual(main())


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_spike_of_everybody_commits(codec: str) -> None:
    """All bring ten times as much as before and are cut to a tenth: nobody sees anything above a bound."""

    async def main() -> None:
        network, feedbacks = MemoryNetwork(), [ErrorFeedback(ELEMENTS) for _ in WEIGHTS]
        for number, factor in enumerate([1.0, 0.1, 1.0]):
            plan = flat().model_copy(update={"round": number})
            sides = make_sides(network, claiming(plan, [b""] * 4, [factor] * 4), codec, feedbacks, scale=1 / factor)
            await run_all(sides)
            assert all(side.outcome == ExchangeResult() for side in sides)
            assert all(digests(side) == digests(sides[0]) and None not in digests(side) for side in sides)
            for side in sides:
                await side.commit()
        # In the end nothing of the spike is left that would be cut again.
        assert all(float(feedback.residual.norm()) < 12 * math.sqrt(ELEMENTS) for feedback in feedbacks)

    run_virtual(main())


# Members that lie -----------------------------------------------------------------------------------------------

LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "huge": lambda values: torch.full_like(values, 1e30),
    "larger": lambda values: values * 2,
    "larger in one place": lambda values: values.index_fill(0, torch.tensor([5]), 1e6),
    "random bytes": lambda values: torch.frombuffer(
        bytearray(random.Random(1).randbytes(4 * values.numel())), dtype=torch.float32
    ),
}


@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[0, 2], [1, 3]]], ids=["group", "grid"])
@pytest.mark.parametrize("lie", LIES)
def test_who_sends_more_than_it_claims_is_left_out(lie: str, rows: list[list[int]]) -> None:
    async def main() -> None:
        network, plan = MemoryNetwork(), plan_of(WEIGHTS, rows, ELEMENTS)
        liar = 1

        def change(data: bytes) -> bytes:
            return LIES[lie](torch.frombuffer(bytearray(data), dtype=torch.float32)).numpy().tobytes()

        network.faults.append(changed("contribution", PEERS[liar], change))
        sides = make_sides(network, plan)
        await run_all(sides)
        mean = RoundMean(sides[0].store).whole()
        others = [one for one in range(4) if one != liar]
        expected = sum(WEIGHTS[one] * sides[one].brought.double() for one in others)
        assert isinstance(expected, Tensor)
        expected /= sum(WEIGHTS[one] for one in others)
        store, collected = sides[0].store, 0
        for index in range(store.chunks):
            start, stop = store.bounds(index)
            if liar not in store.header(index).included:
                collected += 1
                torch.testing.assert_close(mean[start:stop].double(), expected[start:stop], atol=1e-5, rtol=0)
        assert collected >= store.chunks // 3
        assert float(mean.abs().max()) < 10
        assert any(side.outcome is not None and liar in side.outcome.dropped for side in sides)

    run_virtual(main())


def test_who_claims_much_and_sends_it_is_cut_to_the_factor() -> None:
    async def main() -> None:
        huge = 1e30 * torch.ones(ELEMENTS)
        claims, factors = [b"", generous(ELEMENTS), b"", b""], [1.0, 1e-30, 1.0, 1.0]
        network = MemoryNetwork()
        plan = plan_of(WEIGHTS, [range(4)], ELEMENTS, [True, False, True, True])
        sides = make_sides(network, claiming(plan, claims, factors), brought_by={1: huge})
        await run_all(sides)
        mean = RoundMean(sides[0].store).whole()
        honest_sum = sum(WEIGHTS[one] * sides[one].brought.double() for one in (0, 2, 3))
        torch.testing.assert_close(mean.double(), (honest_sum + WEIGHTS[1]) / sum(WEIGHTS), atol=1e-4, rtol=0)

    run_virtual(main())


def enlarged(group: Group, codec: Codec, factor: float) -> Callable[[bytes], bytes]:
    """Means of ``group`` as they are, but so many times larger."""

    def change(data: bytes) -> bytes:
        if len(data) <= group.header_bytes:
            return data
        values = codec.decode(bytearray(data[group.header_bytes :]), (len(data) - group.header_bytes) // 4)
        return data[: group.header_bytes] + codec.encode(values * factor).numpy().tobytes()

    return change


@pytest.mark.parametrize("factor", [20.0, 1e30])
def test_an_owners_mean_above_the_bound_is_nobodys(factor: float) -> None:
    """A stand-in makes it anew, and the owner has failed, with a reason."""

    async def main() -> None:
        network, plan = MemoryNetwork(), flat()
        network.faults.append(changed("result", PEERS[1], enlarged(Group.of(plan), get_codec("float32"), factor)))
        sides = make_sides(network, plan)
        await run_all(sides)
        part = next(part for part in plan.parts if part.owner == 1)
        number = plan.parts.index(part)
        fair = [side for index, side in enumerate(sides) if index != 1]
        assert len({digests(side)[number] for side in fair}) == 1
        assert None not in digests(fair[0])
        for side in fair:
            assert side.outcome is not None
            assert 1 in side.outcome.failed
            assert "by the plan it is up to" in side.outcome.trouble
            mean = RoundMean(side.store).whole()
            assert float(mean.abs().max()) < 10

    run_virtual(main())


def test_a_row_reducers_partial_above_the_bound_is_not_used() -> None:
    async def main() -> None:
        network, plan = MemoryNetwork(), plan_of(WEIGHTS, [[0, 2], [1, 3]], ELEMENTS)
        part = plan.parts[0]
        row_reducer = next(one for one in plan.row_reducers(part) if one != part.owner)
        row = Group.of(plan).row(plan.members[row_reducer].row)
        sides = make_sides(network, plan)
        exchange, enlarge = sides[row_reducer].exchange, enlarged(row, get_codec("float32"), 1e6)
        put = exchange.as_row_reducer.put  # which signs it

        async def put_enlarged(chunk: int, data: memoryview) -> None:
            await put(chunk, memoryview(bytearray(enlarge(bytes(data)))))

        exchange.as_row_reducer.put = put_enlarged
        await run_all(sides)
        mean = RoundMean(sides[0].store).whole()
        outcome = sides[part.owner].outcome
        assert outcome is not None
        assert row_reducer in outcome.failed
        others = [
            one for one in range(4) if one != row_reducer
        ]  # who passes on such a partial is not asked for its own
        expected = sum(WEIGHTS[one] * sides[one].brought.double() for one in others)
        assert isinstance(expected, Tensor)
        expected /= sum(WEIGHTS[one] for one in others)
        torch.testing.assert_close(mean[: part.stop].double(), expected[: part.stop], atol=1e-5, rtol=0)

    run_virtual(main())


def test_two_who_agree_on_a_mean_above_the_bound_are_not_believed() -> None:
    """A stand-in that adopts what others hold looks at it, too; what is within the bound it takes from them."""

    async def main() -> None:
        network, plan = MemoryNetwork(), flat(chunks=2)
        sides = make_sides(network, plan)
        part, codec = plan.parts[0], get_codec("float32")
        chunks = sides[0].store.chunks_of(part)
        for side in sides[1:3]:
            for index in chunks:
                start, stop = side.store.bounds(index)
                values = torch.ones(stop - start) * (1e6 if index == chunks[-1] else 1e-3)
                header = side.store.group.pack_header(ChunkHeader([0, 1, 2, 3]))
                await side.store.put(index, memoryview(bytearray(header + codec.encode(values).numpy().tobytes())))
        mine = sides[3].store
        await adopt_agreed(sides[3].exchange._context, part, [1, 2])
        assert mine.missing(part) == [range(chunks[-1], chunks.stop)]

    run_virtual(main())


def test_committed_means_above_the_bound_are_taken_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """Parity comes first: most members have reported just these bytes."""

    async def main() -> None:
        network, plan = MemoryNetwork(), claiming(flat(), [pack([1e-9] * len(ranges(ELEMENTS)))] * 4)
        sides = make_sides(network, plan)
        owner, late, part = sides[0].store, sides[1].store, plan.parts[0]
        group, codec = owner.group, get_codec("float32")
        for index in owner.chunks_of(part):
            start, stop = owner.bounds(index)
            packed = codec.encode(drawn(index, stop - start)).numpy().tobytes()
            data = memoryview(bytearray(group.pack_header(ChunkHeader([0, 1, 2, 3])) + packed))
            with pytest.raises(AboveBound, match="up to"):
                owner.check_norm(index, data)
            await owner.put(index, data)
        digest = owner.digest(part)
        await complete_part(network.endpoints[PEERS[1]], late, part, digest, PEERS[:1], Deadlines(PATIENCE_S))
        assert late.holds(part, digest)

    run_virtual(main())
    assert "committed with a mean above the plan's bound" in caplog.text


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_mean_of_nobody_is_not_above_a_bound_and_one_of_no_numbers_is(codec: str) -> None:
    """An owner could void its part with bytes that do not decode, and nobody would blame it."""
    store = ResultStore(claiming(flat(), [generous(ELEMENTS)] * 4), get_codec_map(codec))
    store.check_norm(0, memoryview(bytearray(store.group.header_bytes)))
    size = store.group.result_bytes(store.codec(0), store.bounds(0)[1]) - store.group.header_bytes
    data = memoryview(bytearray(store.group.pack_header(ChunkHeader([0, 1, 2, 3])) + b"\xff" * size))
    with pytest.raises(AboveBound):
        store.check_norm(0, data)


def test_the_bound_of_a_chunk_is_that_of_the_ranges_it_touches() -> None:
    claim = pack([1.0, 2.0, 4.0, *[0.0] * (len(ranges(ELEMENTS)) - 3)])
    bounds = NormBounds(claiming(flat(), [claim] * len(WEIGHTS)), get_codec_map("float32"))
    assert bounds.contribution(0, 0, 4096) == pytest.approx(1.0, rel=0.02)
    assert bounds.contribution(0, 4096, 3 * 4096) == pytest.approx(20.0, rel=0.02)
    assert bounds.contribution(0, 4095, 4097) == pytest.approx(5.0, rel=0.02)


def test_bounds_of_means_follow_who_is_in_them() -> None:
    claims = [pack([norm] * len(ranges(ELEMENTS))) for norm in (1.0, 2.0, 4.0, 8.0)]
    bounds = NormBounds(claiming(flat(), claims, [1.0, 0.5, 1.0, 0.0]), get_codec_map("float32"))

    def norm(included: list[int]) -> float:
        return math.sqrt(bounds.mean(included, 0, 4096, with_partial_sums=False))

    assert norm([0, 1, 2, 3]) == pytest.approx((4 + 1 + 12 + 0) / 10, rel=0.01)
    assert norm([1]) == pytest.approx(1.0, rel=0.01)
    assert norm([3]) == 0.0
    lax = NormBounds(claiming(flat(), claims), get_codec_map("int4"))
    flat_mean = lax.mean([0], 0, 4096, with_partial_sums=False)
    assert (
        lax.mean([0], 0, 4096, with_partial_sums=True) > flat_mean > bounds.mean([0], 0, 4096, with_partial_sums=False)
    )
    assert lax.partial_sum([0], 0, 4096) == flat_mean
    assert math.sqrt(flat_mean) == pytest.approx(get_codec("int4").growth ** 2, rel=0.01)
