"""Keys of one member for one secure round, and what is derived from keys of two members.

All of them are fresh for each round, as in Bonawitz et al. 2017 ("Practical Secure Aggregation for Privacy-Preserving
Machine Learning", figure 4): none is used under two plans. They live in memory alone and die with the process, so a
process that starts again can reveal nothing of what it was sent before.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.swarm.protocol.secure import SHARE_DIGEST_BYTES, KeysStatement, SecureKeys, named
from shoal.swarm.protocol.statements import PlanStatement
from shoal.swarm.secure import shamir
from shoal.swarm.secure.groups import MaskingGroup

_CONTEXT = b"shoal secure averaging, version 1\0"
_NONCE_BYTES = 12

SEALING_BYTES = _NONCE_BYTES + 16
"""Bytes that sealing adds to shares."""


def fresh_nonce() -> bytes:
    """Return a member's random number for the draw of a round's groups."""
    return secrets.token_bytes(32)


class RoundKeys:
    """Secrets of one member under one plan: its key for shares and, for each part, the key of its pairwise masks and
    the seed of the mask that is its own."""

    def __init__(self, plan: PlanStatement, member: int, parts: int, nonce: bytes) -> None:
        """``member``: our index of the plan; ``nonce``: the random number that our ``ready`` has committed to."""
        self.plan = plan
        self.member = member
        self.nonce = nonce
        self._share_secret = X25519PrivateKey.generate()
        self._mask_secrets = [X25519PrivateKey.generate() for _ in range(parts)]
        self.seeds = [secrets.token_bytes(32) for _ in range(parts)]

    def public(self, sign: Callable[[KeysStatement], bytes], *, has_scales: bool) -> SecureKeys:
        """Return the public keys, signed by our identity."""
        keys = SecureKeys(
            nonce=self.nonce,
            has_scales=has_scales,
            share_key=self._share_secret.public_key().public_bytes_raw(),
            mask_keys=tuple(one.public_key().public_bytes_raw() for one in self._mask_secrets),
            seed_digests=tuple(seed_digest(seed) for seed in self.seeds),
            signature=bytes(64),
        )
        return keys.model_copy(update={"signature": sign(KeysStatement(self.plan, self.member, keys))})

    def deal(self, group: MaskingGroup) -> dict[int, bytes]:
        """Return the shares of all our secrets for each member of our group, ourselves too: by part, the share of the
        seed and that of the mask key."""
        points = [group.point(one) for one in group.members]
        dealt = {one: bytearray() for one in group.members}
        for seed, key in zip(self.seeds, self._mask_secrets, strict=True):
            for secret in (seed, key.private_bytes_raw()):
                shares = shamir.split(int.from_bytes(secret, "big"), points, group.threshold)
                for one, share in zip(group.members, shares, strict=True):
                    dealt[one] += shamir.pack_share(share)
        return {one: bytes(shares) for one, shares in dealt.items()}

    def seal(self, shares: bytes, receiver: int, share_key: bytes) -> bytes:
        """Encrypt shares for another member. Raises ``ValueError`` for a key with which nothing can be agreed on."""
        key, nonce = self._share_cipher(self.member, receiver, share_key), secrets.token_bytes(_NONCE_BYTES)
        return nonce + key.encrypt(nonce, shares, None)

    def unseal(self, sealed: bytes, sender: int, share_key: bytes) -> bytes | None:
        """Return the shares that another member has sealed for us under this plan; None if it has not."""
        try:
            cipher = self._share_cipher(sender, self.member, share_key)
            return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except (ValueError, InvalidTag):
            return None

    def _share_cipher(self, sender: int, receiver: int, other: bytes) -> AESGCM:
        """The cipher for what one of us sends the other; it never serves the other way, nor another plan."""
        shared = self._share_secret.exchange(X25519PublicKey.from_public_bytes(other))
        return AESGCM(_derived(shared, self.plan, "shares", sender, receiver))

    def masks(self, part: int, senders: Sequence[int], mask_keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Return the keys and signs of all masks on our codes of a part: our own, and one with each other sender.

        ``senders``: the members of our group whose shares were delivered, us included; ``mask_keys``: by member of the
        plan. Raises ``ValueError`` for a key with which nothing can be agreed on."""
        keys = [(self_mask_key(self.plan, self.seeds[part], part, self.member), 1)]
        for other in senders:
            if other != self.member:
                key = pair_mask_key(self.plan, self._mask_secrets[part], mask_keys[other], part, self.member, other)
                keys.append((key, pair_sign(self.member, other)))
        return keys


def fault_of(keys: SecureKeys, parts: int) -> str:
    """Return what is wrong with a member's keys by themselves; empty if nothing is. For a worker thread.

    The coordinator refuses such keys, so that nobody but their member is missing; members look again."""
    if not len(keys.mask_keys) == len(keys.seed_digests) == parts:
        return "keys for other parts"
    shown = [keys.share_key, *keys.mask_keys]
    if len(set(shown)) != len(shown) or len(set(keys.seed_digests)) != parts:
        return "the same key twice"
    try:
        for key in shown:
            _ANYBODY.exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return "a key with which nothing can be agreed on"
    return ""


_ANYBODY = X25519PrivateKey.from_private_bytes(bytes(31) + b"\x01")


def share_digest(share: bytes) -> bytes:
    """Return the digest that a dealer shows of a share."""
    return hashlib.sha256(_CONTEXT + b"share\0" + share).digest()[:SHARE_DIGEST_BYTES]


def share_digests(shares: bytes) -> bytes:
    """Return the digests of packed shares, one after the other."""
    size = shamir.SHARE_BYTES
    return b"".join(share_digest(shares[at : at + size]) for at in range(0, len(shares), size))


def are_shares(packed: bytes) -> bool:
    """Whether packed shares are all elements of the field."""
    size = shamir.SHARE_BYTES
    return all(shamir.unpack_share(packed[at : at + size]) is not None for at in range(0, len(packed), size))


def seed_digest(seed: bytes) -> bytes:
    """Return the digest by which a seed that was put together again is checked."""
    return hashlib.sha256(_CONTEXT + b"seed\0" + seed).digest()


def self_mask_key(plan: PlanStatement, seed: bytes, part: int, member: int) -> bytes:
    """Return the key of the mask that a member has for itself."""
    return _derived(seed, plan, "own mask", part, member)


def pair_mask_key(
    plan: PlanStatement, secret: X25519PrivateKey, other_key: bytes, part: int, member: int, other: int
) -> bytes:
    """Return the key of the mask that two members have in common, from the secret of ``member``. Raises ``ValueError``
    for a public key of small order."""
    shared = secret.exchange(X25519PublicKey.from_public_bytes(other_key))
    return _derived(shared, plan, "pair mask", part, min(member, other), max(member, other))


def pair_sign(member: int, other: int) -> int:
    """Return whether ``member`` adds the mask that it has in common with ``other``, 1, or subtracts it, -1."""
    return 1 if member < other else -1


def _derived(secret: bytes, plan: PlanStatement, *about: object) -> bytes:
    info: bytes = _CONTEXT + msgpack.packb([*named(plan), *about])
    return HKDF(hashes.SHA256(), 32, None, info).derive(secret)
