"""Invariants of a pipeline run that is over, whatever happened in it."""

from collections.abc import Sequence

import torch
from tests.chaos.pipeline_scene import BATCH, ROUNDS, STAGES, Peer, Scene
from tests.chaos.small_model import plain_loop
from torch import Tensor

from shoal.swarm.coordinator.events import InScope, JournalEvent, RoundPlanned, VerdictGiven
from shoal.swarm.errors import RunEnded
from shoal.swarm.sample_ranges import from_wire


def check(scene: Scene) -> None:
    """Nobody who lives has failed, but for who wakes up when the run is over; every sample counted once in each stage;
    all are where one process would be."""
    for peer in scene.alive:
        if peer.thread.failure is not None and not isinstance(peer.thread.failure, RunEnded):
            raise AssertionError(f"{peer.process} failed") from peer.thread.failure
    check_samples(scene.events)
    ours, plain = trained(scene.alive), plain_loop(ROUNDS, BATCH)
    assert ours.shape == plain.shape
    assert torch.linalg.vector_norm(ours - plain) < 1e-5 * torch.linalg.vector_norm(plain)


def check_samples(events: Sequence[JournalEvent]) -> None:
    """Every round is committed or aborted in all stages; of a committed one each sample counts once in each stage, and
    is the next of the run's sequence."""
    plans: dict[int, RoundPlanned] = {}
    ends: dict[int, list[tuple[bool, int]]] = {}
    for event in events:
        if not isinstance(event, InScope):
            continue
        if isinstance(event.event, RoundPlanned):
            plans[event.scope] = event.event
        if isinstance(event.event, VerdictGiven):
            verdict = event.event.verdict
            ends.setdefault(verdict.round, []).append((verdict.committed, verdict.anchor_version))
            if verdict.committed:
                ranges = [one for wire in plans[event.scope].ranges for one in from_wire(wire)]
                counted = sorted(sample for start, stop in ranges for sample in range(start, stop))
                first = (verdict.anchor_version - 1) * BATCH
                assert counted == list(range(first, first + BATCH)), f"stage {event.scope - 1}"
    assert all(len(end) == STAGES and len(set(end)) == 1 for end in ends.values()), ends
    assert list(ends.values())[-1][0] == (True, ROUNDS)


def aborted(events: Sequence[JournalEvent]) -> list[str]:
    """Return the reasons of all aborted rounds."""
    return [
        event.event.verdict.reason
        for event in events
        if isinstance(event, InScope)
        and event.scope == 1
        and isinstance(event.event, VerdictGiven)
        and not event.event.verdict.committed
    ]


def trained(peers: Sequence[Peer]) -> Tensor:
    """Return the stages' parameters of the last round, one after the other; all replicas' have to agree."""
    stages: dict[int, list[Tensor]] = {}
    digests: dict[int, set[bytes]] = {}
    for peer in peers:
        if peer.held is None:
            continue
        for stage, replica in peer.held.training.replicas.items():
            if replica.state is not None and replica.state.version == ROUNDS:
                stages.setdefault(stage, []).append(replica.state.anchor)
                digests.setdefault(stage, set()).add(replica.state.digest)
    assert sorted(stages) == list(range(STAGES)), f"nobody holds the other stages than {sorted(stages)}"
    assert all(len(one) == 1 for one in digests.values()), "parity"
    return torch.cat([stages[stage][0] for stage in range(STAGES)])
