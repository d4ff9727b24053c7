"""The chain of verdicts: what is hashed and signed, and how anybody checks it."""

from __future__ import annotations

import hashlib

import msgpack

from shoal.swarm.errors import WireError
from shoal.swarm.identity import verify_signature
from shoal.swarm.messages import Verdict

_CONTEXT = b"shoal verdict, version 1\0"


def genesis(run_hash: bytes) -> bytes:
    """The chain before the first round."""
    return hashlib.sha256(b"shoal chain, version 1\0" + run_hash).digest()


def chain_hash(verdict: Verdict) -> bytes:
    """SHA-256 over the previous chain and everything the verdict says, but for its own hash and signature."""
    content = verdict.model_dump(exclude={"chain", "signature"})
    packed: bytes = msgpack.packb([sorted(content), [content[key] for key in sorted(content)]])
    return hashlib.sha256(_CONTEXT + packed).digest()


def signed_bytes(chain: bytes) -> bytes:
    """What the coordinator signs: the chain hash covers the rest."""
    return _CONTEXT + chain


def pack_verdict(verdict: Verdict) -> bytes:
    """As it is kept and sent: msgpack of all its fields."""
    data: bytes = msgpack.packb(verdict.model_dump())
    return data


def check_verdict(verdict: Verdict, coordinator_key: bytes) -> None:
    """Raises ``WireError`` when the hash or the coordinator's signature is wrong."""
    if chain_hash(verdict) != verdict.chain:
        raise WireError(f"the verdict of round {verdict.round} does not match its own hash")
    if not verify_signature(coordinator_key, verdict.signature, signed_bytes(verdict.chain)):
        raise WireError(f"the verdict of round {verdict.round} is not signed by the coordinator")
