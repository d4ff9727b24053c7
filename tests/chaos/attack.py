"""Faults as data: the role that is hit, the fault, and the step of the round."""

from dataclasses import dataclass

from tests.fakes.swarm import PATIENCE_S

ATTACKED = 1
"""The round that the faults fall into; one before, so that there is something to lose."""

ROLES = {
    "group": ("contributor", "owner", "stand-in", "coordinator"),
    "grid": ("contributor", "row reducer", "owner", "stand-in"),
}
"""By topology: what the coordinator does is the same in all of them."""

GLOBAL = ("coordinator", "network")
"""Whose faults come at the first step of anybody that fits the moment."""

MOMENTS = (
    "before contributing",
    "while contributing",
    "while reducing",
    "some have the result",
    "after the report",
    "before the verdict is announced",
)

FAULTS = {
    "SIGKILL": 0.0,
    "SIGSTOP": 0.5 * PATIENCE_S,
    "SIGSTOP, long": 2.5 * PATIENCE_S,
    "cut": 2.0,
    "cut, long": 5 * PATIENCE_S,
    "half-open": 5 * PATIENCE_S,
    "half-open to all": 5 * PATIENCE_S,
    "corrupted bytes": 0.0,
    "corrupted bytes to one": 0.0,
}
"""And how many seconds each lasts: the short ones are over before anybody's patience is, the long ones are not. Killed
members stay dead; a coordinator comes back. Bytes are corrupted for the rest of the round."""

COORDINATOR_AWAY_S = 10.0

COMEBACKS = {"SIGKILL, back at once": 0.3, "SIGKILL, back late": 0.7 * PATIENCE_S}
"""After so many seconds; the first before anybody has missed it, the other one before it is given up."""

PARTITIONS = {
    "partition": 2.0,
    "partition, long": 5 * PATIENCE_S,
    "partition from the coordinator, too": 2.0,
    "partition from the coordinator, too, long": 5 * PATIENCE_S,
}
"""The owner and the contributor here, all others there; how many seconds."""


@dataclass(frozen=True)
class Attack:
    role: str
    fault: str
    moment: str

    def __str__(self) -> str:
        return f"{self.role}, {self.fault}, {self.moment}"
