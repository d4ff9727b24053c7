"""Leasing of samples to the members of a plain run: who gets how many, by what it was seen to commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.swarm.coordinator.events import LeaseGranted
from shoal.swarm.coordinator.trust import LeaseClock, newcomers_batch, newcomers_limit, newcomers_tokens, pace_limit
from shoal.swarm.protocol.messages import PeerToCoordinatorRequestLease
from shoal.swarm.sample_ranges import Ranges, from_wire, is_tidy, merge, overlap, to_wire

if TYPE_CHECKING:
    from shoal.swarm.coordinator.round_scope import RoundScope

_NO_LIMIT = 2**62

_LEASED_ROUNDS = 64
"""Most samples that one member can hold, in rounds' worth (or batches, where those are larger)."""


class Leasing:
    """Grants leases in a scope. ``answered``: by peer, the last lease that it was granted."""

    def __init__(self, scope: RoundScope) -> None:
        self.answered: dict[str, LeaseGranted] = {}
        self.clock = LeaseClock()
        self._scope = scope

    def request(self, peer: str, ask: PeerToCoordinatorRequestLease, now_s: float) -> Ranges:
        """Grant samples to a peer; none when the round has all it needs or has been closed.

        With ``overlap``, a peer that has offered its contribution to a closing round gets samples for the next one.
        A repeated request gets the same answer: the first one was lost, with the connection or the coordinator. Samples
        that the peer has not done yet tell a further request from a repeated one; only those that it holds count."""
        scope = self._scope
        scope.hear(peer, now_s)
        member = scope.membership.members[peer]
        before, undone = self.answered.get(peer), self._undone(peer, ask)
        key = (ask.round, ask.tokens_done, undone)
        if before is not None and (before.round, before.tokens_done, from_wire(before.undone)) == key:
            ranges = from_wire(before.ranges)
            if scope.leases.holds(peer, ranges):
                return ranges
        if ask.round == scope.round.number:
            member.tokens_done = ask.tokens_done
            is_open = scope.round.phase in ("training", "waiting") or self._has_time_left(peer)
        elif ask.round == scope.round.number + 1:
            member.tokens_ahead = ask.tokens_done
            is_open = scope.run.averaging.overlap and (scope.round.phase == "averaging" or peer in scope.round.ready)
        else:
            return []
        if not is_open or peer not in scope.working() or scope.model is None:
            return []
        if scope.is_suspended(peer) or scope.is_left_out(peer):
            return []
        if peer in scope.walls():
            member.progress_s = now_s  # it would work if anybody could get its work
            return []
        samples = min(ask.samples, self.limit(peer))
        if samples <= 0:
            member.progress_s = now_s  # it would work if it were let
            return []
        ranges = scope.leases.choose(samples)
        done = ask.tokens_done
        scope.record(
            LeaseGranted(peer=peer, round=ask.round, tokens_done=done, undone=to_wire(undone), ranges=to_wire(ranges))
        )
        return ranges

    def _undone(self, peer: str, ask: PeerToCoordinatorRequestLease) -> Ranges:
        """Return the samples that a peer has not done yet, by its own word, among those that it holds."""
        told = from_wire(ask.undone)
        return overlap(merge(told), self._scope.leases.held.get(peer, [])) if is_tidy(told) else []

    def lose(self, peer: str) -> None:
        self.answered.pop(peer, None)
        self.clock.lose(peer)

    def _has_time_left(self, peer: str) -> bool:
        """Whether a peer can still work for a round whose closing is announced: most of the time of short rounds."""
        scope = self._scope
        in_time = scope.round.phase == "closing" and scope.log.now_s < scope.round.closes_s
        return in_time and peer not in scope.round.ready and not scope.goal().exact

    def limit(self, peer: str) -> int:
        """Return the most samples that a member gets now; may be negative."""
        scope = self._scope
        batch, goal = scope.run.inner.batch_samples, scope.goal_samples()
        trusted = self._trusted_limit(peer)
        if not scope.goal().exact:
            limit = min(trusted, _LEASED_ROUNDS * max(batch, goal) - self._held(peer))
            return limit - limit % batch if trusted < _NO_LIMIT else limit
        # Guided self-scheduling (Polychronopoulos & Kuck 1987): ever smaller, so that all finish together.
        left = max(0, goal - scope.leases.outstanding())
        return min(left, trusted, max(batch, -(-left // (2 * len(scope.synced())))))

    def _held(self, peer: str) -> int:
        return self._scope.leases.samples_of(peer)

    def _trusted_limit(self, peer: str) -> int:
        """Return the most samples that a member gets for what it was seen to commit; no limit while nobody has
        credit. A batch is always possible, or nobody could ever get any."""
        scope = self._scope
        member, credited = scope.membership.members[peer], scope.membership.with_credit()
        assert scope.model is not None
        now_s = scope.log.now_s
        per_sample, batch, held = scope.model.tokens_per_sample, scope.run.inner.batch_samples, self._held(peer)
        limit_tps = pace_limit(member, credited)
        if not credited:
            return _NO_LIMIT
        self.clock.start(peer, now_s, held * per_sample, limit_tps)
        if member.has_credit:
            # A lease lasts for a while; where rounds are short, that is no reason to hold several rounds' worth.
            ahead_s = min(scope.deadlines.lease_s, scope.run.round.max_s / 2)
            worked_s = self.clock.worked_s(peer, now_s) + ahead_s
            return max(batch, int(min(limit_tps * worked_s / per_sample, _NO_LIMIT))) - held
        worked_s = self.clock.worked_s(peer, now_s, scope.round.opened_s)
        alone = max(batch, int(min(limit_tps * worked_s / per_sample, _NO_LIMIT))) - held
        return min(alone, self._newcomers_limit(peer))

    def _newcomers_limit(self, peer: str) -> int:
        """Return what is left for this member of what all members without credit may hold together."""
        scope = self._scope
        assert scope.model is not None
        goal, credited, batch = scope.goal(), scope.membership.with_credit(), scope.run.inner.batch_samples
        open_s = scope.log.now_s - scope.round.opened_s
        working, member = scope.working(), scope.membership.members[peer]
        if goal.exact and credited.keys().isdisjoint(working):
            return _NO_LIMIT  # nobody with credit is there to fill the batch
        if goal.exact:
            tokens = newcomers_batch(goal.tokens, open_s, goal.max_s)
        else:
            tokens = newcomers_tokens(credited.values(), goal.tokens, open_s)
        most = int(min(tokens / scope.model.tokens_per_sample, _NO_LIMIT))
        networks = {one: newcomer.network for one, newcomer in working.items() if one not in credited}
        held = {one: scope.leases.samples_of(one) for one in scope.leases.held if one not in credited}
        # When those with credit are late, whoever is there fills the batch.
        apart = not goal.exact or open_s <= goal.max_s / 2
        return newcomers_limit(peer, networks | {peer: member.network}, held, most, batch, apart=apart)
