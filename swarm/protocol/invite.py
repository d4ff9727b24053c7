"""The invite: one URL that says where the coordinator is, which key to trust, and which run it is, by its hash.

The hash is whole, 256 bits: who has agreed to a run by pasting its invite has agreed to every byte of its run file, and
the coordinator cannot serve another one later."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

from shoal.swarm.errors import InviteError

_EXAMPLE = "shoal://HOST:PORT/RUN?key=…&run=… (or HOST:PORT,HOST:PORT/RUN)"
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]{0,253}[a-z0-9])?\.?")
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_MAX_ADDRESSES = 8

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True)
class Invite:
    """``addresses``: where the coordinator is, or may be one day, the likeliest first; ``key``: its raw 32-byte CURVE
    public key, which is the same at all of them; ``run_hash``: that of the run file, 32 bytes."""

    addresses: tuple[Address, ...]
    run: str
    key: bytes
    run_hash: bytes

    def __str__(self) -> str:
        where = ",".join(address_text(*address) for address in self.addresses)
        return f"shoal://{where}/{quote(self.run)}?key={_to_text(self.key)}&run={_to_text(self.run_hash)}"

    @classmethod
    def parse(cls, url: str) -> Invite:
        """Raises ``InviteError`` that names what is wrong with the URL."""
        scheme, mark, rest = url.strip().partition("://")
        if not mark or scheme.lower() != "shoal":
            raise InviteError(f"an invite begins with shoal://, this one with {scheme[:20]!r}; expected {_EXAMPLE}")
        authority, _, tail = rest.partition("/")
        addresses = tuple(dict.fromkeys(_address(one) for one in authority.split(",")))
        if len(addresses) > _MAX_ADDRESSES:
            raise InviteError(f"the invite names {len(addresses)} addresses, at most {_MAX_ADDRESSES} are tried")
        try:
            split = urlsplit(f"/{tail}")
            query = parse_qs(split.query, strict_parsing=bool(split.query))
        except ValueError as error:
            raise InviteError(f"not an invite ({error}); expected {_EXAMPLE}") from error
        run = split.path.removeprefix("/")
        if not _RUN.fullmatch(run):
            raise InviteError(f"the invite names no run after the port; expected {_EXAMPLE}")
        return cls(addresses, run, _from_text("key", query), _from_text("run", query))


def _to_text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def _from_text(name: str, query: Mapping[str, Sequence[str]]) -> bytes:
    """32 bytes. Raises ``InviteError``."""
    text = query.get(name, [""])[0]
    try:
        value = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InviteError(f"the invite's {name}= is damaged; ask the host to send it again") from error
    if len(value) != 32:
        raise InviteError(f"the invite has no whole {name}= at its end; was it cut off? (quote it in the shell)")
    return value


def address_text(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(text: str) -> Address:
    """One of an invite's addresses. Raises ``InviteError``."""
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
        if ":" in (host or ""):
            ipaddress.IPv6Address(host or "")
    except ValueError as error:
        raise InviteError(f"not an invite ({error}); expected {_EXAMPLE}") from error
    if not host or not port:
        raise InviteError(f"the invite names no host and port; expected {_EXAMPLE}")
    if split.netloc != text or "@" in text:
        raise InviteError(f"the invite names no host and port; expected {_EXAMPLE}")
    return _check_host(host), port


def _check_host(host: str) -> str:
    if not (":" in host or _HOST.fullmatch(host)):
        raise InviteError(f"the invite's host is no name or address: {host[:80]!r}")
    return host


def parse_addresses(text: str, default_port: int = 0) -> tuple[Address, ...]:
    """``HOST[:PORT]`` for an invite, or several with commas between; none of an empty text. Raises ``InviteError``."""
    found = [parse_address(one.strip(), default_port) for one in text.split(",")] if text else []
    return tuple((_check_host(host), port) for host, port in found)


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
