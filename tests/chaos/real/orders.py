"""Orders for faults, as files: a test places them, the process that comes to their moment first carries them out.

Imported by the processes too: it knows nothing of the tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.swarm.protocol.rounds import RoundPlan

COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Order:
    """Whom it hits, what it is, at which step of a round; ``seconds``: until a process that goes on ends it itself;
    ``first_round``: obeyed in no earlier one; ``peer``: only by this one, in the first such round in which it has the
    role, as owners take turns; empty for whoever has it."""

    role: str
    fault: str
    moment: str
    seconds: float = 0.0
    first_round: int = 0
    peer: str = ""

    def __str__(self) -> str:
        return f"{self.role}, {self.fault}, {self.moment}"

    @property
    def name(self) -> str:
        return str(self).replace(" ", "-")


class Orders:
    """A folder that all processes of a swarm share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open, self._done, self._marks = folder / "open", folder / "done", folder / "marks"
        for one in (self._open, self._done, self._marks):
            one.mkdir(parents=True, exist_ok=True)

    def place(self, *orders: Order, first_round: int) -> None:
        """Place orders for one round, ``first_round`` or a later one: it has to be one that no process is in yet, or
        some of them would come too late for theirs. What was done of the same name before is forgotten."""
        for order in orders:
            (self._done / order.name).unlink(missing_ok=True)
            self._write(self._open / order.name, asdict(replace(order, first_round=first_round)))

    def open(self, number: int | None = None) -> list[Order]:
        """Return the orders that nobody has carried out; with ``number`` those for that round."""
        orders = [Order(**json.loads(text)) for path in self._open.iterdir() if (text := _text(path))]
        return [order for order in orders if number is None or order.first_round <= number]

    def claim(self, order: Order, **about: Any) -> bool:
        """Whether it is ours to carry out: nobody else was there before. ``about`` is what ``done`` returns."""
        mine = self._done / f"{order.name}.{os.getpid()}"
        try:
            (self._open / order.name).rename(mine)
        except FileNotFoundError:
            return False
        mine.unlink()
        self._write(self._done / order.name, about)
        return True

    def done(self, order: Order) -> dict[str, Any] | None:
        """Return what was said when the order was carried out; None before."""
        text = _text(self._done / order.name)
        return json.loads(text) if text else None

    def mark(self, name: str, text: str = "here") -> None:
        """For others to see: somebody has come so far."""
        self._write(self._marks / name, text)

    def marked(self, name: str) -> str:
        """Empty where nobody has."""
        text = _text(self._marks / name)
        return json.loads(text) if text else ""

    def _write(self, path: Path, content: Any) -> None:
        fresh = path.parent.parent / f"{path.name}.{os.getpid()}"
        fresh.write_text(json.dumps(content))
        fresh.replace(path)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def cast(plan: RoundPlan) -> dict[str, str]:
    """Who plays which role: of the first part the ``owner`` and its ``stand-in``, the ``witness``, that owns another
    part, and the ``contributor``, that owns none. Empty when it cannot be filled."""
    members, first = [member.peer for member in plan.members], plan.parts[0]
    owners = {part.owner for part in plan.parts}
    free = owners - {first.owner, *first.stand_ins[:1]}
    others = set(range(len(members))) - owners
    if len(members) != 4 or len(owners) != 3 or len(free) != 1 or len(others) != 1:
        return {}
    roles = {"owner": first.owner, "stand-in": first.stand_ins[0], "witness": free.pop(), "contributor": others.pop()}
    return {role: members[index] for role, index in roles.items()}
