import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.averaging.norm_claims import MAX_RANGES, claimed_squares, pack, ranges, total_norm, unpack

NORMS = st.floats(0.0, 1e30).filter(lambda norm: norm == 0.0 or norm > 1e-30)


@given(st.lists(NORMS, max_size=MAX_RANGES))
def test_a_claim_is_never_below_the_norm_and_hardly_above(norms: list[float]) -> None:
    claimed = unpack(pack(norms))
    assert len(claimed) == len(norms)
    for norm, claim in zip(norms, claimed, strict=True):
        assert norm <= claim <= norm * 1.003


@given(st.integers(1, 10**12))
def test_ranges_tile_the_vector(elements: int) -> None:
    found = ranges(elements)
    assert 1 <= len(found) <= MAX_RANGES
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == elements
    assert all(start % 4096 == 0 and start < stop for start, stop in found)


def test_no_claim_is_one_of_nothing() -> None:
    assert total_norm(b"") == 0.0
    assert not claimed_squares(b"", 10**6).any()


def test_half_a_claim_is_none() -> None:
    with pytest.raises(ValueError, match="buffer size"):
        unpack(b"abc")


def test_the_square_of_a_whole_claim_is_the_sum_of_its_ranges() -> None:
    claim = [1.0, 2.0, 4.0]
    squares = claimed_squares(pack(claim), 3 * 4096)
    assert squares.tolist() == pytest.approx([1.0, 4.0, 16.0], rel=0.01)
    assert math.isclose(total_norm(pack(claim)) ** 2, squares.sum(), rel_tol=0.01)
