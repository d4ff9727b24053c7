"""The invite: a URL with the coordinator's addresses, its key and the run file's hash; refused here if malformed.

A well-formed invite with another run, hash or key is refused by ``fetch_run`` (``client/coordinator_client.py``).

The hash has its full 256 bits. By pasting an invite a person agrees to every byte of the run file, and the coordinator
cannot serve a different one later.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

from shoal.swarm.errors import InviteError
from shoal.swarm.protocol.addresses import split_host_port
from shoal.swarm.protocol.types import MAX_ADDRESSES, Address

_EXPECTED = "expected shoal://HOST:PORT/RUN?key=…&run=… (or HOST:PORT,HOST:PORT/RUN)"
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]{0,253}[a-z0-9])?\.?")
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Invite:
    """An invite to a run.

    ``addresses``: of the coordinator now or in future, the likeliest first. ``key``: its CURVE public key, 32 bytes,
    the same at all addresses. ``run_hash``: the hash of the run file, 32 bytes."""

    addresses: tuple[Address, ...]
    run: str
    key: bytes
    run_hash: bytes

    def __str__(self) -> str:
        where = ",".join(map(str, self.addresses))
        return f"shoal://{where}/{quote(self.run)}?key={_encode(self.key)}&run={_encode(self.run_hash)}"

    @classmethod
    def parse(cls, url: str) -> Invite:
        """Parse an invite URL. Raises ``InviteError`` that names what is wrong with it."""
        scheme, mark, rest = url.strip().partition("://")
        if not mark or scheme.lower() != "shoal":
            raise InviteError(f"an invite begins with shoal://, this one with {scheme[:20]!r}; {_EXPECTED}")
        authority, _, tail = rest.partition("/")
        addresses = tuple(dict.fromkeys(_parse_address(one) for one in authority.split(",")))
        if len(addresses) > MAX_ADDRESSES:
            raise InviteError(f"the invite names {len(addresses)} addresses; at most {MAX_ADDRESSES} are allowed")
        try:
            split = urlsplit(f"/{tail}")
            query = parse_qs(split.query, strict_parsing=bool(split.query))
        except ValueError as error:
            raise InviteError(f"not an invite ({error}); {_EXPECTED}") from error
        run = split.path.removeprefix("/")
        if not _RUN.fullmatch(run):
            raise InviteError(f"the invite names no run after the port; {_EXPECTED}")
        return cls(addresses, run, _decode("key", query), _decode("run", query))


def _encode(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _decode(name: str, query: Mapping[str, Sequence[str]]) -> bytes:
    """Decode a field of 32 bytes. Raises ``InviteError``."""
    text = query.get(name, [""])[0]
    try:
        value = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InviteError(f"the invite's {name}= is damaged; ask the host to send it again") from error
    if len(value) != 32:
        raise InviteError(f"the invite's {name}= is missing or cut off; copy the whole URL and quote it in the shell")
    return value


def _parse_address(text: str) -> Address:
    """Parse one address of an invite. Raises ``InviteError``."""
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
        if ":" in (host or ""):
            ipaddress.IPv6Address(host or "")
    except ValueError as error:
        raise InviteError(f"not an invite ({error}); {_EXPECTED}") from error
    if not host or not port or split.netloc != text or "@" in text:
        raise InviteError(f"the invite names no host and port; {_EXPECTED}")
    return Address(host=_check_host(host), control_port=port)


def _check_host(host: str) -> str:
    if len(host) > 255 or not (":" in host or _HOST.fullmatch(host)):
        raise InviteError(f"the invite's host is neither a name nor an IP address: {host[:80]!r}")
    return host


def parse_advertised(text: str, default_port: int = 0) -> tuple[tuple[str, int], ...]:
    """Split ``HOST[:PORT],…``, the addresses that an invite is to name. Raises ``InviteError``."""
    found = [split_host_port(one.strip(), default_port) for one in text.split(",")] if text else []
    return tuple((_check_host(host), port) for host, port in found)
