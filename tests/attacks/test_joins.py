"""A stranger with an endless supply of identities joins as fast as it can, and names addresses that are not its own."""

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.test_floods import admitted_in_s
from tests.integration.harness import ROUNDS_S, START_S, Host, Process, Swarm, eventually, run_toml

from shoal.swarm.coordinator.events import MemberJoined
from shoal.swarm.protocol.run_file import AccessSection

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="calls from another loopback address"),
]

JOINER = (sys.executable, str(Path(__file__).parent / "joiner.py"))
STRANGER = "127.9.8.7"
"""In another network than everybody else, 127.0.0.0/24."""

ADMITTED_S = 10.0
MOST_BYTES_PER_S = 2 * 2**20
"""Sent to the stranger, with all its members: the whole rosters that it asks for all the time are some 20 kB each."""


def last_word(attacker: Process) -> dict[str, Any]:
    """Return the attacker's newest counts."""
    lines = [line for line in attacker.text().splitlines() if line.startswith("{") and line.endswith("}")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"admitted": 0, "refused": 0, "bytes": 0, "seconds": 0}
    return found


def strangers_let_in(host: Host) -> int:
    return sum(
        isinstance(event, MemberJoined) and event.entry.address.host == STRANGER for event in host.journal_events()
    )


def test_a_flood_of_identities_keeps_nobody_out(swarm: Swarm) -> None:
    limits = AccessSection()
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "one", "two")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    began_s = time.monotonic()
    attacker = swarm.command("attacker", *JOINER, host.invite, STRANGER, "600")
    eventually("the flood has risen", lambda: last_word(attacker)["seconds"] > 5, START_S, attacker.tail)

    known, before = members[0], members[1].last_round()
    known.kill()
    known.start()
    assert admitted_in_s(swarm, host, "newcomer") < ADMITTED_S
    known.event("joined", START_S)
    known.committed(after=before)
    members[1].committed(after=before)

    reached = last_word(attacker)
    attacker.kill()
    assert reached["refused"] > 0, reached
    most = limits.joins_per_minute_per_network * (1 + (time.monotonic() - began_s) / 60) + 2
    assert reached["admitted"] <= most, reached
    assert strangers_let_in(host) <= most
    assert reached["bytes"] < MOST_BYTES_PER_S * reached["seconds"], reached
    for member in members:
        member.interrupt()
    for member in members:
        member.has_left()
    host.stop()


@contextmanager
def listener(address: str) -> Iterator[tuple[int, list[Any]]]:
    """Listen at that address; yields the port, and a list of all who have connected."""
    callers: list[Any] = []

    def listen() -> None:
        while True:
            try:
                connection, caller = listening.accept()
            except OSError:
                return
            callers.append(caller)
            connection.close()

    with socket.create_server((address, 0)) as listening:
        threading.Thread(target=listen, daemon=True).start()
        yield listening.getsockname()[1], callers


@pytest.mark.parametrize("address", ["127.0.0.2", "localhost", "::ffff:127.0.0.2", "0.0.0.0"])
def test_nobody_connects_to_an_address_that_is_not_the_joiners(swarm: Swarm, address: str) -> None:
    host = swarm.host(run_toml())
    bound = {"localhost": "127.0.0.1", "::ffff:127.0.0.2": "127.0.0.2"}.get(address, address)
    with listener(bound) as (port, callers):
        joiner = swarm.command("joiner", *JOINER, host.invite, STRANGER, "once", address, str(port))
        assert joiner.exit_code(START_S) == 0, joiner.tail()
        time.sleep(0.2)
        assert callers == []
    assert "NotAdmitted: this machine cannot be known as" in joiner.text()
    assert f"as it comes from {STRANGER}" in joiner.text()
    host.stop()


def test_who_names_its_own_address_is_called_there(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    with listener(STRANGER) as (port, callers):
        joiner = swarm.command("joiner", *JOINER, host.invite, STRANGER, "once", STRANGER, str(port))
        assert joiner.exit_code(START_S) == 0, joiner.tail()
        assert callers
    assert "CoordinatorToPeerJoinAccepted" in joiner.text()
    host.stop()
