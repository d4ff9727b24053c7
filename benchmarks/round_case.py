"""Contributions of a measured round, and the run file that makes a coordinator close and plan it so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A measured case: ``rounds`` count, one more before them warms up. ``bandwidths_bps``: what each peer says of its
    link, where the coordinator is not to find out by itself. ``group_size``: 0 for one that holds everybody. ``apart``:
    each peer on loopback has an address of its own, so their links are as those between machines. ``uncommitted``: no
    leaf is hashed, no path and no member's signature is checked. ``secure``: contributions are masked."""

    codec: str
    elements: int
    peers: int = 4
    rounds: int = 5
    patience_s: float = 12.0
    group_size: int = 0
    bandwidths_bps: tuple[float, ...] = ()
    apart: bool = False
    uncommitted: bool = False
    secure: bool = False

    def loopback_address(self, number: int) -> str:
        """Of a peer; Linux has all of 127.0.0.0/8."""
        return f"127.0.0.{number + 2}" if self.apart else "127.0.0.1"

    @property
    def size(self) -> float:
        """Standard deviation of the values: under secure averaging an eighth of the first rounds' range, which all
        members share, as there is no scale in a contribution. So it is one unit of int4, where units stay."""
        return 2.0**-9 if self.secure else 1.0

    @property
    def tolerance(self) -> float:
        """Most that a value of the mean may be off, in standard deviations: several steps of the codec. Those of int4
        are half a unit of this round's and of the last one's rounding, and as much for both means: less than a mask
        that was not taken off, and with finer steps far less than a missing value."""
        if not self.secure:
            return 0.1
        return 2.0 if self.codec == "int4" else 0.2


def run_toml(case: Case) -> str:
    """A run whose rounds close as soon as every peer has done its one sample."""
    group = f"group_size = {case.group_size}" if case.group_size else ""
    secure = f'secure = true\nsecure_group = {case.peers}\nrobust = "none"' if case.secure else ""
    return f"""
[run]
name = "bench"
[recipe]
name = "own"
[data]
source = "own"
[averaging]
codec = "{case.codec}"
{group}
{secure}
[round]
tokens = {case.peers}
max_s = 3600.0
patience_s = {case.patience_s}
"""
