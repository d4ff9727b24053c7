"""A session at a glance: plain values, taken from any thread."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from shoal.peer.member import Member
from shoal.swarm.messages import RunView


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


class Watched(Protocol):
    """What live views look at: a ``Session`` or a ``PipelinePeer``."""

    def snapshot(self) -> Snapshot:
        """From any thread. Raises what has ended the network thread."""
        ...


def take_snapshot(member: Member, view: RunView, peer: str, device: str) -> Snapshot:
    """What ``member`` knows of itself and, by ``view``, of the run."""
    client, progress, meter, run = member.client, member.progress, member.node.meter, member.client.run_file
    closes_at_s = client.closes_at_s
    return Snapshot(
        run=run.run.name,
        peer=peer,
        device=device,
        round=view.round,
        anchor_version=view.anchor_version,
        phase=view.phase,
        activity=member.activity,
        coordinator_is_away=client.coordinator_is_away,
        loss=progress.loss,
        tokens_per_s=progress.tokens_per_s,
        tokens_done=progress.tokens_done,
        tokens_in_round=view.tokens_in_round,
        tokens_target=run.round.tokens,
        tokens_committed=view.tokens_committed,
        members=view.members,
        bytes_sent=meter.sent_bytes,
        bytes_received=meter.received_bytes,
        compression=member.compression,
        closes_in_s=None if closes_at_s is None else max(0.0, closes_at_s - time.monotonic()),
    )
