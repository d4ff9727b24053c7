"""Validation of the data source that a run file names: it comes from a stranger and is read on a volunteer's machine.

Files are named relative to folders that the volunteer chooses (``peer/training/data_files.py``). Nothing opens a URL
yet; what does so later still has to resolve the host, let every address through ``is_public``, those of redirects too,
and connect to the address that it has checked.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

SCHEMES = ("https", "s3", "gs", "hf")

_EXAMPLES = {"text": "text:books/**/*.txt", "tokens": "tokens:books/train.u16"}

_EXPECTED = "expected stdlib, own, text:GLOB, tokens:FILE or a URL (https, s3, gs, hf)"
_HOST_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]\.?")
"""With a dot, and a last label that no resolver takes for a number: some take ``127.1`` and ``0x7f000001`` for one."""

_OWN_NETWORK = re.compile(r"(^|\.)(localhost|localdomain|local|internal|intranet|lan|home|corp|home\.arpa|onion)\.?$")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def file_pattern(source: str) -> tuple[str, str] | None:
    """``text`` or ``tokens``, and the glob or name after the colon; None for a source that names no files."""
    kind, colon, pattern = source.partition(":")
    return (kind, pattern) if colon and kind in _EXAMPLES and not pattern.startswith("//") else None


def check_source(source: str) -> None:
    """Raises ``ValueError`` with a sentence on what a run file cannot name."""
    if source in ("stdlib", "own"):
        return
    files = file_pattern(source)
    if files is not None:
        _check_names(*files)
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(:|//)", source):
        check_url(source)
    else:
        raise ValueError(f"{_EXPECTED}, not {source!r}")


def _check_names(kind: str, pattern: str) -> None:
    """Only names below a folder, so that no run file can reach a place that the volunteer has not chosen."""
    if not pattern:
        raise ValueError(f"{_EXPECTED}, not {kind + ':'!r}")
    if not pattern.isprintable() or "\\" in pattern or ":" in pattern:
        raise ValueError(f"{kind}:{pattern!r}: names of files have no backslash, colon or control character here")
    for part in pattern.split("/"):
        if not part or part[0] in ".~":
            raise ValueError(
                f"{kind}:{pattern}: must be relative, such as {_EXAMPLES[kind]}: volunteers name the folder "
                "(--data FOLDER), and a run file neither absolute paths, nor ~ or .., nor hidden files"
            )


def check_url(url: str) -> None:
    """Raises ``ValueError`` for a URL that is not of somebody's public server."""
    scheme = url.partition(":")[0].lower()
    if scheme not in SCHEMES:
        raise ValueError(f"{url!r}: a run file's URLs are of {', '.join(SCHEMES)}, not {scheme}:")
    if "::" in url:
        raise ValueError(f"{url!r}: chained URLs (::) are not for run files")
    if not url.isascii() or not url.isprintable() or "\\" in url or " " in url:
        raise ValueError(f"{url!r}: a URL has neither spaces, backslashes nor letters outside of ASCII")
    try:
        split = urlsplit(url)
        host, _ = split.hostname or "", split.port
    except ValueError as error:
        raise ValueError(f"{url!r}: not a URL: {error}") from error
    if "@" in split.netloc:
        raise ValueError(f"{url!r}: no user or password in a run file: everybody reads it")
    if not split.netloc or not host or not url[len(scheme) + 1 :].startswith("//"):
        raise ValueError(f"{url!r}: not a whole URL, such as https://example.org/data.u16")
    if scheme == "https" and not _is_public_host(host):
        raise ValueError(f"{url!r}: {host!r} is not the public name or address of a server")


def _is_public_host(host: str) -> bool:
    try:
        return is_public(host)
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None and _OWN_NETWORK.search(host) is None


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet's: not of this machine, its own networks, or many machines at once.

    IPv6 addresses that stand for an IPv4 address are what that is. Raises ``ValueError`` for what is no address."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        embedded = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if embedded is None and found in _NAT64:
            embedded = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if embedded is not None:
            return is_public(str(embedded))
    return found.is_global and not found.is_multicast
