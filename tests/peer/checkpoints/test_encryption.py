"""Sealed files and checkpoints: readers open them, and any changed bit is noticed."""

from pathlib import Path

import pytest
import torch
from tests.peer.checkpoints.making import IDENTITY, RUN, MemorySource, contents
from torch import nn
from typer.testing import CliRunner

from shoal.peer.checkpoints.checkpoint import Checkpoint, read_checkpoint
from shoal.peer.checkpoints.encryption import (
    ENVELOPE,
    HEADER_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    SealedSource,
    open_source,
    seal,
    sealed_bytes,
    unseal,
)
from shoal.peer.checkpoints.manifest import MANIFEST, read_manifest
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.store import CheckpointStore
from shoal.peer.cli.main import app
from shoal.peer.offline.export import export_model
from shoal.peer.offline.verify import Refused, Verified, find_checkpoints, verify_checkpoints
from shoal.swarm.errors import SealedForOthers, StateFileError
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.types import TensorSpec

KEY, NAME = bytes(range(32)), b"anchor"
READER, STRANGER = Identity.generate(), Identity.generate()
TINY = (TensorSpec(name="w", shape=(3,)),)
OWN = {"steps": 3, "residual": torch.ones(3)}
WHOLE = SEGMENT_BYTES + TAG_BYTES


def sealed_of(content: bytes) -> bytes:
    return b"".join(bytes(piece) for piece in seal(KEY, NAME, [content]))


def segments_of(sealed: bytes) -> list[bytes]:
    return [sealed[start : start + WHOLE] for start in range(HEADER_BYTES, len(sealed), WHOLE)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return sealing_store(tmp_path_factory.mktemp("sealed"))


def sealing_store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, RUN.hash, IDENTITY, Retention(), sealed_for=[READER.public_key])


@pytest.fixture(scope="module")
def source(store: CheckpointStore) -> MemorySource:
    return MemorySource.of(store.write(contents(0, OWN, layout=TINY)).folder)


def opens(source: MemorySource, identity: Identity = READER) -> Checkpoint:
    return read_checkpoint(open_source(source, identity), RUN.hash)


# One file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES])
def test_what_was_sealed_comes_out(size: int) -> None:
    content = (b"0123456" * (size // 7 + 1))[:size]
    sealed = sealed_of(content)
    assert len(sealed) == sealed_bytes(size)
    assert unseal(KEY, NAME, sealed, "file") == content
    in_pieces = seal(KEY, NAME, [content[: size // 3], memoryview(content)[size // 3 :], b""])
    assert unseal(KEY, NAME, b"".join(bytes(piece) for piece in in_pieces), "file") == content


def test_the_same_content_is_never_sealed_alike() -> None:
    first, second = sealed_of(bytes(100)), sealed_of(bytes(100))
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:]
    assert b"0" * 16 not in sealed_of(b"0" * 1000)


def test_segments_stay_where_they_are() -> None:
    content = bytes(2 * SEGMENT_BYTES) + b"end"
    sealed = sealed_of(content)
    header, (one, two, end) = sealed[:HEADER_BYTES], segments_of(sealed)
    wrong = {
        "without the last": [one, two],
        "without the first": [two, end],
        "in another order": [two, one, end],
        "one twice": [one, one, two, end],
        "the last alone": [end],
        "the last twice": [one, two, end, end],
        "none": [],
        "an empty one more": [one, two, end, bytes(TAG_BYTES)],
    }
    for what, segments in wrong.items():
        with pytest.raises(StateFileError, match=r"^file: "):
            unseal(KEY, NAME, header + b"".join(segments), what and "file")


def test_neither_another_name_nor_another_key_opens_it() -> None:
    sealed = sealed_of(b"content")
    for key, name in ((KEY, b"outer"), (bytes(32), NAME)):
        with pytest.raises(StateFileError, match="segment 0"):
            unseal(key, name, sealed, "file")


# A checkpoint -----------------------------------------------------------------------------------------------


def test_its_maker_and_its_readers_open_it_and_nobody_else(store: CheckpointStore, source: MemorySource) -> None:
    for identity in (IDENTITY, READER):
        found = opens(source, identity)
        assert found.own is not None
        assert found.own.restore(None, nn.Linear(1, 1)) == {"steps": 3}
        residual = torch.zeros(3)
        assert found.own.restore_residual(residual) == 12
        assert torch.equal(residual, torch.ones(3))
    assert [kept.round for kept in sealing_store(store.folder).kept()] == [0]
    for nobody in (STRANGER, None):
        with pytest.raises(SealedForOthers, match=r"sealed\.json: is sealed"):
            open_source(source, nobody)


def test_nothing_of_it_is_in_the_clear(source: MemorySource) -> None:
    assert sorted(source.files) == [
        "anchor-00001-of-00001.safetensors.sealed",
        "manifest.json.sealed",
        "outer-00001-of-00001.safetensors.sealed",
        "peer.safetensors.sealed",
        "residual.safetensors.sealed",
        "sealed.json",
        "verdicts.msgpack.sealed",
    ]
    for data in source.files.values():
        for word in (b"reef", b"recipe", b"float32", b"data_offsets"):
            assert word not in data


def places(name: str, data: bytes) -> range:
    """Every byte of the envelope, whose fields are each read; of sealed files, of which all is under one tag a segment,
    every third one. Three and eight have no common divisor, so that every bit of a byte has its turn."""
    return range(0, len(data), 1 if name == ENVELOPE else 3)


def test_flipped_bytes_are_refused(source: MemorySource) -> None:
    for name, data in source.files.items():
        for position in places(name, data):
            changed = bytearray(data)
            changed[position] ^= 1 << position % 8
            with pytest.raises(StateFileError) as refused:
                opens(source.changed(name, bytes(changed)))
            assert str(refused.value).startswith(f"{name}: "), (name, position, refused.value)


def test_truncations_and_anything_appended_are_refused(source: MemorySource) -> None:
    for name, data in source.files.items():
        for changed in (*(data[:length] for length in places(name, data)), data[:-1], data + b"\0", data + data):
            with pytest.raises(StateFileError, match=f"^{name}: "):
                opens(source.changed(name, changed))


def test_every_missing_file_is_refused(source: MemorySource) -> None:
    for name in source.files:
        if name not in ("peer.safetensors.sealed", "residual.safetensors.sealed"):  # a copy that was made for others
            files = {other: data for other, data in source.files.items() if other != name}
            with pytest.raises(StateFileError):
                opens(MemorySource(files))


def test_files_of_two_checkpoints_do_not_go_together(store: CheckpointStore, source: MemorySource) -> None:
    other = MemorySource.of(store.write(contents(1, OWN, layout=TINY)).folder)
    for name in source.files:
        with pytest.raises(StateFileError):
            opens(source.changed(name, other.files[name]))
    both = ("manifest.json.sealed", ENVELOPE)
    with pytest.raises(StateFileError, match=r"^(anchor|outer)"):  # an old manifest with new shards
        opens(MemorySource({**source.files, **{name: other.files[name] for name in both}}))


def test_files_under_each_others_names_are_refused(source: MemorySource) -> None:
    files = dict(source.files)
    one, two = "anchor-00001-of-00001.safetensors.sealed", "outer-00001-of-00001.safetensors.sealed"
    for names in ((one, two), (one, "manifest.json.sealed")):
        swapped = {**files, names[0]: files[names[1]], names[1]: files[names[0]]}
        with pytest.raises(StateFileError):
            opens(MemorySource(swapped))


def test_what_a_limit_allows_is_not_exceeded(source: MemorySource) -> None:
    with pytest.raises(StateFileError, match="at most"):
        SealedSource(source, READER).read(MANIFEST, 10)


def test_a_store_reads_both_kinds(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, RUN.hash, IDENTITY, Retention()).write(contents(0, OWN))
    store = sealing_store(tmp_path)
    sealed = store.write(contents(1, OWN))
    assert (sealed.folder / ENVELOPE).exists()
    assert not (sealed.folder / MANIFEST).exists()
    plain = CheckpointStore(tmp_path, RUN.hash, IDENTITY, Retention())
    assert [kept.round for kept in plain.kept()] == [1, 0]
    for kept in plain.kept():
        assert plain.load(kept).manifest.round == kept.round


def test_a_store_of_another_identity_leaves_it_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = sealing_store(tmp_path).write(contents(0, OWN))
    before = MemorySource.of(kept.folder)
    store = CheckpointStore(tmp_path, RUN.hash, STRANGER, Retention())
    assert store.kept() == ()
    assert "is none of them" in caplog.text
    assert MemorySource.of(kept.folder) == before


def test_the_signature_inside_tells_who_made_it(source: MemorySource) -> None:
    assert read_manifest(open_source(source, READER), RUN.hash).peer == IDENTITY.peer_id


def test_it_is_verified_and_exported_by_its_readers(tmp_path: Path) -> None:
    kept = sealing_store(tmp_path / "run" / "checkpoints").write(contents(2, OWN))
    for folder in (kept.folder, tmp_path):
        (checked,) = verify_checkpoints(find_checkpoints(folder), READER)
        assert isinstance(checked, Verified)
        assert checked.manifest.round == 2
        for nobody in (STRANGER, None):
            (refused,) = verify_checkpoints(find_checkpoints(folder), nobody)
            assert isinstance(refused, Refused)
            assert "sealed" in refused.reason
            assert refused.is_for_others
        out = tmp_path / "out" / "model.safetensors"
        assert export_model(folder, out, READER).version == 3
        with pytest.raises(SealedForOthers, match="sealed"):
            export_model(folder, tmp_path / "other" / "model.safetensors")


def test_to_be_sealed_for_others_is_no_damage(tmp_path: Path) -> None:
    kept = sealing_store(tmp_path / "run" / "checkpoints").write(contents(2, OWN))
    stranger = str(tmp_path / "stranger")
    Identity.load_or_create(Path(stranger))
    done = CliRunner().invoke(app, ["verify", str(tmp_path), "--identity", stranger])
    assert isinstance(done.exception, SealedForOthers)
    done = CliRunner().invoke(app, ["replay", str(tmp_path), "--identity", stranger])
    assert isinstance(done.exception, SealedForOthers)
    envelope = kept.folder / ENVELOPE
    envelope.write_bytes(envelope.read_bytes()[:-1])
    done = CliRunner().invoke(app, ["verify", str(tmp_path), "--identity", stranger])
    assert isinstance(done.exception, StateFileError)
    assert not isinstance(done.exception, SealedForOthers)
