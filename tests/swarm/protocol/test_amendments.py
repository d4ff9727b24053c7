"""Which settings of a running run may change, and what the run file of a round is then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.errors import RunChanged, RunFileError
from shoal.swarm.protocol.amendments import (
    AMENDABLE,
    amended,
    asks_for_more,
    changes_at,
    check_changes,
)
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import Amendment

RUN = parse_run_file(
    '[run]\nname = "reef"\ntokens = 1000\n[recipe]\nname = "gpt"\n[schedule]\nkind = "linear"\n[round]\ntokens = 100\n'
)


def of(at_round: int, key: str, value: str) -> Amendment:
    return Amendment(at_round=at_round, key=key, value=value)


def test_a_setting_has_its_value_from_its_round_on() -> None:
    made = [of(3, "outer.lr", "0.5"), of(7, "outer.lr", "0.25"), of(5, "card.title", '"Reefs"')]
    assert [amended(RUN, changes_at(made, number)).outer.lr for number in (0, 2, 3, 6, 7, 9)] == [
        *(0.7, 0.7, 0.5, 0.5, 0.25, 0.25)
    ]
    assert changes_at(made, 7) == (("card.title", '"Reefs"'), ("outer.lr", "0.25"))
    assert changes_at(reversed(made), 7) == changes_at(made, 7)


def test_an_amended_run_is_the_same_run() -> None:
    now = amended(RUN, (("outer.lr", "0.5"),))
    assert now.outer.lr == 0.5
    assert now.hash == RUN.hash
    assert amended(now, (("inner.lr", "1.0"),)).hash == RUN.hash
    assert now.model_dump() == {**RUN.model_dump(), "outer": {**RUN.model_dump()["outer"], "lr": 0.5}}
    assert amended(RUN, ()) is RUN


def _settings(model: type[RunFile]) -> list[str]:
    sections = ("run", "recipe", "data", "averaging", "audit", "inner", "schedule", "outer", "round", "checkpoints")
    return [f"{one}.{name}" for one in (*sections, "access", "card") for name in RUN.model_dump()[one]]


@pytest.mark.parametrize("key", [one for one in _settings(RunFile) if one not in AMENDABLE] + ["pins.layout", "a.b"])
def test_what_members_agreed_to_stays(key: str) -> None:
    with pytest.raises(RunFileError, match="start a new run"):
        check_changes(RUN, ((key, "1"),))
    with pytest.raises(RunChanged, match="no host may"):
        amended(RUN, ((key, "1"),))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("outer.lr", "-1", r"outer\.lr"),
        ("outer.lr", "NaN", r"outer\.lr"),
        ("outer.lr", '"much"', r"outer\.lr"),
        ("outer.lr", " 0.5", r"outer\.lr"),
        ("outer.lr", "[0.5]", r"outer\.lr"),
        ("outer.lr", "{", "not a JSON value"),
        ("round.tokens", "0", r"round\.tokens"),
        ("run.tokens", "null", r"needs run\.tokens"),
        ("card.title", '"a\\u001b"', r"card\.title"),
    ],
)
def test_values_are_those_of_a_run_file(key: str, value: str, words: str) -> None:
    with pytest.raises(RunFileError, match=words):
        check_changes(RUN, ((key, value),))


@given(st.text(max_size=40))
def test_any_value_is_refused_or_taken(value: str) -> None:
    for key in ("outer.lr", "card.title", "run.tokens"):
        try:
            check_changes(RUN, ((key, value),))
        except RunFileError:
            continue


def test_settings_without_effect_are_refused() -> None:
    virtual = parse_run_file(
        'algorithm = "virtual_batch"\n[run]\nname = "reef"\n[recipe]\nname = "gpt"\n[round]\ntokens = 100\n'
    )
    with pytest.raises(RunFileError, match="no effect"):
        check_changes(virtual, (("inner.lr", "0.1"),))
    check_changes(virtual, (("outer.lr", "0.1"),))


@pytest.mark.parametrize(
    ("changes", "longer"),
    [
        ((("run.tokens", "1001"),), ["run.tokens"]),
        ((("run.tokens", "999"),), []),
        ((("run.rounds", "7"),), []),
        ((("outer.lr", "0.1"),), []),
    ],
)
def test_only_a_longer_run_asks_again(changes: tuple[tuple[str, str], ...], longer: list[str]) -> None:
    assert asks_for_more(RUN, amended(RUN, changes)) == longer


def test_a_run_without_an_end_that_it_had_asks_again() -> None:
    run = parse_run_file('[run]\nname = "reef"\nrounds = 5\n[recipe]\nname = "gpt"\n[round]\ntokens = 100\n')
    assert asks_for_more(run, amended(run, (("run.rounds", "null"),))) == ["run.rounds"]


def test_amended_run_files_of_one_run_are_not_taken_for_each_other() -> None:
    """They all have the run's hash."""
    slow = amended(RUN, (("outer.lr", "0.25"),))
    assert amended(slow, (("round.tokens", "70"),)).outer.lr == 0.25
    assert amended(RUN, (("round.tokens", "70"),)).outer.lr == 0.7


def test_the_run_file_of_a_round_is_found_without_hashing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator asks for it many times for each member."""
    changes = (("outer.lr", "0.125"),)
    found = amended(RUN, changes)
    monkeypatch.setattr(RunFile, "hash", property(lambda _: pytest.fail("hashed again")))
    assert amended(RUN, changes) is found
