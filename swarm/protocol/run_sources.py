"""Validation of the data source of a run file, which a stranger wrote and a volunteer's machine reads.

Files are named relative to folders that the volunteer chooses (``peer/training/data_files.py``). URLs are of public
servers; code that opens one resolves the host, requires ``reach_of`` to be ``public`` for every address (after each
redirect too), and connects to the address that it has checked (``peer/http_get.py``).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from shoal.swarm.protocol.addresses import parse_ip, reach_of
from shoal.swarm.protocol.field_errors import did_you_mean

SCHEMES = ("https", "s3", "gs", "hf")

_EXAMPLES = {"text": "text:books/**/*.txt", "tokens": "tokens:books/train.u16"}

_EXPECTED = "expected stdlib, own, text:GLOB, tokens:FILE or shards:URL (https, s3, gs, hf)"

_SHARDS = "shards:"
_HOST_NAME = re.compile(r"([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]\.?")
"""At least two labels, the last one not numeric: some resolvers read ``127.1`` and ``0x7f000001`` as IP addresses."""

_OWN_NETWORK = re.compile(r"(^|\.)(localhost|localdomain|local|internal|intranet|lan|home|corp|home\.arpa|onion)\.?$")


def file_pattern(source: str) -> tuple[str, str] | None:
    """Split ``text:GLOB`` or ``tokens:FILE`` into its kind and pattern; None for a source that names no files."""
    kind, colon, pattern = source.partition(":")
    return (kind, pattern) if colon and kind in _EXAMPLES and not pattern.startswith("//") else None


def shards_url(source: str) -> str | None:
    """The URL of ``shards:URL``, the folder with the manifest; None for another source."""
    return source.removeprefix(_SHARDS) if source.startswith(_SHARDS) else None


def check_source(source: str) -> None:
    """Check ``data.source``. Raises ``ValueError`` that says what a run file may not name, and why."""
    if source in ("stdlib", "own"):
        return
    files, shards = file_pattern(source), shards_url(source)
    if files is not None:
        _check_names(*files)
    elif shards is not None:
        check_folder_url(shards)
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]*:(:|//)", source):
        check_url(source)
    else:
        meant = did_you_mean(source.partition(":")[0], ("stdlib", "own", *_EXAMPLES, _SHARDS.removesuffix(":")))
        raise ValueError(f"{_EXPECTED}, not {source!r}{meant}")


def _check_names(kind: str, pattern: str) -> None:
    """Allow only names below a folder, so that no run file reaches files outside the volunteer's folders."""
    if not pattern:
        raise ValueError(f"{_EXPECTED}, not {kind + ':'!r}")
    if not pattern.isprintable() or "\\" in pattern or ":" in pattern:
        raise ValueError(f"{kind}:{pattern!r}: file names may have no backslash, colon or control character")
    for part in pattern.split("/"):
        if not part or part[0] in ".~":
            raise ValueError(
                f"{kind}:{pattern}: must be relative, such as {_EXAMPLES[kind]}. Volunteers choose the folder "
                "(--data FOLDER); a run file may not name absolute paths, ~, .. or hidden files"
            )


def check_folder_url(url: str) -> None:
    """Check that a URL names a folder at a public server. Raises ``ValueError`` if it does not."""
    check_url(url)
    if "?" in url or "#" in url:
        raise ValueError(f"{url!r}: expected the URL of a folder, without ? and #, as names of files follow it")


def check_url(url: str) -> None:
    """Check that a URL names a public server. Raises ``ValueError`` if it does not."""
    scheme = url.partition(":")[0].lower()
    if scheme not in SCHEMES:
        raise ValueError(f"{url!r}: the scheme must be one of {', '.join(SCHEMES)}, not {scheme}:")
    if "::" in url:
        raise ValueError(f"{url!r}: chained URLs (::) are not allowed in run files")
    if not url.isascii() or not url.isprintable() or "\\" in url or " " in url:
        raise ValueError(f"{url!r}: a URL may have no spaces, backslashes or non-ASCII characters")
    try:
        split = urlsplit(url)
        host, _ = split.hostname or "", split.port
    except ValueError as error:
        raise ValueError(f"{url!r}: not a URL: {error}") from error
    if "@" in split.netloc:
        raise ValueError(f"{url!r}: a run file may not contain a user or password, as everybody can read it")
    if not split.netloc or not host or not url[len(scheme) + 1 :].startswith("//"):
        raise ValueError(f"{url!r}: not a complete URL, such as https://example.org/data.u16")
    if scheme == "https" and not _is_public_host(host):
        raise ValueError(f"{url!r}: {host!r} is not a public host name or IP address")


def _is_public_host(host: str) -> bool:
    if parse_ip(host) is not None:
        return reach_of(host) == "public"
    return _HOST_NAME.fullmatch(host) is not None and _OWN_NETWORK.search(host) is None
