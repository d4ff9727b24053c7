"""Pipelines of real processes: three stages over five peers train as one process does, whoever dies meanwhile."""

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.harness import HERE, KILLED, ROUNDS_S, START_S, Host, Member, Swarm, eventually
from tests.integration.plain_loop import plain_loop
from torch import Tensor
from typer.testing import CliRunner

from shoal.peer.checkpoints.checkpoint import read_checkpoint
from shoal.peer.checkpoints.manifest import Manifest
from shoal.peer.checkpoints.remote.copies import find_copies
from shoal.peer.checkpoints.remote.restore import CheckpointRestorer
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS, checkpoint_folders
from shoal.peer.cli.main import app
from shoal.peer.exports.about import ExportOptions, ModelOrigin
from shoal.peer.exports.model_file import read_model
from shoal.peer.folders import stage_folder
from shoal.peer.offline.export import export_from_run, export_model, gather_checkpoint, gather_from_run
from shoal.peer.offline.replay import replay
from shoal.peer.offline.verify import Verified, find_checkpoints, verify_checkpoints
from shoal.swarm.coordinator.events import InScope, MemberLost, RoundPlanned, VerdictGiven
from shoal.swarm.errors import RunEnded
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.invite import Invite
from shoal.swarm.protocol.run_file import parse_run_file
from shoal.swarm.sample_ranges import from_wire

pytestmark = pytest.mark.integration

STAGES = 3
ROUNDS = 5
BATCH = 48
CONTEXT = 16
TOML = f"""
algorithm = "virtual_batch"
averaging.codec = "float32"
[run]
name = "reef"
seed = 1
rounds = {ROUNDS}
[recipe]
name = "gpt"
[recipe.settings]
layers = 4
heads = 2
width = 64
context = {CONTEXT}
tie_embedding = false
[data]
source = "stdlib"
[pipeline]
stages = {STAGES}
micro_batch = 2
activations = "float32"
max_in_flight = 4
[inner]
precision = "float32"
[outer]
optimizer = "adamw"
lr = 2e-3
weight_decay = 0.01
[round]
tokens = {BATCH * CONTEXT}
max_s = 120
patience_s = 4
"""


BLOCK_BYTES = 213_504
"""Size of a block's parameters in float32."""
MEMORY = f"{2.1 * BLOCK_BYTES * account_of(parse_run_file(TOML)).demand().shared + 520_000:.0f}"
"""Enough for two blocks of four, if they are computed again for the way back, and for nothing else."""


def launcher(step: str = "never", times: int = 1, armed: Path | None = None) -> Sequence[str]:
    return (sys.executable, str(HERE / "stage_member.py"), step, str(times), str(armed or "/nonexistent"))


def join(swarm: Swarm, host: Host, label: str, *doom: object, extra: Sequence[str] = ()) -> Member:
    extra = ("--max-memory", MEMORY, *extra)
    return swarm.member(host.invite, label, launcher(*doom), extra=extra)  # type: ignore[arg-type]


def span(member: Member) -> tuple[int, int]:
    """Return the first and the last stage that the member holds."""
    event = member.event("span", START_S + ROUNDS_S)
    return event["first"], event["last"]


def plain_vector(rounds: int = ROUNDS, toml: str = TOML) -> Tensor:
    """Return the parameters that one process has after so many rounds, one after the other."""
    return torch.cat([one.reshape(-1) for one in plain_loop(toml, rounds, BATCH).values()])


def trained(members: Sequence[Member], rounds: int = ROUNDS) -> Tensor:
    """Return the stages' parameters from their newest checkpoints, one after the other; all replicas' have to agree."""
    stages = []
    for stage in range(STAGES):
        found = [
            read_checkpoint(FolderSource(checkpoint_folders(place)[-1]))
            for member in members
            for place in member.folder.glob(f"state/*/*/{stage_folder(Path(), stage)}/{CHECKPOINTS}")
            if checkpoint_folders(place)
        ]
        last = [one.state for one in found if one.manifest.round == max(other.manifest.round for other in found)]
        assert last[0].version == rounds
        assert {one.digest for one in last} == {last[0].digest}, "parity"
        stages.append(last[0].anchor)
    return torch.cat(stages)


def check_samples(host: Host, committed: int = ROUNDS) -> None:
    """Check that each round is committed or aborted in all stages, and that each committed sample counts once in
    each stage."""
    plans: dict[int, RoundPlanned] = {}
    ends: dict[int, list[bool]] = {}
    for event in host.journal_events():
        if not isinstance(event, InScope):
            continue
        if isinstance(event.event, RoundPlanned):
            plans[event.scope] = event.event
        if isinstance(event.event, VerdictGiven):
            verdict = event.event.verdict
            ends.setdefault(verdict.round, []).append(verdict.committed)
            if verdict.committed:
                ranges = [one for wire in plans[event.scope].ranges for one in from_wire(wire)]
                counted = sorted(sample for start, stop in ranges for sample in range(start, stop))
                first = (verdict.anchor_version - 1) * BATCH
                assert counted == list(range(first, first + BATCH)), f"stage {event.scope - 1}"
    assert all(len(end) == STAGES and len(set(end)) == 1 for end in ends.values()), ends
    assert sum(end[0] for end in ends.values()) == committed


def check(host: Host, members: Sequence[Member], rounds: int = ROUNDS, toml: str = TOML) -> None:
    """Wait for the members' end after so many rounds, and check samples and parameters."""
    for member in members:
        assert member.exit_code(START_S + ROUNDS_S) == 0, member.tail()
        left = member.event("left", START_S)
        assert (left["anchor_version"], {one["anchor_version"] for one in left["held"]}) == (rounds, {rounds})
    host.stop()
    check_samples(host, rounds)
    ours, plain = trained(members, rounds), plain_vector(rounds, toml)
    assert ours.shape == plain.shape
    assert torch.linalg.vector_norm(ours - plain) < 1e-5 * torch.linalg.vector_norm(plain)


def check_live(host: Host, members: Sequence[Member], folder: Path) -> None:
    """Check what guests of the live run get: all stages of one version, as their replicas had it."""
    invite = Invite.parse(host.invite)

    async def look() -> tuple[Manifest, ModelOrigin, ModelOrigin]:
        return await asyncio.gather(
            gather_from_run(invite, folder / "live", Identity.generate()),
            export_from_run(invite, folder / "live.safetensors"),
            export_from_run(invite, folder / "rounded.safetensors", ExportOptions(dtype=torch.bfloat16)),
        )

    made, *origins = asyncio.run(look())
    versions = [origin.version for origin in origins]
    shows(host.invite)
    assert made.parts is not None
    assert min(versions) > 0
    digests = [part.state_digest for part in made.parts]
    for member in members:
        first, last = span(member)
        for stage in range(first, last + 1):
            said = member.event("committed", ROUNDS_S, stage=stage, anchor_version=made.anchor_version)
            assert said["digest"] == digests[stage]
    rounded = load_file(folder / "rounded.safetensors")
    assert {one.dtype for one in rounded.values()} == {torch.bfloat16}
    if versions[0] == made.anchor_version:
        anchor = read_checkpoint(FolderSource(folder / "live")).state.anchor
        assert torch.equal(values(folder / "live.safetensors"), anchor)
    if versions[0] == versions[1]:
        whole = values(folder / "live.safetensors")
        assert torch.equal(values(folder / "rounded.safetensors"), whole.bfloat16().float())


def shows(place: str) -> None:
    """Check that ``shoal log`` reads a whole history from that place."""
    shown = CliRunner().invoke(app, ["log", place, "--round", "0"])
    assert shown.exit_code == 0, shown.output


def check_replay(members: Sequence[Member]) -> None:
    """Check that peers can replay the rounds of their stages that they have kept."""
    held: set[int | None] = set()
    for member in members:
        (peer,) = member.folder.glob("state/*/*")
        rows = list(replay(peer))
        assert all(row.equal is not False for row in rows)
        assert any(row.equal for row in rows)
        held |= {row.stage for row in rows}
    assert held == set(range(STAGES))


def check_kept(members: Sequence[Member], folder: Path) -> None:
    """Check the models and checkpoints that the peers' folders give together after the run's end."""
    whole = trained(members)
    check_replay(members)
    for kept in ("checkpoints", "rounds"):
        assert export_model(folder, folder / "kept.safetensors").version == ROUNDS
        assert torch.equal(values(folder / "kept.safetensors"), whole), kept
        for newest in folder.glob(f"*/state/*/*/{stage_folder(Path(), 1)}/{CHECKPOINTS}/round-{ROUNDS - 1:08}"):
            newest.rename(folder / f"{newest.parents[2].name}-newest")  # from now on the stage's rounds are made again
    generated = CliRunner().invoke(app, ["generate", str(folder / "kept.safetensors"), "--tokens", "3"])
    assert generated.exit_code == 0, generated.output
    gather_checkpoint(folder, folder / "whole", Identity.generate())
    assert torch.equal(read_checkpoint(FolderSource(folder / "whole")).state.anchor, whole)
    verified = verify_checkpoints(find_checkpoints(folder))
    assert len(verified) > STAGES
    assert all(isinstance(one, Verified) and one.first_round == 0 for one in verified), verified


def values(model: Path) -> Tensor:
    """Return the values of an exported model, parameter by parameter."""
    return torch.cat([one.detach().reshape(-1) for one in read_model(model).parameters()])


def check_copied(folder: Path, whole: Tensor) -> None:
    """Check what another machine restores from the copies."""
    remote, me = RemoteStore.open(f"file://{folder / 'copies'}"), Identity.generate()
    found = CheckpointRestorer(remote, folder / "restored", me, print).restore(find_copies(remote))
    assert len(found) == STAGES
    assert export_model(folder / "restored", folder / "restored.safetensors").version == ROUNDS
    assert torch.equal(values(folder / "restored.safetensors"), whole)


def test_three_stages_over_five_peers_equal_one_process(swarm: Swarm, tmp_path_factory: pytest.TempPathFactory) -> None:
    host = swarm.host(TOML)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    copies = ("--copy-to", f"file://{elsewhere / 'copies'}")
    members = [join(swarm, host, f"peer{number}", extra=copies) for number in range(5)]
    spans = [span(member) for member in members]
    assert {first for first, _ in spans} == set(range(STAGES))
    assert all(first == last for first, last in spans), "nobody can hold more"
    members[0].event("committed", ROUNDS_S)
    check_live(host, members, swarm.folder)
    check(host, members)
    check_copied(elsewhere, trained(members))
    check_kept(members, swarm.folder)
    for place in (host.state, members[0].folder, swarm.folder / "live"):
        shows(str(place))


def middle_of_five(swarm: Swarm, host: Host, step: str, times: int) -> tuple[Member, list[Member], Path]:
    """Return a replica of the middle stage, the other members, and the file that arms the replica's death."""
    armed = {label: swarm.folder / f"armed-{label}" for label in "abcde"}
    members = {label: join(swarm, host, label, step, times, armed[label]) for label in armed}
    spans = {label: span(member) for label, member in members.items()}
    middle = [label for label, held in spans.items() if held == (1, 1)]
    assert len(middle) >= 2, spans
    return members.pop(middle[0]), list(members.values()), armed[middle[0]]


@pytest.mark.parametrize(("step", "times"), [("backward", 2), ("ready", 1)])
def test_a_replica_of_the_middle_stage_is_killed(swarm: Swarm, step: str, times: int) -> None:
    """Only real sockets show how the death of a process arrives; ``tests/chaos`` has all other steps and faults."""
    host = swarm.host(TOML)
    victim, others, armed = middle_of_five(swarm, host, step, times)
    armed.touch()
    assert victim.exit_code(START_S + ROUNDS_S) == KILLED, victim.tail()
    check(host, others)


def test_a_replica_of_the_middle_stage_is_stopped_and_continued(swarm: Swarm) -> None:
    """A stopped process keeps its sockets open, which no network in memory does."""
    host = swarm.host(TOML)
    victim, others, armed = middle_of_five(swarm, host, "forward", 2)
    peer = victim.peer
    armed.write_text("SIGSTOP")
    silent = {"peer": peer, "reason": "silent"}.items()
    eventually(
        "it is missed",
        lambda: any(isinstance(one, MemberLost) and silent <= vars(one).items() for one in host.journal_events()),
        START_S + ROUNDS_S,
    )
    armed.unlink()
    victim.send(signal.SIGCONT)
    assert victim.exit_code(START_S + ROUNDS_S) in (0, RunEnded.exit_code), victim.tail()
    check(host, others)
