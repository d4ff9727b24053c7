"""A model as a folder that transformers loads: weights, config, tokenizer, and a model card."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from torch import Tensor

from shoal.peer.exports.about import ExportOptions, ModelAbout, check_replaceable, refusal
from shoal.peer.exports.model_card import model_card
from shoal.peer.exports.tensor_stream import TensorStream
from shoal.peer.exports.tokenizer_files import CONFIG_FILE, TOKENIZER_FILE, model_tokenizer
from shoal.peer.exports.transformers_form import transformers_form
from shoal.swarm.durable import sync_folder
from shoal.swarm.errors import UserError

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_GENERATION, _CARD = "generation_config.json", "README.md"
_FILES = frozenset((CONFIG, _WEIGHTS, _GENERATION, _CARD, TOKENIZER_FILE, CONFIG_FILE))


class ModelFolder:
    """Writer of the folder ``path``. See ``ModelWriter``."""

    def __init__(self, path: Path, about: ModelAbout, options: ExportOptions) -> None:
        """Raises ``RecipeError``, ``UserError`` or ``StateFileError`` for what cannot be written in this form."""
        self._path = path
        self._about = about
        self._options = options
        self._form = transformers_form(about)
        self._tokenizer = model_tokenizer(about.origin, self._form.vocab, self._form.context, options.tokenizer)
        mark = secrets.token_hex(4)
        self._hidden = path.with_name(f".{path.name}-{mark}")
        self._aside = path.with_name(f".{path.name}-{mark}-replaced")
        self._file: BinaryIO
        self._stream: TensorStream

    def append(self, vector: Tensor) -> None:
        try:
            self._stream.append(vector)
        except OSError as error:
            raise refusal(self._path, error) from error

    def __enter__(self) -> Self:
        check_replaceable(self._path, self._options)
        _check_is_export(self._path)
        dtype = self._options.dtype
        extras = {name: one.to(dtype) if one.is_floating_point() else one for name, one in self._form.extras.items()}
        try:
            self._hidden.mkdir(parents=True)
            self._file = (self._hidden / _WEIGHTS).open("wb")
            metadata = {"format": "pt", **self._about.provenance()}
            self._stream = TensorStream(self._file, self._form.named, dtype, extras, metadata)
        except OSError as error:
            shutil.rmtree(self._hidden, ignore_errors=True)
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
                self._write_rest()
                self._put_in_place()
        except OSError as refused:
            raise refusal(self._path, refused) from refused
        finally:
            shutil.rmtree(self._hidden, ignore_errors=True)

    def _write_rest(self) -> None:
        precision = str(self._options.dtype).removeprefix("torch.")
        config = {**self._form.config, "dtype": precision}
        self._write_json(CONFIG, config)
        tokenizer = self._tokenizer
        if tokenizer is not None:
            (self._hidden / TOKENIZER_FILE).write_text(tokenizer.text, encoding="utf-8")
            self._write_json(CONFIG_FILE, tokenizer.config)
            if tokenizer.is_bytes:
                self._write_json(_GENERATION, {"eos_token_id": 0, "pad_token_id": 0})
        card = model_card(self._about, tokenizer is not None, config["architectures"][0], precision)
        (self._hidden / _CARD).write_text(card, encoding="utf-8")

    def _write_json(self, name: str, content: Any) -> None:
        (self._hidden / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _put_in_place(self) -> None:
        """Rename the folder to its place; an earlier export comes back if that fails."""
        _check_is_export(self._path)
        is_there = self._path.exists()
        if is_there:
            self._path.rename(self._aside)
        try:
            self._hidden.rename(self._path)
        except OSError:
            if is_there:
                self._aside.rename(self._path)
            raise
        sync_folder(self._path.parent)
        shutil.rmtree(self._aside, ignore_errors=True)


def _check_is_export(path: Path) -> None:
    """Raise ``UserError`` for a folder that holds anything but the files of an export: it is not replaced."""
    if not path.exists():
        return
    if not path.is_dir() or path.is_symlink():
        raise UserError(f"{path}: is not a folder; give another --out")
    others = sorted(one.name for one in path.iterdir() if one.name not in _FILES or not one.is_file())
    if others:
        raise UserError(f"{path}: holds other files than an export ({', '.join(others[:3])}); give another --out")
