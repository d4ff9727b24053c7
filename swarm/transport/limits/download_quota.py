"""Quota of downloads: how much of its states and records a donor sends to whom.

Downloading costs a peer nothing, and a donor the uplink that its rounds need. So readers are told apart: a member that
trains may begin again a few times; all that come from one network share a larger quota, as identities cost little; and
guests, who bring nothing, get what the others hardly notice. All is counted in states, whatever the size of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from shoal.swarm.errors import Busy
from shoal.swarm.token_buckets import MAX_BUCKETS, TokenBuckets

TRAINER_STATES, TRAINER_STATES_AN_HOUR = 3.0, 1.0
"""Of one member: its first download, and two that it had to begin again."""

NETWORK_STATES, NETWORK_STATES_AN_HOUR = 16.0, 8.0
"""Of all members of one network (IPv4 /24, IPv6 /48): a laboratory that starts its machines together."""

GUEST_STATES, GUEST_STATES_AN_HOUR = 1.0, 1.0
"""Of one guest: who only looks at the run."""

GUESTS_STATES, GUESTS_SHARE = 1.0, 0.05
"""Of all guests together: one state at once, then this share of the uplink, or as much as one guest where that is not
known yet."""

MAX_GUESTS = 2
"""Guests that are served at the same time: most of a donor's places are for those who come to train."""

IDLE_GUEST_S = 60.0
"""Time without a chunk after which a guest's place goes to another one that asks for it: a guest that takes nothing
would keep all others out for ever."""

LEAST_STATE_BYTES = 2**24
"""Smaller states count as much as their share of this many bytes: nobody notices how often they are fetched, and a
small run whose peers crash again and again goes on."""

BEGIN_STATES = 1 / 16
"""A stream begins only with so much left: readers come back in a while, not for each chunk, and who has used up its
quota does not make a donor write the state to its disk. Each quota has twice that on top, for digests, and chunks that
are sent twice. A reader that has used up its own quota begins again with a whole state: rounds go on, so it would have
a part of each version and never one to its end."""

_HOUR_S = 3600.0


class Reader(NamedTuple):
    """Who downloads. ``peer``: its peer id; ``network``: where its connections come from."""

    peer: str
    network: str = ""
    is_guest: bool = False


class DownloadQuota:
    """Quota of one donor. Not kept on disk: it begins anew with the process.

    ``state_bytes``: size of the state that something is part of; ``uplink_bps``: the donor's, as far as it is known."""

    def __init__(self) -> None:
        self._trainers = _buckets(TRAINER_STATES, TRAINER_STATES_AN_HOUR)
        self._networks = _buckets(NETWORK_STATES, NETWORK_STATES_AN_HOUR)
        self._each_guest = _buckets(GUEST_STATES, GUEST_STATES_AN_HOUR)
        self._all_guests = _buckets(GUESTS_STATES, GUEST_STATES_AN_HOUR)
        self._served_guests = Counter[str]()
        self._guests_used_s: dict[str, float] = {}
        """By guest that is served, when it got its place or was last sent anything."""
        self._spent: set[str] = set()
        """Readers that have used up their own quotas and have not begun again."""

    @contextmanager
    def place(self, reader: Reader, state_bytes: int, uplink_bps: float, now_s: float) -> Iterator[None]:
        """Hold a place while a stream is sent. Raises ``Busy`` where little quota is left, and for a guest when enough
        others are served."""
        self._know_uplink(state_bytes, uplink_bps)
        self._refuse(reader, self._wait_s(reader, state_bytes, now_s))
        self._spent.discard(reader.peer)
        if not reader.is_guest:
            yield
            return
        if reader.peer not in self._guests_used_s and len(self._guests_used_s) >= MAX_GUESTS:
            idle, used_s = min(self._guests_used_s.items(), key=lambda one: one[1])
            if now_s - used_s <= IDLE_GUEST_S:
                raise Busy(f"{MAX_GUESTS} guests are being served here; ask again")
            del self._guests_used_s[idle]  # its streams end when it asks for more
        self._guests_used_s[reader.peer] = now_s
        self._served_guests[reader.peer] += 1
        try:
            yield
        finally:
            self._served_guests[reader.peer] -= 1
            if not self._served_guests[reader.peer]:
                del self._served_guests[reader.peer]
                self._guests_used_s.pop(reader.peer, None)

    def take(self, reader: Reader, size_bytes: int, state_bytes: int, uplink_bps: float, now_s: float) -> None:
        """Count so many bytes. Raises ``Busy``, and counts nothing, where the quota is used up."""
        self._know_uplink(state_bytes, uplink_bps)
        if reader.peer in self._served_guests:
            if reader.peer not in self._guests_used_s:
                raise Busy("another guest has the place of this one, which took nothing; ask again")
            self._guests_used_s[reader.peer] = now_s
        (own, peer), (shared, key) = self._of(reader)
        if own.is_in_debt(peer, now_s):
            if len(self._spent) >= MAX_BUCKETS:
                self._spent.clear()
            self._spent.add(peer)
        if peer in self._spent or shared.is_in_debt(key, now_s):
            self._refuse(reader, self._wait_s(reader, state_bytes, now_s))
        for buckets, key in self._of(reader):
            buckets.take(key, size_bytes / max(state_bytes, LEAST_STATE_BYTES), now_s)

    def _know_uplink(self, state_bytes: int, uplink_bps: float) -> None:
        share_per_s = GUESTS_SHARE * uplink_bps / 8 / max(state_bytes, LEAST_STATE_BYTES)
        self._all_guests.per_s = share_per_s or GUEST_STATES_AN_HOUR / _HOUR_S

    def _of(self, reader: Reader) -> tuple[tuple[TokenBuckets[str], str], tuple[TokenBuckets[str], str]]:
        """Return the reader's own quota and the one that it shares, with its key in each."""
        if reader.is_guest:
            return (self._each_guest, reader.peer), (self._all_guests, "")
        return (self._trainers, reader.peer), (self._networks, reader.network)

    def _wait_s(self, reader: Reader, state_bytes: int, now_s: float) -> float:
        (own, peer), (shared, key) = self._of(reader)
        whole = min(1.0, state_bytes / LEAST_STATE_BYTES)
        needed = max(BEGIN_STATES, whole) if peer in self._spent else BEGIN_STATES
        return max(own.wait_s(peer, needed, now_s), shared.wait_s(key, BEGIN_STATES, now_s))

    def _refuse(self, reader: Reader, wait_s: float) -> None:
        """Raise ``Busy``, which says when there will be quota again, unless there is some."""
        if wait_s > 0:
            whose = "guests" if reader.is_guest else "you, or others of your network,"
            raise Busy(
                f"{whose} have downloaded as much of the state as this peer sends for now; ask another peer, or again "
                f"in {max(1.0, wait_s):.0f} s",
                wait_s,
            )


def _buckets(states: float, states_an_hour: float) -> TokenBuckets[str]:
    return TokenBuckets(states_an_hour / _HOUR_S, states + 2 * BEGIN_STATES)
