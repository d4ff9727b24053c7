"""Figures of a simulated run: rates, bytes, shares of time and prices, from what was counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median

from shoal.swarm.protocol.types import RUN_MEMBERS
from shoal.swarm.protocol.wire import MAX_MESSAGE_BYTES
from shoal.swarm.simulation.costs import HOST_CORES
from shoal.swarm.simulation.result import Result


@dataclass(frozen=True)
class PipelineFigures:
    """Predictions of a run in stages. ``fewest_replicas``: of any stage, at the end; ``planned_tokens_per_s``: of the
    last plan, without rounds; ``stalled``: share of the time after the first plan in which a stage had nobody with its
    state; ``between_stages_gb_per_hour``: activations and gradients that a member sends; ``state_gb``: states and
    missed results that were fetched."""

    stages: int
    fewest_replicas: int
    planned_tokens_per_s: float
    moves: int
    stalled: float
    between_stages_gb_per_hour: float
    state_gb: float


@dataclass(frozen=True)
class Figures:
    """Predictions of a simulation. Rates are those of the time after the first committed round, which joins take part
    of; sums are of the whole simulated time.

    ``goodput``: committed tokens, of those that the machines would have trained on in the same time alone and without
    a break. ``spent``: shares of the members' time by phase. ``host_cores``: processor seconds a second.
    ``price_per_1e9_tokens`` and ``price_per_hour`` are in the trace's currency."""

    members: int
    members_there: float
    rounds_committed: int
    rounds_aborted: int
    members_in_round: float
    rows: int
    round_s: float
    rounds_per_hour: float
    tokens_per_s: float
    goodput: float
    tokens: int
    tokens_wanted: int | None
    hours_to_tokens: float | None
    spent: dict[str, float]
    exchange_s: float
    planning_s: float
    member_sent_gb_per_hour: float
    host_sent_mbit: float
    host_received_mbit: float
    host_cores: float
    relayed_mbit: float
    largest_view_mb: float
    samples_lost_share: float
    refused_joins: int
    price_per_hour: float
    price_per_1e9_tokens: float | None
    simulated_hours: float
    pipeline: PipelineFigures | None = None
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def figures_of(result: Result, tokens_wanted: int | None) -> Figures:
    """Return the figures of a simulation. ``tokens_wanted``: whose time is asked for, None for no such question."""
    done = result.committed
    seconds = max(result.duration_s, 1e-9)
    # A round more than none says how long rounds are; the first one begins with joins.
    later = done[1:] or done
    since_s = done[0].ended_s if len(done) > 1 else 0.0
    steady_s = max((done[-1].ended_s if done else seconds) - since_s, 1e-9)
    tokens_per_s = sum(one.tokens for one in later) / steady_s
    tokens_before = done[0].tokens if len(done) > 1 else 0
    hours = None
    if tokens_wanted is not None and tokens_per_s:
        left = max(0, tokens_wanted - tokens_before)
        hours = (since_s + left / tokens_per_s) / 3600
    spent_s = sum(result.spent_s.values())
    host = result.host
    lost = result.samples.lost / max(1, result.samples.committed + result.samples.lost)
    return Figures(
        members=result.members,
        members_there=result.members_mean,
        rounds_committed=len(done),
        rounds_aborted=len(result.rounds) - len(done),
        members_in_round=median(one.members for one in later) if later else 0.0,
        rows=int(median(one.rows for one in later)) if later else 0,
        round_s=median(one.ended_s - one.opened_s for one in later) if later else 0.0,
        rounds_per_hour=3600 * len(later) / steady_s if done else 0.0,
        tokens_per_s=tokens_per_s,
        goodput=result.tokens / result.possible_tokens if result.possible_tokens else 0.0,
        tokens=result.tokens,
        tokens_wanted=tokens_wanted,
        hours_to_tokens=hours,
        spent={phase: value / spent_s if spent_s else 0.0 for phase, value in result.spent_s.items()},
        exchange_s=median(one.exchange_s for one in later) if later else 0.0,
        planning_s=median(one.planned_s - one.closes_s for one in later) if later else 0.0,
        member_sent_gb_per_hour=result.members_sent_bytes / max(result.members_mean, 1e-9) / seconds * 3600 / 1e9,
        host_sent_mbit=8e-6 * host.sent_bytes / seconds,
        host_received_mbit=8e-6 * host.received_bytes / seconds,
        host_cores=HOST_CORES + host.cpu_s / seconds,
        relayed_mbit=8e-6 * result.relayed_bytes / seconds,
        largest_view_mb=result.largest_view_bytes / 1e6,
        samples_lost_share=lost,
        refused_joins=result.refused_joins,
        price_per_hour=result.price / seconds * 3600,
        price_per_1e9_tokens=1e9 * result.price / result.tokens if result.tokens else None,
        simulated_hours=seconds / 3600,
        pipeline=_pipeline_figures(result),
        notes=list(_notes(result)),
    )


def _pipeline_figures(result: Result) -> PipelineFigures | None:
    course, seconds = result.pipeline, max(result.duration_s, 1e-9)
    if course is None:
        return None
    tensors = sum(course.activation_bytes.values()) + sum(course.gradient_bytes.values())
    return PipelineFigures(
        stages=max(0, len(course.boundaries) - 1),
        fewest_replicas=min(course.replicas, default=0),
        planned_tokens_per_s=course.planned_tokens_per_s,
        moves=course.moves,
        stalled=course.stalled_s / seconds,
        between_stages_gb_per_hour=tensors / max(result.members_mean, 1e-9) / seconds * 3600 / 1e9,
        state_gb=course.state_bytes / 1e9,
    )


def _notes(result: Result) -> list[str]:
    """Return what whoever reads the figures has to know beside."""
    notes = []
    if result.never_admitted:
        notes.append(
            f"{result.never_admitted} machines found no place: newcomers are admitted as [access] of the run file "
            "says (members_without_credit, members_per_network, joins_per_minute)"
        )
    if result.members > RUN_MEMBERS:
        notes.append(f"a run takes {RUN_MEMBERS} members of a role; this is what more of them would do")
    if result.largest_view_bytes > MAX_MESSAGE_BYTES:
        notes.append(
            f"a view of {result.largest_view_bytes / 1e6:.1f} MB is larger than a message may be, "
            f"{MAX_MESSAGE_BYTES / 1e6:.1f} MB"
        )
    if result.pipeline is not None and result.pipeline.shortage:
        notes.append(result.pipeline.shortage)
    if not result.committed:
        notes.append("no round was committed: see round.tokens and round.max_s, or simulate longer")
    return notes
