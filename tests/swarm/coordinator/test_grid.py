import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.coordinator.grid import plan_parts, plan_rows
from shoal.swarm.coordinator.partition import chunk_elements

SIZES = st.tuples(st.lists(st.booleans(), min_size=1, max_size=400), st.integers(1, 64), st.integers(0, 2**128))


@given(SIZES)
def test_rows_hold_everybody_once(case: tuple[list[bool], int, int]) -> None:
    can_own, group_size, seed = case
    rows, able = plan_rows(can_own, group_size, seed), sum(can_own)
    assert sorted(itertools.chain(*rows)) == list(range(len(can_own)))
    sizes = [len(row) for row in rows]
    assert max(sizes) - min(sizes) <= 1
    assert rows == plan_rows(can_own, group_size, seed)
    owners = [sum(can_own[member] for member in row) for row in rows]
    assert max(owners) - min(owners) <= 1
    if len(can_own) <= group_size:
        assert len(rows) == 1
    elif able >= len(can_own) / group_size:
        assert max(sizes) <= group_size
    assert min(owners) > 0 or not able


def everybody(members: int) -> list[bool]:
    return [True] * members


def test_a_large_group_is_about_square() -> None:
    assert [len(row) for row in plan_rows(everybody(16), 8, 1)] == [4] * 4
    assert [len(row) for row in plan_rows(everybody(10), 4, 1)] == [4, 3, 3]
    assert [len(row) for row in plan_rows(everybody(100), 50, 1)] == [10] * 10
    assert len(plan_rows(everybody(100), 5, 1)) == 20, "a row is no larger than a group may be"


def test_rows_are_longer_where_few_can_own() -> None:
    able = [False] * 20
    able[3] = able[7] = True
    rows = plan_rows(able, 4, 1)
    assert [len(row) for row in rows] == [10, 10]
    assert [[member in row for member in (3, 7)].count(True) for row in rows] == [1, 1]


def test_who_shares_a_row_depends_on_the_seed() -> None:
    assert len({str(plan_rows(everybody(16), 8, seed)) for seed in range(50)}) == 50


@given(SIZES, st.data())
def test_parts_tile_all_elements_with_one_row_reducer_a_row(
    case: tuple[list[bool], int, int], data: st.DataObject
) -> None:
    able, group_size, seed = case
    members = len(able)
    elements = data.draw(st.integers(1, 2**26))
    speeds = data.draw(st.lists(st.none() | st.floats(1e3, 1e12), min_size=members, max_size=members))
    rows = plan_rows(able, group_size, seed)
    chunk = chunk_elements(elements, members)
    grid = plan_parts(rows, speeds, able, elements, chunk)
    assert grid.parts[0].start == 0
    assert grid.parts[-1].stop == elements
    assert all(one.stop == other.start for one, other in itertools.pairwise(grid.parts))
    for column in grid.columns:
        assert [row_reducer in row for row_reducer, row in zip(column, rows, strict=True)] == [True] * len(rows)
        assert all(able[row_reducer] for row_reducer in column) or not any(able)
    for part in grid.parts:
        assert part.start < part.stop
        assert part.start % chunk == 0
        assert sorted((part.owner, *part.stand_ins)) == sorted(grid.columns[part.column])


def test_who_cannot_own_may_have_to_collect_its_row_and_makes_no_mean() -> None:
    grid = plan_parts([[0, 1], [2, 3]], [None] * 4, [True, True, False, False], 2**20, 2**12)
    assert {row_reducer for column in grid.columns for row_reducer in column} == {0, 1, 2, 3}
    assert {part.owner for part in grid.parts} == {0, 1}
    assert {part.stand_ins for part in grid.parts} == {()}


def connections(rows: list[list[int]], members: int, elements: int, chunk: int) -> list[int]:
    peers: dict[int, set[int]] = {member: set() for member in range(members)}
    grid = plan_parts(rows, [None] * members, [True] * members, elements, chunk)
    for part in grid.parts:
        for row_reducer, row in zip(grid.columns[part.column], rows, strict=True):
            for member in row:
                peers[member].add(row_reducer)
                peers[row_reducer].add(member)
            peers[row_reducer].add(part.owner)
            peers[part.owner].add(row_reducer)
    return [len(others - {member}) for member, others in peers.items()]


@pytest.mark.parametrize(("members", "most"), [(16, 6), (25, 8), (64, 14), (100, 18)])
def test_about_two_roots_of_connections(members: int, most: int) -> None:
    rows = plan_rows(everybody(members), math.isqrt(members) + 1, 3)
    assert max(connections(rows, members, 2**24, 2**12)) <= most
    assert max(connections([list(range(members))], members, 2**24, 2**12)) == members - 1


def test_every_member_of_a_square_grid_owns_the_same() -> None:
    rows = plan_rows(everybody(16), 8, 5)
    owned: Counter[int] = Counter()
    for part in plan_parts(rows, [None] * 16, everybody(16), 2**24, 2**12).parts:
        owned[part.owner] += part.stop - part.start
    assert set(owned.values()) == {2**20}


def test_fast_members_meet_fast_ones() -> None:
    grid = plan_parts([[0, 1], [2, 3]], [1e6, 9e6, 8e6, 1e6], everybody(4), 2**20, 2**12)
    assert grid.columns == ((1, 2), (0, 3))
    of_fast = sum(part.stop - part.start for part in grid.parts if part.column == 0)
    assert of_fast > 2**19


def test_one_row_is_the_flat_group() -> None:
    grid = plan_parts([[0, 1, 2]], [None] * 3, [True, False, True], 3 * 2**14, 2**12)
    assert [(part.owner, part.column) for part in grid.parts] == [(0, 0), (2, 1)]
    assert grid.columns == ((0,), (2,))
