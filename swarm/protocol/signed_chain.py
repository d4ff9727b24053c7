"""Chains of signed records: each names the hash of the one before it, so a signature covers all records up to there."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import msgpack

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.identity import verify_signature


class ChainedRecord(Protocol):
    """Record with its own hash, ``chain``, and a ``signature`` of that."""

    @property
    def chain(self) -> bytes: ...

    @property
    def signature(self) -> bytes: ...

    def model_dump(self, *, exclude: set[str]) -> dict[str, Any]: ...


def record_hash(record: ChainedRecord, context: bytes) -> bytes:
    """SHA-256 over all fields of a record but its own hash and signature; ``context``: of one kind of records."""
    content = record.model_dump(exclude={"chain", "signature"})
    packed: bytes = msgpack.packb([sorted(content), [content[key] for key in sorted(content)]])
    return hashlib.sha256(context + packed).digest()


def check_record(record: ChainedRecord, signer: bytes, context: bytes, what: str, whose: str) -> None:
    """Check a record's hash, and that ``signer``, an Ed25519 public key, has signed it behind ``context``.

    Raises ``WireError`` that says ``what`` is wrong, or not signed by ``whose`` key it should be."""
    if record_hash(record, context) != record.chain:
        raise WireError(f"{what} does not match its own hash")
    if not verify_signature(signer, record.signature, context + record.chain):
        raise WireError(f"{what} is not signed by {whose}")
