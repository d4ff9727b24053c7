"""Manifests of shards: what is written is read again, and whatever else is refused, by field."""

import struct
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.peer.data.making import BLOCK, make_shards

from shoal.peer.data.manifest import MAX_MANIFEST_BYTES, TokenizerAbout, parse_manifest
from shoal.swarm.errors import CorpusError

_AT = 20


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    tokenizer = TokenizerAbout("reef", b"t" * 32, 1000, 3)
    manifest = make_shards(tmp_path, 5000, 1, 2048, tokenizer=tokenizer)
    read = parse_manifest(manifest.data, "there", manifest.digest)
    assert read.data == manifest.data
    assert (read.tokens, read.blocks, read.tokenizer, read.files) == (7049, 5, tokenizer, manifest.files)
    assert read.block_tokens.tolist() == [2048, 2048, 904, 1, 2048]
    assert [read.place(block) for block in (2, 3, 4)] == [
        (manifest.files[0], 2 * BLOCK, 10_000),
        (manifest.files[1], 0, 2),
        (manifest.files[2], 0, BLOCK),
    ]


def test_another_digest_is_refused(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path, 100)
    with pytest.raises(CorpusError, match=f"there: BLAKE3 digest: expected {manifest.digest.hex()}, .* not "):
        parse_manifest(manifest.data[:-1] + b"!", "there", manifest.digest)


def changed(data: bytes, **fields: Any) -> bytes:
    (size,) = struct.unpack_from("<I", data, _AT - 4)
    head = msgpack.packb(msgpack.unpackb(data[_AT : _AT + size]) | fields)
    return data[: _AT - 4] + struct.pack("<I", len(head)) + head + data[_AT + size :]


TOKENIZER = {"name": "reef", "digest": b"", "vocab": 256, "end": 0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "f4"}, "dtype: expected u8, u16 or u32, not 'f4'"),
        ({"dtype": 2}, "dtype: expected a text"),
        ({"block_bytes": 2**40}, "block_bytes: expected an integer from 4096"),
        ({"block_bytes": True}, "block_bytes: expected an integer"),
        ({"block_bytes": 4097}, "block_bytes: expected a multiple of 4"),
        ({"more": 1}, "head: expected the fields"),
        ({"tokenizer": []}, "tokenizer: expected the fields"),
        ({"tokenizer": TOKENIZER | {"vocab": 65_537}}, "tokenizer.vocab: expected an integer from 1 to 65536"),
        ({"tokenizer": TOKENIZER | {"end": 256}}, "tokenizer.end: expected an integer from 0 to 255"),
        ({"tokenizer": TOKENIZER | {"digest": b"short"}}, "tokenizer.digest: expected 32 bytes"),
        ({"tokenizer": TOKENIZER | {"name": "a\x1b[2J"}}, "tokenizer.name: expected a text"),
        ({"files": []}, "files: expected a list of 1 to"),
        ({"files": [["a.u16"]]}, "files.0: expected name and size"),
        ({"files": [["../a.u16", 200]]}, "files.0.name: expected a new relative name"),
        ({"files": [["/etc/passwd", 200]]}, "files.0.name"),
        ({"files": [["a/.b", 200]]}, "files.0.name"),
        ({"files": [["a", 200], ["a", 200]]}, "files.1.name"),
        ({"files": [["a", 201]]}, "files.0.size: expected bytes of tokens of 2 bytes, not 201"),
        ({"files": [["a", 0]]}, "files.0.size"),
        ({"files": [["a", 2**44]]}, "digests: expected 4,294,967,296 of 32 bytes"),
        ({"files": [["a", 2**62]]}, "files.0.size"),
    ],
)
def test_fields_are_checked(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    data = changed(make_shards(tmp_path, 100).data, **fields)
    with pytest.raises(CorpusError) as refused:
        parse_manifest(data, "there")
    assert f"there: {message}" in str(refused.value)


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    data = make_shards(tmp_path, 100).data
    nested = b"\x91" * 5000 + b"\xc0"
    deep = data[: _AT - 4] + struct.pack("<I", len(nested)) + nested
    for bad in (b"", b"<html>", data[:10], data[:30], data[:-1], data + b"x" * 32, deep, data[:16] + b"\xff" * 40):
        with pytest.raises(CorpusError, match="there: "):
            parse_manifest(bad, "there")
    with pytest.raises(CorpusError, match="size: expected at most"):
        parse_manifest(bytes(MAX_MANIFEST_BYTES + 1), "there")


@given(at=st.integers(0, 400), value=st.integers(0, 255))
def test_no_byte_makes_another_error(tmp_path_factory: pytest.TempPathFactory, at: int, value: int) -> None:
    data = bytearray(DATA)
    data[at % len(data)] = value
    try:
        manifest = parse_manifest(bytes(data), "there")
    except CorpusError:
        return
    assert manifest.block_tokens.sum() == manifest.tokens


def _data() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return make_shards(Path(folder), 3000, 100).data


DATA = _data()


def test_blocks_are_where_numpy_says() -> None:
    manifest = parse_manifest(DATA, "there")
    assert manifest.first_blocks.tolist() == [0, 2, 3]
    assert isinstance(manifest.block_digest(0), bytes)
    assert np.frombuffer(manifest.block_digest(2), np.uint8).tolist() == manifest.digests[2].tolist()
