"""Exports load in transformers, whole and as GGUF, with the logits of the model that was trained."""

import errno
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tests.peer.exports.runs import OWNER, PEERS, gpt_toml, keep_run
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from shoal.peer.cli.main import app
from shoal.peer.exports.about import ExportOptions, ModelFormat
from shoal.peer.exports.generation import generate_from_folder
from shoal.peer.exports.model_file import read_model
from shoal.peer.offline.export import export_model
from shoal.swarm.errors import RecipeError, StorageError, UserError

KINDS = [
    pytest.param({"qk_norm": True, "tie_embedding": True}, id="qwen3-tied"),
    pytest.param({"qk_norm": True, "tie_embedding": False}, id="qwen3-untied"),
    pytest.param({"qk_norm": False, "tie_embedding": True, "rope_theta": 500.0}, id="llama-tied"),
    pytest.param({"qk_norm": False, "tie_embedding": False, "hidden": 24, "vocab": 300}, id="llama-untied"),
]

HF_TOML = """
[run]
name = "reef"
[recipe]
name = "hf"
[recipe.settings]
context = 24
[recipe.settings.config]
{config}
[round]
tokens = 100
"""
LLAMA = """model_type = "llama"
vocab_size = 256
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true"""
GPT2 = """model_type = "gpt2"
vocab_size = 256
n_embd = 16
n_layer = 2
n_head = 2
n_positions = 32"""
DEEPSEEK = """model_type = "deepseek_v3"
vocab_size = 256
hidden_size = 16
intermediate_size = 24
moe_intermediate_size = 8
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
n_routed_experts = 4
n_group = 1
topk_group = 1
num_experts_per_tok = 2
first_k_dense_replace = 1
kv_lora_rank = 8
q_lora_rank = 8
qk_rope_head_dim = 8
qk_nope_head_dim = 8
v_head_dim = 8
max_position_embeddings = 32"""


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found = model.eval()(tokens())
    return found if isinstance(found, torch.Tensor) else found.logits


def options(kind: str, **changes: Any) -> ExportOptions:
    return ExportOptions(ModelFormat(kind), **changes)


def loaded(folder: Path, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **changes)


@pytest.mark.parametrize("settings", KINDS)
def test_gpt_in_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = keep_run(tmp_path / "run", gpt_toml(**settings))
    origin = export_model(tmp_path / "run", tmp_path / "out", options=options("hf"))
    assert (origin.version, origin.rounds, origin.tokens) == (2, 2, 20)
    found, info = loaded(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(found).__name__ == ("Qwen3ForCausalLM" if settings["qk_norm"] else "LlamaForCausalLM")
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_the_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = keep_run(tmp_path / "run", gpt_toml())
    export_model(tmp_path / "run", tmp_path / "out", options=options("hf", dtype=dtype))
    found = loaded(tmp_path / "out")
    assert found.dtype is dtype
    for one in model.parameters():  # not its rotary table
        one.data = one.data.to(dtype).float()
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert {one.dtype for one in state.values()} == {dtype}
    found = loaded(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=0)


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    model = keep_run(tmp_path / "run", gpt_toml())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "isinf", lambda self: torch.ones_like(self, dtype=torch.bool))
        with pytest.raises(UserError, match="above 65,504"):
            export_model(tmp_path / "run", tmp_path / "out", options=options("hf", dtype=torch.float16))
    assert not (tmp_path / "out").exists()
    assert model is not None


def test_tokens_are_the_bytes_of_the_text(tmp_path: Path) -> None:
    keep_run(tmp_path / "run", gpt_toml())
    export_model(tmp_path / "run", tmp_path / "out", options=options("hf"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    text = "def fäß(x):\n\treturn '一'  # \0 \x7f <s> Ā"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        pytest.param(*kind.values, dtype, id=f"{kind.id}-{dtype}")
        for kind, dtype in zip(KINDS, [torch.float32, torch.float16, torch.bfloat16, torch.float32], strict=True)
    ],
)
def test_gguf_in_transformers(tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = keep_run(tmp_path / "run", gpt_toml(**settings))
    export_model(tmp_path / "run", tmp_path / "model.gguf", options=options("gguf", dtype=dtype))
    for one in model.parameters():
        if one.ndim > 1:
            one.data = one.data.to(dtype).float()
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    field = {name: one.contents() for name, one in reader.fields.items()}
    arch = "qwen3" if settings["qk_norm"] else "llama"
    assert field["general.architecture"] == arch
    assert field["general.name"] == field["shoal.run"] == "reef"
    assert field[f"{arch}.block_count"] == 2
    assert field[f"{arch}.rope.freq_base"] == settings.get("rope_theta", 10_000.0)
    assert field[f"{arch}.attention.key_length"] == 8
    assert len(field["tokenizer.ggml.tokens"]) == settings.get("vocab", 256)
    assert field["tokenizer.ggml.merges"] == []
    tensors = {one.name: one for one in reader.tensors}
    assert ("output.weight" in tensors) != settings["tie_embedding"]
    embedding = torch.from_numpy(
        gguf.dequantize(tensors["token_embd.weight"].data.copy(), tensors["token_embd.weight"].tensor_type)
    )
    assert torch.equal(embedding.float(), model.embedding.weight.data)
    query = torch.from_numpy(
        gguf.dequantize(tensors["blk.1.attn_q.weight"].data.copy(), tensors["blk.1.attn_q.weight"].tensor_type)
    ).float()
    expected = model.blocks[1].qkv.weight.data[:16]
    if arch == "llama":  # rows 0 and 4 of a head are rotated together, and are neighbours now
        assert torch.equal(query[:2], expected[[0, 4]])
    else:
        assert torch.equal(query, expected)
    # transformers does not read a Qwen3's attention.key_length, and takes 128.
    heads = {"head_dim": 8} if arch == "qwen3" else {}
    found = loaded(tmp_path, gguf_file="model.gguf", dtype=torch.float32, **heads)
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", [LLAMA, GPT2, DEEPSEEK], ids=["llama", "gpt2", "deepseek"])
def test_models_of_transformers_as_themselves(tmp_path: Path, config: str) -> None:
    toml = HF_TOML.format(config=config)
    bias = {"model.layers.1.mlp.gate.e_score_correction_bias": torch.tensor([3.0, 0.0, 0.0, 2.0])}
    model = keep_run(tmp_path / "run", toml, bias if config == DEEPSEEK else {})
    export_model(tmp_path / "run", tmp_path / "out", options=options("hf"))
    found, info = loaded(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert (f"of peer {OWNER.peer_id} and not averaged" in card) == (config == DEEPSEEK)
    if config == DEEPSEEK:
        assert not torch.allclose(logits(found), logits(model), atol=1e-5), "the buffer has an effect"
        model.load_state_dict(bias, strict=False)
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=0)
    export_model(tmp_path / "run", tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(read_model(tmp_path / "model.safetensors")), logits(model), atol=1e-5, rtol=0)
    if config != LLAMA:
        with pytest.raises(RecipeError, match="is for models of the types llama, qwen3"):
            export_model(tmp_path / "run", tmp_path / "model.gguf", options=options("gguf"))
        return
    export_model(tmp_path / "run", tmp_path / "model.gguf", options=options("gguf"))
    found = loaded(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(model), atol=1e-5, rtol=0)


def test_the_card_says_where_it_comes_from_and_names_contributors_by_choice_only(tmp_path: Path) -> None:
    keep_run(tmp_path / "run", gpt_toml())
    export_model(tmp_path / "run", tmp_path / "out", options=options("hf"))
    card = (tmp_path / "out" / "README.md").read_text()
    origin = json.loads((next(iter((tmp_path / "run").glob("**/manifest.json")))).read_text())
    for words in (origin["run_hash"], origin["chain"], "| rounds | 2 |", "| tokens | 20 |", "A \\<b\\>reef"):
        assert words in card, words
    assert PEERS[0] not in card
    export_model(tmp_path / "run", tmp_path / "named", options=options("hf", contributors=True))
    named = (tmp_path / "named" / "README.md").read_text()
    assert f"| `{PEERS[0]}` | 2 |\n| `{PEERS[1]}` | 1 |" in named


def test_tokens_of_a_given_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    keep_run(tmp_path / "run", gpt_toml("tokens:train.u16", vocab=4))
    export_model(tmp_path / "run", tmp_path / "none", options=options("hf"))
    assert not (tmp_path / "none" / "tokenizer.json").exists()
    assert "AutoTokenizer" not in (tmp_path / "none" / "README.md").read_text()
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    (tmp_path / "given").mkdir()
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    (tmp_path / "given" / "tokenizer_config.json").write_text(
        '{"model_max_length": 7, "auto_map": {"AutoTokenizer": "x.Y"}}'
    )
    given = options("hf", tokenizer=tmp_path / "given")
    export_model(tmp_path / "run", tmp_path / "out", options=given)
    found = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert found("abb")["input_ids"] == [2, 1]
    assert found.model_max_length == 7
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text()
    export_model(tmp_path / "run", tmp_path / "m.gguf", options=options("gguf", tokenizer=tmp_path / "given"))
    tokenizer.add_tokens(["c", "d"])
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    with pytest.raises(UserError, match="has 5 tokens, and the model 4"):
        export_model(tmp_path / "run", tmp_path / "more", options=given)
    (tmp_path / "given" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a tokenizer\.json"):
        export_model(tmp_path / "run", tmp_path / "more", options=given)
    keep_run(tmp_path / "text", gpt_toml())
    with pytest.raises(UserError, match="the bytes of its text"):
        export_model(tmp_path / "text", tmp_path / "more", options=given)
    assert not (tmp_path / "more").exists()


def test_other_recipes_are_refused(tmp_path: Path) -> None:
    from tests.peer.checkpoints.making import contents, open_store

    open_store(tmp_path / "run").write(contents(recipe={"name": "other"}))
    open_store(tmp_path / "own").write(contents(recipe=None))
    for folder, words in (("run", "the recipe 'other'"), ("own", "a loop without a recipe")):
        for kind in ("hf", "gguf"):
            with pytest.raises(RecipeError, match=f"{words}, which only --format safetensors"):
                export_model(tmp_path / folder, tmp_path / "out", options=options(kind))


def test_buffers_of_own_loops_are_the_owners(tmp_path: Path) -> None:
    from tests.peer.checkpoints.making import LAYOUT, contents, open_store

    own = {"buffers": {"norm.running_mean": torch.tensor([1.5]), "norm.num_batches_tracked": torch.tensor(7)}}
    open_store(tmp_path / "run").write(contents(recipe=None, own=own))
    for dtype in (torch.float32, torch.bfloat16):
        export_model(tmp_path / "run", tmp_path / "m.safetensors", options=ExportOptions(dtype=dtype))
        found = load_file(tmp_path / "m.safetensors")
        assert found.keys() == {spec.name for spec in LAYOUT} | set(own["buffers"])
        assert all(torch.equal(found[name], one) for name, one in own["buffers"].items())
    assert "not averaged" in json.loads((tmp_path / "m.json").read_text())["buffers"]


def test_what_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_run(tmp_path / "run", gpt_toml())
    run, out = str(tmp_path / "run"), tmp_path / "out"
    first = CliRunner().invoke(app, ["export", run, "--format", "hf", "--out", str(out)])
    assert first.exit_code == 0, first.output
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = CliRunner().invoke(app, ["export", run, "--format", "hf", "--out", str(out)])
    assert isinstance(again.exception, UserError)
    assert "exists already" in str(again.exception)
    real = Path.write_text

    def full(path: Path, *args: Any, **kinds: Any) -> int:
        if path.name == "README.md":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **kinds)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match="No space left"):
        export_model(tmp_path / "run", out, options=options("hf"))
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    replaced = CliRunner().invoke(
        app, ["export", run, "--format", "hf", "--out", str(out), "--replace", "--precision", "bfloat16"]
    )
    assert replaced.exit_code == 0, replaced.output
    assert (out / "model.safetensors").read_bytes() != before["model.safetensors"]
    (out / "mine.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds other files than an export \(mine\.txt\)"):
        export_model(tmp_path / "run", out, options=options("hf"))
    assert (out / "mine.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"], "nothing is left over"


def test_text_from_a_folder(tmp_path: Path) -> None:
    keep_run(tmp_path / "run", gpt_toml())
    export_model(tmp_path / "run", tmp_path / "out", options=options("hf"))
    texts = [generate_from_folder(tmp_path / "out", "def ", 8, temperature, 5, 1) for temperature in (0.0, 0.7, 0.7)]
    assert all(text.startswith("def ") for text in texts)
    assert texts[1] == texts[2]
    shown = CliRunner().invoke(app, ["generate", str(tmp_path / "out"), "--tokens", "3", "--temperature", "0"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("def ")
