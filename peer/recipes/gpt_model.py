"""The language model of the recipe ``gpt``: a decoder-only transformer in plain torch, whole or layer by layer."""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from shoal.peer.recipes.corpus import BYTE_VOCAB
from shoal.peer.recipes.exact_draws import UNIFORMS, bell
from shoal.peer.training.layers import Layer, Layered

_LINEAR_GAIN = 0.7
_SKIPPED_AT_ONCE = 2**20


class GptSettings(BaseModel):
    """``[recipe.settings]`` of ``name = "gpt"``.

    ``context`` is in tokens; ``hidden`` is the width inside the MLP, by default 8/3 of ``width`` rounded up to a
    multiple of 32 (SwiGLU's usual size)."""

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
        return self.hidden if self.hidden is not None else -(-self.width * 8 // (3 * 32)) * 32


class _Linear(nn.Linear):
    """Linear layer without bias; ``Gpt.initialise`` sets its values, not torch's global generator."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None: ...


class _Embedding(nn.Embedding):
    """Embedding whose values ``Gpt.initialise`` sets."""

    def reset_parameters(self) -> None: ...


class _Block(nn.Module):
    """Pre-norm attention and SwiGLU (Shazeer 2020), each added to the residual stream."""

    def __init__(self, settings: GptSettings, rotary: Rotary) -> None:
        super().__init__()
        width, hidden = settings.width, settings.hidden_width
        self.head_width = width // settings.heads
        self.qk_norm = settings.qk_norm
        self.rotary = rotary
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = _Linear(width, 3 * width)
        self.attention_out = _Linear(width, width)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate_up = _Linear(width, 2 * hidden)
        self.mlp_out = _Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``(b, t, width)``. Returns ``(b, t, width)``."""
        x = x + self.attention_out(self._attend(self.qkv(self.attention_norm(x))))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.mlp_out(F.silu(gate) * up)
        return out

    def _attend(self, qkv: Tensor) -> Tensor:
        b, t, _ = qkv.shape
        by_head = qkv.view(b, t, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)  # maybe some of the heads
        qk, v = by_head[:2], by_head[2]
        if self.qk_norm:
            # Bounds the attention logits, which keeps high learning rates stable (Henry et al. 2020).
            qk = F.rms_norm(qk, (qk.shape[-1],), eps=1e-6)
        q, k = rotate(qk, self.rotary.cos[:t], self.rotary.sin[:t]).to(v.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(b, t, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) in pairs ``(i, i + d/2)``; ``x``: ``(..., t, d)``.

    ``cos`` and ``sin``: ``(t, d)`` from ``rotary_table``. The result is float32 like them, whatever ``x`` is."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def rotary_table(context: int, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of every position's angles: two tensors ``(context, size) float32``."""
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size)
    angles = torch.outer(torch.arange(context, dtype=torch.float64, device="cpu"), frequencies)
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


class Rotary(nn.Module):
    """The rotary table, one for all blocks of a model: ``cos`` and ``sin``, ``(context, width / heads) float32``."""

    cos: Tensor
    sin: Tensor

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        cos, sin = rotary_table(settings.context, settings.width // settings.heads, settings.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)


class _TiedHead(nn.Module):
    """Output layer that shares the embedding's weight."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight)


class Gpt(nn.Module):
    """Decoder-only transformer. Its values are undefined until ``initialise`` or ``load_state_dict``."""

    def __init__(self, settings: GptSettings) -> None:
        super().__init__()
        self.settings = settings
        rotary = Rotary(settings)
        self.embedding = _Embedding(settings.vocab, settings.width)
        self.blocks = nn.ModuleList(_Block(settings, rotary) for _ in range(settings.layers))
        self.final_norm = nn.RMSNorm(settings.width, eps=1e-6)
        self.head = None if settings.tie_embedding else _Linear(settings.width, settings.vocab)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw initial values from ``generator`` (on the CPU) alone: the same bits on every machine."""
        for name, parameter in self.named_parameters():
            _initialise(name, parameter, self.settings, generator)

    def layers(self) -> list[Layer]:
        """Embedding, blocks, and final norm with output layer; ``forward`` is one after the other."""
        head = _TiedHead(self.embedding) if self.head is None else self.head
        return [
            Layer("embedding", (("embedding", self.embedding),)),
            *(Layer(f"blocks.{number}", ((f"blocks.{number}", block),)) for number, block in enumerate(self.blocks)),
            Layer("head", (("final_norm", self.final_norm), ("head", head))),
        ]

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: ``(b, t) int64``, t up to ``context``. Returns logits ``(b, t, vocab)``."""
        x = tokens
        for layer in self.layers():
            x = layer(x)
        return x


@torch.no_grad()
def _initialise(name: str, parameter: nn.Parameter, settings: GptSettings, generator: torch.Generator) -> None:
    """Draw the initial values of the parameter called ``name``.

    Their deviation shrinks with the square root of the fan-in, and for projections into the residual stream with that
    of the depth, so that the stream's variance does not grow (Radford et al. 2019, GPT-2). For a parameter on the meta
    device ``generator`` only advances as far as for any other."""
    if parameter.ndim == 1:
        parameter.fill_(1.0)
        return
    if parameter.is_meta:
        left = UNIFORMS * parameter.numel()
        while left > 0:
            left -= torch.rand(
                min(left, _SKIPPED_AT_ONCE), generator=generator, dtype=torch.float32, device="cpu"
            ).numel()
        return
    std = (1.0 if name == "embedding.weight" else _LINEAR_GAIN) / math.sqrt(parameter.shape[1])
    if name.endswith("_out.weight"):
        std /= math.sqrt(2 * settings.layers)
    parameter.copy_(bell(parameter.shape, std, generator))


def empty_model(settings: GptSettings) -> Gpt:
    """The whole model, float32 on the CPU, with undefined values."""
    # Peers have to start bit-identical, whatever the caller's default dtype and device are.
    with torch.device("cpu"):
        return Gpt(settings).float()


def layered_gpt(settings: GptSettings, seed: int) -> Layered:
    """The layers of the model with the initial values of ``seed``."""
    with torch.device("meta"):
        outline = Gpt(settings).float()

    def build(first: int, stop: int) -> list[Layer]:
        # Layers that are not wanted stay on the meta device, where they take no memory. One generator gives the values
        # of the whole model, parameter after parameter, so values before the wanted layers are drawn and dropped.
        with torch.device("meta"):
            model = Gpt(settings).float()
        _fill_in(model, first, stop)
        layers = model.layers()
        generator = torch.Generator(device="cpu").manual_seed(seed)
        drawn: set[nn.Parameter] = set()
        for layer in layers[:stop]:
            for name, parameter in layer.named_parameters():
                if parameter not in drawn:
                    drawn.add(parameter)
                    _initialise(name, parameter, settings, generator)
        return layers[first:stop]

    return Layered(outline.layers(), build, untie="set recipe.settings.tie_embedding = false")


def _fill_in(model: Gpt, first: int, stop: int) -> None:
    """Replace layers first to stop - 1 by layers on the CPU."""
    settings = model.settings
    with torch.device("cpu"):
        rotary = Rotary(settings).float()
        if first == 0:
            model.embedding = _Embedding(settings.vocab, settings.width).float()
        for number in range(max(first - 1, 0), min(stop - 1, settings.layers)):
            model.blocks[number] = _Block(settings, rotary).float()
        if stop == settings.layers + 2:
            model.final_norm = nn.RMSNorm(settings.width, eps=1e-6).float()
            model.head = model.head and _Linear(settings.width, settings.vocab).float()
