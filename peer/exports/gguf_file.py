"""A model as a GGUF file, which llama.cpp and its kin run, and transformers loads with ``gguf_file=``.

Of the architectures of GGUF two are written: ``qwen3`` and ``llama``. The latter rotates neighbouring values, (2i,
2i + 1), where transformers rotates (i, i + d/2), so the rows of its projections of queries and keys are permuted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from shoal.peer.exports.about import ExportOptions, ModelAbout, check_replaceable, refusal, rounded_to
from shoal.peer.exports.tensor_stream import NamedShape
from shoal.peer.exports.tokenizer_files import ModelTokenizer, model_tokenizer
from shoal.peer.exports.transformers_form import transformers_form
from shoal.swarm.errors import RecipeError, UserError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_KNOWN = ("llama", "qwen3")

_EXPECTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
}
"""Values of a config's fields that the two architectures can express; a field may be missing."""

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
"""GGUF's names of the patterns by which tokenizers cut text before they merge."""


class GgufFile:
    """Writer of ``path``. See ``ModelWriter``. One tensor is in memory at a time."""

    def __init__(self, path: Path, about: ModelAbout, options: ExportOptions) -> None:
        """Raises ``RecipeError``, ``UserError`` or ``StateFileError`` for what cannot be written in this form."""
        self._path = path
        self._about = about
        self._options = options
        self._form = transformers_form(about)
        _check_expressible(self._form.config)
        self._tokenizer = model_tokenizer(about.origin, self._form.vocab, self._form.context, options.tokenizer)
        self._joined = _TensorJoiner(self._form.named)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")
        self._writer = _new_writer(self._form.config["model_type"])

    def append(self, vector: Tensor) -> None:
        for name, tensor in self._joined.add(vector):
            self._write(name, tensor)

    def __enter__(self) -> Self:
        check_replaceable(self._path, self._options)
        self._add_metadata()
        shapes = [*self._form.named, *((name, tuple(one.shape)) for name, one in self._form.extras.items())]
        names = self._names(shapes)
        for name, shape in shapes:
            kind, raw = self._stored_type(name, shape)
            size = math.prod(shape) * kind.itemsize
            self._writer.add_tensor_info(names[name], shape, kind, size, raw)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer.write_header_to_file(self._temporary)
            self._writer.write_kv_data_to_file()
            self._writer.write_ti_data_to_file()
        except OSError as error:
            self._discard()
            raise refusal(self._path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                assert self._joined.is_done, "all parameters"
                for name, tensor in self._form.extras.items():
                    self._write(name, tensor)
                self._writer.close()
                self._temporary.replace(self._path)
        except OSError as refused:
            raise refusal(self._path, refused) from refused
        finally:
            self._discard()

    def _discard(self) -> None:
        self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _names(self, shapes: Sequence[NamedShape]) -> dict[str, str]:
        """GGUF's names by those of transformers. Raises ``RecipeError``."""
        import gguf

        arch = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[self._form.config["model_type"]]
        known = gguf.get_tensor_name_map(arch, self._form.config["num_hidden_layers"])
        names = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name, _ in shapes}
        lacking = next((name for name, found in names.items() if found is None), None)
        if lacking is not None:
            raise RecipeError(f"--format gguf: the format has no name for the tensor {lacking}")
        return {name: str(found) for name, found in names.items()}

    def _stored_type(self, name: str, shape: Sequence[int]) -> tuple[np.dtype[Any], Any]:
        """The tensor's type in NumPy and, where that is not enough, in GGUF; norms are float32 as llama.cpp wants."""
        import gguf

        if len(shape) > 1 and self._options.dtype is torch.bfloat16:
            return np.dtype(np.uint16), gguf.GGMLQuantizationType.BF16
        is_half = len(shape) > 1 and self._options.dtype is torch.float16
        return np.dtype(np.float16 if is_half else np.float32), None

    def _write(self, name: str, tensor: Tensor) -> None:
        config = self._form.config
        if config["model_type"] == "llama" and name.endswith((".q_proj.weight", ".k_proj.weight")):
            which = "num_attention_heads" if name.endswith(".q_proj.weight") else "num_key_value_heads"
            tensor = _neighbouring_pairs(tensor, config[which])
        if tensor.ndim > 1:
            tensor = rounded_to(self._options.dtype, tensor)
        plain = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
        try:
            self._writer.write_tensor_data(plain.contiguous().numpy())
        except OSError as error:
            raise refusal(self._path, error) from error

    def _add_metadata(self) -> None:
        import gguf

        writer, config, origin = self._writer, self._form.config, self._about.origin
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        writer.add_name(origin.run.run.name)
        writer.add_description(
            f"anchor version {origin.version} of a Shoal run, after {origin.rounds} rounds and {origin.tokens} tokens"
        )
        for name, text in self._about.provenance().items():
            writer.add_string(f"shoal.{name}", text)
        if origin.chain is not None:
            writer.add_string("shoal.verdict_chain", origin.chain.hex())
        types = {
            torch.float32: gguf.LlamaFileType.ALL_F32,
            torch.float16: gguf.LlamaFileType.MOSTLY_F16,
            torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
        }
        writer.add_file_type(types[self._options.dtype])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
        writer.add_vocab_size(config["vocab_size"])
        if self._tokenizer is None:
            writer.add_tokenizer_model("no_vocab")
        else:
            _add_tokenizer(writer, self._tokenizer, config["vocab_size"])


def _new_writer(architecture: str) -> GGUFWriter:
    """Make the package's writer, which also writes empty lists of texts: the merges of a tokenizer of bytes."""
    try:
        from gguf import GGUFValueType, GGUFWriter
    except ImportError as error:
        raise UserError(f"--format gguf: needs a package: pip install 'shoal[gguf]' ({error})") from error

    class Writer(GGUFWriter):
        def _pack_val(
            self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
        ) -> bytes:
            if vtype == GGUFValueType.ARRAY and not val and add_vtype:
                return self._pack("I", vtype) + self._pack("I", GGUFValueType.STRING) + self._pack("Q", 0)
            return super()._pack_val(val, vtype, add_vtype, sub_type)

    return Writer(None, architecture)


def _check_expressible(config: dict[str, Any]) -> None:
    """Raise ``RecipeError`` for a model that the two architectures cannot express."""
    kind = config["model_type"]
    if kind not in _KNOWN:
        raise RecipeError(f"--format gguf: is for models of the types {', '.join(_KNOWN)}, not {kind}; take hf")
    for name, allowed in _EXPECTED.items():
        if name in config and config[name] not in allowed:
            raise RecipeError(f"--format gguf: cannot express {name} = {config[name]!r:.80}; take hf")
    if (config.get("rope_parameters") or {}).get("rope_type") != "default":
        raise RecipeError("--format gguf: cannot express scaled rotary positions here; take hf")


def _neighbouring_pairs(weight: Tensor, heads: int) -> Tensor:
    """Order the rows of each head so that values which are rotated together are neighbours; (heads * d, n)."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: GGUFWriter, tokenizer: ModelTokenizer, vocab: int) -> None:
    """Describe a byte-level BPE; raises ``UserError`` for other tokenizers."""
    import gguf

    parsed = tokenizer.parsed()
    model = parsed.get("model") or {}
    cut = _cut_name(parsed.get("pre_tokenizer"), has_merges=bool(model.get("merges")))
    if model.get("type") != "BPE" or cut is None:
        raise UserError(
            "--format gguf: the tokenizer is not a byte-level BPE that cuts text as GPT-2, Llama 3 or Qwen 2 do; "
            "take --format hf"
        )
    added = {int(one["id"]): one for one in parsed.get("added_tokens") or ()}
    letters = {number: text for text, number in model["vocab"].items()} | {
        number: one["content"] for number, one in added.items()
    }
    types = []
    for number in range(vocab):
        if number in added:
            types.append(gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            types.append(gguf.TokenType.NORMAL if number in letters else gguf.TokenType.UNUSED)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([letters.get(number, f"[PAD{number}]") for number in range(vocab)])
    writer.add_token_types(types)
    writer.add_key_value(gguf.Keys.Tokenizer.MERGES, merges, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING)
    writer.add_add_bos_token(False)
    if tokenizer.is_bytes:
        writer.add_eos_token_id(0)


def _cut_name(cutter: Any, *, has_merges: bool) -> str | None:
    """GGUF's name of a tokenizer.json's ``pre_tokenizer``; None for one that has none here."""
    match cutter:
        case {"type": "ByteLevel", "use_regex": False}:
            return None if has_merges else "default"  # where nothing is merged, no cut makes a difference
        case {"type": "ByteLevel"}:
            return "gpt-2"
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}},
                {"type": "ByteLevel", "use_regex": False},
            ],
        }:
            return _SPLITS.get(pattern)
    return None


class _TensorJoiner:
    """Whole tensors, in their order, from values that come in pieces of any length."""

    def __init__(self, named: Sequence[NamedShape]) -> None:
        self._waiting = list(reversed(named))
        self._pieces: list[Tensor] = []
        self._have = 0

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._have

    def add(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Add the next values, (k,), and yield the tensors that are whole now. Values are copied before the next call
        where they are kept."""
        at = 0
        while at < len(vector):
            name, shape = self._waiting[-1]
            wanted = math.prod(shape) - self._have
            piece = vector[at : at + wanted]
            at += len(piece)
            self._pieces.append(piece)
            self._have += len(piece)
            if len(piece) < wanted:
                self._pieces[-1] = piece.clone()
                return
            whole = self._pieces[0] if len(self._pieces) == 1 else torch.cat(self._pieces)
            self._waiting.pop()
            self._pieces, self._have = [], 0
            yield name, whole.view(shape).float()
