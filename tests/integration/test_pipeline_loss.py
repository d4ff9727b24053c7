"""A pipeline that is lost on all its machines, the host's among them, goes on from the copies of its stages."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from tests.integration.harness import ROUNDS_S, SHOAL, START_S, Host, Member, Swarm, eventually
from tests.integration.test_pipeline import MEMORY, STAGES, TOML, check_samples, launcher, plain_vector, trained
from tests.integration.test_pipeline import ROUNDS as FEW

from shoal.peer.checkpoints.manifest import MANIFEST, read_manifest
from shoal.peer.checkpoints.remote.copies import RemoteCopy, find_copies, in_step
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.source import FolderSource

pytestmark = pytest.mark.integration

ROUNDS = 14
LONG = TOML.replace(f"rounds = {FEW}", f"rounds = {ROUNDS}").replace("patience_s = 4", "patience_s = 2")
LOST_STAGE = 1


def finished(copies: Path) -> list[RemoteCopy]:
    return [copy for copy in find_copies(RemoteStore.open(f"file://{copies}")) if copy.last is not None]


def shared_rounds(copies: Path) -> list[int]:
    """Return the rounds of which all stages have a copy, newest first."""
    found = finished(copies)
    return list(in_step(found)) if len({copy.stage for copy in found}) == STAGES else []


def stand_still(members: list[Member], copies: Path) -> bool:
    """Stop all members once two rounds of all stages are copied: running ones would remove the older copies."""
    if len(shared_rounds(copies)) < 2:
        return False
    for member in members:
        member.send(signal.SIGSTOP)
    if len(shared_rounds(copies)) > 1:
        return True
    for member in members:
        member.send(signal.SIGCONT)
    return False


def stop_short(copies: Path, last: int) -> None:
    """Make the copies look as if one stage's machine had been killed in its next copy: the manifest comes last."""
    for copy in finished(copies):
        if copy.stage == LOST_STAGE and copy.round > last:
            (copies / copy.path / MANIFEST).unlink()


@pytest.mark.parametrize("identities", ["kept", "lost"])
def test_lost_everywhere_and_restored_from_copies_of_the_stages(swarm: Swarm, identities: str) -> None:
    """A peer with its identity restores its own stage, and sees of the others what copies there are; one with a new
    identity restores all. Of one stage the newest copy is not whole."""
    copies, backup = swarm.folder / "copies", swarm.folder / "backup"
    copies.mkdir()
    url = f"file://{copies}"
    options = ("--max-memory", MEMORY, "--copy-to", url, "--copy-every", "2")
    host = swarm.host(LONG, extra=("--backup", str(backup)))
    members = [swarm.member(host.invite, label, launcher(), extra=options) for label in "abc"]
    eventually("all stand still with two rounds copied", lambda: stand_still(members, copies), START_S + ROUNDS_S)
    for process in (host, *members):
        process.kill()
    _, chosen, *_ = shared_rounds(copies)
    stop_short(copies, chosen)
    for member in members:
        if identities == "kept":
            (swarm.folder / f"new-{member.label}").mkdir()
            shutil.copy(member.folder / "identity", swarm.folder / f"new-{member.label}")
        shutil.rmtree(member.folder)
    shutil.rmtree(host.run_file.parent)

    (swarm.folder / "elsewhere").mkdir()
    backup.rename(swarm.folder / "elsewhere" / "state")
    host = swarm.host((swarm.folder / "elsewhere" / "state" / "reef" / "run.toml").read_text(), "elsewhere")
    places = {label: swarm.folder / f"new-{label}" for label in "abc"}
    restoring = []
    for label, place in places.items():
        where = ("--to", str(place / "state"), "--identity", str(place / "identity"))
        restoring.append(swarm.command(f"restoring-{label}", *SHOAL, "restore", url, *where))
    for command in restoring:
        assert command.exit_code(START_S) == 0, command.tail()
    told = [f"round {chosen} is the newest of which all stages have a copy" in one.text() for one in restoring]
    assert sum(told) == (STAGES - 1 if identities == "kept" else STAGES), "who needs only the lost stage has its newest"
    versions = set()
    for place in places.values():
        brought = list(place.glob("state/*/*/stage-*/checkpoints/*"))
        assert [found.name for found in brought] == [f"round-{chosen:08}"] * (1 if identities == "kept" else STAGES)
        versions |= {read_manifest(FolderSource(found)).anchor_version for found in brought}
    (version,) = versions

    others = [swarm.member(host.invite, place.name, launcher(), extra=options) for place in places.values()]
    for member in others:
        assert member.exit_code(START_S + ROUNDS_S) == 0, member.tail()
    host.stop()
    check_goes_on(host, others, version)


def check_goes_on(host: Host, members: list[Member], version: int) -> None:
    """Check that the run went back once, in all stages to that version, and then trained as one process would."""
    returns = host.events("went_back")
    assert [one["stage"] for one in returns] == list(range(STAGES))
    assert {one["anchor_version"] for one in returns} == {version}
    for member in members:
        assert member.events("synced")[0]["anchor_version"] == version
    check_samples(host, ROUNDS + returns[0]["from_version"] - version)
    ours, plain = trained(members, ROUNDS), plain_vector(ROUNDS)
    assert torch.linalg.vector_norm(ours - plain) < 1e-5 * torch.linalg.vector_norm(plain)
