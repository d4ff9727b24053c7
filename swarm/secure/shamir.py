"""Shamir's secret sharing over a prime field: any ``threshold`` shares give the secret, fewer say nothing about it.

After Shamir 1979, "How to Share a Secret". A share of member i is the value at i > 0 of a random polynomial of degree
``threshold - 1`` whose value at 0 is the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above 2**256, so every key or seed of 32 bytes is a secret of the field."""

SHARE_BYTES = 33


def split(
    secret: int,
    points: Sequence[int],
    threshold: int,
    draw: Callable[[int], int] = secrets.randbelow,
    prime: int = PRIME,
) -> list[int]:
    """Return the share at each of ``points``, distinct and from 1 to ``prime - 1``, in their order.

    ``draw``: returns a uniform number below its argument, each time an independent one."""
    assert 0 <= secret < prime
    assert 1 <= threshold <= len(points) == len({point % prime for point in points} - {0})
    coefficients = [secret, *(draw(prime) for _ in range(threshold - 1))]
    shares = []
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % prime
        shares.append(value)
    return shares


def combine(shares: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the secret that shares, by their points, belong to: as many as the threshold; all are used."""
    secret = 0
    for point, share in shares.items():
        above = below = 1
        for other in shares:
            if other != point:
                above = above * other % prime
                below = below * (other - point) % prime
        secret = (secret + share * above * pow(below, -1, prime)) % prime
    return secret


def pack_share(share: int) -> bytes:
    """Return a share as ``SHARE_BYTES`` bytes."""
    return share.to_bytes(SHARE_BYTES, "big")


def unpack_share(data: bytes) -> int | None:
    """Return the share in ``data``; None for bytes that are no element of the field."""
    share = int.from_bytes(data, "big")
    return share if len(data) == SHARE_BYTES and share < PRIME else None
