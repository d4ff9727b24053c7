"""Retention rule: which checkpoints stay and which are removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.swarm.errors import UserError


@dataclass(frozen=True)
class Retention:
    """``newest``: number of newest checkpoints that stay; ``every``: of each ``every`` rounds one stays for ever (0:
    none)."""

    newest: int = 3
    every: int = 0

    def superfluous(self, rounds: Iterable[int]) -> list[int]:
        """Rounds whose checkpoints may be removed, oldest first.

        Not every round has a checkpoint: of each ``every`` rounds the first one that has stays."""
        ordered = sorted(rounds)
        stay = set(ordered[-self.newest :])
        if self.every:
            first_of: dict[int, int] = {}
            for number in ordered:
                first_of.setdefault(number // self.every, number)
            stay.update(first_of.values())
        return [number for number in ordered if number not in stay]


def parse_retention(newest: str, every: int) -> Retention | None:
    """Retention by the command line: ``newest`` is a number from 1 on, or "off" for None: no checkpoints. Raises
    ``UserError``."""
    if newest == "off":
        return None
    if not newest.isascii() or not newest.isdigit() or int(newest) < 1:
        raise UserError(f"--keep-checkpoints: expected a number from 1 on, or off, not {newest[:40]!r}")
    return Retention(int(newest), every)
