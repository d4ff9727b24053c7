"""Whole models from the stages that peers kept: exported, joined, refused where they do not fit together."""

import errno
import io
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.peer.checkpoints.making import contents as plain_contents
from tests.peer.checkpoints.making import open_store, pack_history
from tests.peer.checkpoints.stages import IDENTITY, LAYOUTS, TOML, given, keep, stage_chains, stage_state, whole_values
from tests.swarm.coordinator.world import SIGNER
from torch import Tensor
from typer.testing import CliRunner

from shoal.peer.checkpoints.checkpoint import read_checkpoint
from shoal.peer.checkpoints.manifest import StageAbout, StagePart
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS
from shoal.peer.cli.main import app
from shoal.peer.cli.verify_view import verify_table
from shoal.peer.folders import stage_folder
from shoal.peer.history.history_file import HISTORY_FILE, HistoryOrigin
from shoal.peer.member.memberships import scope_of
from shoal.peer.offline.export import export_model, gather_checkpoint
from shoal.peer.offline.verify import Refused, Verified, find_checkpoints, verify_checkpoints
from shoal.peer.offline.whole_model import write_whole
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import StateFileError, StorageError, UserError
from shoal.swarm.protocol.identity import CurveKeys, Identity
from shoal.swarm.protocol.rounds import Verdict

NAMES = [spec.name for layout in LAYOUTS for spec in layout]


def keep_all(folder: Path, chains: Sequence[Sequence[Verdict]], number: int) -> list[Path]:
    """Keep each stage by a peer of its own."""
    return [keep(folder / f"peer{stage}", stage, chain, number) for stage, chain in enumerate(chains)]


def exported(folder: Path, out: Path) -> tuple[int, Tensor]:
    """Version and values of the exported model, in the layout's order."""
    version = export_model(folder, out / "model.safetensors").version
    tensors = load_file(out / "model.safetensors")
    assert sorted(tensors) == sorted(NAMES)
    return version, torch.cat([tensors[name].reshape(-1) for name in NAMES])


def history(peer: Path, stage: int, chain: Sequence[Verdict]) -> None:
    owner = HistoryOrigin(run_toml=TOML, coordinator=SIGNER.certify(CurveKeys.fresh()), scope=scope_of(stage))
    (stage_folder(peer, stage) / HISTORY_FILE).write_bytes(pack_history(owner, chain))


def reason(folder: Path) -> str:
    (one,) = verify_checkpoints(find_checkpoints(folder))
    assert isinstance(one, Refused), one
    return one.reason


def test_stages_of_several_peers_are_one_model(tmp_path: Path) -> None:
    chains = stage_chains(3)
    keep_all(tmp_path / "run", chains, 1)
    keep_all(tmp_path / "run", chains, 2)
    version, values = exported(tmp_path / "run", tmp_path)
    assert version == 3
    assert torch.equal(values, whole_values(3)[0])
    gather_checkpoint(tmp_path / "run", tmp_path / "whole", IDENTITY)
    assert torch.equal(read_checkpoint(FolderSource(tmp_path / "whole")).state.values, whole_values(3))
    assert torch.equal(exported(tmp_path / "whole", tmp_path)[1], values), "it is a checkpoint as any other"


def test_the_newest_version_of_which_all_stages_are_there(tmp_path: Path) -> None:
    chains = stage_chains(4)
    for stage, rounds in enumerate(([1, 2, 3], [0, 1, 2], [1, 3])):
        for number in rounds:
            keep(tmp_path / "run" / f"peer{stage}", stage, chains[stage], number)
    version, values = exported(tmp_path / "run", tmp_path)
    assert version == 2
    assert torch.equal(values, whole_values(2)[0])


def test_whole_models_are_found_whatever_their_folders_are_called(tmp_path: Path) -> None:
    chains = stage_chains(3)
    keep_all(tmp_path / "peers", chains, 2)
    parent = tmp_path / "parent"
    gather_checkpoint(tmp_path / "peers", parent / "whole", IDENTITY)
    (one,) = verify_checkpoints(find_checkpoints(parent))
    assert isinstance(one, Verified)
    assert one.folder == parent / "whole"
    assert exported(parent, tmp_path)[0] == 3
    keep_all(parent / "reef-12345678", chains, 1)
    assert len(verify_checkpoints(find_checkpoints(parent))) == 4
    assert exported(parent, tmp_path)[0] == 3, "the newest"


def test_nothing_of_another_history_is_exported_unless_it_is_named(tmp_path: Path) -> None:
    keep_all(tmp_path / "peers", stage_chains(3), 2)
    aside = tmp_path / "run" / "peer" / CHECKPOINTS / "other-round-00000002-00"
    gather_checkpoint(tmp_path / "peers", aside, IDENTITY)
    with pytest.raises(StateFileError, match="no checkpoint here"):
        exported(tmp_path / "run", tmp_path)
    assert exported(aside, tmp_path)[0] == 3
    aside.rename(aside.with_name(".new-round-00000002"))
    with pytest.raises(StateFileError, match="no checkpoint here"):
        find_checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "said"), [("none", "there is no such folder"), ("empty", "or one with folders of several peers in it")]
)
def test_where_there_is_none_it_is_said_what_to_name(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    for command in (["verify", str(tmp_path / name)], ["export", "--run", str(tmp_path / name)]):
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, StateFileError)
        assert said in str(done.exception)


def test_a_stage_that_no_peer_kept_is_named(tmp_path: Path) -> None:
    chains = stage_chains(3)
    keep(tmp_path / "run", 0, chains[0], 1)
    keep(tmp_path / "run", 0, chains[0], 2)
    keep(tmp_path / "run", 2, chains[2], 0)
    with pytest.raises(StateFileError, match=r"all 3 stages are here \(stage 0: 2, 3; stage 1: missing; stage 2: 1\)"):
        exported(tmp_path / "run", tmp_path)
    with pytest.raises(StateFileError, match="stage 1: missing"):
        gather_checkpoint(tmp_path / "run", tmp_path / "whole", IDENTITY)
    assert not (tmp_path / "whole").exists()


def test_the_last_stage_cannot_be_left_out_by_whoever_says_that_there_are_fewer(tmp_path: Path) -> None:
    chains = stage_chains(1)
    for stage in (0, 1):
        keep(tmp_path / "run", stage, chains[stage], 0, stage=StageAbout(number=stage, stages=2))
    with pytest.raises(StateFileError, match="of no anchor version all 2 stages are here"):
        exported(tmp_path / "run", tmp_path)


def test_an_export_stays_whole_when_the_disk_is_full_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_all(tmp_path / "run", stage_chains(3), 1)
    out = tmp_path / "out" / "model.safetensors"
    export_model(tmp_path / "run", out)
    before = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    keep_all(tmp_path / "run", stage_chains(3), 2)

    def half(path: Path, text: str) -> None:
        path.write_bytes(text[:20].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(StorageError, match="No space left"):
        export_model(tmp_path / "run", out)
    assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == before


def test_stages_of_two_histories_do_not_go_together(tmp_path: Path) -> None:
    one, other = stage_chains(3), stage_chains(3, aborted=[0])
    for stage, chain in enumerate((one[0], other[1], one[2])):
        keep(tmp_path / "run" / f"peer{stage}", stage, chain, 1)
        keep(tmp_path / "run" / f"peer{stage}", stage, chain, 2)
    with pytest.raises(StateFileError, match="of no anchor version all 3 stages are here"):
        exported(tmp_path / "run", tmp_path)
    keep(tmp_path / "run" / "late", 1, one[1], 1)
    assert exported(tmp_path / "run", tmp_path)[0] == 2


def test_whoever_came_after_an_aborted_round_has_the_same_state(tmp_path: Path) -> None:
    """Its checkpoint is of that round, and it does not know the one before; the others know both."""
    chains = stage_chains(4, aborted=[2])
    for stage in (0, 1):
        keep(tmp_path / "run", stage, chains[stage], 1)
        history(tmp_path / "run", stage, chains[stage])
    keep(tmp_path / "run", 2, chains[2], 2)
    version, values = exported(tmp_path / "run", tmp_path)
    assert version == 2
    assert torch.equal(values, whole_values(2)[0])


def test_of_a_damaged_checkpoint_another_peers_is_taken(tmp_path: Path) -> None:
    chains = stage_chains(2)
    keep_all(tmp_path / "run", chains, 0)
    damaged = keep_all(tmp_path / "run", chains, 1)[1]
    (shard,) = damaged.glob("anchor-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    assert exported(tmp_path / "run", tmp_path)[0] == 1, "the newest whole one"
    keep(tmp_path / "run" / "other", 1, chains[1], 1)
    version, values = exported(tmp_path / "run", tmp_path)
    assert version == 2
    assert torch.equal(values, whole_values(2)[0])


def test_of_several_states_that_is_taken_which_the_next_plan_names(tmp_path: Path) -> None:
    """One peer signs a wrong state; the coordinator's next plan names the stage's state."""
    chains = stage_chains(3)
    keep_all(tmp_path / "run", chains, 1)
    wrong = stage_state(1, 7).values
    keep(tmp_path / "run" / "a-liar", 1, chains[1], 1, state=AnchorState.of(wrong, 2))
    history(tmp_path / "run" / "peer1", 1, chains[1])
    version, values = exported(tmp_path / "run", tmp_path)
    assert version == 2
    assert torch.equal(values, whole_values(2)[0])
    shutil.rmtree(stage_folder(tmp_path / "run" / "peer1", 1) / CHECKPOINTS)
    history(tmp_path / "run" / "a-liar", 1, chains[1])
    with pytest.raises(StateFileError, match="leads to another state than the next round's plan names"):
        exported(tmp_path / "run", tmp_path)


def test_a_checkpoint_of_a_whole_model_is_no_stage_to_be_put_together(tmp_path: Path) -> None:
    open_store(tmp_path / "run").write(plain_contents(0))
    with pytest.raises(UserError, match="is a checkpoint of a whole model already"):
        gather_checkpoint(tmp_path / "run", tmp_path / "whole", IDENTITY)


# Verifying ----------------------------------------------------------------------------------------------------


def test_stages_and_the_whole_are_verified(tmp_path: Path) -> None:
    chains = stage_chains(2)
    keep_all(tmp_path / "run", chains, 1)
    history(tmp_path / "run" / "peer1", 1, chains[1])
    gather_checkpoint(tmp_path / "run", tmp_path / "run" / "whole" / "round-00000001", IDENTITY)
    found = verify_checkpoints(find_checkpoints(tmp_path / "run"))
    assert [isinstance(one, Verified) for one in found] == [True] * 4, found
    assert [one.first_round for one in found if isinstance(one, Verified)] == [0] * 4
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(app, ["log", str(tmp_path / "run" / "whole" / "round-00000001")])
    assert shown.exit_code == 0, shown.output


def test_eighty_columns_are_enough_for_what_is_said_of_a_stage(tmp_path: Path) -> None:
    """Names are cut, even the longest ones; the result of the check is not."""
    place = keep(tmp_path / "run", 1, stage_chains(2)[1], 1)
    (found,) = verify_checkpoints([place])
    assert isinstance(found, Verified)
    about = {"run": "a-run-with-a-name-as-long-as-it-may-be", "round": 12345, "anchor_version": 12346}
    manifest = found.manifest.model_copy(update={**about, "tokens": 999_400_000_000})
    shown = Console(file=io.StringIO(), width=80)
    shown.print(verify_table([replace(found, manifest=manifest, size_bytes=12_345_678, first_round=12282)]))
    shown.print(verify_table([replace(found, manifest=manifest, vouched_by=12345)]))
    text = shown.file.getvalue()  # type: ignore[attr-defined]
    for words in ("1 of 3", "12345", "12346", "999.4G", "12.3 MB", "from 12282", "plan of 12345", "its peer", "tokens"):
        assert f" {words} " in text.replace("\n", " \n"), text
    assert "a-r" in text, text
    assert f"{manifest.peer[:3]}" in text, text
    assert all(len(line) <= 80 for line in text.splitlines()), text


def test_a_stages_history_has_to_be_of_that_stage(tmp_path: Path) -> None:
    chains = stage_chains(2)
    place = keep(tmp_path / "run", 1, chains[1], 1)
    history(tmp_path / "run", 1, chains[1])
    history_of_other = stage_folder(tmp_path / "other", 0)
    history_of_other.mkdir(parents=True)
    history(tmp_path / "other", 0, chains[0])
    shutil.copy(history_of_other / HISTORY_FILE, place.parent.with_name(HISTORY_FILE))
    assert "its head: expected the run and the coordinator of the checkpoint" in reason(place)


@pytest.mark.parametrize("wrong", ["digest", "order", "chain", "missing"])
def test_a_whole_that_is_not_of_its_stages_is_refused(tmp_path: Path, wrong: str) -> None:
    """The coordinator's signatures tell, whatever the checkpoint's signer claims."""
    chains = stage_chains(2)
    stages = given(chains, 1)
    place = tmp_path / "whole"
    match wrong:
        case "order":
            stages[1], stages[2] = stages[2], stages[1]
            expected = "does not go on from the one before"
        case "missing":
            stages = stages[:2]
            expected = "parts: expected all stages of one round in their order, as their verdicts say"
        case "digest":
            expected = "parts.1.state_digest: expected"
        case "chain":
            expected = "parts.1.chain: expected"
    with pytest.MonkeyPatch.context() as patch:
        real = StagePart.__init__

        def part(self: StagePart, **fields: object) -> None:
            if (
                wrong in ("digest", "chain")
                and fields["elements"] == 12
                and fields["chain"] == chains[1][1].chain.hex()
            ):
                fields["state_digest" if wrong == "digest" else "chain"] = "0" * 64
            real(self, **fields)  # type: ignore[arg-type]

        patch.setattr(StagePart, "__init__", part)
        write_whole(place, stages, Identity.generate())
    assert expected in reason(place)
    done = CliRunner().invoke(app, ["verify", str(place)])
    assert isinstance(done.exception, StateFileError)
    assert done.exception.exit_code == 17


def test_a_pipelines_checkpoint_says_of_which_stage_it_is(tmp_path: Path) -> None:
    chains = stage_chains(1)
    place = keep(tmp_path / "run", 0, chains[0], 0, stage=None)
    assert "stage and parts: expected which stage it is of, or all" in reason(place)
