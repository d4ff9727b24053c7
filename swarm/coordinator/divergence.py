"""Divergence of training itself: claims of it, whether they are believed, and how far the run goes back. Pure.

One machine whose work becomes infinite or not a number is at fault itself. Where those with most of the run's work say
so of the same states, the run is at fault: it goes back to a state that somebody keeps and a verdict vouches for, and
leaves those out who may have spoilt what came after. It ends only when that has been tried in vain: then the learning
rate is too high, and that is nobody's fault."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.swarm.coordinator.influence import usual_loss, weighted_median
from shoal.swarm.coordinator.membership import Member, counting, work_of
from shoal.swarm.coordinator.rollback import History

_PASSED_ROUNDS = 8
"""So far behind the version where it diverged, what comes then has another cause."""

_FRUITLESS, _RETURNS = 3, 16
"""So often the run goes back before that without anybody to leave out, or at all. Each time costs the rounds that it
takes to diverge again, so a run that cannot be helped ends in a few of them."""


class Setback(NamedTuple):
    """A run that has diverged and gone back, until it is well past that point. ``bad_version``: the newest version that
    proved bad; ``returns``: how often it went back since; ``fruitless``: without anybody to suspect."""

    bad_version: int = 0
    returns: int = 0
    fruitless: int = 0

    @property
    def kept(self) -> tuple[int, int, int]:
        """For the journal."""
        return self.bad_version, self.returns, self.fruitless

    def again(self, bad_version: int, has_suspects: bool) -> Setback:
        """It goes back once more."""
        return Setback(
            max(self.bad_version, bad_version), self.returns + 1, self.fruitless + (0 if has_suspects else 1)
        )

    def passed(self, version: int) -> Setback:
        """The run is at this version."""
        return Setback() if self.returns and version >= self.bad_version + _PASSED_ROUNDS else self


@dataclass(frozen=True)
class Opinion:
    """``bad_version``: which one those with more than half of the work cannot go on from, if they say so; ``at_fault``:
    who says it of a version from which such a majority has gone on; ``claims``: the version that each one cannot go on
    from, where that is of the run."""

    bad_version: int | None = None
    at_fault: frozenset[str] = frozenset()
    claims: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WayBack:
    """The run can go back to ``version``, of which ``keepers`` have the state, from one that is bad."""

    version: int
    keepers: tuple[str, ...]
    bad_version: int
    suspects: tuple[str, ...]


def opinion(members: Mapping[str, Member], history: History, digest: bytes | None, *, ahead: bool) -> Opinion:
    """Combine what live trainers say. ``digest``: of the run's newest state; ``ahead``: work for the next version is
    begun on the one before (``overlap``), so that it takes one version more to show that a state is good."""
    claims = {
        peer: one.diverged.anchor_version
        for peer, one in members.items()
        if one.diverged is not None and _is_of_run(one.diverged.anchor_version, one.diverged.digest, history, digest)
    }
    if not claims:
        return Opinion()
    work = work_of(members)
    total = sum(work.values())
    if 2 * sum(work[peer] for peer in claims) > total:
        bad_version = int(weighted_median([(at, max(work[peer], 1)) for peer, at in claims.items()]))
        return Opinion(bad_version, claims=claims)
    at_fault = [
        peer
        for peer, version in claims.items()
        if 2 * sum(work[one] for one in members if one not in claims and _went_on(members[one], version + ahead))
        > total
    ]
    return Opinion(at_fault=frozenset(at_fault), claims=claims)


def _is_of_run(version: int, claimed: bytes, history: History, digest: bytes | None) -> bool:
    """Whether that is a state of the run's, and not one that the run has gone back behind already."""
    if version < len(history.rounds):
        return history.rounds[version].digest == claimed
    return version == len(history.rounds) and digest in (None, claimed)


def _went_on(member: Member, version: int) -> bool:
    return member.worked_version is not None and member.worked_version >= version


def way_back(
    bad_version: int, setback: Setback, history: History, members: Mapping[str, Member], known: Container[str]
) -> WayBack | None:
    """To the newest state before that version that somebody here keeps; after each return in vain twice as many of the
    kept states further. None where there is none, or that was tried often enough. ``known``: of whom the run still
    knows anything, here or not."""
    if setback.fruitless >= _FRUITLESS or setback.returns >= _RETURNS:
        return None
    # What newcomers say to keep counts where nobody with a record keeps anything: else the run ends.
    kept = _kept(bad_version, history, counting(members, members), members) or _kept(
        bad_version, history, members, members
    )
    if not kept:
        return None
    version = kept[min((1 << setback.returns) - 1, len(kept) - 1)]
    state = (version, history.rounds[version].digest)
    return WayBack(
        version=version,
        keepers=tuple(peer for peer, one in members.items() if state in one.states),
        bad_version=bad_version,
        suspects=tuple(peer for peer in _suspects(version, history, members) if peer in known),
    )


def _kept(bad_version: int, history: History, peers: Iterable[str], members: Mapping[str, Member]) -> list[int]:
    """The versions before that one whose states these peers keep, as they say; the newest first."""
    states = {state for peer in peers if members[peer].is_trainer for state in members[peer].states}
    return sorted(
        {at for at, digest in states if at < bad_version and history.rounds[at].digest == digest}, reverse=True
    )


def _suspects(version: int, history: History, members: Mapping[str, Member]) -> tuple[str, ...]:
    """Collect the suspects of the rounds that are undone; nobody where that would be half of the work or more, as then
    it was no few who spoilt it."""
    work = work_of(members)
    found = sorted({peer for one in history.rounds[version:] for peer in one.suspects})
    is_few = 2 * sum(work.get(peer, 0) for peer in found) < sum(work.values())
    return tuple(found) if is_few else ()


# In words ---------------------------------------------------------------------------------------------------


def say_way_back(back: WayBack, history: History, members: Mapping[str, Member]) -> str:
    """The verdict's reason."""
    made = history.rounds[back.version]
    names = [members[peer].entry.name for peer in back.suspects]
    left_out = f"; left out for a while: {', '.join(names[:8])}{' and others' if names[8:] else ''}" if names else ""
    return (
        f"training diverged at version {back.bad_version}, say those with most of the work: back to version "
        f"{back.version} ({made.digest.hex()[:8]}), which the verdict of round {made.round} vouches for{left_out}"
    )


def warning_of(history: History) -> str:
    """A sentence on the newest committed round's loss, where that is far above what was usual; else empty."""
    newest = history.rounds[-1] if history.rounds else None
    usual = usual_loss(history.rounds[:-1], newest.loss) if newest else None
    if newest is None or usual is None:
        return ""
    return f"the loss has risen to {newest.loss:.4g} in round {newest.round}, from {usual:.4g} as it used to be"
