"""The run file of an invite, fetched by somebody who is no member (yet), and checked against the invite's hash."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.swarm.client.coordinator_line import Line
from shoal.swarm.deadlines import CONNECT_S
from shoal.swarm.errors import RunChanged, WireError
from shoal.swarm.protocol.identity import verify_certificate
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.messages import Certificate, CoordinatorToPeerRun, PeerToCoordinatorGetRun
from shoal.swarm.protocol.run_file import RunFile, parse_run_file


@dataclass(frozen=True)
class PublishedRun:
    """``toml``: as the host wrote it; ``coordinator``: its identity and the key that the invite names."""

    toml: str
    run_file: RunFile
    coordinator: Certificate


async def fetch_run(line: Line, invite: Invite) -> PublishedRun:
    """Ask whoever answers at the invite's addresses.

    Raises ``Unreachable``, ``WrongKey``, ``UnknownRun``, ``ProtocolMismatch``, ``RunFileError`` for a file that no run
    may have, and ``RunChanged`` for another one than the invite's."""
    ask = PeerToCoordinatorGetRun(run=invite.run)
    answer = await line.request_anywhere(ask, CoordinatorToPeerRun, CONNECT_S, CONNECT_S)
    verify_certificate(answer.coordinator)
    if answer.coordinator.curve_key != invite.key:
        raise WireError("the coordinator's certificate is for another key than the invite's")
    check_hash(answer.run_hash, invite)
    run_file = parse_run_file(answer.run_toml, "the coordinator's run file")
    if run_file.hash != invite.run_hash:
        raise RunChanged(
            "the run file that the host sent has another hash than the invite's: install the same release of shoal on "
            "both machines; if it is the same, the host has changed the run since: do not join before you know why"
        )
    return PublishedRun(answer.run_toml, run_file, answer.coordinator)


def check_hash(run_hash: bytes, invite: Invite) -> None:
    """Raises ``RunChanged`` unless the coordinator says to host the invite's run."""
    if run_hash != invite.run_hash:
        raise RunChanged(
            f"the host has changed the run {invite.run!r} since this invite: its hash is {run_hash.hex()[:16]} now, "
            f"and {invite.run_hash.hex()[:16]} in the invite; ask for a new invite, and what has changed"
        )
