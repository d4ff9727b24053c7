"""Readings of a peer for a scrape."""

from __future__ import annotations

import pytest

from shoal.peer.member.peer_metrics import PeerFacts, peer_readings
from shoal.peer.terminal.snapshot import Snapshot
from shoal.swarm.protocol.types import DeviceUse, PhaseTimes

TAKEN = Snapshot(
    run="reef",
    peer="abcd",
    device="some GPU",
    round=3,
    anchor_version=3,
    phase="training",
    activity="training",
    coordinator_is_away=False,
    loss=2.5,
    tokens_per_s=10.0,
    tokens_done=1,
    tokens_in_round=2,
    tokens_target=3,
    tokens_committed=4,
    members=2,
    bytes_sent=5,
    bytes_received=6,
    compression=4.0,
    closes_in_s=None,
)


@pytest.mark.parametrize("use", [None, DeviceUse(cpu=0.5, memory_used_bytes=1)])
def test_a_gpu_that_nothing_measures_is_absent(use: DeviceUse | None) -> None:
    names = {one.name for one in peer_readings(TAKEN, PeerFacts(link_bps=0.0, phases=PhaseTimes(), use=use))}
    assert "shoal_peer_round" in names
    assert not [name for name in names if "watts" in name or "joules" in name or "gpu" in name]


def test_power_energy_and_use_of_the_own_gpu() -> None:
    use = DeviceUse(cpu=0.5, memory_used_bytes=1, gpu=0.75, power_w=310.5, energy_j=12.0)
    read = {one.name: one.value for one in peer_readings(TAKEN, PeerFacts(link_bps=0.0, phases=PhaseTimes(), use=use))}
    names = ("power_watts", "energy_joules_total", "gpu_busy_ratio")
    assert [read[f"shoal_peer_{name}"] for name in names] == [310.5, 12.0, 0.75]
