"""Plans whose indices do not fit together are refused where they are received."""

from typing import Any

import pytest
from pydantic import ValidationError
from tests.fakes.grids import plan_of

from shoal.swarm.protocol.rounds import RoundPlan

GRID = plan_of([1] * 6, [[0, 2, 4], [1, 3, 5]]).model_dump()
FLAT = plan_of([1] * 3, [[0, 1, 2]]).model_dump()
CHUNK, FIRST_STOP = FLAT["chunk_elements"], FLAT["parts"][0]["stop"]


def refused(plan: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ValidationError) as refusal:
        RoundPlan.model_validate(plan | changes)
    return str(refusal.value)


def test_plans_that_fit() -> None:
    grid, flat = RoundPlan.model_validate(GRID), RoundPlan.model_validate(FLAT)
    assert {grid.row_reducers(part) for part in grid.parts} == set(grid.columns)
    assert {flat.row_reducers(part) for part in flat.parts} == {()}


@pytest.mark.parametrize(
    "columns",
    [((0,),), ((1, 0),), ((0, 2),), ((0, 1, 3),), ((0, 6),), ((0, 1), (2, 2))],
    ids=["a row without", "another order", "none of the row", "too many", "nobody", "the second one"],
)
def test_columns_have_a_row_reducer_in_every_row(columns: tuple[tuple[int, ...], ...]) -> None:
    assert "one row reducer in every row" in refused(GRID, columns=columns)


def test_rows_and_columns_go_together() -> None:
    assert "several rows" in refused(GRID, columns=())
    assert "several rows" in refused(FLAT, columns=((0,),))
    gap = tuple(member | {"row": 2 * member["row"]} for member in GRID["members"])
    assert "members in each of them" in refused(GRID, members=gap)


def test_a_row_reducer_that_is_nobody_beside_good_ones() -> None:
    assert "one row reducer in every row" in refused(GRID, columns=((99, 0, 1), *GRID["columns"][1:]))


def test_members_are_ordered_and_named_once() -> None:
    for plan in (FLAT, GRID):
        assert "order of peer ids" in refused(plan, members=plan["members"][::-1])
    first = FLAT["members"][0]["peer"]
    assert "each once" in refused(FLAT, members=tuple(one | {"peer": first} for one in FLAT["members"]))


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, {"start": CHUNK}),
        (0, {"stop": FIRST_STOP - CHUNK}),
        (1, {"start": FIRST_STOP - CHUNK}),
        (1, {"start": FIRST_STOP + CHUNK}),
        (-1, {"stop": 0}),
        (-1, {"stop": FLAT["parts"][-1]["start"]}),
    ],
    ids=["not from 0 on", "a gap", "overlap", "a gap before", "backwards", "empty"],
)
def test_parts_tile_the_elements(index: int, change: dict[str, Any]) -> None:
    parts = list(FLAT["parts"])
    parts[index] = parts[index] | change
    assert "tile the elements" in refused(FLAT, parts=tuple(parts))


def test_parts_begin_with_a_chunk() -> None:
    at = FIRST_STOP + 8
    parts = (FLAT["parts"][0] | {"stop": at}, FLAT["parts"][1] | {"start": at}, *FLAT["parts"][2:])
    assert "beginning at a chunk" in refused(FLAT, parts=parts)


@pytest.mark.parametrize(
    ("plan", "change"),
    [
        (FLAT, {"owner": 3}),
        (FLAT, {"stand_ins": (3,)}),
        (FLAT, {"column": 1}),
        (GRID, {"column": 3}),
        (GRID, {"column": 1}),
        (GRID, {"owner": 2}),
        (GRID, {"stand_ins": (5,)}),
    ],
)
def test_parts_are_of_members_of_their_column(plan: dict[str, Any], change: dict[str, Any]) -> None:
    assert plan is FLAT or (plan["parts"][0]["column"], plan["columns"][0]) == (0, (0, 1))
    parts = (plan["parts"][0] | change, *plan["parts"][1:])
    assert "row reducers of the part's column" in refused(plan, parts=parts)
