import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.coordinator.partition import CHUNK_ELEMENTS, StandIns, chunk_elements, owner_shares, split

MEMBERS = st.lists(st.tuples(st.none() | st.floats(0, 1e18, allow_nan=False), st.booleans()), min_size=1, max_size=40)
ELEMENTS = st.integers(1, 2**34)


@given(ELEMENTS, st.integers(1, 256))
def test_chunks_are_blocks_of_codecs(elements: int, members: int) -> None:
    chunk = chunk_elements(elements, members)
    assert chunk % 4096 == 0
    assert 4096 <= chunk <= CHUNK_ELEMENTS == 2**20


def test_chunk_sizes() -> None:
    assert chunk_elements(2**30, 4) == 2**19, "who knows how long a slow link is busy with one"
    assert chunk_elements(2**30, 4, 1e9) == 2**20
    assert chunk_elements(2**22, 4) == 2**17
    assert chunk_elements(2**20, 4) == 2**16, "a chunk costs more than its bytes below that"
    assert chunk_elements(2**18, 4) == 2**14, "but everybody gets a few"
    assert chunk_elements(2**30, 4, 1e9, 2**22) == 2**22
    assert chunk_elements(2**27, 4, 4.9e8, 2**22) < 2**20
    assert chunk_elements(2**22, 4, 1e9) == 2**18, "fewer where links are known to be fast"
    assert chunk_elements(2**18, 4, 1e9) == 2**14
    assert chunk_elements(100, 4) == 4096


@given(st.integers(10**6, 2**34), st.integers(2, 64), st.none() | st.floats(1e6, 1e10))
def test_equal_members_get_as_much(elements: int, members: int, slowest_bps: float | None) -> None:
    chunk = chunk_elements(elements, members, slowest_bps)
    assert chunk % 4096 == 0
    parts = split(elements, [1 / members] * members, chunk)
    rounding = 4096 * -(-elements // (members * chunk))  # of each chunk, up to a whole block
    assert max(stop - start for _, start, stop in parts) <= elements / members + rounding


def test_chunks_for_slow_links_take_a_hundredth_second() -> None:
    assert chunk_elements(10**7, 4, 1e8) in range(110_000, 130_000)
    assert 900 < 10**8 / chunk_elements(10**8, 4, 1e5) < 1100, "but no more chunks than a link is worth"


@given(MEMBERS)
def test_shares(members: list[tuple[float | None, bool]]) -> None:
    shares = owner_shares([bps for bps, _ in members], [able for _, able in members])
    assert sum(shares) == pytest.approx(1.0)
    assert all(share >= 0 for share in shares)
    if any(able for _, able in members):
        assert all(share == 0 for share, (_, able) in zip(shares, members, strict=True) if not able)


@given(ELEMENTS, MEMBERS)
def test_parts_tile_all_elements(elements: int, members: list[tuple[float | None, bool]]) -> None:
    shares = owner_shares([bps for bps, _ in members], [able for _, able in members])
    chunk = chunk_elements(elements, len(members))
    parts = split(elements, shares, chunk)
    assert parts == split(elements, list(shares), chunk)
    assert parts[0][1] == 0
    assert parts[-1][2] == elements
    assert all(one[2] == other[1] for one, other in itertools.pairwise(parts))
    assert all(start < stop and start % chunk == 0 for _, start, stop in parts)
    assert [owner for owner, _, _ in parts] == sorted({owner for owner, _, _ in parts})
    for owner, start, stop in parts:
        assert shares[owner] > 0, "who owns nothing owns not even a remainder"
        assert abs(stop - start - shares[owner] * elements) <= 2 * chunk


def slowest(shares: list[float], bandwidths: list[float]) -> float:
    """Seconds of the slowest member for one byte a contribution."""
    n = len(shares)
    return max((1 + (n - 2) * share) / bps for share, bps in zip(shares, bandwidths, strict=True))


BANDWIDTHS = st.lists(st.floats(1e3, 1e12), min_size=1, max_size=12)


@given(BANDWIDTHS, st.data())
def test_no_other_shares_are_faster(bandwidths: list[float], data: st.DataObject) -> None:
    able = data.draw(st.lists(st.booleans(), min_size=len(bandwidths), max_size=len(bandwidths)).filter(any))
    best = owner_shares(bandwidths, able)
    raw = [data.draw(st.floats(0, 1)) if one else 0.0 for one in able]
    if sum(raw) > 0:
        other = [one / sum(raw) for one in raw]
        assert slowest(best, bandwidths) <= slowest(other, bandwidths) * (1 + 1e-9)
    for first, second in itertools.permutations([index for index, one in enumerate(able) if one], 2):
        moved = list(best)
        moved[first] -= (shift := min(best[first], 1e-3))
        moved[second] += shift
        assert slowest(best, bandwidths) <= slowest(moved, bandwidths) * (1 + 1e-9)


def test_all_owners_finish_together() -> None:
    shares = owner_shares([40.0, 50.0, 60.0, 1.0], [True] * 4)
    times = [(1 + 2 * share) / bps for share, bps in zip(shares, [40.0, 50.0, 60.0], strict=False)]
    assert times == pytest.approx([times[0]] * 3)
    assert shares[3] == 0.0, "it needs longer for the others' parts alone"
    assert owner_shares([10.0, 20.0, 10.0], [True] * 3) == [0.0, 1.0, 0.0]


def test_two_send_the_same_however_it_is_shared() -> None:
    assert owner_shares([10.0, 30.0], [True] * 2) == [0.25, 0.75]
    assert owner_shares([10.0, 30.0], [True, False]) == [1.0, 0.0]


def test_unknown_bandwidth_counts_as_the_median() -> None:
    assert owner_shares([10.0, 20.0, 30.0, None], [True] * 4) == owner_shares([10.0, 20.0, 30.0, 20.0], [True] * 4)
    assert owner_shares([None, None], [True] * 2) == [0.5, 0.5]
    assert owner_shares([None] * 4, [True] * 4) == [0.25] * 4


def test_slow_and_unreachable_own_nothing() -> None:
    assert owner_shares([8.0, 8.0, 0.9], [True] * 3) == [0.5, 0.5, 0.0]
    assert owner_shares([8.0, 8.0, 8.0], [True, False, True]) == [0.5, 0.0, 0.5]
    assert owner_shares([1.0, 90.0, 90.0], [True, False, False]) == [1.0, 0.0, 0.0], "slow only beside other owners"


def test_when_nobody_is_reachable_all_own() -> None:
    assert owner_shares([5.0, None], [False, False]) == [0.5, 0.5]
    assert owner_shares([None], [False]) == [1.0]


def test_remainders_go_to_the_largest_and_the_last_part_is_short() -> None:
    assert split(100, [0.5, 0.25, 0.25], 10) == [(0, 0, 50), (1, 50, 80), (2, 80, 100)]
    assert split(95, [0.5, 0.5], 10) == [(0, 0, 50), (1, 50, 95)]
    assert split(5, [0.3, 0.7], 10) == [(1, 0, 5)]


def test_stand_ins_are_those_that_own_most_each_owner_beginning_with_the_one_after_it() -> None:
    orders = StandIns([0.1, 0.4, 0.2, 0.3, 0.0], [True, True, True, True, False])
    assert orders.of(1, 3) == [3, 2, 0]
    assert orders.of(3, 3) == [2, 0, 1]
    assert orders.of(0, 2) == [1, 3]
    assert orders.of(2, 9) == [0, 1, 3], "never the owner itself"
    assert orders.of(4, 2) == [1, 3], "one that owns though it is not able: all do when nobody is"
    assert StandIns([1.0], [True]).of(0, 3) == []
    assert StandIns([0.5, 0.5], [False, False]).of(1, 3) == [0], "where nobody can own all stand in, too"


@given(MEMBERS, st.data())
def test_stand_ins_can_own_and_are_not_the_owner(members: list[tuple[float | None, bool]], data: st.DataObject) -> None:
    able = [one for _, one in members]
    shares = owner_shares([bps for bps, _ in members], able)
    owner, most = data.draw(st.integers(0, len(members) - 1)), data.draw(st.integers(0, 4))
    order = StandIns(shares, able).of(owner, most)
    others = [index for index, one in enumerate(able) if (one or not any(able)) and index != owner]
    assert len(order) == len(set(order)) == min(most, len(others))
    assert set(order) <= set(others)
