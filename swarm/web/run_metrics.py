"""Readings of a run for a scrape, from its status and from what its host alone knows. Values in, readings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.protocol.evaluations import newest_used
from shoal.swarm.protocol.messages import CoordinatorToPeerStatus
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import WORK_PHASES, CostStatus, MemberStatus, Phase
from shoal.swarm.web.documents import waits_for
from shoal.swarm.web.metrics import NAMED_MEMBERS, REST, Readings


@dataclass(frozen=True)
class CommittedRoundFacts:
    """The newest committed round. ``shares``: of the weight in its mean, by member."""

    ended_s: float
    took_s: float
    tokens: int
    sent_bytes: int
    void_parts: int
    shares: Mapping[str, float]

    @classmethod
    def of(cls, event: VerdictGiven, before: VerdictGiven | None) -> CommittedRoundFacts:
        """The facts of a committed round; ``before``: the round that ended before it, if any."""
        verdict = event.verdict
        weights = {one.peer: one.weight for one in verdict.plan.members} if verdict.plan is not None else {}
        total = sum(weights.values())
        return cls(
            ended_s=verdict.ended_s,
            took_s=max(0.0, event.elapsed_s - (before.elapsed_s if before is not None else 0.0)),
            tokens=verdict.tokens,
            sent_bytes=verdict.sent_bytes,
            void_parts=sum(digest is None for digest in verdict.digests),
            shares={peer: weight / total for peer, weight in weights.items()},
        )


@dataclass(frozen=True)
class HostFacts:
    """What a host knows of its run beside the status. ``backup_behind_s``: None without a backup; ``free_bytes``: by
    what the disk holds."""

    newest: CommittedRoundFacts | None = None
    tokens_undone: int = 0
    is_disputed: bool = False
    banned: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    journal_writes: int = 0
    journal_write_s: float = 0.0
    backup_behind_s: float | None = None
    free_bytes: Mapping[str, int] = field(default_factory=dict)


def run_readings(run: RunFile, status: CoordinatorToPeerStatus, facts: HostFacts) -> Readings:
    """Readings of a hosted run."""
    readings = Readings(run.run.name)
    put = readings.put
    put("shoal_run_info", 1, status.run_hash.hex(), run.algorithm)
    for phase in get_args(Phase):
        put("shoal_run_phase", phase == status.phase, phase)
    put("shoal_run_waits", status.phase != "ended" and bool(waits_for(status)))
    put("shoal_round", status.round)
    put("shoal_rounds_total", status.rounds_committed + status.rounds_undone, "committed")
    put("shoal_rounds_total", status.rounds_aborted, "aborted")
    put("shoal_rounds_total", status.rounds_undone, "undone")
    put("shoal_round_max_seconds", run.round.max_s)
    if facts.newest is not None:
        put("shoal_last_commit_timestamp_seconds", facts.newest.ended_s)
        put("shoal_round_seconds", facts.newest.took_s)
        put("shoal_round_tokens", facts.newest.tokens)
        put("shoal_round_members", len(facts.newest.shares))
        put("shoal_round_sent_bytes", facts.newest.sent_bytes)
        put("shoal_round_void_parts", facts.newest.void_parts)
    _put_timing(readings, status)
    put("shoal_trained_tokens_total", status.tokens_committed + facts.tokens_undone)
    put("shoal_undone_tokens_total", facts.tokens_undone)
    put("shoal_committed_tokens", status.tokens_committed)
    put("shoal_target_tokens", run.run.tokens)
    put("shoal_open_round_tokens", status.tokens_in_round)
    put("shoal_tokens_per_second", sum(one.tokens_per_s for one in status.members if one.alive))
    put("shoal_loss", status.loss)
    put("shoal_loss_warning", bool(status.warning))
    figure = newest_used(status.evaluation)
    if figure is not None:
        is_disputed = status.evaluation.figures[-1].standing == "disputed"
        put("shoal_held_out_loss", figure.loss)
        put("shoal_held_out_accuracy_ratio", figure.accuracy)
        put("shoal_held_out_version", figure.version)
        put("shoal_held_out_validators", 0 if is_disputed else len(figure.claims))
    put("shoal_anchor_version", status.anchor_version)
    stages = [stage.state_digest for stage in status.stages] or [status.state_digest]
    put("shoal_state_agreed", None not in stages)
    put("shoal_state_disputed", facts.is_disputed)
    if status.coverage:
        newest = status.coverage[-1]
        put("shoal_epoch", newest.epoch)
        put("shoal_epoch_committed_ratio", newest.committed / newest.samples if newest.samples else None)
    _put_costs(readings, status.costs)
    shares = facts.newest.shares if facts.newest is not None else {}
    _put_members(readings, status.members, status.costs.currency, shares)
    for number, stage in enumerate(status.stages):
        put("shoal_stage_replicas", len(stage.replicas), str(number))
        put("shoal_stage_queued_samples", stage.queue, str(number))
        put("shoal_stage_tokens_per_second", stage.tokens_per_s, str(number))
    _put_relays(readings, status)
    put("shoal_banned_peers", facts.banned)
    for reason, count in facts.refused.items():
        put("shoal_refused_joins_total", count, reason)
    put("shoal_journal_writes_total", facts.journal_writes)
    put("shoal_journal_write_seconds_total", facts.journal_write_s)
    put("shoal_backup_behind_seconds", facts.backup_behind_s)
    for files, free in facts.free_bytes.items():
        put("shoal_disk_free_bytes", free, files)
    return readings


def _put_timing(readings: Readings, status: CoordinatorToPeerStatus) -> None:
    put, timing = readings.put, status.timing
    put("shoal_utilisation_ratio", status.utilisation)
    put("shoal_goodput_ratio", status.goodput)
    if timing is None:
        return
    for part, seconds in (("work", timing.work_s), ("gathering", timing.gather_s), ("exchange", timing.exchange_s)):
        put("shoal_round_part_seconds", seconds, part)
    if timing.mean is not None:
        for phase in WORK_PHASES:
            put("shoal_round_phase_seconds", timing.mean.of(phase), phase)
    if timing.path is not None:
        put("shoal_round_late_seconds", timing.path.extra_s, timing.path.cause)


def _put_costs(readings: Readings, costs: CostStatus) -> None:
    readings.put("shoal_device_seconds", costs.device_s)
    readings.put("shoal_unpriced_device_seconds", costs.unpriced_device_s)
    readings.put("shoal_cost", costs.cost, costs.currency)
    readings.put("shoal_round_cost", costs.round_cost, costs.currency)
    readings.put("shoal_million_tokens_cost", costs.million_tokens_cost, costs.currency)
    readings.put("shoal_provider_cost", costs.provider_cost, costs.currency, costs.provider)
    readings.put("shoal_energy_joules", costs.energy_j)
    readings.put("shoal_round_energy_joules", costs.round_energy_j)
    readings.put("shoal_token_energy_joules", costs.token_energy_j)


def _put_members(
    readings: Readings, members: Sequence[MemberStatus], currency: str, shares: Mapping[str, float]
) -> None:
    put = readings.put
    states = dict.fromkeys(("synced", "catching_up", "cannot_take_part", "gone"), 0)
    ways = dict.fromkeys(("dialed", "relayed", "not_at_all"), 0)
    for member in members:
        states[_state(member)] += 1
        if member.alive:
            ways["dialed" if member.reachable else "relayed" if member.relayed else "not_at_all"] += 1
    for state, number in states.items():
        put("shoal_members", number, state)
    for way, number in ways.items():
        put("shoal_members_reached", number, way)
    named = named_members(members)
    for member in named:
        put("shoal_member_info", 1, member.peer, member.name, member.device.name)
        put("shoal_member_sent_bytes_total", member.bytes_sent, member.peer)
        put("shoal_member_received_bytes_total", member.bytes_received, member.peer)
        if member.times is not None:
            for phase in WORK_PHASES:
                put("shoal_member_phase_seconds", member.times.of(phase), member.peer, phase)
        readings.put("shoal_member_cost", member.cost, member.peer, currency)
        put("shoal_member_energy_joules_total", member.energy_j, member.peer)
        if member.use is not None:
            put("shoal_member_power_watts", member.use.power_w, member.peer)
            put("shoal_member_gpu_busy_ratio", member.use.gpu, member.peer)
        _put_member(readings, [member], shares, member.peer)
    known = {member.peer for member in named}
    rest = [member for member in members if member.peer not in known]
    if rest:
        costs = [one.cost for one in rest if one.counts_time and one.cost is not None]
        readings.put("shoal_member_cost", sum(costs) if costs else None, REST, currency)
        _put_member(readings, rest, shares, REST)


def _put_member(readings: Readings, members: Sequence[MemberStatus], shares: Mapping[str, float], peer: str) -> None:
    """Sums over members, for a label of their own."""
    put = readings.put
    put("shoal_member_up", sum(one.alive for one in members), peer)
    put("shoal_member_share_ratio", sum(one.share for one in members), peer)
    put("shoal_member_round_share_ratio", sum(shares.get(one.peer, 0.0) for one in members), peer)
    put("shoal_member_present_seconds", sum(one.present_s for one in members), peer)
    put("shoal_member_credit_ratio", sum(one.credit for one in members), peer)
    put("shoal_member_tokens_per_second", sum(one.tokens_per_s for one in members), peer)


def named_members(members: Sequence[MemberStatus]) -> list[MemberStatus]:
    """Members that have labels of their own: those here first, those with most committed tokens before others.

    Who has committed nothing has none: identities cost nothing, and each would be a series for ever."""
    proven = [member for member in members if member.tokens_committed]
    return sorted(proven, key=lambda one: (not one.alive, -one.tokens_committed, one.peer))[:NAMED_MEMBERS]


def _state(member: MemberStatus) -> str:
    if not member.alive:
        return "gone"
    if member.wall:
        return "cannot_take_part"
    return "synced" if member.synced else "catching_up"


def _put_relays(readings: Readings, status: CoordinatorToPeerStatus) -> None:
    numbers = Counter[str]()
    for relay in status.relays:
        whose = relay.peer or "host"
        numbers[whose] += 1
        label = whose if numbers[whose] == 1 else f"{whose}-{numbers[whose]}"
        readings.put("shoal_relay_up", relay.load is not None, label)
        if relay.load is not None:
            readings.put("shoal_relay_carried_bytes_total", relay.load.carried_bytes, label)
            readings.put("shoal_relay_links", relay.load.links, label)
            readings.put("shoal_relay_busy_ratio", relay.load.busy, label)
