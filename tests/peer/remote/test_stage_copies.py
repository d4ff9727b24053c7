"""Copies of a pipeline's stages at a URL: brought back of one round, and only those stages that are needed."""

import logging
from pathlib import Path

import pytest
from tests.fakes.virtual_clock import run_virtual, until
from tests.peer.checkpoints.stages import RUN, about, keep, stage_chains, stage_state, whole_values
from tests.peer.remote.places import Faulty, fresh_memory

from shoal.peer.checkpoints.checkpoint import Contents, read_checkpoint
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS, CheckpointStore
from shoal.peer.export import gather_checkpoint
from shoal.peer.remote.copies import find_copies
from shoal.peer.remote.copying import CopyTo, RemoteCopies
from shoal.peer.remote.remote_store import RemoteStore
from shoal.peer.remote.restoring import Restorer
from shoal.peer.stage_members import stage_folder
from shoal.swarm.errors import StateFileError
from shoal.swarm.identity import Identity

ONE, OTHER, ME = (Identity.generate() for _ in range(3))
CHAINS = stage_chains(4)
RUN_FOLDER = f"reef-{RUN.hash.hex()[:8]}"


class Url:
    """Where all peers of the run copy their stages to."""

    def __init__(self) -> None:
        self.files = Faulty(fresh_memory())
        self.remote = RemoteStore(self.files, "/copies", "memory://copies")

    def copy(self, folder: Path, stage: int, identity: Identity, *rounds: int) -> None:
        """A peer keeps its stage of these rounds, and copies each of them."""
        place = stage_folder(folder / RUN_FOLDER / identity.peer_id, stage)
        for number in rounds:
            keep(place.parent, stage, CHAINS[stage], number, identity)
            store = CheckpointStore(place / CHECKPOINTS, RUN.hash, identity, Retention(9))
            base = f"{RUN_FOLDER}/{identity.peer_id}/{place.name}"
            copies = RemoteCopies(store, CopyTo(self.remote), base, in_step=True)

            async def main(copies: RemoteCopies = copies) -> None:
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
    """One peer has had stages 0 and 1, another one 1 and 2; they copied different rounds."""
    url = Url()
    url.copy(tmp_path / "there", 0, ONE, 0, 1, 2)
    url.copy(tmp_path / "there", 1, ONE, 1)
    url.copy(tmp_path / "there", 1, OTHER, 1, 2, 3)
    url.copy(tmp_path / "there", 2, OTHER, 1, 3)
    return url


def restored(
    url: Url, to: Path, identity: Identity, *, all_stages: bool = False, said: list[str] | None = None
) -> dict[int, int]:
    """Round by stage; ``said`` gets what people are told."""
    said = [] if said is None else said
    restorer = Restorer(url.remote, to, identity, said.append, lambda _: None)
    folders = restorer.restore(find_copies(url.remote), all_stages=all_stages)
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


def test_a_peer_that_was_there_gets_the_stages_that_it_had(url: Url, tmp_path: Path) -> None:
    assert restored(url, tmp_path / "one", ONE) == {0: 2, 1: 2}
    assert restored(url, tmp_path / "other", OTHER) == {1: 3, 2: 3}
    assert restored(url, tmp_path / "all", ONE, all_stages=True) == {0: 1, 1: 1, 2: 1}


def test_a_round_of_which_one_stage_is_damaged_comes_of_none(url: Url, tmp_path: Path) -> None:
    url.copy(tmp_path / "there", 0, ONE, 3)
    url.flip(2, OTHER, 3)
    assert restored(url, tmp_path / "here", ME) == {0: 1, 1: 1, 2: 1}


def test_without_a_round_in_common_the_newest_of_each_comes(url: Url, tmp_path: Path) -> None:
    url.flip(2, OTHER, 1)
    assert restored(url, tmp_path / "here", ME) == {0: 2, 1: 3, 2: 3}


@pytest.mark.parametrize(("every", "is_told"), [(2, True), (3, False)])
def test_copies_that_take_longer_than_they_are_apart_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, every: int, is_told: bool
) -> None:
    """Once: three rounds end while the first one is copied."""
    url, store = Url(), CheckpointStore(tmp_path / CHECKPOINTS, RUN.hash, ONE, Retention(9))

    def train(*rounds: int) -> None:
        for number in rounds:
            state = stage_state(1, CHAINS[1][number].anchor_version)
            store.write(Contents(about(1, state, CHAINS[1][number]), state, None, CHAINS[1][: number + 1]))

    def train_meanwhile(what: str, path: str) -> None:
        if what == "sent" and path.endswith("manifest.json"):
            url.files.fails = lambda what, path: None
            train(1, 2, 3)

    train(0)
    url.files.fails = train_meanwhile
    copies = RemoteCopies(store, CopyTo(url.remote, every), "peer", in_step=True)

    async def main() -> None:
        async with copies.running():
            await until(lambda: "copied to" in caplog.text)

    with caplog.at_level(logging.INFO):
        run_virtual(main())
    assert caplog.text.count("takes 3 rounds") == int(is_told), caplog.text


def test_a_stage_that_nobody_has_copied_is_named(url: Url, tmp_path: Path) -> None:
    """What there is comes: a peer may have kept the rest."""
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
    with pytest.raises(StateFileError, match="none of the 3 copies there can be used"):
        restored(url, tmp_path / "here", ME)
