"""Snapshot of a session for live views: plain values that any thread may take."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from shoal.swarm.protocol.rounds import RunView, Verdict
from shoal.swarm.protocol.run_file import RunSection
from shoal.swarm.protocol.types import PipelineView

if TYPE_CHECKING:
    from shoal.peer.member.member import LocalMember


@dataclass(frozen=True)
class Flow:
    """Micro-batches at a pipeline's peer: those in flight, of at most ``max_in_flight``, and those computed since it
    holds its stages."""

    in_flight: int
    max_in_flight: int
    forwards: int
    backwards: int


@dataclass(frozen=True)
class HeldStages:
    """Stages that a pipeline's peer holds: ``first`` to ``last`` of ``stages``, with the layers
    ``first_layer <= l < stop_layer``. ``replicas``: of the held stage with the fewest; ``empty`` and ``alone``: stages
    of the run without any, and with one."""

    first: int
    last: int
    stages: int
    first_layer: int
    stop_layer: int
    replicas: int
    flow: Flow
    empty: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A session at one moment. ``loss``: this peer's recent loss, or, if it computes none, that of the newest committed
    round; ``compression``: ratio of a contribution's float32 bytes to its bytes as sent; ``held``: None except for a
    pipeline's peer that holds stages; ``tokens_done`` and ``tokens_trained``: of this peer, in the open round and in
    all; ``ends``: where the run ends; ``waits_for``: what this peer or the whole run waits for, in a sentence;
    ``aborted``: why the newest round was aborted, empty after a committed one; ``leaving``: whether it was asked to
    leave, and ends what it has begun."""

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
    tokens_trained: int = 0
    name: str = ""
    ends: RunSection | None = None
    waits_for: str = ""
    aborted: str = ""
    amended: tuple[str, ...] = ()
    held: HeldStages | None = None
    leaving: bool = False


class Watched(Protocol):
    """Source of live views: a ``Session`` or a ``PipelinePeer``."""

    def snapshot(self) -> Snapshot:
        """Take a snapshot. Thread-safe. Raises the error that has ended the network thread."""
        ...


def take_snapshot(member: LocalMember, view: RunView, peer: str, device: str) -> Snapshot:
    """A snapshot of ``member`` and, by ``view``, of the run."""
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
        tokens_target=client.run_now.round.tokens,
        tokens_committed=view.tokens_committed,
        members=view.members,
        bytes_sent=meter.sent_bytes,
        bytes_received=meter.received_bytes,
        compression=member.compression,
        closes_in_s=None if closes_at_s is None else max(0.0, closes_at_s - time.monotonic()),
        tokens_trained=progress.tokens_trained,
        name=client.me.name,
        ends=client.run_now.run,
        waits_for=view.wall or view.waits_for,
        aborted=_aborted(view.verdict),
        amended=tuple(one.text for one in view.amendments),
    )


def _aborted(verdict: Verdict | None) -> str:
    return "" if verdict is None or verdict.committed else f"round {verdict.round} was aborted: {verdict.reason}"


def held_stages(pipeline: PipelineView, span: tuple[int, int], flow: Flow) -> HeldStages:
    """The stages of ``span`` as their holder sees them in this view."""
    first, last = span
    stages = range(len(pipeline.boundaries) - 1)
    replicas = [sum(one.first <= stage <= one.last for one in pipeline.spans) for stage in stages]
    return HeldStages(
        first=first,
        last=last,
        stages=len(stages),
        first_layer=pipeline.boundaries[first],
        stop_layer=pipeline.boundaries[last + 1],
        replicas=min(replicas[first : last + 1]),
        flow=flow,
        empty=tuple(stage for stage in stages if not replicas[stage]),
        alone=tuple(stage for stage in stages if replicas[stage] == 1),
    )


def with_stages(run: Snapshot, first: LocalMember, held: HeldStages) -> Snapshot:
    """The snapshot of a pipeline's peer; ``run``: of its membership of the run, ``first``: of its first stage."""
    verdict: Verdict | None = first.client.view.verdict
    loss = verdict.loss if run.loss is None and verdict is not None else run.loss
    return replace(
        run,
        activity=first.activity,
        compression=first.compression,
        aborted=_aborted(verdict),
        loss=loss,
        held=held,
    )
