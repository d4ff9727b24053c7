"""Checks of the model that members of a scope describe: all build the same one, and the one that the run file names."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.swarm.errors import CorpusError, ModelMismatch
from shoal.swarm.protocol.messages import PeerToCoordinatorDescribeModel
from shoal.swarm.protocol.pins import PinnedLayer, frozen_difference
from shoal.swarm.protocol.run_file import RunFile
from shoal.swarm.protocol.types import TensorSpec

_MAX_ELEMENTS = 2**40

DATA_DIFFERS = (
    "this machine's data differs from the run's: use the same Python version as the others, or ask the host for a run "
    'on the same files (data.source = "text:GLOB" or "tokens:FILE")'
)
"""The whole message: neither side shows the other its data."""


def check_model(
    run: RunFile,
    known: PeerToCoordinatorDescribeModel | None,
    model: PeerToCoordinatorDescribeModel,
    stage_layers: Sequence[PinnedLayer] | None = None,
) -> None:
    """Compare a model with the one that its scope knows, if any, and with the run file.

    ``stage_layers``: the pinned layers of a stage, empty without pins; None for a whole model. Raises ``ModelMismatch``
    or ``CorpusError`` that names the first difference."""
    if known is None:
        _check_first(run, model)
    elif difference := (first_difference(known.layout, model.layout) or frozen_difference(known.frozen, model.frozen)):
        raise ModelMismatch(f"this model is not the run's: {difference}")
    else:
        check_same_tokens(known, model)
    if run.pins is not None and stage_layers is None:
        run.pins.check_model(model)
    elif run.pins is not None and stage_layers:
        run.pins.check_stage(model, stage_layers)
    if known is not None and known.corpus_digest is not None and model.corpus_digest not in (None, known.corpus_digest):
        raise CorpusError(DATA_DIFFERS)


def check_same_tokens(known: PeerToCoordinatorDescribeModel, model: PeerToCoordinatorDescribeModel) -> None:
    """Raises ``ModelMismatch`` where a sample has another number of tokens."""
    if known.tokens_per_sample != model.tokens_per_sample:
        raise ModelMismatch(
            f"this model takes {model.tokens_per_sample} tokens a sample, the run's {known.tokens_per_sample}"
        )


def adds_to(known: PeerToCoordinatorDescribeModel | None, model: PeerToCoordinatorDescribeModel) -> bool:
    """Whether a model is the first one, or has the data's digest or number of samples where the known one lacks it."""
    if known is None or known.corpus_digest is None:
        return known is None or model.corpus_digest is not None
    return known.samples is None and model.samples is not None and known.corpus_digest == model.corpus_digest


def _check_first(run: RunFile, model: PeerToCoordinatorDescribeModel) -> None:
    if not 0 < model.elements <= _MAX_ELEMENTS:
        raise ModelMismatch(f"a run's model has 1 to {_MAX_ELEMENTS} parameters, this one {model.elements}")
    difference = run.start.difference(model.layout, whole=run.pipeline is None) if run.start else ""
    if run.start and difference:
        raise ModelMismatch(f"this model is not that of {run.start.source}, where the run starts: {difference}")


def first_difference(expected: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> str:
    """A sentence on the first tensor that differs; empty when none does."""
    for index, (theirs, ours) in enumerate(zip(expected, found, strict=False)):
        if theirs != ours:
            return (
                f"parameter {index} is {ours.name} {list(ours.shape)} here, "
                f"{theirs.name} {list(theirs.shape)} in the run"
            )
    if len(expected) != len(found):
        return f"it has {len(found)} parameters here, {len(expected)} in the run"
    return ""
