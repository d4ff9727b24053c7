"""Evidence on a chunk of a mean or on a partial sum, which anybody can check who knows the run file and host's key.

It holds all that a judge needs (``averaging/chunk_judge.py``): the verdict, signed by the host, with the plan in it and
the digest of the part's result; the maker's signature of that digest; the result chunk with its path to the digest; of
each member that was summed directly the contribution's chunk with its path to the root in the plan; and of each row
that was not, the partial sum that its row reducer has signed. Evidence on such a partial sum has it in the place of the
result chunk, and no path. Of a secure round it holds the masked chunks, each with its member's signature, and what has
opened their sums (``averaging/masked_round.py``).
"""

from __future__ import annotations

import itertools
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


class ShownPartialSum(Record):
    """A row's partial sum of a chunk, with its row reducer's signature."""

    row: Index
    data: Annotated[bytes, Field(max_length=_MAX_CHUNK_BYTES, repr=False)]


class Evidence(Record):
    """Evidence on one result chunk, or on a row's partial sum. ``part``: its index in the plan; ``chunk``: index in the
    round; ``row``: None for a result chunk; ``path``: from that to the part's digest in the verdict;
    ``contributions``: in the plan's order of members; ``partial_sums``: in the order of rows; ``opening``: of a secure
    round's part (``secure/shown_opening.py``), empty in others."""

    verdict: Verdict
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]
    chunk: Count
    row: Index | None
    result: Annotated[bytes, Field(max_length=_MAX_CHUNK_BYTES, repr=False)]
    path: Annotated[bytes, Field(max_length=_MAX_PATH_BYTES, repr=False)]
    contributions: Annotated[tuple[ShownContribution, ...], Field(max_length=MAX_MEMBERS)]
    partial_sums: Annotated[tuple[ShownPartialSum, ...], Field(max_length=MAX_MEMBERS)] = ()
    opening: Annotated[bytes, Field(max_length=_MAX_CHUNK_BYTES, repr=False)] = b""


class _Head(Record):
    """All of evidence but its chunks. ``result_bytes``: size of the result chunk; ``contributions``,
    ``partial_sums``: members, or rows, and the sizes of what is shown of them; ``opening_bytes``: size of the opening.
    """

    verdict: Verdict
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]
    chunk: Count
    row: Index | None
    path: Annotated[bytes, Field(max_length=_MAX_PATH_BYTES)]
    result_bytes: Count
    contributions: Annotated[tuple[tuple[Index, Count], ...], Field(max_length=MAX_MEMBERS)]
    partial_sums: Annotated[tuple[tuple[Index, Count], ...], Field(max_length=MAX_MEMBERS)]
    opening_bytes: Count


def pack_evidence(evidence: Evidence) -> bytes:
    """Encode evidence: size of the head, the head as msgpack, the result chunk, contributions' chunks, partial sums,
    and the opening.

    Equal evidence has equal bytes. Raises ``WireError`` if it is too large."""
    fields = evidence.model_dump(exclude={"result", "contributions", "partial_sums", "opening"})
    fields["result_bytes"] = len(evidence.result)
    fields["contributions"] = [(one.member, len(one.data)) for one in evidence.contributions]
    fields["partial_sums"] = [(one.row, len(one.data)) for one in evidence.partial_sums]
    fields["opening_bytes"] = len(evidence.opening)
    head: bytes = msgpack.packb(fields)
    shown = [*(one.data for one in evidence.contributions), *(one.data for one in evidence.partial_sums)]
    data = b"".join([_HEAD_BYTES.pack(len(head)), head, evidence.result, *shown, evidence.opening])
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
        shown_bytes = [size for _, size in (*head.contributions, *head.partial_sums)]
        edges = list(itertools.accumulate([head.result_bytes, *shown_bytes, head.opening_bytes], initial=at))
        result, *shown, opening = [data[start:stop] for start, stop in itertools.pairwise(edges)]
        members = len(head.contributions)
        evidence = Evidence(
            verdict=head.verdict,
            part=head.part,
            chunk=head.chunk,
            row=head.row,
            result=result,
            path=head.path,
            contributions=tuple(
                ShownContribution(member=one, data=its)
                for (one, _), its in zip(head.contributions, shown[:members], strict=True)
            ),
            partial_sums=tuple(
                ShownPartialSum(row=one, data=its)
                for (one, _), its in zip(head.partial_sums, shown[members:], strict=True)
            ),
            opening=opening,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not evidence: {type(error).__name__}") from error
    if pack_evidence(evidence) != data:
        raise WireError("not evidence: encoded in another way than it is here")
    return evidence


def evidence_id(data: bytes) -> bytes:
    """Return the 32 bytes by which packed evidence is known. Without the GIL."""
    return blake3(data, derive_key_context=_CONTEXT).digest()
