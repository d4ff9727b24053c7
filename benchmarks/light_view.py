"""Fields of a view that a light peer reads, and its record of its rounds."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

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


def glance(view: msgpack.Unpacker) -> Glance:
    """Read the fields from an unpacker whose next object is a view."""
    seen, closes_in_s = Glance(), None
    for _ in range(view.read_map_header()):
        match view.unpack():
            case (
                "epoch" | "sequence" | "round" | "anchor_version" | "phase" | "roster_version" | "verdict_chain" as name
            ):
                setattr(seen, name, view.unpack())
            case "closes_in_s":
                closes_in_s = view.unpack()
            case "plan" if seen.phase == "averaging":
                seen.parts = _count_parts(view)
            case "roster" | "roster_delta":
                start = view.tell()
                view.skip()
                seen.has_roster |= view.tell() - start > 1  # one byte is None
            case _:
                view.skip()
    seen.closes_at_s = time.monotonic() + (closes_in_s or 0.0)
    return seen


def _count_parts(view: msgpack.Unpacker) -> int:
    parts = 0
    for _ in range(view.read_map_header()):
        if view.unpack() == "parts":
            parts = view.read_array_header()
            for _ in range(parts):
                view.skip()
        else:
            view.skip()
    return parts
