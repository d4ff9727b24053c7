"""Whose keys a host uses, and what it leaves in its folder and in the backup."""

import asyncio
from pathlib import Path

import pytest
from tests.fakes.journals import leased
from tests.swarm.coordinator.stories import RUN, story
from tests.swarm.coordinator.world import SIGNER

from shoal.peer.cli.host import Hosting, HostOptions, check_keys, host, host_identity
from shoal.swarm.coordinator.local_journal import Backup
from shoal.swarm.errors import IdentityError, UserError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.run_file import load_run_file

RUN_HASH = b"r" * 32


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "reef"


def test_a_new_run_gets_keys_of_its_own(state: Path) -> None:
    identity, pem = host_identity(None, state)
    assert (state / "identity").read_bytes() == pem
    assert (state / "identity").stat().st_mode & 0o777 == 0o600
    assert host_identity(None, state)[0].peer_id == identity.peer_id
    assert host_identity(None, state.with_name("other"))[0].peer_id != identity.peer_id


def test_nobody_else_can_go_on_with_a_journal(state: Path) -> None:
    leased(state, RUN_HASH, "toml").close()
    with pytest.raises(IdentityError, match="restore it from the backup"):
        host_identity(None, state)
    assert not (state / "identity").exists()


def test_a_file_that_is_named_is_used(state: Path, tmp_path: Path) -> None:
    given = Identity.load_or_create(tmp_path / "keys")
    host_identity(None, state)
    identity, pem = host_identity(tmp_path / "keys", state)
    assert identity.peer_id == given.peer_id
    assert pem == (tmp_path / "keys").read_bytes()


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_only_the_keys_that_signed_the_verdicts_go_on_with_them(state: Path, rounds: int) -> None:
    journal = leased(state, RUN.hash, "toml")
    for events, _ in story():
        if journal.rounds < rounds:
            journal.append(journal.next_index, events)
    assert journal.rounds == rounds
    check_keys(SIGNER, journal, state / "identity")
    if rounds:
        with pytest.raises(IdentityError, match="restore it from the backup"):
            check_keys(Identity.generate(), journal, state / "identity")
    journal.close()


def test_wrong_keys_change_nothing_in_the_backup(state: Path, tmp_path: Path) -> None:
    toml = tmp_path / "tiny.toml"
    toml.write_text('[run]\nname = "reef"\n[recipe]\nname = "own"\n[round]\ntokens = 9\n')
    text, run = load_run_file(toml)
    backup = Backup(tmp_path / "backup" / "reef")
    backup.keep("identity", b"the right keys", 0o600)
    journal = leased(state, run.hash, text, backup)
    for events, _ in story():
        journal.append(journal.next_index, events)
    journal.close()
    options = HostOptions(tmp_path / "other", tmp_path / "state", ("127.0.0.1", 0), backup=tmp_path / "backup")

    def started(_: Hosting) -> None:
        raise AssertionError("it has begun")

    with pytest.raises(IdentityError, match="other has not the keys"):
        asyncio.run(host([toml], options, started, lambda _: None))
    assert (tmp_path / "backup" / "reef" / "identity").read_bytes() == b"the right keys"
    leased(state, run.hash, text).close()


def test_a_backup_in_the_same_place_is_none(state: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[run]\nname = "reef"\n[recipe]\nname = "own"\n[round]\ntokens = 1\n')
    options = HostOptions(None, state.parent, backup=tmp_path / "." / "state")
    with pytest.raises(UserError, match="another disk"):
        asyncio.run(host([run], options, lambda _: None, lambda _: None))
    assert not state.exists()


def test_several_runs_do_not_share_the_file_of_a_card(state: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "reef.toml", tmp_path / "kelp.toml"]
    for one in runs:
        one.write_text(f'[run]\nname = "{one.stem}"\n[recipe]\nname = "own"\n[round]\ntokens = 1\n')
    options = HostOptions(None, state.parent, publish=str(tmp_path / "card.json"))

    def started(hosting: Hosting) -> None:
        raise AssertionError("it has begun")

    with pytest.raises(UserError, match="name a folder"):
        asyncio.run(host(runs, options, started, lambda _: None))
