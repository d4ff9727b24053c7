"""Cost of a run: the time of its members at the prices that they name, or that its run file names for their device;
and the energy that their GPUs took.

Prices and energy are what people and their machines say of themselves: they are added up, shown as claims, and decide
nothing. A member's time and energy count once work of it is in the run, so who only joins costs a run nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.swarm.protocol.run_file import CostSection
from shoal.swarm.protocol.types import MAX_DEVICE_W, CostStatus, DeviceInfo, MemberStatus

_HOUR_S = 3600.0


def price_of(device: DeviceInfo, prices: Mapping[str, float]) -> float | None:
    """Return what a member's devices cost an hour: what it says itself, else what the table says, else None."""
    return device.price_per_hour if device.price_per_hour is not None else table_price(device, prices)


def table_price(device: DeviceInfo, prices: Mapping[str, float]) -> float | None:
    """Return what devices of this name, as many as a member has, cost an hour by a table; None if it is not there."""
    price = prices.get(device.model)
    return None if price is None else price * device.count


def cost_of(price: float | None, seconds: float) -> float | None:
    """Return the cost of a time at a price an hour."""
    return None if price is None else price * seconds / _HOUR_S


def energy_between(earlier_j: float, now_j: float, seconds: float) -> float:
    """Return the energy between two readings of a member's meter, bounded by what a GPU can take in that time.

    A meter that began anew has not counted what came before."""
    return min(max(0.0, now_j - earlier_j), MAX_DEVICE_W * max(0.0, seconds))


def run_costs(section: CostSection, members: Sequence[MemberStatus], tokens: int) -> CostStatus:
    """Add up the costs of a run by the time of its members, and their energy. ``tokens``: committed ones."""
    counted = [one for one in members if one.counts_time]
    priced = [one for one in counted if one.price_per_hour is not None]
    total = sum(one.cost or 0.0 for one in priced)
    by_table = [(one, table_price(one.device, section.prices)) for one in counted] if section.prices else []
    listed = [(one, price) for one, price in by_table if price is not None]
    metered = [one for one in counted if one.energy_j is not None]
    energy_j = sum(one.energy_j or 0.0 for one in metered)
    return CostStatus(
        currency=section.currency,
        device_s=sum(one.device.count * one.present_s for one in counted),
        unpriced_device_s=sum(one.device.count * one.present_s for one in counted if one.price_per_hour is None),
        members=len(counted),
        priced_members=len(priced),
        cost=total if priced else None,
        round_cost=sum(cost_of(one.price_per_hour, one.round_s) or 0.0 for one in priced) if priced else None,
        million_tokens_cost=total / (tokens / 1e6) if priced and tokens else None,
        provider=section.provider,
        provider_cost=sum(cost_of(price, one.present_s) or 0.0 for one, price in listed) if listed else None,
        provider_unlisted_device_s=sum(one.device.count * one.present_s for one, price in by_table if price is None),
        metered_members=len(metered),
        energy_j=energy_j if metered else None,
        round_energy_j=sum(one.round_energy_j or 0.0 for one in metered) if metered else None,
        token_energy_j=energy_j / tokens if metered and tokens else None,
    )
