"""Sampling of text from a language model whose tokens are bytes, token by token, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.peer.recipes.corpus import BYTE_VOCAB, SEPARATOR


@dataclass(frozen=True)
class Sampling:
    """How a text is sampled.

    ``tokens``: how many; ``temperature``: 0 takes the likeliest one; ``top_k``: candidates, None for all; ``seed``: of
    what is drawn, on the CPU; ``stops``: the text ends with its document. Raises ``ValueError`` for values out of
    range."""

    tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    stops: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 0 or not 0 <= self.temperature < math.inf or (self.top_k is not None and self.top_k < 1):
            raise ValueError("expected tokens >= 0, temperature >= 0 and top_k >= 1 or None")


@torch.no_grad()
def sample_bytes(
    logits_of: Callable[[Tensor], Tensor],
    prompt: bytes,
    sampling: Sampling,
    context: int,
    device: torch.device | str,
    go_on: Callable[[], None] = lambda: None,
) -> bytes:
    """Sample bytes that follow ``prompt``; the prompt is not in the result.

    ``logits_of``: of ``(1, t)`` tokens, ``(1, t, vocab)``; of a larger vocabulary the first 256 are the bytes. The
    model sees the last ``context`` bytes only; an empty prompt starts a document. ``go_on``: called after each byte."""
    generator = torch.Generator(device="cpu").manual_seed(sampling.seed)
    text = bytearray(prompt or bytes([SEPARATOR]))
    start = len(text)
    for _ in range(sampling.tokens):
        window = torch.tensor(list(text[-context:]), device=device)
        logits = logits_of(window[None])[0, -1, :BYTE_VOCAB].float().cpu()
        byte = _draw(logits, sampling, generator)
        if sampling.stops and byte == SEPARATOR:
            break
        text.append(byte)
        go_on()
    return bytes(text[start:])


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from ``(vocab,) float32`` logits."""
    temperature, top_k = sampling.temperature, sampling.top_k
    if temperature == 0 or not bool(logits.isfinite().all()):
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    return int(torch.multinomial(F.softmax(logits / temperature, dim=0), 1, generator=generator))
