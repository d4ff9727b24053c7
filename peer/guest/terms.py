"""A guest's terms: the traffic, the hours and the moments that the owner of a machine lends to a run.

They stand in one file for all runs of the machine, with sections for single runs, and on the command line, which goes
first. The file keeps what a person writes (``20Mbit``, ``22-7``); ``Terms`` is what that means.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from enum import StrEnum
from pathlib import Path

from shoal.swarm import durable
from shoal.swarm.errors import StorageError, TermsError

TERMS_FILE = "terms.toml"
_MAX_FILE_BYTES = 2**16
_NONE = "none"
"""Written for a term that is not set, where another one would apply."""


class Power(StrEnum):
    """Condition for lending a machine: always; not on battery; or not on battery and not while somebody uses it."""

    always = "always"
    battery = "battery"
    idle = "idle"


@dataclass(frozen=True)
class Hours:
    """Times of the day at which a machine is lent, in its local time: spans from one time to another, perhaps over
    midnight. Empty: always."""

    text: str = ""
    spans: tuple[tuple[time, time], ...] = ()

    def are_open(self, local: datetime) -> bool:
        """Return whether a moment, in local time, lies in one of the spans."""
        return not self.spans or any(_lies_in(local.time(), *span) for span in self.spans)

    def next_opening(self, local: datetime) -> datetime:
        """Return when the next span begins, in local time."""
        days = (local.date(), local.date() + timedelta(days=1))
        starts = [datetime.combine(day, start, local.tzinfo) for day in days for start, _ in self.spans]
        return min(start for start in starts if start > local)


def _lies_in(moment: time, start: time, end: time) -> bool:
    return start <= moment < end if start < end else moment >= start or moment < end


@dataclass(frozen=True)
class Terms:
    """Terms of one run on this machine. Rates in bits a second and sizes in bytes are 0 where there is no limit;
    ``monthly_of_run``: the monthly data is of this run alone, not of all runs of the machine."""

    max_upload_bps: float = 0.0
    max_download_bps: float = 0.0
    monthly_bytes: int = 0
    monthly_of_run: bool = False
    hours: Hours = field(default_factory=Hours)
    power: Power = Power.always
    nice: bool = False


# What a person writes -----------------------------------------------------------------------------------------

FIELDS: Mapping[str, str] = {
    "max_upload": "most that the run sends, such as 20Mbit",
    "max_download": "most that it receives, such as 50Mbit",
    "monthly_data": "most that it sends and receives in a calendar month, such as 500G",
    "hours": "local time at which it may run, such as 22-7 or 22:30-7,12-13",
    "power": "battery: not on battery; idle: neither on battery nor while somebody uses the machine; always",
    "nice": "whether other programs go first: yes or no",
}
"""Names of the terms, with what each means."""

TermsText = Mapping[str, str]
"""Terms as people write them, by name; those left out are not set."""


def parse_terms(text: TermsText, of_run: TermsText | None = None, where: str = "") -> Terms:
    """Parse terms. ``of_run``: those for the run alone, which go first; ``where``: for messages.

    Raises ``TermsError``, which names the term."""
    of_run = of_run or {}
    given = {name: value for name, value in {**text, **of_run}.items() if value}
    for name in given:
        if name not in FIELDS:
            raise TermsError(f"{where}{name[:40]}: there is no such term; there are {', '.join(FIELDS)}")
    given = {name: value for name, value in given.items() if value != _NONE}
    try:
        return Terms(
            max_upload_bps=parse_rate(given["max_upload"], "max_upload") if "max_upload" in given else 0.0,
            max_download_bps=parse_rate(given["max_download"], "max_download") if "max_download" in given else 0.0,
            monthly_bytes=parse_data(given["monthly_data"]) if "monthly_data" in given else 0,
            monthly_of_run=bool(of_run.get("monthly_data")),
            hours=parse_hours(given["hours"]) if "hours" in given else Hours(),
            power=_parse_power(given.get("power", Power.always)),
            nice=_parse_nice(given.get("nice", "no")),
        )
    except TermsError as error:
        raise TermsError(f"{where}{error}") from None


def parse_rate(text: str, name: str = "rate") -> float:
    """Parse ``20Mbit``, ``1.5Gbit/s`` or ``2MB/s`` as bits a second. Raises ``TermsError``."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([kKmMgG]?)(bit(?:/s)?|B/s)\s*", text)
    bps = float(found[1]) * _UNITS[found[2].upper()] * (8 if found[3] == "B/s" else 1) if found else 0.0
    if not _LEAST_BPS <= bps <= _MOST_BPS:
        raise TermsError(f"{name} {text[:40]!r}: expected a rate of 64 kbit or more, such as 20Mbit or 2MB/s")
    return bps


def parse_data(text: str) -> int:
    """Parse ``500G`` or ``1.5 TB`` as bytes, by powers of 1000 as providers count. Raises ``TermsError``."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([kKMGT])B?\s*", text)
    size = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if not _LEAST_MONTH_BYTES <= size <= _MOST_MONTH_BYTES:
        raise TermsError(f"monthly_data {text[:40]!r}: expected a size of 1M or more, such as 500G")
    return int(size)


def parse_hours(text: str) -> Hours:
    """Parse ``22-7`` or ``22:30-7,12-13``. Raises ``TermsError``."""
    spans = []
    for one in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,2})(?::([0-9]{2}))?\s*-\s*([0-9]{1,2})(?::([0-9]{2}))?\s*", one)
        numbers = [int(number or 0) for number in found.groups()] if found else [99]
        start, end = numbers[:2], numbers[2:]
        if found is None or start[0] > 23 or start[1] > 59 or end > [24, 0] or end[1] > 59 or start == end:
            raise TermsError(f"hours {text[:40]!r}: expected times of the day such as 22-7, or 22:30-7,12-13")
        spans.append((time(start[0], start[1]), time(end[0] % 24, end[1])))
    if len(spans) > _MAX_SPANS:
        raise TermsError(f"hours: {len(spans)} spans; at most {_MAX_SPANS} are allowed")
    whole_day = any(start == end for start, end in spans)  # 0-24
    return Hours() if whole_day else Hours(text.strip(), tuple(spans))


def _parse_power(text: str) -> Power:
    if text not in list(Power):
        raise TermsError(f"power {text[:40]!r}: expected {', '.join(Power)}")
    return Power(text)


def _parse_nice(text: str) -> bool:
    if text not in ("yes", "no"):
        raise TermsError(f"nice {text[:40]!r}: expected yes or no")
    return text == "yes"


_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_LEAST_BPS, _MOST_BPS = 64e3, 1e12
_LEAST_MONTH_BYTES, _MOST_MONTH_BYTES = 1e6, 1e18
_MAX_SPANS = 16


# The file -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TermsFile:
    """The file's content: terms of all runs, and of single runs by name."""

    all_runs: TermsText = field(default_factory=dict)
    runs: Mapping[str, TermsText] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> TermsFile:
        """Read the file; empty where there is none. Raises ``TermsError`` and ``StorageError``."""
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            if len(data) > _MAX_FILE_BYTES:
                raise TermsError(f"{path}: is larger than {_MAX_FILE_BYTES} bytes")
            tables = tomllib.loads(data.decode())
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise TermsError(f"{path}: is no TOML: {error}") from error
        runs = tables.pop("runs", {})
        if not isinstance(runs, dict):
            raise TermsError(f"{path}: runs: expected sections such as [runs.reef]")
        read = cls(
            _texts(tables, f"{path}: "), {name: _texts(one, f"{path}: runs.{name}: ") for name, one in runs.items()}
        )
        for name in ("", *read.runs):
            read.terms_of(name, {}, f"{path}: ")
        return read

    def terms_of(self, run: str, options: TermsText, where: str = "") -> Terms:
        """Return the terms of a run. ``options``: of the command line, which go first. Raises ``TermsError``."""
        return parse_terms(self.all_runs, {**self.runs.get(run, {}), **options}, where)

    def changed(self, run: str, changes: TermsText) -> TermsFile:
        """Return the content with changed terms: of one run, or of all for an empty name. ``none`` removes a term that
        nothing else sets. Raises ``TermsError``."""
        if not run:
            changed = TermsFile(_merged(self.all_runs, changes, {}), self.runs)
        else:
            of_run = _merged(self.runs.get(run, {}), changes, self.all_runs)
            changed = TermsFile(self.all_runs, {**self.runs, run: of_run})
        changed.terms_of(run, {})
        return changed

    def write(self, path: Path) -> None:
        """Write the file, readable for its owner alone. Raises ``StorageError``."""
        lines = [_line(name, value) for name, value in self.all_runs.items()]
        for run, terms in self.runs.items():
            if terms:
                lines += ["", f"[runs.{json.dumps(run)}]", *(_line(name, value) for name, value in terms.items())]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.put(path, "".join(f"{line}\n" for line in lines).encode(), 0o600)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error}") from error


def _line(name: str, value: str) -> str:
    return f"{name} = {json.dumps(value)}"


def _merged(text: TermsText, changes: TermsText, below: TermsText) -> TermsText:
    merged = {**text, **{name: value for name, value in changes.items() if value}}
    return {name: value for name, value in merged.items() if value != _NONE or name in below}


def _texts(table: object, where: str) -> dict[str, str]:
    if not isinstance(table, dict):
        raise TermsError(f"{where}expected a section of terms")
    for name, value in table.items():
        if not isinstance(value, str):
            raise TermsError(f'{where}{name}: expected text in quotes, such as "20Mbit"')
    return dict(table)
