"""Addresses of several hosts with one journal, as the leader's invite names them."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.fakes.memory_store import MemoryEngine, MemoryStore
from tests.integration.harness import run_toml

from shoal.peer.cli.host import _with_others
from shoal.peer.cli.standby import SharedHosting, SharedPlace
from shoal.swarm.coordinator.shared_journal import SharedJournal, SharedRun
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.addresses import MAX_ADDRESSES
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.types import Address

TTL_S = 5.0
ABOUT = SharedRun(bytes(32), run_toml(), bytes(32))


def direct(number: int) -> Address:
    return Address(host=f"10.0.0.{number}", control_port=7707)


def relay(number: int) -> Address:
    return Address(host=f"relay{number}.example.org", control_port=443, kind="relayed")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[SharedHosting]]:
    """Seven hosts of one journal, of which the first one leads."""
    engine = MemoryEngine(lambda: 0.0)
    made = []
    with ExitStack() as ending:
        for number in range(7):
            folder = tmp_path / str(number)
            folder.mkdir()
            journal = SharedJournal(MemoryStore(engine), f"host {number}", TTL_S, folder, lambda: 0.0)
            ending.enter_context(closing(journal))
            journal.open()
            if not number:
                assert journal.begin(ABOUT) is not None
            made.append(SharedHosting(journal, SharedPlace("", machine=folder / "identity"), "reef", None))
        yield made


def test_the_invite_names_addresses_and_relays_of_all_hosts(hosts: list[SharedHosting]) -> None:
    leading, second, third, *_ = hosts
    second.show_addresses([direct(2), direct(3), relay(2)])
    third.show_addresses([relay(2), relay(3)])
    named = asyncio.run(_with_others((direct(1), relay(1)), leading))
    assert named[0] == direct(1)
    assert set(named) == {direct(1), direct(2), direct(3), relay(1), relay(2), relay(3)}
    assert [one.is_relayed for one in named] == [False] * 3 + [True] * 3
    invite = Invite(named, "reef", bytes(32), bytes(32))
    assert Invite.parse(str(invite)) == invite


def test_an_invite_has_no_more_addresses_than_fit_and_its_leaders_first(hosts: list[SharedHosting]) -> None:
    for number, one in enumerate(hosts):
        one.show_addresses([direct(number), relay(number)])
    named = asyncio.run(_with_others((direct(0), relay(0)), hosts[0]))
    assert len(named) == MAX_ADDRESSES
    assert named[0] == direct(0)
    assert next(one for one in named if one.is_relayed) == relay(0)
    Invite.parse(str(Invite(named, "reef", bytes(32), bytes(32))))


def test_damaged_addresses_of_another_host_are_left_out(
    hosts: list[SharedHosting], caplog: pytest.LogCaptureFixture
) -> None:
    hosts[1].show_addresses([direct(1)])
    hosts[2].show_addresses([direct(2)])
    hosts[0].journal.put_key(f"host/{hosts[1].machine.peer_id}", b"//@\xff:x 1")
    assert asyncio.run(_with_others((direct(0),), hosts[0])) == (direct(0), direct(2))
    assert "damaged" in caplog.text


def test_a_run_is_not_begun_again_in_another_engine_than_its_folder_names(
    hosts: list[SharedHosting], tmp_path: Path
) -> None:
    note = tmp_path / "journal.txt"
    hosts[1].check_place(tmp_path)
    note.write_text("etcd://elsewhere:2379/shoal/reef\n")
    with pytest.raises(UserError, match=r"no journal of the run reef.*etcd://elsewhere:2379/shoal/reef"):
        hosts[1].check_place(tmp_path)
    note.write_text(f"{hosts[1].journal.location}\n")
    hosts[1].check_place(tmp_path)
    note.write_text("etcd://elsewhere:2379/shoal/reef\n")  # another of the engine's machines may be named
    hosts[1].found = ABOUT
    hosts[1].check_place(tmp_path)
