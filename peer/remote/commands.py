"""What ``shoal restore`` does and shows, and what ``shoal join --copy-to`` checks before it joins."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.peer.checkpoints.retention import Retention
from shoal.peer.remote.copying import CopyTo
from shoal.peer.remote.remote_store import RemoteStore
from shoal.peer.remote.restoring import Copy, Restorer, find_copies
from shoal.swarm.errors import UserError
from shoal.swarm.identity import Identity


def parse_copy_to(url: str, every: int, retention: Retention | None) -> CopyTo | None:
    """From the command line; None for no URL. Raises ``UserError`` and ``RemoteStorageError``."""
    if not url:
        return None
    if retention is None:
        raise UserError("--copy-to copies checkpoints: it does not go with --keep-checkpoints off")
    return CopyTo(RemoteStore.open(url), every, retention)


def list_copies(url: str, console: Console) -> None:
    """Show what is there, newest first. Raises ``RemoteStorageError``."""
    table = Table("run", "peer", "round", "MB", "")
    for copy in find_copies(RemoteStore.open(url)):
        table.add_row(copy.run, copy.peer, str(copy.round), f"{copy.size_bytes / 1e6:.3g}", _kind(copy))
    console.print(table if table.row_count else "There is no copy of a checkpoint.")


def restore(url: str, to: Path, identity: Path, console: Console) -> None:
    """Bring the newest whole copy. Raises the errors of ``Restorer.restore`` and of identity files."""
    remote = RemoteStore.open(url)
    copies = find_copies(remote)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    folder = Restorer(remote, to, Identity.load_or_create(identity), say).restore(copies)
    say(f"Restored to {folder}")
    own = [f"--state {to}"] * (to != Path.home() / ".shoal" / "runs") + [f"--identity {identity}"]
    say(f"`shoal join INVITE {' '.join(own)}` goes on from it")


def _kind(copy: Copy) -> str:
    if copy.last is None:
        return "unfinished"
    return "sealed" if copy.is_sealed else ""
