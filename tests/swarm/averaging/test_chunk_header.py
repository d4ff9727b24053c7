import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.grids import plan_of

from shoal.swarm.averaging.chunk_header import ChunkHeader, Group, holders, may_hold


@st.composite
def groups(draw: st.DrawFn) -> Group:
    rows = draw(st.integers(1, 8))
    members = list(range(draw(st.integers(rows, 64))))
    order = draw(st.permutations(members))
    return Group(tuple(tuple(sorted(order[row::rows])) for row in range(rows)), (1,) * len(members))


@given(groups(), st.data())
def test_headers_round_trip(group: Group, data: st.DataObject) -> None:
    included = sorted(data.draw(st.sets(st.sampled_from(group.members))))
    flags = st.sets(st.sampled_from(range(len(group.rows))))
    reduced_rows = sorted(data.draw(flags)) if len(group.rows) > 1 else []
    packed = group.pack_header(ChunkHeader(included, reduced_rows))
    assert len(packed) == group.header_bytes
    assert group.header(memoryview(packed + b"\xff\xff")) == ChunkHeader(included, reduced_rows)


@given(groups(), st.data())
def test_headers_of_rows_name_members_of_the_plan(group: Group, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(group.rows) - 1))
    row = group.row(number)
    assert row.members == list(group.rows[number])
    included = sorted(data.draw(st.sets(st.sampled_from(row.members))))
    signature = bytes(range(64))
    signed = ChunkHeader(included, [], signature)
    assert row.header(memoryview(row.pack_header(signed) + b"\xff")) == signed
    assert row.header(memoryview(row.pack_header(ChunkHeader(included)))).seal == bytes(64)
    assert (row.bits_bytes, row.header_bytes) == ((len(row.members) + 7) // 8, (len(row.members) + 7) // 8 + 64)


def test_a_flat_header_has_a_bit_a_member_and_those_of_nobody_are_ignored() -> None:
    flat = Group(((0, 1, 2),), (5, 6, 7))
    assert flat.header_bytes == 1
    assert flat.pack_header(ChunkHeader([0, 2])) == b"\x05"
    assert flat.header(memoryview(b"\xff")) == ChunkHeader([0, 1, 2])
    assert flat.weight([0, 2]) == 12


def test_the_rows_of_a_grid_come_after_its_members() -> None:
    grid = Group(((0, 2, 4, 6), (1, 3, 5)), (1,) * 7)
    assert grid.header_bytes == 2
    assert grid.pack_header(ChunkHeader([0, 1], [1])) == b"\x03\x01"


PLAN = plan_of([1] * 6, [[0, 2, 4], [1, 3, 5]])
LONG_PLAN = plan_of([1] * 9, [[0, 2, 4], [1, 3, 5], [6, 7, 8]])
_FLAT = plan_of([1] * 5, [list(range(5))])
FLAT = _FLAT.model_copy(
    update={
        "parts": tuple(
            one.model_copy(update={"stand_ins": tuple((one.owner + 1 + step) % 5 for step in range(4))})
            for one in _FLAT.parts
        )
    }
)


@pytest.mark.parametrize("member", range(6))
def test_results_are_asked_for_where_they_are_likely_to_be(member: int) -> None:
    for part in PLAN.parts:
        mine, other = PLAN.row_reducers(part)[member % 2], PLAN.row_reducers(part)[1 - member % 2]
        asked = holders(PLAN, part, member)
        if member == mine:
            assert asked[0] == part.owner
        else:
            assert asked[:2] == list(dict.fromkeys([mine, part.owner, other]))[:2]
        assert set(asked) == {mine, other}
        assert set(may_hold(PLAN, part)) == {mine, other, *Group.of(PLAN).rows[part.owner % 2]}


@given(st.data())
def test_detours_lead_to_the_owner(data: st.DataObject) -> None:
    """Members that ask only each other would wait for results that none of them gets."""
    plan = data.draw(st.sampled_from([PLAN, LONG_PLAN, FLAT]))
    avoided = st.sets(st.sampled_from(range(len(plan.members))), max_size=8)
    members = [one.model_copy(update={"detours": tuple(sorted(data.draw(avoided)))}) for one in plan.members]
    plan = plan.model_copy(update={"members": tuple(members)})
    for part in plan.parts:
        for member in range(len(members)):
            way = [member]
            while way[-1] != part.owner:
                asked = holders(plan, part, way[-1])[0]
                assert asked not in way, "they ask each other"
                way.append(asked)


def test_a_member_makes_a_detour_around_an_owner_that_did_not_deliver_to_it() -> None:
    part = FLAT.parts[0]
    wary = next(one for one in range(len(FLAT.members)) if one not in (part.owner, part.stand_ins[0]))
    members = list(FLAT.members)
    members[wary] = members[wary].model_copy(update={"detours": (part.owner,)})
    plan = FLAT.model_copy(update={"members": tuple(members)})
    assert holders(plan, part, wary)[0] == part.stand_ins[0]
    assert part.owner in holders(plan, part, wary)
    members[part.stand_ins[0]] = members[part.stand_ins[0]].model_copy(update={"detours": (part.owner,)})
    plan = FLAT.model_copy(update={"members": tuple(members)})
    assert holders(plan, part, wary)[0] != part.stand_ins[0], "that one does not ask the owner either"
