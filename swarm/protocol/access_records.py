"""Records of who came and went, and of what the host decided on that: each signed, and chained to the one before."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.evaluations import SignedEvaluation
from shoal.swarm.protocol.signed_chain import check_record, record_hash
from shoal.swarm.protocol.types import Count, Digest, InviteId, InviteUses, PeerId, Record, Role, Text, UnixTime
from shoal.swarm.protocol.work_scores import SignedScore

_CONTEXT = b"shoal access record, version 1\0"

MAX_REASONS = 32

RecordKind = Literal[
    "joined",
    "left",
    "kicked",
    "banned",
    "expelled",
    "mean disproved",
    "allowed",
    "invite made",
    "invite revoked",
    "refused",
    "scored",
    "evaluated",
    "stops",
    "amended",
]


class Refusals(Record):
    """Number of joins that were refused for one reason."""

    reason: Annotated[str, Field(max_length=32)]
    count: Count


class AccessRecord(Record):
    """One record. ``text``: the reason of a loss, the host's note, or why the ``round`` is the run's last one;
    ``network``: where a member came from, or what is banned; ``invite``: by which one a member joined for the first
    time, or which was made or revoked; ``uses`` and ``expires_s``: limits of a made one; ``score``: a validator's of
    the member's work; ``evaluation``: a validator's of a version of the model, which ``round`` made; ``refused``: what
    was refused since the last such record; ``evidence``: the id of what a member was expelled for, or what proves its
    mean wrong beyond the bound, by ``excess`` times what it could move (``evidence.py``), and ``accuser`` has shown of
    ``round``; of an amendment ``round`` is the first with it.

    ``previous``: the chain hash of the record before; ``chain``: SHA-256 over all fields but itself and the host's
    ``signature`` of it."""

    number: Count
    at_s: UnixTime
    kind: RecordKind
    peer: PeerId | Literal[""] = ""
    name: Annotated[str, Field(max_length=64)] = ""
    role: Role | Literal[""] = ""
    invite: InviteId | Literal[""] = ""
    network: Annotated[str, Field(max_length=255)] = ""
    text: Text = ""
    uses: InviteUses = 0
    expires_s: Count = 0
    evidence: Digest | None = None
    accuser: PeerId | Literal[""] = ""
    round: Count = 0
    excess: Annotated[float, Field(ge=0, le=1e30)] = 0.0
    score: SignedScore | None = None
    evaluation: SignedEvaluation | None = None
    refused: Annotated[tuple[Refusals, ...], Field(max_length=MAX_REASONS)] = ()
    previous: Digest = bytes(32)
    chain: Digest = bytes(32)
    signature: Annotated[bytes, Field(min_length=64, max_length=64)] = bytes(64)


def genesis(run_hash: bytes) -> bytes:
    """The chain hash before a run's first record."""
    return hashlib.sha256(_CONTEXT + run_hash).digest()


def access_hash(record: AccessRecord) -> bytes:
    """SHA-256 over all fields of a record but its own hash and signature."""
    return record_hash(record, _CONTEXT)


def signed_bytes(chain: bytes) -> bytes:
    """The bytes that the host signs; the hash in them covers the record and all before it."""
    return _CONTEXT + chain


class RecordCheck:
    """Checks a run's records, one after the other from the first one on."""

    def __init__(self, run_hash: bytes, host_key: bytes) -> None:
        self._key = host_key
        self._number, self._chain = 0, genesis(run_hash)

    def add(self, record: AccessRecord) -> None:
        """Check the next record. Raises ``WireError`` that says what is wrong with it."""
        if (record.number, record.previous) != (self._number, self._chain):
            raise WireError(f"the access record {record.number} does not follow record {self._number - 1}")
        check_record(record, self._key, _CONTEXT, f"the access record {record.number}", "the host")
        self._number, self._chain = record.number + 1, record.chain
