"""The digest of a part's result bytes: reports and verdicts name it, and whoever fetches or reads them checks it."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence

from blake3 import blake3


def part_digest(chunks: Iterable[memoryview]) -> bytes:
    """BLAKE3 of a part's result chunks, one after the other: 32 bytes. On one thread, and not under the GIL."""
    return RunningDigest().of(list(chunks))


class RunningDigest:
    """``part_digest`` of chunks that come one by one: of those that are here less is left to do in the end."""

    def __init__(self) -> None:
        self._digest = blake3()
        self._chunks: list[memoryview] = []

    def of(self, chunks: Sequence[memoryview]) -> bytes:
        """Of these, from the first on. Those that were the same the last time are not looked at again."""
        before = len(self._chunks)
        if len(chunks) < before or not all(map(operator.is_, self._chunks, chunks)):
            self._digest, self._chunks, before = blake3(), [], 0
        for chunk in chunks[before:]:
            self._digest.update(chunk)
            self._chunks.append(chunk)
        return self._digest.digest()


def is_committed(chunks: Sequence[memoryview], digest: bytes) -> bool:
    """Whether these are the chunks of which a verdict on an earlier round has this digest."""
    return part_digest(chunks) == digest or _digest_of_protocol_3(chunks) == digest


def _digest_of_protocol_3(chunks: Iterable[memoryview]) -> bytes:
    """SHA-256, as members had it up to that protocol version: the verdicts on their rounds are of the run for ever."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.digest()
