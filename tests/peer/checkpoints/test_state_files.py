"""Files of a state that is overwritten while they are written: each holds the state as it was."""

import errno
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.peer.checkpoints.making import ELEMENTS, LAYOUT, contents, open_store, sealing_store
from torch import Tensor

from shoal.peer.checkpoints import state_files
from shoal.peer.checkpoints.remote.copies import entry_of
from shoal.peer.checkpoints.state_files import PlainStateFiles, StateFiles, state_shards
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.training import anchor
from shoal.peer.training.anchor import AnchorState
from shoal.swarm.errors import StorageError
from shoal.swarm.protocol.types import TensorSpec

WIDE = tuple(TensorSpec(name=str(at), shape=(size,)) for at, size in enumerate((0, 3, 40, 7, 0, 25, 0)))
"""Shards of up to 10 elements, and ranges of 8, have borders at other places."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.peer.checkpoints import tensors

    monkeypatch.setattr(state_files, "shards", lambda layout: tensors.shards(layout, 40))
    for module in (state_files, anchor):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 8)


def values_of(rows: int) -> Tensor:
    return torch.arange(rows * 75, dtype=torch.float32).view(rows, 75)


def tensors_in(folder: Path, rows: int) -> dict[str, Tensor]:
    found = {}
    for shard in state_shards(WIDE):
        for kind, name in shard.names.items():
            if kind == "anchor" or rows > 1:
                found.update({f"{kind} {key}": one for key, one in load_file(folder / name).items()})
    return found


def expected_of(values: Tensor) -> dict[str, Tensor]:
    found, at = {}, 0
    for spec in WIDE:
        stop = at + spec.elements
        found[f"anchor {spec.name}"] = values[0, at:stop]
        found.update({f"outer {number}.{spec.name}": row[at:stop] for number, row in enumerate(values[1:])})
        at = stop
    return found


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("small")
def test_ranges_are_written_before_they_are_overwritten(tmp_path: Path, rows: int, seed: int) -> None:
    values, chosen = values_of(rows), random.Random(seed)
    before = values.clone()
    files = PlainStateFiles(tmp_path, values, WIDE)
    at = 0
    while at < 75 and seed:  # some of it, or all, before the writing begins
        stop = min(75, at + chosen.randrange(1, 20))
        files.before_overwrite(at, stop)
        values[:, at:stop] = -1.0
        at = stop
        if chosen.random() < 0.1:
            break
    entries = files.write()
    found = tensors_in(tmp_path, rows)
    assert found.keys() == expected_of(before).keys()
    assert all(torch.equal(found[name], one) for name, one in expected_of(before).items())
    assert entries == {path.name: entry_of(path) for path in tmp_path.iterdir()}


@pytest.mark.usefixtures("small")
def test_a_step_in_another_thread_meets_the_writing(tmp_path: Path) -> None:
    values = values_of(2)
    before, files = values.clone(), PlainStateFiles(tmp_path, values, WIDE)

    def step() -> None:
        for at in range(0, 75, 5):
            files.before_overwrite(at, at + 5)
            values[:, at : at + 5] = -1.0

    stepping = threading.Thread(target=step)
    stepping.start()
    files.write()
    stepping.join()
    assert all(torch.equal(tensors_in(tmp_path, 2)[name], one) for name, one in expected_of(before).items())


@pytest.mark.usefixtures("small")
def test_a_disk_that_refuses_ends_the_writing_and_not_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PlainStateFiles(tmp_path, values_of(2), WIDE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PlainStateFiles, "_put", full)
    files.before_overwrite(0, 75)
    with pytest.raises(OSError, match="No space"):
        files.write()
    files.before_overwrite(0, 75)


@contextmanager
def stepping(state: AnchorState, files: StateFiles) -> Iterator[list[AnchorState]]:
    """Step the state in a thread while the context runs; yields the list that gets the next state."""
    assert state.add_guard(files)
    made: list[AnchorState] = []
    pieces = [(at, at + 1, torch.ones(1)) for at in range(state.elements)]
    thread = threading.Thread(target=lambda: made.append(state.step(9, pieces, lambda _, rows, mean: rows.add_(mean))))
    thread.start()
    yield made
    thread.join()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_checkpoint_of_a_state_that_is_stepped_meanwhile_is_of_the_state_before(tmp_path: Path, sealed: bool) -> None:
    store: CheckpointStore = sealing_store(tmp_path / "checkpoints") if sealed else open_store(tmp_path)
    what = contents(1)
    before, unfinished = what.state.values.clone(), store.begin(1)
    files = unfinished.state_files(what.state.values, LAYOUT)
    with stepping(what.state, files) as made:
        unfinished.add_state(files)
        unfinished.finish(what.about, what.verdicts)
    assert torch.equal(made[0].values, before + 1.0)
    found = store.load_newest()
    assert found is not None
    assert torch.equal(found.state.values, before)


def test_of_a_sealed_checkpoint_the_overwriting_waits_for_its_files(tmp_path: Path) -> None:
    what, store = contents(1), sealing_store(tmp_path)
    unfinished = store.begin(1)
    files = unfinished.state_files(what.state.values, LAYOUT)
    with stepping(what.state, files) as made:
        assert not made, "nothing is written yet"
        files.abandon()
    assert made, "who does not need it holds up nobody"


@pytest.mark.parametrize("sealed", [False, True])
def test_a_failed_checkpoint_holds_up_no_step(tmp_path: Path, sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    what = contents(1)
    store: CheckpointStore = sealing_store(tmp_path / "checkpoints") if sealed else open_store(tmp_path)
    unfinished = store.begin(1)
    files = unfinished.state_files(what.state.values, LAYOUT)
    real = os.fsync

    def refuse(*_: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with stepping(what.state, files) as made, pytest.raises(StorageError):
        unfinished.add_state(files)
    monkeypatch.setattr(os, "fsync", real)
    assert made
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_shards_of_the_anchor_and_of_the_outer_optimizer_have_the_same_tensors(tmp_path: Path) -> None:
    kept = open_store(tmp_path).write(contents(0))
    (anchors,), (outer,) = kept.folder.glob("anchor-*"), kept.folder.glob("outer-*")
    names: Sequence[str] = [spec.name for spec in LAYOUT]
    assert sorted(load_file(anchors)) == sorted(names)
    assert sorted(load_file(outer)) == sorted(f"0.{name}" for name in names)
    assert sum(one.numel() for one in load_file(outer).values()) == ELEMENTS
