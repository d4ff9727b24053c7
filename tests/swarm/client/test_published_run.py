"""Whoever joins gets the run file of its invite, or none: with a real client and a coordinator in memory."""

from collections.abc import Callable

import pytest
from tests.fakes.memory_coordinator import MemoryCoordinator, curve_keys, identity, make_client
from tests.fakes.memory_network import MemoryNetwork
from tests.fakes.swarm import run_toml
from tests.fakes.virtual_clock import run_virtual

from shoal.swarm.client.coordinator_client import CoordinatorClient
from shoal.swarm.errors import RunChanged, RunFileError, ShoalError, WireError
from shoal.swarm.protocol.run_file import parse_run_file

TOML = run_toml(4)
OTHER = run_toml(5)


def joined(*changes: Callable[[MemoryCoordinator], None]) -> CoordinatorClient:
    """A client that has joined; before each of its joins the coordinator is changed."""
    clients: list[CoordinatorClient] = []

    async def main() -> None:
        coordinator, endpoint = MemoryCoordinator(TOML), MemoryNetwork().endpoint("peer")
        client, _ = make_client(coordinator, endpoint, identity(1), curve_keys(1), 0.01)
        clients.append(client)
        for change in changes:
            change(coordinator)
            await client.join()

    run_virtual(main())
    return clients[0]


def same(coordinator: MemoryCoordinator) -> None:
    """Nothing happened."""


def serves_another(coordinator: MemoryCoordinator) -> None:
    coordinator.run_toml, coordinator.run = OTHER, parse_run_file(OTHER)


def lies(coordinator: MemoryCoordinator) -> None:
    coordinator.run_toml = OTHER


def sends_nonsense(coordinator: MemoryCoordinator) -> None:
    coordinator.run_toml = '[data]\nsource = "text:~/x"\n'


def has_another_key(coordinator: MemoryCoordinator) -> None:
    coordinator.keys = curve_keys(5)


def test_the_run_of_the_invite() -> None:
    client = joined(same)
    assert client.run_toml == TOML
    assert client.run_file.hash == client.invite.run_hash == parse_run_file(TOML).hash
    assert client.coordinator_key == client.coordinator.identity_key


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (serves_another, RunChanged, "since this invite was made: its hash is"),
        (lies, RunChanged, "does not have the hash that the invite names"),
        (sends_nonsense, RunFileError, "the coordinator's run file: "),
        (has_another_key, WireError, "not for the key that the invite names"),
    ],
)
def test_nothing_else_is_joined(
    change: Callable[[MemoryCoordinator], None], error: type[ShoalError], words: str
) -> None:
    coordinators: list[MemoryCoordinator] = []

    def changed(coordinator: MemoryCoordinator) -> None:
        coordinators.append(coordinator)
        change(coordinator)

    with pytest.raises(error, match=words):
        joined(changed)
    assert coordinators[0].members == {}, "it never asked to join"


def test_who_joins_again_finds_the_same_run_or_none() -> None:
    assert joined(same, same).joins == 2
    with pytest.raises(RunChanged, match="since this invite"):
        joined(same, serves_another)
