"""`shoal top` and `status --watch`: the table in its orders, who is waited for, and a host that is away."""

import asyncio
import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.fakes.virtual_clock import run_virtual
from tests.peer.terminal.test_reporter import make_status

from shoal.peer.cli.watch import WatchedRun
from shoal.peer.terminal.top import SortBy, WaitedFor, late, sorted_members, summary_line, top_view
from shoal.swarm.client import observer
from shoal.swarm.client.observer import follow_status, pause_s
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import RunEnded, Unreachable
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.types import MemberStatus


def member(name: str, **changes: object) -> MemberStatus:
    usual = {"name": name, "peer": (name * 16)[:16], "alive": True, "synced": True, "activity": "training"}
    return make_status().members[0].model_copy(update=usual | changes)


MEMBERS = (
    member("ant", share=0.2, steady_tokens_per_s=300.0, reachable=True),
    member("bee", share=0.5, steady_tokens_per_s=100.0, activity="ready"),
    member("cod", share=0.3, steady_tokens_per_s=200.0, activity="ready"),
    member("dab", alive=False, share=0.9, left="silent"),
)


def status(**changes: object) -> CoordinatorToPeerStatus:
    return make_status().model_copy(update={"members": MEMBERS, "phase": "closing", **changes})


def shown(what: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, record=True)
    console.print(what)
    return console.export_text().splitlines()


@pytest.mark.parametrize(
    ("by", "names"),
    [
        (SortBy.share, "bee cod ant dab"),
        (SortBy.speed, "ant cod bee dab"),
        (SortBy.waited, "cod ant bee dab"),
        (SortBy.name, "ant bee cod dab"),
    ],
)
def test_members_are_sorted_as_one_likes(by: SortBy, names: str) -> None:
    found = sorted_members(status(), by, {MEMBERS[2].peer: 3.0})
    assert " ".join(one.name for one in found) == names


def test_who_still_trains_while_others_are_ready_is_waited_for() -> None:
    assert late(status()) == [MEMBERS[0].peer]
    assert late(status(phase="training")) == []
    assert late(status(members=MEMBERS[:1])) == [], "it waits for nobody else"
    waited = WaitedFor()
    for second in range(4):
        waited.look(status(), float(second))
    waited.look(status(phase="averaging"), 100.0)
    assert waited.waited_s == {MEMBERS[0].peer: 3.0}
    waited.look(status(members=MEMBERS[1:]), 101.0)
    assert waited.waited_s == {}, "it has left"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [9, 24])
def test_top_fits_into_its_window(width: int, height: int) -> None:
    many = tuple(member(f"m{number}", reachable=True) for number in range(50))
    lines = shown(top_view(status(members=many), SortBy.speed, height, {}, ["the host has not answered"]), width)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert "more members below" in lines[-1]
    small = shown(top_view(status(), SortBy.share, 24, {MEMBERS[0].peer: 12.0}), width)
    assert any("direct" in line and "12 s" in line and "300" in line for line in small)
    assert any("unreachable" in line for line in small)
    assert "q quit" in small[-1]


def test_names_cannot_move_the_cursor() -> None:
    lines = shown(top_view(status(members=(member("a\x1b[2J", peer="a" * 16),)), SortBy.share, 24), 80)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize("by", [None, SortBy.share])
def test_a_host_that_is_away_leaves_the_last_status_and_says_since_when(by: SortBy | None) -> None:
    run = WatchedRun(by)
    assert "asking" in shown(run.render(24), 80)[0]
    run.take(status(), 0.0, 1000.0)
    run.take(Unreachable("nothing answers \x1b[2J\nat HOST"), 1.0, 2000.0)
    run.take(Unreachable("still nothing"), 2.0, 3000.0)
    text = "\n".join(shown(run.render(40), 100))
    assert f"the host has not answered since {observer_clock(2000.0)}: still nothing" in text
    assert "bee" in text
    run.take(status(), 3.0, 4000.0)
    assert run.notes == []


def observer_clock(moment: float) -> str:
    from shoal.peer.terminal.events import clock

    return clock(moment)


def test_a_plain_line_says_how_far_the_run_is() -> None:
    words = summary_line(status(outlook="nobody holds it"))
    assert words == "round 7 closing · 1.2M tokens · loss 2.300 · 3 members · waits: nobody holds it"


def test_a_slow_answer_is_asked_for_less_often() -> None:
    assert pause_s(2.0, 0.01) == 2.0
    assert pause_s(2.0, 1.0) == 20.0


def test_following_goes_on_over_a_host_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [status(), Unreachable("away"), status(), RunEnded("over")]

    class Client:
        deadlines = Deadlines(12.0)
        run_file = SimpleNamespace(hash=bytes(32))

        async def ask(self, *_: object) -> object:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    class Observing:
        async def __aenter__(self) -> Client:
            return Client()

        async def __aexit__(self, *_: object) -> None: ...

    async def no_sleep(_: float) -> None: ...

    monkeypatch.setattr(observer, "observe", lambda _: Observing())
    monkeypatch.setattr(asyncio, "sleep", no_sleep)
    seen: list[str] = []
    with pytest.raises(RunEnded):
        asyncio.run(follow_status(None, 1.0, lambda found: seen.append(type(found).__name__)))  # type: ignore[arg-type]
    assert seen == ["CoordinatorToPeerStatus", "Unreachable", "CoordinatorToPeerStatus"]


def test_a_host_that_is_silent_is_told_although_requests_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        deadlines = Deadlines(12.0)
        run_file = SimpleNamespace(hash=bytes(32))

        async def ask(self, *_: object) -> object:
            return await asyncio.Event().wait()

    class Observing:
        async def __aenter__(self) -> Client:
            return Client()

        async def __aexit__(self, *_: object) -> None: ...

    monkeypatch.setattr(observer, "observe", lambda _: Observing())
    seen: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(20.0):
            await follow_status(None, 1.0, lambda found: seen.append(str(found)))  # type: ignore[arg-type]

    with pytest.raises(TimeoutError):
        run_virtual(main())
    assert seen == ["no answer within 6 s"] * 3
