"""Options of a session: where a member keeps its files on this machine, where it listens, and its role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.peer.checkpoints.retention import Retention
from shoal.peer.event_schema import Event

if TYPE_CHECKING:
    from shoal.peer.checkpoints.remote.upload import CopyDestination
    from shoal.swarm.protocol.run_file import RunFile
    from shoal.swarm.protocol.types import Role

SHOAL_HOME = Path.home() / ".shoal"
DEFAULT_PORT = 7707
"""A host's."""

STOPPED_AT_ONCE = 130
"""Exit code after a second Ctrl-C."""


@dataclass(frozen=True)
class StartFrom:
    """Where the checkpoint is that a new run starts from.

    ``folder``: with a checkpoint, or any above; ``identity``: file with the keys that open sealed ones;
    ``only_parameters``: schedule, order of the samples and outer optimizer begin anew."""

    folder: Path
    identity: Path | None = None
    only_parameters: bool = False


@dataclass(frozen=True)
class SessionOptions:
    """Options of a member on this machine. ``bind`` is where it listens (port 0: any free one, data on the next);
    ``advertise`` the host or address that others shall use, by default the one that the coordinator sees; ``role``
    whether it trains and reduces parts (``trainer``), only trains (``contributor``) or only follows (``validator``);
    ``checkpoints``: which are kept, below ``state``; None: none; ``copy_to``: where they are copied to; ``start_from``:
    the folder with the checkpoint that the run starts from, where it does and this machine has it; ``data``: the
    folders below which the run may read the files that it names. Without any it reads none."""

    identity: Path = SHOAL_HOME / "identity"
    state: Path = SHOAL_HOME / "runs"
    name: str = ""
    bind: tuple[str, int] = ("0.0.0.0", 0)
    advertise: tuple[str, int] = ("", 0)
    role: Role = "trainer"
    checkpoints: Retention | None = field(default_factory=Retention)
    copy_to: CopyDestination | None = None
    start_from: Path | None = None
    data: tuple[Path, ...] = ()
    on_event: Callable[[Event], None] | None = None

    def folder(self, run: RunFile, peer: str) -> Path:
        """Of a peer in a run: its checkpoints and all else that it keeps."""
        return self.state / f"{run.run.name}-{run.hash.hex()[:8]}" / peer
