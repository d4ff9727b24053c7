"""The run's state as one fact, and back: what a compacted journal begins with. Pure.

Whatever facts change in ``RunState`` has its field in ``RunSnapshot`` and its line in both functions here;
``tests/swarm/coordinator/test_snapshot.py`` compares every attribute, and fails for one that was forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.swarm.coordinator.divergence import Setback
from shoal.swarm.coordinator.events import MemberKept, RunSnapshot
from shoal.swarm.coordinator.lease_ledger import Again, LeaseLedger
from shoal.swarm.coordinator.membership import Member, Membership
from shoal.swarm.coordinator.rollback import History
from shoal.swarm.coordinator.round_rules import Round
from shoal.swarm.coordinator.trust import Accusations
from shoal.swarm.sample_ranges import from_wire, to_wire

if TYPE_CHECKING:
    from shoal.swarm.coordinator.state import RunState


def take(state: RunState) -> RunSnapshot:
    """Of a run whose round is neither closing nor averaging."""
    assert state.round.phase not in ("closing", "averaging")
    members, replaced = members_of(state.membership)
    return RunSnapshot(
        epoch=state.epoch,
        round=state.round.number,
        phase=state.round.phase,
        model=state.model,
        anchor_version=state.anchor_version,
        agreed_digest=state.agreed_digest,
        chain=state.chain,
        verdict=state.verdict,
        rounds_aborted=state.rounds_aborted,
        rounds_undone=state.rounds_undone,
        tokens_committed=state.tokens_committed,
        tokens_undone=state.tokens_undone,
        loss=state.loss,
        elapsed_s=state.elapsed_before_s,
        members=members,
        replaced=replaced,
        fresh=state.leases.fresh,
        pool=to_wire(state.leases.pool),
        held={peer: to_wire(ranges) for peer, ranges in state.leases.held.items()},
        answered=tuple(state.answered.values()),
        history=state.history.pack(),
        lost_again=to_wire(state.again.lost),
        undone_again=to_wire(state.again.undone),
        setback=state.setback.kept,
        accusations=state.accusations.kept(),
    )


def restore(state: RunState, snapshot: RunSnapshot) -> None:
    """``state`` is new; whoever was alive is heard of as of now."""
    state.epoch = max(state.epoch, snapshot.epoch)
    state.round = Round(snapshot.round, snapshot.phase, opened_s=state.now_s)
    state.model, state.elements = snapshot.model, snapshot.model.elements if snapshot.model else 0
    state.anchor_version, state.agreed_digest = snapshot.anchor_version, snapshot.agreed_digest
    state.chain, state.verdict, state.loss = snapshot.chain, snapshot.verdict, snapshot.loss
    state.rounds_aborted, state.rounds_undone = snapshot.rounds_aborted, snapshot.rounds_undone
    state.tokens_committed, state.tokens_undone = snapshot.tokens_committed, snapshot.tokens_undone
    state.elapsed_before_s, state.started_s = snapshot.elapsed_s, state.now_s
    restore_members(state.membership, snapshot.members, snapshot.replaced, state.epoch, state.now_s)
    held = {peer: from_wire(ranges) for peer, ranges in snapshot.held.items()}
    state.leases = LeaseLedger(snapshot.fresh, from_wire(snapshot.pool), held)
    state.answered = {one.peer: one for one in snapshot.answered}
    state.history = History.unpack(snapshot.history)
    state.again = Again(from_wire(snapshot.lost_again), from_wire(snapshot.undone_again))
    state.setback = Setback(*snapshot.setback)
    state.accusations = Accusations({(one.by, one.of): one.round for one in snapshot.accusations})


def members_of(membership: Membership) -> tuple[tuple[MemberKept, ...], tuple[bytes, ...]]:
    """All but observers, and the keys of processes in whose place others have come."""
    members = tuple(_kept(one) for one in membership.members.values() if one.entry.role != "observer")
    return members, tuple(membership.replaced)


def restore_members(
    membership: Membership, members: tuple[MemberKept, ...], replaced: tuple[bytes, ...], epoch: int, now_s: float
) -> None:
    """``membership`` is new."""
    for kept in members:
        membership.members[kept.entry.peer] = _member(kept, now_s)
    membership.replaced = dict.fromkeys(replaced)
    membership.roster_version = epoch + len(members)


def _kept(member: Member) -> MemberKept:
    return MemberKept(
        entry=member.entry,
        device=member.device,
        alive=member.alive,
        tokens_committed=member.tokens_committed,
        rounds_committed=member.rounds_committed,
        barred_rounds=member.barred_rounds,
        failures=member.failures,
        carried_tokens=member.carried_tokens,
        clipped_rounds=member.clipped_rounds,
        worked_version=member.worked_version,
        suspended_until=member.suspended_until,
        suspensions=member.suspensions,
        pace_tps=member.pace_tps,
        missed=member.missed,
        absences=member.absences,
        out_until=member.out_until,
        joined_version=member.joined_version,
        seen_version=member.seen_version,
        left=member.left,
        trouble=member.trouble,
        network=member.network,
    )


def _member(kept: MemberKept, now_s: float) -> Member:
    return Member(
        kept.entry,
        kept.device,
        now_s,
        alive=kept.alive,
        activity="joining" if kept.alive else "gone",
        tokens_committed=kept.tokens_committed,
        rounds_committed=kept.rounds_committed,
        barred_rounds=kept.barred_rounds,
        failures=kept.failures,
        carried_tokens=kept.carried_tokens,
        clipped_rounds=kept.clipped_rounds,
        worked_version=kept.worked_version,
        suspended_until=kept.suspended_until,
        suspensions=kept.suspensions,
        pace_tps=kept.pace_tps,
        missed=kept.missed,
        absences=kept.absences,
        out_until=kept.out_until,
        joined_version=kept.joined_version,
        seen_version=kept.seen_version,
        left=kept.left,
        trouble=kept.trouble,
        network=kept.network,
    )
