"""Limits for callers of the control plane: message sizes, rates, connections and times, for members and strangers.

A stranger is a caller that is not a member. The cost of one stranger is bounded before its bytes are decoded, and the
cost of all of them by network, so that a flood from one network leaves room for newcomers from other networks, and for
those of the same network that behave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from shoal.swarm.token_buckets import TokenBuckets

T = TypeVar("T", bound=Hashable)

STRANGER_MESSAGE_BYTES = 2**12
"""Largest message of a stranger; a join takes less than half of it."""

STRANGER_CONNECTION_BYTES = 2**16
"""Most bytes that a stranger may send over one connection, whether they are decoded or not. libzmq collects any number
of frames of one message, so only the kernel's count of received bytes shows them."""

MEMBER_BACKLOG_BYTES = 2**23
"""Most bytes of one member's connection that may wait to be read, parts of an unfinished message included: four times
the largest message."""

MEMBERS_BACKLOG_BYTES = 2**26
"""The same for all members together; the connection with the most is closed first."""

FRAME_BYTES = 80
"""Estimated bytes of a message on the wire beside its content: CURVE, framing, its part of the handshake."""

STRANGER_S = 10.0
"""After this time from its connecting, a stranger that has sent no request is disconnected."""

REQUESTING_S = 30.0
"""The same for a stranger that has sent a request: the answer to a join may take 20 s, while its sender is dialed."""

KEY_MESSAGES_PER_S, KEY_BURST = 4.0, 32.0
NETWORK_MESSAGES_PER_S, NETWORK_BURST = 50.0, 200.0
"""Messages of strangers that are decoded: a newcomer sends one or two, a member that was removed some more."""

_FIRST_MESSAGES = 4
"""A key's first messages may use up its network's tokens; later ones leave half of them to others. Otherwise a flood
under ever new keys would keep newcomers of the same network out."""

MEMBER_BYTES_PER_S, MEMBER_BURST_BYTES = 2.0**19, 2.0**22
"""Bytes of one member's messages that are decoded: the report of a full run's round has 75 kB, and decoding a hostile
megabyte takes up to 0.2 s."""

CONNECTIONS_PER_KEY = 4
"""A process has one connection to another, or one to each address of the invite; of more, the oldest are dead."""

_MAX_STRANGERS = 256
_SAMPLES = 4
_MAX_ENDED = 4096


def strangers_allowed(descriptors: int) -> int:
    """Number of strangers' connections that one listener accepts, given the process's limit of open descriptors.

    The rest is kept for members, files and the connections that this process opens itself."""
    return max(8, min(_MAX_STRANGERS, descriptors // 8))


class MessageLimits:
    """Decides which messages are decoded, by the sender's key and network and the message's size."""

    def __init__(self, most_message_bytes: int) -> None:
        """``most_message_bytes``: largest message of a member."""
        self._most_message_bytes = most_message_bytes
        self._by_key = TokenBuckets[bytes](KEY_MESSAGES_PER_S, KEY_BURST)
        self._by_network = TokenBuckets[str](NETWORK_MESSAGES_PER_S, NETWORK_BURST)
        self._member_bytes = TokenBuckets[bytes](MEMBER_BYTES_PER_S, MEMBER_BURST_BYTES)

    def allows_member(self, key: bytes, size_bytes: int, now_s: float) -> bool:
        return self._member_bytes.take(key, size_bytes, now_s) and size_bytes <= self._most_message_bytes

    def allows_stranger(self, key: bytes, network: str, size_bytes: int, now_s: float) -> bool:
        """Whether to decode a stranger's message. A large message costs as many tokens as the small messages that it
        takes the place of."""
        is_first = self._by_key.level(key, now_s) > KEY_BURST - _FIRST_MESSAGES
        has_tokens = self._by_key.take(key, 1 + size_bytes // STRANGER_MESSAGE_BYTES, now_s)
        if not has_tokens or size_bytes > STRANGER_MESSAGE_BYTES:
            return False
        # Refused messages take no tokens of the network: a flood under one key does not use up its neighbours' share.
        if not is_first and self._by_network.level(network, now_s) <= NETWORK_BURST / 2:
            return False  # the other half is for keys that have sent hardly anything
        return self._by_network.take(network, 1, now_s)

    def refuses_handshake(self, key: bytes, now_s: float) -> bool:
        """Whether a stranger with this key has sent so much that it may not even connect."""
        return self._by_key.is_in_debt(key, now_s)


class StrangerPlaces(Generic[T]):
    """Strangers' connections: a bounded number in total, and half of that for one network.

    When there are too many, one of the largest network is evicted: of a few drawn at random, the one whose handshake
    has made the least progress. Connections that send nothing evict each other, and a newcomer is safe once it has sent
    something."""

    def __init__(self, most: int, rng: Random, progress: Callable[[T], Any]) -> None:
        """``progress``: how far a connection's handshake has come; any value that can be ordered."""
        self.most = most
        self._rng, self._progress = rng, progress
        self._networks: dict[str, dict[T, None]] = {}
        self._network_of: dict[T, str] = {}

    def __contains__(self, one: T) -> bool:
        return one in self._network_of

    def __len__(self) -> int:
        return len(self._network_of)

    def __iter__(self) -> Iterator[T]:
        """The oldest first."""
        return iter(self._network_of)

    def add(self, one: T, network: str) -> T | None:
        """Add a connection; returns one to close, which may be the same one."""
        self._networks.setdefault(network, {})[one] = None
        self._network_of[one] = network
        here = self._networks[network]
        if len(here) > max(1, self.most // 2):
            return self._evict(here)
        if len(self._network_of) > self.most:
            return self._evict(max(self._networks.values(), key=len))
        return None

    def remove(self, one: T) -> None:
        network = self._network_of.pop(one, None)
        if network is not None:
            del self._networks[network][one]
            if not self._networks[network]:
                del self._networks[network]

    def _evict(self, neighbours: dict[T, None]) -> T:
        drawn = self._rng.sample(list(neighbours), min(_SAMPLES, len(neighbours)))
        victim = min(drawn, key=self._progress)
        self.remove(victim)
        return victim


@dataclass(eq=False)
class Caller:
    """An accepted connection of the control plane.

    ``inode`` tells it from a later connection with the same ``descriptor``. ``routing`` is the routing id of its
    messages, known after the first one. ``stranger_since_s``: since when it has not been a member's."""

    descriptor: int
    inode: int
    network: str
    stranger_since_s: float
    routing: bytes | None = None
    key: bytes = b""
    is_member: bool = False
    has_requested: bool = False
    counted_bytes: int = 0
    """Bytes that it had received when it became a stranger's."""
    read_bytes: int = 0
    """Bytes of its messages that were read."""
    is_closed: bool = False


def excessive_backlogs(waiting: Mapping[T, int], most_each: int, most_all: int) -> list[T]:
    """Connections to close, the largest backlog first, until no backlog and no total of backlogs is too large.

    ``waiting``: bytes of each connection that were received and not read yet."""
    total, excessive = sum(waiting.values()), []
    for connection in sorted(waiting, key=lambda one: -waiting[one]):
        if waiting[connection] <= most_each and total <= most_all:
            break
        excessive.append(connection)
        total -= waiting[connection]
    return excessive


class Callers:
    """Accepted connections. Methods return those that the user of this class has to close."""

    def __init__(self, most_strangers: int, rng: Random, received_bytes: Callable[[Caller], int]) -> None:
        """``received_bytes``: bytes received over a connection, as the kernel counts them; 0 where it does not."""
        self.strangers = StrangerPlaces[Caller](
            most_strangers, rng, lambda one: (one.has_requested, received_bytes(one))
        )
        self._received_bytes = received_bytes
        self._by_descriptor: dict[int, Caller] = {}
        self._by_routing: dict[bytes, Caller] = {}
        self._by_key: dict[bytes, list[Caller]] = {}
        self.waiting_bytes = 0
        """Bytes of all members that waited to be read when ``flooding_members`` looked last."""
        self._ended: dict[bytes, None] = {}
        """Routing ids of recently ended connections, whose messages may still wait to be read."""

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def add(self, caller: Caller) -> list[Caller]:
        """Add an accepted connection, as a stranger's until its first message. A known one is not added again."""
        known = self._by_descriptor.get(caller.descriptor)
        if known is not None:
            if known.inode == caller.inode:
                return []
            self._forget(known)
        self._by_descriptor[caller.descriptor] = caller
        return self._add_stranger(caller)

    def forget_ended(self, is_there: Callable[[Caller], bool]) -> None:
        """Forget connections that have been closed."""
        for caller in [one for one in self._by_descriptor.values() if not is_there(one)]:
            self._forget(caller)

    def forget_ended_strangers(self, is_there: Callable[[Caller], bool]) -> None:
        """As ``forget_ended``, of strangers alone: their places are few."""
        for caller in [one for one in self.strangers if not is_there(one)]:
            self._forget(caller)

    def _forget(self, caller: Caller) -> None:
        del self._by_descriptor[caller.descriptor]
        caller.is_closed = True
        self.strangers.remove(caller)
        if caller.routing is not None:
            self._by_routing.pop(caller.routing, None)
            self._remember_ended(caller.routing)
            alike = self._by_key[caller.key]
            alike.remove(caller)
            if not alike:
                del self._by_key[caller.key]

    def find(self, routing: bytes) -> Caller | None:
        """The open connection with a routing id."""
        return self._by_routing.get(routing)

    def has_ended(self, routing: bytes) -> bool:
        return routing in self._ended

    def identify(self, descriptor: int, routing: bytes, key: bytes) -> list[Caller]:
        """Store the routing id and key that the first message of a connection shows."""
        caller = self._by_descriptor.get(descriptor)
        if caller is None or caller.routing is not None:
            return []
        caller.routing, caller.key = routing, key
        self._by_routing[routing] = caller
        alike = self._by_key.setdefault(key, [])
        alike.append(caller)
        return self._close([one for one in alike if not one.is_closed][:-CONNECTIONS_PER_KEY])

    def count_message(self, caller: Caller, is_member: bool, size_bytes: int, now_s: float) -> list[Caller]:
        """Count a message that is going to be decoded."""
        caller.read_bytes += size_bytes + FRAME_BYTES
        if is_member:
            caller.is_member = True
            self.strangers.remove(caller)
            return []
        closed = self.make_stranger(caller, now_s) if caller.is_member else []
        caller.has_requested = True
        return closed

    def make_stranger(self, caller: Caller, now_s: float) -> list[Caller]:
        """Treat a connection, whose holder is not a member any more, as a stranger's."""
        caller.is_member = caller.has_requested = False
        caller.stranger_since_s, caller.counted_bytes = now_s, self._received_bytes(caller)
        return self._add_stranger(caller)

    def members(self) -> list[Caller]:
        return [one for one in self._by_descriptor.values() if one.is_member and not one.is_closed]

    def close(self, caller: Caller) -> list[Caller]:
        """Mark a connection as closed because it has broken a limit."""
        return self._close([caller])

    def overdue_strangers(self, now_s: float) -> list[Caller]:
        """Strangers that have been connected for too long, or have sent too much."""
        overdue = []
        for caller in self.strangers:
            limit_s = REQUESTING_S if caller.has_requested else STRANGER_S
            too_much = self._received_bytes(caller) - caller.counted_bytes > STRANGER_CONNECTION_BYTES
            if too_much or now_s - caller.stranger_since_s > limit_s:
                overdue.append(caller)
        return self._close(overdue)

    def flooding_members(self) -> list[Caller]:
        """Members whose bytes pile up unread; to be checked often, as libzmq always reads on."""
        waiting: dict[Caller, int] = {}
        for caller in self.members():
            received_bytes = self._received_bytes(caller)
            # The size of framing is an estimate, which must not add up to an allowance.
            caller.read_bytes = min(caller.read_bytes, received_bytes)
            waiting[caller] = received_bytes - caller.read_bytes
        self.waiting_bytes = sum(waiting.values())
        return self._close(excessive_backlogs(waiting, MEMBER_BACKLOG_BYTES, MEMBERS_BACKLOG_BYTES))

    def _add_stranger(self, caller: Caller) -> list[Caller]:
        victim = self.strangers.add(caller, caller.network)
        return [] if victim is None else self._close([victim])

    def _close(self, callers: list[Caller]) -> list[Caller]:
        fresh = [one for one in callers if not one.is_closed]
        for one in fresh:
            one.is_closed = True
            self.strangers.remove(one)
        return fresh

    def _remember_ended(self, routing: bytes) -> None:
        self._ended[routing] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]
