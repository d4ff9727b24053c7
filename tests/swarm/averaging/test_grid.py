import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.averaging.grid import plan_parts, plan_rows
from shoal.swarm.averaging.partition import chunk_elements

SIZES = st.tuples(st.integers(1, 400), st.integers(1, 64), st.integers(0, 2**64))


@given(SIZES)
def test_rows_hold_everybody_once(case: tuple[int, int, int]) -> None:
    members, group_size, seed = case
    rows = plan_rows(members, group_size, seed)
    assert sorted(itertools.chain(*rows)) == list(range(members))
    sizes = [len(row) for row in rows]
    assert max(sizes) <= group_size
    assert max(sizes) - min(sizes) <= 1
    assert rows == plan_rows(members, group_size, seed)
    assert (len(rows) == 1) == (members <= group_size)


def test_a_large_group_is_about_square() -> None:
    assert [len(row) for row in plan_rows(16, 8, 1)] == [4] * 4
    assert [len(row) for row in plan_rows(10, 4, 1)] == [4, 3, 3]
    assert [len(row) for row in plan_rows(100, 50, 1)] == [10] * 10
    assert len(plan_rows(100, 5, 1)) == 20, "a row is no larger than a group may be"


def test_who_shares_a_row_depends_on_the_seed() -> None:
    assert len({str(plan_rows(16, 8, seed)) for seed in range(50)}) == 50


@given(SIZES, st.data())
def test_parts_tile_all_elements_with_one_relay_a_row(case: tuple[int, int, int], data: st.DataObject) -> None:
    members, group_size, seed = case
    elements = data.draw(st.integers(1, 2**26))
    able = data.draw(st.lists(st.booleans(), min_size=members, max_size=members))
    speeds = data.draw(st.lists(st.none() | st.floats(1e3, 1e12), min_size=members, max_size=members))
    rows = plan_rows(members, group_size, seed)
    chunk = chunk_elements(elements, members)
    parts = plan_parts(rows, speeds, able, elements, chunk)
    assert parts[0].start == 0
    assert parts[-1].stop == elements
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    for part in parts:
        assert part.start < part.stop
        assert part.start % chunk == 0
        assert part.owner in part.relays
        assert [relay in row for relay, row in zip(part.relays, rows, strict=True)] == [True] * len(rows)
        for relay, row in zip(part.relays, rows, strict=True):
            assert able[relay] or not any(able[member] for member in row)


def connections(rows: list[list[int]], members: int, elements: int, chunk: int) -> list[int]:
    peers: dict[int, set[int]] = {member: set() for member in range(members)}
    for part in plan_parts(rows, [None] * members, [True] * members, elements, chunk):
        for relay, row in zip(part.relays, rows, strict=True):
            for member in row:
                peers[member].add(relay)
                peers[relay].add(member)
            peers[relay].add(part.owner)
            peers[part.owner].add(relay)
    return [len(others - {member}) for member, others in peers.items()]


@pytest.mark.parametrize(("members", "most"), [(16, 6), (25, 8), (64, 14), (100, 18)])
def test_about_two_roots_of_connections(members: int, most: int) -> None:
    rows = plan_rows(members, math.isqrt(members) + 1, 3)
    assert max(connections(rows, members, 2**24, 2**12)) <= most
    assert max(connections([list(range(members))], members, 2**24, 2**12)) == members - 1


def test_every_member_of_a_square_grid_owns_the_same() -> None:
    rows = plan_rows(16, 8, 5)
    owned: Counter[int] = Counter()
    for part in plan_parts(rows, [None] * 16, [True] * 16, 2**24, 2**12):
        owned[part.owner] += part.stop - part.start
    assert set(owned.values()) == {2**20}


def test_fast_members_meet_fast_ones() -> None:
    rows = [[0, 1], [2, 3]]
    parts = plan_parts(rows, [1e6, 9e6, 8e6, 1e6], [True] * 4, 2**20, 2**12)
    assert {part.relays for part in parts} == {(1, 2), (0, 3)}
    of_fast = sum(part.stop - part.start for part in parts if part.relays == (1, 2))
    assert of_fast > 2**19


def test_one_row_is_the_flat_group() -> None:
    parts = plan_parts([[0, 1, 2]], [None] * 3, [True, False, True], 3 * 2**14, 2**12)
    assert [(part.owner, part.relays) for part in parts] == [(0, (0,)), (2, (2,))]
