"""Refusals of checkpoints: any changed or missing byte is noticed, and the error says what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from tests.peer.checkpoints.making import IDENTITY, RUN, MemorySource, contents, open_store
from tests.swarm.coordinator.world import SIGNER

from shoal.peer.checkpoints.checkpoint import Checkpoint, check_checkpoint, read_checkpoint
from shoal.peer.checkpoints.manifest import Manifest, read_manifest
from shoal.swarm.errors import StateFileError
from shoal.swarm.protocol.types import TensorSpec

TINY = (TensorSpec(name="w", shape=(3,)),)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> MemorySource:
    folder = tmp_path_factory.mktemp("checkpoint")
    own = {"steps": 3, "residual": torch.ones(3), "optimizer": {"state": {0: {"step": torch.tensor(2.0)}}}}
    return MemorySource.of(open_store(folder).write(contents(0, own, layout=TINY)).folder)


def refused(source: MemorySource) -> str:
    with pytest.raises(StateFileError) as caught:
        read_checkpoint(source, RUN.hash)
    return str(caught.value)


def test_it_is_accepted_as_it_was_written(source: MemorySource) -> None:
    assert isinstance(read_checkpoint(source, RUN.hash), Checkpoint)
    assert check_checkpoint(source, RUN.hash).manifest == read_manifest(source)


def test_every_flipped_byte_is_refused(source: MemorySource) -> None:
    for name, data in source.files.items():
        for position in range(len(data)):
            for flip in (0x01, 0x20, 0x80):
                changed = bytearray(data)
                changed[position] ^= flip
                message = refused(source.changed(name, bytes(changed)))
                assert message.startswith(f"{name}: "), (name, position, message)


def test_every_truncation_and_anything_appended_is_refused(source: MemorySource) -> None:
    for name, data in source.files.items():
        for length in range(len(data)):
            assert refused(source.changed(name, data[:length])).startswith(f"{name}: ")
        for more in (b"\0", b" ", b"\n", data):
            assert refused(source.changed(name, data + more)).startswith(f"{name}: ")


def test_every_missing_file_is_refused(source: MemorySource) -> None:
    for name in source.files:
        files = {other: data for other, data in source.files.items() if other != name}
        if name not in ("peer.safetensors", "residual.safetensors"):  # a copy that was made for others
            assert name in refused(MemorySource(files))


def test_swapped_files_are_refused(source: MemorySource) -> None:
    anchor, outer = "anchor-00001-of-00001.safetensors", "outer-00001-of-00001.safetensors"
    swapped = MemorySource({**source.files, anchor: source.files[outer], outer: source.files[anchor]})
    assert refused(swapped).startswith(f"{anchor}: s")


def test_files_of_another_checkpoint_are_refused(source: MemorySource, tmp_path: Path) -> None:
    other = MemorySource.of(open_store(tmp_path).write(contents(1, layout=TINY)).folder)
    for name in ("anchor-00001-of-00001.safetensors", "outer-00001-of-00001.safetensors", "manifest.json"):
        assert ": SHA-256: expected" in refused(source.changed(name, other.files[name]))


def test_a_refusal_names_file_field_and_what_was_expected(source: MemorySource) -> None:
    anchor = source.files["anchor-00001-of-00001.safetensors"]
    assert "size: expected" in refused(source.changed("anchor-00001-of-00001.safetensors", anchor[:-1]))
    other = read_manifest(source).model_copy(update={"run": "other"})
    message = refused(source.changed("manifest.json", other.file_bytes))
    assert (
        message
        == f"manifest.json: signature: expected that of peer {IDENTITY.peer_id} over all other fields, not another"
    )
    with pytest.raises(StateFileError, match=f"run_hash: expected {'00' * 32}, not {RUN.hash.hex()}"):
        read_checkpoint(source, bytes(32))
    spaced = json.dumps(json.loads(source.files["manifest.json"])).encode()
    assert "canonical JSON" in refused(source.changed("manifest.json", spaced))


def signed_as(source: MemorySource, **changes: Any) -> MemorySource:
    """The same checkpoint with another manifest that is properly signed, as an attacker could."""
    fields = {**json.loads(source.files["manifest.json"]), **changes}
    fields["identity_key"], fields["signature"] = SIGNER.public_key.hex(), "0" * 128
    unsigned = Manifest.model_validate_json(json.dumps(fields))
    signed = unsigned.model_copy(update={"signature": SIGNER.sign(unsigned.signed_bytes).hex()})
    return source.changed("manifest.json", signed.file_bytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state_digest": "0" * 64}, "state_digest: expected"),
        ({"anchor_version": 7}, "state_digest: expected"),
        ({"layout": [{"name": "v", "shape": [3]}]}, "tensor 'w': expected a name of the layout"),
        (
            {"layout": [{"name": "w", "shape": [1, 3]}]},
            "tensor 'w': expected torch.float32 of shape",
        ),
        ({"layout": [{"name": n, "shape": [s]} for n, s in (("w", 3), ("v", 0))]}, "also 'v'"),
        ({"outer_vectors": 2}, "also '1.w'"),
    ],
)
def test_a_signed_manifest_has_to_fit_its_files(source: MemorySource, changes: dict[str, Any], message: str) -> None:
    changed = signed_as(source, **changes)
    assert message in refused(changed)
    with pytest.raises(StateFileError) as caught:
        check_checkpoint(changed, RUN.hash)
    assert str(caught.value) == refused(changed), "also where no state is kept"


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": [{"name": "w", "shape": [2**40, 2**20]}]},
        {"layout": [{"name": "w", "shape": [3]}] * 2},
        {"outer_vectors": 17},
        {"files": {"../../x": [0, "0" * 64]}},
        {"files": {}},
        {"format": 2},
        {"round": -1},
        {"round": 1.0},
        {"run_hash": "AB" * 32},
        {"more": 1},
    ],
)
def test_manifests_that_make_no_sense_are_refused_before_any_memory_is_taken(
    source: MemorySource, changes: dict[str, Any]
) -> None:
    fields = {**json.loads(source.files["manifest.json"]), **changes}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert refused(source.changed("manifest.json", text)).startswith("manifest.json: ")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"null", b"[]", b"1" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b'"\\ud800"', b"\0" * 1000],
)
def test_what_is_no_manifest_is_refused(source: MemorySource, data: bytes) -> None:
    assert refused(source.changed("manifest.json", data)).startswith("manifest.json: ")


def _bomb(depth: int) -> bytes:
    return b"\x91" * depth


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("verdicts.msgpack", lambda: b"\xc1"),
        ("verdicts.msgpack", lambda: _bomb(100_000)),
        ("verdicts.msgpack", lambda: msgpack.packb(3)),
        ("verdicts.msgpack", lambda: msgpack.packb([{"round": 1}])),
        ("anchor-00001-of-00001.safetensors", lambda: b"x" * 12),
        ("anchor-00001-of-00001.safetensors", lambda: (2**63).to_bytes(8, "little") + bytes(12)),
        ("peer.safetensors", lambda: b""),
        ("residual.safetensors", lambda: bytes(8)),
    ],
)
def test_files_that_are_signed_and_make_no_sense_are_refused(
    source: MemorySource, name: str, make: Callable[[], bytes]
) -> None:
    import hashlib

    from shoal.peer.checkpoints.checkpoint import read_verdicts

    data = make()
    files = json.loads(source.files["manifest.json"])["files"]
    files[name] = [max(len(data), files[name][0]) if name.startswith("anchor") else len(data), ""]
    data = data.ljust(files[name][0], b"\0")
    files[name][1] = hashlib.sha256(data).hexdigest()
    changed = signed_as(source.changed(name, data), files=files)
    with pytest.raises(StateFileError, match=name):
        read_verdicts(changed, read_checkpoint(changed).manifest)
