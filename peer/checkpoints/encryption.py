"""Encryption of checkpoints for readers: every file of a plain one sealed, and ``sealed.json`` with the wrapped keys.

Every checkpoint has a key of its own. ``sealed.json`` holds it once for each reader, wrapped with HPKE (RFC 9180:
X25519, HKDF-SHA256, AES-256-GCM). Files are sealed under keys that are derived from it and their names, and an HMAC
under it covers ``sealed.json`` itself, so files of two checkpoints, or under each other's names, cannot be combined.
The signed manifest inside says who made the checkpoint.

A file is encrypted and authenticated segment by segment, so that neither side ever needs all of it twice in memory: the
STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár: Online Authenticated-Encryption and its Nonce-Reuse
Misuse-Resistance, 2015) over AES-256-GCM. Each segment of 1 MiB is sealed under a nonce of its number and of whether it
is the last one. So a segment that was changed, moved, dropped or added is noticed, and so is a file that was cut or
extended at a segment's border. A file is 8 bytes of format, 16 of salt, and the segments, each 16 bytes longer than its
content."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import Field, StringConstraints

from shoal.peer.checkpoints.manifest import FileEntry, Hex32, canonical_json
from shoal.peer.checkpoints.source import CheckpointSource, FileContent, refusal
from shoal.swarm.errors import SealedForOthers, StateFileError
from shoal.swarm.protocol.identity import Identity, key_text, seal_to
from shoal.swarm.protocol.types import MAX_TENSORS, Record

SEGMENT_BYTES = 2**20
TAG_BYTES = 16
_FORMAT = b"shoalse1"
_SALT_BYTES = 16
HEADER_BYTES = len(_FORMAT) + _SALT_BYTES
_CONTEXT = b"shoal sealed file, version 1\0"
_NONCE = struct.Struct("!7xI?")
_MAX_SEGMENTS = 2**32

ENVELOPE = "sealed.json"
SUFFIX = ".sealed"
MAX_ENVELOPE_BYTES = 64 * 2**20
_WRAP_CONTEXT = b"shoal sealed checkpoint key, version 1\0"
_MAC_CONTEXT = b"shoal sealed checkpoint, version 1\0"
_FILE_NAME = r"^[a-z0-9][a-z0-9.-]{0,60}\.sealed$"

WriteFile = Callable[[str, Iterable[bytes | memoryview]], FileEntry]
"""Writes a file of that name and content; returns its size and digest."""


def sealed_bytes(content_bytes: int) -> int:
    """Size of a sealed file by the size of its content."""
    segments = max(1, -(-content_bytes // SEGMENT_BYTES))
    return HEADER_BYTES + content_bytes + segments * TAG_BYTES


def content_bytes(size_bytes: int) -> int:
    """Size of a sealed file's content by the size of the file."""
    rest = max(0, size_bytes - HEADER_BYTES)
    return max(0, rest - max(1, -(-rest // (SEGMENT_BYTES + TAG_BYTES))) * TAG_BYTES)


def seal(key: bytes, name: bytes, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the sealed file of this content, in pieces; each is to be used before the next one is requested.

    ``key``: 32 secret bytes; ``name``: the file's, which ``unseal`` needs again."""
    salt = secrets.token_bytes(_SALT_BYTES)
    cipher = _cipher(key, salt, name)
    yield _FORMAT + salt
    held, sealed = memoryview(bytearray(SEGMENT_BYTES)), memoryview(bytearray(SEGMENT_BYTES + TAG_BYTES))
    number = filled = 0
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest.nbytes:
            if filled == SEGMENT_BYTES:  # more follows, so the full segment is not the last one
                cipher.encrypt_into(_nonce(number, last=False), held, None, sealed)
                yield sealed
                number, filled = number + 1, 0
            taken = min(rest.nbytes, SEGMENT_BYTES - filled)
            held[filled : filled + taken] = rest[:taken]
            filled, rest = filled + taken, rest[taken:]
    last = sealed[: filled + TAG_BYTES]
    cipher.encrypt_into(_nonce(number, last=True), held[:filled], None, last)
    yield last


def unseal(key: bytes, name: bytes, data: bytes, place: str) -> bytes:
    """The content of a sealed file; errors call it ``place``.

    Raises ``StateFileError`` if any bit of it has changed, or if it was sealed under another name."""
    if len(data) < HEADER_BYTES + TAG_BYTES or not data.startswith(_FORMAT):
        raise StateFileError(f"{place}: its beginning: expected that of a sealed file, not {data[:8]!r}")
    cipher = _cipher(key, data[len(_FORMAT) : HEADER_BYTES], name)
    content = []
    starts = range(HEADER_BYTES, len(data), SEGMENT_BYTES + TAG_BYTES)
    for number, start in enumerate(starts):
        segment = memoryview(data)[start : start + SEGMENT_BYTES + TAG_BYTES]
        last = number == len(starts) - 1
        try:
            content.append(cipher.decrypt(_nonce(number, last=last), segment, None))
        except (InvalidTag, ValueError) as error:
            raise _bad_segment(place, number) from error
    return b"".join(content)


def _bad_segment(place: str, number: int) -> StateFileError:
    return StateFileError(
        f"{place}: its segment {number}: expected what was sealed here under this name; it is damaged, cut short, or "
        "of another checkpoint"
    )


class UnsealedContent:
    """Content of a sealed file, of which one segment is in memory at a time (a ``FileContent``).

    What is returned has been authenticated, and what was not read has not."""

    def __init__(self, sealed: FileContent, key: bytes, name: bytes, place: str) -> None:
        """Raises ``StateFileError`` for what is no sealed file."""
        header = bytearray(HEADER_BYTES)
        if sealed.size_bytes >= HEADER_BYTES + TAG_BYTES:
            sealed.read_into(0, memoryview(header))
        if not header.startswith(_FORMAT):
            raise StateFileError(f"{place}: its beginning: expected that of a sealed file, not {bytes(header[:8])!r}")
        self.size_bytes = content_bytes(sealed.size_bytes)
        self._sealed = sealed
        self._place = place
        self._cipher = _cipher(key, bytes(header[len(_FORMAT) :]), name)
        self._number = -1
        self._segment = memoryview(b"")
        self._encrypted = memoryview(bytearray(SEGMENT_BYTES + TAG_BYTES))
        self._opened = memoryview(bytearray(SEGMENT_BYTES))

    def read_into(self, at: int, out: memoryview) -> None:
        while out.nbytes:
            number, offset = divmod(at, SEGMENT_BYTES)
            if number != self._number:
                self._open(number)
            piece = self._segment[offset : offset + out.nbytes]
            if not piece:
                raise refusal(self._place, "size", f"more than {self.size_bytes} bytes of content", "less")
            out[: piece.nbytes] = piece
            at, out = at + piece.nbytes, out[piece.nbytes :]

    def _open(self, number: int) -> None:
        start = HEADER_BYTES + number * (SEGMENT_BYTES + TAG_BYTES)
        stop = min(start + SEGMENT_BYTES + TAG_BYTES, self._sealed.size_bytes)
        encrypted = self._encrypted[: max(0, stop - start)]
        self._number = -1
        self._sealed.read_into(start, encrypted)
        opened = self._opened[: max(0, encrypted.nbytes - TAG_BYTES)]
        nonce = _nonce(number, last=stop == self._sealed.size_bytes)
        try:
            self._cipher.decrypt_into(nonce, encrypted, None, opened)
        except (InvalidTag, ValueError) as error:
            raise _bad_segment(self._place, number) from error
        self._number, self._segment = number, opened


def _cipher(key: bytes, salt: bytes, name: bytes) -> AESGCM:
    """Cipher with a key of its own for each file and each time that it is written: so nonces may begin at 0."""
    return AESGCM(HKDF(hashes.SHA256(), 32, salt, _CONTEXT + name).derive(key))


def _nonce(number: int, *, last: bool) -> bytes:
    assert number < _MAX_SEGMENTS, "files are smaller than 4 PiB"
    return _NONCE.pack(number, last)


class Envelope(Record):
    """``sealed.json``, in its canonical JSON.

    ``checkpoint``: a random number; ``readers``: the wrapped key by Ed25519 public key; ``files``: bytes and SHA-256 of
    the sealed files."""

    format: Literal[1]
    checkpoint: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    readers: Annotated[
        dict[Hex32, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{160}$")]], Field(min_length=1, max_length=257)
    ]
    files: Annotated[
        dict[Annotated[str, StringConstraints(pattern=_FILE_NAME)], FileEntry], Field(max_length=MAX_TENSORS)
    ]
    mac: Hex32

    @property
    def file_bytes(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    def mac_under(self, key: bytes) -> str:
        """HMAC-SHA256 of all other fields."""
        mac_key = HKDF(hashes.SHA256(), 32, None, _MAC_CONTEXT).derive(key)
        content = canonical_json(self.model_dump(mode="json", exclude={"mac"}))
        return hmac.new(mac_key, content, hashlib.sha256).hexdigest()


class Sealing:
    """Seals one checkpoint for readers, given by their raw Ed25519 public keys."""

    def __init__(self, readers: Iterable[bytes]) -> None:
        self._key = secrets.token_bytes(32)
        self._number = secrets.token_bytes(16)
        self._files: dict[str, FileEntry] = {}
        self._readers = {reader.hex(): seal_to(reader, self._key, _WRAP_CONTEXT + self._number) for reader in readers}

    def write(self, name: str, pieces: Iterable[bytes | memoryview], write_file: WriteFile) -> FileEntry:
        """Write a file sealed; return size and digest of its content."""
        digest, size_bytes = hashlib.sha256(), 0

        def measured() -> Iterator[bytes | memoryview]:
            nonlocal size_bytes
            for piece in pieces:
                digest.update(piece)
                size_bytes += len(piece)
                yield piece

        sealed = seal(self._key, self._number + name.encode(), measured())
        self._files[name + SUFFIX] = write_file(name + SUFFIX, sealed)
        return size_bytes, digest.hexdigest()

    def envelope(self) -> bytes:
        """The content of ``sealed.json``, once all files are written."""
        blank = Envelope(
            format=1,
            checkpoint=self._number.hex(),
            readers={reader: wrapped.hex() for reader, wrapped in self._readers.items()},
            files=self._files,
            mac=64 * "0",
        )
        return blank.model_copy(update={"mac": blank.mac_under(self._key)}).file_bytes


class SealedSource:
    """The files of a sealed checkpoint, opened with an identity (a ``CheckpointSource``)."""

    def __init__(self, sealed: CheckpointSource, identity: Identity) -> None:
        """Raises ``StateFileError`` for a damaged ``sealed.json``, ``SealedForOthers`` for an identity that is no
        reader."""
        self._sealed = sealed
        self._envelope = read_envelope(sealed)
        self._number = bytes.fromhex(self._envelope.checkpoint)
        self._key = self._unwrap(identity)

    def place(self, name: str) -> str:
        return self._sealed.place(name + SUFFIX)

    def has(self, name: str) -> bool:
        return self._sealed.has(name + SUFFIX)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Raises ``StateFileError``, also for a file that is longer than ``limit_bytes``."""
        place, size_bytes = self.place(name), self._listed_bytes(name)
        if size_bytes > sealed_bytes(limit_bytes):
            raise refusal(place, "size", f"{sealed_bytes(limit_bytes)} bytes at most", str(size_bytes))
        data = self._sealed.read(name + SUFFIX, size_bytes)
        if len(data) != size_bytes:
            raise refusal(place, "size", f"{size_bytes} bytes", "more" if len(data) > size_bytes else str(len(data)))
        return unseal(self._key, self._number + name.encode(), data, place)

    @contextmanager
    def open(self, name: str) -> Iterator[FileContent]:
        """Raises ``StateFileError``, also for a file of another size than is listed."""
        self.size_bytes(name)
        with self._sealed.open(name + SUFFIX) as sealed:
            yield UnsealedContent(sealed, self._key, self._number + name.encode(), self.place(name))

    def size_bytes(self, name: str) -> int:
        """Raises ``StateFileError``, also for a file of another size than is listed."""
        listed_bytes, found_bytes = self._listed_bytes(name), self._sealed.size_bytes(name + SUFFIX)
        if listed_bytes != found_bytes:
            raise refusal(self.place(name), "size", f"{listed_bytes} bytes", f"{found_bytes} bytes")
        return content_bytes(found_bytes)

    def _listed_bytes(self, name: str) -> int:
        entry = self._envelope.files.get(name + SUFFIX)
        if entry is None:
            raise refusal(self._sealed.place(ENVELOPE), "files", f"also {name[:100]}{SUFFIX}", "none")
        return entry[0]

    def _unwrap(self, identity: Identity) -> bytes:
        envelope, place = self._envelope, self._sealed.place(ENVELOPE)
        wrapped = envelope.readers.get(identity.public_key.hex())
        if wrapped is None:
            raise SealedForOthers(
                f"{place}: is sealed for {len(envelope.readers)} readers, and {key_text(identity.public_key)} is none "
                "of them; give the identity of one that is, with --identity FILE"
            )
        try:
            key = identity.unseal(bytes.fromhex(wrapped), _WRAP_CONTEXT + self._number)
        except ValueError as error:
            raise refusal(place, "readers", "this identity's key as it was wrapped", "a damaged one") from error
        if not hmac.compare_digest(envelope.mac_under(key), envelope.mac):
            raise refusal(place, "mac", "that of all other fields", "another")
        return key


def read_envelope(source: CheckpointSource) -> Envelope:
    """Read ``sealed.json``, checked as far as is possible without a reader's key. Raises ``StateFileError``."""
    place, data = source.place(ENVELOPE), source.read(ENVELOPE, MAX_ENVELOPE_BYTES)
    try:
        envelope = Envelope.model_validate_json(data)
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"{place}: not the list of a sealed checkpoint: {ascii(str(error))[1:300]}") from error
    if envelope.file_bytes != data:
        raise refusal(place, "its bytes", "the canonical JSON of its content", "another spelling")
    return envelope


def open_source(source: CheckpointSource, identity: Identity | None) -> CheckpointSource:
    """The source of a checkpoint's plain files, whether it is sealed or not.

    Raises ``StateFileError``, and ``SealedForOthers`` where it is sealed and ``identity`` is no reader."""
    if not source.has(ENVELOPE):
        return source
    if identity is None:
        raise SealedForOthers(f"{source.place(ENVELOPE)}: is sealed; give a reader's identity with --identity FILE")
    return SealedSource(source, identity)
