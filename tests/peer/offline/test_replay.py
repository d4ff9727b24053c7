"""``shoal replay`` on the folders of simulated runs: it gives every state again, or names what is wrong."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.memory_coordinator import identity
from tests.fakes.stateful import StatefulMember, play_rounds, stateful_swarm
from tests.fakes.swarm import run_toml
from tests.fakes.virtual_clock import run_virtual
from torch import Tensor

from shoal.peer.checkpoints.checkpoint import CheckpointContents, read_checkpoint, read_verdicts
from shoal.peer.checkpoints.manifest import CheckpointAbout, StageAbout
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.offline.replay import kept_folders, replay
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.outer_optimizer import Nesterov
from shoal.swarm.errors import SealedForOthers, StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import TensorSpec
from shoal.swarm.protocol.verdict_chain import chain_hash, signed_bytes

ELEMENTS = 2 * 4096 + 17
SAMPLES = 10
ROUNDS = 5


def contribution(seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(seed))


def save(member: StatefulMember, state: AnchorState, verdict: Verdict, verdicts: tuple[Verdict, ...] = ()) -> None:
    """Write a checkpoint of the state that the verdict made."""
    run = member.client.run_file
    about = CheckpointAbout(
        run=run.run.name,
        run_hash=run.hash.hex(),
        run_toml=member.client.run_toml,
        recipe=None,
        layout=(TensorSpec(name="w", shape=(ELEMENTS,)),),
        outer_vectors=member.outer.slots,
        round=verdict.round,
        anchor_version=state.version,
        state_digest=state.digest.hex(),
        chain=verdict.chain.hex(),
        tokens=verdict.tokens_total,
        coordinator_key=member.client.coordinator_key.hex(),
    )
    folder = member.keeper.records.folder.parent / "checkpoints"
    store = CheckpointStore(folder, run.hash, identity(1), Retention())
    store.write(CheckpointContents(about, state, None, verdicts or (verdict,)))


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A peer's folder after five rounds, with checkpoints of rounds 0 and 2, and the digests of all its states."""
    folder = tmp_path_factory.mktemp("run")
    digests: list[str] = []

    async def main() -> None:
        async with stateful_swarm(folder, 2, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (_, members):
            one = members[0]
            one.keeper.needed_since = lambda: -1
            await play_rounds(members, ROUNDS, SAMPLES, contribution)
            verdicts = tuple(await one.verdicts_from(0))
            save(one, one.states[1], verdicts[0])
            save(one, one.states[3], verdicts[2], verdicts[:3])
            digests.extend(state.digest.hex() for state in one.states)

    run_virtual(main())
    return next(folder.glob("*/checkpoints")).parent, digests


@pytest.fixture
def kept(played: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A copy of that folder, to be damaged."""
    subprocess.run(["cp", "-r", str(played[0]), str(tmp_path / "peer")], check=True)
    return tmp_path / "peer"


def record(folder: Path, number: int) -> Path:
    return folder / "rounds" / f"{number:08}.safetensors"


def test_every_round_since_the_oldest_checkpoint(played: tuple[Path, list[str]]) -> None:
    folder, digests = played
    rows = list(replay(folder))
    assert [(row.round, row.anchor_version, row.digest.hex()) for row in rows] == [
        (number, number + 1, digests[number + 1]) for number in range(1, ROUNDS)
    ]
    assert [row.equal for row in rows] == [True, True, True, None], "nothing here knows of a round after the last"
    assert [row.vouched_by for row in rows][:3] == ["plan of round 2", "plan of round 3", "plan of round 4"]


def test_undone_rounds_are_not_missing(tmp_path: Path) -> None:
    """The run went back with its last verdict, as behind a wrong mean."""

    async def main() -> None:
        async with stateful_swarm(tmp_path, 2, run_toml(2 * SAMPLES, "int8"), ELEMENTS) as (swarm, members):
            one = members[0]
            one.keeper.needed_since = lambda: -1
            await play_rounds(members, 4, SAMPLES, contribution)
            verdicts = tuple(await one.verdicts_from(0))
            save(one, one.states[1], verdicts[0])
            nothing: dict[str, Any] = {"committed": False, "plan": None, "digests": (), "makers": (), "loss": None}
            back = verdicts[-1].model_copy(
                update={**nothing, "round": 4, "anchor_version": 2, "previous_chain": verdicts[-1].chain}
            )
            chain = chain_hash(back)
            signature = swarm.coordinator.identity.sign(signed_bytes(chain))
            back = back.model_copy(update={"chain": chain, "signature": signature})
            save(one, one.states[2], back, (*verdicts, back))

    run_virtual(main())
    folder = next(tmp_path.glob("*/checkpoints")).parent
    assert [(row.round, row.equal) for row in replay(folder)] == [(1, True)]


@pytest.mark.parametrize(("number", "rounds"), [(1, [1]), (2, [1, 2]), (3, [3]), (4, [3, 4])])
def test_up_to_one_round_from_the_newest_checkpoint_before_it(
    played: tuple[Path, list[str]], number: int, rounds: list[int]
) -> None:
    rows = list(replay(played[0], number))
    assert [row.round for row in rows] == rounds
    assert rows[-1].digest.hex() == played[1][number + 1]


@pytest.mark.parametrize("number", [0, 7])
def test_a_round_that_is_not_there(kept: Path, number: int) -> None:
    with pytest.raises(StateFileError, match=rf"{number:08}.safetensors: round {number} cannot .* is of round 0"):
        list(replay(kept, number))


def write_anew(kept: Path, readers: Sequence[bytes] | None = None, **changes: Any) -> None:
    """Write the same checkpoints with changed manifests, sealed for ``readers`` if there are any."""
    before = kept / "before"
    (kept / "checkpoints").rename(before)
    for place in sorted(before.iterdir()):
        made = read_checkpoint(FolderSource(place))
        fields = {name: getattr(made.manifest, name) for name in CheckpointAbout.model_fields} | changes
        verdicts = read_verdicts(FolderSource(place), made.manifest)
        run_hash = bytes.fromhex(made.manifest.run_hash)
        store = CheckpointStore(kept / "checkpoints", run_hash, identity(1), Retention(), readers)
        store.write(CheckpointContents(CheckpointAbout(**fields), made.state, None, verdicts))
    shutil.rmtree(before)


def test_each_stage_of_a_pipelines_peer(kept: Path, played: tuple[Path, list[str]]) -> None:
    peer = kept.parent / "run" / "a-peer"
    for number in (0, 2):
        subprocess.run(["mkdir", "-p", str(peer)], check=True)
        subprocess.run(["cp", "-r", str(kept), str(peer / f"stage-{number:05}")], check=True)
        write_anew(peer / f"stage-{number:05}", stage=StageAbout(number=number, stages=3))
    for folder in (peer, peer.parent):
        rows = list(replay(folder))
        assert [(row.stage, row.round) for row in rows] == [(stage, one) for stage in (0, 2) for one in range(1, 5)]
        assert [row.digest.hex() for row in rows] == 2 * played[1][2:]
    record(peer / "stage-00000", 3).unlink()
    done = shoal("replay", str(peer), "--json")
    assert done.returncode == StateFileError.exit_code
    assert "stage-00000/rounds/00000003.safetensors: the record of round 3 is missing" in " ".join(done.stderr.split())
    stages = [json.loads(line)["stage"] for line in done.stdout.splitlines()]
    assert stages == [0, 0, 2, 2, 2, 2], "the others all the same"
    (peer.parent / "another-peer" / "stage-00001" / "checkpoints").mkdir(parents=True)
    with pytest.raises(StateFileError, match=r"holds what 2 peers kept; give one's folder, such as .*/a-peer$"):
        kept_folders(peer.parent)


def test_sealed_checkpoints(kept: Path, played: tuple[Path, list[str]], tmp_path: Path) -> None:
    reader = Identity.load_or_create(tmp_path / "reader")
    write_anew(kept, [reader.public_key])
    assert [row.digest.hex() for row in replay(kept, None, reader)] == played[1][2:]
    for stranger in (None, identity(2)):
        with pytest.raises(SealedForOthers, match=r"round-00000000/sealed.json: is sealed"):
            list(replay(kept, None, stranger))
    done = shoal("replay", str(kept), "--json", "--identity", str(tmp_path / "reader"))
    assert [json.loads(line)["equal"] for line in done.stdout.splitlines()] == [True, True, True, None], done.stderr


def test_a_missing_record_is_named(kept: Path) -> None:
    record(kept, 3).unlink()
    for folder, number in ((kept, 4), (kept, None)):
        with pytest.raises(StateFileError, match=r"00000003.safetensors: the record of round 3 is missing; copy it"):
            list(replay(folder, number))


def test_a_missing_record_that_the_checkpoints_know_of(kept: Path) -> None:
    record(kept, 2).unlink()
    rows = replay(kept)
    assert next(rows).round == 1
    with pytest.raises(StateFileError, match=r"00000002.safetensors: the record of round 2 is missing"):
        next(rows)
    assert [row.round for row in replay(kept, 4)] == [3, 4]


def test_a_damaged_record_is_named(kept: Path) -> None:
    whole = bytearray(record(kept, 3).read_bytes())
    whole[-1] ^= 1
    record(kept, 3).write_bytes(whole)
    with pytest.raises(StateFileError, match=r"00000003.safetensors: field part-"):
        list(replay(kept, 4))


def test_a_machine_that_computes_otherwise_is_shown(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Nesterov.step_

    def another(self: Nesterov, values: Tensor, mean: Tensor, *rest: float) -> None:
        real(self, values, mean * (1 + 2**-20), *rest)

    monkeypatch.setattr(Nesterov, "step_", another)
    rows = replay(kept, 4)
    assert next(rows).equal is False
    with pytest.raises(StateFileError, match=r"round 3: .* give another state than the plan of round 4"):
        next(rows)


def test_folders(kept: Path, tmp_path: Path) -> None:
    assert kept_folders(kept) == kept_folders(tmp_path) == [kept]
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(StateFileError, match="holds what 2 peers kept"):
        kept_folders(tmp_path)
    with pytest.raises(StateFileError, match="no checkpoints here"):
        kept_folders(kept / "rounds")
    with pytest.raises(StateFileError, match="no checkpoint here"):
        list(replay(tmp_path / "other"))


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shoal.peer", *arguments], capture_output=True, text=True)


def test_the_command(kept: Path, played: tuple[Path, list[str]]) -> None:
    done = shoal("replay", str(kept))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("✓ equal") == 3
    assert played[1][-1][:12] in done.stdout
    record(kept, 4).unlink()
    record(kept, 3).write_bytes(b"nothing")
    done = shoal("replay", str(kept), "--round", "4", "--json")
    assert done.returncode == StateFileError.exit_code
    assert "00000004" in done.stderr
    done = shoal("replay", str(kept), "--round", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["round"], row["equal"], row["digest"]) for row in rows] == [
        (1, True, played[1][2]),
        (2, True, played[1][3]),
    ]
