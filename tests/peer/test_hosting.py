"""Whose keys a host uses, and what it leaves in its folder and in the backup."""

import asyncio
from pathlib import Path

import pytest

from shoal.peer import hosting
from shoal.peer.hosting import HostOptions, host, host_identity
from shoal.swarm.coordinator.journal import Journal
from shoal.swarm.errors import IdentityError, UserError
from shoal.swarm.identity import Identity

RUN_HASH = b"r" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hosting, "SHOAL_HOME", tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state" / "reef"


def test_a_new_run_gets_keys_of_its_own(home: Path, state: Path) -> None:
    identity, pem = host_identity(None, state)
    assert (state / "identity").read_bytes() == pem
    assert (state / "identity").stat().st_mode & 0o777 == 0o600
    assert host_identity(None, state)[0].peer_id == identity.peer_id
    assert host_identity(None, state.with_name("other"))[0].peer_id != identity.peer_id
    assert not home.exists()


def test_a_run_that_has_a_journal_goes_on_with_the_users_keys(home: Path, state: Path) -> None:
    before = Identity.load_or_create(home / "identity")
    Journal(state, RUN_HASH, "toml").close()
    assert host_identity(None, state)[0].peer_id == before.peer_id
    assert (state / "identity").read_bytes() == (home / "identity").read_bytes()
    assert (state / "identity").stat().st_mode & 0o777 == 0o600
    (home / "identity").unlink()
    assert host_identity(None, state)[0].peer_id == before.peer_id, "from now on they are the run's"


def test_nobody_else_can_go_on_with_a_journal(home: Path, state: Path) -> None:
    Journal(state, RUN_HASH, "toml").close()
    with pytest.raises(IdentityError, match="restore it from the backup"):
        host_identity(None, state)
    assert not (state / "identity").exists()


def test_a_file_that_is_named_is_used(home: Path, state: Path, tmp_path: Path) -> None:
    given = Identity.load_or_create(tmp_path / "keys")
    host_identity(None, state)
    identity, pem = host_identity(tmp_path / "keys", state)
    assert identity.peer_id == given.peer_id
    assert pem == (tmp_path / "keys").read_bytes()


def test_keys_that_others_may_read_are_not_taken_over(home: Path, state: Path) -> None:
    Identity.load_or_create(home / "identity")
    (home / "identity").chmod(0o644)
    Journal(state, RUN_HASH, "toml").close()
    with pytest.raises(IdentityError, match="chmod 600"):
        host_identity(None, state)
    assert not (state / "identity").exists()


def test_a_backup_in_the_same_place_is_none(state: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[run]\nname = "reef"\n[recipe]\nname = "own"\n[round]\ntokens = 1\n')
    options = HostOptions(None, state.parent, backup=tmp_path / "." / "state")
    with pytest.raises(UserError, match="another disk"):
        asyncio.run(host(run, options, lambda _: None, lambda _: None))
    assert not state.exists()
