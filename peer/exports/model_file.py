"""A model as one safetensors file by the recipe's own names, with the recipe's config beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.peer.exports.about import ExportOptions, ModelAbout, check_replaceable, refusal
from shoal.peer.exports.tensor_stream import TensorStream
from shoal.peer.recipes import load_model
from shoal.peer.regular_file import check_memory, open_regular, read_regular
from shoal.peer.training.parameters import plain_name
from shoal.swarm.errors import RecipeError, StateFileError

_MAX_CONFIG_BYTES = 2**20


class ModelFile:
    """Writer of ``path``, and of the recipe's config beside it with suffix ``.json``. See ``ModelWriter``."""

    def __init__(self, path: Path, about: ModelAbout, options: ExportOptions) -> None:
        self._path = path
        self._about = about
        self._options = options
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._temporary_config = path.with_name(f".{path.stem}.json.{os.getpid()}")
        self._file: BinaryIO
        self._stream: TensorStream

    def append(self, vector: Tensor) -> None:
        try:
            self._stream.append(vector)
        except OSError as error:
            raise refusal(self._path, error) from error

    def __enter__(self) -> Self:
        about = self._about
        check_replaceable(self._path, self._options)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
            named = [(spec.name, spec.shape) for spec in about.layout]
            self._stream = TensorStream(self._file, named, self._options.dtype, about.buffers, about.provenance())
        except OSError as error:
            self._temporary.unlink(missing_ok=True)
            raise refusal(self._path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._file:
                if error is None:
                    self._stream.finish()
            if error is None:
                text = json.dumps({"recipe": self._about.recipe, **self._about.provenance()}, indent=2) + "\n"
                self._temporary_config.write_text(text)
                self._temporary_config.replace(self._path.with_suffix(".json"))
                self._temporary.replace(self._path)
        except OSError as refused:
            raise refusal(self._path, refused) from refused
        finally:
            self._temporary.unlink(missing_ok=True)
            self._temporary_config.unlink(missing_ok=True)


def read_model(path: Path) -> nn.Module:
    """Rebuild an exported model by its recipe. Raises ``StateFileError`` or ``RecipeError``."""
    config = path.with_suffix(".json")
    try:
        recipe = json.loads(read_regular(config, _MAX_CONFIG_BYTES))["recipe"]
        with open_regular(path) as file:
            check_memory(os.fstat(file.fileno()).st_size)
        tensors = load_file(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StateFileError(f"{path}: not an exported model with its {config.name}: {error}") from error
    if not isinstance(recipe, dict):
        raise RecipeError(f"{config}: this model was trained by a loop without a recipe; load it in that loop")
    model = load_model(recipe)
    own = model.state_dict(keep_vars=True)
    names = {plain_name(name): name for name in own}
    try:
        given = {names.get(name, name): one for name, one in tensors.items()}
        missing, unexpected = model.load_state_dict(given, strict=False)
    except RuntimeError as error:
        raise StateFileError(f"{path}: does not fit the model of {config}: {error}") from error
    loaded = {id(own[name]) for name in given.keys() & own.keys()}
    wrong = [*unexpected, *(name for name in missing if id(own[name]) not in loaded)]  # tied ones have two names
    if wrong:
        raise StateFileError(f"{path}: does not fit the model of {config}: {', '.join(wrong)[:300]}")
    return model
