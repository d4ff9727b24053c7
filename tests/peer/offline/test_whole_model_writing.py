"""Checkpoints that were joined from stages: read as any checkpoint, and still provable stage by stage."""

import json
from pathlib import Path

import pytest
import torch
from tests.peer.checkpoints.making import MemorySource, contents, open_store
from tests.peer.checkpoints.stages import IDENTITY, LAYOUTS, given, stage_chains, whole_values

from shoal.peer.checkpoints.checkpoint import check_checkpoint, read_checkpoint, read_verdicts
from shoal.peer.checkpoints.manifest import MANIFEST, CheckpointAbout, Manifest, read_manifest
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.offline.whole_model import StageState, write_whole
from shoal.peer.training.anchor import CHUNK_ELEMENTS, AnchorState, GrowingDigest
from shoal.swarm.errors import StateFileError, StorageError


def test_it_is_a_checkpoint_of_all_parameters(tmp_path: Path) -> None:
    chains = stage_chains(3)
    write_whole(tmp_path / "whole", given(chains, 2), IDENTITY)
    found = read_checkpoint(FolderSource(tmp_path / "whole"))
    assert torch.equal(found.state.values, whole_values(3))
    assert found.state.digest == AnchorState.of(whole_values(3), 3).digest
    manifest = found.manifest
    assert manifest.layout == tuple(spec for layout in LAYOUTS for spec in layout)
    assert (manifest.round, manifest.anchor_version, manifest.tokens) == (2, 3, 30)
    assert manifest.peer == IDENTITY.peer_id
    assert manifest.stage is None
    assert manifest.parts is not None
    assert [part.elements for part in manifest.parts] == [12, 12, 6]
    assert [part.chain for part in manifest.parts] == [chain[2].chain.hex() for chain in chains]
    for stage, chain in enumerate(chains):
        assert read_verdicts(FolderSource(tmp_path / "whole"), manifest, stage) == chain
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_each_parts_digest_is_checked_without_the_state_in_memory(tmp_path: Path) -> None:
    write_whole(tmp_path / "whole", given(stage_chains(3), 2), IDENTITY)
    source = MemorySource.of(tmp_path / "whole")
    manifest = check_checkpoint(source).manifest
    assert manifest.parts is not None
    parts = list(manifest.parts)
    parts[1] = parts[1].model_copy(update={"state_digest": parts[0].state_digest})
    about = {name: getattr(manifest, name) for name in CheckpointAbout.model_fields}
    wrong = Manifest.sign(CheckpointAbout(**{**about, "parts": tuple(parts)}), dict(manifest.files), IDENTITY)
    with pytest.raises(StateFileError, match=r"parts\.1\.state_digest: expected"):
        check_checkpoint(source.changed(MANIFEST, wrong.file_bytes))


def test_only_one_stage_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[str] = []

    class Noted(AnchorState):
        def __del__(self) -> None:
            alive.remove("state")

    def noted(stage: StageState) -> StageState:
        def load() -> AnchorState:
            state = stage.load()
            assert not alive
            alive.append("state")
            return Noted(state.values, state.version, state.digest, state.chunk_digests)

        return StageState(stage.about, stage.verdicts, load)

    write_whole(tmp_path / "whole", [noted(one) for one in given(stage_chains(1), 0)], IDENTITY)
    assert torch.equal(read_checkpoint(FolderSource(tmp_path / "whole")).state.values, whole_values(1))


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    stages = given(stage_chains(1), 0)

    def lost() -> AnchorState:
        raise StateFileError("lost")

    stages[2] = StageState(stages[2].about, stages[2].verdicts, lost)
    with pytest.raises(StateFileError, match="lost"):
        write_whole(tmp_path / "whole", stages, IDENTITY)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "whole").mkdir()
    with pytest.raises(StorageError, match="exists already"):
        write_whole(tmp_path / "whole", stages[:2], IDENTITY)
    assert list((tmp_path / "whole").iterdir()) == []


def test_checkpoints_of_other_runs_have_no_word_of_stages(tmp_path: Path) -> None:
    place = open_store(tmp_path).write(contents(0)).folder
    fields = set(json.loads((place / MANIFEST).read_bytes()))
    assert fields == {
        *("run", "run_hash", "run_toml", "recipe", "layout", "outer_vectors", "round", "anchor_version"),
        *("state_digest", "chain", "tokens", "coordinator_key", "format", "files", "identity_key", "signature"),
    }
    assert read_manifest(FolderSource(place)).signed_bytes == b"shoal checkpoint, version 1\0" + json.dumps(
        {name: value for name, value in json.loads((place / MANIFEST).read_bytes()).items() if name != "signature"},
        sort_keys=True,
        separators=(",", ":"),
    ).encode("ascii")


@pytest.mark.parametrize(
    ("found", "put", "message"),
    [
        (b'"elements":12', b'"elements":13', "parts: are not the 30 elements of the layout"),
        (b'"parts":[', b'"parts":[],"x":[', "parts"),
        (b"verdicts-00002-of-00003", b"verdicts-00002-of-00004", "files: verdicts are in"),
        (b'"parts":', b'"stage":{"number":0,"stages":1},"parts":', "parts: a stage alone has none"),
    ],
)
def test_a_manifest_whose_parts_are_not_the_whole_is_refused(
    tmp_path: Path, found: bytes, put: bytes, message: str
) -> None:
    write_whole(tmp_path / "whole", given(stage_chains(1), 0), IDENTITY)
    source = MemorySource.of(tmp_path / "whole")
    assert found in source.files[MANIFEST]
    with pytest.raises(StateFileError, match=message):
        read_manifest(source.changed(MANIFEST, source.files[MANIFEST].replace(found, put, 1)))


def test_parts_have_whole_tensors(tmp_path: Path) -> None:
    write_whole(tmp_path / "whole", given(stage_chains(1), 0), IDENTITY)
    source = MemorySource.of(tmp_path / "whole")
    fields = json.loads(source.files[MANIFEST])
    fields["parts"][0]["elements"], fields["parts"][1]["elements"] = 11, 13
    with pytest.raises(StateFileError, match="parts: each has whole tensors of the layout"):
        read_manifest(source.changed(MANIFEST, json.dumps(fields).encode()))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("widths", [[1], [5, 7], [CHUNK_ELEMENTS] * 2, [300_001, 5, 524_287], [800_000, 1]])
def test_a_digest_that_grows_is_that_of_the_whole_state(widths: list[int], rows: int) -> None:
    values = torch.randn(rows, sum(widths))
    growing = GrowingDigest(7, (rows, sum(widths)))
    for piece in values.split(widths, dim=1):
        growing.take(piece)
    assert growing.digest() == AnchorState.of(values, 7).digest
