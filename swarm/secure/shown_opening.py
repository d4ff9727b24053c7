"""Opening of a part's sums as its owner shows it: secrets, and the signed keys by which they prove themselves.

All of that came to the owner before. Of each sender there is one secret, as in the opening itself: the seed of one in
the sum, or the key of pairwise masks of one that is not; never both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from shoal.swarm.errors import WireError
from shoal.swarm.protocol.secure import SecureKeys
from shoal.swarm.secure.sum_names import NAME_BYTES

_KEY_BYTES, _SECRET_BYTES, _SIGNATURE_BYTES = 32, 32, 64


@dataclass(frozen=True)
class ShownOpening:
    """Opening of a part's sums. ``names``: of all its sums, by group; ``keys`` and ``secrets``: by sender, of the
    groups whose sums were opened, in the order of groups."""

    names: Sequence[bytes]
    keys: Mapping[int, SecureKeys]
    secrets: Mapping[int, bytes]

    def pack(self) -> bytes:
        """Encode it, in ``opening_bytes``."""
        shown = [_packed_keys(self.keys[sender]) + secret for sender, secret in self.secrets.items()]
        return b"".join([*self.names, *shown])

    @classmethod
    def unpack(cls, data: bytes | memoryview, sums: int, senders: Sequence[int], parts: int) -> ShownOpening:
        """Decode what ``pack`` has made of so many sums, these senders and a plan of so many parts.

        Raises ``WireError``."""
        data, each = bytes(data), _keys_bytes(parts) + _SECRET_BYTES
        if len(data) != opening_bytes(sums, len(senders), parts):
            raise WireError(f"an opening of {len(data)} bytes does not fit")
        names = [data[at : at + NAME_BYTES] for at in range(0, sums * NAME_BYTES, NAME_BYTES)]
        edges = range(sums * NAME_BYTES, len(data), each)
        keys = {one: _keys(data[at : at + each - _SECRET_BYTES], parts) for one, at in zip(senders, edges, strict=True)}
        secrets = {one: data[at + each - _SECRET_BYTES : at + each] for one, at in zip(senders, edges, strict=True)}
        return cls(names, keys, secrets)


def opening_bytes(sums: int, senders: int, parts: int) -> int:
    """Return the size of what is shown of so many sums, with senders of those that were opened."""
    return sums * NAME_BYTES + senders * (_keys_bytes(parts) + _SECRET_BYTES)


def _keys_bytes(parts: int) -> int:
    return 1 + (2 + 2 * parts) * _KEY_BYTES + _SIGNATURE_BYTES


def _packed_keys(keys: SecureKeys) -> bytes:
    return b"".join(
        [bytes([keys.has_scales]), keys.nonce, keys.share_key, *keys.mask_keys, *keys.seed_digests, keys.signature]
    )


def _keys(data: bytes, parts: int) -> SecureKeys:
    if data[0] > 1:
        raise WireError("an opening with other keys than members have")
    words = [data[at : at + _KEY_BYTES] for at in range(1, len(data) - _SIGNATURE_BYTES, _KEY_BYTES)]
    try:
        return SecureKeys(
            nonce=words[0],
            has_scales=bool(data[0]),
            share_key=words[1],
            mask_keys=tuple(words[2 : 2 + parts]),
            seed_digests=tuple(words[2 + parts :]),
            signature=data[-_SIGNATURE_BYTES:],
        )
    except ValidationError as error:
        raise WireError("an opening with other keys than members have") from error
