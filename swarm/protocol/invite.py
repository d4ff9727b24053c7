"""The invite: a URL with the coordinator's addresses, its key, the run file's hash and a token.

Malformed ones are refused here. A well-formed invite with another run, hash or key is refused by ``fetch_run``
(``client/coordinator_client.py``), a wrong token by the coordinator (``invite_token.py``).

The hash has its full 256 bits. By pasting an invite a person agrees to every byte of the run file, and the coordinator
cannot serve a different one later.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from shoal.swarm.errors import InviteError
from shoal.swarm.protocol.addresses import MAX_ADDRESSES, split_host_port

if TYPE_CHECKING:
    from shoal.swarm.protocol.types import Address

TOKEN_BYTES = 93
"""Of a token in its packed form (``invite_token.py``)."""

_EXPECTED = "expected shoal://HOST:PORT/RUN?key=…&run=… (or HOST:PORT,HOST:PORT/RUN)"
_HOST = re.compile(r"[a-z0-9]([a-z0-9._-]{0,253}[a-z0-9])?\.?")
_MAX_FILE_BYTES = 4096
_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
NAMED_RUN = re.compile(rf"({_RUN.pattern})(?:@([0-9a-f]{{8,64}}))?")
"""A run's name in a directory, and the first digits of its hash."""


@dataclass(frozen=True)
class Invite:
    """An invite to a run.

    ``addresses``: of the coordinator now or in future, the likeliest first, and of relays that it is reached over.
    ``key``: its CURVE public key, 32 bytes, the same at all addresses. ``run_hash``: of the run file, 32 bytes.
    ``token``: what lets its holder in (``invite_token.py``), a secret; empty where the run needs none.
    ``is_study``: the invite is to all runs of a study, which ``run`` and ``run_hash`` name."""

    addresses: tuple[Address, ...]
    run: str
    key: bytes
    run_hash: bytes
    token: bytes = field(default=b"", repr=False)
    is_study: bool = False

    def __str__(self) -> str:
        where = ",".join(str(address) for address in self.addresses if not address.is_relayed)
        relays = ",".join(str(address) for address in self.addresses if address.is_relayed)
        via = f"&via={relays}" if relays else ""
        token = f"&t={_encode(self.token)}" if self.token else ""
        what = "study" if self.is_study else "run"
        return f"shoal://{where}/{quote(self.run)}?key={_encode(self.key)}&{what}={_encode(self.run_hash)}{via}{token}"

    @classmethod
    def read(cls, text: str) -> Invite:
        """Parse an invite that is given as a URL, or as a file that holds one: ``@FILE`` or its path.

        Raises ``InviteError``, which never repeats a token."""
        return cls.parse(invite_text(text))

    @classmethod
    def parse(cls, url: str) -> Invite:
        """Parse an invite URL. Raises ``InviteError`` that names what is wrong with it."""
        if not url.strip():
            raise InviteError(f"the invite is empty; {_EXPECTED}")
        scheme, mark, rest = url.strip().partition("://")
        if not mark or scheme.lower() != "shoal":
            raise InviteError(f"an invite begins with shoal://, this one with {scheme[:20]!r}; {_EXPECTED}")
        authority, _, tail = rest.partition("/")
        try:
            split = urlsplit(f"/{tail}")
            query = parse_qs(split.query, strict_parsing=bool(split.query))
        except ValueError:
            # The error names what it does not understand, and that may be the token.
            raise InviteError(f"not an invite: what follows the run's name is damaged; {_EXPECTED}") from None
        run = split.path.removeprefix("/")
        if not _RUN.fullmatch(run):
            raise InviteError(f"the invite names no run after the port; {_EXPECTED}")
        direct, relayed = _parse_places(authority, query.get("via", [""])[0])
        is_study = "study" in query
        digest = _decode("study" if is_study else "run", query)
        key, token = _decode("key", query), _decode_token(query)
        # A broken invite is told at once: pydantic, and the models of all messages, take a second to load.
        from shoal.swarm.protocol.types import Address

        addresses = tuple(Address(host=host, control_port=port) for host, port in direct)
        addresses += tuple(Address(host=host, control_port=port, kind="relayed") for host, port in relayed)
        return cls(addresses, run, key, digest, token, is_study)


def invite_text(text: str) -> str:
    """The URL itself, or the first line of the file that ``@FILE`` or a path names; other texts stay as they are.

    Raises ``InviteError`` for a file after ``@`` that cannot be read."""
    named = text.strip()
    path = Path(named.removeprefix("@")).expanduser()
    try:
        if "://" in named or not (named.startswith("@") or path.is_file()):
            return text
        with path.open("rb") as file:
            line = file.read(_MAX_FILE_BYTES).decode(errors="replace").strip().partition("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise InviteError(f"{named[:200]}: the file with the invite cannot be read: {error}") from error
    return line if named.startswith("@") or line.lower().startswith("shoal://") else text


def is_run_name(text: str) -> bool:
    """Whether a text may be the name of a run in a directory, as ``NAME`` or ``NAME@HASH``."""
    return NAMED_RUN.fullmatch(text) is not None


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


def _decode_token(query: Mapping[str, Sequence[str]]) -> bytes:
    """Decode the token; empty without one. Raises ``InviteError``."""
    text = query.get("t", [""])[0]
    try:
        value = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InviteError("the invite's t= is damaged; ask the host to send it again") from error
    if len(value) not in (0, TOKEN_BYTES):
        raise InviteError("the invite's t= is cut off or too long; copy the whole URL and quote it in the shell")
    return value


_Place = tuple[str, int]
"""Host and port."""


def _parse_places(direct: str, relays: str) -> tuple[list[_Place], list[_Place]]:
    """Parse the addresses before the run's name, and those of relays after it. Raises ``InviteError``."""
    found = [_parse_place(one) for one in direct.split(",")] if direct or not relays else []
    relayed = [_parse_place(one) for one in relays.split(",")] if relays else []
    places, others = list(dict.fromkeys(found)), list(dict.fromkeys(relayed))
    if len(places) + len(others) > MAX_ADDRESSES:
        raise InviteError(f"the invite names {len(places + others)} addresses; at most {MAX_ADDRESSES} are allowed")
    return places, others


def _parse_place(text: str) -> _Place:
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
    return _check_host(host), port


def _check_host(host: str) -> str:
    if len(host) > 255 or not (":" in host or _HOST.fullmatch(host)):
        raise InviteError(f"the invite's host is neither a name nor an IP address: {host[:80]!r}")
    return host


def parse_advertised(text: str, default_port: int = 0) -> tuple[tuple[str, int], ...]:
    """Split ``HOST[:PORT],…``, the addresses that an invite is to name. Raises ``InviteError``."""
    found = [split_host_port(one.strip(), default_port) for one in text.split(",")] if text else []
    return tuple((_check_host(host), port) for host, port in found)
