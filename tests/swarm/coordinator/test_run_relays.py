"""The run's relays: the host's own first, then what members offer, as long as they are there and renew it."""

from shoal.swarm.coordinator.run_relays import _MAX_OFFERS, RunRelays
from shoal.swarm.protocol.identity import Identity
from shoal.swarm.protocol.paths import RELAY_OFFER_S, SignedRelay, sign_relay
from shoal.swarm.protocol.types import MAX_RUN_RELAYS, Address, RelayLoad

HOST = Identity.generate()
IDLE, FULL = RelayLoad(links=3), RelayLoad(busy=0.95)


def peer(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    return (letters[number // 32] + letters[number % 32]) * 8


A, B, C, D = map(peer, range(4))


def relay(number: int) -> SignedRelay:
    return sign_relay(HOST.sign, b"r" * 32, bytes([number]) * 32, (f"192.0.2.{number}", 7709), of_member=number > 0)


class Own:
    def named(self) -> tuple[SignedRelay, ...]:
        return (relay(0),)

    def loads(self) -> tuple[tuple[Address, RelayLoad | None], ...]:
        return ((relay(0).address, None),)


def relays() -> RunRelays:
    made = RunRelays()
    made.host = Own()
    return made


def test_members_relays_come_after_the_hosts_in_the_order_in_which_they_joined() -> None:
    run = relays()
    assert run.offer(B, relay(2), IDLE, 0.0)
    assert run.offer(A, relay(1), IDLE, 0.0)
    members = {A: True, B: True, C: True}
    assert run.named(members, 1.0) == (relay(0), relay(1), relay(2))
    run.offer(A, relay(1), FULL, 1.0)
    assert run.named(members, 1.0) == (relay(0), relay(2), relay(1)), "a full one is named last"
    assert [(one.peer, one.load) for one in run.statuses(members, 1.0)] == [(None, None), (A, FULL), (B, IDLE)]


def test_an_offer_ends_with_its_time_its_member_and_its_withdrawal() -> None:
    run = relays()
    for number, name in enumerate((A, B, C, D), 1):
        run.offer(name, relay(number), IDLE, 0.0 if name == A else 1.0)
    members = dict.fromkeys((A, B, C, D), True)
    assert run.named(members, RELAY_OFFER_S) == (relay(0), relay(2), relay(3), relay(4))
    run.withdraw(B)
    assert run.named(members | {C: False}, RELAY_OFFER_S) == (relay(0), relay(4)), "nobody can dial its member"
    assert run.named(members, RELAY_OFFER_S) == (relay(0), relay(3), relay(4))
    del members[C]
    run.named(members, RELAY_OFFER_S)
    assert run.named(members | {C: True}, RELAY_OFFER_S) == (relay(0), relay(4)), "it has left, and came back"


def test_more_are_known_than_are_named_and_no_more_than_there_is_room_for() -> None:
    run, members = relays(), {peer(number): True for number in range(_MAX_OFFERS + 1)}
    for number, name in enumerate(members):
        assert run.offer(name, relay(1 + number), IDLE, 0.0) is (number < _MAX_OFFERS)
    assert len(run.named(members, 0.0)) == len(run.statuses(members, 0.0)) == MAX_RUN_RELAYS
    assert len(run.known(members, 0.0)) == 1 + _MAX_OFFERS
    assert run.offer(peer(0), relay(1), FULL, 0.0), "one that is known is renewed"
