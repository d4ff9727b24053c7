"""Base of recipes that train a causal language model on a corpus of tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import PurePosixPath

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.peer.data_places import DataPlaces
from shoal.peer.recipes import Samples
from shoal.peer.recipes.corpus import CorpusSamples, open_samples
from shoal.peer.recipes.evaluation import EvaluationFigures, EvaluationRequest, SourceFigure
from shoal.peer.recipes.text_sampling import Sampling, sample_bytes
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection

_EVAL_BATCH = 16
_MOST_SOURCES = 12
"""Sources whose loss is told by name, the largest ones."""


class LanguageModelRecipe:
    """Data and loss of a causal language model. See ``Recipe`` and ``LayeredRecipe`` for the methods."""

    def __init__(self, context: int, vocab: int, data: DataSection, places: DataPlaces) -> None:
        """``context``: tokens of a sample; ``vocab``: the model's. Raises ``RecipeError``."""
        if data.tokens_per_sample not in (None, context):
            raise RecipeError(
                f"data.tokens_per_sample: expected nothing or recipe.settings.context ({context}), "
                f"not {data.tokens_per_sample}"
            )
        self.tokens_per_sample = context
        self._vocab = vocab
        self._data, self._places = data, places

    @cached_property
    def _corpus(self) -> CorpusSamples:
        return open_samples(self._data, self._vocab, self.tokens_per_sample, self._places)

    @property
    def corpus_digest(self) -> bytes:
        return self._corpus.digest

    @property
    def corpus_about(self) -> str:
        return self._corpus.about

    def training_data(self) -> Samples:
        return self._corpus.train

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.loss_of(self.logits(model, self.input_of(batch)), self.targets_of(batch))

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Logits of a model for ``tokens``: ``(b, t, vocab)``."""
        found: Tensor = model(tokens)
        return found

    def input_of(self, batch: Tensor) -> Tensor:
        """All tokens of each sample but the last: ``(b, context) int64``."""
        return batch[:, :-1]

    def targets_of(self, batch: Tensor) -> Tensor:
        """All tokens of each sample but the first: ``(b, context) int64``."""
        return batch[:, 1:]

    def check_targets(self, targets: Tensor, samples: int) -> None:
        expected = (samples, self.tokens_per_sample)
        if targets.dtype != torch.int64 or targets.shape != expected:
            raise ValueError(f"targets: expected {expected} int64, not {tuple(targets.shape)} {targets.dtype}")
        if not 0 <= int(targets.min()) <= int(targets.max()) < self._vocab:
            raise ValueError(f"targets: expected tokens from 0 to {self._vocab - 1}")

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, nats a token, from logits ``(b, context, vocab)``."""
        return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())

    def held_out_loss(self, model: nn.Module, device: torch.device | str, max_samples: int = 256) -> float:
        """The loss on up to ``max_samples`` held-out samples, spread evenly.

        ``model`` is on ``device``, and is left in its mode (training or not)."""
        return self.evaluate(model, device, EvaluationRequest(samples=max_samples)).loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module, device: torch.device | str, request: EvaluationRequest) -> EvaluationFigures:
        """See ``EvaluatingRecipe``: loss, accuracy, the loss by source, and texts where tokens are bytes."""
        held_out = self._corpus.held_out
        count = min(max(1, request.samples), len(held_out))
        chosen = [number * len(held_out) // count for number in range(count)]
        losses: list[float] = []
        right = 0
        was_training = model.training
        model.eval()
        try:
            for start in range(0, count, _EVAL_BATCH):
                batch = held_out.batch(chosen[start : start + _EVAL_BATCH]).to(device)
                logits, targets = self.logits(model, self.input_of(batch)), self.targets_of(batch)
                each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
                losses += each.view(len(batch), -1).mean(dim=1).tolist()
                right += int((logits.argmax(dim=-1) == targets).sum())
                request.go_on()
            texts = self._texts(model, device, request)
        finally:
            model.train(was_training)
        return EvaluationFigures(
            loss=math.fsum(losses) / count,
            samples=count,
            accuracy=right / (count * self.tokens_per_sample),
            sources=figures_by_source(self._corpus.sources, chosen, losses),
            texts=texts,
        )

    def _texts(self, model: nn.Module, device: torch.device | str, request: EvaluationRequest) -> tuple[str, ...]:
        """What the model writes after each prompt; nothing where only a tokenizer would know what tokens say."""
        if not self._corpus.is_bytes:
            return ()
        written = []
        for number, prompt in enumerate(request.prompts):
            sampling = Sampling(request.text_tokens, request.temperature, None, request.seed + number, stops=True)
            logits_of = partial(self.logits, model)
            context = self.tokens_per_sample
            written.append(sample_bytes(logits_of, prompt.encode(), sampling, context, device, request.go_on))
        return tuple(one.decode("utf-8", "replace") for one in written)


def figures_by_source(
    sources: Sequence[tuple[str, int]], chosen: Sequence[int], losses: Sequence[float]
) -> tuple[SourceFigure, ...]:
    """Return the mean loss by source, of the ``losses`` of the ``chosen`` samples, in rising order.

    ``sources``: files by name, each with the number of the first sample after it. They are grouped by their folder, or
    where that is the same by the end of their names; the smallest groups are one, ``others``."""
    if not sources:
        return ()
    folders = [name.rpartition("/")[0] for name, _ in sources]
    tops = [folder.partition("/")[0] or "." for folder in folders]
    groups = tops if len(set(tops)) > 1 else [PurePosixPath(name).suffix or name for name, _ in sources]
    if len(set(groups)) < 2:
        return ()
    stops = [stop for _, stop in sources]
    found: dict[str, list[float]] = {}
    for number, loss in zip(chosen, losses, strict=True):
        group = groups[min(bisect_right(stops, number), len(groups) - 1)]
        found.setdefault(group, []).append(loss)
    ranked = sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))
    shown, rest = ranked[:_MOST_SOURCES], [loss for _, more in ranked[_MOST_SOURCES:] for loss in more]
    named = [*shown, ("others", rest)] if rest else shown
    return tuple(SourceFigure(name, math.fsum(each) / len(each), len(each)) for name, each in named)
