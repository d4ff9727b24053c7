"""Peers train models of transformers by the recipe ``hf``, as whole models."""

import pytest
from tests.integration.harness import ROUNDS_S, Swarm, check_journal, check_parity, run_toml

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
