"""Time and bytes of an exchange, from the plan of its round and the rates of the members' links.

Each member sends what the plan gives it to send. A link carries ``LINK_SHARE`` of its rate, up and down at once; the
exchange is over when the last member is done, as every mean needs all contributions. Chunks follow each other closely,
so contributions and means overlap and the busier direction of the busiest link sets the pace: the closed form of
``round_plan.owner_shares``, which rounds behind shaped links come close to (``docs/benchmarks.md``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from shoal.compression.formats import FormatMap
from shoal.swarm.averaging.chunk_header import Group
from shoal.swarm.averaging.merkle import path_bytes
from shoal.swarm.protocol.rounds import RoundPlan, leaf_elements
from shoal.swarm.transport.bulk.data_connection import PREFIX_BYTES
from shoal.swarm.transport.bulk.frame_crypto import TAG_BYTES

LINK_SHARE = 0.95
"""Part of a link's rate that sealed chunks get (``wan.py``: 0.950 and 0.951 with 50 and 10 M elements at 100 Mbit/s);
3.5 % are headers of IP and TCP."""

_SEGMENT_BYTES, _HEADERS_BYTES = 1448, 52
"""Of a TCP segment with time stamps in a frame of 1500 bytes, over IPv4; every second one is acknowledged by headers
alone."""

EXCHANGE_S_PER_ELEMENT = 2.4e-9
"""Processor seconds of an exchange for each of the model's elements, on one core (``allreduce.py``: 0.48 s for four
members of 50 M); links that are faster than that wait for it."""

SLOWEST = 20.0
"""``straggler_guard._SLOWEST``: a contributor that takes longer than so many times the median is left out."""


def on_links(sent_bytes: float, received_bytes: float) -> float:
    """Return what links carry up of so much payload: with headers, and acknowledgements of what was received."""
    return sent_bytes + _HEADERS_BYTES * (sent_bytes / _SEGMENT_BYTES + received_bytes / (2 * _SEGMENT_BYTES))


def acknowledgements(messages: int) -> float:
    """Return what links carry up to acknowledge so many messages that get no answer."""
    return float(_HEADERS_BYTES * messages)


_SEALED_BYTES = 42
"""Of a control message: ZMTP's frame (1 + 8 bytes) around CURVE's command, of 8 + 8 bytes, a seal of 16 and a byte of
flags (RFC 23 and 26 of ZeroMQ)."""


def message_on_links(payload: float) -> float:
    """Return what links carry of a control message, with its seal and the headers of its own segments.

    Its acknowledgement goes with the answer."""
    sealed = payload + _SEALED_BYTES
    return sealed + _HEADERS_BYTES * math.ceil(sealed / _SEGMENT_BYTES)


_FRAME_BYTES = PREFIX_BYTES + TAG_BYTES


@dataclass(frozen=True)
class PackedSizes:
    """Bytes of an element in a contribution, and in a result or partial sum."""

    contribution: float
    result: float

    @classmethod
    def of(cls, formats: FormatMap, elements: int, members: int) -> PackedSizes:
        contribution, result = formats.contribution(0, elements), formats.result(0, elements, members)
        return cls(contribution.packed_bytes(elements) / elements, result.packed_bytes(elements) / elements)

    def in_chunks(self, plan: RoundPlan) -> PackedSizes:
        """Return the sizes with what chunks have beside: a path to the contribution's root or the header of a result,
        and the frame that seals them."""
        elements, chunk = plan.parts[-1].stop, plan.chunk_elements
        leaf = leaf_elements(elements)
        leaves, step = -(-elements // leaf), max(1, chunk // leaf)
        paths = sum(path_bytes(leaves, first, min(first + step, leaves)) for first in range(0, leaves, step))
        frames = -(-elements // chunk) * _FRAME_BYTES
        headers = -(-elements // chunk) * Group.of(plan).header_bytes
        return PackedSizes(self.contribution + (paths + frames) / elements, self.result + (headers + frames) / elements)


@dataclass(frozen=True)
class MemberTraffic:
    """Bytes of one member in an exchange. ``contributed``: those of its contribution, part of ``sent``; ``relayed``:
    those of ``sent`` that pass over a relay; ``owns``: whether others wait for it."""

    sent: float
    received: float
    contributed: float
    relayed: float
    owns: bool


def traffic_of(plan: RoundPlan, sizes: PackedSizes, reachable: Sequence[bool]) -> list[MemberTraffic]:
    """Return what each member of the plan moves, in its order.

    In a row, each member sends its contribution to the row reducers and gets their results; between rows, row reducers
    send partial sums to the owners and get the means back. A flat group is one row whose owners reduce.
    ``reachable``: whether the others can dial a member; two that cannot be dialed meet over a relay."""
    elements, members = plan.parts[-1].stop, len(plan.members)
    row_members: Counter[int] = Counter(member.row for member in plan.members)
    walled: Counter[int] = Counter(member.row for member, one in zip(plan.members, reachable, strict=True) if not one)
    rows = len(row_members)
    reduced, owned = [0] * members, [0] * members
    columns: dict[tuple[int, ...], int] = {}
    for part in plan.parts:
        size = part.stop - part.start
        owned[part.owner] += size
        collectors = plan.row_reducers(part) or (part.owner,)
        columns[collectors] = columns.get(collectors, 0) + size
    walled_reduce: Counter[int] = Counter()
    for collectors, size in columns.items():
        for collector in collectors:
            reduced[collector] += size
            if not reachable[collector]:
                walled_reduce[plan.members[collector].row] += size
    found = []
    for index, member in enumerate(plan.members):
        mates, mine, own = row_members[member.row] - 1, reduced[index], owned[index]
        contributed = (elements - mine) * sizes.contribution
        # Results down the row, partial sums to the owners, means back to the other rows.
        sent = contributed + (mine * mates + (mine - own) + own * (rows - 1)) * sizes.result
        received = mine * mates * sizes.contribution
        received += (elements - mine + (mine - own) + own * (rows - 1)) * sizes.result
        relayed = 0.0
        if not reachable[index]:
            others = walled[member.row] - 1
            relayed = (walled_reduce[member.row] - mine) * sizes.contribution + mine * others * sizes.result
        found.append(MemberTraffic(sent, received, contributed, relayed, own > 0 or mine > 0))
    return found


@dataclass(frozen=True)
class Exchange:
    """Course of an exchange in which nobody fails. ``took_s``: from the plan in hand to all results held;
    ``busy_s``: by member, what its own link needs; ``left_out``: contributors that are too slow, by index."""

    traffic: Sequence[MemberTraffic]
    busy_s: Sequence[float]
    took_s: float
    left_out: frozenset[int]
    relayed_bytes: float


def exchange_of(
    traffic: Sequence[MemberTraffic],
    up_bps: Sequence[float],
    down_bps: Sequence[float],
    *,
    elements: int,
    latency_s: float,
    patience_s: float,
    relay_bps: float,
    chunk_bytes: float = 0.0,
) -> Exchange:
    """Return the course of an exchange. ``chunk_bytes``: of one chunk of a result.

    Contributions go before results, and the last chunk of each part is made when the last of them is here: then it
    still has to get to all members.
    A contributor that owns nothing is left out where the others have waited for it for ``patience_s`` and ``SLOWEST``
    times what the median takes. ``relay_bps``: what all relays carry together."""
    processor_s = EXCHANGE_S_PER_ELEMENT * elements if len(traffic) > 1 else 0.0
    busy_s = [
        max(8 * one.sent / up, 8 * one.received / down) / LINK_SHARE
        for one, up, down in zip(traffic, up_bps, down_bps, strict=True)
    ]
    usual_s = max(median_low(busy_s), processor_s)
    limit_s = usual_s + patience_s + SLOWEST * usual_s
    contributing_s = [8 * one.contributed / (up * LINK_SHARE) for one, up in zip(traffic, up_bps, strict=True)]
    left_out = frozenset(
        index
        for index, (one, seconds) in enumerate(zip(traffic, contributing_s, strict=True))
        if not one.owns and seconds > limit_s
    )
    waited_s = [limit_s if index in left_out else seconds for index, seconds in enumerate(busy_s)]
    last_s = max((seconds for index, seconds in enumerate(contributing_s) if index not in left_out), default=0.0)
    owners = sum(one.owns for one in traffic)
    # An owner sends its last chunk to all others; each gets one of every other owner.
    ends_s = last_s + max(
        max(8 * chunk_bytes * (len(traffic) - 1) * one.owns / up, 8 * chunk_bytes * (owners - one.owns) / down)
        / LINK_SHARE
        for one, up, down in zip(traffic, up_bps, down_bps, strict=True)
    )
    relayed_bytes = sum(one.relayed for one in traffic)
    relay_s = 8 * relayed_bytes / (relay_bps * LINK_SHARE)
    took_s = max(*waited_s, ends_s, relay_s, processor_s) + 2 * latency_s if len(traffic) > 1 else 0.0
    return Exchange(traffic, busy_s, took_s, left_out, relayed_bytes)


class Transfers:
    """Transfers between two machines at a time: a link serves those of each direction in the order in which they begin.

    Real ones share a link evenly, which gives the same bytes a second; only which transfer ends first differs."""

    def __init__(self, relay_bps: float) -> None:
        """``relay_bps``: what all relays carry together."""
        self._relay_bps = relay_bps
        self._free_s: dict[tuple[str, str], float] = {}

    def end_s(
        self, now_s: float, sender: tuple[str, float], receiver: tuple[str, float], size: float, *, relayed: bool
    ) -> float:
        """Return when a transfer that begins now ends. ``sender``, ``receiver``: names, and rates up and down."""
        ways = [(("up", sender[0]), sender[1]), (("down", receiver[0]), receiver[1])]
        if relayed:
            ways.append((("relay", ""), self._relay_bps))
        last_s = now_s
        for way, bps in ways:
            self._free_s[way] = max(now_s, self._free_s.get(way, 0.0)) + 8 * size / (bps * LINK_SHARE)
            last_s = max(last_s, self._free_s[way])
        return last_s
