"""Invites that are expired, revoked, used up, of another run, altered, or replayed; kicked and banned peers."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.test_joins import JOINER
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Host, Process, Swarm, finish, invite_with, run_toml

from shoal.swarm.errors import CommandRefused, InviteError, NotAdmitted, Removed, WrongKey
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.invite_token import make_token, read_token
from shoal.swarm.protocol.types import InviteTerms

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform != "linux", reason="calls from another loopback address"),
]

LET_IN = "CoordinatorToPeerJoinAccepted"
NEAR, FAR = "127.0.0.1", "127.9.8.7"


def shoal(swarm: Swarm, *arguments: str, code: int = 0, variable: str = "") -> str:
    """Run a command to its end; returns what it prints. ``variable``: an invite in the environment."""
    launcher = ("env", f"SHOAL_INVITE={variable}", *SHOAL) if variable else SHOAL
    process = swarm.command(f"{arguments[0]}-{len(swarm.processes)}", *launcher, *arguments)
    assert process.exit_code(START_S) == code, process.tail()
    return process.text()


def invite(swarm: Swarm, host: Host, *options: str) -> str:
    return shoal(swarm, "invite", "create", str(host.state), *options).strip().splitlines()[-1]


def id_of(text: str) -> str:
    return read_token(Invite.parse(text).token).id


def answer(swarm: Swarm, text: str, who: str = "", source: str = NEAR) -> str:
    """What a join by that invite is answered, under the identity of that name, by default a new one."""
    who = who or f"stranger-{len(swarm.processes)}"
    process = swarm.command(f"{who}-{len(swarm.processes)}", *JOINER, text, source, "as", str(swarm.folder / who))
    assert process.exit_code(START_S) == 0, process.tail()
    return process.text().strip().splitlines()[-1]


def invites(swarm: Swarm, host: Host) -> dict[str, dict[str, object]]:
    lines = shoal(swarm, "invite", "list", str(host.state), "--json").splitlines()
    return {one["id"]: one for one in map(json.loads, lines)}


def no_secret_is_told(swarm: Swarm, *texts: str, but: tuple[Process, ...] = ()) -> None:
    """Nothing of the tokens' signatures is in any log or file that others may read."""
    secrets = [text.partition("&t=")[2][-80:] for text in texts]
    for process in swarm.processes:
        if process not in but:
            assert not any(secret in process.text() for secret in secrets), process.label
    for path in swarm.folder.glob("**/*"):
        if path.is_file() and path.stat().st_mode & 0o077:
            data = path.read_bytes()
            if path.name == "log.txt":
                continue  # of the commands that printed them
            for text, secret in zip(texts, secrets, strict=True):
                assert secret.encode() not in data, path
                assert Invite.parse(text).token[-64:] not in data, path


def test_invites_that_let_nobody_in(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    good, single = host.invite, invite(swarm, host, "--uses", "1", "--note", "for one")
    short, doomed = invite(swarm, host, "--expires", "1s"), invite(swarm, host)
    followers = invite(swarm, host, "--role", "observer")
    shoal(swarm, "invite", "revoke", str(host.state), id_of(doomed))
    time.sleep(1.1)

    assert answer(swarm, good) == LET_IN
    assert "has expired" in answer(swarm, short)
    assert "has revoked" in answer(swarm, doomed)
    assert "is for the role observer" in answer(swarm, followers)
    assert "who has an invite with a token" in answer(swarm, invite_with(good, token=b""))

    keys = Identity.load_or_create(host.state / "identity")
    terms = InviteTerms(id="zzzzzzzz", role="trainer")
    elsewhere = invite_with(good, token=make_token(terms, bytes(32), keys.sign))
    assert "not made for this run" in answer(swarm, elsewhere)
    stranger = invite_with(good, token=make_token(terms, Invite.parse(good).run_hash, Identity.generate().sign))
    assert "not made for this run" in answer(swarm, stranger)
    token = bytearray(Invite.parse(single).token)
    token[8] = 0  # for any number of uses
    assert "not made for this run" in answer(swarm, invite_with(good, token=bytes(token)), "forger")

    assert answer(swarm, single, "first") == LET_IN
    assert "used up: another identity has joined" in answer(swarm, single, "second", FAR)
    assert answer(swarm, single, "first", FAR) == LET_IN
    assert {one["id"]: one["state"] for one in invites(swarm, host).values()} == {
        id_of(good): "valid",
        id_of(single): "used up",
        id_of(short): "expired",
        id_of(doomed): "revoked",
        id_of(followers): "valid",
    }
    told = records(swarm, str(host.state))
    assert {"invite made", "invite revoked", "joined", "left", "refused"} == {one["kind"] for one in told}
    refused = [each for one in told for each in one["refused"]]
    assert {"reason": "expired", "count": 1} in refused
    host.stop()
    makers = tuple(one for one in swarm.processes if one.label.startswith("invite-"))
    no_secret_is_told(swarm, single, short, doomed, followers, but=makers)
    assert (host.state / "invite.txt").stat().st_mode & 0o777 == 0o600


def test_uses_and_revocations_outlive_a_killed_host_and_are_told_while_none_runs(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    single, doomed = invite(swarm, host, "--uses", "1"), invite(swarm, host)
    printed = host.invite
    assert answer(swarm, single, "first") == LET_IN
    host.kill()
    shoal(swarm, "invite", "revoke", str(host.state), id_of(doomed))
    offline = invite(swarm, host, "--uses", "1")
    shoal(swarm, "invite", "revoke", str(host.state), "aaaaaaaa", code=CommandRefused.exit_code)
    host.start()
    assert host.invite == printed
    assert "used up" in answer(swarm, single, "second")
    assert "revoked" in answer(swarm, doomed)
    assert answer(swarm, single, "first") == LET_IN
    assert answer(swarm, offline, "third") == LET_IN
    host.stop()


def test_invites_from_the_environment_and_from_files(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    path = swarm.folder / "mine.invite"
    said = shoal(swarm, "invite", "create", str(host.state), "--role", "observer", "--out", str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert "shoal://" not in said
    for given in (str(path), f"@{path}", path.read_text()):
        assert '"round"' in shoal(swarm, "status", given, "--json")
    assert '"round"' in shoal(swarm, "status", "--json", variable=f"@{path}")
    assert "reef" in shoal(swarm, "log", variable=path.read_text())
    shoal(swarm, "status", f"@{path}.missing", code=InviteError.exit_code)
    refused = shoal(swarm, "status", invite_with(host.invite, token=b""), code=NotAdmitted.exit_code)
    assert "ask the host" in refused
    host.stop()


def test_nobody_but_the_host_makes_invites(swarm: Swarm, tmp_path: Path) -> None:
    host = swarm.host(run_toml())
    Identity.load_or_create(tmp_path / "keys")
    own = ("--identity", str(tmp_path / "keys"))
    shoal(swarm, "invite", "create", str(host.state), *own, code=WrongKey.exit_code)
    assert len(invites(swarm, host)) == 1
    host.stop()


def records(swarm: Swarm, *source: str) -> list[dict[str, Any]]:
    """The records of access, checked by the command."""
    return [json.loads(line) for line in shoal(swarm, "log", *source, "--members", "--json").splitlines()]


def members(swarm: Swarm, host: Host) -> dict[str, dict[str, object]]:
    lines = shoal(swarm, "members", str(host.state), "--json").splitlines()
    return {one["peer"]: one for one in map(json.loads, lines)}


def test_kicked_and_banned_volunteers_are_told_and_the_others_go_on(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    ann, bob, eve = swarm.members(host.invite, "ann", "bob", "eve")
    for member in (ann, bob, eve):
        member.committed(within_s=START_S + ROUNDS_S)
    assert {one["invite"] for one in members(swarm, host).values()} == {id_of(host.invite)}

    peer, state = bob.peer, str(host.state)
    shoal(swarm, "kick", state, peer, "--note", "a test")
    assert bob.exit_code(ROUNDS_S) == Removed.exit_code, bob.tail()
    assert "the host has removed this peer from the run" in bob.text()
    assert members(swarm, host)[peer]["state"] == "removed by the host"
    bob.start()
    bob.committed(within_s=START_S + ROUNDS_S)

    gone = eve.peer
    shoal(swarm, "ban", state, gone, "--note", "sends noise")
    assert eve.exit_code(ROUNDS_S) == Removed.exit_code, eve.tail()
    eve.start()
    assert eve.exit_code(START_S) == Removed.exit_code, eve.tail()
    assert "the host has banned this peer from the run" in eve.text()
    host.kill()
    host.start()
    eve.start()
    assert eve.exit_code(START_S) == Removed.exit_code, eve.tail()
    assert members(swarm, host)[gone]["note"] == "sends noise"
    last = ann.last_round()
    for member in (ann, bob):
        member.committed(after=last + 1)

    shoal(swarm, "allow", state, gone)
    eve.start()
    eve.committed(within_s=START_S + ROUNDS_S)

    keys = ("--identity", str(host.state / "identity"))
    here, live = records(swarm, state), records(swarm, host.invite, *keys)
    assert live[: len(here)] == here
    kinds = [one["kind"] for one in here if one["peer"] in (gone, peer) and one["kind"] not in ("joined", "left")]
    assert kinds == ["kicked", "banned", "allowed"]
    assert "sends noise" in shoal(swarm, "log", state, "--members")
    other = ("--identity", str(swarm.identity("guest")[0]))
    shoal(swarm, "log", host.invite, "--members", *other, code=NotAdmitted.exit_code)
    finish(host, [ann, bob, eve])


def test_a_banned_network_lets_nobody_in_under_a_new_identity(swarm: Swarm) -> None:
    host = swarm.host(run_toml())
    assert answer(swarm, host.invite, "mallory", FAR) == LET_IN
    peer = Identity.load_or_create(swarm.folder / "mallory").peer_id
    shoal(swarm, "ban", str(host.state), peer, "--network")
    assert "Removed: the host has banned this peer" in answer(swarm, host.invite, "mallory", NEAR)
    assert "Removed: the host has banned the network 127.9.8.0/24" in answer(swarm, host.invite, "", FAR)
    assert answer(swarm, host.invite, "", NEAR) == LET_IN
    host.kill()
    shoal(swarm, "ban", str(host.state), "a" * 16)
    host.start()
    assert "banned the network" in answer(swarm, host.invite, "", FAR)
    shoal(swarm, "allow", str(host.state), peer)
    assert answer(swarm, host.invite, "mallory", FAR) == LET_IN
    assert members(swarm, host)["a" * 16]["banned"]
    host.stop()
