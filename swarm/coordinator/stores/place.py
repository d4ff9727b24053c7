"""URLs of shared stores: ``etcd://A,B,C/prefix`` and ``postgres://USER@HOST/DATABASE``."""

from __future__ import annotations

import re
import ssl
from urllib.parse import parse_qs, unquote, urlsplit

from shoal.swarm.coordinator.stores.fenced_store import FencedStore
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.addresses import split_host_port

_EXPECTED = "expected etcd://HOST:PORT,HOST:PORT/PREFIX, etcds://… for TLS, or postgres://USER@HOST/DATABASE"
_ETCD_PORT = 2379
_PREFIX = re.compile(r"[A-Za-z0-9._/-]{1,200}")
_TLS_FILES = {"ca", "cert", "key"}


def open_store(url: str, run: str) -> FencedStore:
    """Make the store that the URL names, for one run; nothing is connected yet.

    Raises ``UserError``, which never repeats a password."""
    scheme = url.partition("://")[0].lower()
    if scheme in ("etcd", "etcds"):
        return _etcd(url, run, tls=scheme == "etcds")
    if scheme in ("postgres", "postgresql"):
        try:
            from shoal.swarm.coordinator.stores.postgres import PostgresStore
        except ImportError as error:
            raise UserError(f"--journal postgres://…: install `shoal[postgres]` first ({error})") from error
        return PostgresStore(url, run)
    raise UserError(f"--journal {scheme[:20]}…: {_EXPECTED}")


def _etcd(url: str, run: str, *, tls: bool) -> FencedStore:
    from shoal.swarm.coordinator.stores.etcd import EtcdPlace, EtcdStore

    rest = url.partition("://")[2]
    authority, _, tail = rest.partition("/")
    named, _, hosts = authority.rpartition("@")
    user, _, password = named.partition(":")
    try:
        split = urlsplit(f"/{tail}")
        query = parse_qs(split.query, strict_parsing=bool(split.query))
        endpoints = tuple(split_host_port(one.strip(), _ETCD_PORT) for one in hosts.split(","))
    except ValueError as error:
        raise UserError(f"--journal etcd://…: not a list of hosts; {_EXPECTED}") from error
    prefix = split.path.strip("/") or "shoal"
    unknown = set(query) - _TLS_FILES
    if (
        not _PREFIX.fullmatch(prefix)
        or not all(host and port for host, port in endpoints)
        or unknown
        or (query and not tls)
    ):
        raise UserError(f"--journal etcd://…: {_EXPECTED}; etcds:// also takes ?ca=FILE&cert=FILE&key=FILE")
    context = _context({name: query[name][0] for name in query}) if tls else None
    return EtcdStore(EtcdPlace(endpoints, prefix, run, unquote(user), unquote(password), context))


def _context(files: dict[str, str]) -> ssl.SSLContext:
    """Make what TLS needs: the system's authorities, or one's own, and a certificate of this machine."""
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
        return context
    except OSError as error:
        raise UserError(f"--journal etcds://…: its files cannot be used: {error}") from error
