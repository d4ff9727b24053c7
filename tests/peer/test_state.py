import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shoal.peer import state as state_module
from shoal.peer.state import State, load_carried, load_state, save_state, state_digest
from shoal.swarm.averaging.outcomes import Carried
from shoal.swarm.errors import StateFileError, StorageError

SIZE = 300_000
"""Elements: the state below takes three chunks, the last one short."""


def make_state(version: int = 3, seed: int = 0, size: int = SIZE) -> State:
    generator = torch.Generator().manual_seed(seed)
    return State.make(torch.randn(size, generator=generator), torch.randn(1, size, generator=generator), version)


ABOUT = {"run": "test", "layout": [{"name": "w", "shape": [3]}]}


def test_the_digest_covers_everything() -> None:
    base = make_state()
    assert base.digest == make_state().digest == State.of(base.values, 3).digest
    assert torch.equal(torch.cat([base.anchor.unsqueeze(0), base.outer]), base.values)
    other = base.values.clone()
    other[1, -1] += 1e-3
    negative = base.values.clone()
    negative[0, 0] = 0.0
    positive = negative.clone()
    negative[0, 0] = -0.0
    states = [base, make_state(4), State.of(other, 3), State.of(base.values.view(4, -1), 3)]
    states += [State.of(negative, 3), State.of(positive, 3)]
    assert len({state.digest for state in states}) == len(states)


def test_the_digest_is_a_hash_of_chunk_hashes() -> None:
    state = make_state(5, size=5 * 2**18 + 7)  # eleven chunks, the last one short
    data = state.values.numpy().tobytes()
    digests = b"".join(hashlib.sha256(data[at : at + 2**20]).digest() for at in range(0, len(data), 2**20))
    assert state.chunk_digests == digests
    assert state.digest == hashlib.sha256(b"shoal state 2 5 (2, 1310727)\0" + digests).digest()
    assert state.digest == state_digest(5, (2, 1310727), digests)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_digest(threads: int) -> None:
    values, before = torch.randn(2, 10 * 2**18 + 1), torch.get_num_threads()
    expected = State.of(values, 1).digest
    torch.set_num_threads(threads)
    try:
        assert State.of(values, 1).digest == expected
    finally:
        torch.set_num_threads(before)


# Files --------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    path, state = tmp_path / "new" / "folder" / "state.safetensors", make_state()
    save_state(path, state, ABOUT)
    loaded, about = load_state(path)
    assert torch.equal(loaded.values, state.values)
    assert (loaded.version, loaded.digest, about) == (3, state.digest, ABOUT)
    save_state(path, make_state(4, 1), {})
    assert load_state(path)[0].digest == make_state(4, 1).digest
    assert [one.name for one in path.parent.iterdir()] == [path.name], "nothing else is left"


def test_what_a_peer_carries_round_trips(tmp_path: Path) -> None:
    path, carried = tmp_path / "state", Carried(torch.randn(7), 12)
    save_state(path, make_state(), ABOUT, carried)
    assert load_state(path)[0].digest == make_state().digest
    loaded = load_carried(path)
    assert loaded is not None
    assert torch.equal(loaded.residual, carried.residual)
    assert loaded.weight_tokens == 12
    save_state(path, make_state(), ABOUT)
    assert load_carried(path) is None


def test_a_damaged_residual_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, make_state(size=10), ABOUT, Carried(torch.ones(100), 12))
    whole = path.read_bytes()
    place = whole.index(torch.ones(100).numpy().tobytes())
    for position in range(place, place + 400, 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(StateFileError, match="residual"):
            load_carried(path)
    path.write_bytes(whole.replace(b'"residual_weight":"12"', b'"residual_weight":"13"'))
    with pytest.raises(StateFileError, match="residual"):
        load_carried(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(StateFileError):
        load_carried(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, make_state(size=100), ABOUT)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(StateFileError, match="state"):
            load_state(path)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, make_state(size=100), ABOUT)
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    text = whole[8:header].decode()
    spared = text.rstrip()
    for position in [*range(8 + len(spared)), *range(header, len(whole), 11)]:
        for flip in (0x01, 0x20):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
            try:
                loaded, about = load_state(path)
            except StateFileError:
                continue
            # Hexadecimal digits and escapes may be written in more than one way.
            assert torch.equal(loaded.values, make_state(size=100).values), position
            assert about == ABOUT, position


def test_appended_bytes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, make_state(size=100), ABOUT)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(StateFileError):
        load_state(path)


@pytest.mark.parametrize("case", ["missing", "folder", "empty", "text", "foreign", "format", "dtype", "shape", "about"])
def test_files_of_another_kind_are_refused(tmp_path: Path, case: str) -> None:
    path, state = tmp_path / "state", make_state(size=100)
    header = {"format": "shoal-state-2", "version": "3", "digest": state.digest.hex(), "about": json.dumps(ABOUT)}
    values = state.values
    match case:
        case "missing":
            pass
        case "folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "text":
            path.write_text("hello " * 100)
        case "foreign":
            save_file({"values": values}, path)
        case "format":
            save_file({"values": values}, path, header | {"format": "shoal-state-0"})
        case "dtype":
            save_file({"values": values.double()}, path, header | {"about_digest": ""})
        case "shape":
            save_file({"values": values.view(-1)}, path, header | {"about_digest": ""})
        case "about":
            save_file({"values": values}, path, header | {"about": "[]", "about_digest": ""})
    with pytest.raises(StateFileError, match=str(path)):
        load_state(path)


def test_the_refusal_names_format_and_file(tmp_path: Path) -> None:
    save_file({"values": torch.zeros(1, 1)}, tmp_path / "x", {"format": "other"})
    with pytest.raises(StateFileError, match=r"x: not a Shoal state file \(format: expected shoal-state-2\)"):
        load_state(tmp_path / "x")


def test_a_full_disk_leaves_the_earlier_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, make_state(), ABOUT)
    program = f"""
import resource, sys, torch
from pathlib import Path
from shoal.peer.state import State, save_state
from shoal.swarm.errors import StorageError
state = State.make(torch.ones({SIZE}), torch.zeros(1, {SIZE}), 4)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    save_state(Path({str(path)!r}), state, {{}})
except StorageError as error:
    print(error)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": ".src"}, check=True
    )
    assert "the state cannot be saved" in found.stdout
    assert load_state(path)[0].digest == make_state().digest
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_sync_counts_as_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    save_state(path, make_state(), ABOUT)

    def fsync(file: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="broken"):
        save_state(path, make_state(4), ABOUT)
    assert load_state(path)[0].version == 3
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        save_state(tmp_path / "file" / "state", make_state(size=10), {})


def test_two_saves_at_once_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, inside, most = tmp_path / "state", 0, 0
    original = state_module.save_file

    def counted(*args: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        original(*args)  # type: ignore[arg-type]
        inside -= 1

    monkeypatch.setattr(state_module, "save_file", counted)
    threads = [
        threading.Thread(target=save_state, args=(path, make_state(version, version), ABOUT)) for version in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state, _ = load_state(path)
    assert most == 1
    assert state.digest == make_state(state.version, state.version).digest
