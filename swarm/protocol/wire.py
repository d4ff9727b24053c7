"""Encoding of messages as msgpack and decoding, with size limits and one error for everything malformed."""

from __future__ import annotations

import functools
import operator
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgpack
from pydantic import ValidationError

from shoal.swarm.errors import ProtocolMismatch, WireError
from shoal.swarm.protocol.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    CoordinatorToPeerJoinAccepted,
    CoordinatorToPeerView,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorShowVerdict,
)
from shoal.swarm.protocol.rounds import RoundPlan, RunView, Verdict, VerdictOnPlan
from shoal.swarm.protocol.types import (
    MAX_MEMBERS,
    MAX_STAGES,
    MAX_TENSORS,
    Amendment,
    Message,
    PipelineView,
    Record,
    RosterDelta,
    RosterEntry,
    TensorSpec,
)

T = TypeVar("T")

MAX_MESSAGE_BYTES = 8 * 2**20
"""Largest control message to a caller, which trusts our key; ZeroMQ refuses larger ones before it allocates them."""

MAX_REQUEST_BYTES = 2**21
"""Largest control message to a dialed process, which accepts connections from anybody. The largest in use, a full run's
verdict, has four fifths of that."""

MAX_FRAME_BYTES = 2**15
"""Largest frame of such a message, and of a notice to a caller; larger ones are sent in pieces. So ZeroMQ refuses
larger frames of callers, and has no more of a plan enciphered for each of thousands that read slowly."""

_IS_PIECE = 0xC1
"""The only byte that msgpack never uses."""

_PIECE = struct.Struct(">BII")
"""``_IS_PIECE``, the size of the whole message, and the offset of the piece."""

_PIECE_BYTES = MAX_FRAME_BYTES - _PIECE.size

MAX_LAYOUT_BYTES = 2**23
"""Largest unpacked layout of a model: 65,536 tensors with names of a hundred characters."""

_LEAST_COMPRESSED, _MOST_EXPANSION = 2**14, 4
"""Size from which a plan is compressed, and how much larger than its compressed bytes it may be. Not more, so that few
bytes from outside cost little; real plans have half the size, as keys and signatures are random."""

_MAX_PROBLEMS = 100

Kind = Literal["request", "reply", "notice"]
_KINDS: tuple[Kind, ...] = ("request", "reply", "notice")


_ARRAY_OF_7 = bytes(msgpack.Packer().pack_array_header(7))
_VIEW_FIELD = bytes(msgpack.Packer().pack_map_header(1)) + msgpack.packb("view")
_MAX_RUN = 64

_SHARED = 32
_MOST_ENTRIES = 2 * MAX_MEMBERS
_shared: tuple[tuple[tuple[Record, ...], bytes], ...] = ()
"""The records that were packed last, and their bytes: for each scope a plan, a verdict and a roster, and older ones."""


@dataclass(frozen=True)
class Envelope:
    """A message with its kind, number, scope and run.

    ``number`` pairs a reply with its request; it is 0 in a notice, which has no reply. A reply has its request's
    scope. ``run``: the name of the run that a caller of a coordinator means, which may serve several; else empty."""

    kind: Kind
    number: int
    message: Message
    scope: int = 0
    run: str = ""


def encode(envelope: Envelope, limit_bytes: int | None = None) -> bytes:
    """Encode an envelope. ``limit_bytes``: what the other side accepts, ``MAX_MESSAGE_BYTES`` by default.

    Raises ``WireError`` when the message is larger."""
    message = envelope.message
    kind = _KINDS.index(envelope.kind)
    head = _packb([PROTOCOL_VERSION, kind, envelope.number, envelope.scope, envelope.run, type(message).__name__])
    if isinstance(message, CoordinatorToPeerView):
        data = _whole(head, message.view, is_notice=envelope.kind == "notice")
    else:
        data = b"".join([_ARRAY_OF_7, head[1:], _pack(message)])
    if len(data) > (MAX_MESSAGE_BYTES if limit_bytes is None else limit_bytes):
        raise WireError(f"{type(message).__name__} of {len(data)} bytes is too large to send")
    return data


_VIEWS = 16
_views: dict[int, tuple[RunView, bytes, dict[bytes, bytes]]] = {}
"""The views that were packed last, each with its bytes, and those of whole notices of it by their head."""


def _whole(head: bytes, view: RunView, *, is_notice: bool) -> bytes:
    """Return the message that tells a view, the same object for all to whom the same notice is sent.

    Most members are told the same views, and copies of a plan for a thousand of them would wait in memory."""
    known = _views.get(id(view))
    if known is None or known[0] is not view:
        if len(_views) >= _VIEWS:
            del _views[next(iter(_views))]
        known = _views[id(view)] = view, _pack_fields(view), {}
    _, packed, notices = known
    if head not in notices:
        data = b"".join([_ARRAY_OF_7, head[1:], _VIEW_FIELD, packed])
        if not is_notice:
            return data
        notices[head] = data
    return notices[head]


_cut: tuple[bytes, tuple[bytes, ...]] = (b"", ())
"""The message that was cut last, which may go to thousands, and its pieces."""


def cut(data: bytes) -> tuple[bytes, ...]:
    """Cut an encoded message into frames of at most ``MAX_FRAME_BYTES``, each a ZeroMQ message of its own.

    A ZeroMQ message of several frames would have no size limit. And libzmq ends a process that closes a socket while
    the connection is lost in the middle of such a message (``session_base.cpp``, ``clean_pipes``)."""
    global _cut
    if len(data) <= MAX_FRAME_BYTES:
        return (data,)
    known, pieces = _cut  # read once: other threads cut, too
    if data is not known:
        starts = range(0, len(data), _PIECE_BYTES)
        pieces = tuple(
            _PIECE.pack(_IS_PIECE, len(data), start) + data[start : start + _PIECE_BYTES] for start in starts
        )
        _cut = data, pieces
    return pieces


class Assembly:
    """Joins the pieces of one sender's messages; whole messages may arrive between them."""

    def __init__(self, limit_bytes: int = MAX_REQUEST_BYTES) -> None:
        """``limit_bytes``: of a whole message; pieces of a larger one are dropped."""
        self._limit_bytes = limit_bytes
        self._whole = bytearray()
        self._bytes = 0

    def add(self, frame: memoryview) -> memoryview | None:
        """Add a frame; returns the message that it is or completes, if any.

        Pieces that do not follow each other are dropped: they are left over from a lost connection."""
        if len(frame) < _PIECE.size or frame[0] != _IS_PIECE:
            return frame
        _, size, start = _PIECE.unpack_from(frame)
        piece = frame[_PIECE.size :]
        if start == 0:
            self._whole, self._bytes = bytearray(), size
        fits = (size, start) == (self._bytes, len(self._whole)) and size <= self._limit_bytes
        if not fits or len(piece) != min(_PIECE_BYTES, size - start):
            self._whole, self._bytes = bytearray(), 0
            return None
        self._whole += piece
        if len(self._whole) < size:
            return None
        whole, self._whole, self._bytes = self._whole, bytearray(), 0
        return memoryview(whole)


def _pack(value: Any) -> bytes:
    """Pack a field. Records that most views share are packed once for all members."""
    match value:
        case None | int() | float() | str() | bytes():
            return _packb(value)
        case CoordinatorToPeerJoinAccepted() | RunView() | PeerToCoordinatorShowVerdict():
            return _pack_fields(value)
        case RosterDelta():
            return _pack_shared((value,), lambda: _pack_fields(value))
        case Verdict():
            return _pack_shared((value,), lambda: _pack_fields(value))
        case RoundPlan():
            return _pack_shared((value,), lambda: _pack_plan(value))
        case VerdictOnPlan() | PipelineView():
            return _pack_shared((value,), lambda: _packb(value.model_dump()))
        case (RosterEntry(), *_):
            return _packed_array(value, _pack_entry)
        case (Amendment(), *_):
            return _pack_shared(value, lambda: _packb(tuple(entry.model_dump() for entry in value)))
        case PeerToCoordinatorDescribeModel():
            return _packb(value.model_dump(exclude={"layout"}) | {"layout": _pack_layout(value.layout)})
        case Record():
            return _packb(value.model_dump())
        case tuple() if any(isinstance(one, Record) for one in value):
            return _packb([one.model_dump() if isinstance(one, Record) else one for one in value])
    return _packb(value)


def _pack_fields(record: Record) -> bytes:
    """Pack a record field by field, without fields that have their default, which whoever decodes it fills in.

    A coordinator makes hundreds of views a second, each with thirty fields: plain ones are packed by one call."""
    values, plain, others = record.__dict__, dict[str, Any](), list[bytes]()
    for name, packed_name, default in _fields(type(record)):
        value = values[name]
        if value is default:
            continue
        if type(value) not in _PLAIN:
            others += packed_name, _pack(value)
        elif value != default:
            plain[name] = value
    count = len(plain) + len(others) // 2
    return b"".join([_map_header(count), _packb(plain)[len(_map_header(len(plain))) :], *others])


_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


@functools.cache
def _fields(kind: type[Record]) -> list[tuple[str, bytes, Any]]:
    """A record's fields: name, packed name, and default, which is no value of a field where it has none."""
    fields = kind.model_fields.items()
    return [(name, _packb(name), _MISSING if one.is_required() else one.default) for name, one in fields]


_MISSING = object()


@functools.cache
def _map_header(count: int) -> bytes:
    return bytes(msgpack.Packer().pack_map_header(count))


def _packed_array(values: tuple[T, ...], pack: Callable[[T], bytes]) -> bytes:
    return b"".join([bytes(msgpack.Packer().pack_array_header(len(values))), *map(pack, values)])


_entries: dict[int, tuple[RosterEntry, bytes]] = {}


def _pack_entry(entry: RosterEntry) -> bytes:
    """Pack an entry of a roster, or reuse its bytes: each join brings a whole roster, of which one entry is new."""
    known = _entries.pop(id(entry), None)
    if known is None or known[0] is not entry:
        known = entry, _packb(entry.model_dump())
        if len(_entries) >= _MOST_ENTRIES:
            del _entries[next(iter(_entries))]
    _entries[id(entry)] = known
    return known[1]


def _pack_shared(records: tuple[Record, ...], pack: Callable[[], bytes]) -> bytes:
    """Pack records, or reuse their bytes: identical objects have the same content, as records are frozen."""
    global _shared
    for known, data in _shared:
        if len(known) == len(records) and all(map(operator.is_, known, records)):
            return data
    data = pack()
    _shared = (*_shared[1 - _SHARED :], (records, data))
    return data


def _pack_plan(plan: RoundPlan) -> bytes:
    """Pack a plan; a large one compressed, as each member has to get it: half of it are names and equal values."""
    data = _packb(plan.model_dump())
    if len(data) < _LEAST_COMPRESSED:
        return data
    small = zlib.compress(data, 1)
    return _packb(small) if len(data) <= _MOST_EXPANSION * len(small) else data


def _unpack_plans(name: str, body: dict[Any, Any]) -> None:
    """Put plans in the place of compressed ones, in the messages that have any. Raises as ``_unpack_plan``."""
    if name in (CoordinatorToPeerView.__name__, CoordinatorToPeerJoinAccepted.__name__):
        view = body.get("view")
        holders = [(view, "plan"), (view, "expected")]
        holders.append((view.get("verdict") if isinstance(view, dict) else None, "plan"))
    elif name == PeerToCoordinatorShowVerdict.__name__:
        holders = [(body.get("verdict"), "plan")]
    else:
        return
    for holder, field in holders:
        if isinstance(holder, dict) and isinstance(holder.get(field), bytes):
            holder[field] = _unpack_plan(holder[field])


def _unpack_plan(packed: bytes) -> Any:
    """Unpack a compressed plan, which may grow by as much as ours do and no more. Raises ``WireError``."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, _MOST_EXPANSION * len(packed))
    except zlib.error as error:
        raise WireError("malformed plan: not compressed") from error
    if not unpacker.eof or unpacker.unused_data:
        raise WireError("malformed plan: wrong length")
    return _unpackb(data)


def _pack_layout(layout: tuple[TensorSpec, ...]) -> bytes:
    """Pack a layout, compressed as tensor names are repetitive: 65,536 of them have 6 MB, compressed 0.3 MB."""
    fields = []
    for spec in layout:
        name = spec.name.encode()
        fields += [struct.pack(f">HB{len(spec.shape)}Q", len(name), len(spec.shape), *spec.shape), name]
    data = b"".join(fields)
    if len(data) > MAX_LAYOUT_BYTES:
        raise WireError(f"the layout of a model of {len(layout)} tensors has {len(data)} bytes, which is too large")
    return zlib.compress(data, 6)


@functools.lru_cache(maxsize=2)
def _unpack_layout(packed: bytes) -> tuple[TensorSpec, ...]:
    """Unpack a layout; cached, as all members of a run send the same one.

    Not msgpack, of which each byte may become an object: this takes no more memory than the tensors' specs do.
    Raises ``WireError`` and ``ValidationError``."""
    unpacker, at = zlib.decompressobj(), 0
    layout: list[TensorSpec] = []
    try:
        data = unpacker.decompress(packed, MAX_LAYOUT_BYTES)
        while at < len(data) and len(layout) < MAX_TENSORS:
            name_bytes, dimensions = struct.unpack_from(">HB", data, at)
            shape = struct.unpack_from(f">{dimensions}Q", data, at + 3)
            at += 3 + 8 * dimensions
            layout.append(TensorSpec(name=data[at : at + name_bytes].decode(), shape=shape))
            at += name_bytes
    except (zlib.error, struct.error, UnicodeDecodeError) as error:
        raise WireError(f"malformed layout: {type(error).__name__}") from error
    if at != len(data) or not unpacker.eof or unpacker.unused_data:
        raise WireError("malformed layout: wrong length")
    return tuple(layout)


def _packb(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def _unpackb(data: bytes | memoryview) -> Any:
    try:
        # Deep nesting makes msgpack raise StackError (a ValueError). Arrays are allocated by their declared
        # length: unlimited, each of many nested headers could claim eight times the size of the whole input.
        return msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=True,
            max_array_len=MAX_TENSORS,
            max_map_len=64,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {type(error).__name__}") from error


def decode(data: bytes | memoryview) -> Envelope:
    """Decode an envelope. Raises ``ProtocolMismatch`` for another version, ``WireError`` for everything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is too large")
    fields = _unpackb(data)
    if not isinstance(fields, tuple) or not fields or type(fields[0]) is not int:
        raise WireError("not a Shoal message")
    if fields[0] != PROTOCOL_VERSION:
        raise ProtocolMismatch(
            f"the other side speaks protocol version {fields[0]}, this one speaks {PROTOCOL_VERSION}: "
            "install the same release of shoal on both machines"
        )
    match fields:
        case (_, int(kind), int(number), int(scope), str(run), str(name), dict(body)):
            for value, limit, what in (
                (kind, len(_KINDS), "kind"),
                (number, 2**63, "number"),
                (scope, MAX_STAGES + 1, "scope"),
            ):
                if isinstance(value, bool) or not 0 <= value < limit:
                    raise WireError(f"an envelope's {what} is out of range")
            if len(run) > _MAX_RUN:
                raise WireError("an envelope's run is out of range")
            return Envelope(_KINDS[kind], number, _message(name, body), scope, run)
    raise WireError("not a Shoal message")


def _message(name: str, body: dict[Any, Any]) -> Message:
    cls = MESSAGES.get(name)
    if cls is None:
        raise WireError(f"unknown message type {name[:64]!r}")
    try:
        if cls is PeerToCoordinatorDescribeModel and isinstance(body.get("layout"), bytes):
            body["layout"] = _unpack_layout(body["layout"])
        _unpack_plans(name, body)
        return cls.model_validate(body)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"malformed {name}: {_first_problem(error)}") from error


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return type(error).__name__
    if error.error_count() > _MAX_PROBLEMS:
        return f"{error.error_count()} problems"  # pydantic would describe all of them to name the first
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    # The location may contain bytes of the sender, which must not reach a log unescaped.
    return ascii(f"{'.'.join(str(step)[:100] for step in first['loc'])}: {first['msg']}")[:300]
