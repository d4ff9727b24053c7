from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.coordinator.lease_ledger import MAX_FRAGMENTS, LeaseLedger
from shoal.swarm.sample_ranges import count, covers, is_tidy, merge, subtract

SETS = st.sets(st.integers(0, 40))


def ranges_of(samples: set[int]) -> list[tuple[int, int]]:
    return merge((one, one + 1) for one in samples)


def samples_of(ranges: list[tuple[int, int]]) -> set[int]:
    return {one for start, stop in ranges for one in range(start, stop)}


@given(SETS, SETS)
def test_ranges_are_sets(left: set[int], right: set[int]) -> None:
    one, other = ranges_of(left), ranges_of(right)
    assert samples_of(one) == left
    assert count(one) == len(left)
    assert samples_of(subtract(one, other)) == left - right
    assert covers(one, other) == (right <= left)
    assert is_tidy(one)


def test_merge_joins_neighbours_and_drops_empty_ones() -> None:
    assert merge([(5, 9), (2, 5), (9, 9), (12, 13)]) == [(2, 9), (12, 13)]


def test_untidy() -> None:
    assert not is_tidy([(0, 5), (4, 6)])
    assert not is_tidy([(0, 5), (0, 5)])
    assert not is_tidy([(5, 5)])
    assert not is_tidy([(9, 3)])
    assert is_tidy([(4, 6), (0, 4)])


def test_a_life() -> None:
    ledger = LeaseLedger()
    ledger.grant("a", ledger.choose(10))
    ledger.grant("b", ledger.choose(5))
    assert ledger.held == {"a": [(0, 10)], "b": [(10, 15)]}
    assert ledger.holds("a", [(2, 5), (5, 10)])
    assert not ledger.holds("a", [(9, 11)])
    assert not ledger.holds("nobody", [(0, 1)])
    ledger.commit("a", [(0, 4)])
    ledger.give_back("a", keep=[(4, 6)])
    assert (ledger.held["a"], ledger.pool) == ([(4, 6)], [(6, 10)])
    ledger.give_back("a")
    assert ledger.pool == [(4, 10)]
    assert ledger.outstanding() == 5
    assert ledger.choose(3) == [(4, 7)], "returned ones come first"
    assert ledger.choose(8) == [(4, 10), (15, 17)]
    ledger.grant("b", ledger.choose(8))
    assert (ledger.fresh, ledger.pool, ledger.held) == (17, [], {"b": [(4, 17)]})
    ledger.commit("b", [(4, 17)])
    assert ledger.held == {}


def test_a_lease_fits_into_a_message() -> None:
    ledger = LeaseLedger(fresh=10_000, pool=[(2 * one, 2 * one + 1) for one in range(5000)])
    assert len(ledger.choose(4000)) == MAX_FRAGMENTS
    assert ledger.choose(3) == [(0, 1), (2, 3), (4, 5)]
