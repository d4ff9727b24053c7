"""Readings of a peer for a scrape: what it does, its link and its share, as its own process knows them.

The coordinator is not asked: a thousand peers that are scraped cost it nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from shoal.peer.terminal.snapshot import Snapshot
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import WORK_PHASES, DeviceUse, PathKind, PathReport, PhaseTimes
from shoal.swarm.web.metrics import Readings

_PERCENTAGE = re.compile(r" *\d+ *%$")


@dataclass(frozen=True)
class PeerFacts:
    """Values of a peer beside its snapshot. ``phases``: of its training since the last round; ``share``: of its weight
    in the newest committed round, None before one; ``checkpoint``: round of the newest one, and when it was written;
    ``allocated_bytes``: None on a CPU; ``use``: of the machine, as last read for a heartbeat."""

    link_bps: float
    phases: PhaseTimes
    paths: Sequence[PathReport] = ()
    share: float | None = None
    checkpoints: int = 0
    checkpoint: tuple[int, float] | None = None
    allocated_bytes: int | None = None
    free_bytes: int | None = None
    use: DeviceUse | None = None


def peer_readings(taken: Snapshot, facts: PeerFacts) -> Readings:
    """Readings of a moment."""
    readings = Readings(taken.run)
    put = readings.put
    put("shoal_peer_info", 1, taken.peer, taken.device)
    put("shoal_peer_activity", 1, _PERCENTAGE.sub("", taken.activity))
    put("shoal_peer_coordinator_away", taken.coordinator_is_away)
    put("shoal_peer_round", taken.round)
    put("shoal_peer_anchor_version", taken.anchor_version)
    put("shoal_peer_members", taken.members)
    put("shoal_peer_tokens_per_second", taken.tokens_per_s)
    put("shoal_peer_open_round_tokens", taken.tokens_done)
    put("shoal_peer_loss", taken.loss)
    for phase in WORK_PHASES:
        put("shoal_peer_phase_seconds", facts.phases.of(phase), phase)
    put("shoal_peer_round_share_ratio", facts.share)
    put("shoal_peer_sent_bytes_total", taken.bytes_sent)
    put("shoal_peer_received_bytes_total", taken.bytes_received)
    put("shoal_peer_compression_ratio", taken.compression or None)
    put("shoal_peer_link_bytes_per_second", facts.link_bps / 8 or None)
    kinds = Counter(path.kind for path in facts.paths)
    for kind in get_args(PathKind):
        put("shoal_peer_paths", kinds[kind], kind)
    put("shoal_peer_device_allocated_bytes", facts.allocated_bytes)
    if facts.use is not None:
        put("shoal_peer_power_watts", facts.use.power_w)
        put("shoal_peer_energy_joules_total", facts.use.energy_j)
        put("shoal_peer_gpu_busy_ratio", facts.use.gpu)
    put("shoal_peer_checkpoints", facts.checkpoints)
    if facts.checkpoint is not None:
        put("shoal_peer_checkpoint_round", facts.checkpoint[0])
        put("shoal_peer_checkpoint_timestamp_seconds", facts.checkpoint[1])
    put("shoal_disk_free_bytes", facts.free_bytes, "peer")
    return readings


def share_in(verdict: Verdict | None, peer: str) -> float | None:
    """The share of a peer's weight in a round, None in one that was not committed."""
    if verdict is None or not verdict.committed or verdict.plan is None:
        return None
    weights = {one.peer: one.weight for one in verdict.plan.members}
    return weights.get(peer, 0) / sum(weights.values())
