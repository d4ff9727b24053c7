import struct
import zlib
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.swarm.samples import messages, records

from shoal.swarm.errors import ProtocolMismatch, WireError
from shoal.swarm.protocol import wire
from shoal.swarm.protocol.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    PeerToCoordinatorDescribeModel,
    PeerToCoordinatorLeave,
    PeerToCoordinatorShowVerdict,
    PeerToPeerOpenStream,
    PeerToPeerPing,
    RequestFailed,
)
from shoal.swarm.protocol.rounds import Part, PartMaker, PlanMember, RoundPlan, Verdict
from shoal.swarm.protocol.types import (
    MAX_CLAIM_BYTES,
    MAX_STAGES,
    MAX_TENSORS,
    RUN_MEMBERS,
    Blob,
    Message,
    TensorSpec,
)
from shoal.swarm.protocol.wire import (
    MAX_FRAME_BYTES,
    MAX_LAYOUT_BYTES,
    MAX_REQUEST_BYTES,
    Assembly,
    Envelope,
    cut,
    decode,
    encode,
)

KINDS = st.sampled_from(["request", "reply", "notice"])
PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.binary(), inner, max_size=4),
    max_leaves=10,
)


def refuses(data: bytes) -> None:
    with pytest.raises((WireError, ProtocolMismatch)):
        decode(data)


def only_refuses(data: bytes) -> None:
    try:
        envelope = decode(data)
    except (WireError, ProtocolMismatch):
        return
    assert decode(encode(envelope)) == envelope


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_class_round_trips(name: str) -> None:
    @settings(max_examples=10, deadline=None)
    @given(records(MESSAGES[name]), KINDS, st.integers(0, 2**63 - 1), st.integers(0, MAX_STAGES))
    def check(message: Message, kind: Any, number: int, scope: int) -> None:
        envelope = Envelope(kind, number, message, scope)
        assert decode(encode(envelope)) == envelope
        assert decode(memoryview(encode(envelope))) == envelope

    check()


@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    only_refuses(data)


@settings(deadline=None)
@given(PLAIN)
def test_arbitrary_msgpack(value: Any) -> None:
    only_refuses(msgpack.packb(value))


@settings(deadline=None)
@given(messages, st.data())
def test_mutated_bytes(message: Message, data: st.DataObject) -> None:
    good = bytearray(encode(Envelope("request", 1, message)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(good) - 1, 0)))
        match data.draw(st.sampled_from(["flip", "insert", "delete", "cut"])):
            case "flip" if good:
                good[at] ^= data.draw(st.integers(1, 255))
            case "insert":
                good[at:at] = data.draw(st.binary(min_size=1, max_size=9))
            case "delete":
                del good[at : at + data.draw(st.integers(1, 9))]
            case "cut":
                del good[at:]
    only_refuses(bytes(good))


@settings(deadline=None)
@given(messages, PLAIN, st.data())
def test_replaced_values(message: Message, value: Any, data: st.DataObject) -> None:
    envelope: list[Any] = [PROTOCOL_VERSION, 0, 1, 0, "", type(message).__name__, message.model_dump()]
    if envelope[6] and data.draw(st.booleans()):
        envelope[6][data.draw(st.sampled_from(sorted(envelope[6])))] = value
    else:
        envelope[data.draw(st.integers(0, 6))] = value
    only_refuses(msgpack.packb(envelope))


def test_truncated_anywhere() -> None:
    blob = Blob(kind="state", number=3)
    ask = PeerToPeerOpenStream(stream=1, blob=blob, first=0, stop=9, credit=8)
    good = encode(Envelope("request", 7, ask))
    for length in range(len(good)):
        refuses(good[:length])
    refuses(good + b"\0")


def body(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"stream": 1, "first": 0, "stop": 9, "credit": 8}
    fields["blob"] = {"kind": "state", "number": 3}
    fields.update(changes)
    return bytes(msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "PeerToPeerOpenStream", fields]))


def test_fields_are_strict() -> None:
    decode(body())
    cases: tuple[dict[str, Any], ...] = (
        {"stream": -1},
        {"stream": 2**32},
        {"stream": 1.0},
        {"stream": "1"},
        {"stream": True},
        {"stream": None},
        {"credit": 0},
        {"credit": 1025},
        {"blob": {"kind": "other", "number": 3}},
        {"blob": {"kind": "state", "number": 2**62 + 1}},
        {"blob": {"kind": "state"}},
        {"blob": {"kind": "state", "number": 3, "scope": -1}},
        {"blob": {"kind": "state", "number": 3, "scope": MAX_STAGES + 1}},
        {"blob": []},
        {"extra": 1},
        {"x" * 10_000: 1},
    )
    for changes in cases:
        refuses(body(**changes))
    for link in (bytes(7), bytes(9), "\0" * 8):
        refuses(
            msgpack.packb(
                [
                    PROTOCOL_VERSION,
                    0,
                    1,
                    0,
                    "PeerToPeerOpenLink",
                    {"link": link, "secret": bytes(32), "cipher": "aes-256-gcm"},
                ]
            )
        )
    refuses(msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "PeerToCoordinatorLeave", {"reason": "x" * 2001}]))


def test_envelopes_are_strict() -> None:
    for kind, number, name in (
        (3, 1, "PeerToPeerPing"),
        (-1, 1, "PeerToPeerPing"),
        (True, 1, "PeerToPeerPing"),
        (0, -1, "PeerToPeerPing"),
        (0, True, "PeerToPeerPing"),
        (0, 2**63, "PeerToPeerPing"),
        (0, 1, "Message"),
        (0, 1, "Blob"),
        (0, 1, b"PeerToPeerPing"),
    ):
        refuses(msgpack.packb([PROTOCOL_VERSION, kind, number, 0, "", name, {}]))
    for scope in (-1, MAX_STAGES + 1, True, "0", None, 0.0):
        refuses(msgpack.packb([PROTOCOL_VERSION, 0, 1, scope, "", "PeerToPeerPing", {}]))
    decode(msgpack.packb([PROTOCOL_VERSION, 0, 1, MAX_STAGES, "", "PeerToPeerPing", {}]))
    refuses(msgpack.packb([PROTOCOL_VERSION, 0, 1, "PeerToPeerPing", "", {}]))
    refuses(msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "PeerToPeerPing", {}, 0]))
    refuses(msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "PeerToPeerPing"]))
    refuses(msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "PeerToPeerPing", []]))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
def test_deep_nesting(opening: bytes) -> None:
    refuses(opening * 300_000)
    refuses(b"\x97\x03\x00\x01\x00\xa0\xaePeerToPeerPing" + opening * 100_000)


def test_huge_declared_lengths() -> None:
    for opening in (b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"):
        refuses(opening + struct.pack(">I", 2**32 - 1) + bytes(100))
    for opening in (b"\xdd", b"\xdf"):
        # Long enough to satisfy a limit that follows the input's length.
        refuses(opening + struct.pack(">I", 1_000_000) + b"\xc0" * 4_000_000)


def test_nested_headers_cannot_claim_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, int] = {}
    unpackb = msgpack.unpackb

    def spy(data: Any, **options: Any) -> Any:
        limits.update(options)
        return unpackb(data, **options)

    monkeypatch.setattr(msgpack, "unpackb", spy)
    decode(encode(Envelope("request", 1, PeerToPeerPing())))
    assert limits["max_array_len"] <= 65_536
    assert limits["max_map_len"] <= 64


def test_extension_types() -> None:
    refuses(msgpack.packb(msgpack.ExtType(PROTOCOL_VERSION, b"x")))
    refuses(msgpack.packb(msgpack.Timestamp(1)))


def test_sizes() -> None:
    refuses(b"\xc0" * (wire.MAX_MESSAGE_BYTES + 1))


def test_too_large_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(WireError, match="too large"):
        encode(Envelope("request", 1, PeerToCoordinatorLeave(reason="failed", trouble="x" * 200)))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -5, 2**64 - 1])
def test_other_versions(version: int) -> None:
    with pytest.raises(ProtocolMismatch, match=str(version)):
        decode(msgpack.packb([version, "whatever comes", 17]))


def test_what_is_logged_has_no_control_characters() -> None:
    for data in (
        body(**{"\x1b[2J\n": 1}),
        msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "\x1b[2J\n", {}]),
    ):
        with pytest.raises(WireError) as caught:
            decode(data)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def test_many_problems_are_counted_not_spelled_out() -> None:
    digests = [1] * 250
    fields = {"round": 0, "digests": digests, "dropped": [], "trouble": ""}
    with pytest.raises(WireError, match="250 problems"):
        decode(msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "PeerToCoordinatorRoundReport", fields]))


def test_failures_travel() -> None:
    failed = RequestFailed(code="BlobUnavailable", message="gone")
    assert decode(encode(Envelope("reply", 1, failed))).message == failed


# Pieces -------------------------------------------------------------------------------------------------


def take(assembly: Assembly, frame: bytes) -> bytes | None:
    found = assembly.add(memoryview(frame))
    return None if found is None else bytes(found)


@pytest.mark.parametrize("size", [1, 100, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, 3 * MAX_FRAME_BYTES, MAX_REQUEST_BYTES])
def test_large_messages_travel_in_pieces(size: int) -> None:
    data, assembly = bytes(range(1, 256)) * (size // 255 + 1), Assembly()
    data = data[:size]
    for _ in range(2):
        *others, last = cut(data)
        assert all(len(frame) <= MAX_FRAME_BYTES for frame in (*others, last))
        for frame in others:
            assert take(assembly, frame) is None
            assert take(assembly, b"small") == b"small", "it may come in between"
        assert take(assembly, last) == data


def test_pieces_without_their_neighbours_are_dropped() -> None:
    data = bytes(3 * MAX_FRAME_BYTES)
    first, second, third, fourth = cut(data)
    for frames in ((second, third, fourth), (first, third, fourth), (first, second, second), (first, fourth)):
        assembly = Assembly()
        assert [take(assembly, frame) for frame in frames] == [None] * len(frames)
        assert [take(assembly, frame) for frame in (first, second, third, fourth)] == [None, None, None, data]


def test_pieces_of_no_good_size() -> None:
    too_large = struct.pack(">BII", 0xC1, MAX_REQUEST_BYTES + 1, 0) + bytes(MAX_FRAME_BYTES - 9)
    for frame in (too_large, cut(bytes(2 * MAX_FRAME_BYTES))[0][:-1], struct.pack(">BII", 0xC1, 0, 0) + b"x"):
        assert take(Assembly(), frame) is None


# Plans --------------------------------------------------------------------------------------------------


def large_verdict(members: int, parts: int) -> Verdict:
    """A verdict as real ones are: what members say of their contributions is random."""
    draws, letters = Random(1), str.maketrans("0189", "ghij")
    stand_ins = tuple(range(min(3, members)))
    plan = RoundPlan(
        round=0,
        anchor_version=0,
        state_digest=bytes(32),
        chunk_elements=4096,
        members=tuple(
            PlanMember(
                peer=peer,
                weight_tokens=10**6 + number,
                norms=draws.randbytes(MAX_CLAIM_BYTES),
                root=draws.randbytes(32),
                identity_key=draws.randbytes(32),
                signature=draws.randbytes(64),
            )
            for number, peer in enumerate(sorted(f"{number:016x}".translate(letters) for number in range(members)))
        ),
        parts=tuple(Part(owner=at, stand_ins=stand_ins, start=at * 4096, stop=(at + 1) * 4096) for at in range(parts)),
    )
    makers = tuple(PartMaker(member=at, chunks=((at, at + 1),), signature=draws.randbytes(64)) for at in range(parts))
    digests = tuple(draws.randbytes(32) for _ in range(parts))
    return Verdict(
        round=0,
        committed=True,
        reason="",
        anchor_version=1,
        plan=plan,
        digests=digests,
        makers=makers,
        tokens=1,
        tokens_total=1,
        loss=1.0,
        ended_s=1.7e9,
        sent_bytes=0,
        previous_chain=bytes(32),
        chain=bytes(32),
        signature=bytes(64),
    )


def test_plans_of_the_most_members_fit_and_small_ones_are_not_compressed() -> None:
    verdict = large_verdict(RUN_MEMBERS, RUN_MEMBERS)
    shown = Envelope("request", 1, PeerToCoordinatorShowVerdict(verdict=verdict))
    data = encode(shown)
    assert len(data) < 0.9 * MAX_REQUEST_BYTES
    assert decode(data) == shown
    few = large_verdict(3, 3)
    shown = Envelope("request", 1, PeerToCoordinatorShowVerdict(verdict=few))
    assert b"weight_tokens" in encode(shown)
    assert decode(encode(shown)) == shown


def test_hostile_plans() -> None:
    def said(plan: bytes) -> bytes:
        shown = Envelope("request", 1, PeerToCoordinatorShowVerdict(verdict=large_verdict(3, 3)))
        fields = msgpack.unpackb(encode(shown), use_list=False)
        fields[-1]["verdict"]["plan"] = plan
        return msgpack.packb(fields)

    whole = msgpack.packb(large_verdict(3, 3).plan.model_dump())
    assert decode(said(zlib.compress(whole))).message.verdict == large_verdict(3, 3)
    for plan in (
        b"",
        b"no plan",
        zlib.compress(whole)[:-1],
        zlib.compress(whole) + b"a",
        zlib.compress(bytes(2**24)),
        zlib.compress(msgpack.packb(7)),
        zlib.compress(b"\xc1"),
    ):
        with pytest.raises(WireError):
            decode(said(plan))


# Layouts ------------------------------------------------------------------------------------------------


def describe(layout: tuple[TensorSpec, ...]) -> Envelope:
    model = PeerToCoordinatorDescribeModel(layout=layout, corpus_digest=None, tokens_per_sample=1)
    return Envelope("request", 1, model)


def test_the_layout_of_the_largest_model_fits() -> None:
    layout = tuple(
        TensorSpec(name=f"model.layers.{n // 768}.mlp.experts.{n % 768}.weight", shape=(4096, 1536))
        for n in range(MAX_TENSORS)
    )
    data = encode(describe(layout))
    assert len(data) < MAX_REQUEST_BYTES / 2
    assert decode(data) == describe(layout)


def test_hostile_layouts() -> None:
    def said(layout: bytes) -> bytes:
        fields = {"layout": layout, "corpus_digest": None, "tokens_per_sample": 1}
        return bytes(msgpack.packb([PROTOCOL_VERSION, 0, 1, 0, "", "PeerToCoordinatorDescribeModel", fields]))

    one = struct.pack(">HB1Q", 1, 1, 5) + b"w"
    assert decode(said(zlib.compress(one)))
    for layout in (
        b"",
        b"nonsense",
        zlib.compress(b""),
        zlib.compress(one)[:-5],
        zlib.compress(one) + b"x",
        zlib.compress(one[:-1]),
        zlib.compress(one + b"\0"),
        zlib.compress(one * (MAX_TENSORS + 1)),
        zlib.compress(bytes(MAX_LAYOUT_BYTES + 1)),
        zlib.compress(struct.pack(">HB", 1, 17) + struct.pack(">17Q", *range(17)) + b"w"),
        zlib.compress(struct.pack(">HB1Q", 2, 1, 5) + b"\xff\xff"),
        zlib.compress(struct.pack(">HB1Q", 1, 1, 2**63) + b"w"),
    ):
        refuses(said(layout))
