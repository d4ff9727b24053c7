"""What a run costs: sums of what members say, or the run file, and of nobody's time whose work is not in the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError
from tests.swarm.web.samples import member

from shoal.swarm.costs import cost_of, energy_between, price_of, run_costs
from shoal.swarm.protocol.run_file import CostSection
from shoal.swarm.protocol.types import MAX_DEVICE_W, DeviceInfo, MemberStatus

H100 = "NVIDIA H100 80GB HBM3"
SECTION = CostSection(prices={H100: 2.5, "some CPU": 0.1}, provider="Nimbus")


def device(name: str = H100, count: int = 1, price: float | None = None) -> DeviceInfo:
    label = name if count == 1 else f"{count} x {name}"
    return DeviceInfo(kind="cuda", name=label, memory_bytes=2**36, count=count, price_per_hour=price)


def timed(number: int, device: DeviceInfo, hours: float, section: CostSection = SECTION, **more: Any) -> MemberStatus:
    """A member that has been here for so long, of which half an hour in the last round."""
    price, present_s = price_of(device, section.prices), 3600 * hours
    about = {"price_per_hour": price, "present_s": present_s, "cost": cost_of(price, present_s), "round_s": 1800.0}
    return member(number, device=device, **about, **more)


def test_a_member_s_word_comes_before_the_table_and_counts_all_its_devices() -> None:
    prices = SECTION.prices
    assert price_of(device(price=1.0), prices) == 1.0
    assert price_of(device(price=0.0), prices) == 0.0
    assert price_of(device(), prices) == 2.5
    assert price_of(device(count=8), prices) == 20.0
    assert price_of(device(count=8, price=12.0), prices) == 12.0
    assert price_of(device("another GPU"), prices) is None


def test_costs_add_up() -> None:
    members = [timed(1, device(price=1.0), 10), timed(2, device(count=2), 4), timed(3, device("old GPU"), 5)]
    costs = run_costs(SECTION, members, tokens=15_000_000)
    assert costs.cost == pytest.approx(10 * 1.0 + 4 * 5.0)
    assert costs.round_cost == pytest.approx(0.5 * 1.0 + 0.5 * 5.0)
    assert costs.million_tokens_cost == pytest.approx(30.0 / 15)
    assert costs.device_s == 3600 * (10 + 2 * 4 + 5)
    assert costs.unpriced_device_s == 3600 * 5
    assert (costs.members, costs.priced_members) == (3, 2)
    # On one provider: all device hours at its prices, whatever members say; not those it has no price for.
    assert costs.provider_cost == pytest.approx((10 + 2 * 4) * 2.5)
    assert costs.provider_unlisted_device_s == 3600 * 5
    assert costs.provider == "Nimbus"


def test_energy_is_what_is_measured_for_members_whose_work_counts() -> None:
    measured = {"energy_j": 7.2e6, "round_energy_j": 3.6e5}
    members = [timed(1, device(), 10, **measured), timed(2, device(), 4, **measured), timed(3, device(), 5)]
    costs = run_costs(SECTION, [*members, timed(4, device(), 5, tokens_committed=0, **measured)], tokens=1000)
    assert (costs.energy_j, costs.round_energy_j, costs.metered_members) == (14.4e6, 7.2e5, 2)
    assert costs.token_energy_j == 14.4e3
    nobody = run_costs(SECTION, members[2:], tokens=1000)
    assert (nobody.energy_j, nobody.round_energy_j, nobody.token_energy_j) == (None,) * 3


def test_energy_between_readings_is_what_a_gpu_can_take() -> None:
    assert energy_between(1000.0, 4000.0, 10.0) == 3000.0
    assert energy_between(4000.0, 100.0, 10.0) == 0.0, "the meter began anew"
    assert energy_between(0.0, 1e15, 10.0) == 10 * MAX_DEVICE_W
    assert energy_between(0.0, 1e15, -5.0) == 0.0


def test_who_has_done_nothing_costs_nothing() -> None:
    stranger = timed(9, device(price=1e6), 1000, tokens_committed=0)
    assert run_costs(SECTION, [stranger], 100) == run_costs(SECTION, [], 100)
    assert run_costs(SECTION, [], 100).cost is None
    validator = timed(8, device(price=2.0), 3, tokens_committed=0, role="validator")
    assert run_costs(SECTION, [stranger, validator], 100).cost == 6.0


def test_without_prices_nothing_is_made_up() -> None:
    section = CostSection()
    costs = run_costs(section, [timed(1, device(), 10, section)], 100)
    assert (costs.cost, costs.round_cost, costs.million_tokens_cost, costs.provider_cost) == (None,) * 4
    assert costs.unpriced_device_s == costs.device_s == 36_000
    assert run_costs(SECTION, [timed(1, device(), 10)], 0).million_tokens_cost is None


def test_the_largest_run_fits_into_the_message() -> None:
    many = device(count=1024, price=1e6).model_copy(update={"name": H100})
    members = [timed(number, many, 1e9 / 3600) for number in range(4096)]
    costs = run_costs(CostSection(prices={H100: 1e6}), members, 1)
    assert costs.million_tokens_cost is not None
    assert math.isfinite(costs.million_tokens_cost)
    assert type(costs).model_validate(costs.model_dump()) == costs


@pytest.mark.parametrize("price", [-1.0, 2e6, math.nan, math.inf, True, "2.5"])
def test_prices_are_numbers_in_a_range(price: Any) -> None:
    with pytest.raises(ValidationError):
        DeviceInfo(kind="cpu", name="x", memory_bytes=1, price_per_hour=price)
    with pytest.raises(ValidationError):
        CostSection(prices={"x": price})


@pytest.mark.parametrize(
    "section",
    [
        {"currency": "US$"},
        {"currency": ""},
        {"currency": "a" * 9},
        {"provider": "Nimbus"},
        {"prices": {"": 1.0}},
        {"prices": {"a\nb": 1.0}},
        {"prices": {str(number): 1.0 for number in range(65)}},
    ],
)
def test_the_run_file_s_section_is_checked(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CostSection(**section)
