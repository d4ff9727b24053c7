"""The language model recipe: a decoder-only transformer over bytes or tokens, small enough to read at once.

The model is plain torch; the recipe joins it to a corpus, and ``generate`` lets people see what it learnt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from shoal.peer.recipes import check_settings
from shoal.peer.recipes.corpus import BYTE_VOCAB, SEPARATOR, WindowDataset, load_corpus
from shoal.swarm.errors import RecipeError
from shoal.swarm.run_file import DataSection

NAME = "gpt"

_LINEAR_GAIN = 0.7
_EVAL_BATCH = 16


class GptSettings(BaseModel):
    """``[recipe.settings]`` of ``name = "gpt"``. ``context`` is in tokens; ``hidden`` is the width inside the
    MLP, by default 8/3 of ``width`` rounded up to a multiple of 32 (SwiGLU's usual size)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    layers: Annotated[int, Field(ge=1, le=512)]
    heads: Annotated[int, Field(ge=1, le=1024)]
    width: Annotated[int, Field(ge=2, le=65_536)]
    context: Annotated[int, Field(ge=1, le=1_048_576)]
    vocab: Annotated[int, Field(ge=2, le=2**24)] = BYTE_VOCAB
    hidden: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    tie_embedding: bool = True
    qk_norm: bool = True

    @model_validator(mode="after")
    def _divides(self) -> GptSettings:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width: expected an even multiple of heads ({self.heads}, in rotary pairs), got {self.width}"
            )
        return self

    @property
    def hidden_width(self) -> int:
        """``hidden``, or its default."""
        return self.hidden if self.hidden is not None else -(-self.width * 8 // (3 * 32)) * 32


class _Linear(nn.Linear):
    """No bias, and no initial values from torch's global generator: ``Gpt.initialise`` sets them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: see the class."""


class _Embedding(nn.Embedding):
    """As ``_Linear``: no values of its own."""

    def reset_parameters(self) -> None:
        """Nothing: see the class."""


class _Block(nn.Module):
    """Pre-norm attention and SwiGLU (Shazeer 2020), each added to the residual stream."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        width, hidden = settings.width, settings.hidden_width
        self.heads = settings.heads
        self.qk_norm = settings.qk_norm
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = _Linear(width, 3 * width)
        self.attention_out = _Linear(width, width)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = _Linear(width, 2 * hidden)
        self.mlp_out = _Linear(hidden, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x``: ``(b, t, width)``; ``cos``, ``sin``: ``(t, width / heads)``. Returns ``(b, t, width)``."""
        x = x + self.attention_out(self._attend(self.qkv(self.attention_norm(x)), cos, sin))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.mlp_out(F.silu(gate) * up)
        return out

    def _attend(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = qkv.shape
        by_head = qkv.view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        qk, v = by_head[:2], by_head[2]
        if self.qk_norm:
            # Bounds the attention logits, which keeps high learning rates stable (Henry et al. 2020).
            qk = F.rms_norm(qk, (qk.shape[-1],), eps=1e-6)
        q, k = rotate(qk, cos, sin).to(v.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(b, t, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), the pairs being ``(i, i + d/2)``. ``x``: ``(..., t, d)``.

    ``cos`` and ``sin``: ``(t, d)`` from ``rotary_table``. The result is float32 like them, whatever ``x`` is.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def rotary_table(context: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position's angles: two ``(context, size) float32``."""
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
    angles = torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequencies)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


class Gpt(nn.Module):
    """Decoder-only transformer. Its values are undefined until ``initialise`` or ``load_state_dict``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = _Embedding(settings.vocab, settings.width)
        self.blocks = nn.ModuleList(_Block(settings) for _ in range(settings.layers))
        self.final_norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.head = None if settings.tie_embedding else _Linear(settings.width, settings.vocab)
        cos, sin = rotary_table(settings.context, settings.width // settings.heads, settings.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Fresh values from ``generator`` (on the CPU) alone, the same bits on every machine. The deviation
        shrinks with the square root of the fan-in, and for projections into the residual stream with that of
        the depth, so that its variance does not grow (Radford et al. 2019, GPT-2)."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                    continue
                std = (1.0 if name == "embedding.weight" else _LINEAR_GAIN) / math.sqrt(parameter.shape[1])
                if name.endswith("_out.weight"):
                    std /= math.sqrt(2 * self.settings.layers)
                parameter.copy_(_bell(parameter.shape, std, generator))

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: ``(b, t) int64``, t up to ``context``. Returns logits ``(b, t, vocab)``."""
        t = tokens.shape[1]
        cos, sin = self.cos[:t], self.sin[:t]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.final_norm(x), weight)


def _bell(shape: torch.Size, std: float, generator: torch.Generator) -> Tensor:
    """Bell-shaped values of mean 0 within 3 ``std``: ``shape`` float64.

    A sum of three uniforms and not torch's normal, whose logarithms and cosines differ in the last bit from
    one processor to the next: these additions are exact, and peers have to start bit-identical.
    """
    total = torch.full(shape, -1.5, dtype=torch.float64, device="cpu")
    for _ in range(3):
        total += torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    return total * (2.0 * std)


class GptRecipe:
    """The recipe ``gpt``: ``Gpt`` on the corpus that the run names."""

    def __init__(self, settings: dict[str, Any], data: DataSection) -> None:
        """Opens the corpus. Raises ``RecipeError`` (settings) or ``CorpusError`` (data)."""
        self.settings = check_settings(GptSettings, settings)
        context = self.settings.context
        if data.tokens_per_sample not in (None, context):
            raise RecipeError(
                f"data.tokens_per_sample: expected nothing or recipe.settings.context ({context}), "
                f"not {data.tokens_per_sample}"
            )
        corpus = load_corpus(data, self.settings.vocab, context)
        self.tokens_per_sample = context
        self.corpus_digest = corpus.digest
        self.corpus_about = corpus.about
        self._train = WindowDataset(corpus.train, context)
        self._held_out = WindowDataset(corpus.held_out, context)

    def build_model(self, seed: int) -> Gpt:
        """The model at its start, float32 on the CPU; the global random generator is left alone."""
        model = _empty_model(self.settings)
        model.initialise(torch.Generator(device="cpu").manual_seed(seed))
        return model

    def training_data(self) -> WindowDataset:
        """Samples of ``(context + 1,) int64``."""
        return self._train

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross entropy, nats a token, ``() float32``. ``batch``: ``(b, context + 1) int64``."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module, device: torch.device | str, max_samples: int = 256) -> float:
        """Mean cross entropy, nats a token, on up to ``max_samples`` held-out samples spread evenly.

        ``model`` stands on ``device`` and is left in the mode (training or not) it was in.
        """
        count = min(max(1, max_samples), len(self._held_out))
        chosen = [number * len(self._held_out) // count for number in range(count)]
        was_training = model.training
        model.eval()
        try:
            total = 0.0
            for start in range(0, count, _EVAL_BATCH):
                batch = self._held_out.batch(chosen[start : start + _EVAL_BATCH]).to(device)
                total += float(self.loss(model, batch)) * len(batch)
        finally:
            model.train(was_training)
        return total / count

    def config(self) -> dict[str, Any]:
        """JSON-able; ``model_from_config`` builds the same model from it."""
        settings = self.settings.model_dump(mode="json") | {"hidden": self.settings.hidden_width}
        return {"name": NAME, "settings": settings}

    @classmethod
    def model_from_config(cls, config: Mapping[str, Any]) -> Gpt:
        """The model of a saved config, its parameters still to be loaded. Raises ``RecipeError``."""
        if config.get("name") != NAME:
            raise RecipeError(f"model config: name: expected {NAME!r}, not {config.get('name')!r}")
        return _empty_model(check_settings(GptSettings, config.get("settings"), "model config: settings"))


def _empty_model(settings: GptSettings) -> Gpt:
    # The caller's default dtype and device are not the run's: peers have to start bit-identical.
    with torch.device("cpu"):
        return Gpt(settings).float()


@torch.no_grad()
def generate(model: Gpt, prompt: bytes, tokens: int, temperature: float, top_k: int | None, seed: int) -> bytes:
    """``tokens`` bytes that the model writes after ``prompt``, the prompt not included.

    ``temperature`` 0 takes the likeliest byte; ``top_k`` keeps that many candidates. Only the last
    ``context`` bytes are seen; an empty prompt starts a document. Drawn on the CPU, from ``seed``.

    Raises ``RecipeError`` for a model that does not speak bytes, ``ValueError`` for arguments out of range.
    """
    settings = model.settings
    if settings.vocab != BYTE_VOCAB:
        raise RecipeError(
            f"this model has a vocabulary of {settings.vocab} tokens, and text takes {BYTE_VOCAB} (bytes); "
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
    """One token from ``(vocab,) float32`` logits."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    return int(torch.multinomial(F.softmax(logits / temperature, dim=0), 1, generator=generator))
