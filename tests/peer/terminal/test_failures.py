"""Failures that members report alike, and the lines of a host."""

import io

from rich.console import Console

from shoal.peer.cli.host_screen import HostScreen
from shoal.peer.event_schema import make_event
from shoal.peer.terminal.failures import AlikeFailures


def test_the_third_machine_with_the_same_failure_is_said_and_then_each_doubling() -> None:
    failures = AlikeFailures()
    told = [failures.note(f"peer{one}", f"RecipeError: no file /home/{one}/data, 0x{one:08x}") for one in range(30)]
    assert [one for one in told if one] == [3, 6, 12, 24]
    assert failures.note("peer0", "RecipeError: no file /home/x/data, 0x00000000") == 0, "the same machine again"
    assert failures.note("other", "OutOfMemory") == 0
    assert failures.note("other", " ") == 0


def test_strangers_with_ever_new_failures_cost_no_memory() -> None:
    failures = AlikeFailures()
    for one in range(1000):
        failures.note(f"peer{one}", "x" * (one + 1))
    assert len(failures._peers) <= 64


def lines_of(*events: dict[str, object]) -> list[str]:
    console = Console(file=io.StringIO(), width=80, record=True)
    screen = HostScreen(console, None, several=False)
    for event in events:
        screen.show_event(event | {"run": "reef"})
    return console.export_text().splitlines()


def joined(peer: str, name: str) -> dict[str, object]:
    return make_event("member_joined", peer=peer, name=name, role="trainer", device="CPU")


def test_a_host_says_once_what_members_fail_of_alike() -> None:
    trouble = "RecipeError: nasty \x1b[2J" + "long " * 200
    events = [make_event("member_lost", peer=f"p{one}", reason="failed", trouble=trouble) for one in range(4)]
    lines = lines_of(*events)
    (said,) = (line for line in lines if line.startswith("3 members have failed in the same way"))
    assert "\x1b" not in said
    assert "RecipeError: nasty ·[2J" in said
    assert len(said) < 600


def test_lines_of_a_host_name_members_as_well_as_ids() -> None:
    lines = lines_of(
        joined("aaaaaaaa", "dolphin"),
        make_event("member_lost", peer="aaaaaaaa", reason="silent"),
        make_event("work_scored", by="bbbbbbbb", peer="aaaaaaaa", round=3, finding="helps"),
    )
    assert "dolphin (aaaaaaaa) is gone: silent" in lines[1]
    assert "dolphin (aaaaaaaa)" in lines[2]


def test_in_a_terminal_a_line_is_cut_between_words_and_an_invite_is_not() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    screen = HostScreen(console, None, several=False)
    whole = {"loss": 1.5, "members": ["a"], "tokens_total": 1_200_000, "chain": "80e90591" * 8}
    screen.show_event(make_event("verdict", round=24, committed=True, **whole) | {"run": "reef"})
    screen.show_event(make_event("trend", round=24, kind="diverging", text="the losses rise " * 8) | {"run": "reef"})
    first, *others = console.file.getvalue().rstrip().split("\n")  # type: ignore[attr-defined]
    assert first.endswith("1 peer · 1.2M tokens")
    assert len(others) > 1
    assert all(one.split()[-1] in ("the", "losses", "rise") for one in others)
