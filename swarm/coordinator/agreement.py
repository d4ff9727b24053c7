"""Agreement on the state of a new version: who decides on its digest, and when that is clear.

Those decide that held the state before and took part in the round that made this one; among them those with credit.
A member that has joined since, or has restored a state from its disk, decides nothing while one of them is here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shoal.swarm.coordinator.membership import Member
from shoal.swarm.coordinator.trust import weights_of

_ALONE = 0.75
"""Share of the work with which one member decides against others: a small one cannot halt the run by another claim."""


@dataclass
class Electorate:
    """Those that decide on a version, with the weight of each, and what they have said; counted claim by claim, as a
    thousand members speak within a second.

    ``made_of``: what it follows from; another electorate takes its place when that has changed."""

    made_of: object
    work: Mapping[str, int]
    behind: Counter[bytes] = field(default_factory=Counter)
    heads: Counter[bytes] = field(default_factory=Counter)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = sum(self.work.values())

    @property
    def heard(self) -> int:
        return self.heads.total()

    def count(self, peer: str, digest: bytes, earlier: bytes | None) -> None:
        """Count a member's claim, in place of an earlier one; nothing if it decides nothing."""
        if peer not in self.work:
            return
        if earlier is not None:
            self.behind[earlier] -= self.work[peer]
            self.heads[earlier] -= 1
        self.behind[digest] += self.work[peer]
        self.heads[digest] += 1

    def clear_digest(self) -> bytes | None:
        """Return the digest with more than half of the work behind it, of two members where there are two; else None.

        One member alone needs far more of the work."""
        for digest, weight in self.behind.items():
            heads = self.heads[digest]
            if 2 * weight > self.total and (heads >= min(2, len(self.work)) or weight > _ALONE * self.total):
                return digest
        return None


@dataclass
class StateClaims:
    """Claims of members about one version's state. Not journaled: after a restart they say it again.

    ``said``: the last digest by peer, kept while it replays; ``is_disputed``: all who decide have spoken, and no digest
    is clear."""

    said: dict[str, bytes] = field(default_factory=dict)
    is_disputed: bool = False
    _electorate: Electorate | None = None

    def say(self, peer: str, digest: bytes) -> None:
        """Note what a member says."""
        earlier = self.said.get(peer)
        self.said[peer] = digest
        if self._electorate is not None:
            self._electorate.count(peer, digest, earlier)

    def agreed(
        self,
        trainers: Mapping[str, Member],
        took_part: Collection[str],
        version: int,
        *,
        overdue: bool,
        stamp: object = None,
    ) -> bytes | None:
        """Return the digest that is clear by now, if any, and note whether it is disputed.

        ``trainers``: the live ones; ``stamp``: changes when they or their credit do, None where that is not known;
        ``overdue``: those that decide and have said nothing are waited for no more. If none of them has spoken, those
        decide that have, in the same order, or one that hangs would halt the run."""
        made_of = stamp, took_part, version
        electorate = self._electorate
        if electorate is None or stamp is None or electorate.made_of != made_of:
            electorate = self._electorate = self._elect(trainers, deciders(trainers, took_part, version), made_of)
        if overdue:
            heard = [peer for peer in electorate.work if peer in self.said] or deciders(
                {peer: trainers[peer] for peer in trainers if peer in self.said}, took_part, version
            )
            electorate = self._elect(trainers, heard, None)
        digest = electorate.clear_digest()
        self.is_disputed = digest is None and 0 < electorate.heard == len(electorate.work)
        return digest

    def _elect(self, trainers: Mapping[str, Member], peers: Iterable[str], made_of: object) -> Electorate:
        electorate = Electorate(made_of, weights_of({peer: trainers[peer] for peer in peers}))
        for peer in electorate.work.keys() & self.said.keys():
            electorate.count(peer, self.said[peer], None)
        return electorate


def deciders(trainers: Mapping[str, Member], took_part: Collection[str], version: int) -> list[str]:
    """Return the live trainers whose claims decide on the state of a version."""
    present = [peer for peer, one in trainers.items() if one.joined_version < version]
    averaged = [peer for peer in present if peer in took_part]
    for group in (
        _with_credit(trainers, averaged),
        _with_credit(trainers, present),
        averaged,
        present,
        _with_credit(trainers, trainers),
    ):
        if group:
            return group
    return list(trainers)


def _with_credit(members: Mapping[str, Member], peers: Iterable[str]) -> list[str]:
    return [peer for peer in peers if members[peer].has_credit]
