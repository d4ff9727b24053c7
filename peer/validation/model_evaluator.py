"""Evaluator of a run's model: computes held-out figures of one version at a time, in a thread beside the following."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shoal.peer.recipes import Recipe
from shoal.peer.recipes.evaluation import EvaluatingRecipe, EvaluationFigures, EvaluationRequest
from shoal.peer.training.parameters import ParameterVector
from shoal.swarm.protocol.evaluations import (
    MAX_SOURCES,
    MAX_TEXT,
    Evaluation,
    SourceLoss,
    TextSample,
    plain_line,
    plain_text,
)
from shoal.swarm.protocol.run_file import RunFile

_MOST_LOSS = 1e30


class _GivenUpError(Exception):
    """The evaluation is not wanted any more."""


class ModelEvaluator:
    """Evaluates versions of the model, one at a time; a context manager. Used from one thread."""

    def __init__(self, run: RunFile, recipe: Recipe, device: torch.device) -> None:
        self._run, self._recipe, self._device = run, recipe, device
        # In float32 whatever the run's precision, as every validator's: their figures are to be the same.
        self._model = recipe.build_model(run.run.seed).float().to(device).eval()
        self._vector = ParameterVector(self._model)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="shoal-evaluation")
        self._is_given_up = threading.Event()
        self._running: Future[Evaluation] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_given_up.set()
        self._threads.shutdown()

    @property
    def is_idle(self) -> bool:
        return self._running is None

    def begin(self, version: int, digest: bytes, anchor: Tensor) -> None:
        """Begin to evaluate a version. ``digest``: of its state; ``anchor``: (n,) float32, copied before this returns.

        ``is_idle`` comes first."""
        assert self._running is None, "one at a time"
        self._vector.write(anchor)
        self._running = self._threads.submit(self._evaluate, version, digest)

    def result(self) -> Evaluation | None:
        """Return the evaluation once it is done, and None before. Raises what the recipe has raised."""
        if self._running is None or not self._running.done():
            return None
        done, self._running = self._running, None
        return done.result()

    def _evaluate(self, version: int, digest: bytes) -> Evaluation:
        asked, started_s = self._run.evaluation, time.monotonic()
        request = EvaluationRequest(
            samples=asked.samples,
            prompts=asked.prompts,
            text_tokens=asked.text_tokens,
            temperature=asked.temperature,
            seed=self._run.run.seed % 2**62,
            go_on=self._go_on,
        )
        figures = figures_of(self._recipe, self._model, self._device, request)
        return evaluation_of(version, digest, request, figures, time.monotonic() - started_s)

    def _go_on(self) -> None:
        if self._is_given_up.is_set():
            raise _GivenUpError


def figures_of(
    recipe: Recipe, model: torch.nn.Module, device: torch.device | str, request: EvaluationRequest
) -> EvaluationFigures:
    """Evaluate a model by all that its recipe offers."""
    if isinstance(recipe, EvaluatingRecipe):
        return recipe.evaluate(model, device, request)
    return EvaluationFigures(recipe.held_out_loss(model, device, request.samples), request.samples)


def evaluation_of(
    version: int, digest: bytes, request: EvaluationRequest, figures: EvaluationFigures, took_s: float
) -> Evaluation:
    """Return what is reported of a recipe's figures: bounded, with plain texts, without what is no finite number."""
    texts = zip(request.prompts, figures.texts, strict=False)
    return Evaluation(
        version=version,
        state_digest=digest,
        loss=_finite(figures.loss),
        samples=max(1, figures.samples),
        accuracy=figures.accuracy if figures.accuracy is not None and 0 <= figures.accuracy <= 1 else None,
        sources=tuple(
            SourceLoss(name=plain_line(one.name, 64) or "?", loss=loss, samples=one.samples)
            for one in figures.sources[:MAX_SOURCES]
            if (loss := _finite(one.loss)) is not None
        ),
        texts=tuple(TextSample(prompt=prompt, text=plain_text(text, MAX_TEXT)) for prompt, text in texts),
        took_s=min(took_s, 1e9),
    )


def _finite(loss: float) -> float | None:
    return float(loss) if math.isfinite(loss) and abs(loss) <= _MOST_LOSS else None
