import errno
from pathlib import Path

import pytest
import torch

from shoal.peer.state_transfer.partial_state import IncomingFile, PartialState, WantedState, state_on_disk
from shoal.peer.training.anchor import AnchorState

SIZE = 5 * 2**17
"""Elements of each of the two rows: three chunks, the last one half."""


def make_state(seed: int = 0, version: int = 3) -> AnchorState:
    values = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(seed))
    return AnchorState.of(values, version)


def wanted_of(state: AnchorState) -> WantedState:
    return WantedState(state.version, state.digest, (2, SIZE))


def chunk_of(state: AnchorState, index: int) -> memoryview:
    return memoryview(state.values[:, index * 2**18 : (index + 1) * 2**18].numpy().tobytes())


def partial_of(state: AnchorState, folder: Path | None = None, only_anchor: bool = False) -> PartialState:
    partial = PartialState(wanted_of(state), folder, only_anchor=only_anchor)
    assert partial.learn_digests(state.chunk_digests)
    return partial


def take(partial: PartialState, state: AnchorState, *chunks: int) -> None:
    for chunk in chunks:
        assert partial.put(chunk, chunk_of(state, chunk))
        partial.missing.discard(chunk)
        partial.unwritten.append(chunk)


def written(state: AnchorState, folder: Path, *chunks: int) -> Path:
    """The file of a process that was killed after it had written these chunks."""
    partial = partial_of(state, folder)
    take(partial, state, *chunks)
    while partial.unwritten:
        partial.write_next()
    partial.close()
    (path,) = folder.iterdir()
    return path


def test_only_right_chunks_are_kept() -> None:
    state = make_state()
    partial = partial_of(state)
    assert len(partial.missing) == 3
    wrong = bytearray(chunk_of(state, 1))
    wrong[7] ^= 1
    for data in (wrong, chunk_of(state, 0), chunk_of(state, 1)[:-1], bytes(wrong) + b"x", b""):
        assert not partial.put(1, memoryview(data))
    take(partial, state, 2, 0, 1)
    found = partial.whole()
    assert torch.equal(found.values, state.values)
    assert found.digest == AnchorState.of(found.values, 3).digest
    assert found.chunk_digests == state.chunk_digests


def test_only_the_run_s_list_is_taken() -> None:
    state, other = make_state(), make_state(1)
    partial = PartialState(wanted_of(state))
    for digests in (other.chunk_digests, state.chunk_digests[:-32], state.chunk_digests + bytes(32), b""):
        assert not partial.learn_digests(digests)
    assert not PartialState(WantedState(4, state.digest, (2, SIZE))).learn_digests(state.chunk_digests)
    assert partial.learn_digests(state.chunk_digests)


def test_of_the_anchor_alone_nothing_else_is_kept() -> None:
    state = make_state()
    partial = partial_of(state, only_anchor=True)
    assert partial.missing == {0, 1, 2}
    assert partial.values.shape == (1, SIZE), "no memory for the rest"
    take(partial, state, 0, 1, 2)
    assert torch.equal(partial.values[0], state.anchor)
    wrong = bytearray(chunk_of(state, 2))
    wrong[-1] ^= 1
    assert not partial.put(2, memoryview(wrong)), "the rest is checked with it"


# On disk ------------------------------------------------------------------------------------------------------


def test_what_was_written_is_there_for_another_process(tmp_path: Path) -> None:
    state = make_state()
    written(state, tmp_path / "incoming", 2, 0)
    assert state_on_disk(tmp_path / "incoming") == wanted_of(state)
    partial = PartialState.resume(wanted_of(state), tmp_path / "incoming")
    assert (partial.missing, partial.resumed) == ({1}, 2)
    take(partial, state, 1)
    partial.write_next()
    partial.close()
    whole = PartialState.resume(wanted_of(state), tmp_path / "incoming").whole()
    assert torch.equal(whole.values, state.values)


def test_what_is_damaged_on_disk_is_fetched_again(tmp_path: Path) -> None:
    state = make_state()
    path = written(state, tmp_path, 0, 1, 2)
    data = bytearray(path.read_bytes())
    for flipped in (len(data) - 1, len(data) - 2**20 - 2**21):
        data[flipped] ^= 1
    path.write_bytes(data)
    assert PartialState.resume(wanted_of(state), tmp_path).missing == {1, 2}
    path.write_bytes(data[: -(2**20) - 7])
    assert PartialState.resume(wanted_of(state), tmp_path).missing == {1, 2}


def test_no_damage_of_the_head_is_believed(tmp_path: Path) -> None:
    state = make_state()
    path = written(state, tmp_path, 0)
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1 + 3 * 32
    for position in range(head):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        state_on_disk(tmp_path)
        partial = PartialState.resume(wanted_of(state), tmp_path)
        assert not partial.resumed or partial.put(0, chunk_of(state, 0)), position
        partial.close()
    for length in range(0, head, 11):
        path.write_bytes(whole[:length])
        state_on_disk(tmp_path)
        assert PartialState.resume(wanted_of(state), tmp_path).resumed == 0


def test_a_head_that_no_message_could_name_is_no_head(tmp_path: Path) -> None:
    path = written(make_state(version=13), tmp_path, 0)
    path.write_bytes(path.read_bytes().replace(b'"version": 13', b'"version": -3'))
    assert state_on_disk(tmp_path) is None


def test_another_state_s_file_goes_when_this_one_begins(tmp_path: Path) -> None:
    state, other = make_state(), make_state(1, 4)
    path = written(other, tmp_path, 0, 1)
    partial = PartialState.resume(wanted_of(state), tmp_path)
    assert (partial.resumed, len(partial.missing)) == (0, 3)
    partial.learn_digests(state.chunk_digests)
    take(partial, state, 0)
    partial.write_next()
    assert not path.exists()
    assert state_on_disk(tmp_path) == wanted_of(state)
    partial.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_means_going_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make_state()
    partial = partial_of(state, tmp_path)
    take(partial, state, 0, 1, 2)
    partial.write_next()

    def full(self: IncomingFile, offset: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(IncomingFile, "_write_at", full)
    with pytest.raises(OSError, match="No space left"):
        partial.write_next()
    assert partial.folder is None
    assert list(tmp_path.iterdir()) == [], "the disk is full enough"
    assert torch.equal(partial.whole().values, state.values)


def test_a_place_that_cannot_be_is_an_error_of_the_disk(tmp_path: Path) -> None:
    state = make_state()
    (tmp_path / "file").touch()
    partial = partial_of(state, tmp_path / "file" / "incoming")
    take(partial, state, 0)
    with pytest.raises(OSError, match="Not a directory"):
        partial.write_next()
    assert PartialState.resume(wanted_of(state), tmp_path / "file" / "incoming").resumed == 0
