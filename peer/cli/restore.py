"""``shoal restore``, and the check of ``shoal join --copy-to`` before it joins."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.peer.checkpoints.remote.copies import RemoteCopy, find_copies
from shoal.peer.checkpoints.remote.restore import CheckpointRestorer
from shoal.peer.checkpoints.remote.store import RemoteStore
from shoal.peer.checkpoints.remote.upload import CopyDestination
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.options import SHOAL_HOME
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.identity import Identity


def parse_copy_to(url: str, every: int, retention: Retention | None) -> CopyDestination | None:
    """Read the options ``--copy-to`` and ``--copy-every``; None without a URL. Raises ``UserError`` and
    ``RemoteStorageError``."""
    if not url:
        return None
    if retention is None:
        raise UserError("--copy-to copies checkpoints: it does not go with --keep-checkpoints off")
    return CopyDestination(RemoteStore.open(url), every, retention)


def list_copies(url: str, console: Console) -> None:
    """List the copies, newest first. Raises ``RemoteStorageError``."""
    copies = find_copies(RemoteStore.open(url))
    has_stages = any(copy.stage is not None for copy in copies)
    table = Table("run", "peer", *(("stage",) * has_stages), "round", "MB", "")
    for copy in copies:
        stage = ("" if copy.stage is None else str(copy.stage),) * has_stages
        table.add_row(copy.run, copy.peer, *stage, str(copy.round), f"{copy.size_bytes / 1e6:.3g}", _kind(copy))
    console.print(table if table.row_count else "There is no copy of a checkpoint.")


def restore(
    url: str, to: Path, identity: Path, console: Console, *, all_stages: bool, number: int | None = None
) -> None:
    """Restore the newest complete copy, or that of round ``number``; of a pipeline one copy of each stage.

    Raises the errors of ``CheckpointRestorer.restore`` and of identity files."""
    remote = RemoteStore.open(url)
    copies = find_copies(remote)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    restorer = CheckpointRestorer(remote, to, Identity.load_or_create(identity), say)
    for folder in restorer.restore(copies, all_stages=all_stages, number=number):
        say(f"Restored to {folder}")
    own = [f"--state {to}"] * (to != SHOAL_HOME / "runs") + [f"--identity {identity}"]
    say(f"`shoal join INVITE {' '.join(own)}` goes on from it")


def _kind(copy: RemoteCopy) -> str:
    if copy.last is None:
        return "unfinished"
    return "sealed" if copy.is_sealed else ""
