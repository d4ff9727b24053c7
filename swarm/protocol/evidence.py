"""Evidence on a chunk of a committed mean, which anybody can check who knows the run file and the host's key.

It holds all that a judge needs (``averaging/chunk_judge.py``): the verdict, signed by the host, with the plan in it and
the digest of the part's result; the maker's signature of that digest; the result chunk with its path to the digest; and
of each member that the chunk includes the contribution's chunk with its path to the root in the plan.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgpack
from blake3 import blake3
from pydantic import Field

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import MAX_MEMBERS, MAX_PARTS, Count, Index, Record

MAX_EVIDENCE_BYTES = 2**26
"""Largest evidence. Chunks that would need more are not audited: such of more than 2**18 float32 values and 60
members."""

_MAX_HEAD_BYTES = 2**20
"""Largest head: a full run's verdict has less than half of that. Only heads are unpacked: 64 MiB of msgpack could claim
several GiB of small objects."""

_CONTEXT = "shoal evidence, version 1"
_MAX_CHUNK_BYTES = 2**25
_HEAD_BYTES = struct.Struct(">I")
_MAX_PATH_BYTES = 32 * 64


class ShownContribution(Record):
    """Chunk of a member's contribution: its leaves and, after them, their path to the root in the plan."""

    member: Index
    data: Annotated[bytes, Field(max_length=_MAX_CHUNK_BYTES, repr=False)]


class Evidence(Record):
    """Evidence on one result chunk. ``part``: its index in the plan; ``chunk``: index in the round; ``path``: from the
    chunk to the part's digest in the verdict; ``contributions``: in the plan's order of members."""

    verdict: Verdict
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]
    chunk: Count
    result: Annotated[bytes, Field(max_length=_MAX_CHUNK_BYTES, repr=False)]
    path: Annotated[bytes, Field(max_length=_MAX_PATH_BYTES, repr=False)]
    contributions: Annotated[tuple[ShownContribution, ...], Field(max_length=MAX_MEMBERS)]


class _Head(Record):
    """All of evidence but its chunks. ``result_bytes``: size of the result chunk; ``contributions``: members, and the
    sizes of what is shown of them."""

    verdict: Verdict
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]
    chunk: Count
    path: Annotated[bytes, Field(max_length=_MAX_PATH_BYTES)]
    result_bytes: Count
    contributions: Annotated[tuple[tuple[Index, Count], ...], Field(max_length=MAX_MEMBERS)]


def pack_evidence(evidence: Evidence) -> bytes:
    """Encode evidence: size of the head, the head as msgpack, the result chunk, and the contributions' chunks.

    Equal evidence has equal bytes. Raises ``WireError`` if it is too large."""
    contributions, fields = evidence.contributions, evidence.model_dump(exclude={"result", "contributions"})
    fields["result_bytes"] = len(evidence.result)
    fields["contributions"] = [(one.member, len(one.data)) for one in contributions]
    head: bytes = msgpack.packb(fields)
    data = b"".join([_HEAD_BYTES.pack(len(head)), head, evidence.result, *(one.data for one in contributions)])
    if len(head) > _MAX_HEAD_BYTES or len(data) > MAX_EVIDENCE_BYTES:
        raise WireError(f"evidence of {len(data)} bytes is too large: at most {MAX_EVIDENCE_BYTES}")
    return data


def unpack_evidence(data: bytes) -> Evidence:
    """Decode evidence. Raises ``WireError`` for bytes that ``pack_evidence`` does not make."""
    if len(data) > MAX_EVIDENCE_BYTES:
        raise WireError(f"evidence of {len(data)} bytes is too large: at most {MAX_EVIDENCE_BYTES}")
    size = _HEAD_BYTES.unpack_from(data)[0] if len(data) >= _HEAD_BYTES.size else 0
    if not 0 < size <= _MAX_HEAD_BYTES:
        raise WireError("not evidence: its head has another size than heads have")
    at = _HEAD_BYTES.size + size
    try:
        fields: Any = msgpack.unpackb(
            data[_HEAD_BYTES.size : at],
            use_list=False,
            strict_map_key=True,
            max_array_len=MAX_PARTS,
            max_map_len=64,
            max_ext_len=0,
        )
        head = _Head.model_validate(fields)
        result, at = data[at : at + head.result_bytes], at + head.result_bytes
        shown = []
        for member, size_bytes in head.contributions:
            shown.append(ShownContribution(member=member, data=data[at : at + size_bytes]))
            at += size_bytes
        evidence = Evidence(
            verdict=head.verdict,
            part=head.part,
            chunk=head.chunk,
            result=result,
            path=head.path,
            contributions=tuple(shown),
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not evidence: {type(error).__name__}") from error
    if pack_evidence(evidence) != data:
        raise WireError("not evidence: encoded in another way than it is here")
    return evidence


def evidence_id(data: bytes) -> bytes:
    """Return the 32 bytes by which packed evidence is known. Without the GIL."""
    return blake3(data, derive_key_context=_CONTEXT).digest()
