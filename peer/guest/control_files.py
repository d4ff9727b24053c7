"""Files by which ``shoal pause`` and ``shoal resume`` reach the peers of a machine, and by which these are found.

They lie in a peer's folder of a run and are for its owner alone. A pause is kept there: a peer that is started again is
still paused.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.peer.guest.gate import OwnerPause
from shoal.swarm import durable
from shoal.swarm.errors import StateFileError, StorageError, UserError

PAUSE_FILE = "pause.json"
PRESENCE_FILE = "present.json"
_MAX_FILE_BYTES = 4096


class _PauseFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    until_s: float | None = None


class Presence(BaseModel):
    """A running peer. ``state``: what it does, in words."""

    model_config = ConfigDict(extra="forbid", strict=True)

    pid: int
    run: str
    state: str

    @property
    def is_running(self) -> bool:
        return self.pid == os.getpid() or psutil.pid_exists(self.pid)


def read_pause(folder: Path) -> OwnerPause | None:
    """Read whether the owner has paused the peer of this folder. Raises ``StorageError``."""
    try:
        data = (folder / PAUSE_FILE).read_bytes()[:_MAX_FILE_BYTES]
        return OwnerPause(_PauseFile.model_validate_json(data).until_s)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StorageError(f"{folder / PAUSE_FILE}: cannot be read, `shoal resume` removes it: {error}") from error


def write_pause(folder: Path, pause: OwnerPause | None) -> None:
    """Pause the peer of this folder, or let it go on. Raises ``StorageError``."""
    path = folder / PAUSE_FILE
    try:
        if pause is None:
            path.unlink(missing_ok=True)
        else:
            durable.put(path, _PauseFile(until_s=pause.until_s).model_dump_json().encode(), 0o600)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def show_presence(folder: Path, run: str, state: str) -> None:
    """Say what the peer of this folder does, for the commands of its owner. Raises ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    about = Presence(pid=os.getpid(), run=run, state=state)
    durable.put(folder / PRESENCE_FILE, about.model_dump_json().encode(), 0o600)


def end_presence(folder: Path) -> None:
    """Say that no peer runs in this folder any more."""
    (folder / PRESENCE_FILE).unlink(missing_ok=True)


def read_presence(folder: Path) -> Presence | None:
    """Return the running peer of this folder, if any."""
    try:
        found = Presence.model_validate_json((folder / PRESENCE_FILE).read_bytes()[:_MAX_FILE_BYTES])
    except (OSError, ValidationError):
        return None
    return found if found.is_running else None


def find_peers(state: Path, run: str) -> list[Path]:
    """Find folders of peers of this machine. ``run``: a run's name, or a folder of a run or of a peer; empty for all
    peers that run now. Raises ``UserError`` if there are none."""
    if not run:
        return [one.parent for one in sorted(state.glob(f"*/*/{PRESENCE_FILE}")) if read_presence(one.parent)]
    folder = Path(run).expanduser()
    names = [folder] if "/" in run or folder.is_dir() else sorted(state.glob(f"{_literal(run)}-????????"))
    found = [peer for name in names for peer in (name, *sorted(name.glob("*"))) if _is_peer_folder(peer)]
    if not found:
        raise StateFileError(f"{run}: no peer of this machine has taken part in that run below {state}")
    return found


def _is_peer_folder(folder: Path) -> bool:
    return len(folder.name) == 16 and folder.is_dir()


def _literal(run: str) -> str:
    if not run.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise UserError(f"{run[:40]!r} is no run's name")
    return run
