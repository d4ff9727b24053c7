"""Members with credit, for attacks by members without one."""

from __future__ import annotations

from collections.abc import Sequence

from tests.integration.harness import ROUNDS_S, Host, Member, eventually

from shoal.swarm.coordinator.events import VerdictGiven
from shoal.swarm.coordinator.trust import CREDIT_ROUNDS
from shoal.swarm.protocol.rounds import Verdict

ROUND_S = 1.0


def committed_with(host: Host, peer: str) -> list[Verdict]:
    """Return the committed rounds with this peer's work in them."""
    verdicts = [one.verdict for one in host.journal_events() if isinstance(one, VerdictGiven) and one.verdict.committed]
    return [one for one in verdicts if one.plan is not None and peer in [member.peer for member in one.plan.members]]


def wait_for_rounds(host: Host, member: Member, rounds: int) -> list[Verdict]:
    """Wait until that many rounds were committed with this member's work in them; return them."""
    peer = member.peer

    def look() -> list[Verdict] | None:
        assert member.running, member.tail()
        found = committed_with(host, peer)
        return found if len(found) >= rounds else None

    return eventually(f"{member.label} commits {rounds} rounds", look, ROUNDS_S, member.tail)


def wait_for_credit(host: Host, members: Sequence[Member]) -> None:
    for member in members:
        wait_for_rounds(host, member, CREDIT_ROUNDS)


def wait_for_rounds_since(host: Host, peer: str, rounds: int) -> list[Verdict]:
    """Wait for so many rounds from the first committed one with this peer's work on; return all since."""

    def look() -> list[Verdict] | None:
        verdicts = [one.verdict for one in host.journal_events() if isinstance(one, VerdictGiven)]
        planned = committed_with(host, peer)
        since = [one for one in verdicts if planned and one.round >= planned[0].round]
        return since if len(since) >= rounds else None

    return eventually("some rounds after its first", look, ROUNDS_S, host.tail)
