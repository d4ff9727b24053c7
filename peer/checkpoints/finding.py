"""Where checkpoints are below a folder: a run's, a peer's, or one that several peers' folders were put into."""

from __future__ import annotations

from pathlib import Path

from shoal.peer.checkpoints.manifest import MANIFEST
from shoal.peer.checkpoints.sealed_folder import ENVELOPE
from shoal.peer.checkpoints.store import ASIDE


def is_checkpoint(folder: Path) -> bool:
    """Whether it is one itself, sealed or not."""
    return any((folder / name).exists() for name in (MANIFEST, ENVELOPE))


def checkpoints_in(folder: Path) -> list[Path]:
    """The folder itself, or all checkpoints below it, whatever they are called; none that is just being written."""
    if is_checkpoint(folder):
        return [folder]
    found = {path.parent for name in (MANIFEST, ENVELOPE) for path in folder.glob(f"**/{name}")}
    return sorted(place for place in found if not _is_hidden(place.relative_to(folder)))


def _is_hidden(place: Path) -> bool:
    """It or a folder around it is being written, or removed."""
    return any(part.startswith(".") for part in place.parts)


def is_aside(place: Path) -> bool:
    """Whether it is kept though it is of another history than the others there."""
    return place.name.startswith(ASIDE)


def say_nothing_found(folder: Path) -> str:
    """What to give instead of a folder without any."""
    if not folder.is_dir():
        return f"{folder}: there is no such folder; peers keep their checkpoints in ~/.shoal/runs/RUN-HASH"
    return (
        f"{folder}: no checkpoint here; give a checkpoint's folder, a peer's, a run's (~/.shoal/runs/RUN-HASH), or one "
        "with folders of several peers in it"
    )
