"""Names of masked sums: digests of all that an owner adds up for a part, and of the keys by which it opens the sums.

They are signed with the sets, so they are fixed before anything is opened: nobody, the owner as a member included,
chooses then what it has sent. The owner writes the name into the means that it makes, and signs these, so nobody shows
other roots or keys in an audit than those that it had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgpack

from shoal.swarm.protocol.secure import KeysStatement, SecureKeys, named
from shoal.swarm.protocol.statements import PlanStatement
from shoal.swarm.secure.groups import MaskingGroup

_SUM, _PART = b"shoal masked sum, version 1\0", b"shoal masked sums of a part, version 1\0"

NAME_BYTES = 32


def keys_digest(about: PlanStatement, member: int, keys: SecureKeys) -> bytes:
    """Return the digest of a member's public keys of a round, without their signature."""
    return hashlib.sha256(KeysStatement(about, member, keys).bytes_to_sign()).digest()


def name_of_sum(
    about: PlanStatement, part: int, roots: Sequence[tuple[int, bytes]], keys: Sequence[tuple[int, bytes]]
) -> bytes:
    """Return the name of one group's masked sum. ``roots``: of the masked parts of its members in the set; ``keys``: of
    all its senders, the ``keys_digest``; both by member, in ascending order."""
    packed: bytes = msgpack.packb([*named(about), part, roots, keys])
    return hashlib.sha256(_SUM + packed).digest()


def name_of_part(names: Iterable[bytes]) -> bytes:
    """Return the name of all masked sums of a part, in the order of their groups."""
    return hashlib.sha256(_PART + b"".join(names)).digest()


def names_of_sums(
    about: PlanStatement,
    part: int,
    groups: Sequence[MaskingGroup],
    senders: Sequence[int],
    roots: Mapping[int, bytes],
    keys: Mapping[int, bytes],
) -> list[bytes]:
    """Return the name of each sum of a part. ``roots``: of the members in its set; ``keys``: digests, of all
    senders."""
    return [
        name_of_sum(
            about, part, [(one, roots[one]) for one in mine], [(one, keys[one]) for one in group.among(senders)]
        )
        for group in groups
        if (mine := group.among(list(roots)))
    ]
