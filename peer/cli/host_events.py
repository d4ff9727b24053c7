"""Events of a host for people and logs, made from the decisions in the coordinator's journal."""

from __future__ import annotations

from shoal.peer.event_schema import Event, make_event
from shoal.swarm.coordinator import events as f


def describe_fact(fact: f.Fact, stage: int | None = None) -> Event | None:
    """Describe a journaled decision as an event; None for those that matter to the coordinator's bookkeeping alone.

    ``stage``: the pipeline's stage that decided it; None: the run."""
    about = {} if stage is None else {"stage": stage}
    match fact:
        case f.MemberJoined(entry=entry, device=device):
            return make_event(
                "member_joined", peer=entry.peer, name=entry.name, role=entry.role, device=device.name, **about
            )
        case f.MemberLost():
            trouble = {"trouble": fact.trouble} if fact.trouble else {}
            return make_event("member_lost", peer=fact.peer, reason=fact.reason, **trouble, **about)
        case f.RoundClosing():
            return make_event("round_closing", round=fact.round, **about)
        case f.RoundReopened():
            return make_event("round_reopened", round=fact.round, **about)
        case f.RoundPlanned(plan=plan):
            return make_event(
                "round_planned",
                round=plan.round,
                members=[member.peer for member in plan.members],
                tokens=[member.weight_tokens for member in plan.members],
                parts=len(plan.parts),
                clipped=[member.peer for member in plan.members if member.factor < 1],
                **about,
            )
        case f.VerdictGiven(went_back=back) if back is not None:
            return make_event(
                "went_back",
                from_version=back.from_version,
                digest=back.digest.hex(),
                vouched_round=back.vouched_round,
                keepers=list(back.keepers),
                **({"suspects": list(back.suspects)} if back.diverged else {}),
                **_verdict_fields(fact),
                **about,
            )
        case f.VerdictGiven():
            return make_event("verdict", **_verdict_fields(fact), **about)
        case f.StagesCut():
            return make_event("stages_cut", boundaries=list(fact.boundaries), **about)
        case f.SpanAssigned():
            return make_event("span_assigned", peer=fact.peer, first=fact.first, last=fact.last, **about)
        case f.SpanTaken():
            return make_event("span_taken", peer=fact.peer, reason=fact.reason, **about)
        case f.InScope():
            return describe_fact(fact.fact, fact.scope - 1)
        case f.LossRose():
            return make_event("loss_rose", **fact.model_dump(), **about)
        case f.EpochsCovered():
            return make_event("epochs_covered", **fact.model_dump(), **about)
        case _:
            return None


def _verdict_fields(fact: f.VerdictGiven) -> Event:
    verdict = fact.verdict
    about = {} if verdict.together is None else {"together": verdict.together.hex()}
    return {
        "round": verdict.round,
        "committed": verdict.committed,
        "reason": verdict.reason,
        "tokens": verdict.tokens,
        "tokens_total": verdict.tokens_total,
        "loss": verdict.loss,
        "anchor_version": verdict.anchor_version,
        "members": [member.peer for member in verdict.plan.members] if verdict.plan else [],
        "elapsed_s": fact.elapsed_s,
        "chain": verdict.chain.hex(),
        **about,
    }
