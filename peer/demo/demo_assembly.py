"""The whole model of the demo in stages, from what its peers saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.peer.offline.export import export_model
from shoal.peer.offline.whole_models import WholeModel, use_newest


@dataclass(frozen=True)
class Assembled:
    """Which anchor the model is: its version, and the digest of each stage's state, as checkpoints and signed verdicts
    have them."""

    version: int
    digests: tuple[str, ...]


def assemble_model(folder: Path, out: Path) -> Assembled:
    """Write to ``out`` the newest model of which all stages are below ``folder``, as ``shoal export`` does. Raises
    ``StateFileError``, ``StorageError``."""

    def describe(model: WholeModel) -> Assembled:
        return Assembled(model.version, tuple(stage.load().digest.hex() for stage in model.stages))

    export_model(folder, out)
    return use_newest(folder, None, describe)
