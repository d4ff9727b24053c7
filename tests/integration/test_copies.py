"""A run that is lost on all its machines goes on from a sealed copy, whatever step of copying and restoring dies."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.integration.harness import CALM, HERE, KILLED, ROUNDS_S, SHOAL, START_S, Member, Process, Swarm, run_toml

from shoal.swarm.protocol.identity import Identity, key_text

pytestmark = pytest.mark.integration

DOOMED = (sys.executable, str(HERE / "doomed_copier.py"))


def again(process: Process, launcher: tuple[str, ...], command: str) -> None:
    """Start the process's command again with another launcher."""
    process.command = [*launcher, *process.command[process.command.index(command) :]]
    process.start()


def whole_copies(copies: Path, last: str) -> list[Path]:
    return sorted(path.parent for path in copies.rglob(last))


@pytest.mark.parametrize(
    ("copy_step", "copy_name", "restore_step", "restore_name"),
    [
        ("sending", "anchor", "reading", "sealed.json"),
        ("sent", "peer", "reading", "anchor"),
        ("sending", "sealed.json", "reading", "verdicts"),
        ("sent", "sealed.json", "installing", ""),
    ],
)
def test_lost_everywhere_and_restored_from_a_sealed_copy(
    swarm: Swarm, copy_step: str, copy_name: str, restore_step: str, restore_name: str
) -> None:
    reader = swarm.folder / "reader" / "identity"
    key = key_text(Identity.load_or_create(reader).public_key)
    toml = run_toml() + f'[checkpoints]\nsealed = true\nreaders = ["{key}"]\n'
    host = swarm.host(toml)
    copies = swarm.folder / "copies"
    extra = ("--copy-to", f"file://{copies}")
    member = swarm.member(host.invite, "member", launcher=(*DOOMED, copy_step, copy_name), extra=extra)
    assert member.exit_code(START_S + ROUNDS_S) == KILLED, member.tail()
    half = list(copies.rglob("round-*"))
    assert len(half) == 1
    again(member, CALM, "join")
    member.committed(within_s=START_S + ROUNDS_S)
    left = member.leave()
    assert half[0] in whole_copies(copies, "sealed.json") or not half[0].exists(), "finished, or not kept any more"
    host.kill()
    shutil.rmtree(member.folder)

    # Another machine, with the reader's identity; the host has its journal.
    state = swarm.folder / "runs"
    options = ("--to", str(state), "--identity", str(reader))
    command = (*DOOMED, restore_step, restore_name, "restore", f"file://{copies}", *options)
    restoring = swarm.command("restoring", *command)
    assert restoring.exit_code(START_S) == KILLED, restoring.tail()
    assert list(state.glob("*/*/checkpoints/round-*")) == []
    again(restoring, SHOAL, "restore")
    assert restoring.exit_code(START_S) == 0, restoring.tail()
    assert "goes on from it" in restoring.text()
    (restored,) = state.glob("*/*/checkpoints/round-*")
    assert (restored / "sealed.json").exists()

    host.start()
    other: Member = swarm.member(host.invite, "other", identity=reader, extra=("--state", str(state)))
    synced = other.event("synced", START_S + ROUNDS_S)
    assert (synced["anchor_version"], synced["digest"]) == (left["anchor_version"], left["digest"])
    other.committed()
    other.leave()
    host.stop()


def test_somebody_else_cannot_restore_it(swarm: Swarm) -> None:
    host = swarm.host(run_toml() + "[checkpoints]\nsealed = true\n")
    copies = swarm.folder / "copies"
    member = swarm.member(host.invite, "member", extra=("--copy-to", f"file://{copies}", "--copy-every", "1000"))
    member.committed(within_s=START_S + ROUNDS_S)
    member.leave()
    host.stop()
    assert len(whole_copies(copies, "sealed.json")) in (1, 2), "the first and the last"
    stranger = swarm.folder / "stranger"
    options = ("--to", str(stranger / "runs"), "--identity", str(stranger / "identity"))
    restoring = swarm.command("restoring", *SHOAL, "restore", f"file://{copies}", *options)
    assert restoring.exit_code(START_S) == 18, restoring.tail()
    assert "is none of them" in restoring.text()
    assert list(stranger.glob("runs/*/*/checkpoints")) == []
    listing = swarm.command("listing", *SHOAL, "restore", f"file://{copies}", "--list")
    assert listing.exit_code(START_S) == 0
    assert "sealed" in listing.text()
    missing = swarm.command("missing", *SHOAL, "join", host.invite, "--copy-to", "nosuch://somewhere")
    assert missing.exit_code(START_S) == 41
