"""``inner.compile``: a model, or the layers of a stage, compiled by ``torch.compile``; as they are where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.peer.training.layers import StageModel
from shoal.peer.training.step_memory import without_trace

log = logging.getLogger(__name__)

_ALIKE: Any = {"options": {"fallback_random": True}}
"""Compiled layers draw the same random numbers as others, since replicas of a stage are compared."""

_FAILURES = (RuntimeError, ImportError, OSError)


def compiled(model: nn.Module, trial: Callable[[nn.Module], Tensor]) -> nn.Module:
    """Return the model compiled; itself, with a warning, where that does not work here.

    Parameters and names are those of the model, which the compiled one calls. ``trial``: computes a loss with it, so
    that all is compiled when training begins."""
    try:
        made: nn.Module = torch.compile(model)  # type: ignore[assignment]
        with without_trace(model):
            trial(made).backward()  # type: ignore[no-untyped-call]
    except _FAILURES as error:
        _warn(error)
        return model
    return made


def compile_layers(model: StageModel, trial: Callable[[], None]) -> None:
    """Compile a stage's layers, each by itself, in place; leave them as they are, with a warning, where that does not
    work here.

    Between layers random numbers are seeded, which cannot be compiled; layers of one class share what is compiled.
    ``trial``: computes forward and backward once, so that all is compiled before the stage has work."""
    parts = model.parts
    try:
        for part in parts:
            part.compile(**_ALIKE)
        with without_trace(model):
            trial()
    except _FAILURES as error:
        for part in parts:
            part._compiled_call_impl = None
        _warn(error)


def _warn(error: Exception) -> None:
    log.warning(
        "the model is trained without torch.compile, which inner.compile asks for and which fails here: %s. It "
        "needs a C++ compiler, and Triton on a GPU",
        " ".join(str(error).split())[:300],
    )
