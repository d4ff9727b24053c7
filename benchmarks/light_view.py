"""Fields of a view that a light peer reads, and its record of its rounds."""

from __future__ import annotations

import time
import zlib
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache

import msgpack


@dataclass
class RoundTimes:
    """Moments on the monotonic clock, which processes of one machine share."""

    closes_s: float = 0.0
    plan_s: float = 0.0
    verdict_s: float = 0.0


@dataclass
class Glance:
    """Fields of a view that a light peer acts on; ``parts`` is 0 without a plan."""

    epoch: int = 0
    sequence: int = -1
    round: int = -1
    anchor_version: int = 0
    phase: str = ""
    closes_at_s: float = 0.0
    parts: int = 0
    plan_digest: bytes | None = None
    roster_version: int = 0
    verdict_chain: bytes | None = None
    has_roster: bool = False


@dataclass
class Record:
    """Observations of one peer: seconds by message, and moments by round."""

    rounds: dict[int, RoundTimes] = field(default_factory=lambda: defaultdict(RoundTimes))
    answers_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    views: int = 0
    view_bytes: int = 0
    repeats: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    counted: list[tuple[float, int, int]] = field(default_factory=list)
    """Moments on the monotonic clock, each with the bytes of messages sent and received until then."""

    def count(self) -> None:
        """Note the bytes so far."""
        self.counted.append((time.monotonic(), self.sent_bytes, self.received_bytes))

    def bytes_between(self, start_s: float, stop_s: float) -> tuple[int, int]:
        """Return the bytes sent and received between two moments, as of the notes next before them."""
        moments = [moment for moment, *_ in self.counted]
        before, until = (max(0, bisect_right(moments, at_s) - 1) for at_s in (start_s, stop_s))
        (_, sent, received), (_, all_sent, all_received) = self.counted[before], self.counted[until]
        return all_sent - sent, all_received - received


def glance(view: msgpack.Unpacker) -> Glance:
    """Read the fields from an unpacker whose next object is a view."""
    seen, closes_in_s = Glance(), None
    for _ in range(view.read_map_header()):
        match view.unpack():
            case (
                "epoch"
                | "sequence"
                | "round"
                | "anchor_version"
                | "phase"
                | "plan_digest"
                | "roster_version"
                | "verdict_chain" as name
            ):
                setattr(seen, name, view.unpack())
            case "closes_in_s":
                closes_in_s = view.unpack()
            case "plan" if seen.phase == "averaging":
                seen.parts = _count_parts(view)  # 0 where the plan was left out
            case "roster" | "roster_delta":
                start = view.tell()
                view.skip()
                seen.has_roster |= view.tell() - start > 1  # one byte is None
            case _:
                view.skip()
    seen.closes_at_s = time.monotonic() + (closes_in_s or 0.0)
    return seen


@lru_cache(2)
def _count_packed_parts(packed: bytes) -> int:
    """Read a compressed plan, once for all peers of this process."""
    data = zlib.decompress(packed)
    plan = msgpack.Unpacker(max_buffer_size=len(data))
    plan.feed(data)
    return _count_parts(plan)


def _count_parts(view: msgpack.Unpacker) -> int:
    """Read a plan, or None."""
    parts = 0
    try:
        fields = view.read_map_header()
    except ValueError:
        packed = view.unpack()
        return 0 if packed is None else _count_packed_parts(packed)
    for _ in range(fields):
        if view.unpack() == "parts":
            parts = view.read_array_header()
            for _ in range(parts):
                view.skip()
        else:
            view.skip()
    return parts
