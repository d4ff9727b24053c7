"""Limits for callers that are no members: sizes, rates, connections and times. Time and randomness are arguments.

What one stranger costs is bounded before its bytes are decoded, and what all of them cost is bounded by network, so
that a flood from one place leaves room for newcomers from others, and for those of the same place that behave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)

STRANGER_MESSAGE_BYTES = 2**12
"""Largest message of a non-member: a join takes less than half of it."""

STRANGER_CONNECTION_BYTES = 2**16
"""All that a non-member may send over one connection, undecoded bytes included: libzmq collects the frames of one
message without a limit of their number, so that only the kernel's count of received bytes tells."""

MEMBER_BACKLOG_BYTES = 2**23
"""Bytes of one member's connection that may wait to be read, parts of a message that never ends included: eight times
the largest one."""

MEMBERS_BACKLOG_BYTES = 2**26
"""The same of all members together; the connection with the most is closed first."""

_FRAME_BYTES = 80
"""Of a message on the wire beside its content: CURVE, framing, what the handshake took."""

STRANGER_S = 10.0
"""From connecting until a non-member that asks for nothing is hung up on."""

ASKING_S = 30.0
"""The same for one that has asked for something: a join may take 20 s to be answered, while its sender is dialed."""

KEY_MESSAGES_PER_S, KEY_BURST = 4.0, 32.0
NETWORK_MESSAGES_PER_S, NETWORK_BURST = 50.0, 200.0
"""Messages of non-members that are decoded: a newcomer sends one or two, a member that was given up some more."""

_FIRST_MESSAGES = 4
"""So many of each key may use up what its network may say; further ones leave half of it to others. Else a neighbour
who floods under ever new keys would keep newcomers out."""

MEMBER_BYTES_PER_S, MEMBER_BURST_BYTES = 2.0**19, 2.0**22
"""Bytes of one member's messages that are decoded: a report of a full run's round has 75 kB, and decoding a hostile
megabyte takes up to 0.2 s."""

CONNECTIONS_PER_KEY = 4
"""A process has one connection to another, or one to each address of the invite; of more, the oldest are dead."""

_MOST_STRANGERS = 256
_SAMPLES = 4
_MOST_GONE = 4096
_MOST_BUCKETS = 8192


def strangers_allowed(descriptors: int) -> int:
    """Number of strangers' connections that one listener may have, if the process may have so many files and sockets
    open: the rest is kept for members, files and what this process opens itself."""
    return max(8, min(_MOST_STRANGERS, descriptors // 8))


class TokenBuckets(Generic[K]):
    """One bucket a key. Who takes more than there is gets into debt, at most a burst deep, and is refused until the
    debt is paid. The buckets of those that were silent the longest are forgotten when there are too many."""

    def __init__(self, per_s: float, burst: float, most: int = _MOST_BUCKETS) -> None:
        self._per_s, self._burst, self._most = per_s, burst, most
        self._levels: dict[K, tuple[float, float]] = {}

    def take(self, key: K, tokens: float, now_s: float) -> bool:
        """Whether there was something left; the tokens are taken in any case."""
        level = self.level(key, now_s)
        self._levels.pop(key, None)
        if len(self._levels) >= self._most:
            del self._levels[next(iter(self._levels))]
        self._levels[key] = (max(-self._burst, level - tokens), now_s)
        return level > 0

    def is_in_debt(self, key: K, now_s: float) -> bool:
        return self.level(key, now_s) <= 0

    def level(self, key: K, now_s: float) -> float:
        """Return how many tokens are left; below 0 for a debt."""
        level, since_s = self._levels.get(key, (self._burst, now_s))
        return min(self._burst, level + self._per_s * (now_s - since_s))


class MessageLimits:
    """Decides which messages are worth decoding, by their sender's key and network and their size."""

    def __init__(self, most_message_bytes: int) -> None:
        """``most_message_bytes``: of a member's message."""
        self._most_message_bytes = most_message_bytes
        self._by_key = TokenBuckets[bytes](KEY_MESSAGES_PER_S, KEY_BURST)
        self._by_network = TokenBuckets[str](NETWORK_MESSAGES_PER_S, NETWORK_BURST)
        self._member_bytes = TokenBuckets[bytes](MEMBER_BYTES_PER_S, MEMBER_BURST_BYTES)

    def allows_member(self, key: bytes, size_bytes: int, now_s: float) -> bool:
        return self._member_bytes.take(key, size_bytes, now_s) and size_bytes <= self._most_message_bytes

    def allows_stranger(self, key: bytes, network: str, size_bytes: int, now_s: float) -> bool:
        """Whether to decode it. A message that is too large costs its sender as many tokens as it could have sent
        messages in its place."""
        is_first = self._by_key.level(key, now_s) > KEY_BURST - _FIRST_MESSAGES
        may_speak = self._by_key.take(key, 1 + size_bytes // STRANGER_MESSAGE_BYTES, now_s)
        if not may_speak or size_bytes > STRANGER_MESSAGE_BYTES:
            return False
        # Only then: who floods under one key uses up nothing of its neighbours' share.
        if not is_first and self._by_network.level(network, now_s) <= NETWORK_BURST / 2:
            return False  # what is left is for those who have said next to nothing
        return self._by_network.take(network, 1, now_s)

    def refuses_handshake(self, key: bytes, now_s: float) -> bool:
        """Whether a non-member with that key has said so much that it need not even connect."""
        return self._by_key.is_in_debt(key, now_s)


class StrangerPlaces(Generic[T]):
    """Connections of strangers: bounded in all, and to half of that for one network.

    When there are too many, one of the largest network has to go: of a few that are drawn, the one whose handshake has
    come the least far. Those that only connect push out each other, and a newcomer is safe once it has sent something.
    """

    def __init__(self, most: int, rng: Random, progress: Callable[[T], Any]) -> None:
        """``progress``: how far a connection has come; anything that can be ordered."""
        self.most = most
        self._rng, self._progress = rng, progress
        self._networks: dict[str, dict[T, None]] = {}
        self._network_of: dict[T, str] = {}

    def __contains__(self, one: T) -> bool:
        return one in self._network_of

    def __len__(self) -> int:
        return len(self._network_of)

    def __iter__(self) -> Iterator[T]:
        """Those that have been here the longest first."""
        return iter(self._network_of)

    def add(self, one: T, network: str) -> T | None:
        """Returns the one to close, which may be this one."""
        self._networks.setdefault(network, {})[one] = None
        self._network_of[one] = network
        here = self._networks[network]
        if len(here) > max(1, self.most // 2):
            return self._push_out(here)
        if len(self._network_of) > self.most:
            return self._push_out(max(self._networks.values(), key=len))
        return None

    def remove(self, one: T) -> None:
        network = self._network_of.pop(one, None)
        if network is not None:
            del self._networks[network][one]
            if not self._networks[network]:
                del self._networks[network]

    def _push_out(self, neighbours: dict[T, None]) -> T:
        drawn = self._rng.sample(list(neighbours), min(_SAMPLES, len(neighbours)))
        victim = min(drawn, key=self._progress)
        self.remove(victim)
        return victim


@dataclass(eq=False)
class Caller:
    """A connection that was accepted by the control plane. ``inode`` tells it from a later one of its ``descriptor``,
    and ``routing``, once it has spoken, whose messages are its. ``stranger_since_s``: of one that is no member's."""

    descriptor: int
    inode: int
    network: str
    stranger_since_s: float
    routing: bytes | None = None
    key: bytes = b""
    is_member: bool = False
    has_asked: bool = False
    counted_bytes: int = 0
    """Bytes that had come over it when it became a stranger."""
    read_bytes: int = 0
    """Bytes of it that were read, as far as messages tell."""
    is_closed: bool = False


class Callers:
    """Connections that were accepted, and which of them are to be closed: what is returned is closed by the caller."""

    def __init__(self, most_strangers: int, rng: Random, received_bytes: Callable[[Caller], int]) -> None:
        """``received_bytes``: over a connection so far, by the kernel's count; 0 where nobody can tell."""
        self.strangers = StrangerPlaces[Caller](most_strangers, rng, lambda one: (one.has_asked, received_bytes(one)))
        self._received_bytes = received_bytes
        self._by_descriptor: dict[int, Caller] = {}
        self._by_routing: dict[bytes, Caller] = {}
        self._by_key: dict[bytes, list[Caller]] = {}
        self._gone: dict[bytes, None] = {}
        """Routing ids of the last connections that ended, as messages of theirs may still wait to be read."""

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def connect(self, caller: Caller) -> list[Caller]:
        """One has been accepted: a stranger, until it has said something. Nothing new when it is known."""
        known = self._by_descriptor.get(caller.descriptor)
        if known is not None:
            if known.inode == caller.inode:
                return []
            self._forget(known)
        self._by_descriptor[caller.descriptor] = caller
        return self._take_in(caller)

    def forget_ended(self, is_there: Callable[[Caller], bool]) -> None:
        """Those that are not there any more."""
        for caller in [one for one in self._by_descriptor.values() if not is_there(one)]:
            self._forget(caller)

    def _forget(self, caller: Caller) -> None:
        del self._by_descriptor[caller.descriptor]
        caller.is_closed = True
        self.strangers.remove(caller)
        if caller.routing is not None:
            self._by_routing.pop(caller.routing, None)
            self._remember_gone(caller.routing)
            alike = self._by_key[caller.key]
            alike.remove(caller)
            if not alike:
                del self._by_key[caller.key]

    def speaker(self, routing: bytes) -> Caller | None:
        """Find the caller by its routing id, if it is still there."""
        return self._by_routing.get(routing)

    def has_ended(self, routing: bytes) -> bool:
        return routing in self._gone

    def introduce(self, descriptor: int, routing: bytes, key: bytes) -> list[Caller]:
        """The first message has come over a connection."""
        caller = self._by_descriptor.get(descriptor)
        if caller is None or caller.routing is not None:
            return []
        caller.routing, caller.key = routing, key
        self._by_routing[routing] = caller
        alike = self._by_key.setdefault(key, [])
        alike.append(caller)
        return self._close([one for one in alike if not one.is_closed][:-CONNECTIONS_PER_KEY])

    def hear(self, caller: Caller, is_member: bool, size_bytes: int, now_s: float) -> list[Caller]:
        """A message of it has been read that is worth decoding."""
        caller.read_bytes += size_bytes + _FRAME_BYTES
        if is_member:
            caller.is_member = True
            self.strangers.remove(caller)
            return []
        closed = self.expel(caller, now_s) if caller.is_member else []
        caller.has_asked = True
        return closed

    def expel(self, caller: Caller, now_s: float) -> list[Caller]:
        """It is a member's no more."""
        caller.is_member = caller.has_asked = False
        caller.stranger_since_s, caller.counted_bytes = now_s, self._received_bytes(caller)
        return self._take_in(caller)

    def members(self) -> list[Caller]:
        return [one for one in self._by_descriptor.values() if one.is_member and not one.is_closed]

    def close(self, caller: Caller) -> list[Caller]:
        """It has broken a limit."""
        return self._close([caller])

    def overdue_strangers(self, now_s: float) -> list[Caller]:
        """Those that have been here for too long, or have sent too much."""
        overdue = []
        for caller in self.strangers:
            limit_s = ASKING_S if caller.has_asked else STRANGER_S
            too_much = self._received_bytes(caller) - caller.counted_bytes > STRANGER_CONNECTION_BYTES
            if too_much or now_s - caller.stranger_since_s > limit_s:
                overdue.append(caller)
        return self._close(overdue)

    def flooding_members(self) -> list[Caller]:
        """Those whose bytes pile up unread. To be asked about often: libzmq reads on, however many wait."""
        waiting: dict[Caller, int] = {}
        for caller in self.members():
            received_bytes = self._received_bytes(caller)
            # What messages take on the wire was estimated: nothing is saved up by that for later.
            caller.read_bytes = min(caller.read_bytes, received_bytes)
            waiting[caller] = received_bytes - caller.read_bytes
        total_bytes, flooding = sum(waiting.values()), []
        for caller in sorted(waiting, key=lambda one: -waiting[one]):
            if waiting[caller] <= MEMBER_BACKLOG_BYTES and total_bytes <= MEMBERS_BACKLOG_BYTES:
                break
            flooding.append(caller)
            total_bytes -= waiting[caller]
        return self._close(flooding)

    def _take_in(self, caller: Caller) -> list[Caller]:
        victim = self.strangers.add(caller, caller.network)
        return [] if victim is None else self._close([victim])

    def _close(self, callers: list[Caller]) -> list[Caller]:
        fresh = [one for one in callers if not one.is_closed]
        for one in fresh:
            one.is_closed = True
            self.strangers.remove(one)
        return fresh

    def _remember_gone(self, routing: bytes) -> None:
        self._gone[routing] = None
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
