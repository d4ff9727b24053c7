"""The decision whether a machine is lent, on a virtual clock."""

from datetime import datetime, timedelta, timezone

from shoal.peer.guest.gate import (
    BUSY_S,
    IN_USE_S,
    MAINS_S,
    QUIET_S,
    Observation,
    OwnerPause,
    OwnerWatch,
    Pause,
    pause_of,
)
from shoal.peer.guest.terms import Power, Terms, parse_hours

ZONE = timezone(timedelta(hours=1))
NOON = datetime(2026, 11, 26, 12, 0, tzinfo=ZONE)


def reason(terms: Terms, local: datetime = NOON, month_bytes: int = 0, owner: OwnerWatch | None = None) -> str:
    found = pause_of(terms, local, month_bytes, owner or OwnerWatch())
    return found.reason if found else ""


def test_without_terms_a_machine_is_always_lent() -> None:
    used = OwnerWatch()
    used.observe(Observation(on_battery=True, input_s=0.0, other_load=1.0), 0.0)
    assert reason(Terms(), month_bytes=10**15, owner=used) == ""


def test_hours() -> None:
    terms = Terms(hours=parse_hours("22-7"))
    found = pause_of(terms, NOON, 0, OwnerWatch())
    assert found == Pause("it is lent at 22-7", "22:00")
    assert found.words == "until 22:00"
    assert pause_of(terms, NOON + timedelta(hours=10), 0, OwnerWatch()) is None
    assert pause_of(terms, NOON + timedelta(hours=18, minutes=59), 0, OwnerWatch()) is None
    assert pause_of(terms, NOON + timedelta(hours=19), 0, OwnerWatch()) is not None


def test_monthly_data_is_used_up_until_the_next_month() -> None:
    terms = Terms(monthly_bytes=1000)
    assert pause_of(terms, NOON, 999, OwnerWatch()) is None
    assert pause_of(terms, NOON, 1000, OwnerWatch()) == Pause("the month's data is used up", "1 December")
    december = datetime(2026, 12, 31, 23, 0, tzinfo=ZONE)
    found = pause_of(terms, december, 1000, OwnerWatch())
    assert found is not None
    assert found.until == "00:00"


def test_the_owner_pauses_for_a_while_or_until_resumed() -> None:
    owner = OwnerWatch()
    ever = pause_of(Terms(), NOON, 0, owner, OwnerPause())
    assert ever is not None
    assert ever.until == "its owner resumes it"
    until = OwnerPause(NOON.timestamp() + 3600)
    assert pause_of(Terms(), NOON, 0, owner, until) == Pause("its owner has paused it", "13:00")
    assert pause_of(Terms(), NOON + timedelta(hours=1), 0, owner, until) is None


def test_battery() -> None:
    owner, terms = OwnerWatch(), Terms(power=Power.battery)
    owner.observe(Observation(on_battery=None), 0.0)
    assert reason(terms, owner=owner) == ""
    owner.observe(Observation(on_battery=True, input_s=0.0), 10.0)
    assert reason(terms, owner=owner) == "it is on battery"
    owner.observe(Observation(on_battery=False, input_s=0.0), 15.0)  # a plug that is loose
    assert reason(terms, owner=owner) == "it is on battery"
    owner.observe(Observation(on_battery=False, input_s=0.0), 10.0 + MAINS_S)
    assert reason(terms, owner=owner) == ""


def test_a_key_press_gives_the_machine_up_until_it_was_quiet_for_a_while() -> None:
    owner, terms = OwnerWatch(), Terms(power=Power.idle)
    owner.observe(Observation(input_s=IN_USE_S), 0.0)
    assert reason(terms, owner=owner) == ""
    owner.observe(Observation(input_s=1.0), 10.0)
    assert reason(terms, owner=owner) == "somebody uses it"
    for now_s in range(70, int(10 + QUIET_S), 5):
        owner.observe(Observation(input_s=now_s - 9.0), now_s)
        assert reason(terms, owner=owner) == "somebody uses it"
    owner.observe(Observation(input_s=9999.0), 80.0 + QUIET_S)
    assert reason(terms, owner=owner) == ""


def test_other_programs_count_once_they_have_computed_for_a_while() -> None:
    owner, terms = OwnerWatch(), Terms(power=Power.idle)
    for now_s in range(0, int(BUSY_S), 5):
        owner.observe(Observation(other_load=0.9), now_s)
        assert reason(terms, owner=owner) == ""
    owner.observe(Observation(other_load=0.0), BUSY_S)  # it was short
    for now_s in range(int(BUSY_S) + 5, int(2 * BUSY_S) + 5, 5):
        owner.observe(Observation(other_load=0.5), now_s)
        assert reason(terms, owner=owner) == ""
    owner.observe(Observation(other_load=0.5), 2 * BUSY_S + 5)
    assert reason(terms, owner=owner) == "somebody uses it"


def test_idle_machines_are_not_lent_on_battery_either() -> None:
    owner = OwnerWatch()
    owner.observe(Observation(on_battery=True), 0.0)
    assert reason(Terms(power=Power.idle), owner=owner) == "it is on battery"
