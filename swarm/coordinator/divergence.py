"""Divergence of training: claims of it, whether they are believed, and how far the run goes back.

One machine whose work becomes infinite or not a number is at fault itself. Where those with most of the run's work say
so of the same states, the run is at fault: it goes back to a state that somebody keeps and a verdict vouches for, and
leaves those out who may have spoilt what came after. It ends only when that has been tried in vain: then the learning
rate is too high, and that is nobody's fault."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.swarm.coordinator.influence import usual_loss
from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.rollback import History
from shoal.swarm.coordinator.trust import counting, weighted_median, weights_of

_PASSED_ROUNDS = 8
"""Versions past the bad one after which another divergence has another cause."""

_FRUITLESS, _RETURNS = 3, 16
"""Most rollbacks before the run is past that point: without suspects, and in all. Each time costs the rounds
that it takes to diverge again, so a run that cannot be helped ends after a few of them."""


class Setback(NamedTuple):
    """Record of the rollbacks of a diverged run, until it is well past that point.

    ``bad_version``: the newest version that proved bad; ``returns``: rollbacks since; ``fruitless``: those of them
    without suspects."""

    bad_version: int = 0
    returns: int = 0
    fruitless: int = 0

    def after_return(self, bad_version: int, has_suspects: bool) -> Setback:
        """Return the record after one more rollback."""
        return Setback(
            max(self.bad_version, bad_version), self.returns + 1, self.fruitless + (0 if has_suspects else 1)
        )

    def passed(self, version: int) -> Setback:
        """Return the record once the run is at this version."""
        return Setback() if self.returns and version >= self.bad_version + _PASSED_ROUNDS else self


@dataclass(frozen=True)
class CombinedClaims:
    """Combined claims of divergence.

    ``bad_version``: from which members with more than half of the work cannot go on, if any; ``at_fault``: members that
    claim it of a version from which such a majority has gone on; ``claims``: by member, the version of the run from
    which it cannot go on."""

    bad_version: int | None = None
    at_fault: frozenset[str] = frozenset()
    claims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DivergenceRollback:
    """Rollback from ``bad_version`` to ``version``, whose state ``keepers`` have; ``suspects`` are left out."""

    version: int
    keepers: tuple[str, ...]
    bad_version: int
    suspects: tuple[str, ...]


def combine_claims(
    members: Mapping[str, Member], history: History, digest: bytes | None, *, ahead: bool
) -> CombinedClaims:
    """Combine the claims of live trainers.

    ``digest``: of the run's newest state; ``ahead``: with ``overlap`` work for the next version starts on the one
    before, so that it takes one version more to show that a state is good."""
    claims = {
        peer: one.diverged.anchor_version
        for peer, one in members.items()
        if one.diverged is not None and _is_of_run(one.diverged.anchor_version, one.diverged.digest, history, digest)
    }
    if not claims:
        return CombinedClaims()
    work = weights_of(members)
    total = sum(work.values())
    if 2 * sum(work[peer] for peer in claims) > total:
        bad_version = int(weighted_median([(at, max(work[peer], 1)) for peer, at in claims.items()]))
        return CombinedClaims(bad_version, claims=claims)
    at_fault = [
        peer
        for peer, version in claims.items()
        if 2 * sum(work[one] for one in members if one not in claims and _went_on(members[one], version + ahead))
        > total
    ]
    return CombinedClaims(at_fault=frozenset(at_fault), claims=claims)


def _is_of_run(version: int, claimed: bytes, history: History, digest: bytes | None) -> bool:
    """Whether that is a state of the run, and was not undone."""
    if version < len(history.rounds):
        return history.rounds[version].digest == claimed
    return version == len(history.rounds) and digest in (None, claimed)


def _went_on(member: Member, version: int) -> bool:
    return member.worked_version is not None and member.worked_version >= version


def divergence_rollback(
    bad_version: int, setback: Setback, history: History, members: Mapping[str, Member], known: Container[str]
) -> DivergenceRollback | None:
    """Return the rollback to the newest kept state before ``bad_version``; None without one, or after enough tries.

    After each rollback in vain it goes twice as many of the kept states further back. ``known``: members that the run
    still knows, here or not."""
    if setback.fruitless >= _FRUITLESS or setback.returns >= _RETURNS:
        return None
    # States that only newcomers claim to keep count where no member with credit keeps any, or the run would end.
    kept = _kept(bad_version, history, counting(members, members), members) or _kept(
        bad_version, history, members, members
    )
    if not kept:
        return None
    version = kept[min((1 << setback.returns) - 1, len(kept) - 1)]
    state = (version, history.rounds[version].digest)
    return DivergenceRollback(
        version=version,
        keepers=tuple(peer for peer, one in members.items() if state in one.states),
        bad_version=bad_version,
        suspects=tuple(peer for peer in _suspects(version, history, members) if peer in known),
    )


def _kept(bad_version: int, history: History, peers: Iterable[str], members: Mapping[str, Member]) -> list[int]:
    """Return the versions before ``bad_version`` whose states these peers report to keep, newest first."""
    states = {state for peer in peers if members[peer].is_trainer for state in members[peer].states}
    return sorted(
        {at for at, digest in states if at < bad_version and history.rounds[at].digest == digest}, reverse=True
    )


def _suspects(version: int, history: History, members: Mapping[str, Member]) -> tuple[str, ...]:
    """Return the suspects of the undone rounds; nobody if they did half of the work or more."""
    work = weights_of(members)
    found = sorted({peer for one in history.rounds[version:] for peer in one.suspects})
    is_few = 2 * sum(work.get(peer, 0) for peer in found) < sum(work.values())
    return tuple(found) if is_few else ()


# In words ---------------------------------------------------------------------------------------------------


def say_divergence_rollback(back: DivergenceRollback, history: History, members: Mapping[str, Member]) -> str:
    """Return the verdict's reason."""
    made = history.rounds[back.version]
    names = [members[peer].entry.name for peer in back.suspects]
    left_out = f"; left out for a while: {', '.join(names[:8])}{' and others' if names[8:] else ''}" if names else ""
    return (
        f"training diverged at version {back.bad_version}, say those with most of the work: back to version "
        f"{back.version} ({made.digest.hex()[:8]}), which the verdict of round {made.round} vouches for{left_out}"
    )


def warning_of(history: History) -> str:
    """Return a sentence on the newest committed round's loss if it is far above the usual one; else empty."""
    newest = history.rounds[-1] if history.rounds else None
    usual = usual_loss(history.rounds[:-1], newest.loss) if newest else None
    if newest is None or usual is None:
        return ""
    return f"the loss has risen to {newest.loss:.4g} in round {newest.round}, from {usual:.4g} as it used to be"
