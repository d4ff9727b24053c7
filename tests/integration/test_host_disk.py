"""The host is killed at every step of writing, compacting and backing up; its machine is lost; an old copy starts."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.integration.audit import Parity
from tests.integration.harness import HERE, KILLED, ROUNDS_S, START_S, Host, Member, Swarm, run_toml
from tests.integration.test_second_address import free_ports

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.coordinator.local_journal import JOURNAL, VERDICTS, JournalFiles
from shoal.swarm.errors import StorageError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.run_file import load_run_file
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis

pytestmark = pytest.mark.integration

DOOMED_DISK = (sys.executable, str(HERE / "doomed_disk.py"))


def check_verdicts(folder: Path, host: Host) -> list[VerdictGiven]:
    """Check that there is one signed verdict a round, in an unbroken chain. Returns them."""
    _, run = load_run_file(host.run_file)
    files = JournalFiles(folder)
    verdicts = files.verdicts()
    files.close()
    key = Identity.load_or_create(folder / "identity").public_key
    chain = genesis(run.hash)
    for number, event in enumerate(verdicts):
        assert event.verdict.round == number
        assert event.verdict.previous_chain == chain
        check_verdict(event.verdict, key)
        chain = event.verdict.chain
    return verdicts


def end(host: Host, members: list[Member], backup: Path | None = None) -> list[VerdictGiven]:
    """Stop all, and check the journal here and in the backup. Returns the verdicts."""
    for member in members:
        member.interrupt()
    for member in members:
        member.has_left()
    host.stop()
    verdicts = check_verdicts(host.state, host)
    if backup is not None:
        for name in (JOURNAL, VERDICTS):
            assert (backup / name).read_bytes() == (host.state / name).read_bytes()
    parity = Parity()
    for member in members:
        parity.take_events(member.all_events())
    parity.take_journal_events(verdicts)
    parity.check()
    return verdicts


STEPS = {
    "writing": [
        ("amid", "append", f"state/reef/{JOURNAL}"),
        ("before", "append", f"backup/reef/{JOURNAL}"),
        ("amid", "append", f"backup/reef/{JOURNAL}"),
        ("after", "append", f"backup/reef/{JOURNAL}"),
    ],
    "compacting": [
        ("amid", "append", f"state/reef/{VERDICTS}"),
        ("after", "append", f"state/reef/{VERDICTS}"),
        ("amid", "append", f"state/reef/{JOURNAL}.new"),
        ("before", "replace", f"state/reef/{JOURNAL}"),
        ("after", "replace", f"state/reef/{JOURNAL}"),
    ],
    "backing up": [
        ("amid", "append", f"backup/reef/{JOURNAL}.new"),
        ("amid", "append", f"backup/reef/{VERDICTS}"),
        ("before", "replace", f"backup/reef/{JOURNAL}"),
        ("after", "replace", f"backup/reef/{JOURNAL}"),
    ],
}


@pytest.mark.parametrize("what", STEPS)
def test_the_host_is_killed_at_every_step(swarm: Swarm, what: str) -> None:
    backup = swarm.folder / "backup"
    first, *others = STEPS[what]
    host = swarm.host(run_toml(), launcher=(*DOOMED_DISK, *first, "1"), extra=("--backup", str(backup)))
    invite, arguments = host.invite, host.command[host.command.index("host") :]
    members = swarm.members(invite, "a", "b")
    pids = [member.pid for member in members]
    for step in [*others, None]:
        assert host.exit_code(START_S + ROUNDS_S) == KILLED, host.tail()
        told = max(member.last_round() for member in members)
        assert len(check_verdicts(host.state, host)) > told, "what was told is on the disk"
        assert len(check_verdicts(backup / "reef", host)) > told, "and in the backup"
        host.command = [*DOOMED_DISK, *(*step, str(told + 3)), *arguments] if step else [*DOOMED_DISK, *arguments]
        host.start()
        assert host.invite == invite
    for member in members:
        member.committed(after=told + 1)
    assert [member.pid for member in members] == pids
    end(host, members, backup / "reef")
    for member in members:
        assert member.events("resync") == [], "no restart cost anybody its work"


def test_the_hosts_machine_is_lost_and_another_goes_on_from_the_backup(swarm: Swarm) -> None:
    here, there = free_ports()
    backup = swarm.folder / "elsewhere" / "state"
    extra = ("--advertise", f"127.0.0.1:{here},127.0.0.1:{there}")
    host = swarm.host(
        run_toml(), bind=f"127.0.0.1:{here}", launcher=DOOMED_DISK, extra=(*extra, "--backup", str(backup))
    )
    members = swarm.members(host.invite, "a", "b")
    pids = [member.pid for member in members]
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    host.kill()
    told = max(member.last_round() for member in members)
    shutil.rmtree(host.state.parent.parent)
    key = backup / "reef" / "identity"
    assert key.stat().st_mode & 0o777 == 0o600
    moved = swarm.host(
        (backup / "reef" / "run.toml").read_text(), label="elsewhere", bind=f"127.0.0.1:{there}", extra=extra
    )
    assert moved.invite == (backup / "reef" / "invite.txt").read_text().strip() == host.invite
    for member in members:
        member.committed(after=told + 1)
    assert [member.pid for member in members] == pids
    verdicts = end(moved, members)
    assert verdicts[told + 1].verdict.committed, "the round that was open ended there"
    for member in members:
        assert member.events("resync") == [], "the move cost nobody its work"


@pytest.mark.parametrize("anew", [False, True])
def test_an_outdated_copy_is_stopped_by_the_members(swarm: Swarm, anew: bool) -> None:
    """Members recognise the old copy by what they remember or, if all were started anew, by their history files."""
    host = swarm.host(run_toml())
    members = swarm.members(host.invite, "a", "b")
    for member in members:
        member.committed(within_s=START_S + ROUNDS_S)
    host.stop()
    ended = max(member.last_round() for member in members)
    older = swarm.folder / "older"
    shutil.copytree(host.state, older)
    host.start()
    for member in members:
        member.committed(after=ended + 2)
    host.kill()
    newest = swarm.folder / "newest"
    host.state.rename(newest)
    older.rename(host.state)
    for member in members if anew else ():
        member.kill()
    host.start()
    for member in members if anew else ():
        member.start()
    assert host.exit_code(ROUNDS_S) == StorageError.exit_code, host.tail()
    assert "outdated copy" in host.text()
    assert "--state BACKUP" in host.text()
    shutil.rmtree(host.state)
    newest.rename(host.state)
    host.start()
    told = max(member.last_round() for member in members)
    for member in members:
        member.committed(after=told + 1)
    end(host, members)
