"""Description of an export: where its model comes from, which tensors it has, how a person wants it written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from shoal.swarm.errors import StorageError, UserError
from shoal.swarm.protocol.evaluations import HeldOutFigure
from shoal.swarm.protocol.rounds import Verdict
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import TensorSpec


class ModelFormat(StrEnum):
    """``safetensors``: one file by the recipe's own names; ``hf``: a folder that transformers loads; ``gguf``: one file
    for llama.cpp and its kin."""

    safetensors = "safetensors"
    hf = "hf"
    gguf = "gguf"


DEFAULT_NAMES = {
    ModelFormat.safetensors: "model.safetensors",
    ModelFormat.hf: "model",
    ModelFormat.gguf: "model.gguf",
}
"""Names of exports that nobody gave a name."""


@dataclass(frozen=True)
class Contributors:
    """Peers in the plans of committed rounds. ``rounds``: how many each was in; ``first``: the oldest known round."""

    rounds: Mapping[str, int]
    first: int

    @classmethod
    def of(cls, scopes: Iterable[Sequence[Verdict]]) -> Contributors:
        """Count the members of these verdicts; ``scopes``: those of the run, or of each stage of a pipeline."""
        found = {
            (member.peer, verdict.round)
            for verdicts in scopes
            for verdict in verdicts
            if verdict.committed and verdict.plan is not None
            for member in verdict.plan.members
        }
        return cls(Counter(peer for peer, _ in found), min((number for _, number in found), default=0))


@dataclass(frozen=True)
class ModelOrigin:
    """The run and the state that a model comes from. ``chain``: head of the verdict chain, of a pipeline the hash that
    ties its stages' verdicts together; None before the first round. ``contributors``: None where nobody asked;
    ``held_out``: the newest figure of validators, of this version or an earlier one, where a live run told it."""

    run: RunFile
    version: int
    rounds: int = 0
    tokens: int = 0
    chain: bytes | None = None
    state_digest: str | None = None
    contributors: Contributors | None = None
    held_out: HeldOutFigure | None = None

    def texts(self) -> dict[str, str]:
        """The origin in a few words that any format has room for."""
        texts = {
            "run": self.run.run.name,
            "run_hash": self.run.hash.hex(),
            "anchor_version": str(self.version),
        }
        if self.held_out is not None:
            texts |= {"held_out_loss": f"{self.held_out.loss:.6g}", "held_out_version": str(self.held_out.version)}
        return texts if self.state_digest is None else {**texts, "state_digest": self.state_digest}


@dataclass(frozen=True)
class ModelAbout:
    """``layout``: all parameters in their order; ``recipe``: its config, None for own training loops.

    ``buffers``: such as a BatchNorm's running statistics, which rounds do not average; ``buffers_of``: whose."""

    layout: tuple[TensorSpec, ...]
    recipe: Mapping[str, Any] | None
    origin: ModelOrigin
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    buffers_of: str = ""

    def provenance(self) -> dict[str, str]:
        """Where parameters and buffers come from, as texts."""
        texts = self.origin.texts()
        return {**texts, "buffers": f"of {self.buffers_of}, not averaged"} if self.buffers else texts


@dataclass(frozen=True)
class ExportOptions:
    """How to write a model. ``tokenizer``: a tokenizer.json or a folder with one, where the run's data does not say how
    text becomes tokens; ``contributors``: name them in the model card; ``replace``: an earlier export in its place."""

    format: ModelFormat = ModelFormat.safetensors
    dtype: torch.dtype = torch.float32
    tokenizer: Path | None = None
    contributors: bool = False
    replace: bool = True


class ModelWriter(Protocol):
    """Writer of an export, which appears when the context ends without an error, and else leaves no trace.

    Methods block, and raise ``StorageError``."""

    def append(self, vector: Tensor) -> None:
        """Write the next values, (k,), of the parameters one after the other, in the layout's order."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def check_replaceable(path: Path, options: ExportOptions) -> None:
    """Raise ``UserError`` if there is something at ``path`` that the options do not allow to replace."""
    is_there = any(path.iterdir()) if path.is_dir() else path.exists()
    if is_there and not options.replace:
        raise UserError(f"{path}: exists already; give another --out, or --replace for an earlier export")


def rounded_to(dtype: torch.dtype, vector: Tensor) -> Tensor:
    """Convert values to the export's number format. Raises ``UserError`` for finite ones that it cannot hold."""
    rounded = vector.to(dtype)
    if dtype is torch.float16 and bool((rounded.isinf() & vector.isfinite()).any()):
        raise UserError("--precision float16: the model has values above 65,504; take bfloat16 or float32")
    return rounded


def refusal(path: Path, error: OSError) -> StorageError:
    """The error to raise where an export cannot be written."""
    return StorageError(f"{path}: the model cannot be written: {error}")
