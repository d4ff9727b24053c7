"""Copies of a pipeline's stages at a URL: restored of one round, and only of the stages that are needed."""

import logging
from pathlib import Path

import pytest
from tests.fakes.virtual_clock import run_virtual, until
from tests.peer.checkpoints.remote.places import Faulty, fresh_memory
from tests.peer.checkpoints.stages import RUN, about, keep, stage_chains, stage_state, whole_values

from shoal.peer.checkpoints.checkpoint import CheckpointContents, read_checkpoint
from shoal.peer.checkpoints.remote.copies import find_copies
from shoal.peer.checkpoints.remote.restore import CheckpointRestorer
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.remote.upload import CheckpointUploader, CopyDestination
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS, CheckpointStore
from shoal.peer.folders import stage_folder
from shoal.peer.offline.export import gather_checkpoint
from shoal.swarm.errors import SealedForOthers, StateFileError
from shoal.swarm.protocol.identity import Identity

ONE, OTHER, ME = (Identity.generate() for _ in range(3))
CHAINS = stage_chains(4)
RUN_FOLDER = f"reef-{RUN.hash.hex()[:8]}"


class Url:
    """The URL to which all peers of the run copy their stages."""

    def __init__(self) -> None:
        self.files = Faulty(fresh_memory())
        self.remote = RemoteStore(self.files, "/copies", "memory://copies")

    def copy(
        self, folder: Path, stage: int, identity: Identity, *rounds: int, sealed_for: list[bytes] | None = None
    ) -> None:
        """Write and copy checkpoints of a peer's stage for these rounds."""
        place = stage_folder(folder / RUN_FOLDER / identity.peer_id, stage)
        for number in rounds:
            keep(place.parent, stage, CHAINS[stage], number, identity, sealed_for=sealed_for)
            store = CheckpointStore(place / CHECKPOINTS, RUN.hash, identity, Retention(9))
            base = f"{RUN_FOLDER}/{identity.peer_id}/{place.name}"
            copies = CheckpointUploader(store, CopyDestination(self.remote), base, in_step=True)

            async def main(copies: CheckpointUploader = copies) -> None:
                copies.finish()
                await copies.run()

            run_virtual(main())

    def flip(self, stage: int, identity: Identity, number: int) -> None:
        place = f"/copies/{RUN_FOLDER}/{identity.peer_id}/{stage_folder(Path(), stage)}/round-{number:08}"
        (path,) = [name for name in self.files.inner.find(place) if "anchor" in name]
        data = bytearray(self.files.inner.cat_file(path))
        data[-1] ^= 1
        self.files.inner.pipe_file(path, bytes(data))


@pytest.fixture
def url(tmp_path: Path) -> Url:
    """One peer has copied stages 0 and 1, another one 1 and 2, of different rounds."""
    url = Url()
    url.copy(tmp_path / "there", 0, ONE, 0, 1, 2)
    url.copy(tmp_path / "there", 1, ONE, 1)
    url.copy(tmp_path / "there", 1, OTHER, 1, 2, 3)
    url.copy(tmp_path / "there", 2, OTHER, 1, 3)
    return url


def restored(
    url: Url,
    to: Path,
    identity: Identity,
    *,
    all_stages: bool = False,
    number: int | None = None,
    said: list[str] | None = None,
) -> dict[int, int]:
    """Round by stage; ``said`` receives the messages."""
    said = [] if said is None else said
    restorer = CheckpointRestorer(url.remote, to, identity, said.append, lambda _: None)
    folders = restorer.restore(find_copies(url.remote), all_stages=all_stages, number=number)
    found = {}
    for folder in folders:
        manifest = read_checkpoint(FolderSource(folder)).manifest
        assert manifest.stage is not None
        stage = manifest.stage.number
        assert folder.parent == stage_folder(to / RUN_FOLDER / identity.peer_id, stage) / CHECKPOINTS
        found[stage] = manifest.round
    assert not (to / "restoring").exists()
    return found


def test_where_nothing_is_left_all_stages_come_of_one_round(url: Url, tmp_path: Path) -> None:
    assert restored(url, tmp_path / "here", ME) == {0: 1, 1: 1, 2: 1}
    gather_checkpoint(tmp_path / "here", tmp_path / "whole", ME)
    values = read_checkpoint(FolderSource(tmp_path / "whole")).state.values
    assert values.equal(whole_values(2))


def test_a_peer_that_was_there_gets_its_stages_of_a_round_that_all_have(url: Url, tmp_path: Path) -> None:
    """Its own newer ones are of no use to a run that has lost the other stages."""
    said: list[str] = []
    assert restored(url, tmp_path / "one", ONE, said=said) == {0: 1, 1: 1}
    assert "(stage 0: 2, 1, 0; stage 1: 3, 2, 1; stage 2: 3, 1)" in said[-1]
    assert "`--round 3`" in said[-1], "stage 1 has it from the other peer"
    assert restored(url, tmp_path / "other", OTHER) == {1: 1, 2: 1}
    assert restored(url, tmp_path / "all", ONE, all_stages=True) == {0: 1, 1: 1, 2: 1}


def test_nothing_is_said_of_other_rounds_where_the_newest_one_comes(url: Url, tmp_path: Path) -> None:
    """Unfinished copies do not count, and local checkpoints stay."""
    url.copy(tmp_path / "there", 0, ONE, 3)
    url.files.inner.pipe_file(f"/copies/{RUN_FOLDER}/{ONE.peer_id}/stage-00000/round-00000005/anchor", b"half")
    for stays in (False, True):
        said: list[str] = []
        assert restored(url, tmp_path / "one", ONE, said=said) == {0: 3, 1: 3}
        assert not any("--round" in line for line in said), said
        assert all("it stays" in line for line in said) == stays, said


def test_a_round_of_which_one_stage_is_damaged_comes_of_none(url: Url, tmp_path: Path) -> None:
    """Peers that restore other stages do not see the damage, so the peer that does is told what to do."""
    url.copy(tmp_path / "there", 0, ONE, 3)
    url.flip(2, OTHER, 3)
    said: list[str] = []
    assert restored(url, tmp_path / "here", ME, said=said) == {0: 1, 1: 1, 2: 1}
    assert said[-1] == "restore this round on the peers of the other stages, too: `shoal restore URL --round 1`"
    assert restored(url, tmp_path / "one", ONE) == {0: 3, 1: 3}
    assert restored(url, tmp_path / "one", ONE, number=1) == {0: 1, 1: 1}, "beside the newer one"
    assert len(list((tmp_path / "one").rglob("round-*"))) == 4


def test_without_a_round_in_common_it_says_which_there_are(url: Url, tmp_path: Path) -> None:
    place = f"/copies/{RUN_FOLDER}/{OTHER.peer_id}/stage-00002/round-00000001"
    url.files.inner.rm(f"{place}/manifest.json")  # as of a copier that was killed
    with pytest.raises(StateFileError, match="stage 0: 2, 1, 0; stage 1: 3, 2, 1; stage 2: 3; where peers") as error:
        restored(url, tmp_path / "here", ME)
    assert error.value.exit_code == 17
    assert not (tmp_path / "here").exists()
    said: list[str] = []
    assert restored(url, tmp_path / "here", ME, number=3, said=said) == {1: 3, 2: 3}
    assert said[-1] == "there is no copy of round 3 of stage 0"
    assert restored(url, tmp_path / "one", ONE, number=2) == {0: 2, 1: 2}
    with pytest.raises(StateFileError, match=r"no copy of round 7: stage 0: 2, 1, 0; stage 1: 3, 2, 1$"):
        restored(url, tmp_path / "one", ONE, number=7)


def test_a_damaged_copy_of_the_only_round_in_common_is_the_end(url: Url, tmp_path: Path) -> None:
    url.flip(2, OTHER, 1)
    said: list[str] = []
    with pytest.raises(StateFileError, match="no round of which all stages have a copy that can be used"):
        restored(url, tmp_path / "here", ME, said=said)
    assert "round 1 of the stages cannot be restored" in said[-1]
    assert list((tmp_path / "here").rglob("round-*")) == []


def test_stages_that_are_sealed_for_others_are_said_to_be(tmp_path: Path) -> None:
    url = Url()
    for stage in range(3):
        url.copy(tmp_path / "there", stage, ONE, 0, 1, sealed_for=[])
    with pytest.raises(SealedForOthers):
        restored(url, tmp_path / "here", ME)


@pytest.mark.parametrize(("every", "is_told"), [(2, True), (3, False)])
def test_copies_that_take_longer_than_they_are_apart_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int, is_told: bool
) -> None:
    """There is one warning: three rounds end while the first one is copied."""
    url, store = Url(), CheckpointStore(tmp_path / CHECKPOINTS, RUN.hash, ONE, Retention(9))

    def train(*rounds: int) -> None:
        for number in rounds:
            state = stage_state(1, CHAINS[1][number].anchor_version)
            store.write(CheckpointContents(about(1, state, CHAINS[1][number]), state, None, CHAINS[1][: number + 1]))

    def train_meanwhile(what: str, path: str) -> None:
        if what == "sent" and path.endswith("manifest.json"):
            url.files.fails = lambda what, path: None
            train(1, 2, 3)

    train(0)
    url.files.fails = train_meanwhile
    copies = CheckpointUploader(store, CopyDestination(url.remote, every), "peer", in_step=True)

    async def main() -> None:
        async with copies.running():
            await until(lambda: "copied to" in caplog.text)

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    assert caplog.text.count("takes 3 rounds") == int(is_told), caplog.text


def test_a_stage_that_nobody_has_copied_is_named(url: Url, tmp_path: Path) -> None:
    """The other stages are restored: a peer may have kept the missing one."""
    said: list[str] = []
    assert restored(url, tmp_path / "all", ME, said=said) == {0: 1, 1: 1, 2: 1}
    assert not any("no copy of" in line for line in said), said
    for identity in (ONE, OTHER):
        stage = f"/copies/{RUN_FOLDER}/{identity.peer_id}/stage-00001"
        url.files.inner.rm(stage, recursive=True)
    assert restored(url, tmp_path / "here", ME, said=said) == {0: 1, 2: 1}
    assert "there is no copy of stage 1: unless a peer has kept" in said[-1]


def test_a_copy_in_another_stages_folder_is_refused(url: Url, tmp_path: Path) -> None:
    inner = url.files.inner
    base = f"/copies/{RUN_FOLDER}/{ONE.peer_id}"
    inner.rm(f"{base}/stage-00001", recursive=True)
    inner.copy(f"{base}/stage-00000", f"{base}/stage-00001", recursive=True)
    inner.rm(f"/copies/{RUN_FOLDER}/{OTHER.peer_id}", recursive=True)
    said: list[str] = []
    with pytest.raises(StateFileError, match="no round of which all stages have a copy that can be used"):
        restored(url, tmp_path / "here", ME, said=said)
    refused = [line for line in said if "stage-00001/round-" in line and "expected 1, not 0 in its manifest" in line]
    assert len(refused) == 3
