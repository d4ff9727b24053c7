"""Folders of a peer on its disk: one for each run, and in that one for each stage of a pipeline that it holds."""

from __future__ import annotations

import re
from pathlib import Path


def stage_folder(folder: Path, stage: int) -> Path:
    """Return the folder of a stage's checkpoints, records and history, inside the peer's folder of the run."""
    return folder / f"stage-{stage:05}"


def is_stage_folder(folder: Path) -> bool:
    """Return whether a folder has the name of a stage's folder."""
    return re.fullmatch(r"stage-[0-9]{5}", folder.name) is not None
