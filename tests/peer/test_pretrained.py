"""Runs start from models that transformers has saved: in one file, in several, and at a URL."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.peer.cli import host as hosting
from shoal.peer.cli.host import started_run_file
from shoal.peer.cli.start_section import write_started
from shoal.peer.options import StartFrom
from shoal.peer.recipes import load_recipe
from shoal.peer.state_transfer.pretrained import PretrainedModel
from shoal.peer.state_transfer.start import StartFiles
from shoal.swarm.errors import ModelMismatch, RecipeError, RunFileError, StateFileError
from shoal.swarm.protocol.run_file import RunFile, load_run_file, parse_run_file

TOML = """
[run]
name = "next"
[recipe]
name = "hf"
settings.context = 12
[round]
tokens = 1
"""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    found: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    return found


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def in_pieces(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces") / "tiny-llama"
    model.save_pretrained(folder, max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def started(where: Path | str, tmp_path: Path, toml: str = TOML) -> RunFile:
    (tmp_path / "run.toml").write_text(toml)
    write_started(tmp_path / "run.toml", tmp_path / "started.toml", StartFrom(where))
    return load_run_file(tmp_path / "started.toml")[1]


def test_a_run_takes_configuration_and_values(model: Any, saved: Path, in_pieces: Path, tmp_path: Path) -> None:
    run = started(saved, tmp_path)
    assert run.start is not None
    assert (run.start.run, run.start.round, run.start.rows(2)) == ("tiny-llama", 0, 1)
    config = run.recipe.settings["config"]
    assert (config["model_type"], config["hidden_size"], config["tie_word_embeddings"]) == ("llama", 16, True)
    assert config["rope_parameters"]["rope_theta"] == 5000.0
    own = load_recipe(run).build_model(run.run.seed)
    for where in (saved, in_pieces, in_pieces.as_uri()):
        files = StartFiles.find(where, run.start, None)
        assert [*run.start.tensors] == [name for name, _ in own.named_parameters()]
        for name, one in model.named_parameters():
            assert torch.equal(files.rows(name, 1)[0], one.detach().float().view(-1)), name
        assert started(where, tmp_path).start == run.start
    with torch.no_grad():
        for name, one in own.named_parameters():
            one.copy_(files.rows(name, 1)[0].view(one.shape))
    tokens, loaded = torch.arange(12)[None], type(model).from_pretrained(saved, dtype=torch.float32)
    assert torch.equal(own(tokens).logits, loaded(tokens).logits)


def test_other_values_are_refused(saved: Path, in_pieces: Path, tmp_path: Path) -> None:
    run = started(saved, tmp_path)
    assert run.start is not None
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    file = copy / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    files = StartFiles.find(copy, run.start, None)
    last = max(PretrainedModel.open(copy).tensors.values(), key=lambda one: one[1].stop)[1].name  # type: ignore[union-attr]
    with pytest.raises(StateFileError, match=f"SHA-256 of the tensor '{last}'"):
        files.rows(last, 1)
    file.write_bytes(content[:-8])
    with pytest.raises(StateFileError, match="safetensors"):
        StartFiles.find(copy, run.start, None)
    with pytest.raises(StateFileError, match="is not here"):
        StartFiles.find(tmp_path / "nowhere", run.start, None)
    with pytest.raises(StateFileError, match=r"model\.safetensors"):
        StartFiles.find((tmp_path / "nowhere").as_uri(), run.start, None)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "x.bin", 5])
def test_an_index_names_files_beside_it(in_pieces: Path, tmp_path: Path, name: object) -> None:
    copy = Path(shutil.copytree(in_pieces, tmp_path / "copy"))
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(StateFileError, match="weight_map"):
        PretrainedModel.open(copy)


def test_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    run = started(saved, tmp_path)
    config = run.recipe.settings["config"] | {"intermediate_size": 32}
    fields = "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.items() if not isinstance(value, dict))
    with pytest.raises(ModelMismatch, match=r"gate_proj\.weight \[32, 16\] is \[24, 16\] there"):
        started(saved, tmp_path, TOML + f"[recipe.settings.config]\n{fields}")
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    about = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(about | {"model_type": "flux"}))
    with pytest.raises(RecipeError, match="not 'flux'"):
        started(copy, tmp_path)
    with pytest.raises(RunFileError, match="with the model's config"):
        started(saved, tmp_path, TOML.replace("settings.context = 12", "settings = { context = 12 }"))


def test_a_restarted_host_needs_no_model(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "run.toml", tmp_path / "kept"
    run = started(saved, tmp_path)
    kept.mkdir()
    text = (tmp_path / "started.toml").read_text()
    (kept / hosting.RUN_FILE).write_text(text)
    (kept / hosting.JOURNAL).write_text("")
    gone = StartFrom(tmp_path / "gone")
    assert asyncio.run(started_run_file(path, kept, gone)) == (text, run)

    async def no_command(arguments: list[str]) -> None:
        raise StateFileError("would read the model")

    monkeypatch.setattr(hosting, "_run_command", no_command)
    path.write_text(TOML.replace("context = 12", "context = 13"))
    with pytest.raises(StateFileError, match="would read"):
        asyncio.run(started_run_file(path, kept, gone))
    assert parse_run_file(text) == run
