"""msgpack bytes to messages and back: one envelope, one size limit, one error for anything malformed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
from pydantic import ValidationError

from shoal.swarm.errors import ProtocolMismatch, WireError
from shoal.swarm.messages import (
    MAX_STAGES,
    MAX_TENSORS,
    MESSAGES,
    PROTOCOL_VERSION,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerView,
    Message,
    PipelineView,
    Record,
    RosterDelta,
    RosterEntry,
    RoundPlan,
    RunView,
    Verdict,
)

MAX_MESSAGE_BYTES = 8 * 2**20
"""Of an encoded control message; ZeroMQ refuses larger ones before it allocates them."""

_MAX_PROBLEMS = 100

Kind = Literal["request", "reply", "notice"]
_KINDS: tuple[Kind, ...] = ("request", "reply", "notice")


_ARRAY_OF_6 = bytes(msgpack.Packer().pack_array_header(6))
_SHARED = 32
_shared: tuple[tuple[tuple[Record, ...], bytes], ...] = ()
"""The records that were packed last, and their bytes: of each scope a plan, a verdict, a roster, and one that is on its
way out."""


@dataclass(frozen=True)
class Envelope:
    """``number`` pairs a reply with its request; it is 0 in a notice, which has no reply. ``scope``: 0 for the run,
    s + 1 for its stage s; a reply has its request's."""

    kind: Kind
    number: int
    message: Message
    scope: int = 0


def encode(envelope: Envelope) -> bytes:
    """Raises ``WireError`` when the message is larger than the other side would accept."""
    message = envelope.message
    kind = _KINDS.index(envelope.kind)
    head = [PROTOCOL_VERSION, kind, envelope.number, envelope.scope, type(message).__name__]
    data = b"".join([_ARRAY_OF_6, *map(_packb, head), _pack(message)])
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"{type(message).__name__} of {len(data)} bytes is too large to send")
    return data


def _pack(value: Any) -> bytes:
    """msgpack of a field. What views share, which is nearly all of them, is packed once for everybody."""
    match value:
        case None | int() | float() | str() | bytes():
            return _packb(value)
        case CoordinatorToPeerView() | CoordinatorToPeerJoinAccepted() | RunView():
            header, names = _packed_names(type(value))
            return header + b"".join([packed + _pack(getattr(value, name)) for name, packed in names])
        case RoundPlan() | Verdict() | PipelineView() | RosterDelta():
            return _pack_shared((value,), value.model_dump)
        case (RosterEntry(), *_):
            return _pack_shared(value, lambda: tuple(entry.model_dump() for entry in value))
        case Record():
            return _packb(value.model_dump())
    return _packb(value)


@functools.cache
def _packed_names(kind: type[Record]) -> tuple[bytes, list[tuple[str, bytes]]]:
    """The header of a record's map, and its fields' names as they are and packed."""
    header = bytes(msgpack.Packer().pack_map_header(len(kind.model_fields)))
    return header, [(name, _packb(name)) for name in kind.model_fields]


def _pack_shared(records: tuple[Record, ...], dump: Callable[[], Any]) -> bytes:
    """Frozen records are the same as last time when they are the same objects."""
    global _shared
    for known, data in _shared:
        if len(known) == len(records) and all(map(operator.is_, known, records)):
            return data
    data = _packb(dump())
    _shared = (*_shared[1 - _SHARED :], (records, data))
    return data


def _packb(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def decode(data: bytes | memoryview) -> Envelope:
    """Raises ``ProtocolMismatch`` for another version and ``WireError`` for everything else that is wrong."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes is too large")
    try:
        # Deep nesting makes msgpack raise StackError (a ValueError). Arrays are allocated by their declared
        # length: unlimited, each of many nested headers could claim eight times the size of the whole input.
        fields: Any = msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=True,
            max_array_len=MAX_TENSORS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {type(error).__name__}") from error
    if not isinstance(fields, tuple) or not fields or type(fields[0]) is not int:
        raise WireError("not a Shoal message")
    if fields[0] != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the other side speaks protocol version {fields[0]}, this one speaks {PROTOCOL_VERSION}: "
            "install the same release of shoal on both machines"
        )
    match fields:
        case (_, int(kind), int(number), int(scope), str(name), dict(body)):
            return Envelope(_kind(kind), _number(number), _message(name, body), _scope(scope))
    raise WireError("not a Shoal message")


def _kind(index: int) -> Kind:
    if isinstance(index, bool) or not 0 <= index < len(_KINDS):
        raise WireError("unknown kind of envelope")
    return _KINDS[index]


def _number(number: int) -> int:
    if isinstance(number, bool) or not 0 <= number < 2**63:
        raise WireError("request number out of range")
    return number


def _scope(scope: int) -> int:
    if isinstance(scope, bool) or not 0 <= scope <= MAX_STAGES:
        raise WireError("scope out of range")
    return scope


def _message(name: str, body: dict[Any, Any]) -> Message:
    cls = MESSAGES.get(name)
    if cls is None:
        raise WireError(f"unknown message type {name[:64]!r}")
    try:
        return cls.model_validate(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"malformed {name}: {_first_problem(error)}") from error


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return type(error).__name__
    if error.error_count() > _MAX_PROBLEMS:
        return f"{error.error_count()} problems"  # pydantic would spell them all out to name the first
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # The place may be made of the sender's own bytes, on the way to a log.
    return ascii(f"{'.'.join(str(step)[:100] for step in first['loc'])}: {first['msg']}")[:300]
