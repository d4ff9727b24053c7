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
class StateClaims:
    """What members say of one version's state. Not journaled: after a restart they say it again.

    ``said``: the last digest by peer, kept while it replays; ``is_disputed``: all who decide have spoken, and no digest
    is clear."""

    said: dict[str, bytes] = field(default_factory=dict)
    is_disputed: bool = False

    def agreed(
        self, trainers: Mapping[str, Member], took_part: Collection[str], version: int, *, overdue: bool
    ) -> bytes | None:
        """Return the digest that is clear by now, if any, and note whether it is disputed.

        ``trainers``: the live ones; ``overdue``: those that decide and have said nothing are waited for no more. If
        none of them has spoken, those decide that have, in the same order, or one that hangs would halt the run."""
        asked = deciders(trainers, took_part, version)
        heard = [peer for peer in asked if peer in self.said]
        if overdue and not heard:
            heard = deciders({peer: trainers[peer] for peer in trainers if peer in self.said}, took_part, version)
        voters = heard if overdue else asked
        digest = clear_digest({peer: self.said.get(peer) for peer in voters}, trainers)
        self.is_disputed = digest is None and bool(heard) and len(heard) == len(voters)
        return digest


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


def clear_digest(said: Mapping[str, bytes | None], members: Mapping[str, Member]) -> bytes | None:
    """Return the digest with more than half of the work behind it, of two members where there are two; None without.

    ``said``: by all that decide, None for who has not spoken. One member alone needs far more of the work."""
    work = weights_of({peer: members[peer] for peer in said})
    behind, heads = Counter[bytes](), Counter[bytes]()
    for peer, digest in said.items():
        if digest is not None:
            behind[digest] += work[peer]
            heads[digest] += 1
    total = sum(work.values())
    for digest, weight in behind.items():
        if 2 * weight > total and (heads[digest] >= min(2, len(said)) or weight > _ALONE * total):
            return digest
    return None


def _with_credit(members: Mapping[str, Member], peers: Iterable[str]) -> list[str]:
    return [peer for peer in peers if members[peer].has_credit]
