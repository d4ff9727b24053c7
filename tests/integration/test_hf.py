"""Peers train models of transformers by the recipe ``hf``: as whole models, as stages and as islands."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.integration.harness import ROUNDS_S, START_S, Swarm, check_journal, check_parity, finish, held, run_toml
from tests.integration.plain_loop import plain_loop
from tests.integration.test_islands import together

from shoal.peer.checkpoints.checkpoint import read_checkpoint
from shoal.peer.checkpoints.source import FolderSource
from shoal.peer.checkpoints.store import CHECKPOINTS, checkpoint_folders
from shoal.peer.folders import stage_folder
from shoal.swarm.memory_account import account_of
from shoal.swarm.protocol.run_file import parse_run_file

pytestmark = pytest.mark.integration

LLAMA = """
name = "hf"
settings.context = 32
[recipe.settings.config]
model_type = "llama"
vocab_size = 256
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64
"""


def hf_toml(**options: object) -> str:
    """The harness's run file with a small Llama."""
    toml = run_toml(**options)  # type: ignore[arg-type]
    start, end = toml.index('name = "gpt"'), toml.index("[data]")
    return toml[:start] + LLAMA + toml[end:]


def test_two_peers_train_a_llama_bit_for_bit(swarm: Swarm) -> None:
    rounds = 6
    host = swarm.host(hf_toml(rounds=rounds, tokens=12_000, max_s=60))
    members = swarm.members(host.invite, "a", "b")
    for member in members:
        assert member.exit_code(2 * ROUNDS_S) == 0, member.tail()
    host.stop()
    check_parity(host, members)
    verdicts = check_journal(host)
    assert sum(one.verdict.committed for one in verdicts) == rounds
    assert any(one.verdict.plan and len(one.verdict.plan.members) == 2 for one in verdicts)
    losses = [one.verdict.loss for one in verdicts if one.verdict.loss is not None]
    assert losses[-1] < losses[0] - 0.2


MODEL_BYTES = 4 * (2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * 256 * 64 + 64)
"""Parameters of the model in two stages, in float32."""


@pytest.mark.slow
def test_two_stages_train_as_one_process_does(swarm: Swarm) -> None:
    rounds, batch = 3, 16
    pipeline = '[pipeline]\nstages = 2\nmicro_batch = 2\nactivations = "float32"\n[data]'
    outer = 'optimizer = "adamw"\nlr = 2e-3\nweight_decay = 0.01'
    toml = hf_toml(rounds=rounds, tokens=32 * batch, max_s=120, algorithm="virtual_batch", codec="float32", outer=outer)
    toml = toml.replace("[data]", pipeline).replace("num_key_value_heads = 2", "tie_word_embeddings = false")
    toml = toml.replace("hidden_size = 32", "hidden_size = 64").replace(
        "intermediate_size = 64", "intermediate_size = 128"
    )
    host = swarm.host(toml)
    memory = f"{0.75 * MODEL_BYTES * account_of(parse_run_file(toml)).demand().shared + 520_000:.0f}"
    members = [swarm.member(host.invite, label, extra=("--max-memory", memory)) for label in "ab"]
    for member in members:
        assert member.exit_code(2 * ROUNDS_S) == 0, member.tail()
    host.stop()
    held = [(one["first"], one["last"]) for member in members for one in member.events("span")]
    assert set(held) == {(0, 0), (1, 1)}, "each holds one stage"
    stages = []
    for stage in range(2):
        places = chain(*(one.folder.glob(f"state/*/*/{stage_folder(Path(), stage)}") for one in members))
        newest = [checkpoint_folders(place / CHECKPOINTS)[-1] for place in places]
        stages.append(read_checkpoint(FolderSource(newest[0])).state)
    assert {one.version for one in stages} == {rounds}
    plain = torch.cat([one.reshape(-1) for one in plain_loop(toml, rounds, batch).values()])
    difference = (torch.cat([one.anchor for one in stages]) - plain).abs()
    # AdamW's first steps are signs, and a gradient of nearly nothing may have either.
    assert float((difference > 1e-5).float().mean()) < 1e-4, difference.topk(9)


@pytest.mark.matrix
def test_an_island_trains_a_llama_with_a_single_member(swarm: Swarm) -> None:
    host = swarm.host(hf_toml(max_s=3.0))
    single = swarm.member(host.invite, "single")
    island = swarm.member(host.invite, "island", extra=("--devices", "cpu:2"), device="auto")
    first = together([single, island], 2)
    together([single, island], 2, after=first)
    finish(host, [single, island])


@pytest.mark.matrix
def test_a_run_starts_from_a_saved_model(swarm: Swarm) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes))
    model.save_pretrained(swarm.folder / "saved")
    files = ("--from", (swarm.folder / "saved").as_uri())
    toml = hf_toml(rounds=2, tokens=2_000, max_s=120)
    toml = toml[: toml.index("[recipe.settings.config]")] + toml[toml.index("[data]") :]
    host = swarm.host(toml, extra=files)
    host.says("round 0 of saved")
    gate = swarm.folder / "gate"
    gate.touch()
    without = swarm.member(host.invite, "without", held(gate))
    brings = swarm.member(host.invite, "brings", held(gate), extra=files)
    for member in (without, brings):
        member.event("joined", START_S)
    gate.unlink()
    for member in (without, brings):
        assert member.exit_code(2 * ROUNDS_S) == 0, member.tail()
    host.stop()
    assert max(check_parity(host, [without, brings])) == 2
    run = parse_run_file((host.state / "run.toml").read_text())
    assert run.start is not None
    assert run.recipe.settings["config"]["hidden_size"] == 32
    assert len(run.start.tensors) == len(list(model.parameters()))
