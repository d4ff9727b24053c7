"""Checkpoints that runs start from, and a process's state of a whole run or of stages, without a network."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tests.peer.checkpoints.making import IDENTITY, SIGNER, verdict_chain
from tests.peer.layered_models import GPT
from torch import Tensor

from shoal.peer.checkpoints.checkpoint import Checkpoint, CheckpointContents, read_checkpoint
from shoal.peer.checkpoints.manifest import CheckpointAbout, StageAbout
from shoal.peer.checkpoints.retention import Retention
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS, CheckpointStore
from shoal.peer.cli.start_section import start_section, with_section
from shoal.peer.options import StartFrom
from shoal.peer.state_transfer.start import RunStart, StartFiles
from shoal.peer.training.anchor import AnchorState
from shoal.peer.training.layers import Layered
from shoal.swarm.protocol.run_file import RunFile, parse_run_file
from shoal.swarm.protocol.types import TensorSpec

SETTINGS = "".join(f"{key} = {str(value).lower()}\n" for key, value in GPT.items())


def run_toml(name: str = "reef", stages: int = 0, outer: str = "adamw", more: str = "") -> str:
    """A run of the ``gpt`` of ``layered_models``; ``stages`` 0: without a pipeline."""
    pipeline = f"[pipeline]\nstages = {stages}\nmicro_batch = 2\n" if stages else ""
    return (
        f'algorithm = "virtual_batch"\n[run]\nname = "{name}"\nseed = 1\n{more}[recipe]\nname = "gpt"\n'
        f"[recipe.settings]\n{SETTINGS}{pipeline}[outer]\noptimizer = '{outer}'\nlr = 0.01\n[round]\ntokens = 640\n"
    )


def write_checkpoint(
    folder: Path,
    run: RunFile,
    toml: str,
    layout: tuple[TensorSpec, ...],
    state: AnchorState,
    claimed_digest: bytes | None = None,
    stage: StageAbout | None = None,
) -> Path:
    """Write the checkpoint of round ``state.version - 1`` as a member leaves it; return its folder."""
    verdicts = verdict_chain(state.version, run.hash)
    about = CheckpointAbout(
        run=run.run.name,
        run_hash=run.hash.hex(),
        run_toml=toml,
        recipe=None,
        layout=layout,
        outer_vectors=len(state.values) - 1,
        round=state.version - 1,
        anchor_version=state.version,
        state_digest=(claimed_digest or state.digest).hex(),
        chain=verdicts[-1].chain.hex(),
        tokens=640 * state.version,
        coordinator_key=SIGNER.public_key.hex(),
        stage=stage,
    )
    store = CheckpointStore(folder / CHECKPOINTS, run.hash, IDENTITY, Retention(9))
    return store.write(CheckpointContents(about, state, None, verdicts)).folder


def read(place: Path) -> Checkpoint:
    return read_checkpoint(FolderSource(place))


def random_state(elements: int, version: int = 3, slots: int = 2) -> AnchorState:
    generator = torch.Generator().manual_seed(version)
    return AnchorState.of(torch.randn(1 + slots, elements, generator=generator) * 0.05, version)


def start_toml(toml: str, folder: Path, *, only_parameters: bool = False) -> str:
    """The run file ``toml``, starting from the newest checkpoint in that folder."""
    section = start_section(StartFrom(folder, only_parameters=only_parameters), parse_run_file(toml))
    return with_section(toml, section, "run.toml")[0]


def started(toml: str, folder: Path, *, only_parameters: bool = False) -> RunFile:
    """The validated run file of ``start_toml``."""
    return parse_run_file(start_toml(toml, folder, only_parameters=only_parameters))


def run_start(run: RunFile, folder: Path | None, slots: int = 2) -> RunStart:
    """The start in a process that has the files in ``folder``, without a network."""
    assert run.start is not None
    files = StartFiles.find(folder, run.start, None) if folder is not None else None
    endpoint: object = None
    return RunStart(run.start, slots, files, endpoint, list, 1.0)  # type: ignore[arg-type]


def stage_layouts(layered: Layered, boundaries: Sequence[int]) -> list[tuple[TensorSpec, ...]]:
    return [tuple(spec for layer in layered.layouts[a:b] for spec in layer) for a, b in pairwise(boundaries)]


def put_together(states: Sequence[AnchorState], version: int) -> AnchorState:
    """The whole model's state, from those of its stages in their order."""
    return AnchorState.of(torch.cat([state.values for state in states], dim=1), version)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.view(torch.int32), other.view(torch.int32))
