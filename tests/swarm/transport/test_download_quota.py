"""Quotas of downloads, on a clock that is an argument."""

from contextlib import ExitStack, suppress

import pytest

from shoal.swarm.errors import Busy
from shoal.swarm.transport.limits.download_quota import (
    BEGIN_STATES,
    IDLE_GUEST_S,
    LEAST_STATE_BYTES,
    MAX_GUESTS,
    DownloadQuota,
    Reader,
)

STATE = 2**30
CHUNK = 2**20
HOUR_S = 3600.0
MARGIN = 2 * BEGIN_STATES + 2 * CHUNK / STATE


def trainer(number: int, network: str = "10.0.0.0/24") -> Reader:
    return Reader(f"trainer {number}", network)


def guest(number: int) -> Reader:
    return Reader(f"guest {number}", "10.0.0.0/24", is_guest=True)


def download(
    quota: DownloadQuota,
    reader: Reader,
    now_s: float = 0.0,
    uplink_bps: float = 0.0,
    state: int = STATE,
    most: int = 100,
) -> float:
    """Download until it is refused, or ``most`` states; returns the states' worth that was sent."""
    sent = 0
    with suppress(Busy), quota.place(reader, state, uplink_bps, now_s):
        while sent < most * state:
            quota.take(reader, CHUNK, state, uplink_bps, now_s)
            sent += CHUNK
    return sent / state


def test_a_trainer_may_begin_again_twice_and_then_once_an_hour() -> None:
    quota = DownloadQuota()
    assert download(quota, trainer(1), most=3) == 3.0, "nothing of three states is refused"
    assert download(quota, trainer(1)) <= MARGIN
    assert download(quota, trainer(1), HOUR_S) == pytest.approx(1.0, abs=MARGIN)
    assert download(quota, trainer(1), 1000 * HOUR_S) == pytest.approx(3.0, abs=MARGIN)


def test_identities_of_one_network_share_its_quota_and_other_networks_have_their_own() -> None:
    quota = DownloadQuota()
    assert sum(download(quota, trainer(number)) for number in range(100)) == pytest.approx(16.0, abs=MARGIN)
    assert sum(download(quota, trainer(number), HOUR_S) for number in range(100, 200)) == pytest.approx(8.0, abs=MARGIN)
    assert download(quota, trainer(1, "10.0.1.0/24"), HOUR_S, most=1) == 1.0


def test_a_guest_downloads_one_state_and_all_guests_a_share_of_the_uplink() -> None:
    quota, uplink_bps = DownloadQuota(), 100e6
    assert download(quota, guest(1), most=1) == 1.0
    assert sum(download(quota, guest(number), 0.0, uplink_bps) for number in range(1, 50)) <= MARGIN
    share = 0.05 * uplink_bps / 8 * 600.0 / STATE
    sent = sum(download(quota, guest(number), 600.0, uplink_bps) for number in range(50, 100))
    assert sent == pytest.approx(share, abs=MARGIN)
    assert download(quota, trainer(1), 600.0, most=1) == 1.0, "guests take nothing from those who train"


def test_one_guest_gets_no_more_than_a_state_an_hour_whatever_the_uplink() -> None:
    quota = DownloadQuota()
    assert download(quota, guest(1), 0.0, 1e12) == pytest.approx(1.0, abs=MARGIN)
    assert download(quota, guest(1), HOUR_S, 1e12) == pytest.approx(1.0, abs=MARGIN)


def test_guests_take_no_more_than_their_share_of_a_slow_uplink() -> None:
    quota, uplink_bps = DownloadQuota(), 10e6
    assert download(quota, guest(0), 0.0, uplink_bps) == pytest.approx(1.0, abs=MARGIN)
    share = 0.05 * uplink_bps / 8 * 4 * HOUR_S / STATE
    assert share < 1.0
    sent = sum(download(quota, guest(number), 4 * HOUR_S, uplink_bps) for number in range(1, 50))
    assert sent == pytest.approx(share, abs=MARGIN)


@pytest.mark.parametrize("reader", [trainer(1), guest(1)])
@pytest.mark.parametrize("state", [STATE, LEAST_STATE_BYTES // 4])
def test_who_has_used_up_its_quota_begins_again_with_a_whole_state(reader: Reader, state: int) -> None:
    """Otherwise it would get a part of each version, and no version to its end, as long as it asks."""
    quota = DownloadQuota()
    download(quota, reader, state=state)
    asked_s = [60.0 * minute for minute in range(1, 70)]
    parts = [download(quota, reader, now_s, 1e9, state) for now_s in asked_s]
    assert max(parts) >= 1.0
    assert all(one == 0.0 or one >= 1.0 for one in parts)


def test_a_refusal_says_when_a_stream_may_begin_again() -> None:
    quota = DownloadQuota()
    download(quota, trainer(1))
    with pytest.raises(Busy, match="again in") as refused, quota.place(trainer(1), STATE, 0.0, 0.0):
        pass
    later_s = refused.value.retry_s
    assert download(quota, trainer(1), later_s - 1.0) == 0.0
    assert download(quota, trainer(1), later_s + 1.0) >= 1.0


def test_two_guests_at_a_time_whatever_the_number_of_their_streams() -> None:
    quota = DownloadQuota()
    places = [quota.place(guest(number % MAX_GUESTS), STATE, 0.0, 0.0) for number in range(4)]
    for place in places:
        place.__enter__()
    with pytest.raises(Busy), quota.place(guest(7), STATE, 0.0, 0.0):
        pass
    with quota.place(trainer(7), STATE, 0.0, 0.0):
        pass
    for place in places:
        place.__exit__(None, None, None)
    with quota.place(guest(7), STATE, 0.0, 0.0):
        pass


def test_small_states_count_little_so_that_peers_of_small_runs_may_crash_on_and_on() -> None:
    small = LEAST_STATE_BYTES // 16
    assert download(DownloadQuota(), trainer(1), state=small) == pytest.approx(16 * (3 + 2 * BEGIN_STATES), abs=1)


def test_a_guest_that_takes_nothing_loses_its_place_to_one_that_asks() -> None:
    quota = DownloadQuota()
    later_s = IDLE_GUEST_S + 1.0
    with ExitStack() as places:
        for number in range(MAX_GUESTS):
            places.enter_context(quota.place(guest(number), STATE, 1e9, 0.0))
        quota.take(guest(1), CHUNK, STATE, 1e9, 2.0)
        with pytest.raises(Busy, match="being served"):
            places.enter_context(quota.place(guest(9), STATE, 1e9, IDLE_GUEST_S))
        places.enter_context(quota.place(guest(9), STATE, 1e9, later_s))
        with pytest.raises(Busy, match="being served"):
            places.enter_context(quota.place(guest(8), STATE, 1e9, later_s))
        with pytest.raises(Busy, match="took nothing"):
            quota.take(guest(0), CHUNK, STATE, 1e9, later_s)
        for number in (1, 9):
            quota.take(guest(number), CHUNK, STATE, 1e9, later_s)
    places = ExitStack()
    with places:
        for number in range(MAX_GUESTS):
            places.enter_context(quota.place(guest(20 + number), STATE, 1e9, later_s))
