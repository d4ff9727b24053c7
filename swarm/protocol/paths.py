"""Relays of a run, as its host has signed them, and the passes by which relays know the run's members.

A relay holds no secret of a run. It believes a host's signature of which keys are members', and that a client holds
such a key as it has signed the relay's nonce. Members believe which relays there are as the host has signed that, and
what a relay says of a caller's address as the relay has signed it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.errors import NotAdmitted
from shoal.swarm.protocol.identity import verify_certificate, verify_signature
from shoal.swarm.protocol.types import Address, Certificate, Digest, Host, Key, Port, Record, Signature

PASS_S = 3600
"""Validity of a pass. Members renew it; one that was removed can use relays no longer than this."""

RELAY_OFFER_S = 100.0
"""Validity of a member's offer of its relay, which it renews three times as often."""

CLOCK_ERROR_S = 300
"""Difference of two machines' clocks that is put up with."""

_PASS = b"shoal relay pass, version 2\0"
_RELAY = b"shoal relay of a run, version 1\0"
_PROOF = b"shoal relay client, version 1\0"
_INTRODUCTION = b"shoal relay introduction, version 1\0"

Plane = Literal["control", "data"]
ExpiryTime = Annotated[int, Field(ge=0, lt=2**33)]
"""Unix seconds."""


class SignedRelay(Record):
    """A relay of a run, with its identity key and where it listens; ``signature``: the host's.

    ``of_member``: a member's, which may work against the others: what it says of its callers' addresses is not
    believed."""

    relay_key: Key
    host: Host
    port: Port
    of_member: bool = False
    signature: Signature

    @property
    def address(self) -> Address:
        """The address of a member that is registered there."""
        return Address(kind="relayed", host=self.host, control_port=self.port, relay_key=self.relay_key)


class RelayPass(Record):
    """The host's signature that an identity is a member of its run until ``expires_s``, and has this CURVE key.

    Members certify their CURVE keys themselves. The host has seen that this one is the member's, so that no member can
    be registered under the key of another one or of the host, and take its calls."""

    host_key: Key
    run_hash: Digest
    member_key: Key
    curve_key: Key
    expires_s: ExpiryTime
    signature: Signature


def _relay_bytes(run_hash: bytes, relay_key: bytes, address: tuple[str, int], *, of_member: bool) -> bytes:
    host, port = address
    return _RELAY + run_hash + relay_key + struct.pack(">?H", of_member, port) + host.encode()


def sign_relay(
    sign: Callable[[bytes], bytes],
    run_hash: bytes,
    relay_key: bytes,
    address: tuple[str, int],
    *,
    of_member: bool = False,
) -> SignedRelay:
    """Name a relay of a run, with the host's key."""
    signature = sign(_relay_bytes(run_hash, relay_key, address, of_member=of_member))
    host, port = address
    return SignedRelay(relay_key=relay_key, host=host, port=port, of_member=of_member, signature=signature)


def check_relay(relay: SignedRelay, run_hash: bytes, host_key: bytes) -> None:
    """Check that the host has named this relay for this run. Raises ``NotAdmitted``."""
    said = _relay_bytes(run_hash, relay.relay_key, (relay.host, relay.port), of_member=relay.of_member)
    if not verify_signature(host_key, relay.signature, said):
        raise NotAdmitted("the run's host has not signed this relay")


def _pass_bytes(run_hash: bytes, member_key: bytes, curve_key: bytes, expires_s: int) -> bytes:
    return _PASS + run_hash + member_key + curve_key + struct.pack(">Q", expires_s)


def make_pass(
    sign: Callable[[bytes], bytes], host_key: bytes, run_hash: bytes, certificate: Certificate, expires_s: int
) -> RelayPass:
    """Make a pass for the holder of a certificate, with the host's key."""
    member_key, curve_key = certificate.identity_key, certificate.curve_key
    return RelayPass(
        host_key=host_key,
        run_hash=run_hash,
        member_key=member_key,
        curve_key=curve_key,
        expires_s=expires_s,
        signature=sign(_pass_bytes(run_hash, member_key, curve_key, expires_s)),
    )


def check_pass(shown: RelayPass, certificate: Certificate, unix_s: float) -> None:
    """Check that a pass is valid now and for the keys of this certificate, which is valid, too.

    Raises ``NotAdmitted``."""
    if unix_s > shown.expires_s + CLOCK_ERROR_S:
        raise NotAdmitted("the pass has expired", "expired")
    if shown.member_key != certificate.identity_key:
        raise NotAdmitted("the pass is for another identity")
    if shown.curve_key != certificate.curve_key:
        raise NotAdmitted("the pass is for another process of this identity")
    said = _pass_bytes(shown.run_hash, shown.member_key, shown.curve_key, shown.expires_s)
    if not verify_signature(shown.host_key, shown.signature, said):
        raise NotAdmitted("the pass was not signed by the host that it names", "forged")
    verify_certificate(certificate)


def proof_bytes(relay_key: bytes, nonce: bytes, purpose: str, target: bytes = b"") -> bytes:
    """What a client signs to prove to a relay that it holds a key. It is of no use at another relay, for another
    connection or purpose, or towards another target."""
    return _PROOF + relay_key + nonce + struct.pack(">H", len(purpose)) + purpose.encode() + target


def introduction_bytes(target: bytes, ticket: bytes, caller_host: str, caller_port: int) -> bytes:
    """What a relay signs to introduce a caller to the holder of the CURVE key ``target``."""
    return _INTRODUCTION + target + ticket + struct.pack(">H", caller_port) + caller_host.encode()
