"""Whether this machine can take part in a run, by what the run's card says it needs."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import filesize

from shoal.peer.directory.card import Needs, RunCard
from shoal.peer.machine_memory import memory_text
from shoal.swarm.protocol.messages import PROTOCOL_VERSION
from shoal.swarm.protocol.run_sources import file_pattern


@dataclass(frozen=True)
class Machine:
    """This machine. ``host_bytes``: of its memory, that a member may take; ``device_bytes``: of its GPU's own memory,
    None for a device that computes in the machine's; ``disk_bytes``: free where checkpoints are kept; ``recipes``:
    installed ones."""

    device: str
    host_bytes: int
    device_bytes: int | None
    disk_bytes: int
    recipes: frozenset[str]
    python: str
    protocol: int


@dataclass(frozen=True)
class Fit:
    """Result. ``obstacles``: reasons for which it cannot join; ``doubts``: what to look after before."""

    obstacles: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def can_join(self) -> bool:
        return not self.obstacles


def shoal_version() -> str:
    """Version of the installed package; ``source`` for a checkout that is not installed."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return "source"


def look_at_machine(device_name: str, host_limit: int | None, device_limit: int | None, state: Path) -> Machine:
    """Look at this machine, which imports torch. ``state``: folder of checkpoints, which need not exist yet.

    Raises ``DeviceError``."""
    from shoal.peer.recipes import installed_recipes
    from shoal.peer.training.device import MemoryLimits, choose_device, usable_memory

    device = choose_device(device_name)
    usable = usable_memory(device, MemoryLimits(host_limit, device_limit))
    there = next(one for one in (state, *state.absolute().parents) if one.exists())
    return Machine(
        device=str(device),
        host_bytes=usable.host,
        device_bytes=usable.device,
        disk_bytes=shutil.disk_usage(there).free,
        recipes=frozenset(installed_recipes()),
        python=platform.python_version(),
        protocol=PROTOCOL_VERSION,
    )


def fit_of(card: RunCard, machine: Machine) -> Fit:
    """Compare what a card asks for with a machine."""
    return Fit(tuple(_obstacles(card, machine)), tuple(_doubts(card, machine)))


def _obstacles(card: RunCard, machine: Machine) -> Iterable[str]:
    if card.state == "ended":
        yield "the run has ended"
    if card.protocol != machine.protocol:
        yield f"needs Shoal {card.shoal} (protocol {card.protocol}, here {machine.protocol})"
    if card.recipe == "own":
        yield "its members bring a training loop of their own: get the host's script"
    elif card.recipe not in machine.recipes:
        yield f"the recipe {card.recipe!r} is not installed"
    if card.needs is not None:
        yield from _short_of(card.needs, machine)
    if not card.invite:
        whom = f": ask {card.contact}" if card.contact else ""
        yield f"by invitation only{whom}"


def _short_of(needs: Needs, machine: Machine) -> Iterable[str]:
    def lacks(what: str, needed: int, there: int) -> Iterable[str]:
        if needed > there:
            yield f"{what}: needs {memory_text(needed)}, {memory_text(there)} can be used"

    if machine.device_bytes is None:
        yield from lacks("memory", needs.shared_bytes, machine.host_bytes)
    else:
        yield from lacks(f"memory of {machine.device}", needs.device_bytes, machine.device_bytes)
        yield from lacks("memory", needs.host_bytes, machine.host_bytes)
    yield from lacks("disk", needs.disk_bytes, machine.disk_bytes)


def _doubts(card: RunCard, machine: Machine) -> Iterable[str]:
    if card.needs is None:
        yield "the size of its model is not known yet"
    if card.data == "stdlib" and card.python != machine.python:
        yield f"may need Python {card.python}, whose standard library is the data (here {machine.python})"
    if file_pattern(card.data) is not None:
        yield f"needs your copy of its data, {card.data}: join with --data FOLDER"
    if card.needs is not None and card.needs.bandwidth_bps >= 1e6:
        yield f"needs {filesize.decimal(int(card.needs.bandwidth_bps / 8))}/s of bandwidth each way"
    if card.state == "stopped":
        yield "its host was stopped, and may come back"
