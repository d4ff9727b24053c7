"""Secure averaging as its members see it: what the plan says of it, keys, sets, and statements about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Literal

import msgpack
from pydantic import Field

from shoal.swarm.protocol.types import Digest, Index, Key, Record, Signature

if TYPE_CHECKING:
    from shoal.swarm.protocol.statements import PlanStatement

FEWEST_MEMBERS = 4
"""Fewest members of a group: with fewer than a third of them corrupt, the owner among these, two others are honest."""

MOST_MEMBERS = 128
"""Most members of a secure round, all of which send their parts to all owners."""

MOST_WEIGHT = 2
"""Most weight of a member in a mean, in weights of the lightest one. Codes are multiplied by weights: beside a member
of many times their weight all others would be rounded to zero, and the sum be that member's contribution."""

FEWEST_GROUPS = 3
"""Fewest groups whose means are trimmed: without the smallest and the largest of three, one is left."""

MAX_SCALES = 2**14

SHARE_DIGEST_BYTES = 16
"""Shares are random numbers of 256 bits, of which a digest says nothing."""

FIRST_EXPONENT = {8: -13, 4: -9}
"""Units of a run's first round, by bits of a code: a range of about 0.015, the size of a hundred steps of AdamW at 3e-4
that all go one way. A range that is off by a factor of a thousand takes four rounds."""

_KEYS = b"shoal secure keys, version 1\0"
_SETS = b"shoal secure sets, version 1\0"
_MASKED = b"shoal masked part, version 1\0"
_NONCE = b"shoal secure random number, version 1\0"

Scales = Annotated[bytes, Field(max_length=MAX_SCALES)]
"""By block of elements, the exponent of a code's step, one signed byte each; empty where it is not known."""

Members = Annotated[tuple[Index, ...], Field(max_length=MOST_MEMBERS)]
"""Members of the plan, by index, in ascending order."""

Sets = Annotated[tuple[Members, ...], Field(max_length=2 * MOST_MEMBERS)]
"""For each part of the plan, the members whose masked contributions are summed."""

Names = Annotated[tuple[Digest, ...], Field(max_length=2 * MOST_MEMBERS)]
"""For each part of the plan, the name of all that its owner sums (``secure/sum_names.py``)."""


class SecurePlan(Record):
    """Rules by which a round's contributions are coded and masked.

    ``bits``: of a code; ``group``: the size of a masking group that is aimed at; ``block``: elements that share a
    scale; ``scales``: of all blocks."""

    bits: Literal[4, 8]
    group: Annotated[int, Field(ge=FEWEST_MEMBERS, le=16)]
    block: Annotated[int, Field(ge=1, le=2**22)]
    scales: Annotated[bytes, Field(min_length=1, max_length=MAX_SCALES)]


class SecureKeys(Record):
    """Public keys of one member for one round, all fresh.

    ``nonce``: its random number, which with its scales is in the ``commitment`` that was the root in its ``ready``;
    ``has_scales``: whether these were the plan's scales, or none; ``share_key``: X25519, for shares
    that are sealed to it; ``mask_keys``: X25519, by part, for the masks that it has in common with each other member;
    ``seed_digests``: by part, SHA-256 of the seed of the mask that is its own; ``signature``: of all that under the
    plan, by its identity."""

    nonce: Digest
    has_scales: bool
    share_key: Key
    mask_keys: Annotated[tuple[Key, ...], Field(min_length=1, max_length=2 * MOST_MEMBERS)]
    seed_digests: Annotated[tuple[Digest, ...], Field(min_length=1, max_length=2 * MOST_MEMBERS)]
    signature: Signature


class SecureStage(IntEnum):
    """Stages of a secure round, by what its members are asked for; each begins when the one before is complete.

    ``KEYS``: their public keys; ``SHARES``: shares of their secrets, sealed for each other member of their group;
    ``MASKS``: masked contributions, by those whose shares are there; ``SETS``: signatures of the parts' sets;
    ``UNMASK``: shares that open the sums of these sets; ``OPEN``: nothing more."""

    KEYS = 0
    SHARES = 1
    MASKS = 2
    SETS = 3
    UNMASK = 4
    OPEN = 5


class SealedShares(Record):
    """Shares of one member's secrets for a member of its group. ``member``: the receiver in what the sender posts, and
    the sender in what the receiver gets; ``data``: empty for the sender itself; ``digests``: ``SHARE_DIGEST_BYTES`` of
    each share, in the clear, so that both a wrong share and one that is revealed wrongly have somebody to blame."""

    member: Index
    data: Annotated[bytes, Field(max_length=66 * 2 * MOST_MEMBERS + 28)]
    digests: Annotated[bytes, Field(max_length=2 * SHARE_DIGEST_BYTES * 2 * MOST_MEMBERS)]


class Arrival(Record):
    """By a part's owner: the members whose masked contributions to it arrived as a whole, and the root of each
    (``MaskedPartStatement``)."""

    part: Annotated[int, Field(ge=0, lt=2 * MOST_MEMBERS)]
    members: Members
    roots: Annotated[tuple[Digest, ...], Field(max_length=MOST_MEMBERS)]


class Consent(Record):
    """Signature of a member for a round's sets (``SetsStatement``)."""

    member: Index
    signature: Signature


class SignedSets(Record):
    """Sets of a secure round with their signatures, in its verdict: whose masked contributions its means are of.

    ``nonces``: of all members of the plan, from which the groups follow; ``consents``: the signatures for these
    senders, sets and names (``secure.signed_sets``)."""

    nonces: Annotated[tuple[Digest, ...], Field(max_length=MOST_MEMBERS)]
    senders: Members
    sets: Sets
    names: Names
    consents: Annotated[tuple[Consent, ...], Field(max_length=MOST_MEMBERS)]


class Revealed(Record):
    """A member's shares that open its group's sum of one part: 33 bytes for each sender of the group, in their order.

    Of a sender in the part's set its seed's share, of another one its mask key's: never both of one sender."""

    part: Annotated[int, Field(ge=0, lt=2 * MOST_MEMBERS)]
    member: Index
    shares: Annotated[bytes, Field(max_length=33 * 32)]


class UnopenedSecret(Record):
    """A secret of ``dealer`` for one part that its revealed shares do not give, as the part's owner says."""

    part: Annotated[int, Field(ge=0, lt=2 * MOST_MEMBERS)]
    dealer: Index


@dataclass(frozen=True)
class KeysStatement:
    """A member's statement of its keys for one round, under the plan."""

    plan: PlanStatement
    member: int
    keys: SecureKeys

    def bytes_to_sign(self) -> bytes:
        keys = self.keys
        said = [self.member, keys.nonce, keys.has_scales, keys.share_key, keys.mask_keys, keys.seed_digests]
        return _KEYS + _packed(*named(self.plan), *said)


@dataclass(frozen=True)
class SetsStatement:
    """A member's statement that these are the sets of a round: it reveals shares for them and for no others.

    ``senders``: the members whose shares were delivered, among which contributions are masked; ``names``: as ``Names``,
    so that nobody chooses what it has sent once sums can be opened."""

    plan: PlanStatement
    senders: Sequence[int]
    sets: Sequence[Sequence[int]]
    names: Sequence[bytes]

    def bytes_to_sign(self) -> bytes:
        sets = [list(one) for one in self.sets]
        return _SETS + _packed(*named(self.plan), list(self.senders), sets, list(self.names))


@dataclass(frozen=True)
class MaskedPartStatement:
    """A member's statement of the masked contribution that it sends to a part, under the plan.

    ``root``: of the Merkle tree over the part's masked chunks."""

    plan: PlanStatement
    part: int
    member: int
    root: bytes

    def bytes_to_sign(self) -> bytes:
        return _MASKED + _packed(*named(self.plan), self.part, self.member, self.root)


def commitment(nonce: bytes, scales: bytes) -> bytes:
    """Return what commits to a random number before anybody shows theirs, and to the scales that a member has."""
    return hashlib.sha256(_NONCE + nonce + scales).digest()


def first_scales(bits: int, blocks: int) -> bytes:
    """Return the scales of a run's first round, which nothing is known of yet."""
    return FIRST_EXPONENT[bits].to_bytes(1, "big", signed=True) * blocks


def group_count(members: int, size: int) -> int:
    """Return the number of masking groups that so many members make up, of ``size`` or more each."""
    return max(1, members // size)


def fewest_groups(*, is_trimmed: bool) -> int:
    """Return the fewest groups that a mean may be of. ``is_trimmed``: whether they are compared with each other."""
    return FEWEST_GROUPS if is_trimmed else 1


def fewest_members(size: int, *, is_trimmed: bool) -> int:
    """Return the fewest members of a round. ``is_trimmed``: whether groups' means are compared with each other."""
    return FEWEST_GROUPS * size if is_trimmed else FEWEST_MEMBERS


def excess_weights(weights: Sequence[int]) -> list[int]:
    """Return by how much each weight is above ``MOST_WEIGHT`` times the smallest one: it does not count."""
    most = MOST_WEIGHT * min(weights)
    return [max(0, one - most) for one in weights]


def named(plan: PlanStatement) -> list[object]:
    """Return the fields that bind something to one plan of one round of one run."""
    return [*plan.name.fields, plan.plan]


def _packed(*fields: object) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed
