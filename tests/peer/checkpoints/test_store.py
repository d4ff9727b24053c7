import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.peer.checkpoints.making import IDENTITY, LAYOUT, RUN, contents, open_store, state_of, verdict_chain
from torch import nn

from shoal.peer.checkpoints.checkpoint import read_checkpoint, unpack_verdicts
from shoal.peer.checkpoints.manifest import MANIFEST
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CheckpointStore, checkpoints_in
from shoal.peer.checkpoints.writer import CheckpointWriter
from shoal.swarm.errors import StateFileError, StorageError
from shoal.swarm.protocol.types import TensorSpec

OWN = {"steps": 3, "residual": torch.ones(7)}


def names(folder: Path) -> list[str]:
    place = folder / "checkpoints"
    return sorted(one.name for one in place.iterdir()) if place.exists() else []


def rounds(store: CheckpointStore) -> list[int]:
    return [one.round for one in store.kept()]


# Round trips ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = store.write(contents(4, OWN))
    assert kept.folder.name == "round-00000004"
    assert sorted(one.name for one in kept.folder.iterdir()) == [
        "anchor-00001-of-00001.safetensors",
        "manifest.json",
        "outer-00001-of-00001.safetensors",
        "peer.safetensors",
        "residual.safetensors",
        "verdicts.msgpack",
    ]
    again = open_store(tmp_path)
    assert again.kept() == store.kept() == (kept,)
    found = again.load(kept)
    assert torch.equal(found.state.values, state_of(5).values)
    assert (found.state.version, found.state.digest) == (5, state_of(5).digest)
    assert unpack_verdicts(found.verdicts[0], "") == verdict_chain(5)
    assert found.manifest.peer == IDENTITY.peer_id
    assert (found.manifest.tokens, found.manifest.recipe) == (50, {"depth": 2, "rate": 0.1})
    assert found.own is not None
    assert found.own.restore(None, nn.Linear(1, 1)) == {"steps": 3}
    residual = torch.zeros(7)
    assert found.own.restore_residual(residual) == 12
    assert torch.equal(residual, torch.ones(7))


def test_the_anchor_can_be_read_by_any_safetensors_reader(tmp_path: Path) -> None:
    kept = open_store(tmp_path).write(contents())
    tensors = load_file(kept.folder / "anchor-00001-of-00001.safetensors")
    assert {name: tuple(one.shape) for name, one in tensors.items()} == {spec.name: spec.shape for spec in LAYOUT}
    assert torch.equal(torch.cat([tensors[spec.name].reshape(-1) for spec in LAYOUT]), state_of(1).anchor)
    outer = load_file(kept.folder / "outer-00001-of-00001.safetensors")
    assert torch.equal(outer["0.one.weight"].reshape(-1), state_of(1).outer[0, :6])


def test_large_models_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.peer.checkpoints import state_files, tensors

    monkeypatch.setattr(state_files, "shards", lambda layout: tensors.shards(layout, 400))
    layout = tuple(TensorSpec(name=name, shape=(size,)) for name, size in zip("abcd", (60, 41, 300, 5), strict=True))
    kept = open_store(tmp_path).write(contents(layout=layout))
    assert sorted(one.name for one in kept.folder.glob("anchor*")) == [
        f"anchor-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)
    ]
    found = open_store(tmp_path).load(kept)
    assert torch.equal(found.state.values, state_of(1, layout=layout).values)


def test_a_copy_may_lack_what_is_the_peers_own(tmp_path: Path) -> None:
    kept = open_store(tmp_path).write(contents(0, OWN))
    for name in ("peer.safetensors", "residual.safetensors"):
        (kept.folder / name).unlink()
        found = open_store(tmp_path).load(kept)
        assert found.own is None
    (kept.folder / "verdicts.msgpack").unlink()
    with pytest.raises(StateFileError, match=r"verdicts\.msgpack: cannot be read"):
        open_store(tmp_path).load(kept)


def test_what_is_the_peers_own_is_read_only_if_it_is_asked_for(tmp_path: Path) -> None:
    kept = open_store(tmp_path).write(contents(0, OWN))
    (kept.folder / "peer.safetensors").write_bytes(b"damaged")
    store = open_store(tmp_path)
    found = store.load_newest(with_own=False)
    assert found is not None
    assert found.own is None
    assert store.load_newest() is None


# Finding --------------------------------------------------------------------------------------------------------


def test_the_newest_whole_one_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    assert store.load_newest() is None
    for number in (1, 2, 3):
        store.write(contents(number))
    newest = store.kept()[0]
    anchor = newest.folder / "anchor-00001-of-00001.safetensors"
    damaged = anchor.read_bytes()[:-1] + b"!"
    anchor.write_bytes(damaged)
    found = store.load_newest()
    assert found is not None
    assert found.manifest.round == 2
    assert "round-00000003/anchor-00001-of-00001.safetensors: SHA-256: expected" in caplog.text
    assert rounds(store) == [2, 1], "a damaged one does not count"
    assert anchor.read_bytes() == damaged, "and stays as it is"
    by_version = store.load_newest(2, state_of(2).digest)
    assert by_version is not None
    assert by_version.manifest.round == 1
    assert store.load_newest(2, bytes(32)) is None


def test_a_damaged_manifest_is_named_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = open_store(tmp_path).write(contents())
    (kept.folder / "manifest.json").write_bytes(b"{}")
    assert open_store(tmp_path).kept() == ()
    assert "manifest.json: field run: Field required" in caplog.text
    assert (kept.folder / "manifest.json").read_bytes() == b"{}"


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(tmp_path).write(contents())
    other = CheckpointStore(tmp_path / "checkpoints", bytes(32), IDENTITY, Retention())
    assert other.kept() == ()
    assert f"run_hash: expected {bytes(32).hex()}, not {RUN.hash.hex()}" in caplog.text


# Retention ------------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_one_of_every_so_many_rounds(tmp_path: Path) -> None:
    store = open_store(tmp_path, Retention(2, 5))
    for number in (0, 1, 3, 4, 6, 7, 8, 9, 11, 12, 14):
        store.write(contents(number))
    assert rounds(store) == [14, 12, 11, 6, 0]
    assert names(tmp_path) == [f"round-{number:08}" for number in (0, 6, 11, 12, 14)]
    assert rounds(open_store(tmp_path)) == rounds(store)


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 5), st.integers(0, 7))
def test_retention_never_takes_back_what_it_kept_for_ever(numbers: set[int], newest: int, every: int) -> None:
    retention = Retention(newest, every)
    kept: list[int] = []
    for number in sorted(numbers):
        kept.append(number)
        kept = [one for one in kept if one not in retention.superfluous(kept)]
    assert kept == [one for one in sorted(numbers) if one not in retention.superfluous(numbers)]
    assert kept[-newest:] == sorted(numbers)[-newest:]
    assert {one // every for one in kept} == {one // every for one in numbers} if every else len(kept) <= newest


def test_what_is_being_read_is_not_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path, Retention(1))
    first = store.write(contents(0))
    with store.holding(first) as folder:
        store.write(contents(1))
        assert (folder / "manifest.json").exists()
        assert rounds(store) == [1, 0]
    store.write(contents(2))
    assert names(tmp_path) == ["round-00000002"]
    with pytest.raises(StateFileError, match="has been removed"), store.holding(first):
        pass


def test_readers_and_a_writer_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, Retention(1))
    store.write(contents(0))
    done, found, refusals = threading.Event(), [], []

    def read() -> None:
        while not done.is_set():
            try:
                found.append(store.load(store.kept()[0]).manifest.round)
            except StateFileError as error:
                refusals.append(str(error))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for one in readers:
        one.start()
    for number in range(1, 20):
        store.write(contents(number))
    done.set()
    for one in readers:
        one.join()
    assert found
    assert all("has been removed" in one for one in refusals), "gone between the two calls"
    assert rounds(store)[0] == 19


def test_an_old_one_that_cannot_be_removed_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, Retention(1))
    store.write(contents(0))

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(CheckpointStore, "_remove", refuse)
    store.write(contents(1))
    assert "cannot be removed" in caplog.text
    assert rounds(store) == [1]


# Trouble --------------------------------------------------------------------------------------------------------


def full_disk(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A disk that is full at the first ``when``: ``write``, ``fsync`` or ``rename`` (which a disk may refuse, too)."""

    def refuse(*_: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if when == "fsync":
        monkeypatch.setattr(os, "fsync", refuse)
    elif when == "rename":
        monkeypatch.setattr(CheckpointStore, "_publish", refuse)
    else:
        real = CheckpointWriter._write_file

        def write(self: CheckpointWriter, name: str, pieces: Any) -> Any:
            return real(self, name, (refuse() if name == "verdicts.msgpack" else piece for piece in pieces))

        monkeypatch.setattr(CheckpointWriter, "_write_file", write)


@pytest.mark.parametrize("when", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    store = open_store(tmp_path, Retention(1))
    store.write(contents(0))
    with monkeypatch.context() as patch:
        full_disk(patch, when)
        with pytest.raises(StorageError, match=r"No space left.*Free some space"):
            store.write(contents(1))
    assert names(tmp_path) == ["round-00000000"]
    assert store.load(store.kept()[0]).manifest.round == 0
    store.write(contents(1))
    assert names(tmp_path) == ["round-00000001"], "tried again, it works"


def test_a_place_that_cannot_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(StorageError, match="--state"):
        open_store(tmp_path).write(contents())


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours may catch it."""


def test_leftovers_of_killed_writers_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Killed

    store = open_store(tmp_path, Retention(1))
    store.write(contents(0))
    steps: list[Callable[[], object]] = [lambda: patch.setattr(CheckpointWriter, "finish", die)]
    steps += [lambda: patch.setattr(CheckpointStore, "_publish", die)]
    steps += [lambda: patch.setattr("shutil.rmtree", die)]  # in the middle of retention
    for step, left in zip(steps, (["round-00000000"], ["round-00000000"], ["round-00000001"]), strict=True):
        with monkeypatch.context() as patch:
            step()
            with pytest.raises(Killed):
                open_store(tmp_path, Retention(1)).write(contents(1))
        assert any(name.startswith(".") for name in names(tmp_path))
        found = open_store(tmp_path, Retention(1)).load_newest()
        assert found is not None
        assert names(tmp_path) == left


def test_the_same_state_is_not_written_twice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    kept = store.write(contents(3, OWN))
    before = kept.folder.stat().st_mtime_ns
    assert store.write(contents(3)) == kept
    assert kept.folder.stat().st_mtime_ns == before
    assert (kept.folder / "peer.safetensors").exists()


def test_another_history_of_the_run_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path)
    for number in (3, 4, 5):
        store.write(contents(number))
    store.write(contents(4, chain="0" * 64))
    assert rounds(store) == [4, 3]
    aside = [name for name in names(tmp_path) if name.startswith("other-round-0000000")]
    assert len(aside) == 2
    assert "another history" in caplog.text
    whole = read_checkpoint(FolderSource(tmp_path / "checkpoints" / aside[0]))
    assert whole.manifest.round == 4, "nothing of it is lost"


# Search -------------------------------------------------------------------------------------------------------


def made_at(place: Path) -> Path:
    place.mkdir(parents=True)
    (place / MANIFEST).touch()
    return place


def test_what_is_being_written_is_no_checkpoint_nor_is_what_lies_in_it(tmp_path: Path) -> None:
    found = [made_at(tmp_path / "a" / "round-00000001"), made_at(tmp_path / "whole")]
    made_at(tmp_path / ".new-round-00000002")
    made_at(tmp_path / "a" / ".old-1" / "round-00000001")
    assert checkpoints_in(tmp_path) == found


def test_a_folder_around_the_one_that_is_given_may_have_any_name(tmp_path: Path) -> None:
    place = made_at(tmp_path / ".shoal" / "runs" / "round-00000001")
    assert checkpoints_in(tmp_path / ".shoal") == checkpoints_in(place) == [place]
