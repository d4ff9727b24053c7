"""One file, encrypted and authenticated piece by piece, so that neither side ever needs all of it twice in memory.

The STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár: Online Authenticated-Encryption and its Nonce-Reuse
Misuse-Resistance, 2015) over AES-256-GCM: segments of 1 MiB, each under a nonce of its number and of whether it is the
last one. So a segment that was changed, moved, dropped or added is noticed, and so is a file that was cut or extended
at a segment's border. A file is 8 bytes of format, 16 of salt, and the segments, each 16 bytes longer than its content.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterable, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.swarm.errors import StateFileError

SEGMENT_BYTES = 2**20
TAG_BYTES = 16
_FORMAT = b"shoalse1"
_SALT_BYTES = 16
HEADER_BYTES = len(_FORMAT) + _SALT_BYTES
_CONTEXT = b"shoal sealed file, version 1\0"
_NONCE = struct.Struct("!7xI?")
_MAX_SEGMENTS = 2**32


def sealed_bytes(content_bytes: int) -> int:
    """How long a sealed file of so much content is."""
    segments = max(1, -(-content_bytes // SEGMENT_BYTES))
    return HEADER_BYTES + content_bytes + segments * TAG_BYTES


def content_bytes(size_bytes: int) -> int:
    """How much content a sealed file of so many bytes has."""
    rest = max(0, size_bytes - HEADER_BYTES)
    return max(0, rest - max(1, -(-rest // (SEGMENT_BYTES + TAG_BYTES))) * TAG_BYTES)


def seal(key: bytes, name: bytes, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The sealed file of this content, in pieces; each is to be used before the next one is asked for.

    ``key``: 32 secret bytes; ``name``: what the file is, to be given again to ``unseal``."""
    salt = secrets.token_bytes(_SALT_BYTES)
    cipher = _cipher(key, salt, name)
    yield _FORMAT + salt
    held, sealed = memoryview(bytearray(SEGMENT_BYTES)), memoryview(bytearray(SEGMENT_BYTES + TAG_BYTES))
    number = filled = 0
    for piece in pieces:
        rest = memoryview(piece).cast("B")
        while rest.nbytes:
            if filled == SEGMENT_BYTES:  # only now is it known that this is not the last one
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
    """The content of a sealed file; ``place`` is what errors call it.

    Raises ``StateFileError`` when one bit of it is not as it was sealed, or it was sealed as another file."""
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
            raise StateFileError(
                f"{place}: its segment {number}: expected what was sealed here under this name; it is damaged, cut "
                "short, or of another checkpoint"
            ) from error
    return b"".join(content)


def _cipher(key: bytes, salt: bytes, name: bytes) -> AESGCM:
    """A key of its own for each file, each time it is written: so nonces may begin at 0."""
    return AESGCM(HKDF(hashes.SHA256(), 32, salt, _CONTEXT + name).derive(key))


def _nonce(number: int, *, last: bool) -> bytes:
    assert number < _MAX_SEGMENTS, "files are smaller than 4 PiB"
    return _NONCE.pack(number, last)
