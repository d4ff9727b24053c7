"""Token buckets, on a clock that is an argument."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.token_buckets import MAX_BUCKETS, TokenBuckets


def test_a_key_in_debt_waits_until_it_is_paid() -> None:
    buckets = TokenBuckets[str](per_s=2.0, burst=3.0)
    assert buckets.take("a", 5.0, 0.0)
    assert buckets.is_in_debt("a", 0.5)
    assert buckets.wait_s("a", 1.0, 0.0) == 1.5
    assert buckets.wait_s("a", 100.0, 0.0) == 2.5, "more than a burst is never there"
    assert buckets.wait_s("b", 3.0, 0.0) == 0.0
    assert buckets.level("a", -1.0) == -2.0, "a clock that goes back gives nothing and takes nothing"


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 30)), max_size=60), st.integers(1, 20))
def test_no_bucket_gives_more_than_a_burst_and_its_rate(takes: list[tuple[int, float]], per_minute: int) -> None:
    buckets, now_s = TokenBuckets[int](per_minute / 60, per_minute), 0.0
    counts = [0] * 6
    for key, later_s in takes:
        now_s += later_s
        if buckets.wait_s(key, 1, now_s) == 0:
            buckets.take(key, 1, now_s)
            counts[key] += 1
        assert counts[key] <= per_minute * (1 + now_s / 60) + 1e-6
        assert buckets.wait_s(key, 1, now_s + buckets.wait_s(key, 1, now_s) + 1e-6) == 0


def test_buckets_of_very_many_keys_take_bounded_memory() -> None:
    buckets = TokenBuckets[int](1.0, 1.0)
    for number in range(2 * MAX_BUCKETS):
        buckets.take(number, 1.0, float(number))
    assert len(buckets) == MAX_BUCKETS
