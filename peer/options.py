"""Options of a session: where a member keeps its files on this machine, where it listens, and its role."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.peer.checkpoints.retention import Retention
from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.event_schema import Event
from shoal.swarm.transport.limits.traffic_limits import TrafficLimits

if TYPE_CHECKING:
    from shoal.peer.checkpoints.remote.upload import CopyDestination
    from shoal.swarm.protocol.run_file import RunFile
    from shoal.swarm.protocol.types import Changes, Role

SHOAL_HOME = Path(os.environ.get("SHOAL_HOME") or Path.home() / ".shoal")
"""Folder of all that this machine keeps, unless options name others."""

DEFAULT_PORT = 7707
"""Port that a host listens on by default."""

DEFAULT_WEB_PORT = 7780
"""Port of the page for browsers by default."""

DEFAULT_METRICS_PORT = 7790
"""Port of ``/metrics`` without a page, by default."""

STOPPED_AT_ONCE = 130
"""Exit code after a second Ctrl-C."""

TERMINATED = 143
"""Exit code of a peer that SIGTERM or a spot notice has ended while its run goes on, in order or not.

Schedulers take 0 for the end of the work, and start others again, elsewhere."""


@dataclass(frozen=True)
class StartFrom:
    """Checkpoint that a new run starts from.

    ``folder``: folder of the checkpoint, or one above it, or folder or URL of a model that transformers has saved;
    ``identity``: file of the keys that open a sealed checkpoint; ``only_parameters``: begin schedule, sample order and
    outer optimizer anew.
    """

    folder: Path | str
    identity: Path | None = None
    only_parameters: bool = False


@dataclass(frozen=True)
class SessionOptions:
    """Options of a member on this machine.

    ``identity``: file of its key pair, made if missing; ``state``: folder of everything that it keeps; ``name``: shown
    to other members, by default the host name; ``bind``: host and port to listen on, data on the next port, 0 for any
    free ones; ``maps_ports``: whether to ask the router to forward them, if nobody can connect otherwise;
    ``relay_bps``: rate at which it passes on what other members send each other, if it can be reached itself;
    ``advertise``: host and port that other members connect to, by default the address that the coordinator sees;
    ``role``: ``trainer`` trains and reduces parts of the mean, ``contributor`` only trains, ``validator``
    scores the others, ``follower`` only follows; ``checkpoints``: which are kept, None for none; ``copy_to``: where
    checkpoints are copied to;
    ``accept_amendments``: go on where the host makes the run longer than it was; ``agreed_ends``: later ends of the
    run to which the owner has agreed, as ``RunAmended`` names them;
    ``price_per_hour``: what this machine's devices cost an hour, in the run's currency, for others to read; None: not
    said;
    ``start_from``: folder or URL of the checkpoint that the run starts from, if this machine has it; ``data``: folders
    below which the run may read the files that it names, without any none, and mirrors and cache of shards;
    ``limits``: on what this process sends and receives, which may be changed at any time; ``on_event``: called with
    every event, from any thread.
    """

    identity: Path = SHOAL_HOME / "identity"
    state: Path = SHOAL_HOME / "runs"
    name: str = ""
    bind: tuple[str, int] = ("0.0.0.0", 0)
    maps_ports: bool = True
    relay_bps: float = 0.0
    advertise: tuple[str, int] = ("", 0)
    role: Role = "trainer"
    checkpoints: Retention | None = field(default_factory=Retention)
    copy_to: CopyDestination | None = None
    price_per_hour: float | None = None
    start_from: Path | str | None = None
    accept_amendments: bool = False
    agreed_ends: Changes = ()
    data: DataPlaces = NOWHERE
    limits: TrafficLimits = field(default_factory=TrafficLimits)
    on_event: Callable[[Event], None] | None = None

    def folder(self, run: RunFile, peer: str) -> Path:
        """Return the folder of a peer in a run: its checkpoints, records, history and downloads."""
        return peer_folder(self.state, run.run.name, run.hash, peer)


def peer_folder(state: Path, run: str, run_hash: bytes, peer: str) -> Path:
    """Return the folder of a peer in a run. ``run``: its name; ``state``: the folder of all runs."""
    return state / f"{run}-{run_hash.hex()[:8]}" / peer
