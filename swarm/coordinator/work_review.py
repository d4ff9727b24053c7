"""Review by validators: what they may ask, whose scores of work and evaluations of the model count, and what follows
from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.swarm.coordinator import events as ev
from shoal.swarm.coordinator.trust import is_expelled
from shoal.swarm.errors import NotAdmitted, StaleWork, TryLater, WireError
from shoal.swarm.protocol.evaluations import SignedEvaluation
from shoal.swarm.protocol.identity import peer_id
from shoal.swarm.protocol.messages import CoordinatorToPeerWork, PeerToCoordinatorGetWork
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.types import FirstBatch, SampleRange
from shoal.swarm.protocol.work_scores import SignedScore
from shoal.swarm.sample_ranges import Ranges, merge, to_wire

if TYPE_CHECKING:
    from shoal.swarm.coordinator.round_scope import RoundScope

_ROUNDS = 2
"""Newest committed rounds whose contributions members still have."""


@dataclass(frozen=True)
class _ReviewedRound:
    """A committed round: the chain hash of its verdict, each member's samples, who brought earlier work, too, and what
    members said of their first batches."""

    chain: bytes
    samples: Mapping[str, tuple[SampleRange, ...]]
    carrying: frozenset[str]
    first: Mapping[str, FirstBatch]


class WorkReview:
    """Review of the last committed rounds of a scope. Not journaled, other than scores: after a restart, rounds that
    are committed from then on can be scored."""

    def __init__(self, scope: RoundScope) -> None:
        self._scope = scope
        self._rounds: dict[int, _ReviewedRound] = {}
        self._scored: set[tuple[int, str, str]] = set()
        """Round, validator and member of the scores that have counted."""

    def add(
        self,
        verdict: Verdict,
        ranges: Mapping[str, Ranges],
        carrying: frozenset[str],
        first: Mapping[str, FirstBatch],
    ) -> None:
        """Add a committed round, whose contributions can be scored until the next round but one.

        ``ranges``: of the members whose work it committed, which the run never forgets."""
        samples = {peer: to_wire(merge(mine)) for peer, mine in ranges.items()}
        self._rounds[verdict.round] = _ReviewedRound(verdict.chain, samples, carrying, first)
        for number in sorted(self._rounds)[:-_ROUNDS]:
            del self._rounds[number]
        self._scored = {one for one in self._scored if one[0] in self._rounds}

    # Validators ---------------------------------------------------------------------------------------------

    def is_validator(self, peer: str) -> bool:
        """Whether this live member is a validator by an invite that the host has not revoked."""
        member = self._scope.membership.members.get(peer)
        if member is None or not member.alive or member.entry.role != "validator":
            return False
        return self._scope.admission.access_list.makes_validators(member.invite)

    def validators(self) -> list[str]:
        return [peer for peer in self._scope.membership.members if self.is_validator(peer)]

    def _require_validator(self, peer: str) -> None:
        if not self.is_validator(peer):
            raise NotAdmitted("only validators with an invite of the host may do that")

    # Requests -----------------------------------------------------------------------------------------------

    def samples_of(self, validator: str, ask: PeerToCoordinatorGetWork) -> CoordinatorToPeerWork:
        """Return the samples of a contribution. Raises ``NotAdmitted`` for others than validators."""
        self._require_validator(validator)
        found = self._rounds.get(ask.round)
        if found is None or ask.peer not in found.samples:
            return CoordinatorToPeerWork(ranges=())
        members = self._scope.membership.members
        doubted = tuple(peer for peer in found.samples if members[peer].work.bad)
        return CoordinatorToPeerWork(
            ranges=found.samples[ask.peer],
            first=found.first.get(ask.peer),
            carries=ask.peer in found.carrying,
            doubted=doubted,
        )

    def score(self, validator: str, signed: SignedScore) -> None:
        """Record a validator's score, and expel the member if it is one too many.

        A score of a round that is too old, or that this validator has scored, changes nothing. Raises ``NotAdmitted``
        for others than validators, and ``WireError`` for a score that is not theirs."""
        self._require_validator(validator)
        score = signed.score
        if peer_id(signed.validator_key) != validator or not signed.is_signed:
            raise WireError("a score must be signed by the validator that reports it")
        found, key = self._rounds.get(score.round), (score.round, validator, score.peer)
        if found is None or score.peer not in found.samples or key in self._scored:
            return
        if score.chain != found.chain:
            raise WireError("a score must be of the round that was committed")
        scope = self._scope
        self._scored.add(key)
        scope.record(ev.WorkScored(by=validator, signed=signed))
        member = scope.membership.members[score.peer]
        if score.peer not in scope.admission.access_list.bans and is_expelled(member.work, self.validators()):
            text = f"expelled: {member.work.bad} bad scores of its work in a row, the last of round {score.round}"
            scope.admission.ban(score.peer, "", f"{text}: {score.finding}")

    # The model ----------------------------------------------------------------------------------------------

    def evaluated(self, validator: str, signed: SignedEvaluation) -> None:
        """Record a validator's evaluation of a version, and what follows from it.

        One that is not wanted, as the validator has reported the version or a newer one, or another of its invite has,
        changes nothing. Raises ``NotAdmitted`` for others than validators, ``WireError`` for an evaluation that is not
        theirs, ``StaleWork`` for a state that is not the run's (any more), and ``TryLater`` while the version's state
        is not agreed on."""
        self._require_validator(validator)
        scope, evaluation = self._scope, signed.evaluation
        version = evaluation.version
        if signed.validator != validator or not signed.is_signed(scope.run.hash):
            raise WireError("an evaluation must be signed for this run by the validator that reports it")
        if version == scope.anchor_version and scope.agreed_digest is None:
            raise TryLater(f"the state of version {version} is not agreed on yet: report its evaluation again")
        newest = {scope.anchor_version: scope.agreed_digest}
        rounds = scope.history.rounds
        digest = rounds[version].digest if version < len(rounds) else newest.get(version)
        if digest != evaluation.state_digest:
            raise StaleWork(f"this is no state of the run's version {version} (any more)")
        invite = scope.membership.members[validator].invite
        if not scope.evaluations.may_take(validator, invite, version):
            return
        made = rounds[version - 1].round if version else 0
        report = ev.ModelEvaluated(
            by=validator,
            invite=invite,
            round=made,
            tokens=sum(one.tokens for one in rounds[:version]),
            at_s=scope.log.unix_s,
            signed=signed,
        )
        scope.record(report)
        figures = scope.evaluations.figures(scope.run.evaluation.validators)
        scope.record(ev.FigureTaken(figure=next(one for one in figures if one.version == version)))
        scope.look_whether_to_stop()
        scope.notice_trend()
