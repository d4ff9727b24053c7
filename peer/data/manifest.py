"""Manifest of token shards: which files, of which tokens, with a digest for each block.

A run file pins the manifest by its BLAKE3 digest, and with it all blocks, so it does not matter where bytes come from.
Layout: ``MAGIC``, size of the head as uint32, the head in msgpack, and 32 bytes for each block of each file in order.
The head is small, so that a hostile one costs little to unpack; the digests are never unpacked at all."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shoal.swarm.errors import CorpusError

MANIFEST = "shards.manifest"
"""Name of the manifest beside its shards."""

MAX_MANIFEST_BYTES = 16 * 2**20
"""Largest manifest: half a million blocks, 2 TB of shards in blocks of the usual size."""

BLOCK_BYTES = 4 * 2**20
"""Usual size of a block, the unit of digests and downloads."""

MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 2**12, 2**26
MAX_FILES = 2**15
MAX_VOCAB = 2**31
DIGEST_BYTES = 32

DTYPES: dict[str, npt.DTypeLike] = {"u8": "u1", "u16": "<u2", "u32": "<u4"}

_MAGIC = b"shoal shards 1\0\0"
_SIZE = struct.Struct("<I")
_MAX_HEAD_BYTES = 2**20
_MAX_FILE_BYTES = 2**45
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_+=.-]*(/[A-Za-z0-9_][A-Za-z0-9_+=.-]*)*")
_MAX_NAME = 200


@dataclass(frozen=True)
class TokenizerAbout:
    """The tokenizer of the shards: name, BLAKE3 of its ``tokenizer.json`` (empty for bytes), number of tokens.

    ``end``: the token after each document, if there is one."""

    name: str
    digest: bytes
    vocab: int
    end: int | None = None


BYTES = TokenizerAbout("bytes", b"", 256, 0)
"""Text as it is: a byte a token, and a zero byte after each document."""


@dataclass(frozen=True)
class ShardFile:
    """A file of tokens. ``name``: relative to the manifest, with ``/``."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """Shards of a corpus: ``files`` of little-endian ``dtype``, cut into blocks of ``block_bytes`` each.

    A block never spans files. ``digests``: ``(blocks, 32) uint8``, BLAKE3 of each block."""

    dtype: str
    block_bytes: int
    tokenizer: TokenizerAbout
    files: tuple[ShardFile, ...]
    digests: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        assert self.digests.shape == (sum(blocks_of(one.size_bytes, self.block_bytes) for one in self.files), 32)

    @property
    def blocks(self) -> int:
        return len(self.digests)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)

    @property
    def token_bytes(self) -> int:
        return np.dtype(DTYPES[self.dtype]).itemsize

    @property
    def tokens(self) -> int:
        return self.size_bytes // self.token_bytes

    @cached_property
    def first_blocks(self) -> npt.NDArray[np.int64]:
        """Number of the first block of each file, and the number of blocks: ``(files + 1,)``."""
        sizes = np.array([one.size_bytes for one in self.files], dtype=np.int64)
        return np.concatenate([[0], np.cumsum(-(-sizes // self.block_bytes))])

    @cached_property
    def block_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of each block, ``(blocks,)``: all are full but the last of each file."""
        tokens = np.full(self.blocks, self.block_bytes // self.token_bytes, dtype=np.int64)
        sizes = np.array([one.size_bytes for one in self.files], dtype=np.int64)
        last = sizes - (np.diff(self.first_blocks) - 1) * self.block_bytes
        tokens[self.first_blocks[1:] - 1] = last // self.token_bytes
        return tokens

    def file_of(self, block: int) -> int:
        """Number of the file that a block is in."""
        return int(np.searchsorted(self.first_blocks, block, side="right")) - 1

    def place(self, block: int) -> tuple[ShardFile, int, int]:
        """The file of a block, and the bytes [start, stop) in it."""
        number = self.file_of(block)
        start = (block - int(self.first_blocks[number])) * self.block_bytes
        return self.files[number], start, min(start + self.block_bytes, self.files[number].size_bytes)

    def block_digest(self, block: int) -> bytes:
        digest: bytes = self.digests[block].tobytes()
        return digest

    @cached_property
    def data(self) -> bytes:
        """The manifest as a file."""
        about = self.tokenizer
        head: bytes = msgpack.packb(
            {
                "dtype": self.dtype,
                "block_bytes": self.block_bytes,
                "tokenizer": {"name": about.name, "digest": about.digest, "vocab": about.vocab, "end": about.end},
                "files": [[one.name, one.size_bytes] for one in self.files],
            }
        )
        data = _MAGIC + _SIZE.pack(len(head)) + head + self.digests.tobytes()
        if len(head) > _MAX_HEAD_BYTES or len(data) > MAX_MANIFEST_BYTES:
            raise CorpusError(
                f"{len(self.files):,} files in {self.blocks:,} blocks are more than a manifest can have: make fewer, "
                "longer files, or blocks that are larger"
            )
        return bytes(data)

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of the file, as in ``data.manifest`` of a run file."""
        return blake3(self.data).digest()


def blocks_of(size_bytes: int, block_bytes: int) -> int:
    return -(-size_bytes // block_bytes)


def parse_manifest(data: bytes, where: str, digest: bytes | None = None) -> Manifest:
    """Read a manifest. ``where``: for messages; ``digest``: the one that it must have, if that is known.

    Raises ``CorpusError`` that names the field and what was expected."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise _refusal(where, "size", f"at most {MAX_MANIFEST_BYTES:,} bytes", f"{len(data):,}")
    if digest is not None and (found := blake3(data).digest()) != digest:
        raise _refusal(where, "BLAKE3 digest", f"{digest.hex()}, as in the run file", found.hex())
    at = len(_MAGIC) + _SIZE.size
    if len(data) < at or data[: len(_MAGIC)] != _MAGIC:
        raise _refusal(where, "beginning", "that of a manifest of token shards, version 1", repr(data[:16]))
    (size,) = _SIZE.unpack_from(data, len(_MAGIC))
    if size > min(_MAX_HEAD_BYTES, len(data) - at):
        raise _refusal(
            where, "size of the head", f"at most {min(_MAX_HEAD_BYTES, len(data) - at):,} bytes", f"{size:,}"
        )
    try:
        head = msgpack.unpackb(data[at : at + size], max_ext_len=0)
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise CorpusError(f"{where}: head: expected msgpack ({type(error).__name__})") from error
    fields = _Fields(head, where, ("dtype", "block_bytes", "tokenizer", "files"))
    dtype = fields.text("dtype", 8)
    if dtype not in DTYPES:
        raise _refusal(where, "dtype", "u8, u16 or u32", repr(dtype))
    token_bytes = np.dtype(DTYPES[dtype]).itemsize
    block_bytes = fields.integer("block_bytes", MIN_BLOCK_BYTES, MAX_BLOCK_BYTES)
    if block_bytes % 4:
        raise _refusal(where, "block_bytes", "a multiple of 4", str(block_bytes))
    tokenizer = _tokenizer(fields.content["tokenizer"], where, dtype)
    files = _files(fields.content["files"], where, token_bytes)
    blocks = sum(blocks_of(one.size_bytes, block_bytes) for one in files)
    digests = np.frombuffer(data, np.uint8, offset=at + size)
    if len(digests) != blocks * DIGEST_BYTES:
        raise _refusal(
            where, "digests", f"{blocks:,} of {DIGEST_BYTES} bytes, for its files", f"{len(digests):,} bytes"
        )
    return Manifest(dtype, block_bytes, tokenizer, files, digests.reshape(blocks, DIGEST_BYTES))


def _tokenizer(content: Any, where: str, dtype: str) -> TokenizerAbout:
    fields = _Fields(content, where, ("name", "digest", "vocab", "end"), "tokenizer.")
    name = fields.text("name", _MAX_NAME)
    digest = content["digest"]
    if not isinstance(digest, bytes) or len(digest) not in (0, DIGEST_BYTES):
        raise _refusal(where, "tokenizer.digest", f"{DIGEST_BYTES} bytes or none", _shown(digest))
    largest = min(MAX_VOCAB, 2 ** (8 * np.dtype(DTYPES[dtype]).itemsize))
    vocab = fields.integer("vocab", 1, largest)
    end = None if content["end"] is None else fields.integer("end", 0, vocab - 1)
    return TokenizerAbout(name, digest, vocab, end)


def _files(content: Any, where: str, token_bytes: int) -> tuple[ShardFile, ...]:
    if not isinstance(content, list) or not 0 < len(content) <= MAX_FILES:
        raise _refusal(where, "files", f"a list of 1 to {MAX_FILES:,} files", _shown(content))
    files, seen = [], set()
    for number, one in enumerate(content):
        field = f"files.{number}"
        if not isinstance(one, list) or len(one) != 2:
            raise _refusal(where, field, "name and size", _shown(one))
        name, size = one
        if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(name) or name in seen:
            raise _refusal(where, f"{field}.name", "a new relative name without hidden parts", _shown(name))
        if type(size) is not int or not 0 < size <= _MAX_FILE_BYTES or size % token_bytes:
            raise _refusal(where, f"{field}.size", f"bytes of tokens of {token_bytes} bytes", _shown(size))
        seen.add(name)
        files.append(ShardFile(name, size))
    return tuple(files)


class _Fields:
    """Fields of a map from outside, each of which must be there, and no other."""

    def __init__(self, content: Any, where: str, names: tuple[str, ...], prefix: str = "") -> None:
        self._where, self._prefix = where, prefix
        if not isinstance(content, dict) or set(content) != set(names):
            raise _refusal(where, prefix.rstrip(".") or "head", f"the fields {', '.join(names)}", _shown(content))
        self.content: dict[str, Any] = content

    def text(self, name: str, longest: int) -> str:
        value = self.content[name]
        if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
            raise _refusal(self._where, self._prefix + name, f"a text of at most {longest} letters", _shown(value))
        return value

    def integer(self, name: str, least: int, most: int) -> int:
        value = self.content[name]
        if type(value) is not int or not least <= value <= most:
            raise _refusal(self._where, self._prefix + name, f"an integer from {least} to {most}", _shown(value))
        return value


def _shown(value: Any) -> str:
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, dict | list) else repr(value)[:80]


def _refusal(where: str, field: str, expected: str, found: str) -> CorpusError:
    return CorpusError(f"{where}: {field}: expected {expected}, not {found}; fetch or build the shards again")
