"""The whole model of the demo in stages, put together from the newest checkpoints that the stages have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from shoal.peer.checkpoints.checkpoint import read_checkpoint, read_verdicts
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS, checkpoint_folders
from shoal.peer.export import write_model
from shoal.peer.parameters import split_by_layout
from shoal.peer.recipes import Recipe
from shoal.peer.stage_members import stage_folder
from shoal.swarm.errors import StateFileError, WireError
from shoal.swarm.messages import Verdict
from shoal.swarm.verdicts import check_verdict, tied_together


@dataclass(frozen=True)
class Assembled:
    """Which anchor the model is: its version, the digest of each stage's state, and the hash that ties together the
    stages' verdicts on the round that made it."""

    version: int
    digests: tuple[str, ...]
    together: str


def assemble_model(folder: Path, stages: int, recipe: Recipe, out: Path) -> Assembled:
    """Write to ``out`` the model of the newest round of which every stage has a checkpoint below ``folder``. Raises
    ``StateFileError``, also for stages that were not committed together, and ``StorageError``."""
    found = [_checkpoints(folder, stage) for stage in range(stages)]
    rounds = set.intersection(*(set(one) for one in found))
    if not rounds:
        raise StateFileError(f"{folder}: there is no round of which all {stages} stages have a checkpoint")
    newest = max(rounds)
    tensors: dict[str, Tensor] = {}
    provenance: dict[str, str] = {}
    digests, verdicts, version = [], [], 0
    for stage, places in enumerate(found):
        source = FolderSource(places[newest])
        checkpoint = read_checkpoint(source)
        manifest, state = checkpoint.manifest, checkpoint.state
        tensors |= split_by_layout(state.anchor, manifest.layout)
        version = state.version
        digests.append(state.digest.hex())
        provenance |= {"run": manifest.run, "run_hash": manifest.run_hash, "anchor_version": str(version)}
        provenance[f"state_digest_{stage}"] = state.digest.hex()
        verdict = read_verdicts(source, manifest)[-1]
        try:
            check_verdict(verdict, bytes.fromhex(manifest.coordinator_key))
        except WireError as error:
            raise StateFileError(f"{source.folder}: {error}") from error
        verdicts.append(verdict)
    together = _tie(folder, verdicts)
    write_model(out, tensors, recipe.config(), provenance)
    return Assembled(version, tuple(digests), together)


def _tie(folder: Path, verdicts: list[Verdict]) -> str:
    """The hash that all of them have, made again from what they say. Raises ``StateFileError``."""
    together = tied_together(verdicts)[0].together
    assert together is not None
    if {verdict.together for verdict in verdicts} != {together}:
        raise StateFileError(f"{folder}: the newest checkpoints of the stages were not committed together")
    return together.hex()


def _checkpoints(folder: Path, stage: int) -> dict[str, Path]:
    """By the name of their round, which sorts as its number does; replicas' are the same, so any will do."""
    kept = folder.glob(f"*/state/*/*/{stage_folder(Path(), stage)}/{CHECKPOINTS}")
    return {place.name: place for one in kept for place in checkpoint_folders(one)}
