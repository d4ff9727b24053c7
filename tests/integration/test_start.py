"""Real processes start from another run's checkpoint: its files are read on one machine's disk, sent over sealed links,
and served by a peer that is in none of the stages that need them, which no test in memory has all at once."""

import asyncio
from pathlib import Path

import pytest
import torch
from tests.integration.harness import ROUNDS_S, START_S, Member, Swarm
from tests.integration.test_pipeline import BATCH, CONTEXT, MEMORY, ROUNDS, STAGES, TOML, plain_vector, trained, values

from shoal.peer.checkpoints.checkpoint import Checkpoint, read_checkpoint
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.exports.about import ExportOptions
from shoal.peer.offline.export import export_from_run, gather_from_run
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import parse_run_file

pytestmark = pytest.mark.integration

HALF = 2
SHORT = TOML.replace(f"rounds = {ROUNDS}", f"rounds = {HALF}")
PIPELINE = SHORT[SHORT.index("[pipeline]") : SHORT.index("[inner]")]


def newest(folder: Path) -> Checkpoint:
    """Return the newest checkpoint below that folder."""
    return read_checkpoint(FolderSource(max(folder.glob("**/round-*"), key=lambda place: place.name)))


def a_whole_run(swarm: Swarm) -> Member:
    """Run one peer of a plain run to its end, and return it."""
    host = swarm.host(SHORT.replace(PIPELINE, "").replace("reef", "whole"), "host-of-the-whole")
    peer = swarm.member(host.invite, "whole")
    assert peer.exit_code(START_S + ROUNDS_S) == 0, peer.tail()
    host.stop()
    return peer


def test_a_pipeline_goes_on_where_a_whole_model_was(swarm: Swarm) -> None:
    first = a_whole_run(swarm)
    before = newest(first.folder / "state")
    assert before.state.version == HALF

    files = ("--from", str(first.folder / "state"))
    host = swarm.host(SHORT, extra=files)
    host.says("round 1 of whole-")
    members = [swarm.member(host.invite, f"peer{number}", extra=("--max-memory", MEMORY)) for number in range(2)]
    members.append(swarm.member(host.invite, "brings", extra=("--max-memory", MEMORY, *files)))
    for member in members:
        assert member.exit_code(START_S + ROUNDS_S) == 0, member.tail()
    assert len({member.event("span")["first"] for member in members}) == STAGES, "each stage is with another peer"
    host.stop()
    run = parse_run_file((host.state / "run.toml").read_text())
    assert run.start is not None
    assert run.start.state == before.state.digest.hex()
    ours, plain = trained(members, HALF), plain_vector(2 * HALF)
    assert torch.linalg.vector_norm(ours - plain) < 1e-5 * torch.linalg.vector_norm(plain)


def test_what_a_run_starts_from_can_be_exported_before_its_first_round_has_ended(swarm: Swarm) -> None:
    first = a_whole_run(swarm)
    before = newest(first.folder / "state")
    files = ("--from", str(first.folder / "state"))
    endless = SHORT.replace(f"tokens = {BATCH * CONTEXT}", "tokens = 1600000").replace("max_s = 120", "max_s = 3600")
    kinds = (("whole", endless.replace(PIPELINE, ""), torch.float32), ("stages", endless, torch.bfloat16))
    for name, toml, dtype in kinds:
        host = swarm.host(toml.replace("reef", f"next-{name}"), f"host-{name}", extra=files)
        invite, out = Invite.parse(host.invite), swarm.folder / f"{name}.safetensors"
        if name == "whole":
            with pytest.raises(StateFileError, match=f"of round {HALF - 1} of whole-.*: export that"):
                asyncio.run(export_from_run(invite, out))
        member = swarm.member(host.invite, f"brings-{name}", extra=files)
        member.event("synced", START_S + ROUNDS_S, **({"stage": STAGES - 1} if name == "stages" else {}))
        if name == "stages":
            with pytest.raises(StateFileError, match="no round of the run has been committed yet"):
                asyncio.run(gather_from_run(invite, swarm.folder / "checkpoint", Identity.generate()))
        asyncio.run(export_from_run(invite, out, ExportOptions(dtype=dtype)))
        assert torch.equal(values(out), before.state.anchor.to(dtype).float())
        member.leave()
        host.stop()
