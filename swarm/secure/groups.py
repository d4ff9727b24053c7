"""Masking groups of a round, drawn by randomness that no single member controls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.swarm.protocol.secure import FEWEST_MEMBERS, group_count


@dataclass(frozen=True)
class MaskingGroup:
    """Members whose masks cancel each other. ``members``: indices of the plan, in ascending order."""

    members: tuple[int, ...]

    @property
    def threshold(self) -> int:
        """Fewest members whose shares open a sum: more than two thirds, so that two different sets would need the same
        honest member twice (Bonawitz et al. 2017, section 6.3)."""
        return threshold(len(self.members))

    def point(self, member: int) -> int:
        """Return the point of a member's shares."""
        return 1 + self.members.index(member)

    def among(self, members: Sequence[int]) -> list[int]:
        """Return the members of this group that are in ``members``."""
        return [one for one in self.members if one in members]


def threshold(members: int) -> int:
    """Return the threshold of a group of so many members."""
    return 2 * members // 3 + 1


def lane_bits(members: int, bits: int) -> int:
    """Return the bits of a lane in which the sum of so many codes of ``bits`` bits does not wrap."""
    return (members * ((1 << bits - 1) - 1)).bit_length() + 1


def draw_groups(nonces: Sequence[bytes], plan: bytes, size: int) -> list[MaskingGroup]:
    """Draw the groups of a round, of ``size`` to ``2 * size - 1`` members, or of all where there are fewer.

    ``nonces``: of all members, each of which had committed to its own before any was shown, so the draw is uniform if
    one of them was; ``plan``: digest of the plan. Nothing else decides: neither weights nor networks, which a host or
    members could choose so that somebody is alone among them."""
    assert len(nonces) >= FEWEST_MEMBERS
    seed = hashlib.sha256(b"shoal secure groups, version 1\0" + plan + b"".join(nonces)).digest()
    order = sorted(range(len(nonces)), key=lambda member: hashlib.sha256(seed + member.to_bytes(4, "big")).digest())
    count = group_count(len(order), size)
    return [MaskingGroup(tuple(sorted(order[first::count]))) for first in range(count)]


def most_strangers(members: int) -> int:
    """Return the most members of so many that the others need not know: fewer than a third."""
    return (members - 1) // 3
