"""Opening of a masked sum by a part's owner: the masks that are left in it, from the shares that members reveal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shoal.swarm.protocol.secure import SecureKeys
from shoal.swarm.protocol.statements import PlanStatement
from shoal.swarm.secure import shamir
from shoal.swarm.secure.groups import MaskingGroup
from shoal.swarm.secure.round_keys import pair_mask_key, pair_sign, seed_digest, self_mask_key

NO_SHARE = b"\xff" * shamir.SHARE_BYTES
"""In place of a share that was not delivered, or is a wrong one: no element of the field."""


@dataclass(frozen=True)
class Unopened:
    """A group's sum that cannot be opened. ``dealer``: by its index, a member whose shares do not give its secret
    though there are enough; None while there are too few, and more may come."""

    dealer: int | None


def secrets_of(
    part: int,
    group: MaskingGroup,
    senders: Sequence[int],
    included: Sequence[int],
    keys: Sequence[SecureKeys],
    revealed: Mapping[int, bytes],
) -> dict[int, bytes] | Unopened:
    """Return the secrets that open a group's sum, by sender: its seed or, if it is not in the sum, its mask key.

    ``senders``: of the group; ``included``: those of them whose masked codes were summed; ``revealed``: by member, its
    shares (``protocol.secure.Revealed``), without wrong ones. For a worker thread."""
    secrets: dict[int, bytes] = {}
    fitting = {one: data for one, data in revealed.items() if len(data) == len(senders) * shamir.SHARE_BYTES}
    for place, sender in enumerate(senders):
        shares = shares_of(group, place, fitting)
        if len(shares) < group.threshold:
            return Unopened(None)
        secret = recovered(shares, group.threshold, keys[sender], part, is_in=sender in included)
        if secret is None:
            return Unopened(sender)
        secrets[sender] = secret
    return secrets


def masks_of(
    about: PlanStatement,
    part: int,
    included: Sequence[int],
    keys: Mapping[int, SecureKeys] | Sequence[SecureKeys],
    secrets: Mapping[int, bytes],
) -> list[tuple[bytes, int]]:
    """Return the keys and signs of what is to be added to a group's sum to open it, from the ``secrets_of`` its
    senders. For a worker thread."""
    opened: list[tuple[bytes, int]] = []
    for sender, secret in secrets.items():
        if sender in included:
            opened.append((self_mask_key(about, secret, part, sender), -1))
            continue
        private = X25519PrivateKey.from_private_bytes(secret)
        for other in included:
            key = pair_mask_key(about, private, keys[other].mask_keys[part], part, sender, other)
            opened.append((key, -pair_sign(other, sender)))
    return opened


def shares_of(group: MaskingGroup, place: int, revealed: Mapping[int, bytes]) -> dict[int, int]:
    """Return what was revealed of the secret of the sender at this place, by point."""
    shares: dict[int, int] = {}
    at = place * shamir.SHARE_BYTES
    for member, data in revealed.items():
        share = shamir.unpack_share(data[at : at + shamir.SHARE_BYTES]) if member in group.members else None
        if share is not None:
            shares[group.point(member)] = share
    return shares


def recovered(shares: Mapping[int, int], threshold: int, keys: SecureKeys, part: int, *, is_in: bool) -> bytes | None:
    """Return the secret of these shares; None if it is not what its owner has shown of it in its ``keys``.

    ``is_in``: whether that is the seed of a sender in the part's set, or else the key of its pairwise masks."""
    number = shamir.combine({point: shares[point] for point in sorted(shares)[:threshold]})
    if number >= 2**256:
        return None
    secret = number.to_bytes(32, "big")
    return secret if is_secret(secret, keys, part, is_in=is_in) else None


def is_secret(secret: bytes, keys: SecureKeys, part: int, *, is_in: bool) -> bool:
    """Whether this is the secret of which its owner has shown a digest, or the public half, in its ``keys``."""
    if is_in:
        return seed_digest(secret) == keys.seed_digests[part]
    shown = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    return shown == keys.mask_keys[part]
