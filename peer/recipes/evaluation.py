"""Evaluation by recipes: an optional method by which a recipe tells more of a model than its held-out loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


def _on() -> None:
    pass


@dataclass(frozen=True)
class EvaluationRequest:
    """Extent of an evaluation.

    ``samples``: most held-out samples; ``prompts``: beginnings of texts, an empty one for the beginning of a document;
    ``text_tokens``: most tokens after each; ``temperature``: 0 for the likeliest token each time; ``seed``: of what is
    drawn; ``go_on``: to be called after each batch and each token: it raises where the evaluation is not wanted any
    more."""

    samples: int = 256
    prompts: tuple[str, ...] = ()
    text_tokens: int = 80
    temperature: float = 0.0
    seed: int = 0
    go_on: Callable[[], None] = _on


@dataclass(frozen=True)
class SourceFigure:
    """Mean loss on the held-out samples of one source of the data, in nats a token."""

    name: str
    loss: float
    samples: int


@dataclass(frozen=True)
class EvaluationFigures:
    """Findings of an evaluation.

    ``loss``: mean over ``samples`` held-out samples, in nats a token; ``accuracy``: share of the tokens, or labels,
    that the model finds likeliest; ``sources``: the loss by source; ``texts``: what the model has written after each
    prompt, in the order of the request. What a recipe does not have, it leaves out."""

    loss: float
    samples: int
    accuracy: float | None = None
    sources: tuple[SourceFigure, ...] = ()
    texts: tuple[str, ...] = ()


@runtime_checkable
class EvaluatingRecipe(Protocol):
    """A recipe with ``evaluate``. Of others only ``held_out_loss`` is known."""

    def evaluate(
        self, model: nn.Module, device: torch.device | str, request: EvaluationRequest, /
    ) -> EvaluationFigures:
        """Evaluate ``model``, which is on ``device`` and is left in its mode (training or not).

        Figures are a function of the model's values and the request: two machines that hold the same model have the
        same ones, but for rounding. So the held-out samples are the same each time, and nobody trains on them. Runs in
        a thread of its own; neither reads nor advances torch's global random generator."""
        ...
