"""A session at a glance: plain values, taken from any thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """A session at a glance, for live views. ``compression``: float32 bytes of a
    contribution for each of its bytes as sent."""

    run: str
    peer: str
    device: str
    round: int
    anchor_version: int
    phase: str
    activity: str
    coordinator_is_away: bool
    loss: float | None
    tokens_per_s: float
    tokens_done: int
    tokens_in_round: int
    tokens_target: int
    tokens_committed: int
    members: int
    bytes_sent: int
    bytes_received: int
    compression: float
    closes_in_s: float | None
