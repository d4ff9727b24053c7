"""A model for inference as a file: safetensors by parameter name, with the recipe's config beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.peer.checkpoints.tensors import file_header
from shoal.peer.recipes import load_model
from shoal.peer.regular_file import check_memory, open_regular, read_regular
from shoal.peer.training.anchor import bytes_of
from shoal.peer.training.parameters import plain_name
from shoal.swarm.errors import RecipeError, StateFileError, StorageError
from shoal.swarm.protocol.messages import TensorSpec

_MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class ModelAbout:
    """``layout``: all parameters in their order; ``provenance``: of which run and state they are, as texts."""

    layout: tuple[TensorSpec, ...]
    recipe: dict[str, Any] | None
    provenance: Mapping[str, str]
    dtype: torch.dtype = torch.float32


class ModelFile:
    """``path`` and, beside it, ``path`` with suffix ``.json``, the recipe's config: written when the context ends, from
    the vectors that were appended. Only one of those has to be in memory. Whatever is there already stays if it fails.

    Raises ``StorageError``; its methods block."""

    def __init__(self, path: Path, about: ModelAbout) -> None:
        self._path = path
        self._about = about
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._temporary_config = path.with_name(f".{path.stem}.json.{os.getpid()}")
        self._elements = 0
        self._file: BinaryIO

    def append(self, vector: Tensor) -> None:
        """The values of the next parameters, (k,), one after the other."""
        self._elements += vector.numel()
        try:
            self._file.write(bytes_of(vector.to(self._about.dtype).contiguous()))
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
            named = [(spec.name, spec.shape) for spec in self._about.layout]
            self._file.write(file_header(named, self._about.dtype, self._about.provenance))
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            raise self._refusal(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            if error is None:
                assert self._elements == sum(spec.elements for spec in self._about.layout), "all parameters"
                text = json.dumps({"recipe": self._about.recipe, **self._about.provenance}, indent=2) + "\n"
                self._temporary_config.write_text(text)
                self._temporary_config.replace(self._path.with_suffix(".json"))
                self._temporary.replace(self._path)
        except OSError as refused:
            raise self._refusal(refused) from refused
        finally:
            self._temporary.unlink(missing_ok=True)
            self._temporary_config.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> StorageError:
        return StorageError(f"{self._path}: the model cannot be written: {error}")


def read_model(path: Path) -> nn.Module:
    """An exported model, rebuilt by its recipe. Raises ``StateFileError`` or ``RecipeError``."""
    config = path.with_suffix(".json")
    try:
        recipe = json.loads(read_regular(config, _MAX_CONFIG_BYTES))["recipe"]
        with open_regular(path) as file:
            check_memory(os.fstat(file.fileno()).st_size)
        tensors = load_file(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StateFileError(f"{path}: not an exported model with its {config.name}: {error}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"{config}: this model was made by an own training loop; load it there")
    model = load_model(recipe)
    names = {plain_name(name): name for name in model.state_dict()}
    try:
        model.load_state_dict({names.get(name, name): one for name, one in tensors.items()})
    except RuntimeError as error:
        raise StateFileError(f"{path}: does not fit the model of {config}: {error}") from error
    return model
