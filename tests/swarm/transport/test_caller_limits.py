import random
from dataclasses import dataclass, field

from shoal.swarm.token_buckets import TokenBuckets
from shoal.swarm.transport.limits.caller_limits import (
    CONNECTIONS_PER_KEY,
    FRAME_BYTES,
    KEY_BURST,
    KEY_MESSAGES_PER_S,
    MEMBER_BACKLOG_BYTES,
    MEMBER_BURST_BYTES,
    MEMBERS_BACKLOG_BYTES,
    NETWORK_BURST,
    REQUESTING_S,
    STRANGER_CONNECTION_BYTES,
    STRANGER_MESSAGE_BYTES,
    STRANGER_S,
    Caller,
    Callers,
    MessageLimits,
    StrangerPlaces,
    strangers_allowed,
)

MEMBER_MESSAGE_BYTES = 2**20
HERE, THERE = "198.51.100.0/24", "203.0.113.0/24"


def test_places_grow_with_the_descriptors_and_leave_most_to_members() -> None:
    assert strangers_allowed(256) == 32
    assert strangers_allowed(10) == 8
    assert strangers_allowed(2**20) == strangers_allowed(8192) == 256


# Buckets ------------------------------------------------------------------------------------------------


def test_a_bucket_gives_a_burst_and_then_its_rate() -> None:
    buckets = TokenBuckets[str](per_s=2.0, burst=3.0)
    assert [buckets.take("a", 1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert buckets.is_in_debt("a", 0.4)
    assert not buckets.is_in_debt("b", 0.4)
    assert buckets.take("a", 1, 1.1)
    assert buckets.take("b", 1, 0.0)


def test_debts_are_no_deeper_than_a_burst() -> None:
    buckets = TokenBuckets[str](per_s=1.0, burst=3.0)
    assert buckets.take("a", 10**9, 0.0)
    assert not buckets.take("a", 1, 2.9)
    assert not buckets.is_in_debt("a", 7.0)


def test_buckets_are_bounded_in_number() -> None:
    buckets = TokenBuckets[int](per_s=1.0, burst=1.0, most=3)
    for key in range(10):
        buckets.take(key, 2, 0.0)
    assert [buckets.is_in_debt(key, 0.0) for key in range(10)] == [False] * 7 + [True] * 3


# Messages -----------------------------------------------------------------------------------------------


def test_a_stranger_says_little_and_seldom() -> None:
    limits = MessageLimits(MEMBER_MESSAGE_BYTES)
    assert limits.allows_stranger(b"join", HERE, 1200, 0.0)
    assert not limits.allows_stranger(b"large", HERE, STRANGER_MESSAGE_BYTES + 1, 0.0)
    said = sum(limits.allows_stranger(b"chatty", HERE, 100, 0.0) for _ in range(1000))
    assert said == KEY_BURST
    assert limits.refuses_handshake(b"chatty", 0.0)
    assert not limits.refuses_handshake(b"join", 0.0)
    assert not limits.refuses_handshake(b"chatty", 2 * KEY_BURST / KEY_MESSAGES_PER_S)


def test_large_messages_cost_their_sender_more() -> None:
    limits = MessageLimits(MEMBER_MESSAGE_BYTES)
    for _ in range(4):
        assert not limits.allows_stranger(b"large", HERE, 8 * STRANGER_MESSAGE_BYTES, 0.0)
    assert limits.refuses_handshake(b"large", 0.0)


def test_who_floods_under_one_key_uses_up_nothing_of_its_neighbours() -> None:
    limits = MessageLimits(MEMBER_MESSAGE_BYTES)
    for _ in range(10_000):
        limits.allows_stranger(b"chatty", HERE, 100, 0.0)
    assert limits.allows_stranger(b"newcomer", HERE, 1000, 0.0)


def test_who_floods_under_ever_new_keys_leaves_room_for_its_neighbours() -> None:
    """Eight at a time, each as much as a key may say in a second."""
    limits = MessageLimits(MEMBER_MESSAGE_BYTES)
    for second in range(60):
        for flooder in range(8):
            key = f"{second} {flooder}".encode()
            assert sum(limits.allows_stranger(key, HERE, 100, second) for _ in range(30)) >= 4
        newcomer = f"newcomer {second}".encode()
        assert all(limits.allows_stranger(newcomer, HERE, 1000, second) for _ in range(3))


def test_many_keys_of_one_network_share_what_it_may_say() -> None:
    limits = MessageLimits(MEMBER_MESSAGE_BYTES)
    said = sum(limits.allows_stranger(key.to_bytes(32), HERE, 100, 0.0) for key in range(1000))
    assert said == NETWORK_BURST
    assert limits.allows_stranger(b"newcomer", THERE, 1000, 0.0)
    assert limits.allows_member(b"member", 100_000, 0.0)


def test_members_may_say_much_but_not_without_end() -> None:
    limits = MessageLimits(MEMBER_MESSAGE_BYTES)
    assert not limits.allows_member(b"a", MEMBER_MESSAGE_BYTES + 1, 0.0)
    taken = sum(limits.allows_member(b"b", MEMBER_MESSAGE_BYTES, 0.0) for _ in range(100))
    assert taken == MEMBER_BURST_BYTES / MEMBER_MESSAGE_BYTES
    assert limits.allows_member(b"b", MEMBER_MESSAGE_BYTES, 60.0)


# Places -------------------------------------------------------------------------------------------------


def test_the_largest_network_makes_room() -> None:
    places = StrangerPlaces[int](8, random.Random(0), lambda one: 0)
    for number in range(3):
        assert places.add(1000 + number, THERE) is None
    pushed = [places.add(number, HERE) for number in range(100)]
    assert [one is None for one in pushed[:4]] == [True] * 4
    assert all(one is not None and one < 100 for one in pushed[4:])
    assert all(one in places for one in (1000, 1001, 1002))
    assert len(places) == 7
    for number in range(1, 60):
        places.add(10_000 + number, f"{number}.0.0.0/24")
    assert len(places) == 8


def test_who_has_got_further_stays() -> None:
    progress = {0: 500}
    places = StrangerPlaces[int](32, random.Random(0), lambda one: progress.get(one, 0))
    for number in range(2000):
        places.add(number, HERE)
    assert 0 in places
    assert len(places) == 16


def test_places_are_free_again() -> None:
    places = StrangerPlaces[int](2, random.Random(0), lambda one: 0)
    for number in range(100):
        assert places.add(number, HERE) is None
        places.remove(number)
        places.remove(number)
    assert not places


# Callers ------------------------------------------------------------------------------------------------


@dataclass
class Port:
    """The control plane's, without sockets."""

    received: dict[int, int] = field(default_factory=dict)
    callers: Callers = field(init=False)

    def __post_init__(self) -> None:
        self.callers = Callers(8, random.Random(0), lambda one: self.received.get(one.inode, 0))

    def accept(self, descriptor: int, inode: int, now_s: float = 0.0, network: str = HERE) -> Caller:
        caller = Caller(descriptor, inode, network, now_s)
        self.callers.add(caller)
        return caller

    def hear(
        self, caller: Caller, routing: bytes, key: bytes, now_s: float, *, is_member: bool, size_bytes: int = 0
    ) -> list[Caller]:
        closed = self.callers.identify(caller.descriptor, routing, key)
        assert self.callers.find(routing) is caller
        return closed + self.callers.count_message(caller, is_member, size_bytes, now_s)


def test_who_asks_for_nothing_is_hung_up_on() -> None:
    port = Port()
    mute, asks, member = (port.accept(number, number) for number in range(3))
    port.hear(asks, b"1", b"asks", 1.0, is_member=False)
    port.hear(member, b"2", b"member", 1.0, is_member=True)
    assert port.callers.overdue_strangers(STRANGER_S) == []
    assert port.callers.overdue_strangers(STRANGER_S + 0.1) == [mute]
    assert port.callers.overdue_strangers(REQUESTING_S + 0.1) == [asks]
    assert port.callers.overdue_strangers(1e6) == []
    assert not member.is_closed


def test_who_sends_more_than_a_stranger_has_to_say_is_hung_up_on() -> None:
    port = Port()
    caller = port.accept(5, 50)
    port.received[50] = STRANGER_CONNECTION_BYTES + 1
    assert port.callers.overdue_strangers(0.1) == [caller]


def test_a_member_no_more_has_a_strangers_time_from_then_on() -> None:
    port = Port()
    caller = port.accept(5, 50)
    port.hear(caller, b"1", b"key", 0.0, is_member=True)
    port.received[50] = 10**9
    port.callers.make_stranger(caller, 1000.0)
    assert port.callers.overdue_strangers(1000.0 + STRANGER_S) == []
    assert port.callers.overdue_strangers(1000.1 + STRANGER_S) == [caller]


def test_a_member_whose_bytes_are_read_is_not_flooding() -> None:
    port = Port()
    caller = port.accept(1, 10)
    for _ in range(3):
        port.received[10] = port.received.get(10, 0) + 2 * MEMBER_BACKLOG_BYTES
        port.hear(caller, b"1", b"1", 0.0, is_member=True, size_bytes=2 * MEMBER_BACKLOG_BYTES)
        assert port.callers.flooding_members() == []


def test_bytes_of_a_member_that_pile_up_unread() -> None:
    port = Port()
    busy, floods = port.accept(1, 10), port.accept(2, 20)
    for caller in (busy, floods):
        port.hear(caller, b"%d" % caller.inode, b"%d" % caller.inode, 0.0, is_member=True)
    port.received |= {10: MEMBER_BACKLOG_BYTES // 2, 20: MEMBER_BACKLOG_BYTES}
    assert port.callers.flooding_members() == []
    assert port.callers.waiting_bytes == 3 * MEMBER_BACKLOG_BYTES // 2 - 2 * FRAME_BYTES
    port.received[20] += 2**10
    assert port.callers.flooding_members() == [floods]


def test_estimated_bytes_are_not_saved_up_for_a_flood() -> None:
    port = Port()
    caller = port.accept(1, 10)
    for _ in range(3):  # messages that took less on the wire than was estimated
        port.hear(caller, b"1", b"1", 0.0, is_member=True, size_bytes=MEMBER_BACKLOG_BYTES)
        assert port.callers.flooding_members() == []
    port.received[10] = MEMBER_BACKLOG_BYTES + 1
    assert port.callers.flooding_members() == [caller]


def test_members_that_together_leave_too_much_unread() -> None:
    port = Port()
    share = MEMBERS_BACKLOG_BYTES // 10
    callers = []
    for number in range(1, 12):
        caller, name = port.accept(number, number), b"%d" % number
        port.hear(caller, name, name, 0.0, is_member=True)
        callers.append(caller)
        port.received[caller.inode] = share
    port.received[3] = share + 2**10
    assert share + 2**10 < MEMBER_BACKLOG_BYTES
    assert port.callers.flooding_members() == [callers[2]]


def test_one_key_has_few_connections() -> None:
    port = Port()
    callers, closed = [], []
    for number in range(CONNECTIONS_PER_KEY + 2):
        callers.append(port.accept(number, number))
        closed += port.hear(callers[-1], b"%d" % number, b"key", 0.0, is_member=True)
    assert closed == callers[:2]


def test_a_descriptor_that_is_another_connections_now() -> None:
    port = Port()
    earlier = port.accept(7, 70)
    port.hear(earlier, b"earlier", b"a", 0.0, is_member=False)
    later = port.accept(7, 71)
    assert earlier.is_closed
    assert port.callers.has_ended(b"earlier"), "what is left of its messages is not the new connection's"
    assert port.callers.find(b"earlier") is None
    port.hear(later, b"later", b"b", 0.0, is_member=True)
    assert port.callers.add(Caller(7, 71, HERE, 0.0)) == [], "the monitor's word may come after the first message"
    assert port.callers.find(b"later") is later
    port.callers.forget_ended_strangers(lambda one: False)
    assert len(port.callers) == 1, "it is a member's"
    port.callers.forget_ended(lambda one: one.inode != 71)
    assert len(port.callers) == 0
    assert port.callers.has_ended(b"later")


def test_members_are_never_pushed_out() -> None:
    port = Port()
    member = port.accept(1, 1)
    port.hear(member, b"m", b"m", 0.0, is_member=True)
    for number in range(2, 500):
        port.accept(number, number)
    assert not member.is_closed
    assert len(port.callers.strangers) == 4
