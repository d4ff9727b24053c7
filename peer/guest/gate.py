"""Decision whether a machine is lent at this moment, by its owner's terms."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from shoal.peer.guest.terms import Power, Terms

IN_USE_S = 60.0
"""After a key press the machine counts as in use for so long."""

BUSY_SHARE, BUSY_S = 0.25, 30.0
"""Other programs that take this share of the processors for this long count as its owner's."""

QUIET_S = 300.0
"""A machine that was in use is lent again after so long without use."""

MAINS_S = 30.0
"""A machine that was on battery is lent again after so long on mains."""


@dataclass(frozen=True)
class Pause:
    """Reason for which the machine is not lent now. ``until``: when that ends, in local time, or how, in words."""

    reason: str
    until: str

    @property
    def words(self) -> str:
        """``until 22:00``: what other members are told, which says nothing about the owner's habits."""
        return f"until {self.until}"


@dataclass(frozen=True)
class Observation:
    """State of the machine, as far as it can be seen. ``on_battery``: None where it has none; ``input_s``: seconds
    since the last key press, None where that is not known; ``other_load``: share of all processors that other programs
    take."""

    on_battery: bool | None = None
    input_s: float | None = None
    other_load: float = 0.0


class OwnerWatch:
    """Whether the machine is on battery or in use, by what is observed, without flapping."""

    def __init__(self) -> None:
        self._on_battery_s: float | None = None
        self._used_s: float | None = None
        self._busy_since_s: float | None = None
        self.is_on_battery = self.is_in_use = False

    def observe(self, seen: Observation, now_s: float) -> None:
        """Take an observation; call it every few seconds."""
        if seen.on_battery:
            self._on_battery_s = now_s
        self.is_on_battery = self._on_battery_s is not None and now_s < self._on_battery_s + MAINS_S
        if seen.other_load < BUSY_SHARE:
            self._busy_since_s = None
        elif self._busy_since_s is None:
            self._busy_since_s = now_s
        is_busy = self._busy_since_s is not None and now_s >= self._busy_since_s + BUSY_S
        if is_busy or (seen.input_s is not None and seen.input_s < IN_USE_S):
            self._used_s = now_s
        self.is_in_use = self._used_s is not None and now_s < self._used_s + QUIET_S


@dataclass(frozen=True)
class OwnerPause:
    """The owner's own `shoal pause`. ``until_s``: in Unix time; None until `shoal resume`."""

    until_s: float | None = None


def pause_of(
    terms: Terms, local: datetime, month_bytes: int, owner: OwnerWatch, asked: OwnerPause | None = None
) -> Pause | None:
    """Return why the machine is not lent at a moment, None if it is. ``local``: local time, with its zone;
    ``month_bytes``: moved in its month."""
    if asked is not None and asked.until_s is None:
        return Pause("its owner has paused it", "its owner resumes it")
    if asked is not None and asked.until_s is not None and local.timestamp() < asked.until_s:
        end = datetime.fromtimestamp(asked.until_s, local.tzinfo)
        return Pause("its owner has paused it", moment(end, local))
    if terms.monthly_bytes and month_bytes >= terms.monthly_bytes:
        return Pause("the month's data is used up", moment(next_month(local), local))
    if not terms.hours.are_open(local):
        return Pause(f"it is lent at {terms.hours.text}", moment(terms.hours.next_opening(local), local))
    if terms.power is not Power.always and owner.is_on_battery:
        return Pause("it is on battery", "it is on mains again")
    if terms.power is Power.idle and owner.is_in_use:
        return Pause("somebody uses it", "nobody uses it")
    return None


def next_month(local: datetime) -> datetime:
    """Return when the next calendar month begins."""
    year, month = (local.year + 1, 1) if local.month == 12 else (local.year, local.month + 1)
    return datetime(year, month, 1, tzinfo=local.tzinfo)


def moment(then: datetime, now: datetime) -> str:
    """``22:00`` today and tomorrow morning, else ``1 December``, in local time."""
    if (then - now).total_seconds() < 24 * 3600:
        return f"{then:%H:%M}"
    return f"{then.day} {then:%B}" + (f" {then:%H:%M}" if (then.hour, then.minute) != (0, 0) else "")
