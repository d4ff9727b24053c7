"""Ranges of samples behave like sets."""

from hypothesis import given
from hypothesis import strategies as st

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
