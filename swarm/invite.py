"""The invite: one URL that says where the coordinator is, which run, and which key to trust."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

from shoal.swarm.errors import InviteError

_EXAMPLE = "shoal://HOST:PORT/RUN?key=…"
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]{0,253}[a-z0-9])?\.?")
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Invite:
    """``key`` is the coordinator's raw 32-byte CURVE public key."""

    host: str
    port: int
    run: str
    key: bytes

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        key = base64.urlsafe_b64encode(self.key).decode().rstrip("=")
        return f"shoal://{host}:{self.port}/{quote(self.run)}?key={key}"

    @classmethod
    def parse(cls, url: str) -> Invite:
        """Raises ``InviteError`` that names what is wrong with the URL."""
        try:
            split = urlsplit(url.strip())
            host, port = split.hostname, split.port
            query = parse_qs(split.query, strict_parsing=bool(split.query))
            if ":" in (host or ""):
                ipaddress.IPv6Address(host or "")
        except ValueError as error:
            raise InviteError(f"not an invite ({error}); expected {_EXAMPLE}") from error
        if split.scheme != "shoal":
            raise InviteError(f"an invite begins with shoal://, this one with {split.scheme or '?'}://")
        if not host or not port:
            raise InviteError(f"the invite names no host and port; expected {_EXAMPLE}")
        if "@" in split.netloc or not (":" in host or _HOST.fullmatch(host)):
            raise InviteError(f"the invite's host is no name or address: {host[:80]!r}")
        run = split.path.removeprefix("/")
        if not _RUN.fullmatch(run):
            raise InviteError(f"the invite names no run after the port; expected {_EXAMPLE}")
        text = query.get("key", [""])[0]
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise InviteError("the invite's key is damaged; ask the host to send it again") from error
        if len(key) != 32:
            raise InviteError("the invite has no whole key= at its end; was it cut off? (quote it in the shell)")
        return cls(host, port, run, key)


def parse_address(text: str, default_port: int = 0) -> tuple[str, int]:
    """``HOST``, ``HOST:PORT`` or ``[V6]:PORT`` to its halves. Raises ``InviteError``."""
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
    except ValueError as error:
        raise InviteError(f"{text!r} is no HOST:PORT: {error}") from error
    if not host or split.netloc != text or "@" in text:
        raise InviteError(f"{text!r} is no HOST:PORT")
    return host, default_port if port is None else port
