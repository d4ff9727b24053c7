"""Plans whose indices do not fit together are refused where they are received."""

from typing import Any

import pytest
from pydantic import ValidationError
from tests.fakes.grids import plan_of

from shoal.swarm.messages import RoundPlan

GRID = plan_of([1] * 6, [[0, 2, 4], [1, 3, 5]]).model_dump()
FLAT = plan_of([1] * 3, [[0, 1, 2]]).model_dump()


def refused(plan: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ValidationError) as refusal:
        RoundPlan.model_validate(plan | changes)
    return str(refusal.value)


def test_plans_that_fit() -> None:
    grid, flat = RoundPlan.model_validate(GRID), RoundPlan.model_validate(FLAT)
    assert {grid.relays(part) for part in grid.parts} == set(grid.columns)
    assert {flat.relays(part) for part in flat.parts} == {()}


@pytest.mark.parametrize(
    "columns",
    [((0,),), ((1, 0),), ((0, 2),), ((0, 1, 3),), ((0, 6),), ((0, 1), (2, 2))],
    ids=["a row without", "another order", "none of the row", "too many", "nobody", "the second one"],
)
def test_columns_have_a_relay_in_every_row(columns: tuple[tuple[int, ...], ...]) -> None:
    assert "one relay in every row" in refused(GRID, columns=columns)


def test_rows_and_columns_go_together() -> None:
    assert "several rows" in refused(GRID, columns=())
    assert "several rows" in refused(FLAT, columns=((0,),))
    gap = tuple(member | {"row": 2 * member["row"]} for member in GRID["members"])
    assert "members in each of them" in refused(GRID, members=gap)


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
    assert "relays of the part's column" in refused(plan, parts=parts)
