"""The digest of a part's result bytes: reports and verdicts name it, and whoever fetches or reads them checks it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from blake3 import blake3


def part_digest(chunks: Iterable[memoryview]) -> bytes:
    """BLAKE3 of a part's result chunks, one after the other: 32 bytes. On one thread, and not under the GIL."""
    digest = blake3()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()


def is_committed(chunks: Sequence[memoryview], digest: bytes) -> bool:
    """Whether these are the chunks of which a verdict on an earlier round has this digest."""
    return part_digest(chunks) == digest or _digest_of_protocol_3(chunks) == digest


def _digest_of_protocol_3(chunks: Iterable[memoryview]) -> bytes:
    """SHA-256, as members had it up to that protocol version: the verdicts on their rounds are of the run for ever."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()
