"""The URL of a relay, which its operator gives to hosts: where it listens, its key, and the token that admits them."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from shoal.swarm.errors import InviteError
from shoal.swarm.protocol.addresses import join_host_port, split_host_port
from shoal.swarm.protocol.types import Address

_SCHEME = "shoal-relay"
_EXPECTED = f"expected {_SCHEME}://HOST:PORT?key=…&t=…, as `shoal relay` prints it"
TOKEN_BYTES = 16


@dataclass(frozen=True)
class RelayUrl:
    """A relay for a host. ``token``: a secret, empty for a relay that serves every host."""

    host: str
    port: int
    key: bytes
    token: bytes = field(default=b"", repr=False)

    @property
    def address(self) -> Address:
        return Address(kind="relayed", host=self.host, control_port=self.port, relay_key=self.key)

    def __str__(self) -> str:
        token = f"&t={_encode(self.token)}" if self.token else ""
        return f"{_SCHEME}://{join_host_port(self.host, self.port)}?key={_encode(self.key)}{token}"

    @classmethod
    def parse(cls, text: str) -> RelayUrl:
        """Parse a relay's URL. Raises ``InviteError``, which never repeats the token."""
        try:
            split = urlsplit(text.strip())
            query = parse_qs(split.query, strict_parsing=True)
            key, token = _decode(query.get("key", [""])[0]), _decode(query.get("t", [""])[0])
        except (ValueError, binascii.Error):
            raise InviteError(f"not the URL of a relay; {_EXPECTED}") from None
        if split.scheme != _SCHEME or len(key) != 32 or len(token) not in (0, TOKEN_BYTES):
            raise InviteError(f"not the URL of a relay, or cut off; {_EXPECTED}")
        host, port = split_host_port(split.netloc)
        if not port:
            raise InviteError(f"the relay's URL names no port; {_EXPECTED}")
        return cls(host, port, key, token)


def _encode(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
