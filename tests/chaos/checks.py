"""Invariants that hold after every fault."""

import asyncio

import torch
from tests.chaos.ledger import Ledger
from tests.chaos.lives import Life
from tests.fakes.swarm import TASKS_OF_A_MEMBER, Swarm

from shoal.swarm.coordinator import events as ev
from shoal.swarm.protocol.verdict_chain import check_verdict, genesis
from shoal.swarm.sample_ranges import count


def check(run: Swarm, lives: list[Life], others: int) -> None:
    """``lives``: who is alive, at rest after some rounds without faults. ``others``: tasks that are not theirs."""
    check_verdicts(run)
    check_parity(run, lives)
    check_tokens(run)
    check_lost_work(run)
    ledger = lives[0].ledger
    ledger.check_means()
    ledger.check_given_up()
    for life in lives:
        life.check_account()
        check_memory(run, life)
    assert len(asyncio.all_tasks()) == others + TASKS_OF_A_MEMBER * len(lives), "a task was left behind"


def check_verdicts(run: Swarm) -> None:
    """Check that there is one signed verdict a round, each chained to the one before."""
    verdicts = [one.verdict for one in run.coordinator.events if isinstance(one, ev.VerdictGiven)]
    assert [one.round for one in verdicts] == list(range(len(verdicts)))
    chain = genesis(run.coordinator.run.hash)
    for verdict in verdicts:
        assert verdict.previous_chain == chain
        check_verdict(verdict, run.coordinator.identity.public_key)
        chain = verdict.chain
    for number, applied in run_ledger(run).rounds.items():
        assert applied.verdict == verdicts[number], "what members apply is what was journaled"
        assert applied.verdict.committed


def run_ledger(run: Swarm) -> Ledger:
    life = run.members[0]
    assert isinstance(life, Life)
    return life.ledger


def check_parity(run: Swarm, lives: list[Life]) -> None:
    """Check that every anchor is the sum of the committed means, to the last bit."""
    anchor = torch.zeros(run.elements)
    for _, applied in sorted(run_ledger(run).rounds.items()):
        anchor = anchor - applied.mean
    machine = run.coordinator.machine
    assert machine.scope.anchor_version == len(run_ledger(run).rounds)
    for life in lives:
        assert life.version == machine.scope.anchor_version
        assert torch.equal(life.anchor, anchor)
        assert life.view.verdict == machine.scope.verdict


def check_tokens(run: Swarm) -> None:
    """Check that every committed token is a sample that was leased once and that no member holds any more."""
    machine = run.coordinator.machine
    leases = machine.scope.leases
    assert machine.scope.tokens_committed == leases.fresh - count(leases.pool) - leases.outstanding()
    total = 0
    for one in run.coordinator.events:
        if isinstance(one, ev.VerdictGiven) and one.verdict.committed:
            assert one.verdict.plan is not None
            members = {member.peer: member.weight_tokens for member in one.verdict.plan.members}
            assert one.verdict.tokens == sum(weight for peer, weight in members.items() if peer not in one.lost)
            total += one.verdict.tokens
            assert one.verdict.tokens_total == total
    assert machine.scope.tokens_committed == total
    assert sum(one.tokens_committed for one in machine.scope.membership.members.values()) == total


def check_lost_work(run: Swarm) -> None:
    """Samples of a member that was given up in the round count only if all of its work is in the mean: nobody carries
    the rest, and nobody else trains on them."""
    gone: set[str] = set()
    for one in run.coordinator.events:
        match one:
            case ev.RoundPlanned():
                gone = set()
            case ev.MemberLost():
                gone.add(one.peer)
            case ev.VerdictGiven() if one.verdict.committed:
                assert one.verdict.plan is not None
                planned = {member.peer for member in one.verdict.plan.members}
                for peer in (gone & planned) - set(one.lost):
                    missing = ~run_ledger(run).rounds[one.verdict.round].has(peer)
                    assert not bool(missing.any()), f"{peer} counts, but {int(missing.sum())} elements are in no mean"


def check_memory(run: Swarm, life: Life) -> None:
    """Check that memory is back at its level: the last committed results and the residual."""
    averager = life.averager
    kept = set(sorted(run_ledger(run).rounds)[-1:])
    shown = {(blob.kind, blob.number) for blob in life.endpoint.blobs}
    audited = {number for kind, number in shown if kind in ("included", "committed")}
    assert len(audited) <= 2, "for auditors and validators, of the last two rounds that this member was in"
    assert {one for one in shown if one[0] in ("result", "held")} == {
        (kind, number) for number in kept for kind in ("result", "held")
    }
    assert {kind for kind, _ in shown} <= {"result", "held", "included", "committed"}
    assert set(averager._stores) == kept
    assert averager._exchange is None
    assert not averager.round_feedback.error_feedback.in_round
    assert not averager.round_feedback.error_feedback._encoded
    assert averager.round_feedback.carried.residual.numel() == run.elements
