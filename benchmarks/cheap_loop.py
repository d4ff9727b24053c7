"""Shared parts of members whose models are of any size and cost hardly any computing: model, data, log of moments."""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEP_S = 0.05
"""As if a GPU took so long: peers that share this machine's cores would otherwise measure these."""

_FEATURES = 8


class CheapModel(nn.Module):
    """A line, and beside it ``elements`` parameters in all that cost no computing, in tensors of ``tensor`` each."""

    def __init__(self, elements: int, tensor: int) -> None:
        super().__init__()
        self.line = nn.Linear(_FEATURES, 1)
        left = elements - _FEATURES - 1
        sizes = [tensor] * (left // tensor) + ([left % tensor] if left % tensor else [])
        self.ballast = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(self, features: Tensor) -> Tensor:
        """(b, 8) to (b, 1)."""
        prediction: Tensor = self.line(features)
        return prediction


def line_data(samples: int) -> TensorDataset:
    """Features and their sums, the same in every process."""
    features = torch.randn(samples, _FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(features, features.sum(1, keepdim=True))


class Journal:
    """File of a process's moments, as JSON lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def note(self, name: str, **about: Any) -> None:
        self.write({"event": name, "time": time.time(), **about})
