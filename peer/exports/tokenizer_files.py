"""The tokenizer of an exported model: the one of its corpus, or for text a tokenizer whose tokens are the bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.peer.exports.about import ModelOrigin
from shoal.peer.recipes.corpus import BYTE_VOCAB
from shoal.peer.regular_file import read_regular
from shoal.swarm.errors import UserError
from shoal.swarm.protocol.run_sources import file_pattern

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_MAX_BYTES = 256 * 2**20
_MAX_CONFIG_BYTES = 2**20
_CODE = ("auto_map", "custom_object")
"""Settings that make transformers import Python files, which no export brings along."""


@dataclass(frozen=True)
class ModelTokenizer:
    """``text``: the content of a tokenizer.json; ``config``: that of a tokenizer_config.json; ``is_bytes``: whether
    tokens are the bytes of the text, so that 0 ends a document."""

    text: str
    config: Mapping[str, Any]
    is_bytes: bool = False

    def parsed(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.text)
        return parsed


def model_tokenizer(origin: ModelOrigin, vocab: int, context: int, given: Path | None) -> ModelTokenizer | None:
    """Find the tokenizer of a model with ``vocab`` tokens; None where the run's corpus is of tokens and none is
    ``given``.

    Raises ``UserError`` for a tokenizer that cannot be read or used."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UserError(f"--format: needs a package: pip install 'shoal[hf]' ({error})") from error
    source = origin.run.data.source
    named = file_pattern(source)
    is_text = source == "stdlib" or (named is not None and named[0] == "text")
    if given is None:
        return ModelTokenizer(_byte_tokenizer(), _config(context), is_bytes=True) if is_text else None
    if is_text:
        raise UserError(f"--tokenizer: the tokens of this run are the bytes of its text (data.source {source!r})")
    file = given / TOKENIZER_FILE if given.is_dir() else given
    try:
        text = _read(file, _MAX_BYTES)
        size = Tokenizer.from_str(text).get_vocab_size()
    except Exception as error:  # the library raises Exception itself
        raise UserError(f"{file}: not a tokenizer.json: {str(error)[:300]}") from error
    if size > vocab:
        raise UserError(f"--tokenizer {given}: has {size} tokens, and the model {vocab}: it is of another corpus")
    return ModelTokenizer(text, {**_config(context), **_given_config(file.with_name(CONFIG_FILE))})


def _read(file: Path, limit_bytes: int) -> str:
    data = read_regular(file, limit_bytes)
    if len(data) > limit_bytes:
        raise ValueError(f"it is longer than {limit_bytes} bytes")
    return data.decode()


def _config(context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }


def _given_config(file: Path) -> dict[str, Any]:
    """The settings in the file beside a tokenizer.json, without those that name code."""
    if not file.exists():
        return {}
    try:
        config = json.loads(_read(file, _MAX_CONFIG_BYTES))
        return {name: value for name, value in config.items() if name not in _CODE}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: not a tokenizer's config: {error}") from error


def _byte_tokenizer() -> str:
    """A byte-level BPE without merges: token b is the byte b."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={_byte_letter(byte): byte for byte in range(BYTE_VOCAB)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


def _byte_letter(byte: int) -> str:
    """The letter that stands for a byte in byte-level vocabularies (GPT-2): itself where that is printable and no
    space, else the next unused one from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in own:
        return chr(byte)
    return chr(0x100 + [other for other in range(BYTE_VOCAB) if other not in own].index(byte))
