"""The language model recipe: a small transformer joined to a corpus; ``generate`` samples text from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.peer.data_places import NOWHERE, DataPlaces
from shoal.peer.recipes import check_settings
from shoal.peer.recipes.corpus import BYTE_VOCAB
from shoal.peer.recipes.gpt_model import Gpt, GptSettings, empty_model, layered_gpt
from shoal.peer.recipes.language_model import LanguageModelRecipe
from shoal.peer.recipes.text_sampling import Sampling, sample_bytes
from shoal.peer.training.layers import Layered
from shoal.peer.training.tensor_parallel import Cut, CutInputs, CutOutputs
from shoal.swarm.errors import RecipeError
from shoal.swarm.protocol.run_file import DataSection

NAME = "gpt"


class GptRecipe(LanguageModelRecipe):
    """The recipe ``gpt``: ``Gpt`` on the corpus that the run names."""

    def __init__(self, settings: dict[str, Any], data: DataSection, places: DataPlaces = NOWHERE) -> None:
        """Raises ``RecipeError``."""
        self.settings = check_settings(GptSettings, settings)
        super().__init__(self.settings.context, self.settings.vocab, data, places)

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
    sampling = Sampling(tokens, temperature, top_k, seed)
    device = model.embedding.weight.device
    was_training = model.training
    model.eval()
    try:
        return sample_bytes(model, prompt, sampling, settings.context, device)
    finally:
        model.train(was_training)


__all__ = ["NAME", "Gpt", "GptRecipe", "GptSettings", "generate"]
