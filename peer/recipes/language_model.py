"""Base of recipes that train a causal language model on a corpus of tokens."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.peer.data_places import DataPlaces
from shoal.peer.recipes import Samples
from shoal.peer.recipes.corpus import CorpusSamples, open_samples
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection

_EVAL_BATCH = 16


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

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module, device: torch.device | str, max_samples: int = 256) -> float:
        """The loss on up to ``max_samples`` held-out samples, spread evenly.

        ``model`` is on ``device``, and is left in its mode (training or not)."""
        held_out = self._corpus.held_out
        count = min(max(1, max_samples), len(held_out))
        chosen = [number * len(held_out) // count for number in range(count)]
        was_training = model.training
        model.eval()
        try:
            total = 0.0
            for start in range(0, count, _EVAL_BATCH):
                batch = held_out.batch(chosen[start : start + _EVAL_BATCH]).to(device)
                total += float(self.loss(model, batch)) * len(batch)
        finally:
            model.train(was_training)
        return total / count
