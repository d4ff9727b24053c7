"""The coordinator's facts as events: what a host logs and shows."""

from __future__ import annotations

import time

from shoal.peer.terminal.events import Event
from shoal.swarm.coordinator import events as f


def describe_fact(fact: f.Fact) -> Event | None:
    """A journaled decision as an event, or None for those that only the coordinator's bookkeeping needs."""
    about: Event
    match fact:
        case f.MemberJoined(entry=entry, device=device):
            about = {"event": "member_joined", "peer": entry.peer, "name": entry.name, "role": entry.role}
            about["device"] = device.name
        case f.MemberLost():
            about = {"event": "member_lost", "peer": fact.peer, "reason": fact.reason}
            about |= {"trouble": fact.trouble} if fact.trouble else {}
        case f.RoundClosing():
            about = {"event": "round_closing", "round": fact.round}
        case f.RoundReopened():
            about = {"event": "round_reopened", "round": fact.round}
        case f.RoundPlanned(plan=plan):
            about = {"event": "round_planned", "round": plan.round}
            about["members"] = [member.peer for member in plan.members]
            about["tokens"] = [member.weight_tokens for member in plan.members]
            about["parts"] = len(plan.parts)
            about["clipped"] = [member.peer for member in plan.members if member.factor < 1]
        case f.VerdictGiven(went_back=back) if back is not None:
            about = {**_describe_verdict(fact), "event": "went_back", "from_version": back.from_version}
            about |= {"digest": back.digest.hex(), "vouched_round": back.vouched_round, "keepers": list(back.keepers)}
            about |= {"suspects": list(back.suspects)} if back.diverged else {}
        case f.VerdictGiven():
            about = _describe_verdict(fact)
        case f.StagesCut():
            about = {"event": "stages_cut", "boundaries": list(fact.boundaries)}
        case f.SpanAssigned():
            about = {"event": "span_assigned", "peer": fact.peer, "first": fact.first, "last": fact.last}
        case f.SpanTaken():
            about = {"event": "span_taken", "peer": fact.peer, "reason": fact.reason}
        case f.InScope():
            inner = describe_fact(fact.fact)
            if inner is None:
                return None
            about = {**inner, "stage": fact.scope - 1}
        case f.LossRose():
            about = {"event": "loss_rose", **fact.model_dump()}
        case f.EpochsCovered():
            about = {"event": "epochs_covered", **fact.model_dump()}
        case _:
            return None
    return {"time": time.time(), **about}


def _describe_verdict(fact: f.VerdictGiven) -> Event:
    verdict = fact.verdict
    about = {} if verdict.together is None else {"together": verdict.together.hex()}
    return {
        "event": "verdict",
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
