"""Rollback of a run whose newest state nobody holds any more: how long to wait, and to which version it goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.trust import counting
from shoal.swarm.deadlines import Deadlines
from shoal.swarm.errors import DamagedRecords
from shoal.swarm.sample_ranges import Ranges


class CommittedRound(NamedTuple):
    """A round that took the anchor from one version to the next.

    ``digest``: of the state that it was planned on; ``took_s``: its duration; ``ranges``: the samples in its mean;
    ``level``: the usual norm of its contributions at one token, and ``rho`` the plan's bound of it; ``loss``: the
    median of its members' losses; ``suspects``: members to blame if it proves bad (``influence.py``)."""

    round: int
    digest: bytes
    tokens: int
    took_s: float
    ranges: tuple[tuple[int, int], ...]
    level: float = 0.0
    rho: float = 0.0
    loss: float | None = None
    suspects: tuple[str, ...] = ()


@dataclass
class History:
    """Committed rounds in the anchor, one a version: ``rounds[v]`` was planned on version v and made v + 1.

    Verdicts vouch for its digests: each is in the plan of a committed round. All are kept, as a member may bring a
    state of any version: some hundred bytes a round."""

    rounds: list[CommittedRound] = field(default_factory=list)

    def newest_kept(self, kept: set[tuple[int, bytes]]) -> int | None:
        """Return the newest version before the present one that is kept with the vouched digest."""
        return max((version for version, digest in kept if self.vouches_for(version, digest)), default=None)

    def vouches_for(self, version: int, digest: bytes) -> bool:
        """Whether a version before the present one has this digest."""
        return version < len(self.rounds) and self.rounds[version].digest == digest

    def cost_s(self, version: int) -> float:
        """Return the duration of the rounds that going back to ``version`` undoes."""
        return sum(one.took_s for one in self.rounds[version:])

    def before(self, number: int) -> tuple[int, int]:
        """Return the version that this committed round was planned on, and all tokens in it."""
        version = next(at for at, one in enumerate(self.rounds) if one.round == number)
        return version, sum(one.tokens for one in self.rounds[:version])

    def undo(self, version: int) -> tuple[int, int, Ranges]:
        """Forget the rounds after ``version``. Returns their number, their tokens and their samples."""
        undone, self.rounds = self.rounds[version:], self.rounds[:version]
        return len(undone), sum(one.tokens for one in undone), [each for one in undone for each in one.ranges]

    def pack(self) -> bytes:
        """Return the rounds as bytes, for the journal."""
        data: bytes = msgpack.packb(self.rounds)
        return data

    @classmethod
    def unpack(cls, data: bytes) -> History:
        """Return the history of ``pack``'s bytes. Raises ``DamagedRecords`` if this release cannot read them."""
        try:
            return cls([CommittedRound(*one) for one in msgpack.unpackb(data, use_list=False)])
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise DamagedRecords(f"the journal has a history that this release cannot read: {error}") from error


@dataclass(frozen=True)
class PossibleRollback:
    """Possible rollback to ``version``, whose state ``keepers`` have.

    ``awaited``: peers that may bring a newer state; ``in_s``: how much longer it is worth waiting for them."""

    version: int
    keepers: tuple[str, ...]
    awaited: tuple[str, ...]
    in_s: float

    @property
    def is_due(self) -> bool:
        return not self.awaited or self.in_s <= 0.0


_MOST_WAITS = 4
"""Most times that the wait for a newer state lasts, whatever progress members report."""


class Outage:
    """Time without a holder of the newest state, while a member is here that has an earlier one. Not journaled.

    Going back too early costs the undone rounds, too late the time of waiting. So the run waits as long as the rounds
    took, and never pays more than twice the cheaper of the two (ski rental: Karlin, Manasse, Rudolph, Sleator 1988);
    at least as long as a machine takes to start, and only while a peer is left that may have a newer state. Progress of
    such a peer starts the wait anew, but not beyond four times its length: it may never have that state."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._since_s: float | None = None
        self._began_s = 0.0

    def end(self) -> None:
        """Note that a member holds the newest state, or that nobody is here."""
        self._since_s = None

    def look(
        self, now_s: float, history: History, agreed_digest: bytes | None, members: Mapping[str, Member]
    ) -> PossibleRollback | None:
        """Return the possible rollback; None while nobody here has reported a state that a verdict vouches for.

        ``agreed_digest``: of the newest state, if known."""
        here = {peer: one for peer, one in members.items() if one.is_trainer and one.states}
        believed = counting(here, here)  # a newcomer may claim to keep what nobody has
        version = history.newest_kept({state for peer in believed for state in here[peer].states})
        if version is None:
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = self._began_s = now_s
        state = (version, history.rounds[version].digest)
        coming = [
            peer
            for peer, one in here.items()
            if _may_finish(one, history) or _keeps(one, len(history.rounds), agreed_digest)
        ]
        absent = [peer for peer, one in members.items() if peer not in here and _may_keep_newer(one, version)]
        wait_s = max(self._deadlines.return_s, history.cost_s(version))
        return PossibleRollback(
            version=version,
            keepers=tuple(peer for peer, one in here.items() if state in one.states),
            awaited=(*coming, *absent),
            in_s=min(self._since_s + wait_s, self._began_s + _MOST_WAITS * wait_s) - now_s,
        )

    def saw_progress(self, now_s: float, member: Member, history: History) -> None:
        """Start the wait anew as a member gets results or a state: it may be about to have the newest one."""
        if self._since_s is not None and (_may_finish(member, history) or member.has_credit):
            self._since_s = now_s

    def excuse(self, seconds: float) -> None:
        """Exclude a time in which the coordinator stood still: nobody was late."""
        if self._since_s is not None:
            self._since_s += seconds
            self._began_s += seconds


def _may_finish(member: Member, history: History) -> bool:
    """Whether a member saw the newest version committed and holds the one before, so that it may be making it."""
    newest = len(history.rounds)
    before = (newest - 1, history.rounds[-1].digest) if history.rounds else None
    return (
        member.is_trainer and member.joined_version < newest and (member.anchor_version, member.state_digest) == before
    )


def _keeps(member: Member, version: int, digest: bytes | None) -> bool:
    """Whether a member keeps that state, and so may be loading it; any of that version for ``digest`` None."""
    return any(kept == version and digest in (None, of) for kept, of in member.states)


def _may_keep_newer(member: Member, version: int) -> bool:
    return member.entry.role in ("trainer", "contributor") and member.seen_version > version


# In words ---------------------------------------------------------------------------------------------------


def say_rollback(back: PossibleRollback, history: History, here: int) -> str:
    """Return the verdict's reason. ``here``: how many members could have kept a state."""
    made = history.rounds[back.version]
    return (
        f"nobody holds anchor version {len(history.rounds)} any more: back to version {back.version} "
        f"({made.digest.hex()[:8]}), which {len(back.keepers)} of {here} peers here keep and the verdict of round "
        f"{made.round} vouches for"
    )


def say_outlook(
    version: int, digest: bytes | None, back: PossibleRollback | None, members: Mapping[str, Member]
) -> str:
    """Return what the run waits for while nobody holds ``version``. ``digest``: of its state, if known."""
    loading = [one.entry.name for one in members.values() if one.is_trainer and _keeps(one, version, digest)]
    if loading:
        return f"nobody here holds version {version} yet: {_few(loading)} should be loading it"
    lost = f"nobody here holds version {version}"
    if back is None:
        return f"{lost}, nor has told of an earlier one that the verdicts vouch for: waiting for a peer that has one"
    awaited = _few([members[peer].entry.name for peer in back.awaited if peer in members])
    return (
        f"{lost}: the run goes back to version {back.version} in {max(0.0, back.in_s):.0f} s"
        f"{f', unless one of these brings a newer one: {awaited}' if awaited else ''}"
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
