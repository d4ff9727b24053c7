"""Copies of the page: what they keep of a long run, and in which order they are written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.swarm.web.samples import RUN, status, timing, verdict

from shoal.swarm.protocol.types import PhaseTimes
from shoal.swarm.web import files
from shoal.swarm.web.files import STATIC_FILES, PageCopy


def content(made: dict[str, bytes]) -> dict[str, Any]:
    found = json.loads(made["data.js"].removeprefix(b"window.shoalCopy = ").removesuffix(b";\n"))
    assert isinstance(found, dict)
    return found


def test_the_page_itself_is_the_last_file() -> None:
    copy = PageCopy()
    copy.take([verdict(0, 1), verdict(1, 2)])
    made = copy.files(RUN, status(), 1.0e9, 600.0)
    assert list(made)[-2:] == ["data.js", "index.html"]
    assert set(made) == {*STATIC_FILES, "data.js"}
    assert made["index.html"].index(b"data.js") < made["index.html"].index(b"page.js")
    told = content(made)
    assert told["rounds"]["round"] == [0, 1]
    assert set(told["details"]) == {"0", "1"}
    assert (told["made_s"], told["renewed_s"]) == (1.0e9, 600.0)


def test_a_copy_has_the_timings_that_are_known() -> None:
    copy = PageCopy()
    known = timing(1, late=2, text="late").model_copy(update={"cost": 0.25, "mean": PhaseTimes(compute=3.0)})
    copy.take([verdict(0, 1), verdict(1, 2)], [known])
    told = content(copy.files(RUN, status(), 1.0e9))["rounds"]
    assert told["work_s"] == [None, 12.0]
    assert told["cost"] == [None, 0.25]
    assert told["phases"] == [None, [3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    assert told["why"] == [None, "late"]


def test_a_long_run_has_a_bounded_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_DETAILS", 5)
    monkeypatch.setattr(files, "_MOST_DETAILED_MEMBERS", 7)  # two a round, so three rounds
    copy = PageCopy(most_rounds=10)
    for first in range(0, 40, 8):
        copy.take([verdict(number, number + 1) for number in range(max(0, first - 1), first + 8)])
    assert copy.next_round == 40
    told = content(copy.files(RUN, status(), 1.0e9))
    assert told["rounds"]["round"] == list(range(30, 40))
    assert set(told["details"]) == {"37", "38", "39"}
    copy.take([verdict(40, 36, committed=False)])
    assert content(copy.files(RUN, status(), 1.0e9))["rounds"]["state"][-5:] == ["undone"] * 4 + ["aborted"]
