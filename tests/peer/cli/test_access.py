"""Commands of a host on who takes part: durations, folders, and tables that fit into a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.peer.cli.access import (
    InviteFor,
    ask_host,
    default_uses,
    host_folder,
    invite_state,
    invite_table,
    members_table,
    parse_duration,
    records_table,
)
from shoal.peer.cli.host import hosted_status, hosted_verdicts
from shoal.swarm.coordinator.local_journal import LocalJournal
from shoal.swarm.errors import StateFileError, UserError
from shoal.swarm.protocol.access_records import AccessRecord, Refusals
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.messages import Acknowledged, InviteState, KickMember, MemberAccess
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.protocol.types import InviteTerms

PEER = "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("5m", 300), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)]
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0d", "1.5d", "7 days", "9999999d", "∞d"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="30m, 12h or 7d"):
        parse_duration(text)


def test_only_folders_of_hosts_are_taken(tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match="no run that this machine hosts"):
        host_folder(str(tmp_path))
    (tmp_path / "journal.records").write_bytes(b"")
    assert host_folder(str(tmp_path)) == tmp_path


def test_of_a_run_on_a_shared_journal_nothing_is_begun_or_read_in_the_folder(tmp_path: Path) -> None:
    """A journal that a command began there would fork the run under its own keys."""
    (tmp_path / "journal.txt").write_text("etcd://a:1/shoal/reef\n")
    toml = '[run]\nname = "reef"\n[recipe]\nname = "own"\n[round]\ntokens = 100000\n'
    (tmp_path / "run.toml").write_text(toml)
    Identity.load_or_create(tmp_path / "identity")
    assert host_folder(str(tmp_path)) == tmp_path
    run = parse_run_file(toml)
    readers: list[Callable[[], object]] = [
        lambda: ask_host(tmp_path, None, KickMember(peer="a" * 16), Acknowledged),
        lambda: hosted_verdicts(tmp_path, has_stages=False),
        lambda: hosted_status(tmp_path, run),
        lambda: LocalJournal(tmp_path, run.hash, toml).lease(),
    ]
    before = sorted(tmp_path.iterdir())
    for read in readers:
        with pytest.raises(StateFileError, match="etcd://a:1/shoal/reef, which its hosts share"):
            read()
    assert sorted({*tmp_path.iterdir()} - {tmp_path / "lock"}) == before


def shown(table: Any) -> str:
    console = Console(width=80, file=None, record=True, quiet=False)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get()
    assert all(len(line.rstrip()) <= 80 for line in lines.splitlines())
    return lines


def state(is_revoked: bool = False, joined: int = 0, **terms: Any) -> InviteState:
    about = InviteTerms(**{"id": "abcdefgh", "role": "trainer"} | terms)
    return InviteState(terms=about, made_s=1.0, is_revoked=is_revoked, joined=joined)


def test_an_invite_says_whether_it_still_lets_anybody_in() -> None:
    assert invite_state(state(), 100.0) == "valid"
    assert invite_state(state(expires_s=100), 99.0) == "valid"
    assert invite_state(state(expires_s=100), 100.0) == "expired"
    assert invite_state(state(uses=2, joined=1), 100.0) == "valid"
    assert invite_state(state(uses=2, joined=2), 100.0) == "used up"
    assert invite_state(state(is_revoked=True, expires_s=1), 100.0) == "revoked"
    lines = shown(invite_table([state(uses=2, joined=1, note="for \x1b[31mAnn")]))
    assert "1/2" in lines
    assert "never" in lines
    assert "\x1b[31m" not in lines


def member(**fields: Any) -> MemberAccess:
    whole = {
        "peer": PEER,
        "name": "a machine with a long name",
        "role": "trainer",
        "alive": True,
        "state": "training",
        "since_s": 1.7e9,
        "invite": "abcdefgh",
        "network": "203.0.113.0/24",
        "rounds": 12,
        "has_credit": True,
        "credit": 0.254,
        "banned": False,
        "banned_network": "",
        "allowed": False,
        "note": "",
    }
    return MemberAccess.model_validate(whole | fields)


def test_members_are_shown_with_what_the_host_decided() -> None:
    lines = shown(members_table([member(), member(banned=True, note="noise"), member(role="", name="", allowed=True)]))
    for words in (
        PEER,
        "training",
        "203.0.113.0/24",
        "banned: noise",
        "allowed",
        "abcdefgh",
        "credit 25%",
        "credit: weight",
    ):
        assert words in lines
    assert "new" in shown(members_table([member(has_credit=False, credit=0.0)])).partition("credit: weight")[0]


def test_records_are_one_line_where_there_is_little_to_say() -> None:
    made = [
        AccessRecord(number=0, at_s=1.7e9, kind="banned", peer=PEER, text="sends noise", network="203.0.113.0/24"),
        AccessRecord(number=1, at_s=1.7e9, kind="refused", refused=(Refusals(reason="no token", count=7),)),
    ]
    lines = shown(records_table(made))
    assert "203.0.113.0/24" in lines
    assert "sends noise" in lines
    assert "7 no token" in lines


def test_an_invite_for_a_validator_is_for_one_machine() -> None:
    assert [default_uses(role) for role in InviteFor] == [int(role is InviteFor.validator) for role in InviteFor]
