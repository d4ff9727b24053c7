"""The language model recipe: a small transformer joined to a corpus; ``generate`` samples text from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.peer.recipes import check_settings
from shoal.peer.recipes.corpus import BYTE_VOCAB, SEPARATOR, Corpus, WindowDataset, load_corpus
from shoal.peer.recipes.gpt_model import Gpt, GptSettings, empty_model, layered_gpt
from shoal.peer.training.layers import Layered
from shoal.peer.training.tensor_parallel import Cut, CutInputs, CutOutputs
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection

NAME = "gpt"

_EVAL_BATCH = 16


class GptRecipe:
    """The recipe ``gpt``: ``Gpt`` on the corpus that the run names. See ``Recipe`` and ``LayeredRecipe`` for its
    methods."""

    def __init__(self, settings: dict[str, Any], data: DataSection, folders: Sequence[Path] = ()) -> None:
        """Raises ``RecipeError``."""
        self.settings = check_settings(GptSettings, settings)
        context = self.settings.context
        if data.tokens_per_sample not in (None, context):
            raise RecipeError(
                f"data.tokens_per_sample: expected nothing or recipe.settings.context ({context}), "
                f"not {data.tokens_per_sample}"
            )
        self.tokens_per_sample = context
        self._data, self._folders = data, folders

    @cached_property
    def _corpus(self) -> Corpus:
        return load_corpus(self._data, self.settings.vocab, self.tokens_per_sample, self._folders)

    @property
    def corpus_digest(self) -> bytes:
        return self._corpus.digest

    @property
    def corpus_about(self) -> str:
        return self._corpus.about

    def build_model(self, seed: int) -> Gpt:
        model = empty_model(self.settings)
        model.initialise(torch.Generator(device="cpu").manual_seed(seed))
        return model

    def layers(self, seed: int) -> Layered:
        return layered_gpt(self.settings, seed)

    def tensor_parallel(self) -> dict[str, Cut]:
        heads = CutOutputs(parts=3, of="heads", units=self.settings.heads)
        return {
            "blocks.*.qkv": heads,
            "blocks.*.attention_out": CutInputs(),
            "blocks.*.gate_up": CutOutputs(parts=2, of="hidden values"),
            "blocks.*.mlp_out": CutInputs(),
        }

    def training_data(self) -> WindowDataset:
        return WindowDataset(self._corpus.train, self.tokens_per_sample)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return self.loss_of(model(self.input_of(batch)), self.targets_of(batch))

    def input_of(self, batch: Tensor) -> Tensor:
        """All tokens of each sample but the last: ``(b, context) int64``."""
        return batch[:, :-1]

    def targets_of(self, batch: Tensor) -> Tensor:
        """All tokens of each sample but the first: ``(b, context) int64``."""
        return batch[:, 1:]

    def check_targets(self, targets: Tensor, samples: int) -> None:
        expected, vocab = (samples, self.settings.context), self.settings.vocab
        if targets.dtype != torch.int64 or targets.shape != expected:
            raise ValueError(f"targets: expected {expected} int64, not {tuple(targets.shape)} {targets.dtype}")
        if not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
            raise ValueError(f"targets: expected tokens from 0 to {vocab - 1}")

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, nats a token, from logits ``(b, context, vocab)``."""
        return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module, device: torch.device | str, max_samples: int = 256) -> float:
        """The loss on up to ``max_samples`` held-out samples, spread evenly.

        ``model`` is on ``device``, and is left in its mode (training or not)."""
        held_out = WindowDataset(self._corpus.held_out, self.tokens_per_sample)
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

    def config(self) -> dict[str, Any]:
        settings = self.settings.model_dump(mode="json") | {"hidden": self.settings.hidden_width}
        return {"name": NAME, "settings": settings}

    @classmethod
    def model_from_config(cls, config: Mapping[str, Any]) -> Gpt:
        if config.get("name") != NAME:
            raise RecipeError(f"model config: name: expected {NAME!r}, not {config.get('name')!r}")
        return empty_model(check_settings(GptSettings, config.get("settings"), "model config: settings"))


@torch.no_grad()
def generate(model: Gpt, prompt: bytes, tokens: int, temperature: float, top_k: int | None, seed: int) -> bytes:
    """Sample ``tokens`` bytes that follow ``prompt``; the prompt is not in the result.

    ``temperature`` 0 takes the likeliest byte; ``top_k`` limits the number of candidates. The model sees the last
    ``context`` bytes only; an empty prompt starts a document. Drawn on the CPU, from ``seed``.

    Raises ``RecipeError`` for a model whose tokens are not bytes, ``ValueError`` for arguments out of range."""
    settings = model.settings
    if settings.vocab != BYTE_VOCAB:
        raise RecipeError(
            f"this model has a vocabulary of {settings.vocab} tokens instead of the {BYTE_VOCAB} bytes of text; "
            f"decode its tokens with the tokenizer that made its corpus"
        )
    if tokens < 0 or not 0 <= temperature < math.inf or (top_k is not None and top_k < 1):
        raise ValueError("expected tokens >= 0, temperature >= 0 and top_k >= 1 or None")
    generator = torch.Generator(device="cpu").manual_seed(seed)
    device = model.embedding.weight.device
    text = bytearray(prompt or bytes([SEPARATOR]))
    start = len(text)
    was_training = model.training
    model.eval()
    try:
        for _ in range(tokens):
            window = torch.tensor(list(text[-settings.context :]), device=device)
            logits = model(window[None])[0, -1].float().cpu()
            text.append(_draw(logits, temperature, top_k, generator))
    finally:
        model.train(was_training)
    return bytes(text[start:])


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw one token from ``(vocab,) float32`` logits."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    return int(torch.multinomial(F.softmax(logits / temperature, dim=0), 1, generator=generator))


__all__ = ["NAME", "Gpt", "GptRecipe", "GptSettings", "generate"]
