"""How many files and sockets this process may have open: systems allow few at first, and more to those who ask."""

from __future__ import annotations

import logging
import resource

from shoal.swarm.protocol.messages import MAX_MEMBERS

log = logging.getLogger(__name__)

_MOST = 8192
"""No more are asked for: enough for a full run's roster four times over."""

HOST_DESCRIPTORS = 2 * MAX_MEMBERS + 128
"""What a host of a full run needs: one a member and observer, and some of its own."""


def allow_descriptors() -> int:
    """Raise the soft limit as far as it may be, to ``_MOST``; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(_MOST, hard)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    if soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError) as error:
        log.debug("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted


def warn_host(allowed: int) -> None:
    """Say how many members fit when it is not a full run's."""
    if allowed < HOST_DESCRIPTORS:
        log.warning(
            "this machine allows %d open files and sockets, a host of %d members needs %d: the last ones will not get "
            "in; if there may be so many, raise the hard limit (ulimit -Hn, or LimitNOFILE= in a systemd unit)",
            allowed,
            MAX_MEMBERS,
            HOST_DESCRIPTORS,
        )
