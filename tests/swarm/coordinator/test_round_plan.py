"""Tests of round_plan: shares and chunks, rows and columns, and the plans that they make."""

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.swarm.coordinator.world import CPU, INITIAL, entry, peer_name

from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.round_plan import (
    CHUNK_ELEMENTS,
    PlanRules,
    StandIns,
    chunk_elements,
    lay_out,
    owner_shares,
    plan_grid,
    plan_round,
    plan_rows,
    split,
)
from shoal.swarm.protocol.messages import PeerToCoordinatorRoundReady
from shoal.swarm.protocol.rounds import RoundPlan, leaf_elements
from shoal.swarm.protocol.types import MAX_STAND_INS, RUN_MEMBERS
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES, _packb

# Chunks, shares and parts -----------------------------------------------------------------------------------

MEMBERS = st.lists(st.tuples(st.none() | st.floats(0, 1e18, allow_nan=False), st.booleans()), min_size=1, max_size=40)
ELEMENTS = st.integers(1, 2**34)


@given(ELEMENTS, st.integers(1, 256))
def test_chunks_are_whole_leaves_which_are_blocks_of_codecs(elements: int, members: int) -> None:
    chunk, leaf = chunk_elements(elements, members), leaf_elements(elements)
    assert chunk % leaf == leaf % 4096 == 0
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
    parts = split(elements, [1 / members] * members, chunk)
    rounding = chunk // 2 + leaf_elements(elements) * -(-elements // (members * chunk))
    assert max(stop - start for _, start, stop in parts) <= elements / members + rounding


def test_chunks_for_slow_links_take_a_hundredth_second() -> None:
    assert chunk_elements(10**7, 4, 1e8) in range(110_000, 130_000)
    assert chunk_elements(10**8, 4, 1e5) == leaf_elements(10**8), "but a leaf is never cut"


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
    assert list(orders.of(1, 3)) == [3, 2, 0]
    assert list(orders.of(3, 3)) == [2, 0, 1]
    assert list(orders.of(0, 2)) == [1, 3]
    assert list(orders.of(2, 9)) == [0, 1, 3], "never the owner itself"
    assert list(orders.of(4, 2)) == [1, 3], "one that owns though it is not able: all do when nobody is"
    assert list(StandIns([1.0], [True]).of(0, 3)) == []
    assert list(StandIns([0.5, 0.5], [False, False]).of(1, 3)) == [0], "where nobody can own all stand in, too"


@given(MEMBERS, st.data())
def test_stand_ins_can_own_and_are_not_the_owner(members: list[tuple[float | None, bool]], data: st.DataObject) -> None:
    able = [one for _, one in members]
    shares = owner_shares([bps for bps, _ in members], able)
    owner, most = data.draw(st.integers(0, len(members) - 1)), data.draw(st.integers(0, 4))
    order = StandIns(shares, able).of(owner, most)
    others = [index for index, one in enumerate(able) if (one or not any(able)) and index != owner]
    assert len(order) == len(set(order)) == min(most, len(others))
    assert set(order) <= set(others)


# Rows and columns -------------------------------------------------------------------------------------------

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
    columns, parts = plan_grid(rows, speeds, able, elements, chunk)
    assert parts[0].start == 0
    assert parts[-1].stop == elements
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    for column in columns:
        assert [row_reducer in row for row_reducer, row in zip(column, rows, strict=True)] == [True] * len(rows)
        assert all(able[row_reducer] for row_reducer in column) or not any(able)
    for part in parts:
        assert part.start < part.stop
        assert part.start % chunk == 0
        column = columns[part.column]
        at = column.index(part.owner)
        assert part.stand_ins == (*column[at + 1 :], *column[:at])[:MAX_STAND_INS]


def test_parts_go_round_among_the_owners() -> None:
    """Within as many rounds as there are owners, each has owned all elements."""
    able = [True, False, True, True, True]
    owned: dict[int, set[int]] = {owner: set() for owner in (0, 2, 3, 4)}
    for seed in range(4):
        made = lay_out(16 * 2**20, [None] * 5, able, PlanRules(16, 7 * 4 + seed))
        for part in made.parts:
            owned[part.owner].add(part.start)
        assert sorted(part.owner for part in made.parts) == [0, 2, 3, 4]
        assert max(part.stop - part.start for part in made.parts) <= 4 * 2**20 + made.chunk_elements
    assert {len(starts) for starts in owned.values()} == {4}


def test_who_cannot_own_may_have_to_collect_its_row_and_makes_no_mean() -> None:
    columns, parts = plan_grid([[0, 1], [2, 3]], [None] * 4, [True, True, False, False], 2**20, 2**12)
    assert {row_reducer for column in columns for row_reducer in column} == {0, 1, 2, 3}
    assert {part.owner for part in parts} == {0, 1}
    assert {part.stand_ins for part in parts} == {()}


def connections(rows: list[list[int]], members: int, elements: int, chunk: int) -> list[int]:
    peers: dict[int, set[int]] = {member: set() for member in range(members)}
    columns, parts = plan_grid(rows, [None] * members, [True] * members, elements, chunk)
    for part in parts:
        for row_reducer, row in zip(columns[part.column], rows, strict=True):
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
    for part in plan_grid(rows, [None] * 16, everybody(16), 2**24, 2**12)[1]:
        owned[part.owner] += part.stop - part.start
    assert set(owned.values()) == {2**20}


def test_fast_members_meet_fast_ones() -> None:
    columns, parts = plan_grid([[0, 1], [2, 3]], [1e6, 9e6, 8e6, 1e6], everybody(4), 2**20, 2**12)
    assert columns == ((1, 2), (0, 3))
    of_fast = sum(part.stop - part.start for part in parts if part.column == 0)
    assert of_fast > 2**19


def test_one_row_is_the_flat_group() -> None:
    columns, parts = plan_grid([[0, 1, 2]], [None] * 3, [True, False, True], 3 * 2**14, 2**12)
    assert [(part.owner, part.column) for part in parts] == [(0, 0), (2, 1)]
    assert columns == ((0,), (2,))


# Plans ------------------------------------------------------------------------------------------------------


def plan(
    members: int, group_size: int, number: int = 3, seed: int = 0, slow: frozenset[int] = frozenset()
) -> RoundPlan:
    ready = PeerToCoordinatorRoundReady(
        round=number, anchor_version=2, state_digest=INITIAL, weight_tokens=10, ranges=(), loss=None
    )
    known = {peer_name(one): Member(entry(one), CPU, 0.0, barred_rounds=int(one in slow)) for one in range(members)}
    made = plan_round(number, (2, INITIAL), 2_000_000, dict.fromkeys(known, ready), known, PlanRules(group_size, seed))
    assert made is not None
    return made


def rows(made: RoundPlan) -> list[int]:
    return [member.row for member in made.members]


def test_up_to_the_group_size_one_flat_group() -> None:
    made = plan(16, 16)
    assert set(rows(made)) == {0}
    assert made.columns == ()
    assert len(made.parts) == 16
    assert all(len(part.stand_ins) == MAX_STAND_INS for part in made.parts)


def test_one_that_claims_next_to_nothing_does_not_shrink_everybodys_chunks() -> None:
    def chunk(*mbps: float) -> int:
        return lay_out(2**26, [1e6 * one for one in mbps], [True] * len(mbps), PlanRules(16, 0)).chunk_elements

    fast = chunk(1000, 1000, 1000, 1000)
    assert chunk(1000, 1000, 1000, 1e-6) == chunk(1000, 1e-6) == fast
    assert chunk(1000, 1000, 1000, 60) < fast
    assert chunk(10, 10, 10, 10) <= chunk(1000, 1000, 1000, 60)


def test_what_a_codec_packs_into_a_chunk_is_one() -> None:
    able = [True] * 4
    assert lay_out(2**27, [1e9] * 4, able, PlanRules(16, 0)).chunk_elements == 2**20
    assert lay_out(2**27, [1e9] * 4, able, PlanRules(16, 0, 2**22)).chunk_elements == 2**22
    assert lay_out(2**27, [4e8] * 4, able, PlanRules(16, 0, 2**22)).chunk_elements <= 2**20, "a link is busy with it"


def test_more_make_a_grid_whose_stand_ins_are_the_other_row_reducers() -> None:
    made = plan(17, 16)
    assert sorted(rows(made).count(row) for row in range(4)) == [4, 4, 4, 5]
    assert len(made.columns) == 5
    assert RoundPlan.model_validate(made.model_dump()) == made
    for part in made.parts:
        assert {part.owner, *part.stand_ins} == set(made.row_reducers(part))
    assert made.parts[0].start == 0
    assert made.parts[-1].stop == 2_000_000


def test_any_two_runs_of_the_planner_agree_and_every_round_has_another_grid() -> None:
    assert plan(16, 8) == plan(16, 8)
    assert len({str(rows(plan(16, 8, number=number))) for number in range(20)}) == 20
    assert len({str(rows(plan(16, 8, seed=seed))) for seed in range(20)}) == 20


def test_who_cannot_deliver_reduces_no_row() -> None:
    for seed in range(10):
        made = plan(12, 4, seed=seed, slow=frozenset((0, 1, 2, 3)))
        slow = {index for index, member in enumerate(made.members) if member.peer in map(peer_name, range(4))}
        assert not slow & {row_reducer for column in made.columns for row_reducer in column}
        assert not slow & {part.owner for part in made.parts}


def test_the_largest_plans_can_be_sent() -> None:
    """Also where groups are so small that columns are far longer than rows."""
    for group_size in (2, 3, 5, 31, 32):
        made = lay_out(2**30, [None] * RUN_MEMBERS, [True] * RUN_MEMBERS, PlanRules(group_size, 0))
        columns = _packb([list(column) for column in made.columns])
        parts = _packb([part.model_dump() for part in made.parts])
        assert len(made.parts) <= 2 * RUN_MEMBERS
        assert len(columns) + len(parts) < MAX_MESSAGE_BYTES / 20
