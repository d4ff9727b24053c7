"""Origins of connections that local forwarders make, so that limits by network apply to who is behind them."""

from __future__ import annotations

import ipaddress
import itertools

from shoal.swarm.errors import LinkError
from shoal.swarm.protocol.addresses import plain_host

_MAX_FORWARDED = 1024
_LOOPBACK = ipaddress.IPv4Network("127.64.0.0/10")


class Origins:
    """Where connections come from that reach our port over a local forwarder.

    Each gets a loopback address of its own, by which libzmq names it; limits by network then see through it."""

    def __init__(self) -> None:
        self._hosts: dict[str, str] = {}
        self._next = itertools.count(1)

    def add(self, host: str) -> str:
        """Return the loopback address from which to connect to our own port for a caller at ``host``."""
        if len(self._hosts) >= _MAX_FORWARDED:
            raise LinkError("too many connections over relays")
        local = str(_LOOPBACK[next(self._next) % _LOOPBACK.num_addresses])
        self._hosts[local] = host
        return local

    def remove(self, local: str) -> None:
        self._hosts.pop(local, None)

    def of(self, host: str) -> str:
        """The address from which a connection really comes; ``host`` itself, unless it was forwarded."""
        return self._hosts.get(plain_host(host), host)
