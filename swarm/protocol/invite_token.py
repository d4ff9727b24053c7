"""Tokens of invites: terms that the host's key has signed, packed into 93 bytes, and their checks without a journal.

The signature is the secret: who has the token may join by its terms. Ed25519 signatures are deterministic, so the host
makes the same token again from its terms, and keeps none.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

from shoal.swarm.errors import NotAdmitted
from shoal.swarm.protocol.identity import verify_signature
from shoal.swarm.protocol.invite import TOKEN_BYTES
from shoal.swarm.protocol.types import InviteRole, InviteTerms, Role, id_bytes, id_text

_CONTEXT = b"shoal invite token, version 1\0"
_FORMAT = 1
_BODY = struct.Struct(">B5sBHI16s")
"""Format, id, role, uses, expiry in Unix seconds, digest of the note."""

SIGNATURE_BYTES = 64
assert _BODY.size + SIGNATURE_BYTES == TOKEN_BYTES

_ROLES: tuple[InviteRole, ...] = ("trainer", "contributor", "validator", "observer")
_ADMITTED: dict[InviteRole, tuple[Role, ...]] = {
    "trainer": ("trainer", "contributor", "follower", "observer"),
    "contributor": ("contributor", "follower", "observer"),
    "validator": ("validator", "follower", "observer"),
    "observer": ("follower", "observer"),
}


@dataclass(frozen=True)
class TokenClaims:
    """Terms that a token names, whether or not they are signed. ``uses`` and ``expires_s`` are 0 for no limit."""

    id: str
    role: InviteRole
    uses: int
    expires_s: int


def make_token(terms: InviteTerms, run_hash: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """Pack and sign the terms of an invite to the run with this hash."""
    note = hashlib.sha256(terms.note.encode()).digest()[:16]
    role = _ROLES.index(terms.role)
    body = _BODY.pack(_FORMAT, id_bytes(terms.id), role, terms.uses, terms.expires_s, note)
    return body + sign(_CONTEXT + run_hash + body)


def read_token(token: bytes) -> TokenClaims:
    """Unpack a token's terms, at no cost: its signature is not checked. Raises ``NotAdmitted``."""
    if not token:
        raise NotAdmitted("this run lets in who has an invite with a token (t=…): ask the host for one", "no token")
    if len(token) != TOKEN_BYTES or token[0] != _FORMAT or token[6] >= len(_ROLES):
        raise NotAdmitted(
            "the invite's token is damaged, or of another release: ask the host for a new invite", "damaged"
        )
    _, number, role, uses, expires_s, _ = _BODY.unpack_from(token)
    return TokenClaims(id_text(number), _ROLES[role], uses, expires_s)


def admits(invited: InviteRole, role: Role) -> bool:
    """Whether an invite for one role admits another."""
    return role in _ADMITTED[invited]


def check_terms(claims: TokenClaims, role: Role, unix_s: float) -> None:
    """Check that a token admits this role now. Raises ``NotAdmitted``."""
    if claims.expires_s and unix_s >= claims.expires_s:
        raise NotAdmitted(f"the invite {claims.id} has expired: ask the host for a new one", "expired")
    if not admits(claims.role, role):
        raise NotAdmitted(
            f"the invite {claims.id} is for the role {claims.role}: "
            f"join with {_OPTIONS[claims.role]}, or ask the host for another invite",
            "role",
        )


_OPTIONS: dict[InviteRole, str] = {
    "trainer": "--role trainer",
    "contributor": "--role contributor",
    "validator": "--role validator",
    "observer": "--role follower",
}


def check_signature(token: bytes, run_hash: bytes, host_key: bytes) -> None:
    """Check that the host has signed a token for this run. Raises ``NotAdmitted``."""
    body, signature = token[: _BODY.size], token[_BODY.size :]
    if not verify_signature(host_key, signature, _CONTEXT + run_hash + body):
        raise NotAdmitted(
            "the invite's token was not made for this run by its host: ask the host for a new invite", "forged"
        )
