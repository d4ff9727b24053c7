"""`shoal amend`: settings and their values on the command line."""

import re

import pytest

from shoal.peer.cli.access import parse_changes
from shoal.swarm.errors import UserError


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["outer.lr=0.5"], (("outer.lr", "0.5"),)),
        (["run.rounds=9", "card.title=A reef"], (("card.title", '"A reef"'), ("run.rounds", "9"))),
        (["run.tokens=null", 'card.title="7"'], (("card.title", '"7"'), ("run.tokens", "null"))),
        (["outer.lr=5e-1"], (("outer.lr", "0.5"),)),
    ],
)
def test_settings_and_values(given: list[str], found: tuple[tuple[str, str], ...]) -> None:
    assert parse_changes(given) == found


@pytest.mark.parametrize(
    "given", [["lr"], ["lr=1"], ["outer.lr="], ["outer.lr=1", "outer.lr=2"], ["card.title=" + "x" * 2000]]
)
def test_what_is_no_setting(given: list[str]) -> None:
    with pytest.raises(UserError, match=re.escape(given[0][:8])):
        parse_changes(given)
