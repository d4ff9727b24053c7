"""Choice among relays: near and idle ones, those in use before others, dead ones last."""

from shoal.swarm.protocol.types import Address, RelayLoad
from shoal.swarm.transport.relay.choice import RelayMeasure, choose


def relay(number: int) -> Address:
    return Address(kind="relayed", host=f"192.0.2.{number}", control_port=7000, relay_key=bytes([number]) * 32)


def measured(trip_s: float, busy: float = 0.0) -> RelayMeasure:
    return RelayMeasure(trip_s, RelayLoad(busy=busy))


A, B, C = relay(1), relay(2), relay(3)


def test_the_nearest_relays_are_chosen() -> None:
    assert choose({A: measured(0.2), B: measured(0.02), C: measured(0.05)}, (), 2) == (B, C)
    assert choose({A: measured(0.05), B: measured(0.05)}, (), 2) == (A, B), "the run's order decides"


def test_a_busy_relay_is_as_good_as_one_further_away() -> None:
    assert choose({A: measured(0.02, busy=0.9), B: measured(0.1)}, (), 1) == (B,)
    assert choose({A: measured(0.02, busy=0.5), B: measured(0.1)}, (), 1) == (A,)


def test_relays_in_use_stay_unless_another_one_is_far_better() -> None:
    slow, better, best = measured(0.1), measured(0.06), measured(0.01)
    assert choose({A: slow, B: slow, C: better}, (B, A), 2) == (B, A)
    assert choose({A: slow, B: slow, C: best}, (B, A), 2) == (C, B)
    assert choose({A: better, B: slow}, (B, A), 2) == (B, A), "and in their order"
    assert choose({A: best, B: slow}, (B, A), 2) == (A, B)


def test_a_dead_relay_is_taken_only_where_there_are_too_few() -> None:
    assert choose({A: None, B: measured(0.3), C: measured(0.2)}, (A,), 2) == (C, B)
    assert choose({A: None, B: measured(0.3)}, (A,), 2) == (B, A)
