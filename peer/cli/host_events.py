"""Events of a host for people and logs, made from the decisions in the coordinator's journal."""

from __future__ import annotations

from shoal.peer.event_schema import Event, make_event
from shoal.swarm.coordinator import events as ev


def describe_event(event: ev.JournalEvent, stage: int | None = None) -> Event | None:
    """Describe a journaled decision as an event; None for those that matter to the coordinator's bookkeeping alone.

    ``stage``: the pipeline's stage that decided it; None: the run."""
    about = {} if stage is None else {"stage": stage}
    match event:
        case ev.MemberJoined(entry=entry, device=device):
            more = about | ({"invite": event.invite} if event.invite else {})
            return make_event(
                "member_joined", peer=entry.peer, name=entry.name, role=entry.role, device=device.name, **more
            )
        case ev.MemberLost():
            trouble = {"trouble": event.trouble} if event.trouble else {}
            return make_event("member_lost", peer=event.peer, reason=event.reason, **trouble, **about)
        case ev.InviteMade(terms=terms):
            limits = {"uses": terms.uses, "expires_s": terms.expires_s}
            return make_event("invite_made", invite=terms.id, role=terms.role, **limits, note=terms.note, **about)
        case ev.InviteRevoked():
            return make_event("invite_revoked", invite=event.id, **about)
        case ev.MemberKicked():
            return make_event("member_kicked", peer=event.peer, note=event.note, **about)
        case ev.PeerBanned():
            return make_event("peer_banned", peer=event.peer, network=event.network, note=event.note, **about)
        case ev.MemberExpelled():
            evidence = {"accuser": event.accuser, "evidence": event.evidence.hex()}
            return make_event("member_expelled", peer=event.peer, round=event.round, **evidence, **about)
        case ev.MeanDisproved():
            evidence = {"accuser": event.accuser, "evidence": event.evidence.hex()}
            wrong = {"peer": event.maker, "round": event.round, "excess": event.excess}
            return make_event("mean_disproved", **wrong, **evidence, **about)
        case ev.PeerAllowed():
            return make_event("peer_allowed", peer=event.peer, **about)
        case ev.RunAmended(amendments=made):
            changes = {one.key: one.value for one in made}
            return make_event("amended", round=made[0].at_round, changes=changes, **about)
        case ev.RoundClosing():
            return make_event("round_closing", round=event.round, **about)
        case ev.RoundReopened():
            return make_event("round_reopened", round=event.round, **about)
        case ev.RoundPlanned(plan=plan):
            return make_event(
                "round_planned",
                round=plan.round,
                members=[member.peer for member in plan.members],
                tokens=[member.weight_tokens for member in plan.members],
                parts=len(plan.parts),
                clipped=[member.peer for member in plan.members if member.factor < 1],
                **about,
            )
        case ev.VerdictGiven(went_back=back) if back is not None:
            return make_event(
                "went_back",
                from_version=back.from_version,
                digest=back.digest.hex(),
                vouched_round=back.vouched_round,
                keepers=list(back.keepers),
                **({"suspects": list(back.suspects)} if back.diverged else {}),
                **({"evidence": back.evidence.hex()} if back.evidence is not None else {}),
                **_verdict_fields(event),
                **about,
            )
        case ev.VerdictGiven():
            return make_event("verdict", **_verdict_fields(event), **about)
        case ev.StagesCut():
            return make_event("stages_cut", boundaries=list(event.boundaries), **about)
        case ev.SpanAssigned():
            return make_event("span_assigned", peer=event.peer, first=event.first, last=event.last, **about)
        case ev.SpanTaken():
            return make_event("span_taken", peer=event.peer, reason=event.reason, **about)
        case ev.InScope():
            return describe_event(event.event, event.scope - 1)
        case ev.WorkScored(by=by, signed=signed):
            score = signed.score
            return make_event("work_scored", by=by, peer=score.peer, round=score.round, finding=score.finding, **about)
        case ev.LossRose():
            return make_event("loss_rose", **event.model_dump(), **about)
        case ev.FigureTaken(figure=figure):
            return make_event(
                "evaluated",
                round=figure.round,
                version=figure.version,
                loss=figure.loss,
                standing=figure.standing,
                counts=figure.counts,
                losses={one.validator: one.loss for one in figure.claims},
                accuracy=figure.accuracy,
                sources={one.name: one.loss for one in figure.sources},
                **about,
            )
        case ev.StopDecided():
            return make_event("stops", round=event.round, reason=event.reason, **about)
        case ev.TrendNoticed():
            return make_event("trend", round=event.round, kind=event.kind, text=event.text, **about)
        case ev.EpochsCovered():
            return make_event("epochs_covered", **event.model_dump(), **about)
        case _:
            return None


def _verdict_fields(event: ev.VerdictGiven) -> Event:
    verdict = event.verdict
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
        "elapsed_s": event.elapsed_s,
        "chain": verdict.chain.hex(),
        **about,
    }
